"""What the influence shows, in words: who helps whom most, how much clients keep, which classes differ."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedc2i.analysis.weights import DomainShare, domain_of, of_last_round
from fedc2i.report.html.client_influence import ClientInfluence
from fedc2i.report.html.verdict_text import Text
from fedc2i.report.table import counted, decimals, percent
from fedc2i.runs.results import Array, Result

FLAT = 0.1  # others within a tenth of their equal share: nobody is singled out


def influence_text(result: Result, found: Sequence[ClientInfluence]) -> Text:
    """Who helps whom after the last round, the mean over seeds; ``found`` is what `client_influences` returns."""
    names = result.federation.names
    if not found:
        matrix = of_last_round(result, "influence_matrix").size
        also = ("It weighs classes, see the matrix below.",) if matrix else ()
        return Text(f"{result.label} measures no influence of clients on each other.", also)
    vector = of_last_round(result, "influence_vector")
    equal = 1 / np.maximum(1, np.isfinite(vector).sum(1))
    own = [m for m in range(len(names)) if found[m].learned]
    ties = [(found[m].learned[0][1] / equal[m], m) for m in own]
    if not ties:
        return Text("Every client keeps to itself: nobody gives weight to anyone else.", ())
    times, m = max(ties)
    helper, share = found[m].learned[0]
    if max(abs(value / equal[k] - 1) for k in own for _, value in found[k].learned) < FLAT:
        line, first = "Influence is close to equal: no client is singled out as a helper.", []
    else:
        weight = f"λ {share:.{decimals(len(names))}f}, {times:.1f} times an equal share"
        line = f"{names[helper]} helps {names[m]} most: {weight}."
        first = _both_ways(found[m], names[m], names[helper], float(vector[helper, m]), decimals(len(names)))
    sentences = [*first, *_shares(vector, names), *_most_useful(vector, names), *_classes(result, found)]
    return Text(line, tuple(sentences))


def _both_ways(one: ClientInfluence, client: str, helper: str, back: float, places: int) -> list[str]:
    """How steady the largest influence is, and what it is in the other direction."""
    steady = [f"{helper} is its first helper in {one.steady} of {one.seeds} seeds."] if one.seeds > 1 else []
    other = [f"In the other direction, {client} has λ {back:.{places}f} at {helper}."] if np.isfinite(back) else []
    return [" ".join([*steady, *other])] if steady or other else []


def _shares(vector: Array, names: Sequence[str]) -> list[str]:
    """How much of λ stays with the client and with its domain."""
    share, said = DomainShare.of(vector, names), []
    if np.isfinite(share.itself):
        said.append(
            f"On average a client gives {percent(share.itself)} of λ to its own model; an equal share is "
            f"{percent(share.uniform_itself)}."
        )
    if len({domain_of(name) for name in names}) < len(names) and np.isfinite(share.domain):
        said.append(
            f"{percent(share.domain)} of λ stays within a client's own domain, {share.times:.1f} times the share of "
            "equal weights."
        )
    return said


def _most_useful(vector: Array, names: Sequence[str]) -> list[str]:
    """The client that the others give most weight to, and the one they give least."""
    given, places = vector.copy(), decimals(len(names))
    np.fill_diagonal(given, np.nan)
    taught = [float(np.nanmean(given[:, i])) if np.isfinite(given[:, i]).any() else np.nan for i in range(len(names))]
    if np.isfinite(taught).sum() <= 2:
        return []
    most, least = int(np.nanargmax(taught)), int(np.nanargmin(taught))
    if taught[most] <= (1 + FLAT) * taught[least]:
        return []
    return [
        f"The most useful to others is {names[most]} (they give it {taught[most]:.{places}f} on average), the "
        f"least {names[least]} ({taught[least]:.{places}f})."
    ]


def _classes(result: Result, found: Sequence[ClientInfluence]) -> list[str]:
    """Clients with another helper for some class, and the clearest case."""
    names, different = result.federation.names, [k for k, own in enumerate(found) if own.exceptions]
    if not different:
        return []
    clearest = max(different, key=lambda k: found[k].exceptions[0].share - found[k].exceptions[0].usual)
    case = found[clearest].exceptions[0]
    have = f"{counted(len(different), 'client')} of {len(names)} ha{'s' if len(different) == 1 else 've'}"
    return [
        f"{have} another helper for some class than overall; clearest: {names[clearest]} on "
        f"{result.federation.classes[case.label]}, helped most by {names[case.helper]} "
        f"(Λ {case.share:.{decimals(len(names))}f}, {case.share / case.equal:.1f} times an equal share)."
    ]
