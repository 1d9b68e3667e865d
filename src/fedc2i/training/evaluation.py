"""Accuracy and loss of a client's model on its own data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from fedc2i.training.local import Batch

AT_ONCE = 500  # images in one forward pass: larger batches leave the CPU's caches and are slower
AT_ONCE_ON_GPU = 2000


def at_once(device: torch.device) -> int:
    """How many images are scored in one forward pass."""
    return AT_ONCE if device.type == "cpu" else AT_ONCE_ON_GPU


def score(predict: Callable[[Tensor], Mapping[str, Tensor]], piece: Batch) -> dict[str, Tensor]:
    """Sums over a few images of accuracy (in percent) and cross entropy; they stay on the device.

    ``predict`` maps images to logits by name; the name is appended to that of the metric.
    """
    sums: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, logits in predict(piece.x).items():
            sums[f"accuracy{name}"] = 100.0 * (logits.argmax(1) == piece.y).sum()
            sums[f"loss{name}"] = F.cross_entropy(logits, piece.y, reduction="sum")
    return sums


def means(pieces: Sequence[Mapping[str, Tensor]], samples: int) -> dict[str, Tensor]:
    """Sums over pieces to means over ``samples``, in double precision; empty without pieces."""
    names = pieces[0] if pieces else ()
    return {name: torch.stack([piece[name].to(torch.float64) for piece in pieces]).sum() / samples for name in names}
