"""Local training of one client: against hand-written loops and counts by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from fedc2i.core import seeding
from fedc2i.core.errors import UserError
from fedc2i.core.params import Params, row, stack
from fedc2i.core.settings import TrainingSettings
from fedc2i.data.federation import Federation
from fedc2i.engine.client import ClientData, LocalClient, RunContext
from fedc2i.engine.executors.base import ClientBatch
from fedc2i.engine.executors.stacked.executor import StackedExecutor
from fedc2i.engine.executors.stacked.padded_data import pad
from fedc2i.methods.base import Method, Phase
from fedc2i.methods.messages import Download
from fedc2i.models.model import Model, scale
from fedc2i.training.local import Batch, draw_epochs, train
from oracles import assert_same_model
from oracles.training import local_run

CPU = torch.device("cpu")


def placed(federation: Federation) -> list[ClientData]:
    return [ClientData.place(client, len(federation.classes), CPU) for client in federation.clients]


def cross_entropy(model: Model, training: bool = True) -> Callable[..., Tensor]:
    def loss(params: Params, batch: Batch, context: Any = None) -> Tensor:
        logits = model.head(params, model.features(params, batch.x, training))
        return batch.mean(F.cross_entropy(logits, batch.y, reduction="none"))

    return loss


def double(params: Params) -> Params:
    return {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in params.items()}


def module_of(model: Model, params: Params) -> nn.Module:
    """The ordinary module behind a model, with these weights."""
    module = model._build().to(next(iter(params.values())).dtype)
    module.load_state_dict(params)
    return module


def batches_of(samples: int, training: TrainingSettings, seed: int = 0) -> list[Tensor]:
    return [index for epoch in draw_epochs(samples, training, seeding.generator(seed, "x")) for index in epoch]


# train


@pytest.mark.parametrize("batch_norm", [False, True], ids=["plain", "batchnorm"])
@pytest.mark.parametrize(
    ("training", "optimizer"),
    [
        (TrainingSettings(batch_size=5), lambda p: torch.optim.Adam(p, 1e-3)),
        (
            TrainingSettings(batch_size=5, lr=0.02, weight_decay=0.1, epochs=3),
            lambda p: torch.optim.Adam(p, 0.02, weight_decay=0.1),
        ),
        (TrainingSettings(batch_size=5, optimizer="sgd", lr=0.05), lambda p: torch.optim.SGD(p, 0.05)),
        (
            TrainingSettings(batch_size=4, optimizer="sgd", lr=0.01, momentum=0.9, weight_decay=0.1, drop_last=True),
            lambda p: torch.optim.SGD(p, 0.01, momentum=0.9, weight_decay=0.1),
        ),
    ],
    ids=["adam", "adam-decay", "sgd", "sgd-momentum"],
)
def test_train_equals_a_hand_written_loop(
    federation: Federation,
    make_model: Callable[..., Model],
    training: TrainingSettings,
    optimizer: Any,
    batch_norm: bool,
) -> None:
    model, data = make_model(batch_norm=batch_norm), placed(federation)[0].train
    start = double(model.init(0))
    batches = batches_of(len(data.y), training)
    got = train(cross_entropy(model), start, sorted(model.trainable), data, batches, training)
    want = local_run(module_of(model, start), scale(data.x, torch.float64), data.y, batches, optimizer)
    assert_same_model(got, want, rtol=1e-9)
    assert not torch.equal(got["head.weight"], start["head.weight"])


def test_train_does_not_change_its_input(federation: Federation, make_model: Callable[..., Model]) -> None:
    model, data = make_model(batch_norm=True), placed(federation)[0].train
    start = model.init(0)
    train(cross_entropy(model), start, sorted(model.trainable), data, [torch.arange(8)], TrainingSettings())
    assert_same_model(start, model.init(0), rtol=0, atol=0)


def test_a_frozen_parameter_does_not_move_and_the_others_do(federation: Federation, model: Model) -> None:
    data, start = placed(federation)[0].train, model.init(0)
    got = train(cross_entropy(model), start, ["hidden.bias"], data, [torch.arange(8)], TrainingSettings())
    moved = {name for name in start if not torch.equal(got[name], start[name])}
    assert moved == {"hidden.bias"}
    assert list(got) == list(start)


# draw_epochs


@pytest.mark.parametrize(
    ("samples", "size", "drop_last", "want"),
    [
        (12, 5, False, [5, 5, 2]),
        (12, 5, True, [5, 5]),
        (10, 5, True, [5, 5]),
        (3, 5, False, [3]),
        (3, 5, True, [3]),  # the only batch is never dropped
        (1, 1, True, [1]),
    ],
)
def test_draw_epochs_sizes(samples: int, size: int, drop_last: bool, want: list[int]) -> None:
    training = TrainingSettings(epochs=3, batch_size=size, drop_last=drop_last)
    epochs = draw_epochs(samples, training, seeding.generator(0))
    assert [[len(batch) for batch in epoch] for epoch in epochs] == [want] * 3


@pytest.mark.parametrize(("steps", "want"), [(2, [5, 5]), (7, [5, 5, 2, 5, 5, 2, 5])])
def test_an_epoch_of_fixed_length_goes_through_the_samples_again_and_again(steps: int, want: list[int]) -> None:
    training = TrainingSettings(epochs=2, steps=steps, batch_size=5)
    epochs = draw_epochs(12, training, seeding.generator(0))
    assert [[len(batch) for batch in epoch] for epoch in epochs] == [want] * 2
    assert training.batches(12) == steps
    drawn = torch.cat(epochs[0]).tolist()
    assert len({*drawn[:12]}) == len(drawn[:12])
    if steps == 7:
        assert sorted(drawn[:12]) == sorted(drawn[12:24]) == list(range(12))
        assert drawn[:12] != drawn[12:24]


def test_draw_epochs_shuffles_every_epoch_anew_without_repeats() -> None:
    epochs = draw_epochs(50, TrainingSettings(epochs=2, batch_size=7), seeding.generator(0))
    orders = [torch.cat(epoch).tolist() for epoch in epochs]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(50))
    assert orders[0] != orders[1]
    assert orders[0] != list(range(50))
    again = draw_epochs(50, TrainingSettings(epochs=2, batch_size=7), seeding.generator(0))
    assert [torch.cat(epoch).tolist() for epoch in again] == orders


# pad


def test_pad() -> None:
    short = Batch(torch.ones(1, 3, 2, 2, dtype=torch.uint8), torch.tensor([3]), torch.ones(1))
    long = Batch(torch.ones(3, 3, 2, 2, dtype=torch.uint8), torch.tensor([1, 2, 3]), torch.ones(3))
    padded = pad([short, long])
    assert padded.x.shape == (2, 3, 3, 2, 2)
    assert padded.y.tolist() == [[3, 0, 0], [1, 2, 3]]
    assert padded.w.tolist() == [[1, 0, 0], [1, 1, 1]]


# Phases: what a client trains, through both executors.


class InPhases(Method):
    def phases(self, epochs: int) -> tuple[Phase, ...]:
        return self.plan

    plan: tuple[Phase, ...] = ()


def run_phases(how: str, plan: tuple[Phase, ...], model: Model, federation: Federation) -> tuple[Params, Params]:
    method = InPhases()
    object.__setattr__(method, "plan", plan)
    data = placed(federation)
    recipe = RunContext(method, model, TrainingSettings(epochs=2, batch_size=5), rounds=1, seed=0)
    start = model.init(0)
    if how == "looped":
        return start, LocalClient(recipe, data[0]).train(start, {}, -1, 1)
    turn = ClientBatch(recipe, (0, 1), stack([start, start]), Download(), 1)
    return start, row(StackedExecutor(data).train([turn], evaluate=False)[0].params, 0)


BODY = {"hidden.weight", "norm.weight", "norm.bias"}
STATISTICS = {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
HEAD = {"head.weight", "head.bias"}


@pytest.mark.parametrize("how", ["looped", "stacked"])
@pytest.mark.parametrize(
    ("plan", "moves"),
    [
        ((Phase(2, "head"),), HEAD),  # with the body frozen its statistics are too
        ((Phase(2, "body"),), BODY | STATISTICS),
        ((Phase(1, "head"), Phase(1, "body")), BODY | HEAD | STATISTICS),
        ((Phase(2),), BODY | HEAD | STATISTICS),
        ((Phase(0, "head"), Phase(0, "body")), set()),
    ],
    ids=["head", "body", "head-then-body", "all", "nothing"],
)
def test_a_phase_moves_its_part_only(
    how: str,
    plan: tuple[Phase, ...],
    moves: set[str],
    make_federation: Callable[..., Federation],
    make_model: Callable[..., Model],
) -> None:
    start, end = run_phases(how, plan, make_model(batch_norm=True), make_federation(sizes=(10, 10)))
    assert {name for name in start if not torch.equal(start[name], end[name])} == moves


def test_phases_share_the_epochs_in_order(federation: Federation, model: Model) -> None:
    """Head first on epoch 1, then body on epoch 2, each with a fresh optimiser."""
    training, data = TrainingSettings(epochs=2, batch_size=5), placed(federation)[0]
    start, got = run_phases("looped", (Phase(1, "head"), Phase(1, "body")), model, federation)
    first, second = draw_epochs(data.samples, training, seeding.generator(0, data.name, 1, "batches"))
    loss = cross_entropy(model)
    after_head = train(loss, start, ["head.weight", "head.bias"], data.train, first, training)
    want = train(loss, after_head, ["hidden.weight", "hidden.bias"], data.train, second, training)
    assert_same_model(got, want, rtol=0, atol=0)


def test_weights_the_user_froze_stay_frozen(federation: Federation, model: Model) -> None:
    module = module_of(model, model.init(0))
    module.hidden.requires_grad_(False)
    frozen = Model(lambda: module, head="head")
    start, end = run_phases("looped", (Phase(2),), frozen, federation)
    assert {name for name in start if not torch.equal(start[name], end[name])} == HEAD


# Dropout.


@pytest.mark.parametrize("how", ["looped", "stacked"])
def test_dropout_is_deterministic_and_leaves_the_global_generator_alone(
    how: str, federation: Federation, make_model: Callable[..., Model]
) -> None:
    before = torch.get_rng_state()
    runs = []
    for calls in (0, 3):
        torch.rand(calls)
        here = torch.get_rng_state()
        runs.append(run_phases(how, (Phase(2),), make_model(dropout=0.5), federation)[1])
        assert torch.equal(torch.get_rng_state(), here)
    torch.set_rng_state(before)
    assert_same_model(runs[0], runs[1], rtol=0, atol=0)
    without = run_phases(how, (Phase(2),), make_model(), federation)[1]
    assert not torch.equal(runs[0]["head.weight"], without["head.weight"])


# Refusals.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0}, "epochs must be .* at least 1, got '0'"),
        ({"batch_size": 0}, "batch_size must be .* at least 1"),
        ({"weight_decay": -1e-3}, "weight_decay must be a finite number of at least 0"),
        ({"weight_decay": float("nan")}, "weight_decay must be a finite number of at least 0"),
        ({"optimizer": "lbfgs"}, "optimizer must be adam .* sgd, got 'lbfgs'"),
        ({"lr": 0.0}, "lr must be .* above 0"),
        ({"lr": float("inf")}, "lr must be .* above 0"),
        ({"lr": float("nan")}, "lr must be .* above 0"),
        ({"momentum": 1.0}, "momentum must be .* at least 0 and below 1"),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        TrainingSettings(**options)


def test_defaults_are_the_paper_s() -> None:
    training = TrainingSettings()
    assert (training.epochs, training.batch_size, training.optimizer) == (2, 32, "adam")
    assert (training.lr, training.weight_decay) == (1e-3, 0.0)
