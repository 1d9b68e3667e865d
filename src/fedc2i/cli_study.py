"""``fedc2i study``: a comparison of our own, and the tables that show it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fedc2i import many as crowd
from fedc2i import many_verdict
from fedc2i.engine.rounds import POINTS, Point
from fedc2i.methods.base import Method
from fedc2i.plans import Plan
from fedc2i.progress import ProgressView
from fedc2i.report import many as crowd_tables
from fedc2i.report.table import Row, Table
from fedc2i.report.tables import BEST_NOTE, POINTS_NOTE
from fedc2i.results import Result, Score
from fedc2i.runs import to_json
from fedc2i.store import Store
from fedc2i.study import GRID, OURS, PRESET, Found, Paired, Study, Verdict, compare, plain, trial, validation, verdict

app = typer.Typer(help="Comparisons beyond the paper's.", no_args_is_help=True)
SEEDS_NOTE = "Seeds change initial models and batches, not the data: standard errors say nothing about other images."
PAIRED_NOTE = (
    "difference: {ours} minus the row in points of the average that is named, mean over paired seeds with its standard "
    "error; wins / losses / ties: seeds in which {ours} is above, below, equal."
)
DataDir = Annotated[Path | None, typer.Option(help="Where the data lies; or the variable FEDC2I_DATA.")]
Seeds = Annotated[str, typer.Option(help="Reported, for example 0,1,2 or 0-9.")]
Rounds = Annotated[
    str | None, typer.Option(help="A trial with other rounds than the protocol's, in a folder of its own.")
]
Out = Annotated[Path, typer.Option(help="The tables; the runs lie in runs/ below it.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, all else on stderr.")]


@app.callback()
def _study() -> None:
    """Comparisons beyond the paper's."""


@app.command()
def plus(
    data_dir: DataDir = None,
    seeds: Seeds = "0-9",
    tuning_seeds: Annotated[str, typer.Option(help="Only to choose settings by; none of those reported.")] = "100-102",
    tuning: Annotated[bool, typer.Option(help="Choose settings on validation data, or report the presets.")] = True,
    rounds: Rounds = None,
    out: Out = Path("results"),
    device: Device = "auto",
    json: Json = False,
) -> None:
    """FedC²I⁺ against baselines and controls with the same extras; what is computed already is kept.

    Settings are chosen on validation data with seeds of their own; then every method runs with the reported seeds.
    """
    work = Study(_settings(data_dir, seeds, rounds, device), tuning_seeds if tuning else None, Store(out / "runs"))
    folder = _folder(out, rounds)
    undecided = bool(work.tuning_left())
    if not undecided:
        work.tune()
    view = _begin(folder, work.left(), "at least " * undecided)
    with view:
        if undecided:
            work.tune(view)
            view.expect(len(work.left()))
        main, parts = work.report(view)
    said = verdict(main)
    files = write(folder, work, main, parts, said)
    chosen = {f"{data} {name}": _setting(method, name) for (data, name), method in work.chosen.items()}
    _answer(folder, files, said, json, {"chosen": chosen})


@app.command()
def many(
    data_dir: DataDir = None,
    seeds: Seeds = "0-2",
    clients: Annotated[str, typer.Option(help="For each of the five domains.")] = "10,20",
    splits: Annotated[str, typer.Option(help="even, skewed (Dirichlet 0.5) or both.")] = "even,skewed",
    participation: Annotated[str, typer.Option(help="Shares of the clients that train in a round.")] = "100%,20%",
    gammas: Annotated[str, typer.Option(help="Of FedC²I; many is fedc2i-many.")] = "fixed,scaled,ramp,perplexity,many",
    influence: Annotated[str, typer.Option(help="exact, which is slow, first-order or both.")] = "exact,first-order",
    rounds: Rounds = None,
    out: Out = Path("results"),
    device: Device = "auto",
    json: Json = False,
) -> None:
    """FedC²I with many clients on Digit-5: λ within the own domain, accuracy beside FedAvg, first-order influence.

    What is computed already is kept. Each list, with commas, may be cut; the tables then show that part.
    """
    store = Store(out / "runs", models=False)
    chosen = (clients, splits, participation, gammas, influence)
    work = crowd.Many(_settings(data_dir, seeds, rounds, device), store, *chosen)
    folder = _folder(out, rounds)
    found = {}
    with _begin(folder, work.left()) as view:
        for setting in work.settings:
            view.heading(str(setting))
            found[setting] = work.compute(setting, view)
    said = many_verdict.verdict(found, work.trial)
    files = crowd_tables.write(folder, found, said, [*work.trial, SEEDS_NOTE, *work.notes])
    _answer(folder, files, said, json, {})


def _settings(data_dir: Path | None, seeds: str, rounds: str | None, device: str) -> dict[str, str]:
    given = {"data_dir": None if data_dir is None else str(data_dir), "rounds": rounds}
    return {"seeds": seeds, "device": device} | {name: value for name, value in given.items() if value is not None}


def _folder(out: Path, rounds: str | None) -> Path:
    return out if rounds is None else out / f"trial-{rounds}-rounds"  # a trial must not replace real tables


def _begin(folder: Path, left: list[Plan], about: str = "") -> _View:
    """Says what is to come; returns what shows how far it is."""
    view = _View(Console(stderr=True), len(left))
    view.say(f"Writing to {folder}; {about}{sum(len(plan.config.seeds) for plan in left)} runs to go")
    return view


def _answer(folder: Path, files: list[str], said: Verdict, json: bool, more: Mapping[str, Any]) -> None:
    if json:
        answer = {**more, "targets": dict(said.targets), "verdict": list(said.sentences)}
        print(to_json({"folder": str(folder), "files": files, **answer}), end="")
    else:
        for line in (*(str(folder / file) for file in files), "", *said.sentences):
            print(line)


class _View(ProgressView):
    """Progress of runs whose number is known only after the first of them, with lines between them."""

    def __enter__(self) -> _View:
        super().__enter__()
        return self

    def say(self, line: str) -> None:
        """A line of its own."""
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def expect(self, more: int) -> None:
        """So many are still to come."""
        self._runs = self._started + more


def write(folder: Path, work: Study, main: Found, parts: Found, said: Verdict) -> list[str]:
    """Every table as Markdown, CSV and LaTeX; returns the files' names."""
    notes = [*_how(work, main), SEEDS_NOTE, *_data_notes(main)]
    alone = [*trial(main), *notes]  # the verdict says so by itself
    labels = {name: _label(name, main) for name in main[next(iter(main))]}
    title = f"{main[next(iter(main))][OURS].method.title} on equal terms: test accuracy (%), {_seeds(main)}"
    written = scores(title, main, labels, alone).write(folder, "plus")
    written += paired(main, labels, [*notes, *said.sentences]).write(folder, "plus-paired")
    ours = labels[OURS]
    labels = {OURS: ours, **{name: f"with {name}" for name in parts[next(iter(parts))] if name != OURS}}
    title = f"{ours} with one option removed at a time: test accuracy (%), {_seeds(parts)}"
    more = "Nothing was chosen anew for what is left, and the differences need not add up; gamma=0 is FedAvg's mixing."
    written += scores(title, parts, labels, [more, *alone], differences=True).write(folder, "plus-parts")
    return written + (tuning_table(work).write(folder, "plus-tuning") if work.tuned else [])


def scores(title: str, found: Found, labels: Mapping[str, str], notes: list[str], differences: bool = False) -> Table:
    """One row per method and point, the averages of every benchmark as columns; with or without differences."""
    header: list[str] = ["Method", "Point"]
    for data, rows in found.items():
        header += [f"{data} {average}" for average in rows[OURS].averages("trained")]
        header += _paired_header(data, rows[OURS]) if differences else []
    table, pairs = Table(title, tuple(header)), compare(found)
    for name, label in labels.items():
        for point in POINTS:
            cells = [label, _point(found[next(iter(found))][name], point)]
            best: set[int] = set()
            for data, rows in found.items():
                for average, values in rows[name].averages(point).items():
                    means = [round(float(other.averages(point)[average].mean()), 2) for other in rows.values()]
                    best |= {len(cells)} if round(float(values.mean()), 2) == max(means) else set()
                    cells.append(str(Score.of(values)))
                cells += _paired_cells(pairs.get((data, name, point))) if differences else []
            table.rows.append(Row(tuple(cells), best=frozenset(best), ends_section=point == POINTS[-1]))
    paired_note = [PAIRED_NOTE.format(ours=_title(found))] if differences else []
    table.notes = [POINTS_NOTE, BEST_NOTE, *paired_note, *notes]
    return table


def paired(found: Found, labels: Mapping[str, str], notes: list[str]) -> Table:
    """FedC²I⁺ minus every other row, by point and benchmark."""
    header = [name for data, rows in found.items() for name in _paired_header(data, rows[OURS])]
    title = f"{labels[OURS]} minus every other method, paired over {_count(found)}"
    table, pairs = Table(title, ("Minus", "Point", *header)), compare(found)
    for name in labels:
        for point in POINTS if name != OURS else ():
            cells = [cell for data in found for cell in _paired_cells(pairs[data, name, point])]
            where = _point(found[next(iter(found))][name], point)
            table.rows.append(Row((labels[name], where, *cells), ends_section=point == POINTS[-1]))
    table.notes = [POINTS_NOTE, PAIRED_NOTE.format(ours=_title(found)), *notes]
    return table


def tuning_table(work: Study) -> Table:
    """Every grid point's validation accuracy, and the choice; no test accuracy was looked at."""
    benchmarks = list(dict.fromkeys(data for data, _ in work.tuned))
    header = [f"{data} {what}" for data in benchmarks for what in (*POINTS, "both", "choice")]
    seeds = ", ".join(map(str, work.tuning_seeds))
    table = Table(f"Choice of settings: validation accuracy (%), tuning seeds {seeds}", ("Method", "Setting", *header))
    for name in GRID:
        for results in zip(*(work.tuned[data, name] for data in benchmarks), strict=True):
            cells = [results[0].method.title, _setting(results[0].method, name)]
            best: set[int] = set()
            for data, result in zip(benchmarks, results, strict=True):
                taken = result.method == work.chosen[data, name]
                best |= set(range(len(cells), len(cells) + 4)) if taken else set()
                cells += [str(Score.of(validation(result, points))) for points in (*((p,) for p in POINTS), POINTS)]
                cells.append("chosen" if taken else "")
            table.rows.append(Row(tuple(cells), best=frozenset(best)))
        table.rows[-1] = replace(table.rows[-1], ends_section=True)
    table.notes = [
        "Chosen for each benchmark: the highest mean over both points, the tuning seeds and the clients that have "
        "validation data; a tie goes to the preset, then to the first. Test data and the reported seeds had no part.",
    ]
    return table


def _how(work: Study, found: Found) -> list[str]:
    """How settings came about."""
    if not work.tuning_seeds:
        return ["No setting was chosen (--no-tuning): every method runs as it comes."]
    sizes = {name: math.prod(map(len, GRID[name].values())) for name in GRID}
    many = ", ".join(f"{found[next(iter(found))][name].method.title} {size}" for name, size in sizes.items())
    seeds = ", ".join(map(str, work.tuning_seeds))
    return [
        f"Settings in brackets, but for presets, were chosen on validation accuracy with seeds {seeds}, which are not "
        f"reported, out of so many: {many}; see plus-tuning. Methods without brackets run as they come."
    ]


def _data_notes(found: Found) -> list[str]:
    return list(dict.fromkeys(note for rows in found.values() for note in rows[OURS].federation.notes))


def _label(name: str, found: Found) -> str:
    """The method's title, and for a tuned one its setting, by benchmark where they differ."""
    own = {data: rows[name].method for data, rows in found.items()}
    method, tuned = next(iter(own.values())), name.removesuffix(PRESET)
    if tuned not in GRID:
        return method.title
    settings = {data: _setting(other, tuned) for data, other in own.items()}
    same = len({*settings.values()}) == 1
    said = _setting(method, tuned) if same else "; ".join(f"{data}: {setting}" for data, setting in settings.items())
    return f"{method.title}{PRESET * (tuned != name)} ({said})"


def _setting(method: Method, name: str) -> str:
    return ", ".join(f"{option}={plain(getattr(method, option))}" for option in GRID[name])


def _title(found: Found) -> str:
    return found[next(iter(found))][OURS].method.title


def _count(found: Found) -> str:
    count = len(found[next(iter(found))][OURS].config.seeds)
    return "1 seed" if count == 1 else f"{count} seeds"


def _seeds(found: Found) -> str:
    seeds = found[next(iter(found))][OURS].config.seeds
    return f"{len(seeds)} seeds, mean ± sample sd" if len(seeds) > 1 else f"seed {seeds[0]}"


def _point(result: Result, point: Point) -> str:
    return f"{point} *" if point == result.method.headline else point


def _paired_header(data: str, result: Result) -> list[str]:
    average = list(result.averages("trained"))[-1]
    return [f"{data} {average} difference", f"{data} standard error", f"{data} wins / losses / ties"]


def _paired_cells(pair: Paired | None) -> list[str]:
    """Empty for FedC²I⁺ itself."""
    return ["", "", ""] if pair is None else pair.cells()
