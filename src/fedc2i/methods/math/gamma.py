"""γ as a value object: a sensitivity that adapts to the round, the number of models or the losses themselves.

The paper has one γ for all and leaves adaptive ones to future work. Wherever γ is asked for, a number will do, or

    ramp(γ)        γ·t/(T − 1) in round t = 0..T − 1: FedAvg at first, full sensitivity in the last round
    scaled(γ)      γ·(M − 1)/4 for M models: leaving one of M out moves their mean by 1/(M − 1), and the losses with it
    perplexity(k)  what gives weights of k effective models, exp(entropy) = k, to each client and each class;
                   with a share, perplexity(40%), k is that share of the models

An object is the text that makes it, ``ramp(10)``, on command lines, in TOML files and in tables alike.
"""

from __future__ import annotations

import math
import re
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from fedc2i.core.errors import UserError
from fedc2i.methods.math.influence import influence, log_losses, softmax_over

SMALLEST, LARGEST = 1e-6, 1e6  # of perplexity's γ; beyond, the rounding of single-precision losses would decide
STEPS = 50  # halvings of log γ between them: exact to 3e-14


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
    """A γ that is not the same number for all; made by `ramp`, `scaled`, `perplexity` or `parse`.

    It is immutable, has no state but its own text, and equals another that means the same.
    """

    __slots__ = ()
    word: ClassVar[str]
    least: ClassVar[float] = 0.0
    usual: ClassVar[float | None] = None  # what the bare word stands for
    allowed: ClassVar[str] = (
        "ramp(number from 0) | scaled(number from 0) | perplexity(number from 1 or share up to 100%, such as 40%)"
    )

    @staticmethod
    def parse(value: Any) -> Gamma:
        """From ``"ramp(10)"``, or such an object.

        Raises:
            ValueError: if it is neither, or its number is out of range.
        """
        found = re.fullmatch(r"\s*([a-z]+)\s*(?:\(([^()]*)\)\s*)?", value) if isinstance(value, str) else None
        kind = next((kind for kind in (Ramp, Scaled, Perplexity) if found and found[1] == kind.word), None)
        if found is None or kind is None:
            raise ValueError(value)
        if found[2] is not None and kind is Perplexity and found[2].strip().endswith("%"):
            return Perplexity.of_share(float(found[2].strip()[:-1]))
        if found[2] is not None:
            return kind.of(float(found[2]))
        if kind.usual is None:
            raise ValueError(value)
        return kind.of(kind.usual)

    @classmethod
    def of(cls, amount: float) -> Gamma:
        """With this number."""
        if isinstance(amount, bool) or not cls.least <= amount < math.inf:
            raise ValueError(amount)
        return cls(f"{cls.word}({_short(amount)})")

    @property
    def amount(self) -> float:
        """The number in brackets."""
        return float(self[len(self.word) + 1 : -1].rstrip("%"))

    def value(self, losses: Tensor, valid: Tensor, site: Clock) -> float | Tensor:
        """γ: a number, ``()`` or, of losses ``(K, C)``, one for each column."""
        raise NotImplementedError

    def weights(
        self, losses: Tensor, valid: Tensor, site: Clock, not_finite: Literal["zero", "largest"] = "zero"
    ) -> tuple[Tensor, Tensor]:
        """Losses to weights as in `influence`, whose arguments these are, and the γ used: ``()`` or ``(C,)``."""
        gamma = self.value(losses, valid, site)
        used = gamma.expand(losses.shape[1:]) if isinstance(gamma, Tensor) else losses.new_full(losses.shape[1:], gamma)
        return influence(losses, gamma, valid, not_finite), used


class Ramp(Gamma):
    """γ·t/(T − 1) in round t = 0..T − 1; γ if there is only one."""

    __slots__ = ()
    word = "ramp"

    def value(self, losses: Tensor, valid: Tensor, site: Clock) -> float:
        """The round's γ, the same for all."""
        return self.amount * ((site.round - 1) / (site.rounds - 1)) if site.rounds > 1 else self.amount


class Scaled(Gamma):
    """γ·(M − 1)/4 with M the models that take part: γ itself for the paper's five clients."""

    __slots__ = ()
    word = "scaled"
    usual = 5.0

    def value(self, losses: Tensor, valid: Tensor, site: Clock) -> Tensor:
        """γ by the number of valid models, or of valid rows of each class."""
        return self.amount * (valid.sum(0) - 1).clamp(min=0).to(losses.dtype) / 4


class Perplexity(Gamma):
    """The γ from 0 to `LARGEST` at which exp(entropy of the weights) is k."""

    __slots__ = ()
    word = "perplexity"
    least = 1.0

    @classmethod
    def of_share(cls, percent: float) -> Gamma:
        """With so many in a hundred of the models that take part."""
        if not 0 < percent <= 100:
            raise ValueError(percent)
        return cls(f"{cls.word}({_short(percent)}%)")

    def models(self, count: Tensor) -> Tensor:
        """k, of ``count`` models that take part: at least one."""
        share = self.endswith("%)")
        return (count * (self.amount / 100)).clamp(min=1.0) if share else torch.full_like(count, self.amount)

    def weights(
        self, losses: Tensor, valid: Tensor, site: Clock, not_finite: Literal["zero", "largest"] = "zero"
    ) -> tuple[Tensor, Tensor]:
        """Bisects log γ in each column, a fixed number of times, since entropy falls as γ rises.

        With no more than k models γ is 0. Where the largest losses are equal, no γ may concentrate the weights on k
        models: the largest γ is used.
        """
        logs, part = log_losses(losses, valid, not_finite)
        logs = logs.double()
        top = torch.where(part, logs, -torch.inf).amax(0)
        below = torch.where(part, logs - top, 0.0)  # differences, lest γ magnify the rounding of what all share
        wanted = self.models(part.sum(0).to(logs.dtype))
        low, high = torch.full_like(top, math.log(SMALLEST)), torch.full_like(top, math.log(LARGEST))
        for _ in range(STEPS):
            middle = (low + high) / 2
            flat = effective(middle.exp() * below, part) > wanted
            low, high = torch.where(flat, middle, low), torch.where(flat, high, middle)
        gamma = torch.where(part.sum(0) > wanted, ((low + high) / 2).exp(), 0.0)
        return softmax_over(part, (gamma * below).to(losses.dtype)), gamma.to(losses.dtype)


def effective(scores: Tensor, part: Tensor) -> Tensor:
    """exp(entropy) of softmax(scores) over those that take part, of scores at most 0: ``(K, ...)`` to ``(...)``."""
    powers = torch.where(part, scores.exp(), 0.0)
    total = powers.sum(0)
    return total * (-(powers * scores).sum(0) / total).exp()


def ramp(gamma: float) -> Gamma:
    """γ that grows from 0 in the first round to ``gamma`` in the last."""
    return _made(Ramp, gamma)


def scaled(gamma: float = 5.0) -> Gamma:
    """γ that grows with the number of models, ``gamma`` for five."""
    return _made(Scaled, gamma)


def perplexity(models: float | str) -> Gamma:
    """γ that gives every client, and each of its classes, this many effective models, its own among them if measured.

    Args:
        models: their number, or their share of those that take part, such as ``"40%"``.
    """
    if not isinstance(models, str) or not models.endswith("%"):
        return _made(Perplexity, models)  # type: ignore[arg-type]  # a text that is no share is refused
    try:
        return Gamma.parse(f"{Perplexity.word}({models})")
    except ValueError:
        raise UserError(f"perplexity takes a share above 0% and up to 100%, got {models}") from None


def _short(amount: float) -> str:
    amount = float(amount) + 0.0  # no negative zero
    short = f"{amount:g}"
    return short if float(short) == amount else repr(amount)


def _made(kind: type[Gamma], amount: float) -> Gamma:
    try:
        return kind.of(amount)
    except (ValueError, TypeError):
        raise UserError(f"{kind.word} takes a finite number of at least {kind.least:g}, got {amount}") from None
