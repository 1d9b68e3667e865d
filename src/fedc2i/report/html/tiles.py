"""The few numbers at the top of a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedc2i.analysis.domain_share import Mass
from fedc2i.engine.records import POINTS
from fedc2i.report.html.compare import common_seeds, differences, headline, named, restricted, rounds_text
from fedc2i.report.html.packing import last_influence
from fedc2i.runs.results import Result, Score


@dataclass(frozen=True)
class Tile:
    """A number, what it is, and a line below it."""

    value: str
    name: str
    note: str


def tiles(results: Sequence[Result]) -> list[Tile]:
    """The best average at both points, then the size of what was run; of one run also how much it keeps to itself."""
    seeds = common_seeds(results)
    found = []
    for point in POINTS:
        best = results[differences(results, point)[0]]
        title, values = headline(restricted(best, seeds) if seeds else best, point)
        note = best.label if len(results) > 1 else f"{title} over clients, % of test images"
        found.append(Tile(str(Score.of(values)), f"accuracy, {point}", note))
    first = results[0]
    if len(results) == 1:
        vector = last_influence(first, "influence_vector")
        if vector.ndim == 2:
            found += _kept(Mass.of(vector, first.federation.names))
    rounds, _, unit = rounds_text(results).rpartition(" ")
    models = " and ".join(dict.fromkeys(str(one.config.model) for one in results))
    count, own = len(first.federation.names), first.config.seeds
    found.append(Tile(str(count), "clients" if count != 1 else "client", f"{len(first.federation.classes)} classes"))
    found.append(Tile(rounds, unit, f"model {models}"))
    if len(results) > 1:
        found.append(Tile(str(len(results)), "runs", f"{len(seeds)} seed{'s' * (len(seeds) != 1)} in common"))
    else:
        found.append(Tile(str(len(own)), "seeds" if len(own) != 1 else "seed", named(own)))
    return found


def _kept(mass: Mass) -> list[Tile]:
    equal = f"of λ on the own model; equal: {100 * mass.uniform_itself:.{0 if mass.uniform_itself >= 0.1 else 1}f} %"
    return [Tile(f"{100 * mass.itself:.0f} %", "kept to itself", equal)] if np.isfinite(mass.itself) else []
