"""The command ``fedc2i study``: comparisons of our own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fedc2i.analysis.verdicts import Verdict
from fedc2i.core.files import to_json
from fedc2i.report import study_many as crowd
from fedc2i.report import study_many_tables as crowd_tables
from fedc2i.report import study_many_verdict
from fedc2i.report import study_plus_tables as tables
from fedc2i.report.progress import ProgressView
from fedc2i.report.study_plus import BENCHMARKS, Study
from fedc2i.report.study_plus_verdict import verdict
from fedc2i.runs.cache import Store
from fedc2i.runs.plan import Plan

app = typer.Typer(help="Comparisons beyond the paper's.", no_args_is_help=True)
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
    benchmarks: Annotated[str, typer.Option(help="digit5, office10 or both.")] = "digit5,office10",
    rounds: Rounds = None,
    out: Out = Path("results"),
    device: Device = "auto",
    json: Json = False,
) -> None:
    """FedC²I⁺ against baselines and controls with the same extras; what is computed already is kept.

    Settings are chosen on validation data with seeds of their own; then every method runs with the reported seeds.
    One benchmark's tables have a folder of their own. A first look, in minutes: --no-tuning --seeds 0 --rounds 5.
    """
    settings, store = _settings(data_dir, seeds, rounds, device), Store(out / "runs")
    work = Study(settings, tuning_seeds if tuning else None, store, benchmarks)
    part = out if set(work.benchmarks) == set(BENCHMARKS) else out / f"only-{'-'.join(work.benchmarks)}"
    folder = _folder(part, rounds)
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
    files = tables.write(folder, work, main, parts, said)
    chosen = {f"{data} {name}": tables.setting(method, name) for (data, name), method in work.chosen.items()}
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
    said = study_many_verdict.verdict(found, work.trial)
    files = crowd_tables.write(folder, found, said, [*work.trial, tables.SEEDS_NOTE, *work.notes])
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

    def expect(self, more: int) -> None:
        """So many are still to come."""
        self._runs = self._started + more
