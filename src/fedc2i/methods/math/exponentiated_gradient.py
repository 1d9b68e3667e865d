"""Influence by exponentiated gradient descent: the weights with which received models lower a client's loss.

A client looks for a mixture of K received models, bodies θ_i and rows φ_{i,c} of their heads,

    θ̄ = Σ_i λ_i θ_i,    φ̄_c = Σ_i Λ_{i,c} φ_{i,c},

in which its loss l is small. It begins with equal weights. A step multiplies every weight by what the gradient of l at
the present mixture says of the model (Kivinen and Warmuth, 1997):

    λ_i     ← λ_i     · exp(−η ⟨∂l/∂θ̄, θ_i⟩ / max(l, ½)),        normalised over i
    Λ_{i,c} ← Λ_{i,c} · exp(−η ⟨∂l/∂φ̄_c, φ_{i,c}⟩ / max(l, ½)),  normalised over i

The first step is FedC²I's influence to first order, with γ = η·(K − 1): λ_i ∝ l_{-i}^γ and
log l_{-i} ≈ log l + ⟨∂l/∂θ̄, θ̄ − θ_i⟩/((K − 1)·l). But l is that of the whole mixture, where FedC²I measures bodies
with the client's own head, and heads with its own body. Later steps see what the first one changed, so models that do
not help lose their weight however many they are. A loss below ½ is one of samples that are fitted: then l, not log l,
counts.

The client's own model has been trained on the samples of l, which says nothing in its favour. So it is not measured: it
has the weight of the best other model.

Functions here can be lifted over clients with vmap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from fedc2i.core.params import Params, mix, select
from fedc2i.methods.math.influence import sharp_cross_entropy
from fedc2i.methods.messages import Peers
from fedc2i.training.local import Batch, gradient_and_value

FITTED = 0.5  # nats: a smaller loss counts as this one


def descend(
    logits: Callable[[Params, Tensor], Tensor],
    peers: Peers,
    parts: Sequence[Batch],
    rate: float,
    trainable: Iterable[str],
    classes: int,
) -> tuple[Tensor, Tensor]:
    """λ ``(K,)`` and Λ ``(K, C)`` after one step on each of ``parts``.

    Args:
        logits: of a mixture of the models, and samples ``(B, ...)``.
        peers: the received models.
        parts: labelled samples of the client.
        rate: η; 0 leaves equal weights.
        trainable: names that have a gradient; other parts of a body, such as running statistics, are only mixed.
        classes: C.
    """
    free, count = select(peers.models, trainable), len(peers.valid)
    vector = next(iter(peers.heads.values())).new_zeros(count)  # logarithms of λ and Λ, but for a normalising constant
    matrix = vector[:, None].repeat(1, classes)
    for samples in parts:
        mixture = mixed(peers, normalised(vector, peers), normalised(matrix, peers))

        def loss(some: Params, mixture: Params = mixture, samples: Batch = samples) -> Tensor:
            return sharp_cross_entropy(logits({**mixture, **some}, samples.x), samples.y, samples.w)

        gradient, value = gradient_and_value(loss, {name: mixture[name] for name in free})
        step = rate / value.clamp(min=FITTED)
        for name, tensor in free.items():
            slope = gradient[name]
            if name in peers.head_names:
                matrix = matrix - _finite(step * torch.einsum("kcd,cd->kc", _rows(tensor, 1), _rows(slope, 0)))
            else:  # as the weight of a linear layer the stack is never copied, not even for many clients' gradients
                vector = vector - _finite(step * F.linear(slope.flatten(), tensor.flatten(1)))
    return normalised(vector, peers), normalised(matrix, peers)


def normalised(logs: Tensor, peers: Peers) -> Tensor:
    """Weights over the valid models from logarithms ``(K, ...)``, the own one's as large as the best other's."""
    shape = (-1, *[1] * (logs.ndim - 1))
    valid, own = peers.valid.reshape(shape), peers.own.reshape(shape)
    best = torch.where(valid & ~own, logs, -torch.inf).amax(0)  # of the others
    relative = torch.where(own, 0, logs - best)
    return torch.where(valid, relative, -torch.inf).softmax(0).nan_to_num(nan=0)  # nan where no model is valid


def mixed(peers: Peers, vector: Tensor, matrix: Tensor) -> Params:
    """θ̄ by λ ``(K,)`` and φ̄ by Λ ``(K, C)``."""
    return {**mix(vector, peers.bodies), **mix(matrix, peers.heads)}


def _rows(tensor: Tensor, axis: int) -> Tensor:
    """A weight or a bias, or a stack of them, with one vector for each class."""
    return tensor.reshape(*tensor.shape[: axis + 1], -1)


def _finite(values: Tensor) -> Tensor:
    """With 0 where a gradient was not finite."""
    return torch.where(values.isfinite(), values, 0)
