"""Validates a model on a few samples of the data.

What would fail in the middle of a run, or give numbers that depend on what was computed before, is refused here in one
line.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from fedc2i.core import seeding
from fedc2i.core.errors import UserError
from fedc2i.core.params import Params
from fedc2i.data.federation import InputSpec
from fedc2i.models.model import Model, reason_of

_ROUNDING = 1e-5
_validated: WeakKeyDictionary[Model, set[InputSpec]] = WeakKeyDictionary()  # for which samples


def validate(model: Model, x: Tensor, classes: int) -> None:
    """Checks that a model fits the data and can be trained, and finds out whether that draws random numbers.

    Args:
        model: what to validate; `Model.has_dropout` is set if it draws random numbers.
        x: a few samples of the data ``(B, ...)``.
        classes: how many classes the data has.

    Raises:
        UserError: for another number of classes, or for a model that cannot read the samples, is not cut at its last
            operation, cannot be trained, or whose results depend on more than its parameters, buffers, input and
            torch's generator.
    """
    if model.classes != classes:
        raise UserError(f"model '{model.name}' has {model.classes} outputs, but the data has {classes} classes")
    seen = _validated.setdefault(model, set())
    sample = InputSpec.of(x)
    if sample not in seen:
        params = model.init(0, "check")
        _validate_evaluation(model, params, x)
        if not model.has_constant_body:  # a linear head alone can be trained
            model.has_dropout = _validate_training(model, params, sample.noise(3)) or model.has_dropout
        seen.add(sample)


def why_not_one_sample(model: Model, sample: InputSpec) -> str | None:
    """Why the model cannot be trained on one sample at a time, as BatchNorm of features cannot; None if it can."""
    try:
        with seeding.isolated(torch.device("cpu"), 0, "check"), torch.no_grad():
            model.features(model.init(0, "check"), sample.zeros(1), training=True)
    except Exception as error:  # whatever a user's module may raise
        return reason_of(error)
    return None


def _validate_evaluation(model: Model, params: Params, x: Tensor) -> None:
    before = _copy(params)
    whole = _whole(model, params, x, seed=0)
    if not all(torch.equal(tensor, before[name]) for name, tensor in params.items()):
        raise UserError(
            f"model '{model.name}' changes its buffers at evaluation; let it do so only where self.training is true"
        )
    if not _same(whole, _whole(model, params, x, seed=1)):
        raise UserError(
            f"model '{model.name}' gives other results every time at evaluation; let it draw random numbers only where "
            "self.training is true, as F.dropout(x, training=self.training) does"
        )
    if not _is_last(model, params, x, whole):
        raise UserError(
            f"model '{model.name}': '{model.head_layer}' must be its last operation and read features of shape "
            "(batch, features); end the module with that linear layer, a plain one, and leave softmax to the loss"
        )


def _whole(model: Model, params: Params, x: Tensor, seed: int) -> Tensor:
    """The output of the module itself."""
    try:
        with torch.no_grad(), seeding.isolated(torch.device("cpu"), seed, "check"):
            whole = model.whole(params, x)
    except Exception as error:  # whatever a user's module may raise
        raise UserError(f"model '{model.name}' cannot read {InputSpec.of(x)}: {reason_of(error)}") from None
    if not isinstance(whole, Tensor):
        raise UserError(
            f"model '{model.name}' must return one tensor of logits (batch, classes), got a {type(whole).__name__}; "
            "let its forward return the logits alone"
        )
    return whole


def _is_last(model: Model, params: Params, x: Tensor, whole: Tensor) -> bool:
    """Whether the module computes the head of the features and nothing after it."""
    try:
        with torch.no_grad():
            features = model.features(params, x)
    except Exception:  # layers after the head that cannot read its input
        return False
    if not isinstance(features, Tensor) or features.shape != (len(x), model.feature_size):
        return False
    return torch.allclose(whole, model.head(params, features), rtol=1e-4, atol=1e-5, equal_nan=True)


def _validate_training(model: Model, params: Params, noise: Tensor) -> bool:
    """Whether a training step draws random numbers.

    From the same parameters and seed, a second step and one by plain torch must give the same results.
    """
    others = {name: 0.9 * params[name] for name in model.trainable}  # the module itself may hold `params`
    start = {**params, **others}
    found, draws = [], False
    adapts = model.part is not None and model.part.projections  # the module itself knows no adapters
    for step in (_step, _step, _step if adapts else _plain_step):
        own = _copy(start)
        try:
            with seeding.isolated(torch.device("cpu"), 0, "check"), torch.enable_grad():
                state = torch.get_rng_state()
                found.append(step(model, own, noise))
                draws = not torch.equal(state, torch.get_rng_state())
        except UserError:
            raise
        except Exception as error:  # whatever a user's module may raise
            raise UserError(f"model '{model.name}' cannot be trained: {reason_of(error)}") from None
    one, two, plain = found
    if one.keys() != two.keys() or not all(_same(tensor, two[name]) for name, tensor in one.items()):
        raise UserError(
            f"model '{model.name}' gives other results in training for the same parameters and seed; let it draw "
            "random numbers from torch alone, and keep what it remembers in buffers"
        )
    if one.keys() != plain.keys() or not all(_same(tensor, plain[name]) for name, tensor in one.items()):
        raise UserError(
            f"model '{model.name}' has other gradients when it is given its parameters from outside; "
            "torch.utils.checkpoint does that, remove it"
        )
    return draws


def _step(model: Model, params: Params, x: Tensor) -> Params:
    """Logits, gradients and statistics of a step, with the model as a function."""
    leaves = {name: params[name].requires_grad_() for name in model.trainable}
    features = model.features(params, x, training=True)
    if leaves.keys() & set(model.body_names) and not features.requires_grad:
        raise UserError(
            f"model '{model.name}': no gradient reaches the layers before '{model.head_layer}'; if they are not to be "
            "trained, freeze them with requires_grad_(False)"
        )
    return _results(model.head(params, features), leaves, params)


def _plain_step(model: Model, params: Params, x: Tensor) -> Params:
    """The same, with the module itself."""
    module = model.module_with(params)
    model.switch(module, True)
    state = dict((*module.named_parameters(), *module.named_buffers()))
    logits = module(model.scaled(params, x))
    state |= dict(module.named_buffers())  # the module may have replaced some
    return _results(logits, {name: state[name] for name in model.trainable}, {name: state[name] for name in params})


def _results(logits: Tensor, leaves: Params, state: Params) -> Params:
    loss = F.cross_entropy(logits, torch.arange(len(logits)) % logits.shape[1])
    gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True) if leaves else ()
    found = {f"gradient of {name}": own for name, own in zip(leaves, gradients, strict=True) if own is not None}
    return {name: tensor.detach() for name, tensor in {**state, **found, "logits": logits}.items()}


def _same(one: Tensor, two: Tensor) -> bool:
    if not one.is_floating_point() or one.shape != two.shape:
        return torch.equal(one, two)
    one, two = one.nan_to_num(), two.nan_to_num()
    return bool(torch.dist(one, two) <= _ROUNDING * (two.norm() + 1))


def _copy(params: Params) -> Params:
    return {name: tensor.detach().clone() for name, tensor in params.items()}
