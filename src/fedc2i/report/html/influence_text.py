"""What the influence of the last round shows: client by client, and in words.

Whom each client learned from and whom it taught, how much clients keep, and which classes have another helper.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedc2i.analysis.weights import CEILING, DomainShare, at_ceiling, domain_of, of_last_round, of_seeds
from fedc2i.report.html.verdict import Text
from fedc2i.report.table import counted, decimals, percent
from fedc2i.runs.results import Array, Result

NOTABLE = 0.1  # of an equal share; a client with less is no helper
MARGIN = 1.2  # a class counts as different if its helper has a fifth more there than the client's usual one
ABOVE = 1.25  # times an equal share; a helper with less there is not named
FLAT = 0.1  # of an equal share; others that differ less from it are not singled out

Ranking = tuple[tuple[int, float], ...]  # clients with their λ, the largest first


@dataclass(frozen=True)
class ClassHelper:
    """A class that leans on another helper than the client as a whole."""

    label: int
    helper: int  # who helps most with it
    share: float  # that helper's Λ
    usual: float  # the Λ of the client's usual helper for this class
    equal: float  # an equal share of this class


@dataclass(frozen=True)
class ClientInfluence:
    """Of one client."""

    itself: float  # λ on its own model; nan if it measured nothing
    learned: Ranking  # other clients by their λ here, those above a tenth of an equal share
    taught: Ranking  # other clients by this client's λ there, likewise
    steady: int  # in how many seeds the first helper is the first
    seeds: int  # in how many it measured anything
    exceptions: tuple[ClassHelper, ...]  # classes with another helper, the clearest first


def client_influences(result: Result) -> list[ClientInfluence]:
    """Of every client, from the mean over seeds after the last measured round; empty without influence vectors."""
    vector = of_last_round(result, "influence_vector")
    if vector.ndim != 2:
        return []
    matrix = of_last_round(result, "influence_matrix")
    latest = [_latest(rounds) for rounds in of_seeds(result, "influence_vector")]
    least = NOTABLE * (1 / len(vector))
    found = []
    for m in range(len(vector)):
        learned, taught = _ranked(vector[m], m, least), _ranked(vector[:, m], m, least)
        firsts = [own[0][0] for own in (_ranked(rows[m], m) for rows in latest) if own]
        steady = firsts.count(learned[0][0]) if learned else 0
        classes = _exceptions(vector[m], matrix[m], m) if matrix.ndim == 3 else ()
        found.append(ClientInfluence(float(vector[m, m]), learned, taught, steady, len(firsts), classes))
    return found


def _ranked(values: Array, without: int, least: float = -np.inf) -> Ranking:
    """Clients other than one by falling value, if measured and at least ``least``; ties go to the lower index."""
    order = np.argsort(-np.where(np.isfinite(values), values, -np.inf), kind="stable")
    return tuple((int(i), float(values[i])) for i in order if i != without and values[i] >= least)


def _exceptions(vector: Array, matrix: Array, m: int) -> tuple[ClassHelper, ...]:
    """Classes of client m whose first helper is not the first of λ, clearly so and well above an equal share.

    From the influence vector ``(M,)`` and the influence matrix ``(M, C)`` of client m.
    """
    usual = _ranked(vector, m)
    if not usual:
        return ()
    measured = np.isfinite(matrix)
    others = np.where(measured, matrix, -np.inf)
    others[m] = -np.inf
    helpers, shares = others.argmax(0), others.max(0)
    equal = 1 / np.maximum(1, measured.sum(0))
    there = matrix[usual[0][0]]
    clear = (helpers != usual[0][0]) & (shares >= ABOVE * equal) & ~(shares < MARGIN * there)
    found = [
        ClassHelper(int(c), int(helpers[c]), float(shares[c]), float(there[c]), float(equal[c]))
        for c in np.flatnonzero(clear).tolist()
    ]
    return tuple(sorted(found, key=lambda one: one.usual - one.share))


def _latest(rounds: Array) -> Array:
    """``(rounds, M, M)`` of one seed to its last round that measured anything."""
    measured = np.flatnonzero(np.isfinite(rounds).any(axis=(1, 2)))
    latest: Array = rounds[measured[-1] if len(measured) else -1]
    return latest


def influence_text(result: Result, found: Sequence[ClientInfluence]) -> Text:
    """Who helps whom after the last round, the mean over seeds; ``found`` is what `client_influences` returns."""
    names = result.federation.names
    if not found:
        matrix = of_last_round(result, "influence_matrix").size
        also = ("It weighs classes, see the matrix below.",) if matrix else ()
        return Text(f"{result.label} measures no influence of clients on each other.", also)
    vector, places = of_last_round(result, "influence_vector"), decimals(len(names))
    equal = 1 / np.maximum(1, np.isfinite(vector).sum(1))
    own = [m for m in range(len(names)) if found[m].learned]
    if not own:
        return Text("Every client keeps to itself: nobody gives weight to anyone else.", ())
    times, m = max((found[m].learned[0][1] / equal[m], m) for m in own)
    helper, share = found[m].learned[0]
    sentences = []
    if times < 1 + FLAT:
        line = _nobody(vector, equal, names)
    else:
        is_most = bool(result.method.influence_note) and at_ceiling(vector, m)
        most = f" ({CEILING} is the largest possible)" if is_most else ""
        line = f"{names[helper]} weighs most with {names[m]}: λ {share:.{places}f}{most}, "
        line += f"{times:.1f} times an equal share."
        steady = f"{names[helper]} is first in {found[m].steady} of {found[m].seeds} seeds."
        other = f"In the other direction, {names[m]} has λ {vector[helper, m]:.{places}f} at {names[helper]}."
        both = [steady] * (found[m].seeds > 1) + [other] * bool(np.isfinite(vector[helper, m]))
        sentences = [result.method.influence_note] * is_most + ([" ".join(both)] if both else [])
    sentences += [*_shares(vector, names), *_most_useful(vector, names), *_classes(result, found)]
    return Text(line, tuple(sentences))


def _nobody(vector: Array, equal: Array, names: Sequence[str]) -> str:
    """Where no client weighs clearly more than an equal share with another, the one that weighs least."""
    times = vector / equal[:, None]
    np.fill_diagonal(times, np.nan)
    m, i = (int(place) for place in np.unravel_index(np.nanargmin(times), times.shape))
    if times[m, i] > 1 - FLAT:
        return "Influence is close to equal: no client is singled out as a helper."
    share = f"λ {vector[m, i]:.{decimals(len(names))}f}, {times[m, i]:.1f} times an equal share"
    return f"No client weighs clearly more than an equal share with another; least {names[i]} with {names[m]}: {share}."


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
        f"Most weight goes to {names[most]} (others give it {taught[most]:.{places}f} on average), the "
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
        f"{have} another first client for some class than overall; clearest: {names[clearest]} on "
        f"{result.federation.classes[case.label]}, where {names[case.helper]} weighs most "
        f"(Λ {case.share:.{decimals(len(names))}f}, {case.share / case.equal:.1f} times an equal share)."
    ]
