"""What a run with clipping and noise guarantees: ε, by Rényi divergence, as Opacus computes it.

The guarantee is client-level (ε, δ)-differential privacy of a client's uploads. Two federations are neighbours if they
differ in all samples of one client, their number staying the same. A clipped difference then moves by 2 · clip at most,
so that noise of standard deviation σ · clip is a Gaussian mechanism of multiplier σ/2; it is used once in every round
that the client takes part in. Nothing is claimed for being drawn: the server knows who takes part.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedc2i.core.errors import UserError
from fedc2i.core.settings import EngineSettings
from fedc2i.engine.exchange import choose

SENSITIVITY = 2.0  # of a clipped difference, in units of clip
ORDERS = tuple(1 + np.geomspace(1e-4, 1e6, 4001))  # the Rényi orders α that are tried
LEAST_NOISE, MOST_NOISE = 1e-3, 1e6
MOST_ROUNDS = 10**9
_LARGEST = 1e100  # multiplier whose square is a number; more noise is worth no less


def epsilon(noise: float, uploads: int, delta: float = 1e-5) -> float:
    """ε of this number of uploads of one client, infinite without noise, 0 if it sends nothing.

    ``noise`` is the multiplier σ, in units of ``clip``; ``delta`` δ is the chance that the bound fails.

    Raises:
        UserError: for values out of range.
    """
    if not 0 <= noise < math.inf:
        raise UserError(f"noise must be a number, at least 0, got {noise}")
    if not 0 <= uploads <= MOST_ROUNDS:
        raise UserError(f"rounds must be 0..{MOST_ROUNDS}, got {uploads}")
    if not 0 < delta < 1:
        raise UserError(f"delta must be above 0 and below 1, got {delta}")
    if uploads == 0:
        return 0.0
    if noise == 0:
        return math.inf
    return _epsilon(uploads, noise, delta)


def composed(noises: Sequence[float], delta: float = 1e-5) -> float:
    """ε of one client's uploads with these noise multipliers, in any order; infinite if one is 0.

    Rényi costs add, and the cost of an upload is proportional to 1/σ²: all of them cost as much as one of noise
    (Σ 1/σ²)^{-1/2}.
    """
    if not all(noise > 1 / _LARGEST for noise in noises):
        return math.inf
    return epsilon(math.fsum(noise**-2 for noise in noises) ** -0.5, 1, delta) if noises else 0.0


def _epsilon(uploads: int, noise: float, delta: float) -> float:
    """The least bound over all orders: the Rényi divergence of order α is α · uploads / (2 multiplier²)."""
    orders = np.asarray(ORDERS)
    with np.errstate(over="ignore"):
        spent = orders * uploads * 0.5 / min(noise / SENSITIVITY, _LARGEST) / min(noise / SENSITIVITY, _LARGEST)
    # Balle et al. 2020, theorem 21: from Rényi to (ε, δ).
    found = spent - (math.log(delta) + np.log(orders)) / (orders - 1) + np.log1p(-1 / orders)
    return max(0.0, float(found.min()))


def noise_for(target: float, uploads: int, delta: float = 1e-5) -> float:
    """The least noise multiplier, to a millionth of it, with which these uploads stay within ε = ``target``.

    Raises:
        UserError: if there is none in the range that is searched.
    """
    if not 0 < target < math.inf:
        raise UserError(f"the target ε must be a number above 0, got {target}")
    if uploads == 0:
        raise UserError("at least 1 round is needed to ask for a noise")
    low, high = LEAST_NOISE, MOST_NOISE
    if epsilon(high, uploads, delta) > target:
        raise UserError(f"no noise up to {high:g} keeps {uploads} uploads within ε = {target:g}")
    while high > low * (1 + 1e-6):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if epsilon(middle, uploads, delta) <= target else (middle, high)
    return high


@dataclass(frozen=True)
class Cost:
    """What a run costs the client that takes part most often."""

    clip: float
    noise: float
    delta: float
    uploads: int  # of that client
    epsilon: float  # infinite without noise
    seeds: int = 1  # whose uploads are added up: in a simulation each stands for itself, at real sites all have left

    def to_json(self) -> dict[str, Any]:
        """As ``summary.json`` holds it; an infinite ε is null there."""
        found = self.epsilon if math.isfinite(self.epsilon) else None
        return {**vars(self), "epsilon": found, "adjacency": "all samples of one client, by as many others"}

    def __str__(self) -> str:
        head = f"clip {self.clip:g}, noise {self.noise:g}"
        if not self.uploads:
            return f"{head}: no uploads, nothing to protect"
        if not self.noise:
            return f"{head}: without noise there is no guarantee"
        whose = "one seed's run" if self.seeds == 1 else f"the runs of {self.seeds} seeds together"
        return (
            f"{head}: ε = {self.epsilon:.2f} at δ = {self.delta:g} for each client's whole data set, over up to "
            f"{self.uploads} uploads of {whose}; scores are not covered (docs/privacy.md)"
        )


def cost(
    config: EngineSettings,
    clients: int,
    rounds: int | None = None,
    sends: bool = True,
    asked: Mapping[int, Mapping[int, int]] | None = None,
    released: bool = False,
) -> Cost | None:
    """The cost of a run; None where uploads are not clipped.

    ``rounds`` it had, by default all that are planned; ``sends``: whether the method sends anything at all; ``asked``:
    by seed and round, how often different uploads were asked for, by default once; ``released``: whether the uploads of
    all seeds leave their clients, as at real sites, so that they add up.
    """
    if not config.clip:
        return None
    last = config.rounds if rounds is None else rounds
    turns = np.zeros((len(config.seeds), clients), dtype=np.int64)
    for own, seed in zip(turns, config.seeds, strict=True):
        for number, times in (Counter(range(1, last + 1)) | Counter((asked or {}).get(seed, {}))).items():
            own[list(choose(seed, config, clients, number))] += times
    uploads = int((turns.sum(0) if released else turns).max()) if sends else 0
    spent = epsilon(config.noise, uploads, config.delta)
    return Cost(config.clip, config.noise, config.delta, uploads, spent, len(config.seeds) if released else 1)
