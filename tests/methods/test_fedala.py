"""FedALA: the weights it learns, where they live, and when."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from fedc2i.core.errors import UserError
from fedc2i.core.params import Params, select
from fedc2i.core.settings import TrainingSettings
from fedc2i.data.federation import Federation, InputSpec
from fedc2i.methods.base import Site
from fedc2i.methods.fedala import FedALA
from fedc2i.methods.fedavg import FedAvg
from fedc2i.models.model import Model, scale, split
from fedc2i.models.networks import build
from fedc2i.training.local import Batch
from oracles import assert_same_model
from oracles.fedala import aggregate
from support.method_checks import TRAINING, make_site, place, run

MIXING = {"mixing.head.weight", "mixing.head.bias"}


@pytest.mark.parametrize(
    ("layers", "names"),
    [
        (1, ["fc3.weight", "fc3.bias"]),
        (2, ["fc2.weight", "fc2.bias", "fc3.weight", "fc3.bias"]),
        (5, [f"{layer}.{part}" for layer in ("conv1", "conv2", "fc1", "fc2", "fc3") for part in ("weight", "bias")]),
    ],
)
def test_which_tensors_are_mixed(layers: int, names: list[str]) -> None:
    model = build("lenet5", 10, InputSpec((3, 16, 16)))
    method, params = FedALA(layers=layers), model.init(0)
    start = method.setup(params, model)
    assert list(start) == [*params, *(f"mixing.{name}" for name in names)]
    assert all(bool((start[f"mixing.{name}"] == 1).all()) for name in names)
    assert method.untrained(model) == {f"mixing.{name}" for name in names}


def test_more_layers_than_there_are_is_refused(model: Model, federation: Federation) -> None:
    with pytest.raises(UserError, match=r"layers must be 1\.\.2 for model 'tiny', got 3"):
        run(FedALA(layers=3), model, federation)


@dataclass(frozen=True)
class Quadratic(FedALA):
    """½ Σ (θ − target)² over the head's bias, whatever the data."""

    def loss(self, params: Params, batch: Batch, site: Site) -> Tensor:
        return batch.mean((params["head.bias"] - torch.tensor([1.0, 9.0, -9.0, 0.5])).square().sum() / 2 * batch.w)


def test_a_quadratic_case_by_hand(model: Model, federation: Federation) -> None:
    """own 0, received 1: the target 1 is at W = 1, 9 beyond it, −9 on the far side, 0.5 half-way."""
    method, data = Quadratic(eta=0.5, start_epochs=40, weight_batch=100), place(federation)
    own = method.setup({**model.init(0), "head.bias": torch.zeros(4)}, model)
    received = {**model.init(0), "head.bias": torch.ones(4)}
    start, report = method.personalise(own, data.train, make_site(model, data, received))
    want = torch.tensor([1.0, 1.0, 0.0, 0.5])
    torch.testing.assert_close(start["mixing.head.bias"], want)
    torch.testing.assert_close(start["head.bias"], want)
    assert report == {}
    # One step from W = 1: W − η·(θ̂ − target)·(received − own), clipped.
    once, _ = Quadratic(eta=0.5, start_epochs=1, weight_batch=100).personalise(
        own, data.train, make_site(model, data, received)
    )
    torch.testing.assert_close(once["mixing.head.bias"], torch.tensor([1.0, 1.0, 0.0, 0.75]))


@pytest.mark.parametrize(("round", "epochs"), [(1, 4), (2, 1), (7, 1)])
@pytest.mark.parametrize("layers", [1, 2])
def test_the_weights_are_the_oracle_s(round: int, epochs: int, layers: int, federation: Federation) -> None:
    def net() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(768, 6), nn.Tanh(), nn.Linear(6, 4))

    model, data = split(net, head="3"), place(federation, 1)
    own, received = model.init(0), model.init(1)
    method = FedALA(layers=layers, start_epochs=4, weight_batch=5)
    state = method.setup(own, model)
    state = {name: 0.5 * tensor if name.startswith("mixing.") else tensor for name, tensor in state.items()}
    start, _ = method.personalise(state, data.train, make_site(model, data, received, round=round))
    x, y = scale(data.train.x, torch.float32)[:16], data.train.y[:16]  # 80 % of 20
    batches = [(x[low : low + 5], y[low : low + 5]) for low in range(0, 16, 5)]
    names = ["3.weight", "3.bias"] if layers == 1 else list(own)
    weights = {name: torch.full_like(own[name], 0.5) for name in names}
    mixed, learnt = aggregate(net(), own, received, weights, batches, epochs, eta=1.0)
    want = {**mixed, **{f"mixing.{name}": tensor for name, tensor in learnt.items()}}
    assert_same_model(start, want, rtol=1e-4, atol=1e-5)
    if layers == 1:
        assert torch.equal(start["1.weight"], received["1.weight"])  # below the top layer: as received
    assert any(bool(((tensor > 0) & (tensor < 1) & (tensor != 0.5)).any()) for tensor in learnt.values())


@pytest.mark.parametrize(("share", "used"), [(0.8, 10), (1.0, 12), (0.5, 6), (0.001, 1)])
def test_the_share_of_the_data(share: float, used: int, model: Model, federation: Federation) -> None:
    """Samples after the share may be anything; the last one before it may not."""
    data, method = place(federation), FedALA(share=share)
    assert data.samples == 12
    own, received = method.setup(model.init(0), model), model.init(1)

    def start(changed: int) -> Params:
        y = data.train.y.clone()
        y[changed:] = 3
        return method.personalise(own, Batch(data.train.x, y, data.train.w), make_site(model, data, received))[0]

    same = start(data.samples)
    assert_same_model(start(used), same, rtol=0, atol=0)
    assert not torch.equal(start(used - 1)["mixing.head.bias"], same["mixing.head.bias"])


def test_weights_stay_in_bounds_differ_and_persist(model: Model, federation: Federation) -> None:
    outcome, _ = run(FedALA(eta=20.0), model, federation, rounds=3)
    for name in MIXING:
        learnt = outcome.received[name]
        assert learnt.min() >= 0
        assert learnt.max() <= 1
        assert learnt.min() < 1
        assert not torch.equal(learnt[0], learnt[1])
    before, _ = run(FedALA(eta=20.0), model, federation, rounds=2)
    after, _ = run(FedALA(eta=20.0), model, federation, rounds=3)
    for name in MIXING:
        assert torch.equal(after.trained[name], before.received[name])


@pytest.mark.parametrize("executor", ["looped", "stacked"])
def test_local_training_leaves_the_weights_alone(executor: str, model: Model, federation: Federation) -> None:
    """Weight decay would reach them even with a gradient of zero."""
    decay = TrainingSettings(batch_size=5, lr=0.01, weight_decay=0.1)
    outcome, _ = run(FedALA(), model, federation, rounds=1, executor=executor, **vars(decay))
    for name in MIXING:
        assert bool((outcome.trained[name] == 1).all())


def test_without_learning_it_is_fedavg(model: Model, federation: Federation) -> None:
    ours, _ = run(FedALA(eta=0.0), model, federation)
    mean, _ = run(FedAvg(), model, federation)
    assert_same_model(select(ours.received, mean.received), mean.received, rtol=1e-5, atol=1e-6)
    learning, _ = run(FedALA(), model, federation)
    assert not torch.allclose(learning.received["head.weight"], mean.received["head.weight"])


def test_a_client_that_sits_out_keeps_its_weights(model: Model, make_federation: Callable[..., Federation]) -> None:
    federation = make_federation(sizes=(12, 20, 7, 9))
    outcome, reports = run(FedALA(), model, federation, rounds=3, clients_per_round=1, **vars(TRAINING))
    seen = {name for report in reports for name in report.participants}
    absent = [m for m, name in enumerate(federation.names) if name not in seen]
    assert absent
    for m in absent:
        assert all(bool((outcome.trained[name][m] == 1).all()) for name in MIXING)
