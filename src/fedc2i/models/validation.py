"""What a `Model` can be made of: told by a module's layers, then by what it does with a few images.

Whatever would fail in the middle of a run, or give numbers that depend on what was computed before, is refused here in
one line.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from fedc2i.core import seeding
from fedc2i.core.errors import UserError, one_line
from fedc2i.core.params import Params

if TYPE_CHECKING:
    from fedc2i.models.model import Model

_PRECISIONS = (torch.float32, torch.float64)
_ROUNDING = 1e-5
_tried: WeakKeyDictionary[Model, dict[torch.Size, bool]] = WeakKeyDictionary()


def built(build: Callable[[], nn.Module], name: str) -> nn.Module:
    """A copy of what ``build`` gives.

    Raises:
        UserError: if that is no module, or none whose tensors can be exchanged for others.
    """
    with seeding.isolated(torch.device("cpu"), 0, "template"):
        module = build()
    if not isinstance(module, nn.Module):
        raise UserError(f"model '{name}' must be a torch.nn.Module or a function that builds one, got {_kind(module)}")
    for layer in module.modules():
        if isinstance(layer, torch.jit.ScriptModule):
            raise UserError(f"model '{name}' was made by torch.jit; give the torch.nn.Module it was made of")
        if hasattr(layer, "_orig_mod"):
            raise UserError(f"model '{name}' was made by torch.compile; give the torch.nn.Module it was made of")
    for own, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if nn.parameter.is_lazy(tensor):
            raise UserError(
                f"model '{name}': '{own}' has no shape yet; let the function that builds the module also call it once, "
                "with an image, or use layers that are not lazy"
            )
        if (tensor.is_floating_point() or tensor.is_complex()) and tensor.dtype not in _PRECISIONS:
            raise UserError(f"model '{name}': '{own}' is {_short(tensor.dtype)}, allowed are float32 and float64")
    try:
        return copy.deepcopy(module)
    except Exception as error:  # whatever a user's module may raise
        reason = _reason(error)
        if "torch.nn.utils.weight_norm" in str(error):
            reason = "use torch.nn.utils.parametrizations.weight_norm in place of torch.nn.utils.weight_norm"
        raise UserError(f"model '{name}' cannot be copied: {reason}") from None


def linear(module: nn.Module, head: str, name: str) -> nn.Linear:
    """The module's layer ``head``.

    Raises:
        UserError: if there is no such linear layer, or it is not plain: parametrised, or tied to another layer.
    """
    linears = [found for found, layer in module.named_modules() if isinstance(layer, nn.Linear)]
    if head not in linears:
        raise UserError(
            f"head '{head}' is not a linear layer of the module, allowed are {', '.join(linears) or 'none'}"
        )
    layer = module.get_submodule(head)
    assert isinstance(layer, nn.Linear)
    parts = dict(layer.named_parameters())
    if not parts.keys() <= {"weight", "bias"} or "weight" not in parts:
        raise UserError(
            f"model '{name}': head '{head}' must have a weight and at most a bias, got {', '.join(parts)}; "
            "norms of weights (weight_norm, spectral_norm) are for the layers before it"
        )
    for other, tensor in module.named_parameters(remove_duplicate=False):
        part = next((part for part, own in parts.items() if own is tensor), None)
        if part is not None and other != f"{head}.{part}":
            raise UserError(
                f"model '{name}': head '{head}' shares its {part} with '{other}'; methods treat the head apart, "
                "so it needs its own"
            )
    return layer


def try_out(model: Model, x: Tensor) -> bool:
    """Whether the model draws random numbers in training.

    Args:
        model: cut at its head.
        x: a few images of the data, uint8 ``(B, 3, H, W)``.

    Raises:
        UserError: for a model that cannot read the images, is not cut at its last operation, cannot be trained, or
            whose results depend on more than its parameters, buffers, input and torch's generator.
    """
    tried = _tried.setdefault(model, {})
    if x.shape[1:] not in tried:
        tried[x.shape[1:]] = _try(model, x)
    return tried[x.shape[1:]]


def trouble_with_one(model: Model, image: Sequence[int]) -> str | None:
    """Why the model cannot be trained on one sample at a time, as BatchNorm of features cannot; None if it can."""
    try:
        with seeding.isolated(torch.device("cpu"), 0, "check"), torch.no_grad():
            model.features(model.init(0, "check"), torch.zeros(1, *image, dtype=torch.uint8), training=True)
    except Exception as error:  # whatever a user's module may raise
        return _reason(error)
    return None


def _try(model: Model, x: Tensor) -> bool:
    params = model.init(0, "check")
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
    return _train(model, params, x)


def _whole(model: Model, params: Params, x: Tensor, seed: int) -> Tensor:
    """What the module itself makes of the images."""
    try:
        with torch.no_grad(), seeding.isolated(torch.device("cpu"), seed, "check"):
            whole = model.whole(params, x)
    except Exception as error:  # whatever a user's module may raise
        raise UserError(f"model '{model.name}' cannot read images of {tuple(x.shape[1:])}: {_reason(error)}") from None
    if not isinstance(whole, Tensor):
        raise UserError(
            f"model '{model.name}' must return one tensor of logits (batch, classes), got {_kind(whole)}; "
            "let its forward return the logits alone"
        )
    return whole


def _is_last(model: Model, params: Params, x: Tensor, whole: Tensor) -> bool:
    """Whether head of features is all that the module computes."""
    try:
        with torch.no_grad():
            features = model.features(params, x)
    except Exception:  # layers behind the head that cannot read its input
        return False
    if not isinstance(features, Tensor) or features.shape != (len(x), model.feature_size):
        return False
    return torch.allclose(whole, model.head(params, features), rtol=1e-4, atol=1e-5, equal_nan=True)


def _train(model: Model, params: Params, x: Tensor) -> bool:
    """Whether a step draws random numbers; from one start and one seed it must come out the same, as by plain torch."""
    noise = torch.randint(0, 256, (3, *x.shape[1:]), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    others = {name: 0.9 * params[name] for name in model.trainable}  # not those that a module given as such holds
    start = {**params, **others}
    found, draws = [], False
    for step in (_step, _step, _plain_step):
        own = _copy(start)
        try:
            with seeding.isolated(torch.device("cpu"), 0, "check"), torch.enable_grad():
                state = torch.get_rng_state()
                found.append(step(model, own, noise))
                draws = not torch.equal(state, torch.get_rng_state())
        except UserError:
            raise
        except Exception as error:  # whatever a user's module may raise
            raise UserError(f"model '{model.name}' cannot be trained: {_reason(error)}") from None
    one, two, plain = found
    if one.keys() != two.keys() or not all(_same(tensor, two[name]) for name, tensor in one.items()):
        raise UserError(
            f"model '{model.name}' gives other results in training for the same parameters and seed; let it draw "
            "random numbers from torch alone, and keep what it remembers in buffers"
        )
    if one.keys() != plain.keys() or not all(_same(tensor, plain[name]) for name, tensor in one.items()):
        raise UserError(
            f"model '{model.name}' has other gradients when it is given its parameters from outside; "
            "torch.utils.checkpoint does that, leave it out"
        )
    return draws


def _step(model: Model, params: Params, x: Tensor) -> Params:
    """Logits, gradients, and the statistics behind a step, with the model as a function."""
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
    module = model.module_with(params).train()
    state = dict((*module.named_parameters(), *module.named_buffers()))
    logits = module(model.scaled(params, x))
    state |= dict(module.named_buffers())  # some may have been exchanged
    return _results(logits, {name: state[name] for name in model.trainable}, state)


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


def _reason(error: Exception) -> str:
    return one_line((str(error).strip() or type(error).__name__).splitlines()[0])


def _kind(value: Any) -> str:
    return f"a {type(value).__name__}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
