"""What of a model trains: which tensors travel, that the rest is constant, and that adapters are sums of tensors."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import fedc2i
from fedc2i.core.errors import UserError
from fedc2i.core.params import mix, stack
from fedc2i.data.federation import InputSpec
from fedc2i.methods.base import get_method, method_names
from fedc2i.models import networks
from fedc2i.models.model import Model, split
from fedc2i.models.trained_part import blocks, choose
from fedc2i.models.validation import validate
from fedc2i.runs.results import Result
from support.helpers import blank_federation


class Net(nn.Module):
    """Two blocks with BatchNorm and dropout, and a head."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, stride=4)
        self.norm = nn.BatchNorm2d(6)
        self.stages = nn.Sequential(*(self.stage(6) for _ in range(2)))
        self.fc = nn.Linear(6, classes)

    @staticmethod
    def stage(width: int) -> nn.Module:
        deep = nn.Conv2d(width, width, 3, padding=1, groups=width, bias=False)
        wide = nn.Conv2d(width, width, 1)
        return nn.ModuleDict({"deep": deep, "wide": wide, "norm": nn.BatchNorm2d(width), "drop": nn.Dropout(0.5)})

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x)).relu()
        for stage in self.stages:
            x = x + stage["drop"](stage["norm"](stage["wide"](stage["deep"](x))).relu())
        return self.fc(x.mean((2, 3)))


def net(train: str = "all", statistics: bool = True) -> Model:
    return split(Net, head="fc", name="net").restricted(train, statistics)


def images(count: int = 5) -> Tensor:
    return torch.randint(0, 256, (count, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def test_blocks_are_layers_with_their_norms_and_the_entries_of_sequences() -> None:
    assert blocks(Net(), "fc") == [("stem", "norm"), ("stages.0",), ("stages.1",)]
    lenet = networks.build("lenet5", 10, InputSpec((3, 16, 16)))
    assert blocks(lenet.module_with(lenet.init(0)), "fc3") == [("conv1",), ("conv2",), ("fc1",), ("fc2",)]


@pytest.mark.parametrize(
    ("train", "expected"),
    [
        ("head", ()),
        ("last:1", ("stages.1.",)),
        ("last:2", ("stages.",)),
        ("all", ("stem", "norm", "stages.")),
    ],
)
def test_only_what_trains_is_in_the_parameters(train: str, expected: tuple[str, ...]) -> None:
    model, whole = net(train), split(Net, head="fc").init(0)
    names = {name for name in whole if name.startswith((*expected, "fc."))}
    assert model.init(0).keys() == names == {*model.body_names, *model.head_names}
    without = net(train, statistics=False)
    assert without.init(0).keys() == {name for name in names if "running" not in name and "tracked" not in name}
    assert not without.has_statistics


@pytest.mark.parametrize("train", ["head", "last:1", "all", "lora:2"])
def test_the_constant_part_is_that_of_the_template(train: str) -> None:
    fixed = Net().eval()
    model = split(fixed, head="fc").restricted(train, statistics=False)
    x = images()
    with torch.no_grad():
        logits = model.head(model.init(0), model.features(model.init(0), x))
        assert_close(logits, fixed(x.float() * (2 / 255) - 1))
        assert_close(model.whole(model.init(0), x), logits)
    validate(model, x, 3)


def test_constant_layers_take_no_statistics_and_drop_nothing_in_training() -> None:
    model = net("last:1")
    params, x = model.init(0), images()
    before = {name: tensor.clone() for name, tensor in params.items()}
    features = [model.features(params, x, training=True) for _ in range(2)]
    assert not torch.equal(*features)  # the trained block drops
    assert not torch.equal(params["stages.1.norm.running_mean"], before["stages.1.norm.running_mean"])
    constant = model.module_with(params)
    assert torch.equal(constant.get_buffer("norm.running_mean"), torch.zeros(6))
    for train in ("head", "lora:2"):
        still = net(train)
        once, again = (still.features(still.init(0), x, training=True) for _ in range(2))
        assert torch.equal(once, again)
        assert torch.equal(once, still.features(still.init(0), x))
        assert not still.has_dropout
        assert not still.has_statistics


def test_statistics_can_be_constant_where_the_layers_train() -> None:
    model = net("last:1", statistics=False)
    assert "stages.1.norm.weight" in model.norm_names
    params, x = model.init(0), images()
    model.features(params, x, training=True)
    assert torch.equal(model.module_with(params).get_buffer("stages.1.norm.running_mean"), torch.zeros(6))


def test_an_adapter_is_a_sum_and_their_mean_is_the_mean_model() -> None:
    model, x = net("lora:2"), images()
    names = ["stem.weight.lora", "stages.0.wide.weight.lora", "stages.1.wide.weight.lora"]  # not the depthwise ones
    assert [name for name in model.init(0) if name.endswith("lora")] == names
    one, two = model.init(0), model.init(0)
    assert all(not one[name].any() and one[name].shape == (6, 2) for name in names)
    for params in (one, two):
        params |= {name: torch.randn(6, 2) for name in names}
    assert model.part is not None
    merged = []
    for params in (one, two):
        module = model.module_with(params).eval()
        plain = model.module_with(model.init(0))
        for name in names:
            target = name.removesuffix(".lora")
            weight, down = plain.get_parameter(target), model.part.projections[target]
            assert down.shape == (2, weight[0].numel())
            assert_close(module.get_parameter(target), weight + (params[name] @ down).view_as(weight))
        with torch.no_grad():
            assert_close(model.whole(params, x), module(x.float() * (2 / 255) - 1))
        merged.append(dict(module.named_parameters()))
    half = torch.tensor([0.5, 0.5])
    of_adapters = dict(model.module_with(mix(half, stack([one, two]))).named_parameters())
    of_models = mix(half, stack([{name: tensor.detach() for name, tensor in own.items()} for own in merged]))
    for name, tensor in of_models.items():
        assert_close(of_adapters[name], tensor)


def test_gradients_of_adapters_are_those_by_hand() -> None:
    model, x = net("lora:2"), images()
    params = {name: tensor.requires_grad_(name in model.trainable) for name, tensor in model.init(0).items()}
    assert model.part is not None
    module = model.module_with(params).eval()
    module.requires_grad_(True)
    model.head(params, model.features(params, x, training=True)).square().sum().backward()
    module(x.float() * (2 / 255) - 1).square().sum().backward()
    for target, down in model.part.projections.items():
        slope = module.get_parameter(target).grad
        assert slope is not None
        assert_close(params[f"{target}.lora"].grad, slope.flatten(1) @ down.T)  # d/dB of f(W + B A)


def test_adapters_start_alike_everywhere() -> None:
    one, two = (choose(Net(), "fc", "lora:2").projections for _ in range(2))
    assert all(torch.equal(tensor, two[name]) for name, tensor in one.items())
    assert abs(float(choose(nn.Sequential(nn.Linear(900, 90), nn.Linear(90, 2)), "1", "lora:8").projections["0.weight"]
        .norm(dim=1).mean()) - 1) < 0.1  # rows of about unit length  # fmt: skip


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ("last:4", r"has 3 blocks before its head: stem \+ norm, stages.0, stages.1"),
        ("lora:9", "no weight of the model before its head is wider than 9"),
    ],
)
def test_what_the_model_does_not_have_is_refused(train: str, message: str) -> None:
    with pytest.raises(UserError, match=f"^train={train}: .*{message}$"):
        net(train)


@pytest.mark.parametrize("text", ["last", "last:0", "lora:-1", "tail", "last:1.5", "LAST:2"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"train must be auto \| head \| last:N"):
        fedc2i.run("local", blank_federation("ab"), train=text)


def outcome_of(name: str, train: str) -> Result | str:
    """A short run's result, or why there is none."""
    try:
        own = get_method(name)()
        return fedc2i.run(own, blank_federation("ab"), model=split(Net, head="fc"), train=train, rounds=1, epochs=1)
    except UserError as error:
        return str(error)


@pytest.mark.parametrize(
    ("train", "names"),
    [("lora:2", method_names()), ("last:1", ("fedavg", "fedbn", "fedc2i", "fedc2i-plus", "fedproto", "fedrep"))],
)
def test_every_method_runs_or_says_in_a_line_why_not(train: str, names: Sequence[str]) -> None:
    trained = net(train)
    for name in names:
        found = outcome_of(name, train)
        if (name, train) == ("fedbn", "lora:2"):
            why = "with train=lora:2 no normalisation layer of model 'custom' trains"
            assert found == f"fedbn: {why}; try train=all or last:N"
            continue
        assert isinstance(found, Result), found
        own = found.outcomes[0].trained
        assert {*trained.body_names, *trained.head_names} <= own.keys()
        assert "stem.weight" not in own


@pytest.mark.parametrize(("train", "numbers"), [("head", 6 * 3 + 3), ("lora:2", 6 * 3 + 3 + 3 * 6 * 2)])
def test_bytes_are_of_what_trains(train: str, numbers: int) -> None:
    result = outcome_of("fedavg", train)
    assert isinstance(result, Result)
    assert result.bytes_up == result.bytes_down == 4 * numbers


@pytest.mark.parametrize("train", ["last:1", "lora:2"])
def test_stacked_and_looped_agree(train: str) -> None:
    federation = blank_federation("abc")
    model = split(lambda: Net().train(False), head="fc")
    runs = [
        fedc2i.run(
            "fedc2i", federation, model=model, train=train, batch_statistics="frozen", rounds=2, executor=executor
        )
        for executor in ("looped", "stacked")
    ]
    looped, stacked = (own.outcomes[0].received for own in runs)
    if train == "lora:2":  # dropout draws other numbers on another executor
        for name, tensor in looped.items():
            assert_close(stacked[name], tensor, rtol=1e-3, atol=1e-5)
    assert looped.keys() == stacked.keys()
