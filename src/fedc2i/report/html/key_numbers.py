"""The few numbers at the top of a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedc2i.analysis.weights import DomainShare, of_last_round
from fedc2i.engine.records import POINTS
from fedc2i.report.html.side_by_side import common_seeds, differences, last_average, named, restricted, rounds_text
from fedc2i.report.table import WHEN, counted, percent
from fedc2i.runs.results import Result, Score


@dataclass(frozen=True)
class KeyNumber:
    """A number, its name, and a line below it."""

    value: str
    name: str
    note: str


def key_numbers(results: Sequence[Result]) -> list[KeyNumber]:
    """The best average at both points, then the size of the run; of one run also the λ that clients keep."""
    seeds = common_seeds(results)
    found = []
    for point in POINTS:
        best = results[differences(results, point)[0]]
        title, values = last_average(restricted(best, seeds) if seeds else best, point)
        note = best.label if len(results) > 1 else f"{title} over clients, % of test images"
        found.append(KeyNumber(str(Score.of(values)), f"accuracy {WHEN[point]}", note))
    first = results[0]
    vector = of_last_round(first, "influence_vector")
    if len(results) == 1 and vector.ndim == 2:
        share = DomainShare.of(vector, first.federation.names)
        if np.isfinite(share.itself):
            equal = f"of λ on a client's own model; equal share: {percent(share.uniform_itself)}"
            found.append(KeyNumber(f"{100 * share.itself:.0f} %", "kept by the client", equal))
    rounds, _, unit = rounds_text(results).rpartition(" ")
    models = " and ".join(dict.fromkeys(str(one.config.model) for one in results))
    count, own, classes = len(first.federation.names), first.config.seeds, len(first.federation.classes)
    found.append(KeyNumber(str(count), "clients" if count != 1 else "client", f"{classes} classes"))
    found.append(KeyNumber(rounds, unit, f"model {models}"))
    if len(results) > 1:
        found.append(KeyNumber(str(len(results)), "runs", f"{counted(len(seeds), 'seed')} in common"))
    else:
        found.append(KeyNumber(str(len(own)), "seeds" if len(own) != 1 else "seed", named(own)))
    return found
