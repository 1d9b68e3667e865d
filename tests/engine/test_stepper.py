"""Local training of many clients at once against `training.train`, in double precision; work as a CUDA graph."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from fedc2i.core import seeding
from fedc2i.core.params import Params, Stacked, row, stack
from fedc2i.core.settings import TrainingSettings
from fedc2i.engine.executors.stacked.padded_data import Steps, pad, plan_steps
from fedc2i.engine.executors.stacked.stepper import GraphedFunction, Stepper, capture
from fedc2i.engine.executors.stacked.vmap_rules import VmapRules
from fedc2i.models.model import Model
from fedc2i.training.local import Batch, draw_epochs, train
from oracles import assert_same_model
from support.method_checks import in_double

SIZES = (12, 7, 21)
SEEDS = 2
CUDA = torch.device("cuda")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
Context = dict[str, Any]
TRAININGS = {
    "adam": TrainingSettings(batch_size=5),
    "adam-decay": TrainingSettings(batch_size=5, lr=0.02, weight_decay=0.1, epochs=3),
    "sgd-momentum": TrainingSettings(batch_size=4, optimizer="sgd", lr=0.05, momentum=0.9, weight_decay=0.1),
    "drop-last": TrainingSettings(batch_size=5, drop_last=True),
    "everything-at-once": TrainingSettings(batch_size=100),
}


def datasets(sizes: tuple[int, ...] = SIZES) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    sets = []
    for size in sizes:
        x = torch.randint(0, 256, (size, 3, 16, 16), generator=generator).to(torch.uint8)
        sets.append(Batch(x, torch.randint(0, 4, (size,), generator=generator), torch.ones(size)))
    return sets


def batches_of(sizes: tuple[int, ...], training: TrainingSettings, round: int = 1) -> list[list[list[Tensor]]]:
    """For every seed, for every client, the batches of its run."""
    return [
        [
            [index for epoch in draw_epochs(size, training, seeding.generator(s, str(k), round)) for index in epoch]
            for k, size in enumerate(sizes)
        ]
        for s in range(SEEDS)
    ]


def steps_of(batches: list[list[list[Tensor]]], training: TrainingSettings, sizes: tuple[int, ...] = SIZES) -> Steps:
    largest = max(sizes)
    return plan_steps(batches, training.epochs * training.batches(largest), min(largest, training.batch_size))


def cross_entropy(model: Model) -> Callable[[Params, Batch, Context], Tensor]:
    """Pulled towards a point of the client's own, by a strength of the seed's."""

    def loss(params: Params, batch: Batch, context: Context) -> Tensor:
        with VmapRules(batch.w):
            logits = model.head(params, model.features(params, batch.x, training=True))
        pull = context["strength"] * (params["head.weight"] - context["target"]).square().sum()
        return batch.mean(F.cross_entropy(logits, batch.y, reduction="none")) + pull

    return loss


def starts(model: Model, clients: int = len(SIZES)) -> list[list[Params]]:
    return [[model.init(s, k) for k in range(clients)] for s in range(SEEDS)]


def stacked(models: list[list[Params]]) -> Stacked:
    return stack([stack(seed) for seed in models])


def context_of(clients: int = len(SIZES), scale: float = 1.0) -> Context:
    generator = torch.Generator().manual_seed(1)
    return {
        "target": scale * torch.randn(SEEDS, clients, 4, 6, generator=generator).double(),
        "strength": torch.tensor([0.1, 0.3]).double(),
    }


DIMS = {"target": 0, "strength": None}


def one_by_one(
    model: Model,
    first: list[list[Params]],
    batches: Any,
    training: TrainingSettings,
    context: Context,
    trainable: list[str],
    average: bool = False,
) -> list[list[Params]]:
    """What `train` makes of every client."""
    loss, sets = cross_entropy(model), datasets()

    def run(s: int, k: int) -> Params:
        mine = {"target": context["target"][s, k], "strength": context["strength"][s]}
        return train(lambda p, b: loss(p, b, mine), first[s][k], trainable, sets[k], batches[s][k], training, average)

    return [[run(s, k) for k in range(len(sets))] for s in range(SEEDS)]


def everyone(clients: int = len(SIZES)) -> Tensor:
    return torch.arange(clients).expand(SEEDS, clients)


@pytest.mark.parametrize(
    ("batch_norm", "average"), [(False, True), (True, False)], ids=["plain-mean", "batchnorm-last"]
)
@pytest.mark.parametrize("training", TRAININGS.values(), ids=TRAININGS.keys())
def test_many_at_once_are_each_alone(
    training: TrainingSettings, batch_norm: bool, average: bool, make_model: Callable[..., Model]
) -> None:
    """Unequal clients, which stop after different numbers of steps, with short batches; in two rounds."""
    model = in_double(make_model(batch_norm=batch_norm))
    stepper = Stepper(cross_entropy(model), model.trainable, pad(datasets()), training, DIMS, average)
    for round, scale in ((1, 1.0), (2, -2.0)):  # the second run must not remember the first
        batches, context, first = batches_of(SIZES, training, round), context_of(scale=scale), starts(model)
        steps = steps_of(batches, training)
        assert len(set(steps.count.flatten().tolist())) == (1 if training.batch_size == 100 else 3)
        got = stepper.run(stacked(first), everyone(), steps, context)
        want = one_by_one(model, first, batches, training, context, list(model.trainable), average)
        for s in range(SEEDS):
            for k in range(len(SIZES)):
                assert_same_model(row(row(got, s), k), want[s][k], rtol=1e-6, atol=1e-9)
        assert not torch.equal(got["head.weight"], stacked(first)["head.weight"])
        if batch_norm:
            assert torch.equal(got["norm.num_batches_tracked"], steps.count)


def test_the_starts_and_the_context_are_not_changed(make_model: Callable[..., Model]) -> None:
    model, training = in_double(make_model(batch_norm=True)), TRAININGS["adam"]
    first, context = stacked(starts(model)), context_of()
    stepper = Stepper(cross_entropy(model), model.trainable, pad(datasets()), training, DIMS)
    one = stepper.run(first, everyone(), steps_of(batches_of(SIZES, training), training), context)
    kept = {name: tensor.clone() for name, tensor in one.items()}
    stepper.run(first, everyone(), steps_of(batches_of(SIZES, training, 2), training), context)
    assert_same_model(first, stacked(starts(model)), rtol=0, atol=0)
    assert_same_model(one, kept, rtol=0, atol=0)  # a later run does not write into what an earlier one returned
    assert torch.equal(context["target"], context_of()["target"])


def test_clients_may_come_in_any_order_and_number(make_model: Callable[..., Model]) -> None:
    """Which data each trains on is told by its number: other clients in each seed, one of them twice."""
    model, training, whose = in_double(make_model()), TRAININGS["adam"], torch.tensor([[2, 0], [1, 1]])
    batches = [
        [
            [index for epoch in draw_epochs(SIZES[m], training, seeding.generator(s, k)) for index in epoch]
            for k, m in enumerate(own)
        ]
        for s, own in enumerate(whose.tolist())
    ]
    first, context, sets = starts(model, 2), context_of(2), datasets()
    stepper = Stepper(cross_entropy(model), model.trainable, pad(sets), training, DIMS)
    got = stepper.run(stacked(first), whose, steps_of(batches, training), context)
    for s, own in enumerate(whose.tolist()):
        for k, m in enumerate(own):
            mine = {"target": context["target"][s, k], "strength": context["strength"][s]}

            def loss(params: Params, batch: Batch, mine: Context = mine) -> Tensor:
                return cross_entropy(model)(params, batch, mine)

            want = train(loss, first[s][k], model.trainable, sets[m], batches[s][k], training)
            assert_same_model(row(row(got, s), k), want, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ["adam-decay", "sgd-momentum"])
def test_a_parameter_without_gradient_stays(name: str, make_model: Callable[..., Model]) -> None:
    """Not even weight decay moves it, as with torch's optimisers."""
    model, training = in_double(make_model()), TRAININGS[name]
    first = [[{**own, "idle": torch.full((3,), 5.0).double()} for own in seed] for seed in starts(model)]
    batches, context, names = batches_of(SIZES, training), context_of(), [*model.trainable, "idle"]
    stepper = Stepper(cross_entropy(model), names, pad(datasets()), training, DIMS)
    got = stepper.run(stacked(first), everyone(), steps_of(batches, training), context)
    want = one_by_one(model, first, batches, training, context, names)
    assert (got["idle"] == 5).all()
    assert_same_model(row(row(got, 1), 2), want[1][2], rtol=1e-6, atol=1e-9)


def test_what_is_not_trained_stays_and_names_keep_their_order(make_model: Callable[..., Model]) -> None:
    model, training = in_double(make_model()), TRAININGS["adam"]
    first = stacked(starts(model))
    steps = steps_of(batches_of(SIZES, training), training)
    stepper = Stepper(cross_entropy(model), ["hidden.bias"], pad(datasets()), training, DIMS)
    got = stepper.run(first, everyone(), steps, context_of())
    assert list(got) == list(first)
    assert {name for name in first if not torch.equal(got[name], first[name])} == {"hidden.bias"}
    nothing = Stepper(cross_entropy(model), [], pad(datasets()), training, DIMS)
    assert_same_model(nothing.run(first, everyone(), steps, context_of()), first, rtol=0, atol=0)


def test_plan_steps_by_hand() -> None:
    batches = [[[torch.tensor([4, 2]), torch.tensor([7])], [torch.tensor([1])]]]
    steps = plan_steps(batches, steps=3, size=2)
    assert steps.count.tolist() == [[2, 1]]
    assert steps.index.tolist() == [[[[4, 2], [1, 0]]], [[[7, 0], [0, 0]]], [[[0, 0], [0, 0]]]]  # (T, S, K, B)
    assert steps.weight.tolist() == [[[[1, 1], [1, 0]]], [[[1, 0], [0, 0]]], [[[0, 0], [0, 0]]]]


def doubling(counts: list[list[int]]) -> tuple[Batch, Steps]:
    """Steps of one sample each, as many for each client of each seed."""
    most = max(map(max, counts))
    images = torch.zeros(len(counts[0]), most, 3, 1, 1, dtype=torch.uint8)
    data = Batch(images, torch.zeros(images.shape[:2], dtype=torch.int64), torch.ones(images.shape[:2]))
    return data, plan_steps([[[torch.tensor([0])] * own for own in seed] for seed in counts], most, 1)


def test_means_of_the_second_half_by_hand() -> None:
    """Loss −w²/2 with steps of 1 doubles w: 1, then 2, 4, 8, 16, 32; n = 1 to 5 steps, all clients at once."""
    means = {1: 2, 2: 4, 3: (4 + 8) / 2, 4: (8 + 16) / 2, 5: (8 + 16 + 32) / 3}
    up, down, mixed = [1, 2, 3, 4, 5], [5, 4, 3, 2, 1], [3, 5, 1, 1, 4]
    data, _ = doubling([up])
    start = {"w": torch.ones(2, 5, 1).double(), "still": torch.full((2, 5), 7.0)}
    training = TrainingSettings(optimizer="sgd", lr=1.0)

    def loss(params: Params, batch: Batch, context: Context) -> Tensor:
        return -params["w"].square().sum() / 2

    stepper = Stepper(loss, ["w"], data, training, {}, average=True)
    for counts in ([up, down], [mixed, up]):  # the second run must not remember the first
        got = stepper.run(start, everyone(5), doubling(counts)[1], {})
        want = torch.tensor([[means[n] for n in own] for own in counts]).double()
        torch.testing.assert_close(got["w"][..., 0], want)
        assert (got["still"] == 7).all()
    last = Stepper(loss, ["w"], data, training, {}).run(start, everyone(5), doubling([up, down])[1], {})
    assert last["w"][0, :, 0].tolist() == [2, 4, 8, 16, 32]


def test_shares_in_the_mean_by_hand() -> None:
    _, steps = doubling([[1, 4, 5]])
    assert steps.shares()[:, 0].T.tolist()[1] == [1, 1, 1, 1 / 2, 1 / 3]  # four steps; the last entry is beyond its end
    assert steps.shares()[:, 0].T.tolist()[2] == [1, 1, 1, 1 / 2, 1 / 3]
    assert steps.shares()[0, 0].tolist() == [1, 1, 1]


def test_a_run_after_one_that_diverged() -> None:
    """A mean that became nan does not stay so."""
    data, steps = doubling([[3, 2]])
    stepper = Stepper(
        lambda params, batch, context: -params["w"].square().sum() / 2,
        ["w"],
        data,
        TrainingSettings(optimizer="sgd", lr=1.0),
        {},
        average=True,
    )
    for first, finite in ((torch.inf, False), (1.0, True)):
        got = stepper.run({"w": torch.full((1, 2, 1), first)}, torch.tensor([[0, 1]]), steps, {})
        assert torch.isfinite(got["w"]).all() == finite
    assert got["w"].flatten().tolist() == [6, 4]


@needs_cuda
@pytest.mark.parametrize("average", [False, True], ids=["last", "mean"])
@pytest.mark.parametrize("batch_norm", [False, True], ids=["plain", "batchnorm"])
def test_recorded_steps_are_the_same_steps(batch_norm: bool, average: bool, make_model: Callable[..., Model]) -> None:
    model, training, device = in_double(make_model(batch_norm=batch_norm)), TRAININGS["adam"], torch.device("cuda")

    def there(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.to(device) for name, tensor in tensors.items()}

    data = Batch(*(part.to(device) for part in pad(datasets())))
    recorded, plain = (Stepper(cross_entropy(model), model.trainable, data, training, DIMS, average) for _ in range(2))
    plain._plain = True
    for round in (1, 2, 3):
        steps = steps_of(batches_of(SIZES, training, round), training)
        inputs = there(stacked(starts(model))), everyone().to(device), steps, there(context_of(scale=round))
        assert_same_model(recorded.run(*inputs), plain.run(*inputs), rtol=1e-7, atol=1e-10)
    assert recorded._graph is not None
    assert plain._graph is None


# CUDA graphs.


def nested(inputs: dict[str, Tensor], factor: Tensor, mode: str) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Nested in, nested out, with something that is no tensor on the way."""
    sign = -1 if mode == "minus" else 1
    return {name: sign * tensor * factor for name, tensor in inputs.items()}, [factor + 1]


def test_on_a_cpu_it_is_the_function() -> None:
    calls: list[int] = []

    def count(x: Tensor) -> Tensor:
        calls.append(1)
        return x + len(calls)

    recorded = GraphedFunction(count, torch.device("cpu"))
    assert [recorded(torch.zeros(())).item() for _ in range(3)] == [1, 2, 3]


@needs_cuda
@pytest.mark.parametrize("mode", ["plus", "minus"])
def test_a_replay_computes_from_its_own_inputs(mode: str) -> None:
    recorded = GraphedFunction(nested, CUDA)
    results = []
    for number in (1.0, 2.0, 3.0):
        inputs = {"a": torch.full((4,), number, device=CUDA), "b": torch.arange(6.0, device=CUDA) * number}
        factor = torch.tensor(10 * number, device=CUDA)
        results.append((recorded(inputs, factor, mode), nested(inputs, factor, mode)))
    for got, want in results:  # compared at the end: a later replay does not write into an earlier result
        assert all(torch.equal(got[0][name], want[0][name]) for name in want[0])
        assert torch.equal(got[1][0], want[1][0])
    assert recorded._graph is not None


@needs_cuda
def test_it_runs_as_a_recording_not_as_python() -> None:
    calls: list[int] = []

    def work(x: Tensor) -> Tensor:
        calls.append(1)
        return x * 2

    recorded = GraphedFunction(work, CUDA)
    for number in range(5):
        assert recorded(torch.full((3,), float(number), device=CUDA)).tolist() == [2.0 * number] * 3
    assert len(calls) == 2  # once to set things up, once to record


@needs_cuda
def test_work_that_waits_for_the_gpu_runs_unrecorded_with_a_warning() -> None:
    def impatient(x: Tensor) -> Tensor:
        return x * 2 if x.sum().item() > 0 else x * 3

    recorded = GraphedFunction(impatient, CUDA)
    with pytest.warns(UserWarning, match="a step cannot be captured as a CUDA graph"):
        assert recorded(torch.ones(2, device=CUDA)).tolist() == [2, 2]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        assert recorded(-torch.ones(2, device=CUDA)).tolist() == [-3, -3]


@needs_cuda
def test_nothing_to_record_is_no_warning() -> None:
    recorded = GraphedFunction(lambda x: x, CUDA)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert recorded(torch.ones(2, device=CUDA)).tolist() == [1, 1]
        assert recorded(torch.zeros(2, device=CUDA)).tolist() == [0, 0]


@needs_cuda
def test_running_out_of_memory_is_passed_on() -> None:
    def greedy() -> Tensor:
        return torch.empty(2**60, device=CUDA)

    with pytest.raises(torch.OutOfMemoryError):
        capture(greedy)
