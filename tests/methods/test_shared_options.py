"""The options of every method, ``anchor`` and ``average``: by hand, against an oracle, on every engine; presets."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedc2i.core import seeding
from fedc2i.core.errors import UserError
from fedc2i.core.options import option, options_of
from fedc2i.core.params import Params, row, stack
from fedc2i.core.settings import TrainingSettings
from fedc2i.data.federation import Federation, InputSpec
from fedc2i.engine.client import LocalClient, RunContext
from fedc2i.engine.executors.base import ClientBatch
from fedc2i.engine.executors.stacked.executor import StackedExecutor
from fedc2i.methods.base import Method, Site
from fedc2i.methods.ditto import Ditto
from fedc2i.methods.fedavg import FedAvg
from fedc2i.methods.fedprox import FedProx
from fedc2i.methods.fedrep import FedRep
from fedc2i.methods.messages import Download
from fedc2i.models.model import Model, scale
from fedc2i.models.networks import build
from fedc2i.runs.driver import execute
from fedc2i.runs.plan import prepare
from fedc2i.training.local import Batch, draw_epochs, train
from oracles import assert_same_model
from oracles.extras import anchored_and_averaged
from support.helpers import call
from support.method_checks import (
    OF_THEIR_OWN,
    SIZES,
    TRAINING,
    each_kind,
    in_double,
    local_client,
    make_site,
    place,
    run,
)

DATA = Batch(torch.zeros(1, 3, 1, 1, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64), torch.ones(1))


# By hand: one number w, plain gradient descent.


@dataclass(frozen=True)
class Slope(Method):
    """Loss 2w, whatever the data."""

    def loss(self, params: Params, batch: Batch, site: Site) -> Tensor:
        return 2 * params["w"]


@pytest.mark.parametrize(("steps", "want"), [(0, 1.0), (1, 0.0), (2, -0.8), (3, -1.44)])
def test_anchor_by_hand(steps: int, want: float, model: Model) -> None:
    """From w = 1 with steps of 0.5: gradients 2, then 2 + 0.4(0 − 1) = 1.6, then 2 + 0.4(−0.8 − 1) = 1.28."""
    training = TrainingSettings(optimizer="sgd", lr=0.5)
    recipe = RunContext(Slope(anchor=0.4), model, training, rounds=1, seed=0)
    start = {"w": torch.tensor(1.0).double(), "other": torch.tensor(7.0).double()}
    site = Site(model, torch.ones(1), torch.tensor(-1), {}, start=start)
    loss = partial(recipe.loss, site=site, names=["w"])
    got = train(loss, start, ["w"], DATA, [torch.tensor([0])] * steps, training)
    assert got["w"].item() == pytest.approx(want, rel=1e-12)
    assert got["other"] == 7


def test_the_anchor_is_where_the_round_started_and_holds_what_is_trained(model: Model) -> None:
    recipe = RunContext(Slope(anchor=3.0), model, TrainingSettings(), rounds=1, seed=0)
    params = {"w": torch.tensor(5.0), "v": torch.tensor([1.0, 2.0]), "still": torch.tensor(100.0)}
    start = {"w": torch.tensor(4.0), "v": torch.tensor([3.0, 5.0]), "still": torch.tensor(0.0)}
    site = Site(model, torch.ones(1), torch.tensor(-1), {}, start=start)
    assert recipe.loss(params, DATA, site, ["w", "v"]) == 10 + 3 / 2 * (1 + 4 + 9)
    assert recipe.loss(params, DATA, site, ["w"]) == 10 + 3 / 2
    assert replace(recipe, method=Slope()).loss(params, DATA, site, ["w"]) == 10


@pytest.mark.parametrize(
    ("steps", "want"), [(0, 1.0), (1, 2.0), (2, 4.0), (3, (4 + 8) / 2), (4, (8 + 16) / 2), (5, (8 + 16 + 32) / 3)]
)
def test_mean_of_the_second_half_by_hand(steps: int, want: float) -> None:
    """Loss −w²/2 with steps of 1 doubles w: 1, then 2, 4, 8, 16, 32. A statistic that counts steps keeps its last."""

    def loss(params: Params, batch: Batch) -> Tensor:
        params["seen"].add_(1)
        return -params["w"].square() / 2

    start = {"seen": torch.tensor(0.0), "w": torch.tensor(1.0).double()}
    training = TrainingSettings(optimizer="sgd", lr=1.0)
    got = train(loss, start, ["w"], DATA, [torch.tensor([0])] * steps, training, average=True)
    assert got["w"].item() == pytest.approx(want, rel=1e-12)
    assert got["seen"] == steps
    assert list(got) == ["seen", "w"]
    assert start["w"] == 1


# Against an oracle that keeps every iterate: a LeNet in double precision.


def lenet(name: str) -> Model:
    return in_double(build(name, 4, InputSpec((3, 16, 16))))


def module_of(model: Model, params: Params) -> nn.Module:
    module = model._build()
    module.load_state_dict(params)
    return module


def train_first_client(
    how: str, method: Method, model: Model, federation: Federation, training: TrainingSettings
) -> Params:
    """A local run of the first client, alone or stacked with the others."""
    recipe, data = RunContext(method, model, training, rounds=1, seed=0), [place(federation, m) for m in range(3)]
    start = method.setup(model.init(0), model)
    if how == "looped":
        return LocalClient(recipe, data[0]).train(start, {}, -1, 1)
    turn = ClientBatch(recipe, (0, 1, 2), stack([start] * 3), Download(), 1)
    return row(StackedExecutor(data).train([turn], evaluate=False)[0].params, 0)


@pytest.mark.parametrize("how", ["looped", "stacked"])
@pytest.mark.parametrize("name", ["lenet5", "lenet5-bn"])
@pytest.mark.parametrize(
    ("training", "optimizer"),
    [
        (TrainingSettings(batch_size=5, lr=0.01), lambda p: torch.optim.Adam(p, 0.01)),
        (TrainingSettings(batch_size=4, optimizer="sgd", lr=0.1, momentum=0.5), lambda p: torch.optim.SGD(p, 0.1, 0.5)),
    ],
    ids=["adam", "sgd"],
)
def test_local_run_against_the_oracle(
    how: str, name: str, training: TrainingSettings, optimizer: Any, federation: Federation
) -> None:
    model, data = lenet(name), place(federation)
    got = train_first_client(how, FedAvg(anchor=0.7, average=True), model, federation, training)
    epochs = draw_epochs(data.samples, training, seeding.generator(0, data.name, 1, "batches"))
    net = module_of(model, model.init(0)).train()
    batches = [index for epoch in epochs for index in epoch]
    want = anchored_and_averaged(net, scale(data.train.x, torch.float64), data.train.y, batches, optimizer, 0.7)
    assert_same_model(got, want, rtol=1e-7, atol=1e-10)
    plain = train_first_client(how, FedAvg(), model, federation, training)
    assert not torch.allclose(got["fc3.weight"], plain["fc3.weight"])


@pytest.mark.parametrize("how", ["looped", "stacked"])
def test_each_phase_of_fedrep_against_the_oracle(how: str, federation: Federation) -> None:
    """The head's mean is what the body then trains under; both are held at the start of the round."""
    training, data, model = TrainingSettings(epochs=3, batch_size=5, lr=0.01), place(federation), lenet("lenet5-bn")
    got = train_first_client(how, FedRep(anchor=0.7, average=True, body_epochs=2), model, federation, training)
    epochs = draw_epochs(data.samples, training, seeding.generator(0, data.name, 1, "batches"))
    start = model.init(0)
    net, x = module_of(model, start), scale(data.train.x, torch.float64)
    run = partial(anchored_and_averaged, net, x, data.train.y, optimizer=lambda p: torch.optim.Adam(p, 0.01))
    net.eval()
    run(batches=epochs[0], anchor=0.7, trained=lambda name: name in model.head_names, start=start)
    net.train()
    batches = [*epochs[1], *epochs[2]]
    want = run(batches=batches, anchor=0.7, trained=lambda name: name in model.body_names, start=start)
    assert_same_model(got, want, rtol=1e-7, atol=1e-10)


# Every method on every engine, and what the options mean to some.


@pytest.mark.parametrize("participation", ["100%", pytest.param("50%", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", each_kind([name for name in OF_THEIR_OWN if name != "pooled"]))
def test_every_engine_agrees(
    name: str, participation: str, make_model: Callable[..., Model], make_federation: Callable[..., Federation]
) -> None:
    """Unequal clients and BatchNorm, in double precision; workers, who compute as one process does, with a few."""
    model, federation = in_double(make_model(batch_norm=True)), make_federation(sizes=SIZES, validation=2)
    method, settings = Method.registry[name](anchor=0.3, average=True), {"clients_per_round": participation}
    looped, reports = run(method, model, federation, **settings)
    ways = {"stacked": (1e-5, 1e-9), "workers": (0, 0)}
    in_workers = participation == "100%" and name in ("fedc2i", "fedrep")
    for how, (rtol, atol) in ways.items() if in_workers else [("stacked", ways["stacked"])]:
        other, others = run(method, model, federation, executor=how, **settings)
        assert_same_model(other.trained, looped.trained, rtol=rtol, atol=atol)
        assert_same_model(other.received, looped.received, rtol=rtol, atol=atol)
        for one, two in zip(reports, others, strict=True):
            for point, metrics in one.metrics.items():
                for a, b in zip(metrics, two.metrics[point], strict=True):
                    assert a == pytest.approx(b, rel=1e-4)
    if participation != "100%":
        return
    for extra in ({"anchor": 0.3}, {"average": True}):  # each of them does something, alone as well
        alone, _ = run(
            Method.registry[name](**{"anchor": 0.0, "average": False} | extra), model, federation, **settings
        )
        assert not torch.allclose(alone.trained["head.weight"], looped.trained["head.weight"], rtol=1e-6)


@pytest.mark.parametrize("name", sorted(Method.registry))
def test_what_a_client_sends_is_of_the_model_it_keeps(
    name: str, make_model: Callable[..., Model], federation: Federation
) -> None:
    method, model = Method.registry[name](average=True), make_model(batch_norm=True)
    client, start = local_client(method, model, federation), method.setup(model.init(0), model)
    kept = client.train(start, {}, -1, 1)
    sent = client.upload(kept, start, {}, -1, 1)
    for key, tensor in sent.items():
        if (model_name := key.rpartition("/")[2]) in kept:
            assert torch.equal(tensor, kept[model_name])


def test_fedprox_and_the_anchor_add_up(model: Model, federation: Federation) -> None:
    model = in_double(model)
    both, one, none = (
        run(method, model, federation)[0].trained
        for method in (FedProx(mu=0.5, anchor=0.25), FedProx(mu=0.75), FedAvg(anchor=0.75))
    )
    assert_same_model(both, one, rtol=1e-9)
    assert_same_model(none, one, rtol=1e-9)


def test_ditto_holds_its_private_model_at_its_own_start(model: Model, federation: Federation) -> None:
    """Not at the global model, as its proximal term does."""
    model, data = in_double(model), place(federation)
    method = Ditto(mu=0, anchor=2.0)
    start = {**method.setup(model.init(0), model), "private.head.bias": torch.full((4,), 3.0).double()}
    recipe = RunContext(method, model, TRAINING, rounds=1, seed=0)
    names = recipe.trainable(method.phases(1)[0], start)
    assert "private.head.bias" in names
    site = make_site(model, data, start=start, training=True)
    assert recipe.loss(start, data.train, site, names) == method.loss(start, data.train, site)
    moved = {**start, "private.head.bias": torch.zeros(4).double()}
    pull = recipe.loss(moved, data.train, site, names) - method.loss(moved, data.train, site)
    assert pull.item() == pytest.approx(2.0 / 2 * 4 * 9)


# Off by default, and then of no account.


@pytest.mark.parametrize("batch_norm", [False, True], ids=["plain", "batchnorm"])
def test_off_is_a_plain_loop_bit_for_bit(
    batch_norm: bool, federation: Federation, make_model: Callable[..., Model]
) -> None:
    """The method's own loss and torch's own optimiser, nothing between them."""
    model, data, method = make_model(batch_norm=batch_norm), place(federation), FedAvg()
    got = local_client(method, model, federation).train(model.init(0), {}, -1, 1)
    params = model.init(0)
    free = {name: params[name].requires_grad_() for name in params if name in model.trainable}
    optimiser = torch.optim.Adam(free.values(), TRAINING.lr, fused=True)
    site = make_site(model, data, training=True)
    for epoch in draw_epochs(data.samples, TRAINING, seeding.generator(0, data.name, 1, "batches")):
        for index in epoch:
            optimiser.zero_grad()
            method.loss(params, data.train.take(index), site).backward()
            optimiser.step()
    assert_same_model(got, {name: tensor.detach() for name, tensor in params.items()}, rtol=0, atol=0)


@pytest.mark.parametrize("how", ["looped", "stacked"])
def test_an_anchor_next_to_nothing_and_a_mean_of_one_step(how: str, model: Model, federation: Federation) -> None:
    """Two ways to switch an extra on that must not matter."""
    one_step = TrainingSettings(epochs=1, batch_size=100)
    plain = run(FedAvg(), model, federation, executor=how, **vars(one_step))[0].trained
    mean = run(FedAvg(average=True), model, federation, executor=how, **vars(one_step))[0].trained
    assert_same_model(mean, plain, rtol=0, atol=0)
    model = in_double(model)
    plain, held = (run(FedAvg(anchor=mu), model, federation, executor=how)[0].trained for mu in (0.0, 1e-12))
    assert_same_model(held, plain, rtol=1e-6)


# Options: read, checked, listed.


@dataclass(frozen=True)
class Forgetful(Method):
    """Does not call super() in its checks."""

    size: int = 3

    def __post_init__(self) -> None:
        if self.size < 0:
            raise UserError("size")


@dataclass(frozen=True)
class MoreForgetful(Forgetful):
    """Nor does its child, which has other defaults."""

    anchor: float = option(0.5, "μ", low=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "title", "More")


def test_a_method_s_own_checks_still_run() -> None:
    with pytest.raises(UserError, match="size"):
        Forgetful(size=-1)
    for kind in (Method, Forgetful, MoreForgetful):
        with pytest.raises(UserError, match="anchor must be a finite number of at least 0"):
            kind(anchor=-0.1)
    assert Forgetful(5).size == 5  # its own options come first, as if there were no others
    assert MoreForgetful().title == "More"
    assert (MoreForgetful().anchor, MoreForgetful(anchor=0).anchor) == (0.5, 0)
    assert list(options_of(Forgetful)) == ["size", "anchor", "average"]


@pytest.mark.parametrize("name", sorted(set(Method.registry) - {"fedbn"}))
def test_named_on_the_command_line(name: str, federation: Federation) -> None:
    (plan,) = prepare([f"{name}:anchor=0.25,average=true"], {}, federation)
    (plain,) = prepare([name], {}, federation)
    assert (plan.method.anchor, plan.method.average) == (0.25, True)
    assert plain.label == plain.method.title
    said = "anchor=0.25, average=True"
    assert plan.label == f"{plain.label} ({said})"
    again = prepare([plan.key], {}, federation)[0]
    assert again.method == plan.method


MINE = """
from dataclasses import dataclass
import fedc2i

@dataclass(frozen=True)
class Mine(fedc2i.Method):
    name = "mine-with-extras"
    title = "Mine"
"""


def test_a_method_of_the_user_s_own(federation: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(MINE)
    wanted, settings = "mine.py:Mine:anchor=0.1,average=true", {"rounds": 1, "epochs": 2, "executor": "workers"}
    (plan,) = prepare([wanted], settings, federation, "lenet5")
    (usual,) = prepare(["fedavg:anchor=0.1,average=true"], {**settings, "executor": "looped"}, federation, "lenet5")
    assert_same_model(execute(plan).outcomes[0].trained, execute(usual).outcomes[0].trained, rtol=0, atol=0)
    with pytest.raises(UserError, match="anchor must be a finite number of at least 0, got '-1"):
        prepare(["mine.py:Mine:anchor=-1"], {}, federation)
    with pytest.raises(UserError, match=r"average must be true \| false, got 'maybe'"):
        prepare(["mine.py:Mine:average=maybe"], {}, federation)


def test_shared_options_are_listed_once() -> None:
    found = json.loads(call("methods", "--json").out)
    assert found["shared"].keys() == {"anchor", "average"}
    for name, entry in found["methods"].items():
        assert not {"anchor", "average"} & entry["options"].keys(), name
    listed = call("methods", "fedavg").out
    assert sum(line.split()[:1] == ["anchor"] for line in listed.splitlines()) == 1
