"""Scores of a client's model on its own data: accuracy, log-loss, balanced accuracy, F1, AUROC, calibration error.

Written for tensors of fixed shape, without branches on their values, so that a CUDA graph can hold them. A score that
the samples do not define is nan: with samples of one class only there is no AUROC, balanced accuracy or F1.

A model that diverged predicts nothing for a sample whose logits are not numbers. Such a sample counts as wrong; AUROC
ranks it with the others of its kind, below the rest; log-loss and calibration error are nan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from fedc2i.training.local import Batch

AT_ONCE = 500  # samples in one forward pass: larger batches leave the CPU's caches and are slower
AT_ONCE_ON_GPU = 2000
BINS = 15  # of confidence, for the calibration error
HIGHER_IS_BETTER = {
    "accuracy": True,
    "balanced_accuracy": True,
    "auroc": True,
    "f1": True,
    "loss": False,
    "calibration_error": False,
}
UNDEFINED = ("balanced_accuracy", "auroc", "f1")  # where a test set has one class
TITLES = {
    "accuracy": "accuracy (%)",
    "balanced_accuracy": "balanced accuracy (%)",
    "auroc": "AUROC (%)",
    "f1": "macro F1 (%)",
    "loss": "log-loss",
    "calibration_error": "calibration error (%)",
}


def digits(metric: str) -> int:
    """Decimal places that are shown."""
    return 3 if "loss" in metric else 2


def score(predict: Callable[[Tensor], Mapping[str, Tensor]], piece: Batch) -> dict[str, Tensor]:
    """Sums over a few samples of accuracy (in percent) and cross entropy, and the main logits; all on the device.

    ``predict`` maps samples to logits by name; the name is appended to that of the metric. The main one is ``""``.
    """
    sums: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, logits in predict(piece.x).items():
            sums[f"accuracy{name}"] = 100.0 * ((logits.argmax(1) == piece.y) & predicted(logits)).sum()
            sums[f"loss{name}"] = F.cross_entropy(logits, piece.y, reduction="sum")
            if not name:
                sums["logits"] = logits
    return sums


def predicted(logits: Tensor) -> Tensor:
    """``(N,)`` whether logits ``(N, C)`` give probabilities; a class may have the logit -inf."""
    return logits.amax(1).isfinite()


def means(pieces: Sequence[Mapping[str, Tensor]], samples: int) -> dict[str, Tensor]:
    """Sums over pieces to means over ``samples``, in double precision; empty without pieces."""
    names = [name for name in pieces[0] if name != "logits"] if pieces else []
    return {name: torch.stack([piece[name].to(torch.float64) for piece in pieces]).sum() / samples for name in names}


def all_scores(pieces: Sequence[Mapping[str, Tensor]], y: Tensor) -> dict[str, Tensor]:
    """Means over pieces that have the labels ``y``, and the scores that need all of their logits."""
    return means(pieces, len(y)) | class_scores(torch.cat([piece["logits"] for piece in pieces]), y)


def defined(scores: Mapping[str, float]) -> dict[str, float]:
    """Without scores that the samples do not define, such as AUROC with one class."""
    return {name: value for name, value in scores.items() if name not in UNDEFINED or value == value}


def class_scores(logits: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Scores in percent of ``logits`` ``(N, C)`` for labels ``y`` ``(N,)``, in double precision."""
    logits = logits.to(torch.float64)
    truth = F.one_hot(y, logits.shape[1]).to(torch.float64)  # (N, C)
    sound = predicted(logits)
    guess = F.one_hot(logits.argmax(1), logits.shape[1]).to(torch.float64) * sound[:, None]
    probabilities = torch.where(sound[:, None], logits.softmax(1), -1.0)
    count = truth.sum(0)  # (C,) samples of each class
    present = count > 0
    several = present.sum() > 1
    hits = (truth * guess).sum(0)
    found = {
        "balanced_accuracy": _mean(hits / count.clamp(min=1), present),
        "f1": _mean(2 * hits / (count + guess.sum(0)).clamp(min=1), present),
        "auroc": _mean(areas(probabilities, truth), present),
    }
    defined = {name: torch.where(several, score, torch.nan) for name, score in found.items()}
    defined["calibration_error"] = torch.where(sound.all(), gap(probabilities, truth), torch.nan)
    return {name: 100 * score for name, score in defined.items()}


def areas(scores: Tensor, truth: Tensor) -> Tensor:
    """For each class the area under the ROC curve of ``scores`` ``(N, C)``: one class against the others ``(C,)``.

    It is the share of pairs (one of the class, one not) in which the first has the higher score; ties count half.
    """
    columns = scores.T.contiguous()  # (C, N)
    ordered = columns.sort(dim=1).values
    below = torch.searchsorted(ordered, columns, right=False)
    up_to = torch.searchsorted(ordered, columns, right=True)
    ranks = (below + up_to + 1).to(torch.float64) / 2  # mean rank of ties
    own = truth.sum(0)
    others = len(truth) - own
    wins = (ranks * truth.T).sum(1) - own * (own + 1) / 2
    return wins / (own * others).clamp(min=1)


def gap(probabilities: Tensor, truth: Tensor) -> Tensor:
    """The expected calibration error: the mean distance of confidence from accuracy over bins of confidence."""
    confidence, label = probabilities.clamp(min=0).max(1)
    right = truth.gather(1, label[:, None]).squeeze(1)
    member = F.one_hot((confidence * BINS).long().clamp(max=BINS - 1), BINS).to(torch.float64)  # (N, BINS)
    return (member.T @ (confidence - right)).abs().sum() / len(truth)


def _mean(values: Tensor, present: Tensor) -> Tensor:
    """Over the classes that have samples."""
    return (values * present).sum() / present.sum().clamp(min=1)
