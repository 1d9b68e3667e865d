"""Models: shapes and sizes by hand, the cut at the last linear layer, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.testing import assert_close

from fedc2i.core.errors import UserError
from fedc2i.data.federation import InputSpec
from fedc2i.models import networks
from fedc2i.models.model import Model, scale, split
from fedc2i.models.validation import validate

IMAGE = InputSpec((3, 32, 32))


def images(count: int = 4, side: int = 32) -> Tensor:
    return torch.randint(0, 256, (count, 3, side, side), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def numbers(model: Model) -> int:
    """How many trained numbers a model has."""
    return sum(tensor.numel() for name, tensor in model.init(0).items() if name in model.trainable)


@pytest.mark.parametrize(
    ("name", "want"),
    [
        # 5x5 convolutions from 3 channels, then 5x5 pixels times channels into three linear layers
        ("lenet5", (75 * 6 + 6) + (150 * 16 + 16) + (400 * 120 + 120) + (120 * 84 + 84) + (84 * 10 + 10)),
        ("lenet-wide", (75 * 64 + 64) + (1600 * 64 + 64) + (1600 * 384 + 384) + (384 * 192 + 192) + (192 * 10 + 10)),
        ("lenet5-bn", 62_006 + 6 + 16),
        ("lenet-wide-bn", 797_962 + 64 + 64),
    ],
)
def test_parameter_counts(name: str, want: int) -> None:
    assert numbers(networks.build(name, 10, IMAGE)) == want


def test_the_textbook_count_is_the_textbook_s() -> None:
    assert numbers(networks.build("lenet5", 10, IMAGE)) == 62_006


def test_wide_shapes() -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in networks.build("lenet-wide", 10, IMAGE).init(0).items()}
    assert shapes["conv1.weight"] == (64, 3, 5, 5)
    assert shapes["conv2.weight"] == (64, 64, 5, 5)
    assert shapes["fc3.weight"] == (10, 192)
    assert shapes["fc3.bias"] == (10,)


@pytest.mark.parametrize("name", [name for name in networks.NAMES if name.startswith("lenet")])
@pytest.mark.parametrize(("side", "classes"), [(16, 2), (28, 10), (33, 7)])
def test_features_and_logits(name: str, side: int, classes: int) -> None:
    model = networks.build(name, classes, InputSpec((3, side, side)))
    params, x = model.init(0), images(side=side)
    features = model.features(params, x)
    assert features.shape == (4, {"lenet5": 84, "lenet-wide": 192}[name.removesuffix("-bn")]) == (4, model.feature_size)
    assert (features >= 0).all()  # after relu
    assert model.head(params, features).shape == (4, classes)
    validate(model, x, classes)


def test_lenet_computes_what_the_textbook_says() -> None:
    model = networks.build("lenet5", 10, IMAGE)
    p, x = model.init(3), images()
    h = x.float() / 255 * 2 - 1
    h = F.max_pool2d(F.conv2d(h, p["conv1.weight"], p["conv1.bias"]).relu(), 2)
    h = F.max_pool2d(F.conv2d(h, p["conv2.weight"], p["conv2.bias"]).relu(), 2)
    h = (h.flatten(1) @ p["fc1.weight"].T + p["fc1.bias"]).relu()
    h = (h @ p["fc2.weight"].T + p["fc2.bias"]).relu()
    assert_close(model.features(p, x), h)
    assert_close(model.head(p, h), h @ p["fc3.weight"].T + p["fc3.bias"])


def test_batch_norm_twin() -> None:
    plain, twin = networks.build("lenet5", 10, IMAGE), networks.build("lenet5-bn", 10, IMAGE)
    assert not plain.has_statistics
    assert twin.has_statistics
    assert set(twin.body_names) - set(plain.body_names) == {
        f"bn{k}.{part}"
        for k in (1, 2)
        for part in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    }
    assert "bn1.running_mean" not in twin.trainable
    assert set(twin.norm_names) == set(twin.body_names) - set(plain.body_names)
    assert plain.norm_names == ()
    params, x = twin.init(0), images()
    twin.features(params, x)
    assert (params["bn1.running_mean"] == 0).all()  # evaluation leaves statistics alone
    twin.features(params, x, training=True)
    conv = F.conv2d(scale(x, torch.float32), params["conv1.weight"])
    assert_close(params["bn1.running_mean"], 0.1 * conv.mean((0, 2, 3)))
    assert params["bn1.num_batches_tracked"] == 1


def test_scale() -> None:
    assert_close(scale(torch.tensor([0, 51, 255], dtype=torch.uint8), torch.float32), torch.tensor([-1, -0.6, 1]))
    already = torch.tensor([3.0, -7.0])
    assert scale(already, torch.float32) is already


def test_images_follow_the_precision_of_the_model() -> None:
    model = networks.build("lenet5", 10, IMAGE)
    params = {name: tensor.double() for name, tensor in model.init(0).items()}
    assert model.features(params, images()).dtype == torch.float64


# init


def test_init_depends_on_the_key_only(model: Model) -> None:
    before = torch.get_rng_state()
    first, again, other = model.init(0, "init"), model.init(0, "init"), model.init(1, "init")
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["head.weight"], other["head.weight"])
    first["head.weight"].zero_()
    assert not (model.init(0, "init")["head.weight"] == 0).any()


def net(bias: bool = True) -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(768, 5), nn.ReLU(), nn.Linear(5, 4, bias=bias))


def test_a_factory_gives_each_seed_its_own_weights_and_a_module_its_present_ones() -> None:
    factory = split(net, head="3")
    assert not torch.equal(factory.init(0)["1.weight"], factory.init(1)["1.weight"])
    module = net()
    fixed = split(module, head="3")
    for seed in (0, 1):
        params = fixed.init(seed)
        assert torch.equal(params["1.weight"], module[1].weight)
        params["1.weight"].zero_()
    assert not (module[1].weight == 0).any()  # the user's module is never written to


def test_a_batch_norm_module_given_as_an_instance_is_not_written_to() -> None:
    module = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(768), nn.Linear(768, 4))
    model = split(module, head="2")
    model.features(model.init(0), images(side=16), training=True)
    assert (module[1].running_mean == 0).all()


# split


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.ModuleDict({"classifier": nn.Sequential(nn.Flatten(), nn.Linear(768, 5), nn.Linear(5, 4))})

    def forward(self, x: Tensor) -> Tensor:
        return self.net["classifier"](x)


@pytest.mark.parametrize(
    ("build", "head", "head_names"),
    [
        (net, "3", ("3.weight", "3.bias")),
        (lambda: net(bias=False), "3", ("3.weight",)),
        (Nested, "net.classifier.2", ("net.classifier.2.weight", "net.classifier.2.bias")),
    ],
    ids=["sequential", "no-bias", "nested"],
)
def test_split_cuts_any_module_in_two(build: Callable[[], nn.Module], head: str, head_names: tuple[str, ...]) -> None:
    model = split(build, head=head)
    params, x = model.init(5), images(side=16)
    assert model.head_names == head_names
    assert set(model.body_names) == params.keys() - set(head_names)
    assert (model.classes, model.feature_size) == (4, 5)
    module = build()
    module.load_state_dict(params)
    assert_close(model.head(params, model.features(params, x)), module(scale(x, torch.float32)))
    validate(model, x, 4)
    weight, bias = model.split_head(params)
    assert weight.shape == (4, 5)
    assert (bias is None) == (len(head_names) == 1)


def test_frozen_parameters_are_not_trainable() -> None:
    module = net()
    module[1].requires_grad_(False)
    assert split(module, head="3").trainable == ("3.weight", "3.bias")


# Refusals.


@pytest.mark.parametrize("head", ["fc", "2", "", "3.weight"])
def test_unknown_head_lists_the_linear_layers(head: str) -> None:
    with pytest.raises(UserError, match=f"head '{head}' is not a linear layer of the module, allowed are 1, 3"):
        split(net, head=head)


def test_no_linear_layer_at_all() -> None:
    with pytest.raises(UserError, match="allowed are none"):
        split(nn.Flatten(), head="0")


@pytest.mark.parametrize("after", [nn.Softmax(1), nn.LogSoftmax(1), nn.ReLU()], ids=lambda layer: type(layer).__name__)
def test_nothing_may_follow_the_head(after: nn.Module) -> None:
    model = split(lambda: nn.Sequential(nn.Flatten(), nn.Linear(768, 4), after), head="1")
    with pytest.raises(UserError, match=r"'1' must be its last operation .* leave softmax to the loss"):
        validate(model, images(side=16), 4)


def test_the_head_must_be_the_last_linear_layer() -> None:
    model = split(lambda: nn.Sequential(nn.Flatten(), nn.Linear(768, 4), nn.Linear(4, 4)), head="1")
    with pytest.raises(UserError, match="must be its last operation"):
        validate(model, images(side=16), 4)


def test_the_class_count_must_fit() -> None:
    with pytest.raises(UserError, match="model 'mine' has 4 outputs, but the data has 10 classes"):
        validate(split(net, head="3", name="mine"), images(side=16), 10)


def test_the_image_size_must_fit() -> None:
    with pytest.raises(UserError, match=r"model 'custom' cannot read images 32x32"):
        validate(split(net, head="3"), images(side=32), 4)


@pytest.mark.parametrize("shape", [(3, 15, 32), (3, 32, 15)])
def test_images_too_small_for_two_convolutions(shape: tuple[int, int, int]) -> None:
    with pytest.raises(UserError, match="needs images of at least 16x16, got"):
        networks.build("lenet5", 10, InputSpec(shape))


def test_unknown_model() -> None:
    with pytest.raises(UserError, match="unknown model 'vgg', allowed are auto, logistic, mlp, cnn1d, lenet5"):
        networks.build("vgg", 10, IMAGE)
