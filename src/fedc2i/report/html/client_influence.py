"""The influence of the last round, client by client: whom it learned from, whom it taught, which classes differ."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedc2i.analysis.weights import of_last_round, of_seeds
from fedc2i.runs.results import Array, Result

MOST_HELPERS = 3
NOTABLE = 0.1  # of an equal share; a client with less is no helper
MARGIN = 1.2  # a class counts as different if its helper has a fifth more there than the client's usual one
ABOVE = 1.25  # times an equal share; a helper with less there is not named


@dataclass(frozen=True)
class ClassHelper:
    """A class that leans on another helper than the client as a whole.

    Attributes:
        label: the class.
        helper: who helps most with it.
        share: that helper's Λ.
        usual: the Λ of the client's usual helper for this class.
        equal: an equal share of this class.
    """

    label: int
    helper: int
    share: float
    usual: float
    equal: float


@dataclass(frozen=True)
class ClientInfluence:
    """Of one client; others are sorted by falling influence.

    Attributes:
        itself: λ on its own model; nan if it measured nothing.
        learned: pairs of another client and its λ here, those above a tenth of an equal share.
        taught: pairs of another client and this client's λ there, likewise.
        steady: in how many seeds the first helper is the first.
        seeds: in how many it measured anything.
        exceptions: classes with another helper, the clearest first.
    """

    itself: float
    learned: tuple[tuple[int, float], ...]
    taught: tuple[tuple[int, float], ...]
    steady: int
    seeds: int
    exceptions: tuple[ClassHelper, ...]


def client_influences(result: Result) -> list[ClientInfluence]:
    """Of every client, from the mean over seeds after the last measured round; empty without influence vectors."""
    vector = of_last_round(result, "influence_vector")
    if vector.ndim != 2:
        return []
    matrix = of_last_round(result, "influence_matrix")
    seeds = of_seeds(result, "influence_vector")
    equal = 1 / len(vector)
    found = []
    for m in range(len(vector)):
        learned, taught = _notable(ranked(vector[m], m), equal), _notable(ranked(vector[:, m], m), equal)
        own = [ranked(rows[m], m) for rows in (_latest(one) for one in seeds)]
        firsts = [one[0][0] for one in own if one]
        steady = firsts.count(learned[0][0]) if learned else 0
        classes = exceptions(vector[m], matrix[m], m) if matrix.ndim == 3 else ()
        found.append(ClientInfluence(float(vector[m, m]), learned, taught, steady, len(firsts), classes))
    return found


def _notable(others: tuple[tuple[int, float], ...], equal: float) -> tuple[tuple[int, float], ...]:
    return tuple((i, share) for i, share in others if share >= NOTABLE * equal)


def ranked(values: Array, without: int) -> tuple[tuple[int, float], ...]:
    """Clients other than one by falling value, those that were measured; ties go to the lower index."""
    order = np.argsort(-np.where(np.isfinite(values), values, -np.inf), kind="stable")
    return tuple((int(i), float(values[i])) for i in order if i != without and np.isfinite(values[i]))


def exceptions(vector: Array, matrix: Array, m: int) -> tuple[ClassHelper, ...]:
    """Classes of client m whose first helper is not the first of λ, clearly so and well above an equal share.

    Args:
        vector: ``(M,)`` its influence vector.
        matrix: ``(M, C)`` its influence matrix.
        m: the client.
    """
    usual = ranked(vector, m)
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
