"""The study of many clients as tables: λ within the own domain, accuracy beside FedAvg, first-order influence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fedc2i.analysis.verdicts import Verdict
from fedc2i.engine.records import POINTS
from fedc2i.report.study_many_verdict import TIMES, TOLERANCE, Found, Measured, apart, keeps, within
from fedc2i.report.table import Row, Table
from fedc2i.runs.results import Array, Score

SETTING_NOTE = (
    "M: the clients of all five domains; even: each domain dealt out at random in equal parts, skewed: label skew, "
    "Dirichlet(0.5); the share of clients that train in a round."
)
MASS_NOTE = (
    "in the domain: the λ that a client gives to the clients of its own domain, itself among them, in the exchange "
    "after the last round, mean over the clients that measured it; peers: the same without itself; uniform: what equal "
    f"weights give; bold: at least {TIMES:g} times that; γ: what it came to, mean over clients."
)
PERPLEXITY_NOTE = (
    "perplexity(k) is told how many clients a domain has, k, though not which: weights spread evenly over the own "
    "domain have k effective models."
)
MANY_NOTE = (
    "FedC²I for many: the preset fedc2i-many, chosen by validation accuracy at M = 100, even, seeds 100 and 101. It "
    "leaves old models out; the other rows keep every client's last model, however old."
)
POINTS_NOTE = "received: the model a client starts a round from; trained: after its local run."
DIFFERENCE_NOTE = (
    "difference: minus FedAvg's {average} in points, mean over paired seeds with its standard error; wins / losses / "
    "ties: seeds in which the row is above, below, equal."
)
FIRST_ORDER_NOTE = (
    f"first-order minus exact influence, both as runs of their own; kept: the difference of λ in the domain is at most "
    f"{100 * TOLERANCE:g} points; then the difference of {{average}} at both points, mean over paired seeds with its "
    "standard error."
)


def write(folder: Path, found: Found, said: Verdict, notes: list[str]) -> list[str]:
    """Every table as Markdown, CSV and LaTeX; returns the files' names."""
    notes = [SETTING_NOTE, PERPLEXITY_NOTE, MANY_NOTE, *notes]
    unsaid = [note for note in notes if note not in said.sentences]
    written = mass(found, notes).write(folder, "many-mass")
    written += accuracy(found, [*unsaid, *said.sentences]).write(folder, "many-accuracy")
    if any(own.pairs() for own in found.values()):
        written += first_order(found, notes).write(folder, "many-first-order")
    return written


def mass(found: Found, notes: list[str]) -> Table:
    """λ within the own domain for every setting, γ and form of influence."""
    header = ("in the domain (%)", "times uniform", "on peers (%)", "times uniform", "uniform (%)", "γ")
    table = Table(f"λ within the own domain, {_seeds(found)}", ("Setting", "Method", *header))
    for setting, own in found.items():
        for row in own.rows.values():
            values = [100 * row.mass(), row.mass("times"), 100 * row.mass("peers"), row.mass("peers_times")]
            values += [100 * row.mass("uniform"), row.mass("gamma")]
            best = frozenset({2, 3} if keeps(row) else ())
            table.rows.append(Row((str(setting), row.label, *map(_score, values)), best=best))
        _end_section(table)
    table.notes = [MASS_NOTE, *notes]
    return table


def accuracy(found: Found, notes: list[str]) -> Table:
    """Test accuracy at both points, and what it is above FedAvg's."""
    averages = list(_some(found).accuracy["trained"])
    after = ("difference", "standard error", "wins / losses / ties")
    header = [f"{point} {what}" for point in POINTS for what in (*averages, *after)]
    title = f"Many clients: test accuracy (%), {_seeds(found)}"
    table = Table(title, ("Setting", "Method", *header))
    for setting, own in found.items():
        for row in (own.fedavg, *own.rows.values()):
            cells = []
            for point in POINTS:
                cells += [_score(row.accuracy[point][average]) for average in averages]
                cells += [""] * len(after) if row is own.fedavg else row.minus(own.fedavg, point).cells()
            table.rows.append(Row((str(setting), row.label, *cells)))
        _end_section(table)
    table.notes = [POINTS_NOTE, DIFFERENCE_NOTE.format(average=averages[-1]), *notes]
    return table


def first_order(found: Found, notes: list[str]) -> Table:
    """First-order against exact influence, where both were run."""
    differences = [f"{point} {what}" for point in POINTS for what in ("difference", "standard error")]
    header = ("exact (%)", "first-order (%)", "difference", "kept", *differences)
    title = f"λ within the own domain by exact and by first-order influence, {_seeds(found)}"
    table = Table(title, ("Setting", "Method", *header))
    for setting, own in found.items():
        for pair in own.pairs().values():
            near, exact = pair
            cells = [_score(100 * exact.mass()), _score(100 * near.mass()), f"{100 * apart(pair):+z.2f}"]
            cells.append("yes" if within(apart(pair)) else "no")
            cells += [cell for point in POINTS for cell in near.minus(exact, point).cells()[:2]]
            table.rows.append(Row((str(setting), exact.label, *cells)))
        _end_section(table)
    table.notes = [FIRST_ORDER_NOTE.format(average=list(_some(found).accuracy["trained"])[-1]), *notes]
    return table


def _end_section(table: Table) -> None:
    table.rows[-1:] = [replace(row, ends_section=True) for row in table.rows[-1:]]


def _some(found: Found) -> Measured:
    return next(iter(found.values())).fedavg


def _seeds(found: Found) -> str:
    count = len(_some(found).accuracy["trained"]["Avg"])
    return f"{count} seeds, mean ± sample sd" if count > 1 else "1 seed"


def _score(values: Array) -> str:
    return str(Score.of(values))
