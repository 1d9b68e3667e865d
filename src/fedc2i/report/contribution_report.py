"""A contribution in words and as tables: a sentence for each member, gains over training alone, who helps whom."""

from __future__ import annotations

import math

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from fedc2i.analysis.contribution.records import GAIN, Agreement, Contribution, Row
from fedc2i.core.errors import one_line
from fedc2i.report.table import WHEN, counted, metric_words

MEASURE_WORDS = {"shapley": "Shapley value", "leave-one-out": "leave-one-out", "pairwise": "pairwise"}
UNPROVEN = "may be chance"
MOST_SHOWN = 12  # clients in a table of the terminal
UNCHANGED = "no change"  # in any seed or resample: the interval is a point
NO_INTERVAL = "no interval"
_STYLE = {"helps": "green", "costs": "red"}


def headline(own: Contribution) -> str:
    """How many gains and pairs are certain."""
    gains, pairs = own.select(GAIN), own.select(best_measure(own))
    told = [row for row in gains if row.verdict != UNPROVEN]
    better = sum(row.value > 0 for row in told)
    text = f"{better} of {counted(len(gains), 'client')} gain{'s' * (better == 1)} from taking part beyond chance"
    if len(told) > better:
        text += f", {len(told) - better} lose{'s' * (len(told) - better == 1)}"
    sure = sum(row.verdict != UNPROVEN for row in pairs)
    return f"{text}; {sure} of {len(pairs)} pairs (giver, receiver) have an effect beyond chance."


def best_measure(own: Contribution) -> str:
    """Shapley values where they were computed; else what each giver adds to everyone."""
    return "shapley" if own.select("shapley") else "leave-one-out"


def sentences(own: Contribution) -> list[str]:
    """One for each member: what it gains from taking part, and from whom."""
    return [member_sentence(own, name) for name in own.clients]


def member_sentence(own: Contribution, name: str) -> str:
    """What a member gains, most from whom, and who costs it."""
    words, row = metric_words(own.metric), gain_of(own, name)
    if math.isnan(row.value):
        return f"{name}: its test samples do not define {words.name}."
    verb = {"helps": "gains", "costs": "loses"}.get(row.verdict)
    if is_unchanged(row):
        samples = counted(own.samples[name], "test sample")
        text = f"{name}: taking part changes its {words.name} in no seed ({samples})"
    elif verb is None:
        text = f"{name}: a difference of {_value(row, own)} from taking part {UNPROVEN} {_ends(row, own)}"
    else:
        text = f"{name} {verb} {_value(row, own, signed=False)} from taking part {_ends(row, own)}"
    first = first_giver(own, name)
    if first is not None and first.value > 0:
        sure = "" if first.verdict == "helps" else f", {UNPROVEN}"
        most = f"most comes from {first.giver}" if verb == "gains" else f"{first.giver} adds most"
        text += f"; {most} ({_value(first, own)}{sure})"
    costs = [pair for pair in givers_of(own, name) if pair.verdict == "costs"]
    if costs:
        listed = ", ".join(f"{pair.giver} ({_value(pair, own)})" for pair in costs)
        text += f"; {listed} cost{'s' * (len(costs) == 1)} it"
    return text + "."


def is_unchanged(row: Row) -> bool:
    """Whether no seed and no resample of the test samples has any difference."""
    return row.low == row.high == 0


def interval_text(row: Row, digits: int, between: str) -> str:
    """Both ends of the interval, if it has one."""
    if math.isnan(row.low):
        return NO_INTERVAL
    low, high = ends_of(row)
    return UNCHANGED if is_unchanged(row) else f"{low:+z.{digits}f}{between}{high:+z.{digits}f}"


def ends_of(row: Row) -> tuple[float, float]:
    """The ends of the interval, as far as they can be reached."""
    return reachable(row.low, row.metric), reachable(row.high, row.metric)


def reachable(difference: float, metric: str) -> float:
    """Two percentages differ by at most 100 points, whatever the end of an interval says."""
    return float(np.clip(difference, -100.0, 100.0)) if metric_words(metric).points else difference


def gain_of(own: Contribution, name: str) -> Row:
    """What a member gains from taking part."""
    return next(row for row in own.select(GAIN) if row.receiver == name)


def givers_of(own: Contribution, name: str) -> list[Row]:
    """The pairs of a receiver, the best giver first."""
    pairs = [row for row in own.select(best_measure(own)) if row.receiver == name and not math.isnan(row.value)]
    return sorted(pairs, key=lambda row: -row.value)


def first_giver(own: Contribution, name: str) -> Row | None:
    """The giver with the largest value, if any is known."""
    return next(iter(givers_of(own, name)), None)


def _value(row: Row, own: Contribution, signed: bool = True) -> str:
    words = metric_words(own.metric)
    number = f"{row.value:+z.{words.digits}f}" if signed else f"{abs(row.value):.{words.digits}f}"
    unit = f"{words.points} of {words.name}" if words.points else f" {words.name}"
    return number + (unit if row.measure == GAIN else "")


def _ends(row: Row, own: Contribution) -> str:
    digits = metric_words(own.metric).digits
    if math.isnan(row.low):
        return f"({NO_INTERVAL})"
    low, high = ends_of(row)
    if row.value < 0 and row.verdict != UNPROVEN:
        low, high = -high, -low
    return f"(95 % interval {low:z.{digits}f} to {high:z.{digits}f})"


def agreement_sentence(own: Contribution) -> str:
    """How far the method's own λ agrees with the values; empty if it has none."""
    found = lambda_agreement(own)
    if found is None:
        return ""
    if math.isnan(found.rho):
        return "λ ranks too few clients to compare with these values."
    chance = "more than by chance" if found.p <= 0.05 else "which chance alone may give"
    return (
        f"On these data λ (mean of rounds) ranks givers with ρ {found.rho:+.2f} to measured contributions "
        f"(p {found.p:.2f}, {chance}), and is on the right side of an equal share in {100 * found.sign:.0f} % of pairs."
    )


def lambda_agreement(own: Contribution) -> Agreement | None:
    """Of λ, mean of rounds, with the values that are shown."""
    wanted = "λ mean of rounds", own.metric, own.point
    return next((one for one in own.agreement if (one.weight, one.metric, one.point) == wanted), None)


def how(own: Contribution) -> str:
    """What was computed, in a sentence."""
    words = metric_words(own.metric)
    runs = f"{counted(own.runs, 'run')} of {counted(own.rounds, 'round')}, {counted(len(own.seeds), 'seed')}"
    kind = "exact Shapley values over all coalitions" if own.exact else f"Shapley values over {own.orders} orders"
    if not own.select("shapley"):
        kind = "leave-one-out"
    return (
        f"{own.method} on {own.data}: {kind}, {runs}; {words.title} of the receiver's test samples {WHEN[own.point]}, "
        "against training alone. Positive: better for the receiver."
    )


def print_contribution(console: Console, own: Contribution) -> None:
    """The headline, a row for each member, the table of givers and receivers, and the notes."""
    _print(console, headline(own), "bold")
    _print(console, how(own))
    console.print(_gain_table(own))
    if len(own.clients) <= MOST_SHOWN:
        console.print(_pair_table(own))
    _print(console, "Intervals: 95 %, of each number alone; verdicts are corrected for all pairs (Holm).")
    _print(console, f"*: an effect beyond chance; (?) or none: it {UNPROVEN}.")
    for line in (agreement_sentence(own), *own.notes):
        _print(console, line)


def _gain_table(own: Contribution) -> RichTable:
    words = metric_words(own.metric)
    table = RichTable(box=box.SIMPLE_HEAD, title=f"Alone and together, {words.title}", title_justify="left")
    for title in ("client", "alone", "together", "difference", "verdict", "gives most"):
        right, wraps = title in ("alone", "together", "difference"), title in ("verdict", "gives most")
        table.add_column(title, justify="right" if right else "left", no_wrap=not wraps)
    for name in own.clients:
        score, row, first = own.score(name), gain_of(own, name), first_giver(own, name)
        numbers = [f"{value:.{words.digits}f}".replace("nan", "–") for value in (score.alone, score.together)]
        giver = "" if first is None or first.value <= 0 else f"{first.giver} {_value(first, own)}"
        sure = "" if first is None or first.verdict != UNPROVEN or not giver else " (?)"
        texts = [Text(one_line(cell)) for cell in (name, *numbers, _said(row), giver + sure)]
        table.add_row(*texts[:3], _cell(row, words.digits), *texts[3:], style=_STYLE.get(row.verdict, "dim"))
    return table


def _said(row: Row) -> str:
    return {"helps": "gains", "costs": "loses"}.get(row.verdict, UNPROVEN)


def _pair_table(own: Contribution) -> RichTable:
    digits, measure = metric_words(own.metric).digits, best_measure(own)
    by_pair = {(row.receiver, row.giver): row for row in own.select(measure)}
    table = RichTable(box=box.SIMPLE_HEAD, title=f"Who helps whom, {MEASURE_WORDS[measure]}", title_justify="left")
    table.add_column("receiver ↓ giver →")
    for name in own.clients:
        table.add_column(Text(one_line(name)), justify="right")
    for receiver in own.clients:
        cells = [_cell(by_pair.get((receiver, giver)), digits) for giver in own.clients]
        table.add_row(Text(one_line(receiver)), *cells)
    return table


def _cell(row: Row | None, digits: int) -> Text:
    if row is None or math.isnan(row.value):
        return Text("–" if row is not None else "")
    mark = "" if row.verdict == UNPROVEN else " *"
    text = f"{row.value:+z.{digits}f}{mark}\n{interval_text(row, digits, ' .. ')}"
    return Text(text, _STYLE.get(row.verdict, "dim"))


def _print(console: Console, line: str, style: str = "") -> None:
    if line:
        console.print(line, style=style, highlight=False, markup=False, soft_wrap=True)
