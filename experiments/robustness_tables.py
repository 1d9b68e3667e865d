"""The study of dishonest clients as tables: honest clients' accuracy, its change, and the weight attackers get."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from experiments.robustness_verdict import FLOOR, NONE, WEIGHTS, Attacked, Found, Measured
from experiments.verdict import Verdict
from fedc2i.engine.records import POINTS, Point
from fedc2i.report.comparison import BEST
from fedc2i.report.table import POINT_COLUMN, POINT_NOTE, Row, Table, starred
from fedc2i.runs.folder import slug
from fedc2i.runs.results import Array, Score

HONEST_NOTE = (
    "Mean over the honest clients; under none, too, over the same clients. Attackers train like the others (label-flip "
    "with flipped labels) and send something else; the server rejects an upload that is not finite or more than 100 "
    "times as large as the median."
)
FLOOR_NOTE = "Local sends nothing: no attack reaches it, and it is run once."
CHANGE_NOTE = "Under the attack minus without, in points, paired over seeds: a minus is a loss."
WEIGHTS_NOTE = (
    "The weight (%) that an honest client gives to the attackers' models, or to their classifier rows, mean over "
    "rounds, clients and classes; 0 for a rejected upload. Under none: the weight of the same clients when honest."
)
SEEDS_NOTE = "Seeds change initial models and batches, not the data or a named attacker."


def tables(found: Found, verdict: Verdict, notes: Sequence[str]) -> dict[str, Table]:
    """By file name; the verdict is below the accuracies."""
    made = {}
    for data, own in found.items():
        stem = f"robustness-{slug(data)}"
        about = [f"Attackers on {data}: {own.attackers}.", SEEDS_NOTE, *notes]
        made[stem] = accuracy(data, own, [*about, *verdict.sentences])
        if own.attacks:
            made[f"{stem}-change"] = change(data, own, about)
        if any(row.weights for row in own.rows[NONE].values()):
            made[f"{stem}-weights"] = weights(data, own, about)
    return made


def accuracy(data: str, own: Attacked, notes: Sequence[str]) -> Table:
    """Honest clients' test accuracy, one row per method and point, one column per attack."""
    title = f"Honest clients of {data} under attack: test accuracy (%), {_seeds(own)}"
    table = Table(title, ("Method", POINT_COLUMN, *own.rows), averages=len(own.rows), bold=BEST)
    _fill(table, own, [*own.rows[NONE]], [*own.rows], lambda a, name, point: own.rows[a][name].accuracy[point], _score)
    table.notes = [POINT_NOTE, HONEST_NOTE, FLOOR_NOTE, *notes]
    return table


def change(data: str, own: Attacked, notes: Sequence[str]) -> Table:
    """How honest clients' accuracy changes under each attack."""
    title = f"Change of honest clients' accuracy on {data} under attack (points), {_seeds(own)}"
    table = Table(title, ("Method", POINT_COLUMN, *own.attacks), bold="the most favourable change, Local aside")
    _fill(table, own, [name for name in own.rows[NONE] if name != FLOOR], own.attacks, own.change, _signed)
    table.notes = [POINT_NOTE, HONEST_NOTE, CHANGE_NOTE, *notes]
    return table


def weights(data: str, own: Attacked, notes: Sequence[str]) -> Table:
    """The weight that honest clients give to the attackers, beside the equal share."""
    title = f"Weight that honest clients of {data} give to attackers (%), {_seeds(own)}"
    header = ("Method", "Weights", "equal share", *own.rows)
    table = Table(title, header, averages=1 + len(own.rows), bold="less than the equal share")
    for name, row in own.rows[NONE].items():
        for kind in row.weights:
            cells, best = [row.label, WEIGHTS[kind], f"{100 * row.equal.mean():.2f}"], set[int]()
            for rows in own.rows.values():
                values = 100 * rows[name].weights[kind]
                best |= {len(cells)} if _rounded(values) < _rounded(100 * row.equal) else set()
                cells.append(_score(values))
            table.rows.append(Row(tuple(cells), best=frozenset(best)))
    table.notes = [WEIGHTS_NOTE, *notes]
    return table


def _fill(
    table: Table,
    own: Attacked,
    methods: Sequence[str],
    attacks: Sequence[str],
    values: Callable[[str, str, Point], Array],
    text: Callable[[Array], str],
) -> None:
    """A row for each method and point, a cell for each attack, the highest of each marked."""
    for name in methods:
        row: Measured = own.rows[NONE][name]
        for point in POINTS:
            cells, best = [row.label, starred(point, row.headline)], set[int]()
            for attack in attacks:
                found = values(attack, name, point)
                top = max(_rounded(values(attack, other, point)) for other in methods)
                best |= {len(cells)} if _rounded(found) == top else set()
                cells.append(text(found))
            table.rows.append(Row(tuple(cells), best=frozenset(best), ends_section=point == POINTS[-1]))


def _rounded(values: Array) -> float:
    return round(float(values.mean()), 2)


def _score(values: Array) -> str:
    return str(Score.of(values))


def _signed(values: Array) -> str:
    score = Score.of(values)
    return f"{score.mean:+z.2f}" + ("" if score.sd is None else f" ± {score.sd:.2f}")


def _seeds(own: Attacked) -> str:
    count = len(next(iter(own.rows[NONE].values())).equal)
    return f"{count} seeds, mean ± sample sd" if count > 1 else "1 seed"
