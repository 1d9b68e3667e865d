"""What of a model trains: its head, its last blocks, low-rank adapters, or all of it. The rest is constant.

Adapters are those of FFA-LoRA (Sun et al., ICLR 2024): a weight W (out x in) becomes W + B A, where A (R x in) is fixed
and random, the same at every client, and only B (out x R) trains, from 0. So a mean of adapters is the adapter of the
mean model, which λ and every other average rely on; with A trained as well it would not be. The library ``peft``
replaces layers by its own, trains A, and needs ``transformers``; here an adapter is a sum of tensors, for any layer.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedc2i.core.errors import UserError
from fedc2i.core.params import Params

ADAPTER = ".lora"
_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True, eq=False)
class TrainedPart:
    """What of a module is not constant.

    Attributes:
        text: as the setting ``train`` has it.
        names: of the module's own parameters and buffers.
        still: modules that are always in evaluation mode.
        projections: by the name of a constant weight, A ``(R, in)`` of its adapter.
    """

    text: str
    names: frozenset[str]
    still: frozenset[str]
    projections: Mapping[str, Tensor] = field(default_factory=dict)
    _copies: dict[tuple[str, torch.device, torch.dtype], Tensor] = field(default_factory=dict, repr=False)

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """Of what trains in the adapters, B ``(out, R)``."""
        return tuple(name + ADAPTER for name in self.projections)

    def freeze(self, module: nn.Module) -> None:
        """No gradients for constants; everything in evaluation mode, until `Model.switch` changes that."""
        module.eval()
        for name, tensor in module.named_parameters():
            tensor.requires_grad_(tensor.requires_grad and name in self.names)

    def new_adapters(self, state: Params) -> Params:
        """Of no effect: B = 0."""
        return {
            name + ADAPTER: state[name].new_zeros(len(state[name]), len(down))
            for name, down in self.projections.items()
        }

    def merged(self, params: Params, module: nn.Module) -> Params:
        """Tensors for the module's names: adapters are added to its constant weights."""
        if not self.projections:
            return params
        own = {name: tensor for name, tensor in params.items() if not name.endswith(ADAPTER)}
        for name, down in self.projections.items():
            weight = module.get_parameter(name)
            own[name] = weight + (params[name + ADAPTER] @ self._placed(name, down, weight)).reshape(weight.shape)
        return own

    def _placed(self, name: str, down: Tensor, like: Tensor) -> Tensor:
        """A on the weight's device; one on a GPU is copied there once."""
        if like.device.type == "cpu":
            return down.to(like.dtype)
        key = (name, like.device, like.dtype)
        if key not in self._copies:
            self._copies[key] = down.to(like)
        return self._copies[key]


def choose(module: nn.Module, head: str, text: str, statistics: bool = True) -> TrainedPart:
    """What trains if the setting ``train`` is ``text``: ``head``, ``last:N``, ``all`` or ``lora:R``.

    Args:
        module: the model's.
        head: the name of its head, which always trains.
        text: the setting.
        statistics: whether BatchNorm layers that train also take statistics of batches; else theirs are constant.

    Raises:
        UserError: if the module has fewer blocks, or no weight for adapters of that rank.
    """
    kind, _, number = text.partition(":")
    layers = dict(module.named_modules())
    heads = {name for name, _ in module.named_parameters() if name.rpartition(".")[0] == head}
    names = set(heads)
    if kind == "all":
        names |= {name for name, _ in module.named_parameters()}
    if kind == "last":
        found = blocks(module, head)
        if int(number) > len(found):
            raise UserError(f"train={text}: the model has {len(found)} blocks before its head: {_some(found)}")
        trained = [name for block in found[len(found) - int(number) :] for name in block]
        names |= {name for name, _ in module.named_parameters() if any(_is_in(name, layer) for layer in trained)}
    owners = {name.rpartition(".")[0] for name in names - heads}
    fixed = {name for name, layer in layers.items() if isinstance(layer, _BatchNorm) and not statistics}
    names |= {name for name, _ in module.named_buffers() if name.rpartition(".")[0] in owners - fixed}
    moving = {name for name in layers if any(_is_in(own, name) for own in names - heads)} - fixed
    moving |= {name for name in layers if _with_parameters(layers, name) in moving - fixed}  # dropout, for example
    still = frozenset(name for name in layers if name not in moving)
    down = _projections(module, head, int(number), text) if kind == "lora" else {}
    return TrainedPart(text, frozenset(names), still, down)


def blocks(module: nn.Module, head: str) -> list[tuple[str, ...]]:
    """The blocks of the body in the order in which the module has them, each the names of its layers.

    A block is a layer of the module or of its lists and sequences; a normalisation layer belongs to the one before it.
    """
    found: list[tuple[str, ...]] = []
    for name, layer in _units(module, ""):
        if name == head or not any(True for _ in layer.parameters()):
            continue
        if isinstance(layer, _NORMS) and found:
            found[-1] = (*found[-1], name)
        else:
            found.append((name,))
    return found


def _units(module: nn.Module, prefix: str) -> list[tuple[str, nn.Module]]:
    """The children of a module; lists, sequences and a module that only wraps another are replaced by theirs."""
    units = []
    children = list(module.named_children())
    for name, child in children:
        inside = isinstance(child, nn.Sequential | nn.ModuleList) or (len(children) == 1 and not prefix)
        units += _units(child, f"{prefix}{name}.") if inside else [(f"{prefix}{name}", child)]
    return units


def _projections(module: nn.Module, head: str, rank: int, text: str) -> dict[str, Tensor]:
    """A for every weight of a linear layer, an attention or a convolution over all channels, if R makes it smaller."""
    found = {}
    for name, layer in module.named_modules():
        wide = isinstance(layer, nn.Linear) or (isinstance(layer, _CONVOLUTIONS) and layer.groups == 1)
        part = "weight" if wide else "in_proj_weight" if isinstance(layer, nn.MultiheadAttention) else ""
        weight = getattr(layer, part, None) if part and name != head else None
        if weight is None:
            continue
        inputs = math.prod(weight.shape[1:])
        if rank < min(len(weight), inputs):
            own = f"{name}.{part}"
            seed = int.from_bytes(hashlib.sha256(own.encode()).digest()[:7], "big")
            drawn = torch.randn(rank, inputs, generator=torch.Generator().manual_seed(seed))
            found[own] = drawn / math.sqrt(inputs)
    if not found:
        raise UserError(f"train={text}: no weight of the model before its head is wider than {rank}")
    return found


def _with_parameters(layers: Mapping[str, nn.Module], name: str) -> str:
    """The layer itself if it has parameters, else the next around it that has some."""
    while name and not any(True for _ in layers[name].parameters()):
        name = name.rpartition(".")[0]
    return name


def _is_in(name: str, layer: str) -> bool:
    return not layer or name == layer or name.startswith(f"{layer}.")


def _some(found: list[tuple[str, ...]], most: int = 20) -> str:
    names = [" + ".join(block) for block in found]
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")
