"""The models that have a name: logistic regression, an MLP, a 1-D CNN and LeNets, built for the shape of the data."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from fedc2i.core.errors import UserError, nearest, one_line
from fedc2i.data.federation import InputSpec
from fedc2i.models.model import Model

_LENETS = {  # convolution channels, hidden units, BatchNorm
    "lenet5": ((6, 16), (120, 84), False),
    "lenet5-bn": ((6, 16), (120, 84), True),
    "lenet-wide": ((64, 64), (384, 192), False),
    "lenet-wide-bn": ((64, 64), (384, 192), True),
}
AXES = {"logistic": (1, 2, 3), "mlp": (1, 2, 3), "cnn1d": (2,), **dict.fromkeys(_LENETS, (3,))}  # of a sample
NAMES = tuple(AXES)
HIDDEN = (64, 32)  # units of mlp
PRETRAINED, TIMM = ("efficientnet-lite0",), "timm:"  # see `fedc2i.models.backbones`
SHORTEST_SIGNAL, SMALLEST_IMAGE = 16, 16
_KINDS = {1: "features (d,)", 2: "signals (channels, time)", 3: "images (channels, height, width)"}


class LeNet(nn.Module):
    """Two 5x5 convolutions with 2x2 max-pooling, two hidden linear layers, and the head ``fc3``."""

    def __init__(
        self,
        channels: tuple[int, int],
        hidden: tuple[int, int],
        classes: int,
        image: tuple[int, ...],
        batch_norm: bool = False,
    ) -> None:
        super().__init__()
        height, width = (((side - 4) // 2 - 4) // 2 for side in image[1:])
        # BatchNorm removes any bias; its gradient would be rounding noise, which Adam amplifies.
        self.conv1 = nn.Conv2d(image[0], channels[0], 5, bias=not batch_norm)
        self.conv2 = nn.Conv2d(channels[0], channels[1], 5, bias=not batch_norm)
        self.bn1: nn.Module = nn.BatchNorm2d(channels[0]) if batch_norm else nn.Identity()
        self.bn2: nn.Module = nn.BatchNorm2d(channels[1]) if batch_norm else nn.Identity()
        self.fc1 = nn.Linear(channels[1] * height * width, hidden[0])
        self.fc2 = nn.Linear(hidden[0], hidden[1])
        self.fc3 = nn.Linear(hidden[1], classes)

    def forward(self, x: Tensor) -> Tensor:
        """Scaled images ``(B, 3, H, W)`` to logits ``(B, C)``."""
        x = F.relu(max_pool(self.bn1(self.conv1(x))))  # the same as pooling after ReLU, on a quarter of the data
        x = F.relu(max_pool(self.bn2(self.conv2(x))))
        x = F.relu(self.fc1(x.flatten(1)))
        return self.fc3(F.relu(self.fc2(x)))  # type: ignore[no-any-return]


class CNN1d(nn.Module):
    """Two convolutions over time (width 5; 32 and 64 channels), each with pooling by 2, 64 hidden units, ``fc2``."""

    def __init__(self, classes: int, channels: int, time: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(channels, 32, 5, padding=2)
        self.conv2 = nn.Conv1d(32, 64, 5, padding=2)
        self.fc1 = nn.Linear(64 * (time // 2 // 2), 64)
        self.fc2 = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Signals ``(B, channels, time)`` to logits ``(B, C)``."""
        x = F.max_pool1d(F.relu(self.conv1(x)), 2)
        x = F.max_pool1d(F.relu(self.conv2(x)), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))  # type: ignore[no-any-return]


def perceptron(inputs: int, classes: int, hidden: tuple[int, ...]) -> nn.Sequential:
    """Linear layers with ReLU between them; the last one is the head ``head``."""
    net = nn.Sequential()
    net.add_module("flat", nn.Flatten())
    for number, size in enumerate(hidden, 1):
        net.add_module(f"fc{number}", nn.Linear(inputs, size))
        net.add_module(f"relu{number}", nn.ReLU())
        inputs = size
    net.add_module("head", nn.Linear(inputs, classes))
    return net


def is_pretrained(name: str) -> bool:
    """Whether a model's name is that of a pretrained network."""
    return name in PRETRAINED or name.startswith(TIMM)


def build(name: str, classes: int, sample: InputSpec) -> Model:
    """A model by name, for samples of this shape.

    ``auto`` is ``mlp`` for features, ``cnn1d`` for signals and ``lenet5`` for images. ``logistic`` has an empty body:
    it is its head. ``lenet5`` is the textbook net (6 and 16 channels, 120 and 84 hidden units), ``lenet-wide`` a wider
    one (64 and 64, 384 and 192); ``-bn`` adds BatchNorm after each convolution.

    Raises:
        UserError: for an unknown name, or samples of another kind or too small.
    """
    shape = sample.shape
    if name == "auto":
        name = {1: "mlp", 2: "cnn1d", 3: "lenet5"}.get(len(shape), "mlp")
    if name not in AXES:
        hint = nearest(name, (*NAMES, *PRETRAINED, "auto"))
        allowed = ", ".join((*NAMES, *PRETRAINED, f"{TIMM}NAME"))
        raise UserError(f"unknown model '{one_line(name)}'{hint}, allowed are auto, {allowed} and FILE.py:FUNCTION")
    if len(shape) not in AXES[name]:
        suitable = ", ".join(other for other, axes in AXES.items() if len(shape) in axes) or "FILE.py:FUNCTION"
        wanted = _KINDS[AXES[name][-1]]
        raise UserError(f"model '{name}' reads {wanted}, the data has {sample}; allowed are {suitable}")
    make: Callable[[], nn.Module]
    if name in ("logistic", "mlp"):
        make, head = lambda: perceptron(math.prod(shape), classes, HIDDEN if name == "mlp" else ()), "head"
    elif name == "cnn1d":
        if shape[1] < SHORTEST_SIGNAL:
            raise UserError(f"model 'cnn1d' needs signals of at least {SHORTEST_SIGNAL} time steps, got {shape[1]}")
        make, head = lambda: CNN1d(classes, *shape), "fc2"
    else:
        if min(shape[1:]) < SMALLEST_IMAGE:
            size = f"{SMALLEST_IMAGE}x{SMALLEST_IMAGE}"
            raise UserError(
                f"model '{name}' needs images of at least {size}, got {shape[1]}x{shape[2]}; set image_size"
            )
        channels, hidden, batch_norm = _LENETS[name]
        make, head = lambda: LeNet(channels, hidden, classes, shape, batch_norm), "fc3"
    model = Model(make, head=head, name=name)
    model.made_for = sample, classes
    return model


def max_pool(x: Tensor) -> Tensor:
    """``F.max_pool2d(x, 2)`` of ``(B, C, H, W)``, many times faster on a CPU: it compares whole rows, then columns.

    Of several equal maxima one gets the gradient, not always torch's.
    """
    if x.device.type != "cpu":
        return F.max_pool2d(x, 2)
    height, width = (side // 2 * 2 for side in x.shape[2:])
    pooled: Tensor = _Pool.apply(x[:, :, :height, :width])[0]  # type: ignore[no-untyped-call]
    return pooled


class _Pool(torch.autograd.Function):
    """The maxima of four neighbours and, for the backward pass, those of two rows; all sides are even."""

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        rows = torch.maximum(x[..., 0::2, :], x[..., 1::2, :])
        return torch.maximum(rows[..., 0::2], rows[..., 1::2]), rows

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*inputs, *output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Tensor:
        back: Tensor = _Unpool.apply(gradient, *ctx.saved_tensors)  # type: ignore[no-untyped-call]
        return back

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int], x: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        return _Pool.apply(x.movedim(in_dims[0], 0)), (0, 0)  # type: ignore[no-untyped-call]


class _Unpool(torch.autograd.Function):
    """Every window's gradient to where its maximum came from, the others 0."""

    @staticmethod
    def forward(gradient: Tensor, x: Tensor, pooled: Tensor, rows: Tensor) -> Tensor:
        of_rows = torch.empty_like(rows)
        _share(gradient, rows[..., 0::2] == pooled, of_rows[..., 0::2], of_rows[..., 1::2])
        back = torch.empty_like(x, memory_format=torch.contiguous_format)
        _share(of_rows, x[..., 0::2, :] == rows, back[..., 0::2, :], back[..., 1::2, :])
        return back

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        raise NotImplementedError("second derivatives of max-pooling on a CPU")

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *tensors: Tensor) -> tuple[Tensor, int]:
        each = [
            tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
            for tensor, dim in zip(tensors, in_dims, strict=True)
        ]
        return _Unpool.apply(*each), 0  # type: ignore[no-untyped-call]


def _share(gradient: Tensor, first: Tensor, to_first: Tensor, to_second: Tensor) -> None:
    """Passes the gradient to one of two places, and 0 to the other."""
    torch.mul(gradient, first, out=to_first)
    torch.sub(gradient, to_first, out=to_second)
