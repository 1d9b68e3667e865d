"""The study of dishonest clients as tables: honest clients' accuracy, its change, and the weight attackers get."""

from __future__ import annotations

from pathlib import Path

from fedc2i.analysis.verdicts import Verdict
from fedc2i.engine.records import POINTS, Point
from fedc2i.report.study_robustness_verdict import FLOOR, NONE, WEIGHTS, Attacked, Found, Measured
from fedc2i.report.table import Row, Table
from fedc2i.report.tables import BEST_NOTE
from fedc2i.runs.folder import slug
from fedc2i.runs.results import Array, Score

POINTS_NOTE = (
    "received: the model a client starts a round from; trained: after its local run; *: the point that the method's "
    "authors report."
)
HONEST_NOTE = (
    "Mean over the honest clients; under none, too, it is over these. Attackers train as everyone does, but for "
    "label-flip, and send something else; an upload that is not finite, or more than 100 times as large as the median, "
    "is left out."
)
FLOOR_NOTE = "Local sends nothing: no attack reaches it, and it is run once."
LOST_NOTE = (
    "Under the attack minus without, in points, paired over seeds: a minus is a loss; bold: the most favourable "
    "change, Local aside."
)
WEIGHTS_NOTE = (
    "The weight (%) that an honest client gives to the attackers' models, or to their classifier rows, mean over "
    "rounds, clients and classes; 0 for an upload that is left out; bold: less than the equal share. Under none it is "
    "what the same clients get when they are honest."
)


def write(folder: Path, found: Found, said: Verdict, notes: list[str]) -> list[str]:
    """Every table as Markdown, CSV and LaTeX; returns the files' names."""
    written = []
    for data, own in found.items():
        stem = f"robustness-{slug(data)}"
        about = _about(data, own, notes)
        written += accuracy(data, own, [*about, *said.sentences]).write(folder, stem)
        if own.attacks:
            written += lost(data, own, about).write(folder, f"{stem}-lost")
        if any(row.weights for row in own.rows[NONE].values()):
            written += weights(data, own, about).write(folder, f"{stem}-weights")
    return written


def shown(found: Found, notes: list[str]) -> list[Table]:
    """What a terminal shows of each data set: accuracy, and the weights where any were measured."""
    tables = []
    for data, own in found.items():
        tables.append(accuracy(data, own, _about(data, own, notes)))
        if any(row.weights for row in own.rows[NONE].values()):
            tables.append(weights(data, own, []))
    return tables


def _about(data: str, own: Attacked, notes: list[str]) -> list[str]:
    return [f"Attackers on {data}: {own.attackers}.", *notes]


def accuracy(data: str, own: Attacked, notes: list[str]) -> Table:
    """Honest clients' test accuracy, one row per method and point, one column per attack."""
    title = f"Honest clients of {data} under attack: test accuracy (%), {_seeds(own)}"
    table = Table(title, ("Method", "Point", *own.rows), averages=len(own.rows))
    for name, row in own.rows[NONE].items():
        for point in POINTS:
            values = [own.rows[attack][name].accuracy[point] for attack in own.rows]
            tops = [max(_rounded(other.accuracy[point]) for other in rows.values()) for rows in own.rows.values()]
            best = {k for k, (mine, top) in enumerate(zip(values, tops, strict=True), 2) if _rounded(mine) == top}
            cells = (row.label, _point(row, point), *(str(Score.of(one)) for one in values))
            table.rows.append(Row(cells, best=frozenset(best), ends_section=point == POINTS[-1]))
    table.notes = [POINTS_NOTE, HONEST_NOTE, FLOOR_NOTE, BEST_NOTE, *notes]
    return table


def lost(data: str, own: Attacked, notes: list[str]) -> Table:
    """How much worse off, or better, honest clients are by each attack."""
    title = f"Change of honest clients' accuracy on {data} under attack (points), {_seeds(own)}"
    table = Table(title, ("Method", "Point", *own.attacks))
    methods = [name for name in own.rows[NONE] if name != FLOOR]
    for name in methods:
        row = own.rows[NONE][name]
        for point in POINTS:
            cells, best = [row.label, _point(row, point)], set()
            for attack in own.attacks:
                changes = own.lost(attack, name, point)
                top = max(_rounded(own.lost(attack, other, point)) for other in methods)
                best |= {len(cells)} if _rounded(changes) == top else set()
                cells.append(_signed(changes))
            table.rows.append(Row(tuple(cells), best=frozenset(best), ends_section=point == POINTS[-1]))
    table.notes = [POINTS_NOTE, HONEST_NOTE, LOST_NOTE, *notes]
    return table


def weights(data: str, own: Attacked, notes: list[str]) -> Table:
    """What honest clients give to the attackers, beside the equal share."""
    title = f"Weight that honest clients of {data} give to attackers (%), {_seeds(own)}"
    table = Table(title, ("Method", "Weights", "equal share", *own.rows), averages=1 + len(own.rows))
    for name, row in own.rows[NONE].items():
        for kind in row.weights:
            cells, best = [row.label, WEIGHTS[kind], f"{100 * row.equal.mean():.2f}"], set()
            for rows in own.rows.values():
                values = rows[name].weights[kind]
                best |= {len(cells)} if _rounded(100 * values) < _rounded(100 * row.equal) else set()
                cells.append(str(Score.of(100 * values)))
            table.rows.append(Row(tuple(cells), best=frozenset(best)))
    table.notes = [WEIGHTS_NOTE, *notes]
    return table


def _point(row: Measured, point: Point) -> str:
    return f"{point} *" if point == row.headline else point


def _rounded(values: Array) -> float:
    return round(float(values.mean()), 2)


def _signed(values: Array) -> str:
    score = Score.of(values)
    return f"{score.mean:+z.2f}" + ("" if score.sd is None else f" ± {score.sd:.2f}")


def _seeds(own: Attacked) -> str:
    count = len(next(iter(own.rows[NONE].values())).equal)
    return f"{count} seeds, mean ± sample sd" if count > 1 else "1 seed"
