"""How sure a measured influence is: a bootstrap over the samples it was measured on.

A client measures influence on some of its samples. Another draw of as many would have given somewhat other losses, and
so other weights. The bootstrap draws the same number of samples with replacement, again and again, which is nothing but
another weight for each sample: 0, 1, 2, ... times. A method's own `personalise` reads these weights, so everything is
measured exactly as in a run. Lifted over draws with ``vmap``, what does not depend on the weights, the losses of
single samples, is computed once.

The intervals speak of the samples alone. That another seed would have trained other models is no part of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import vmap

NEGLIGIBLE = 1e-3  # of the equal share: a smaller difference is rounding, or matters to nobody


@dataclass(frozen=True)
class Interval:
    """Weights with the ends of their intervals, tensors of one shape; nan where nothing was measured."""

    estimate: Tensor
    low: Tensor
    high: Tensor

    def differs(self, share: float | Tensor) -> Tensor:
        """Booleans: the whole interval is above, or below, the equal share, by more than a thousandth of it."""
        return (self.low > share * (1 + NEGLIGIBLE)) | (self.high < share * (1 - NEGLIGIBLE))


def draw_weights(samples: int, draws: int, generator: torch.Generator) -> Tensor:
    """``(draws, samples)``: how often each sample is in each draw of ``samples`` with replacement."""
    index = torch.randint(samples, (draws, samples), generator=generator)
    return torch.zeros(draws, samples).scatter_add_(1, index, torch.ones(draws, samples))


def resample(
    measure: Callable[[Tensor], Mapping[str, Tensor]], weights: Tensor, at_once: int | None = None
) -> dict[str, Tensor]:
    """What ``measure`` gives for every draw, each entry with a leading axis of draws.

    Args:
        measure: from weights ``(B,)`` of the samples to what was measured, by name; it is lifted over draws.
        weights: ``(D, B)``, see `draw_weights`.
        at_once: draws that are computed together; all by default.
    """
    with torch.no_grad():
        return dict(vmap(lambda own: dict(measure(own)), chunk_size=at_once)(weights))


def interval(estimate: Tensor, drawn: Tensor, level: float = 0.95) -> Interval:
    """The percentile interval of each entry.

    Args:
        estimate: measured on the samples as they are.
        drawn: the same of every draw, ``(D, ...)``.
        level: the share of draws between its ends.
    """
    ends = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=drawn.dtype, device=drawn.device)
    low, high = torch.nanquantile(drawn, ends, dim=0)
    return Interval(estimate, low, high)
