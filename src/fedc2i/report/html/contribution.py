"""The section "Contribution" of a page: sentences, gains as bars, givers and receivers as a heat map, and a CSV."""

from __future__ import annotations

import base64
import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from fedc2i.analysis.contribution.records import GAIN, Contribution, Row, read
from fedc2i.report.contribution_report import (
    MEASURE_WORDS,
    UNPROVEN,
    agreement_sentence,
    best_measure,
    ends_of,
    headline,
    how,
    interval_text,
    sentences,
)
from fedc2i.report.table import metric_words
from fedc2i.runs.results import Result

MOST_ROWS = 16  # clients in the heat map
MOST_CLASSES = 12  # effects on single classes that are listed
PALE = 0.25  # of the colour, for a value that may be chance


class HeatCell(NamedTuple):
    """A value with its interval, and how it is coloured: -1 costs most, 1 helps most."""

    value: str
    ends: str
    shade: float
    told: bool


class GainBar(NamedTuple):
    """A receiver's gain as a bar: percent of the width, from the left."""

    name: str
    text: str
    left: float
    width: float
    low: float
    high: float
    kind: str


@dataclass(frozen=True)
class ContributionView:
    """What the page shows of one run."""

    headline: str
    how: str
    sentences: tuple[str, ...]
    measure: str
    bars: tuple[GainBar, ...]
    zero: float
    rows: tuple[tuple[HeatCell | None, ...], ...]
    classes: tuple[str, ...]
    agreement: str
    notes: tuple[str, ...]
    csv: str  # base64


def read_contribution(folder: Path, result: Result) -> Contribution | None:
    """What lies in a run folder, with the metric that the page shows; None if there is nothing.

    Raises:
        UserError: if the file is damaged, or of another run.
    """
    found = read(folder, result.federation.names)
    return None if found is None else found.showing(result.config.metric)


def contribution_view(own: Contribution) -> ContributionView:
    """The words and cells of the section."""
    bars, zero = _bars(own)
    return ContributionView(
        headline(own),
        how(own),
        tuple(sentences(own)),
        MEASURE_WORDS[best_measure(own)],
        bars,
        zero,
        _heat(own) if len(own.clients) <= MOST_ROWS else (),
        _classes(own),
        agreement_sentence(own),
        own.notes,
        base64.b64encode(own.to_csv().encode()).decode(),
    )


def _bars(own: Contribution) -> tuple[tuple[GainBar, ...], float]:
    """Gains with intervals on a common scale, and where zero is on it."""
    words, gains = metric_words(own.metric), own.select(GAIN)
    known = [value for row in gains for value in (row.value, *ends_of(row), 0.0) if math.isfinite(value)]
    start = min(known, default=0.0)
    span = (max(known, default=0.0) - start) or 1.0

    def at(value: float) -> float:
        return round(100 * (value - start) / span, 2)

    bars = []
    for row in gains:
        if math.isnan(row.value):
            bars.append(GainBar(row.receiver, "–", at(0.0), 0.0, at(0.0), at(0.0), "unproven"))
            continue
        ends = sorted((at(0.0), at(row.value)))
        text = f"{row.value:+z.{words.digits}f} ({interval_text(row, words.digits, ' to ')})"
        kind = {"helps": "plus", "costs": "minus"}.get(row.verdict, "unproven")
        low, high = (row.value, row.value) if math.isnan(row.low) else ends_of(row)
        bars.append(GainBar(row.receiver, text, ends[0], ends[1] - ends[0], at(low), at(high), kind))
    return tuple(bars), at(0.0)


def _heat(own: Contribution) -> tuple[tuple[HeatCell | None, ...], ...]:
    digits = metric_words(own.metric).digits
    pairs = {(row.receiver, row.giver): row for row in own.select(best_measure(own))}
    top = max((abs(row.value) for row in pairs.values() if math.isfinite(row.value)), default=0.0) or 1.0
    return tuple(tuple(_cell(pairs.get((r, g)), top, digits) for g in own.clients) for r in own.clients)


def _cell(row: Row | None, top: float, digits: int) -> HeatCell | None:
    if row is None or math.isnan(row.value):
        return None
    told = row.verdict != UNPROVEN
    shade = round(row.value / top * (1.0 if told else PALE), 3)
    return HeatCell(f"{row.value:+z.{digits}f}", interval_text(row, digits, " to "), shade, told)


def _classes(own: Contribution) -> tuple[str, ...]:
    """Effects on single classes beyond chance, the largest first."""
    metric = own.metric if own.metric in ("accuracy", "loss") else "loss"
    words = metric_words(metric)
    found = [row for row in own.rows if row.label and (row.metric, row.point) == (metric, own.point)]
    if not found:
        return ()
    told = sorted((row for row in found if row.verdict != UNPROVEN), key=lambda row: -abs(row.value))
    said = [
        f"{row.giver} {row.verdict} {row.receiver} on {row.label}: {row.value:+z.{words.digits}f} {words.name} "
        f"({interval_text(row, words.digits, ' to ')})"
        for row in told[:MOST_CLASSES]
    ]
    more = [f"and {len(told) - MOST_CLASSES} more, see the CSV"] if len(told) > MOST_CLASSES else []
    return (f"{len(told)} of {len(found)} effects on single classes are beyond chance ({words.name}).", *said, *more)
