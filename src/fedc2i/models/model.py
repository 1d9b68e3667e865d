"""Models as pure functions of a parameter mapping, cut in two at their last linear layer.

`Model` wraps any ``torch.nn.Module``: its *body* θ is everything up to the input of the last linear layer, its *head* φ
is that layer, one row (with its bias entry) per class. Methods see only names and tensors, never the module.
What does not train (`fedc2i.models.trained_part`) stays in the module as a constant, and is in no parameter mapping: so
it is never sent, mixed or saved. `fedc2i.models.validation` finds out whether a model can be trained on given data.
"""

from __future__ import annotations

import copy
import hashlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F  # noqa: N812

from fedc2i.core import seeding
from fedc2i.core.errors import UserError, one_line
from fedc2i.core.params import Params
from fedc2i.data.federation import InputSpec

if TYPE_CHECKING:
    from fedc2i.models.trained_part import TrainedPart

_PRECISIONS = (torch.float32, torch.float64)
_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm)


class Model:
    """A module as pure functions: ``features(params, x)`` and ``head(params, h)``.

    Attributes:
        name: for tables and run folders.
        head_layer: the module's name of the head.
        head_names: names of the head's weight and, if it has one, its bias.
        body_names: all other parameters and buffers, but for those that are constant.
        trainable: names of the parameters that are trained, in the module's order.
        part: what of the module is not constant; None: nothing is.
        norm_names: the body's names that belong to normalisation layers.
        has_statistics: whether BatchNorm layers take statistics of a batch in training.
        evaluates_in_batches: whether some do so at evaluation, too.
        has_dropout: whether it draws random numbers in training, by its layers or as seen when it was validated.
        made_for: the samples and the number of classes that a model of this package was built for.
    """

    def __init__(
        self, build: Callable[[], nn.Module], head: str, name: str = "custom", part: TrainedPart | None = None
    ) -> None:
        module = _build(build, name)
        layer = _head_layer(module, head, name)
        self.name = name
        self.made_for: tuple[InputSpec, int] | None = None
        self.head_layer = head
        self.classes = layer.out_features
        self.feature_size = layer.in_features
        self._build = build
        self.part = part
        self.head_names = tuple(f"{head}.{part}" for part in ("weight", "bias") if getattr(layer, part) is not None)
        if part is not None:
            part.freeze(module)
        state = {name: tensor for name, tensor in _state(module).items() if part is None or name in part.names}
        adapters = () if part is None else part.adapter_names
        self.body_names = (*(name for name in state if name not in self.head_names), *adapters)
        self.trainable = (*(name for name, tensor in state.items() if tensor.requires_grad), *adapters)
        norms = {name for name, layer in module.named_modules() if isinstance(layer, _NORMS)}
        self.norm_names = tuple(name for name in self.body_names if name.rpartition(".")[0] in norms)
        moving = [layer for name, layer in module.named_modules() if part is None or name not in part.still]
        batch_norms = [layer for layer in moving if isinstance(layer, nn.modules.batchnorm._BatchNorm)]
        self.has_statistics = bool(batch_norms)
        self.evaluates_in_batches = any(not layer.track_running_stats for layer in batch_norms)
        self.has_dropout = any(isinstance(layer, nn.modules.dropout._DropoutNd) for layer in moving)
        body = copy.deepcopy(module)
        parent, _, leaf = head.rpartition(".")
        setattr(body.get_submodule(parent), leaf, nn.Identity())
        self._module, self._body = _PerThread(module), _PerThread(body)

    def init(self, seed: int, *parts: str | int) -> Params:
        """Fresh parameters and buffers, drawn under a key; the same key gives the same model."""
        with seeding.isolated(torch.device("cpu"), seed, *parts):
            return self.draw()

    def draw(self) -> Params:
        """Fresh parameters and buffers from torch's global generator; weights that were loaded are as they are.

        For `Method.setup`, which runs under a key.
        """
        state = _state(self._build())
        names = [name for name in state if self.part is None or name in self.part.names]
        fresh = {name: state[name].detach().clone() for name in names}
        return fresh if self.part is None else {**fresh, **self.part.new_adapters(state)}

    def features(self, params: Params, x: Tensor, training: bool = False) -> Tensor:
        """h(x) ``(B, d)``: what the head sees. Training mode updates running statistics in ``params`` in place."""
        module = self._body.get(None if self.part is None else x.device)
        self.switch(module, training)
        body = self.tensors({name: params[name] for name in self.body_names}, module)
        features: Tensor = functional_call(module, body, (self.scaled(params, x),))
        for name, tensor in body.items() if training else ():
            if name in params and tensor is not params[name]:  # the module replaced the buffer instead of writing to it
                params[name].copy_(tensor.detach())
        return features

    def tensors(self, params: Params, module: nn.Module) -> Params:
        """What replaces the module's own tensors: ``params``, with adapters added to the constants that they adapt."""
        return params if self.part is None else self.part.merged(params, module)

    def switch(self, module: nn.Module, training: bool) -> None:
        """Puts a module into training or evaluation mode; what is constant is always in evaluation mode."""
        still = frozenset[str]() if self.part is None else self.part.still
        training = training and "" not in still
        if module.training != training:
            module.train(training)
            for name in still if training else ():
                module.get_submodule(name).eval()

    def rebuilt(self, wrap: Callable[[Callable[[], nn.Module]], Callable[[], nn.Module]]) -> Model:
        """The same with what ``wrap`` makes of the function that builds the module."""
        return Model(wrap(self._build), self.head_layer, self.name, self.part)

    def restricted(self, train: str, statistics: bool) -> Model:
        """The same, of which only a part is trained; see `trained_part.choose`."""
        from fedc2i.models.trained_part import choose

        part = choose(self._module.get(None), self.head_layer, train, statistics)
        return Model(self._build, self.head_layer, self.name, part)

    @property
    def trained_text(self) -> str:
        """What trains, as the setting ``train`` has it."""
        return "all" if self.part is None else self.part.text

    @property
    def has_constant_body(self) -> bool:
        """Whether only the head trains, so that features can be computed once."""
        return self.part is not None and not self.body_names

    def constants_digest(self) -> str:
        """SHA-256 of all that does not train; empty if everything does."""
        if self.part is None:
            return ""
        found = hashlib.sha256()
        for name, tensor in _state(self._module.get(None)).items():
            if name not in self.part.names:
                found.update(name.encode() + tensor.detach().contiguous().numpy().tobytes())
        return found.hexdigest()

    def body_module(self) -> nn.Module:
        """A copy of the body as a plain module in evaluation mode; of a model whose body is constant."""
        return copy.deepcopy(self._body.get(None)).eval()

    def on_features(self) -> Model:
        """The head alone, which reads features in place of samples; of a model whose body is constant."""
        return Model(lambda: HeadOnly(self._build(), self.head_layer), self.head_layer, self.name)

    def whole(self, params: Params, x: Tensor) -> Any:
        """What the module itself returns at evaluation: logits, if the model is valid."""
        module = self._module.get(None if self.part is None else x.device).eval()
        own = {name: params[name] for name in (*self.body_names, *self.head_names)}
        return functional_call(module, self.tensors(own, module), (self.scaled(params, x),))

    def module_with(self, params: Params) -> nn.Module:
        """A copy of the module itself that holds these parameters and buffers, and adapters merged into its weights."""
        module = copy.deepcopy(self._module.get(None))
        own = _state(module)
        with torch.no_grad():
            for name, tensor in self.tensors(params, module).items():
                if name in own:
                    own[name].copy_(tensor)
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


class HeadOnly(nn.Module):
    """The head of a module under its name there; it reads features ``(B, d)``."""

    def __init__(self, module: nn.Module, head: str) -> None:
        super().__init__()
        self._path = head
        inner: nn.Module = self
        *parents, leaf = head.split(".")
        for name in parents:
            inner.add_module(name, nn.Module())
            inner = inner.get_submodule(name)
        inner.add_module(leaf, module.get_submodule(head))

    def forward(self, features: Tensor) -> Tensor:
        """Features to logits."""
        return self.get_submodule(self._path)(features)  # type: ignore[no-any-return]


class _PerThread:
    """A module with one copy for each thread, because a functional call puts other tensors into it for a while."""

    def __init__(self, module: nn.Module) -> None:
        self._template = module
        self._copies = threading.local()

    def get(self, device: torch.device | None) -> nn.Module:
        """This thread's copy for a device; None where all of its tensors are replaced."""
        copies: dict[torch.device | None, nn.Module] = self._copies.__dict__.setdefault("modules", {})
        if device not in copies:
            own = copy.deepcopy(self._template)
            copies[device] = own if device is None else own.to(device)  # even to nowhere fails inside vmap
        return copies[device]

    def __reduce__(self) -> tuple[type[_PerThread], tuple[nn.Module]]:
        return _PerThread, (self._template,)


def _state(module: nn.Module) -> Params:
    """Parameters, then buffers, by name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


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


def split(module: nn.Module | Callable[[], nn.Module], head: str | None = None, name: str = "custom") -> Model:
    """Any torch module as a `Model`, cut at its last linear layer.

    Args:
        module: a function that builds the module (each seed then starts from its own random weights), or a module
            (whose present weights, e.g. pre-trained ones, are then the start of every run).
        head: the name of its last linear layer, e.g. ``"fc"`` or ``"classifier.6"``; None: the last that it has.
        name: for tables and run folders.

    Raises:
        UserError: if there is no such linear layer; the message lists those there are.

    Example:
        >>> from torch import nn
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 16), nn.ReLU(), nn.Linear(16, 10))
        >>> split(net, head="3").head_names
        ('3.weight', '3.bias')
    """
    build = (lambda: module) if isinstance(module, nn.Module) else module
    return Model(build, last_linear(_build(build, name)) if head is None else head, name)


def last_linear(module: nn.Module) -> str:
    """The name of the last linear layer, in the order in which the module has them; empty if there is none."""
    linears = [name for name, layer in module.named_modules() if isinstance(layer, nn.Linear)]
    return linears[-1] if linears else ""
