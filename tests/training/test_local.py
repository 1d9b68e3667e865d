"""Local training and evaluation of one client: against hand-written loops, torch's optimisers and counts by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.testing import assert_close

from fedc2i.core import seeding
from fedc2i.core.errors import UserError
from fedc2i.core.params import Params, row, stack
from fedc2i.core.settings import TrainingSettings
from fedc2i.data.federation import Federation
from fedc2i.engine import client as client_module
from fedc2i.engine.client import ClientData, LocalClient, RunContext, predict_all
from fedc2i.engine.executors.base import ClientBatch
from fedc2i.engine.executors.stacked.executor import StackedExecutor
from fedc2i.engine.executors.stacked.padded_data import pad
from fedc2i.methods.base import Method, Phase, Site
from fedc2i.methods.messages import Download
from fedc2i.models.model import Model, scale
from fedc2i.training.local import Batch, Optimiser, draw_epochs, gradient_and_value, train
from fedc2i.training.metrics import means, score
from oracles import assert_same_model
from oracles.training import local_run
from support.method_checks import local_client

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


# Optimisers, number by number, over ten steps.


SHAPES = ((3, 4), (5,), (), (2, 1, 3))
CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "adam": ({"optimizer": "adam", "lr": 0.02}, lambda p: torch.optim.Adam(p, 0.02)),
    "adam-decay": (
        {"optimizer": "adam", "lr": 0.02, "weight_decay": 0.3},
        lambda p: torch.optim.Adam(p, 0.02, weight_decay=0.3),
    ),
    "sgd": ({"optimizer": "sgd", "lr": 0.1}, lambda p: torch.optim.SGD(p, 0.1)),
    "sgd-decay": (
        {"optimizer": "sgd", "lr": 0.1, "weight_decay": 0.3},
        lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.3),
    ),
    "sgd-momentum": (
        {"optimizer": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.3},
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.3),
    ),
}
case = pytest.mark.parametrize(("options", "torch_s"), CASES.values(), ids=CASES.keys())


def drawn(seed: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def missing(number: int, step: int) -> bool:
    """The second tensor never gets a gradient, the last one only from the fourth step on, the first not in step 6."""
    return number == 1 or (number == 3 and step < 3) or (number == 0 and step == 5)


def by_torch(torch_s: Any, start: list[Tensor], gradients: list[list[Tensor | None]]) -> list[Tensor]:
    params = [tensor.clone().requires_grad_() for tensor in start]
    stepper = torch_s(params)
    for step in gradients:
        for param, gradient in zip(params, step, strict=True):
            param.grad = None if gradient is None else gradient.clone()
        stepper.step()
    return [param.detach() for param in params]


def ten(dtype: torch.dtype = torch.float64, some_missing: bool = False) -> list[list[Tensor | None]]:
    return [
        [None if some_missing and missing(k, step) else own for k, own in enumerate(drawn(100 + step, dtype))]
        for step in range(10)
    ]


@case
@pytest.mark.parametrize("some_missing", [False, True], ids=["all", "some-without-gradient"])
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=["double", "single"])
def test_ten_steps_are_torch_s(
    options: dict[str, Any], torch_s: Any, dtype: torch.dtype, rtol: float, some_missing: bool
) -> None:
    params = drawn(0, dtype)
    optimiser = Optimiser(TrainingSettings(**options), params)
    gradients = ten(dtype, some_missing)
    for step in gradients:
        optimiser.step(step)
    for got, want, start in zip(params, by_torch(torch_s, drawn(0, dtype), gradients), drawn(0, dtype), strict=True):
        assert_close(got, want, rtol=rtol, atol=rtol)
        assert torch.equal(got, start) == (some_missing and start.shape == (5,))


@case
def test_after_a_reset_it_is_as_new(options: dict[str, Any], torch_s: Any) -> None:
    params = drawn(0)
    optimiser = Optimiser(TrainingSettings(**options), params)
    for step in ten():
        optimiser.step(step)
    for param, start in zip(params, drawn(0), strict=True):
        param.copy_(start)
    optimiser.reset()
    for step in ten()[:4]:
        optimiser.step(step)
    for got, want in zip(params, by_torch(torch_s, drawn(0), ten()[:4]), strict=True):
        assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_parameters_that_ask_for_gradients_are_updated_in_place(kind: Any) -> None:
    leaf = torch.ones(3, requires_grad=True)
    Optimiser(TrainingSettings(optimizer=kind, lr=0.5), [leaf]).step([torch.ones(3)])
    assert leaf.requires_grad
    assert leaf.is_leaf
    assert_close(leaf.detach(), torch.full((3,), 0.5))  # Adam's first step is lr, too


@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_nothing_to_do(kind: Any) -> None:
    params = drawn(0)
    Optimiser(TrainingSettings(optimizer=kind, lr=0.5, weight_decay=1.0), params).step([None] * len(params))
    assert all(torch.equal(got, want) for got, want in zip(params, drawn(0), strict=True))


def test_a_gradient_is_not_changed() -> None:
    gradient = torch.ones(3)
    params = [torch.ones(3)]
    for options, _ in CASES.values():
        Optimiser(TrainingSettings(**options), params).step([gradient])
    assert gradient.tolist() == [1, 1, 1]


# Evaluation.


def batch(x: Tensor, y: list[int]) -> Batch:
    return Batch(x, torch.tensor(y), torch.ones(len(y)))


def as_they_are(x: Tensor) -> dict[str, Tensor]:
    return {"": x}


# score


def test_sums_by_hand() -> None:
    logits = torch.tensor([[0.0, math.log(3)], [0.0, math.log(3)], [math.log(3), 0.0], [0.0, math.log(3)]])
    got = score(as_they_are, batch(logits, [1, 0, 0, 1]))
    assert got["accuracy"].item() == 300.0
    assert got["loss"].item() == pytest.approx(3 * math.log(4 / 3) + math.log(4))


def test_further_predictions_are_scored_beside_the_main_one() -> None:
    piece = batch(torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]), [0, 0, 0])
    got = score(lambda x: {"": x, "/upside": -x}, piece)
    assert got.keys() == {"accuracy", "loss", "logits", "accuracy/upside", "loss/upside"}
    assert (got["accuracy"].item(), got["accuracy/upside"].item()) == (200, 100)
    assert got["loss"] < got["loss/upside"]


def test_no_gradients_are_kept() -> None:
    weight = torch.ones(1, requires_grad=True)

    def predict(x: Tensor) -> dict[str, Tensor]:
        logits = x * weight
        assert not logits.requires_grad
        return {"": logits}

    assert not any(value.requires_grad for value in score(predict, batch(torch.ones(2, 3), [0, 1])).values())


def test_a_broken_model_shows_in_the_loss() -> None:
    assert math.isnan(score(lambda x: {"": x * float("nan")}, batch(torch.ones(2, 3), [0, 1]))["loss"])


# means


def test_means_of_pieces_are_over_all_samples() -> None:
    pieces = [
        {"accuracy": torch.tensor(100.0), "loss": torch.tensor(1.5)},
        {"accuracy": torch.tensor(300.0), "loss": torch.tensor(2.5)},
    ]
    got = means(pieces, 8)
    assert {name: value.item() for name, value in got.items()} == {"accuracy": 50.0, "loss": 0.5}
    assert all(value.dtype == torch.float64 for value in got.values())


def test_means_in_double_precision() -> None:
    """In single precision 2²⁴ + 1 is 2²⁴."""
    pieces = [{"loss": torch.tensor(2.0**24)}, {"loss": torch.tensor(1.0)}]
    assert means(pieces, 1)["loss"].item() == 2**24 + 1


def test_no_samples_no_means() -> None:
    assert means([], 0) == {}


# A client's own data.


def client_of(
    model: Model, federation: Federation, method: Method | None = None, **splits: Batch
) -> tuple[LocalClient, Params]:
    client = local_client(method or Method(), model, federation)
    client.data = replace(client.data, **splits)
    return client, model.init(0)


@pytest.mark.parametrize("validation", [0, 5])
def test_a_client_is_scored_on_its_own_data(
    validation: int, model: Model, make_federation: Callable[..., Federation]
) -> None:
    federation = make_federation(validation=validation)
    client, params = client_of(model, federation)
    got = client.evaluate(params, {}, -1, 1)
    own = federation.clients[0]
    for split, prefix in ((own.test, ""), (own.validation, "validation_")):
        if len(split):
            logits = model.head(params, model.features(params, split.x))
            right = int((logits.argmax(1) == split.y).sum())
            assert got[f"{prefix}accuracy"] == pytest.approx(100 * right / len(split))
            assert got[f"{prefix}loss"] == pytest.approx(F.cross_entropy(logits, split.y).item(), rel=1e-5)
    beside = ("validation_accuracy", "validation_loss") if validation else ()
    assert list(got) == ["accuracy", "loss", "balanced_accuracy", "f1", "auroc", "calibration_error", *beside]
    assert all(type(value) is float for value in got.values())


@pytest.mark.parametrize("count", [1, 6, 7, 8, 17])
def test_every_sample_counts_once_however_many_there_are(
    count: int, model: Model, federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "AT_ONCE", 7)
    seen: list[int] = []

    class Reading(Method):
        """Reads the class, 0 or 1, from the first pixel."""

        def predict(self, params: Params, x: Tensor, site: Site) -> Tensor:
            seen.append(len(x))
            return F.one_hot(x[:, 0, 0, 0].long(), 4).float() * 1000

    x = (torch.arange(count) % 2)[:, None, None, None].expand(count, 3, 2, 2).to(torch.uint8)
    test = batch(x, [0] * count)
    client, params = client_of(model, federation, Reading(), test=test, validation=test)
    got = client.evaluate(params, {}, -1, 1)
    assert sum(seen) == 2 * count
    assert max(seen) <= 7
    right = (count + 1) // 2
    for prefix in ("", "validation_"):
        assert got[f"{prefix}accuracy"] == pytest.approx(100 * right / count)
        assert got[f"{prefix}loss"] == pytest.approx(1000 * (count - right) / count)


class Telling(Method):
    """Predicts what it was told: the class is the round, by the position, or what it received."""

    def predict(self, params: Params, x: Tensor, site: Site) -> Tensor:
        return F.one_hot(torch.tensor(site.round - 1), 4).float().expand(len(x), 4)

    def other_predictions(self, params: Params, x: Tensor, site: Site) -> Mapping[str, Tensor]:
        place = F.one_hot(site.position, 4).float().expand(len(x), 4)
        return {"position": place, "received": site.received["told"].expand(len(x), 4)}


@pytest.mark.parametrize(("round", "position", "told", "want"), [(2, 0, 3, (1, 0, 3)), (1, 2, 1, (0, 2, 1))])
def test_predictions_see_the_round_the_position_and_what_was_received(
    round: int, position: int, told: int, want: tuple[int, ...], model: Model, federation: Federation
) -> None:
    client, params = client_of(model, federation, Telling())
    got = client.evaluate(params, {"told": F.one_hot(torch.tensor(told), 4).float()}, position, round)
    labels = client.data.test.y
    named = dict(zip(("", "/position", "/received"), want, strict=True))
    shares = {name: 100 * float((labels == c).double().mean()) for name, c in named.items()}
    assert {name: got[f"accuracy{name}"] for name in shares} == pytest.approx(shares)


def test_names_of_predictions(model: Model, federation: Federation) -> None:
    client, params = client_of(model, federation)
    site = Site(model, client.data.counts, torch.tensor(0), {"told": torch.zeros(4)})
    x: Any = client.data.test.x[:2]
    assert list(predict_all(Telling(), params, x, site)) == ["", "/position", "/received"]
    assert list(predict_all(Method(), params, x, site)) == [""]


def test_a_gradient_is_the_one_by_hand_also_inside_vmap() -> None:
    def loss(params: Params) -> Tensor:
        return (params["a"] ** 2).sum() * 3

    params = {"a": torch.tensor([[1.0, -2.0], [0.5, 4.0]]), "unused": torch.ones(2, 3)}
    gradient, value = gradient_and_value(loss, params)
    assert_close(gradient, {"a": 6 * params["a"], "unused": torch.zeros(2, 3)})
    assert_close(value, torch.tensor(3 * 21.25))
    assert not value.requires_grad
    assert not params["a"].requires_grad
    lifted, values = torch.func.vmap(lambda own: gradient_and_value(loss, own))(params)
    assert_close(lifted, gradient)
    assert_close(values, torch.tensor([15.0, 48.75]))
    assert_close(gradient_and_value(lambda own: torch.tensor(2.0), params)[0]["a"], torch.zeros(2, 2))
    assert gradient_and_value(lambda own: torch.tensor(2.0), {}) == ({}, torch.tensor(2.0))
