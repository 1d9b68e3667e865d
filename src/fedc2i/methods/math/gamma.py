"""γ as a value object: a sensitivity that adapts to the round, the number of models or the losses themselves.

The paper has one γ for all and leaves adaptive ones to future work. Wherever γ is asked for, a number will do, or

    ramp(γ)        γ·t/(T − 1) in round t = 0..T − 1: FedAvg at first, full sensitivity in the last round
    scaled(γ)      γ·(M − 1)/4 for M models: leaving one of M out moves their mean by 1/(M − 1), and the losses with it;
                   γ itself for the paper's five clients, and ``scaled`` is ``scaled(5)``
    perplexity(k)  the γ that gives weights of k effective models, exp(entropy) = k, to each client and each class;
                   with a share, perplexity(40%), k is that share of the models

An object is the text that makes it, ``ramp(10)``, on command lines, in TOML files and in tables alike.
"""

from __future__ import annotations

import math
import re
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor

from fedc2i.methods.math.influence import influence, log_losses, softmax_over

SMALLEST, LARGEST = 1e-6, 1e6  # of perplexity's γ; beyond, the rounding of single-precision losses would decide
STEPS = 50  # halvings of log γ between them: exact to 3e-14
_LEAST = {"ramp": 0.0, "scaled": 0.0, "perplexity": 1.0}


class Clock(Protocol):
    """What tells the time, such as a `Site`."""

    @property
    def round(self) -> int:
        """The round, from 1."""
        ...

    @property
    def rounds(self) -> int:
        """How many there will be."""
        ...


class Gamma(str):
    """A γ that is not the same number for all. It equals another that means the same.

    Attributes:
        kind: ``ramp``, ``scaled`` or ``perplexity``.
        amount: the number in brackets.
        is_share: whether that is in per cent of the models.
    """

    kind: str
    amount: float
    is_share: bool
    allowed: ClassVar[str] = (
        "ramp(number from 0) | scaled(number from 0) | perplexity(number from 1 or share up to 100%, such as 40%)"
    )

    def __new__(cls, text: str) -> Self:
        """From ``"ramp(10)"``.

        Raises:
            ValueError: if it is something else, or its number is out of range.
        """
        found = re.fullmatch(r"\s*(ramp|scaled|perplexity)\s*\(([^()%]*)(%?)\s*\)\s*", text)
        if found is None:
            raise ValueError(f"γ must be {cls.allowed}, got '{text}'")
        kind, amount, share = found[1], float(found[2]) + 0.0, found[3]  # + 0.0: no negative zero
        in_range = 0 < amount <= 100 if share else _LEAST[kind] <= amount < math.inf
        if not in_range or (share and kind != "perplexity"):
            raise ValueError(f"γ must be {cls.allowed}, got '{text}'")
        short = f"{amount:g}"
        made = super().__new__(cls, f"{kind}({short if float(short) == amount else repr(amount)}{share})")
        made.kind, made.amount, made.is_share = kind, amount, bool(share)
        return made

    @classmethod
    def parse(cls, value: Any) -> Gamma:
        """From text or such an object, as the options of a method are read; raises ValueError for anything else."""
        if not isinstance(value, str):
            raise ValueError(value)
        return cls("scaled(5)" if value.strip() == "scaled" else value)

    def weights(self, losses: Tensor, valid: Tensor, clock: Clock) -> tuple[Tensor, Tensor]:
        """Losses to weights as in `influence`, whose arguments these are, and the γ used: ``()`` or ``(C,)``."""
        if self.kind == "perplexity":
            return self._by_perplexity(losses, valid)
        if self.kind == "scaled":
            gamma = self.amount * (valid.sum() - 1).clamp(min=0).to(losses.dtype) / 4
        else:
            done = (clock.round - 1) / (clock.rounds - 1) if clock.rounds > 1 else 1.0
            gamma = losses.new_full((), self.amount * done)
        return influence(losses, gamma, valid), gamma.expand(losses.shape[1:])

    def _by_perplexity(self, losses: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """Bisects log γ in each column, a fixed number of times, since entropy falls as γ rises.

        With no more than k models γ is 0. Where the largest losses are equal, no γ may concentrate the weights on k
        models: the largest γ is used.
        """
        logs, part = log_losses(losses, valid)
        logs = logs.double()
        top = torch.where(part, logs, -torch.inf).amax(0)
        below = torch.where(part, logs - top, 0.0)  # differences, lest γ magnify the rounding of what all share
        count = part.sum(0).to(logs.dtype)
        wanted = (count * (self.amount / 100)).clamp(min=1.0) if self.is_share else torch.full_like(count, self.amount)
        low, high = torch.full_like(top, math.log(SMALLEST)), torch.full_like(top, math.log(LARGEST))
        for _ in range(STEPS):
            middle = (low + high) / 2
            flat = effective(middle.exp() * below, part) > wanted
            low, high = torch.where(flat, middle, low), torch.where(flat, high, middle)
        gamma = torch.where(count > wanted, ((low + high) / 2).exp(), 0.0)
        return softmax_over(part, (gamma * below).to(losses.dtype)), gamma.to(losses.dtype)


def effective(scores: Tensor, part: Tensor) -> Tensor:
    """exp(entropy) of softmax(scores) over those that take part, of scores at most 0: ``(K, ...)`` to ``(...)``."""
    powers = torch.where(part, scores.exp(), 0.0)
    total = powers.sum(0)
    return total * (-(powers * scores).sum(0) / total).exp()


def weigh(losses: Tensor, gamma: float | Gamma, valid: Tensor, clock: Clock) -> tuple[Tensor, Tensor | None]:
    """Losses ``(K,)`` or ``(K, C)`` to weights, and the γ ``()`` or ``(C,)`` that an adaptive one came to."""
    if isinstance(gamma, Gamma):
        return gamma.weights(losses, valid, clock)
    return influence(losses, gamma, valid), None
