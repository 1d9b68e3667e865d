"""The study of many clients as tables: λ within the own domain, accuracy beside FedAvg, first-order influence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from experiments.grid import SEEDS_NOTE
from experiments.many_verdict import TIMES, TOLERANCE, Compared, Found, Measured, apart
from experiments.verdict import Verdict
from fedc2i.engine.records import POINTS
from fedc2i.report.table import SHORT, Row, Table
from fedc2i.runs.results import Array, Score

SETTING_NOTE = (
    "M: the clients of all five domains; even: each domain split at random into equal parts, skewed: label skew, "
    "Dirichlet(0.5); then the share of clients that train in a round."
)
SHARE_NOTE = (
    "in the domain: the λ that a client gives to the clients of its own domain, itself among them, in the exchange "
    "after the last round, mean over the clients that measured it; peers: the same without itself; uniform: what equal "
    "weights give; γ: the value that was used, mean over clients."
)
PERPLEXITY_NOTE = "perplexity(k) is given the number of clients of a domain, k, but not which clients they are."
MANY_NOTE = (
    "FedC²I for many: the preset fedc2i-many, chosen by validation accuracy at M = 100, even, seeds 100 and 101. It "
    "ignores old models; the other rows keep every client's last model, however old."
)
DIFFERENCE_NOTE = (
    "before, after: before and after local training; difference: minus FedAvg's {average} in points, mean over paired "
    "seeds with its standard error; wins / losses / ties: seeds in which the row is above, below, equal."
)
FIRST_ORDER_NOTE = (
    f"first-order minus exact influence, each in its own run; kept: the domain shares differ by at most "
    f"{100 * TOLERANCE:g} points; then the difference of {{average}} before and after local training, mean over paired "
    "seeds with its standard error."
)


def tables(found: Found, verdict: Verdict, notes: Sequence[str], warnings: Sequence[str]) -> dict[str, Table]:
    """By file name; the verdict is below the accuracies."""
    always = [SETTING_NOTE, PERPLEXITY_NOTE, MANY_NOTE, SEEDS_NOTE, *notes]
    made = {
        "many-domain-share": domain_share(found, [*always, *warnings]),
        "many-accuracy": accuracy(found, [*always, *verdict.sentences]),
    }
    if any(own.pairs() for own in found.values()):
        made["many-first-order"] = first_order(found, [*always, *warnings])
    return made


def domain_share(found: Found, notes: Sequence[str]) -> Table:
    """λ within the own domain for every setting, γ and form of influence."""
    header = ("in the domain (%)", "times uniform", "on peers (%)", "times uniform", "uniform (%)", "γ")

    def rows(own: Compared) -> list[Row]:
        lines = []
        for row in own.rows.values():
            values = [100 * row.share(), row.share("times"), 100 * row.share("peers"), row.share("peers_times")]
            values += [100 * row.share("uniform"), row.share("gamma")]
            lines.append(Row((row.label, *map(_score, values)), best=frozenset({2, 3} if row.keeps_enough else ())))
        return lines

    bold = f"at least {TIMES:g} times the uniform share"
    return _table("λ within the own domain", header, found, rows, [SHARE_NOTE, *notes], bold)


def accuracy(found: Found, notes: Sequence[str]) -> Table:
    """Test accuracy at both points, and its difference from FedAvg's."""
    averages = list(_some(found).accuracy["trained"])
    after = ("difference", "standard error", "wins / losses / ties")
    header = [f"{SHORT[point]}: {what}" for point in POINTS for what in (*averages, *after)]

    def rows(own: Compared) -> list[Row]:
        lines = []
        for row in (own.fedavg, *own.rows.values()):
            cells = [row.label]
            for point in POINTS:
                cells += [_score(row.accuracy[point][average]) for average in averages]
                cells += [""] * len(after) if row is own.fedavg else row.minus(own.fedavg, point).cells()
            lines.append(Row(tuple(cells)))
        return lines

    notes = [DIFFERENCE_NOTE.format(average=averages[-1]), *notes]
    return _table("Many clients: test accuracy (%)", header, found, rows, notes)


def first_order(found: Found, notes: Sequence[str]) -> Table:
    """First-order against exact influence, where both were run."""
    differences = [f"{SHORT[point]}: {what}" for point in POINTS for what in ("difference", "standard error")]
    header = ("exact (%)", "first-order (%)", "difference", "kept", *differences)

    def rows(own: Compared) -> list[Row]:
        lines = []
        for near, exact in own.pairs().values():
            difference = apart((near, exact))
            cells = [exact.label, _score(100 * exact.share()), _score(100 * near.share()), f"{100 * difference:+z.2f}"]
            cells.append("yes" if abs(difference) <= TOLERANCE else "no")
            cells += [cell for point in POINTS for cell in near.minus(exact, point).cells()[:2]]
            lines.append(Row(tuple(cells)))
        return lines

    notes = [FIRST_ORDER_NOTE.format(average=list(_some(found).accuracy["trained"])[-1]), *notes]
    return _table("λ within the own domain by exact and by first-order influence", header, found, rows, notes)


def _table(
    title: str,
    header: Sequence[str],
    found: Found,
    rows: Callable[[Compared], list[Row]],
    notes: Sequence[str],
    bold: str = "",
) -> Table:
    """A section for each setting, whose name comes before the cells of its rows."""
    count = len(_some(found).accuracy["trained"]["Avg"])
    seeds = f"{count} seeds, mean ± sample sd" if count > 1 else "1 seed"
    table = Table(f"{title}, {seeds}", ("Setting", "Method", *header), notes=list(notes), bold=bold)
    for setting, own in found.items():
        lines = [replace(row, cells=(str(setting), *row.cells)) for row in rows(own)]
        table.rows += [replace(row, ends_section=row is lines[-1]) for row in lines]
    return table


def _some(found: Found) -> Measured:
    return next(iter(found.values())).fedavg


def _score(values: Array) -> str:
    return str(Score.of(values))
