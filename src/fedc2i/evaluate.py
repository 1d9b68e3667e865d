"""Accuracy and loss of a client's model on its own data."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from fedc2i.training import Batch

AT_ONCE = 500  # images in one forward pass: larger batches leave the CPU's caches and are slower


def evaluate(predict: Callable[[Tensor], Tensor], data: Batch) -> dict[str, float]:
    """Accuracy (in percent) and mean cross entropy of ``predict``, images to logits, over all of ``data``."""
    right = torch.zeros((), device=data.y.device)
    loss = torch.zeros((), device=data.y.device)
    with torch.no_grad():
        for low in range(0, len(data.y), AT_ONCE):
            x, y = data.x[low : low + AT_ONCE], data.y[low : low + AT_ONCE]
            logits = predict(x)
            right += (logits.argmax(1) == y).sum()
            loss += F.cross_entropy(logits, y, reduction="sum")
    return {"accuracy": 100 * float(right) / len(data.y), "loss": float(loss) / len(data.y)}
