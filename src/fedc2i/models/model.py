"""Models as pure functions of a parameter mapping, cut in two at their last linear layer.

`Model` wraps any ``torch.nn.Module``: its *body* θ is everything up to the input of the last linear layer, its *head* φ
is that layer, one row (with its bias entry) per class. Methods see only names and tensors, never the module.
`fedc2i.models.validation` finds out whether a model can be trained on given data.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F  # noqa: N812

from fedc2i.core import seeding
from fedc2i.core.errors import UserError, one_line
from fedc2i.core.params import Params
from fedc2i.data.federation import InputSpec

_PRECISIONS = (torch.float32, torch.float64)
_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm)


class Model:
    """A module as pure functions: ``features(params, x)`` and ``head(params, h)``.

    Attributes:
        name: for tables and run folders.
        head_layer: the module's name of the head.
        head_names: names of the head's weight and, if it has one, its bias.
        body_names: all other parameters and buffers.
        trainable: names of the parameters that are trained, in the module's order.
        norm_names: the body's names that belong to normalisation layers.
        has_statistics: whether BatchNorm layers take statistics of a batch in training.
        evaluates_in_batches: whether some do so at evaluation, too.
        has_dropout: whether it draws random numbers in training, by its layers or as seen when it was validated.
        made_for: the samples and the number of classes that a model of this package was built for.
    """

    def __init__(self, build: Callable[[], nn.Module], head: str, name: str = "custom") -> None:
        module = _build(build, name)
        layer = _head_layer(module, head, name)
        self.name = name
        self.made_for: tuple[InputSpec, int] | None = None
        self.head_layer = head
        self.classes = layer.out_features
        self.feature_size = layer.in_features
        self._build = build
        self.head_names = tuple(f"{head}.{part}" for part in ("weight", "bias") if getattr(layer, part) is not None)
        state = [*module.named_parameters(), *module.named_buffers()]
        self.body_names = tuple(name for name, _ in state if name not in self.head_names)
        self.trainable = tuple(name for name, tensor in module.named_parameters() if tensor.requires_grad)
        norms = {name for name, layer in module.named_modules() if isinstance(layer, _NORMS)}
        self.norm_names = tuple(name for name in self.body_names if name.rpartition(".")[0] in norms)
        batch_norms = [layer for layer in module.modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)]
        self.has_statistics = bool(batch_norms)
        self.evaluates_in_batches = any(not layer.track_running_stats for layer in batch_norms)
        self.has_dropout = any(isinstance(layer, nn.modules.dropout._DropoutNd) for layer in module.modules())
        body = copy.deepcopy(module)
        parent, _, leaf = head.rpartition(".")
        setattr(body.get_submodule(parent), leaf, nn.Identity())
        self._module, self._body = _PerThread(module), _PerThread(body)

    def init(self, seed: int, *parts: str | int) -> Params:
        """Fresh parameters and buffers, drawn under a key; the same key gives the same model."""
        with seeding.isolated(torch.device("cpu"), seed, *parts):
            module = self._build()
        state = [*module.named_parameters(), *module.named_buffers()]
        return {name: tensor.detach().clone() for name, tensor in state}

    def features(self, params: Params, x: Tensor, training: bool = False) -> Tensor:
        """h(x) ``(B, d)``: what the head sees. Training mode updates running statistics in ``params`` in place."""
        body = {name: params[name] for name in self.body_names}
        module = self._body.get()
        if module.training != training:
            module.train(training)
        features: Tensor = functional_call(module, body, (self.scaled(params, x),))
        for name, tensor in body.items() if training else ():
            if tensor is not params[name]:  # the module replaced the buffer instead of writing to it
                params[name].copy_(tensor.detach())
        return features

    def whole(self, params: Params, x: Tensor) -> Any:
        """What the module itself returns at evaluation: logits, if the model is valid."""
        return functional_call(self._module.get().eval(), params, (self.scaled(params, x),))

    def module_with(self, params: Params) -> nn.Module:
        """A copy of the module itself that holds these parameters and buffers."""
        module = copy.deepcopy(self._module.get())
        with torch.no_grad():
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                tensor.copy_(params[name])
        return module

    def scaled(self, params: Params, x: Tensor) -> Tensor:
        """Samples as the module reads them, in the precision of its head."""
        return scale(x, params[self.head_names[0]].dtype)

    def head(self, params: Params, h: Tensor) -> Tensor:
        """Logits ``(B, C)`` of features ``(B, d)``."""
        weight, bias = self.split_head(params)
        return F.linear(h, weight, bias)

    def split_head(self, params: Params) -> tuple[Tensor, Tensor | None]:
        """The head's weight ``(C, d)`` and its bias ``(C,)``, if it has one (or ``(K, C, d)`` of a stack)."""
        return params[self.head_names[0]], params[self.head_names[1]] if len(self.head_names) > 1 else None


class _PerThread:
    """A module with one copy for each thread, because a functional call puts other tensors into it for a while."""

    def __init__(self, module: nn.Module) -> None:
        self._template = module
        self._copies = threading.local()

    def get(self) -> nn.Module:
        """This thread's copy."""
        if not hasattr(self._copies, "module"):
            self._copies.module = copy.deepcopy(self._template)
        module: nn.Module = self._copies.module
        return module

    def __reduce__(self) -> tuple[type[_PerThread], tuple[nn.Module]]:
        return _PerThread, (self._template,)


def _build(build: Callable[[], nn.Module], name: str) -> nn.Module:
    """A copy of the module that ``build`` makes; refused unless its tensors can be replaced by others."""
    with seeding.isolated(torch.device("cpu"), 0, "template"):
        module = build()
    if not isinstance(module, nn.Module):
        kind = type(module).__name__
        raise UserError(f"model '{name}' must be a torch.nn.Module or a function that builds one, got a {kind}")
    for layer in module.modules():
        if isinstance(layer, torch.jit.ScriptModule):
            raise UserError(f"model '{name}' was made by torch.jit; give the torch.nn.Module it was made of")
        if hasattr(layer, "_orig_mod"):
            raise UserError(f"model '{name}' was made by torch.compile; give the torch.nn.Module it was made of")
    for own, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if nn.parameter.is_lazy(tensor):
            raise UserError(
                f"model '{name}': '{own}' has no shape yet; let the function that builds the module also call it once, "
                "with a sample, or use layers that are not lazy"
            )
        if (tensor.is_floating_point() or tensor.is_complex()) and tensor.dtype not in _PRECISIONS:
            precision = str(tensor.dtype).removeprefix("torch.")
            raise UserError(f"model '{name}': '{own}' is {precision}, allowed are float32 and float64")
    try:
        return copy.deepcopy(module)
    except Exception as error:  # whatever a user's module may raise
        reason = reason_of(error)
        if "torch.nn.utils.weight_norm" in str(error):
            reason = "use torch.nn.utils.parametrizations.weight_norm in place of torch.nn.utils.weight_norm"
        raise UserError(f"model '{name}' cannot be copied: {reason}") from None


def _head_layer(module: nn.Module, head: str, name: str) -> nn.Linear:
    """The module's layer ``head``; refused unless it is a linear layer, not parametrised or tied to another."""
    linears = {found: layer for found, layer in module.named_modules() if isinstance(layer, nn.Linear)}
    if head not in linears:
        allowed = ", ".join(linears) or "none"
        raise UserError(f"head '{head}' is not a linear layer of the module, allowed are {allowed}")
    parts = dict(linears[head].named_parameters())
    if not parts.keys() <= {"weight", "bias"} or "weight" not in parts:
        raise UserError(
            f"model '{name}': head '{head}' must have a weight and at most a bias, got {', '.join(parts)}; "
            "norms of weights (weight_norm, spectral_norm) are for the layers before it"
        )
    for other, tensor in module.named_parameters(remove_duplicate=False):
        part = next((part for part, own in parts.items() if own is tensor), None)
        if part is not None and other != f"{head}.{part}":
            raise UserError(
                f"model '{name}': head '{head}' shares its {part} with '{other}'; methods treat the head separately, "
                "so it needs its own"
            )
    return linears[head]


def reason_of(error: Exception) -> str:
    """The first line of what a user's module raised."""
    return one_line((str(error).strip() or type(error).__name__).splitlines()[0])


def scale(x: Tensor, dtype: torch.dtype) -> Tensor:
    """uint8 images to (x/255 − 0.5)/0.5, i.e. −1..1; samples of another type are scaled already."""
    return x.to(dtype) * (2 / 255) - 1 if x.dtype == torch.uint8 else x.to(dtype)


def split(module: nn.Module | Callable[[], nn.Module], head: str, name: str = "custom") -> Model:
    """Any torch module as a `Model`, cut at its last linear layer.

    Args:
        module: a function that builds the module (each seed then starts from its own random weights), or a module
            (whose present weights, e.g. pre-trained ones, are then the start of every run).
        head: the name of its last linear layer, e.g. ``"fc"`` or ``"classifier.6"``.
        name: for tables and run folders.

    Raises:
        UserError: if there is no such linear layer; the message lists those there are.

    Example:
        >>> from torch import nn
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 16), nn.ReLU(), nn.Linear(16, 10))
        >>> split(net, head="3").head_names
        ('3.weight', '3.bias')
    """
    if isinstance(module, nn.Module):
        fixed = module
        return Model(lambda: fixed, head, name)
    return Model(module, head, name)
