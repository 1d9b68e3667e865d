"""Accuracy and loss of a client's model on its own data."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from fedc2i.methods.base import Method, Site
from fedc2i.params import Params
from fedc2i.training import Batch

AT_ONCE = 500  # images in one forward pass: larger batches leave the CPU's caches and are slower


def evaluate(predict: Callable[[Tensor], Mapping[str, Tensor]], data: Batch) -> dict[str, float]:
    """Accuracy (in percent) and mean cross entropy over all of ``data``.

    Args:
        predict: images to logits by name; the name is appended to that of the metric.
        data: what to score on.
    """
    totals: dict[str, Tensor] = {}
    with torch.no_grad():
        for low in range(0, len(data.y), AT_ONCE):
            x, y = data.x[low : low + AT_ONCE], data.y[low : low + AT_ONCE]
            for name, logits in predict(x).items():
                right = 100 * (logits.argmax(1) == y).sum()
                loss = F.cross_entropy(logits, y, reduction="sum")
                for metric, value in ((f"accuracy{name}", right), (f"loss{name}", loss)):
                    totals[metric] = totals[metric] + value if metric in totals else value
    return {metric: float(total) / len(data.y) for metric, total in totals.items()}


def predict_all(method: Method, params: Params, x: Tensor, site: Site) -> dict[str, Tensor]:
    """The method's main prediction under ``""``, its others under ``"/name"``."""
    others = method.other_predictions(params, x, site)
    return {"": method.predict(params, x, site), **{f"/{name}": logits for name, logits in others.items()}}
