"""The guard of FedC²I⁺: how much a client trusts its own network v, the mixture w and the kept network u.

Shares β of the three in a prediction are the mean of a posterior over the points a of the lattice `DESIGN`:

    β = Σ_a a·q(a),    q(a) = softmax_a(Σ_n log Σ_f a_f p_f(y_n|x_n))

over samples n that the client did not train on. Without such samples others may lose their shares, but not gain any:

    trust = exp(N · min(0, ℓ_w − ℓ_v))

ℓ_w is the mean log-probability that the mixture gives to labels of the client's training samples, which flatters it, as
they took part in training it; ℓ_v that of v on the last N samples that v had not seen.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from fedc2i.training.local import Batch

STEPS = 4  # shares a are multiples of 1/4
DESIGN = tuple(a for a in itertools.product(range(STEPS + 1), repeat=3) if sum(a) == STEPS)  # of own, shared and kept
TEMPERATURES = (1.0, 2.0, 4.0, 8.0)
WORST = -1e4  # in place of a log-probability that is not a number


def posterior(logs: Tensor, w: Tensor) -> Tensor:
    """β ``(3,)`` from log p_f(y_n|x_n) ``(3, n)`` and the weights of the samples ``(n,)``."""
    one = torch.ones_like(logs.sum())  # on the device: a CUDA graph cannot hold a copy from the host
    points = torch.stack([torch.stack([one * (share / STEPS) for share in a]) for a in DESIGN])  # (15, 3)
    likely = (points.log()[..., None] + logs).logsumexp(1)  # (15, n)
    weights = torch.softmax((likely * w).sum(1), 0)  # q(a)
    return weights @ points


def best_logs(logits: Tensor, samples: Batch) -> tuple[Tensor, Tensor]:
    """log p(y_n|x_n) of networks ``(K, n)`` at their best temperatures, and these ``(K,)``; logits ``(K, n, C)``."""
    tried = torch.stack([F.log_softmax(logits / degree, 2) for degree in TEMPERATURES])  # (T, K, n, C)
    logs = (tried * F.one_hot(samples.y, logits.shape[2]).to(logits.dtype)).sum(3).nan_to_num(nan=WORST)
    best = (logs * samples.w).sum(2).argmax(0)  # (K,)
    hot = F.one_hot(best, len(TEMPERATURES)).to(logits.dtype)  # (K, T)
    degrees = sum(hot[:, t] * degree for t, degree in enumerate(TEMPERATURES))
    return torch.einsum("kt,tkn->kn", hot, logs), torch.as_tensor(degrees)


def mean_log(logs: Tensor, w: Tensor) -> Tensor:
    """The mean ``()`` of log-probabilities ``(n,)`` over samples with these weights; 0 without any."""
    return (logs * w).sum() / w.sum().clamp(min=1)


def distrusted(shares: Tensor, trust: Tensor, kept_is_mixed: Tensor) -> Tensor:
    """β ``(3,)`` with the mixture's share times ``trust`` ``()``, also u's if that is a mixture; v has the rest."""
    others = shares[1:] * torch.stack([trust, torch.where(kept_is_mixed, trust, 1)])
    lost = (shares[1:] - others).sum(0, keepdim=True)  # 1 − others could round to less than 0, which has no logarithm
    return torch.cat([shares[:1] + lost, others])
