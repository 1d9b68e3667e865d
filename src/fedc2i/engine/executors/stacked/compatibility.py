"""Whether clients can be stacked with a model: two of them take a step, together and one after the other.

A user's module may hold what ``torch.func.vmap`` cannot run (a recurrent layer, a branch on a tensor's value), or may
mix the samples of a batch, among which stacked clients have padding. Neither shows in its layers' names.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.func import vmap
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode

from fedc2i.core import seeding
from fedc2i.core.errors import one_line
from fedc2i.core.params import Params, Stacked, row, stack
from fedc2i.data.federation import InputSpec
from fedc2i.engine.executors.stacked.vmap_rules import VmapRules
from fedc2i.models.model import Model
from fedc2i.training.local import Batch

_CLIENTS, _SAMPLES = 2, 3
_TOLERANCE = 1e-2  # rounding is far below, the weight of a padded sample far above
_known: WeakKeyDictionary[Model, dict[InputSpec, str | None]] = WeakKeyDictionary()
_DROPOUTS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout)


def obstacle(model: Model, sample: InputSpec) -> str | None:
    """Why clients cannot be stacked with a valid model on such samples, as the end of a sentence; None if not.

    It is tried on a CPU, whatever the device of the run: the answer is the same on every machine.
    """
    if model.evaluates_in_batches:
        return "takes batch statistics at evaluation, too"
    known, key = _known.setdefault(model, {}), sample
    if key not in known:
        known[key] = _find(model, sample)
    return known[key]


def _find(model: Model, sample: InputSpec) -> str | None:
    """In double precision, where rounding hides nothing; in the model's own if it has operations for that alone."""
    params = stack([model.init(0, "compatibility", k) for k in range(_CLIENTS)])
    batch = _batches(sample, model.classes)
    reason = ""
    for exact in (True, False):
        exactly = {name: tensor.double() for name, tensor in params.items() if exact and tensor.is_floating_point()}
        try:
            with warnings.catch_warnings(), seeding.isolated(torch.device("cpu"), 0, "compatibility"):
                warnings.simplefilter("ignore")  # of operations that vmap runs slowly
                same = _is_same(model, {**params, **exactly}, batch)
            return None if same else "mixes the samples of a batch, and stacked clients have padding among them"
        except Exception as error:  # whatever vmap or a user's module may raise
            reason = (str(error).strip() or type(error).__name__).splitlines()[0].split(". ")[0].removeprefix("vmap: ")
    return f"has an operation that cannot run for several clients at once ({one_line(reason, 120)})"


def _is_same(model: Model, params: Stacked, batch: Batch) -> bool:
    """Whether two clients compute together what they compute apart."""
    together = _together(model, params, batch)
    if model.has_dropout:  # masks are not the same; without them, the rest must be
        state = torch.get_rng_state()
        with _Still():
            together = _together(model, params, batch)
        if not torch.equal(state, torch.get_rng_state()):
            together = {"evaluated": together["evaluated"]}
    with _Still() if model.has_dropout else nullcontext():
        apart = stack([_alone(model, row(params, k), Batch(*(part[k] for part in batch))) for k in range(_CLIENTS)])
    return all(_agree(own, apart[name], params.get(name)) for name, own in together.items())


def _batches(sample: InputSpec, classes: int) -> Batch:
    """Noise; the second client's last sample is padding, filled up as the stepper does."""
    x = sample.noise(_CLIENTS * _SAMPLES).reshape(_CLIENTS, _SAMPLES, *sample.shape)
    w = torch.ones(_CLIENTS, _SAMPLES)
    x[-1, -1], w[-1, -1] = x[-1, 0], 0.0
    return Batch(x, torch.arange(_CLIENTS * _SAMPLES).reshape(_CLIENTS, _SAMPLES) % classes, w)


def _together(model: Model, params: Stacked, batch: Batch) -> Stacked:
    """Loss, gradients and statistics of a step, and losses at evaluation, of all clients by vmap."""

    def loss(free: Params, fixed: Params, batch: Batch) -> Tensor:
        with VmapRules(batch.w):
            return batch.mean(_losses(model, {**free, **fixed}, batch, training=True))

    def evaluate(params: Params, batch: Batch) -> Tensor:
        return _losses(model, params, batch, training=False)

    seeds = Batch(*(part[None] for part in batch))
    found = _stepped(model, {name: own[None] for name, own in params.items()}, lambda *own: _lift(loss)(*own, seeds))
    with torch.no_grad():
        found["evaluated"] = _lift(evaluate)({name: own[None] for name, own in params.items()}, seeds) * batch.w
    return {name: tensor[0] for name, tensor in found.items()}


def _alone(model: Model, params: Params, batch: Batch) -> Params:
    """The same of one client, without padding and in the plain way."""
    real = batch.take(batch.w.nonzero()[:, 0])
    found = _stepped(model, params, lambda *own: real.mean(_losses(model, {**own[0], **own[1]}, real, training=True)))
    with torch.no_grad():
        losses = _losses(model, params, real, training=False)
    return {**found, "evaluated": F.pad(losses, (0, _SAMPLES - len(losses)))}


def _stepped(model: Model, params: Params, loss: Callable[[Params, Params], Tensor]) -> Params:
    """Loss, gradients and statistics after a step; nothing for a model of which nothing is trained."""
    free = {name: params[name].detach().clone().requires_grad_() for name in model.trainable}
    fixed = {name: tensor.detach().clone() for name, tensor in params.items() if name not in free}
    if not free:
        return {}
    with torch.enable_grad():
        value = loss(free, fixed)
        gradients = torch.autograd.grad(value.sum(), list(free.values()), allow_unused=True)
    found = {f"gradient of {name}": own for name, own in zip(free, gradients, strict=True) if own is not None}
    return {**found, **fixed, "loss": value.detach()}


def _losses(model: Model, params: Params, batch: Batch, training: bool) -> Tensor:
    logits = model.head(params, model.features(params, batch.x, training))
    return F.cross_entropy(logits, batch.y, reduction="none")


def _lift(function: Callable[..., Any]) -> Callable[..., Any]:
    """Over clients, then seeds."""
    return vmap(vmap(function, randomness="different"), randomness="different")


def _agree(one: Tensor, two: Tensor, start: Tensor | None) -> bool:
    """Whether both are the same but for rounding; of statistics, whether they changed alike."""
    if not one.is_floating_point():
        return torch.equal(one, two)
    size = two.norm() if start is None else (two - start).norm()
    return bool(torch.dist(one, two) <= _TOLERANCE * size + 1e-5 * two.norm() + 1e-5)


class _Still(TorchFunctionMode):
    """Within this context dropout drops nothing."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            return args[0]
        if func is F.multi_head_attention_forward:
            kwargs = {**kwargs, "training": False}
        if func is F.scaled_dot_product_attention:
            args = (*args[:4], *(0.0 for _ in args[4:5]), *args[5:])
            kwargs = {name: 0.0 if name == "dropout_p" else value for name, value in kwargs.items()}
        return func(*args, **kwargs)
