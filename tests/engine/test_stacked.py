"""All clients at once: as one after the other, for every method, in any number of parts, whatever reads the round."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedc2i.core.errors import UserError
from fedc2i.core.params import Params
from fedc2i.core.settings import EngineSettings, TrainingSettings
from fedc2i.data.federation import Federation, InputSpec
from fedc2i.engine.executors.base import ClientBatch
from fedc2i.engine.executors.stacked import graph_cache
from fedc2i.engine.executors.stacked.executor import StackedExecutor
from fedc2i.engine.executors.stacked.graph_cache import GraphCache
from fedc2i.engine.executors.stacked.stepper import GraphedFunction, Stepper
from fedc2i.engine.records import Outcome
from fedc2i.engine.simulator import simulate
from fedc2i.methods.base import Method, Phase, Site
from fedc2i.methods.fedavg import FedAvg
from fedc2i.methods.fedc2i import FedC2I
from fedc2i.methods.messages import Download, Uploads
from fedc2i.models.model import Model, split
from fedc2i.models.networks import build, max_pool
from fedc2i.training.local import Batch
from support.method_checks import OF_THEIR_OWN, each_kind, in_double
from support.simulation import Run, assert_close_run, simulated

KINDS = [(own, own.values[0]) for own in each_kind(sorted(Method.registry))]  # the others: `test_shared_options`
SERVED = ("fedavg", "fedc2i", "fedc2i-server")  # also with half of the clients: a mean, relayed models, own downloads
SIZES = (12, 20, 7, 9)
TRAINING = TrainingSettings(batch_size=5, lr=0.01)
SMOOTH = TrainingSettings(batch_size=5, optimizer="sgd", lr=0.05, momentum=0.5)


class Convolutional(nn.Module):
    """Two convolutions, one with padding and stride, a norm, max-pooling; 16 features."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.conv2 = nn.Conv2d(4, 4, 3)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(max_pool(self.norm(self.conv1(x))))
        return self.head(torch.tanh(self.conv2(x)).flatten(1))  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def convolutional() -> Model:
    return split(lambda: Convolutional().double(), head="head", name="convolutional")


@pytest.fixture(scope="module")
def normed(make_model: Callable[..., Model]) -> Model:
    return in_double(make_model(layer_norm=True))


def run(method: Method, model: Model, federation: Federation, executor: str = "stacked", **settings: Any) -> Run:
    return simulated(method, model, federation, **{"executor": executor, "rounds": 3, **settings})


# Every method.


@pytest.mark.parametrize(
    ("name", "participation"),
    [
        *(pytest.param(name, "100%", marks=own.marks) for own, name in KINDS),
        *(
            pytest.param(name, "50%", marks=() if name in SERVED else pytest.mark.slow)
            for _, name in KINDS
            if name != "pooled"
        ),
    ],
)
def test_as_one_after_the_other(
    name: str, participation: str, convolutional: Model, make_federation: Callable[..., Federation]
) -> None:
    """A convolutional model, clients of unequal sizes, one without a class, validation data, Adam."""
    federation, method = make_federation(sizes=SIZES, validation=3), Method.registry[name]()
    both = partial(run, method, convolutional, federation, rounds=2, clients_per_round=participation)
    stacked = both("stacked")
    assert_close_run(stacked, both("looped"), rtol=1e-5)
    assert "validation_accuracy" in stacked[1][-1].metrics["trained"][0]


@pytest.mark.parametrize("method", [FedAvg(), FedC2I()], ids=["fedavg", "fedc2i"])
@pytest.mark.parametrize("name", ["lenet5", "lenet5-bn"])
def test_lenet_in_single_precision(name: str, method: Method, make_federation: Callable[..., Federation]) -> None:
    model = build(name, 4, InputSpec((3, 16, 16)))
    both = partial(run, method, model, make_federation(sizes=(12, 20, 7)), rounds=2, **vars(SMOOTH))
    looped, stacked = both("looped")[0][0], both("stacked")[0][0]
    for mine, theirs in ((stacked.trained, looped.trained), (stacked.received, looped.received)):
        for key, tensor in theirs.items():
            distance = torch.dist(mine[key].double(), tensor.double())
            assert distance <= 1e-4 * tensor.double().norm() + 1e-6, f"{key}: {distance}"


@pytest.mark.parametrize("name", each_kind(OF_THEIR_OWN))
def test_in_parts_as_all_at_once(name: str, normed: Model, make_federation: Callable[..., Federation]) -> None:
    """Two seeds of four clients: three and one, and single clients; pairs are below."""
    federation = make_federation(sizes=SIZES, validation=2)
    both = partial(run, Method.registry[name](), normed, federation, seeds=(0, 5), rounds=2)
    together = both(clients_at_once=0)
    for at_once in (1, 3) if name == "fedc2i" else (3,):
        assert_close_run(both(clients_at_once=at_once), together, rtol=1e-6)


def test_in_parts_with_partial_participation(convolutional: Model, make_federation: Callable[..., Federation]) -> None:
    federation = make_federation(sizes=(12, 20, 7, 9, 15))
    both = partial(run, FedC2I(), convolutional, federation, seeds=(0, 5), clients_per_round=2)
    assert_close_run(both(clients_at_once=3), both(clients_at_once=0), rtol=1e-8)


# Memory.


class Memory:
    """Makes the executor run out of memory whenever more than ``room`` clients are computed together."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
        self.room, self.sizes, self.failures = room, [], 0
        real = StackedExecutor._site_tensors

        def context(executor: StackedExecutor, part: list[ClientBatch]) -> Any:
            clients = sum(len(turn.clients) for turn in part)
            if clients > self.room:
                self.failures += 1
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 TiB.\nMany\nmore lines")
            self.sizes.append(clients)
            return real(executor, part)

        self.sizes: list[int]
        monkeypatch.setattr(StackedExecutor, "_site_tensors", context)


@pytest.mark.parametrize(("room", "failures"), [(7, 1), (1, 3)])
def test_out_of_memory_halves_the_clients_computed_together(
    room: int,
    failures: int,
    normed: Model,
    make_federation: Callable[..., Federation],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    federation = make_federation(sizes=SIZES, validation=2)
    both = partial(run, FedC2I(), normed, federation, seeds=(0, 5), rounds=2)
    want = both()
    memory = Memory(monkeypatch, room)
    assert_close_run(both(), want, rtol=1e-8)
    assert memory.failures == failures  # in the first round; later ones start with what was found to fit
    assert max(memory.sizes) == 8 // 2**failures


def test_out_of_memory_from_a_number_that_was_asked_for(
    normed: Model, make_federation: Callable[..., Federation], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory(monkeypatch, 2)
    run(FedAvg(), normed, make_federation(sizes=SIZES), seeds=(0, 5), rounds=1, clients_at_once=6)
    assert memory.failures == 2  # at one whole seed of four, then at three clients of it
    assert max(memory.sizes) == 1


@pytest.mark.parametrize("when", [3, 14])
def test_out_of_memory_in_the_middle_of_a_step(
    when: int, normed: Model, make_federation: Callable[..., Federation], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was done of the step is done again, from the same starts: of training, and of receiving in a later round."""
    both = partial(run, FedC2I(), normed, make_federation(sizes=SIZES), seeds=(0, 5), rounds=2, clients_at_once=2)
    want, real, parts = both(), StackedExecutor._site_tensors, Counter[int]()

    def context(executor: StackedExecutor, part: list[ClientBatch]) -> Any:
        parts[len(part[0].clients)] += 1
        if parts.total() == when:
            raise torch.OutOfMemoryError
        return real(executor, part)

    monkeypatch.setattr(StackedExecutor, "_site_tensors", context)
    assert_close_run(both(), want, rtol=1e-8)
    assert parts[1] > 0
    assert parts[2] == when  # single clients from then on


def test_a_client_that_does_not_fit_alone_is_one_line(
    normed: Model, federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    Memory(monkeypatch, 0)
    with pytest.raises(UserError) as caught:
        run(FedAvg(), normed, federation)
    assert str(caught.value).startswith("a single client does not fit into the device's memory; use workers=1")
    assert caught.value.__suppress_context__


def test_any_other_error_is_passed_on(normed: Model, federation: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(executor: StackedExecutor, part: list[ClientBatch]) -> Any:
        raise RuntimeError("something else")

    monkeypatch.setattr(StackedExecutor, "_site_tensors", broken)
    with pytest.raises(RuntimeError, match="something else"):
        run(FedAvg(), normed, federation)


# What depends on the round.


@dataclass(frozen=True)
class RoundLoss(FedAvg):
    def loss(self, params: Params, batch: Batch, site: Site) -> Tensor:
        return super().loss(params, batch, site) * site.round


@dataclass(frozen=True)
class RoundLossOnceReceived(FedAvg):
    """Asks for the round only from the second one on, and only in its second phase."""

    def phases(self, epochs: int) -> tuple[Phase, ...]:
        return Phase(1, "head"), Phase(epochs - 1)

    def loss(self, params: Params, batch: Batch, site: Site) -> Tensor:
        return super().loss(params, batch, site) * (site.round if site.received and site.training else 1)


@dataclass(frozen=True)
class RoundUpload(FedAvg):
    def upload(self, params: Params, data: Batch, site: Site) -> Params:
        return {name: tensor / site.round for name, tensor in super().upload(params, data, site).items()}


@dataclass(frozen=True)
class RoundPersonalise(FedAvg):
    def personalise(self, own: Params, batch: Batch | None, site: Site) -> tuple[Params, Mapping[str, Tensor]]:
        start, _ = super().personalise(own, batch, site)
        mixed = {name: tensor + (own[name] - tensor) / site.round for name, tensor in start.items()}
        return mixed, {"round": site.counts.sum() * site.round}


@dataclass(frozen=True)
class RoundPredict(FedAvg):
    def predict(self, params: Params, x: Tensor, site: Site) -> Tensor:
        return super().predict(params, x, site) * site.round


@dataclass(frozen=True)
class RoundOtherPredictions(FedAvg):
    def other_predictions(self, params: Params, x: Tensor, site: Site) -> Mapping[str, Tensor]:
        return {"louder": self.predict(params, x, site) * site.round}


ROUND_READERS = {
    RoundLoss: "train",
    RoundLossOnceReceived: "train",
    RoundUpload: "upload",
    RoundPersonalise: "personalise",
    RoundPredict: "evaluate",
    RoundOtherPredictions: "evaluate",
}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts what the executor makes, by the kind of work."""
    counter, real = Counter[str](), GraphCache.cached

    def made_once(graphs: GraphCache, turn: ClientBatch, kind: Any, context: Any, make: Callable[[], Any]) -> Any:
        def counted() -> Any:
            counter[str(kind[0])] += 1
            return make()

        return real(graphs, turn, kind, context, counted)

    monkeypatch.setattr(GraphCache, "cached", made_once)
    return counter


@pytest.mark.parametrize("method", ROUND_READERS, ids=lambda own: own.__name__)
def test_a_method_that_reads_the_round(
    method: type[Method], normed: Model, make_federation: Callable[..., Federation]
) -> None:
    both = partial(run, method(), normed, make_federation(sizes=SIZES), seeds=(0, 5), rounds=3, **vars(SMOOTH))
    looped, plain = both("looped"), run(FedAvg(), normed, make_federation(sizes=SIZES), rounds=3, **vars(SMOOTH))
    assert_close_run(both(clients_at_once=0 if method is RoundLoss else 2), looped, rtol=1e-8)
    with pytest.raises(AssertionError):  # the round does matter
        assert_close_run(({0: looped[0][0]}, [own for own in looped[1] if own.seed == 0]), plain, rtol=1e-8)


def test_functions_are_cached_for_the_first_round_and_once_for_the_others(
    normed: Model, federation: Federation, made: Counter[str]
) -> None:
    """Before the first exchange nothing was received, which makes another function of everything but personalise."""
    run(FedAvg(), normed, federation, rounds=5)
    assert made == {"train": 2, "upload": 2, "personalise": 1, "evaluate": 2}


@pytest.mark.parametrize("method", ROUND_READERS, ids=lambda own: own.__name__)
def test_what_reads_the_round_is_made_every_round_and_nothing_else(
    method: type[Method], normed: Model, federation: Federation, made: Counter[str]
) -> None:
    run(method(), normed, federation, rounds=5)
    want = {"train": 2, "upload": 2, "personalise": 1, "evaluate": 2}
    if method is RoundLossOnceReceived:
        want = {**want, "train": 2 + 5}  # two phases, one of which reads
    elif method in (RoundPredict, RoundOtherPredictions):
        want = {**want, "evaluate": 6}  # in round 1 before and after the exchange
    else:
        want = {**want, ROUND_READERS[method]: 5}
    assert made == want


@pytest.mark.parametrize(("rounds", "every", "want"), [(5, 1, 3), (5, 0, 2), (3, 1, 2), (3, 0, 1), (2, 1, 0)])
def test_only_what_several_rounds_use_becomes_a_graph(
    rounds: int, every: int, want: int, normed: Model, federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Upload (whose first round differs), personalise and evaluation, which two seeds use four times in a round."""
    made = []

    class Noted(GraphedFunction):
        def __init__(self, function: Callable[..., Any], device: torch.device) -> None:
            made.append(function)
            super().__init__(function, device)

    monkeypatch.setattr(graph_cache, "GraphedFunction", Noted)
    run(FedAvg(), normed, federation, seeds=(0, 5), rounds=rounds, evaluate_every=every)
    assert len(made) == want


def test_what_shapes_of_earlier_rounds_needed_is_given_up(
    normed: Model, make_federation: Callable[..., Federation], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that knows more clients every round relays larger stacks; old recordings would fill the memory."""
    kept, real = [], GraphCache.cached

    def made_once(graphs: GraphCache, turn: ClientBatch, *args: Any) -> Any:
        before = set(graphs._cache)
        made = real(graphs, turn, *args)
        if graphs._cache.keys() - before:
            kept.append({own.used for own in graphs._cache.values()} - {turn.round, turn.round - 1})
        return made

    monkeypatch.setattr(GraphCache, "cached", made_once)
    run(FedC2I(), normed, make_federation(sizes=(9,) * 8), rounds=6, clients_per_round=1)
    assert len(kept) > 6
    assert not any(kept)


def test_nothing_outlives_a_run_until_garbage_is_collected(normed: Model, federation: Federation) -> None:
    """A recorded step keeps GPU memory; in a circle of references it would keep it until Python looks for such."""
    made = weakref.WeakSet[Any]()
    gc.disable()
    try:
        with pytest.MonkeyPatch.context() as patch:
            for kind in (Stepper, GraphedFunction, StackedExecutor):
                patch.setattr(kind, "__init__", _noted(kind.__init__, made))
            run(FedC2I(), normed, federation, rounds=3)
        assert not list(made)
    finally:
        gc.enable()


def _noted(init: Callable[..., None], made: weakref.WeakSet[Any]) -> Callable[..., None]:
    def noted(own: Any, *args: Any, **more: Any) -> None:
        made.add(own)
        init(own, *args, **more)

    return noted


# Odd downloads and phases.


@dataclass(frozen=True)
class Personal(FedAvg):
    """Sends everyone its own row: the mean, shifted by its place; what it got counts in training and evaluation."""

    def combine(self, uploads: Uploads, state: Params) -> tuple[Download, Params]:
        mean, state = super().combine(uploads, state)
        shifts = torch.arange(1.0, 1 + len(uploads.clients))
        shifted = {
            name: tensor + 0.01 * shifts.to(tensor).reshape(-1, *[1] * tensor.ndim)
            for name, tensor in mean.shared.items()
        }
        return Download({"common": torch.ones(2)}, {**shifted, "shift": shifts}, uploads.clients), state

    def loss(self, params: Params, batch: Batch, site: Site) -> Tensor:
        return super().loss(params, batch, site) * (1 + site.received.get("shift", site.counts.sum() * 0))

    def predict(self, params: Params, x: Tensor, site: Site) -> Tensor:
        return super().predict(params, x, site) * (2 + site.position)


@pytest.mark.parametrize(("participation", "at_once"), [("100%", 0), ("50%", 1), ("50%", 3)])
def test_what_is_personal_reaches_its_client(
    participation: str, at_once: int, normed: Model, make_federation: Callable[..., Federation]
) -> None:
    """Also those whom the server does not know yet, who get the mean of all rows."""
    settings = {"clients_per_round": participation, "seeds": (0, 5), **vars(SMOOTH)}
    both = partial(run, Personal(), normed, make_federation(sizes=SIZES), **settings)
    assert_close_run(both(clients_at_once=at_once), both("looped"), rtol=1e-6)


@dataclass(frozen=True)
class Still(FedAvg):
    def phases(self, epochs: int) -> tuple[Phase, ...]:
        return (Phase(0, "head"), Phase(0))


def test_nothing_to_train(normed: Model, federation: Federation) -> None:
    (outcome,) = run(Still(), normed, federation, rounds=2)[0].values()
    start = normed.init(0, "init")
    for name, tensor in outcome.trained.items():  # each takes the mean of equal models
        torch.testing.assert_close(tensor, start[name].expand_as(tensor), rtol=1e-6, atol=1e-12)


# On a GPU.


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", sorted(Method.registry))
def test_on_a_gpu_as_on_a_cpu(name: str, convolutional: Model, make_federation: Callable[..., Federation]) -> None:
    """GraphedFunction and replayed, against one client after the other without any recording."""
    federation, method, reports = make_federation(sizes=SIZES, validation=3), Method.registry[name](), []
    settings = EngineSettings(rounds=4, executor="stacked", **vars(TRAINING))
    outcomes = simulate(method, convolutional, federation, settings, (0, 5), "cuda", on_round=reports.append)
    there = {
        seed: Outcome(*({n: t.cpu() for n, t in own.items()} for own in (one.trained, one.received)), one.last)
        for seed, one in outcomes.items()
    }
    want = run(method, convolutional, federation, "looped", seeds=(0, 5), rounds=4)
    assert_close_run((there, reports), want, rtol=1e-4)


@pytest.mark.parametrize("name", ["fedavg", "fedc2i", "fedproto", "fedic"])
def test_graphs_of_functions_have_the_bits_of_the_functions(
    name: str, convolutional: Model, make_federation: Callable[..., Federation], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that resumes has no graphs in its first round; on a CPU a graph just calls its function."""
    federation, method = make_federation(sizes=SIZES, validation=3), Method.registry[name]()
    settings = EngineSettings(rounds=4, executor="stacked", **vars(TRAINING))
    device, calls = "cuda" if torch.cuda.is_available() else "cpu", list[Any]()

    class Noted(GraphedFunction):
        def __call__(self, *inputs: Any) -> Any:
            calls.append(self)
            return super().__call__(*inputs)

    def outcome() -> tuple[Outcome, list[Any]]:
        reports: list[Any] = []
        found = simulate(method, convolutional, federation, settings, (0,), device, on_round=reports.append)
        return found[0], [report.metrics for report in reports]

    monkeypatch.setattr(graph_cache, "GraphedFunction", Noted)
    graphed, scores = outcome()
    assert calls
    calls.clear()
    monkeypatch.setattr(GraphCache, "graphed", lambda self, first, kind, tensors, function: function)
    plain, same = outcome()
    assert not calls
    assert scores == same
    for point in ("trained", "received"):
        for own, tensor in getattr(plain, point).items():
            assert torch.equal(getattr(graphed, point)[own], tensor), (point, own)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_loss_that_waits_for_the_gpu_is_trained_unrecorded(normed: Model, federation: Federation) -> None:
    @dataclass(frozen=True)
    class Impatient(FedAvg):
        def loss(self, params: Params, batch: Batch, site: Site) -> Tensor:
            torch.cuda.synchronize()
            return super().loss(params, batch, site)

    settings = EngineSettings(rounds=2, executor="stacked", **vars(TRAINING))
    with pytest.warns(UserWarning, match="cannot be captured as a CUDA graph"):
        got = simulate(Impatient(), normed, federation, settings, [0], "cuda")[0]
    want = simulate(FedAvg(), normed, federation, settings, [0], "cuda")[0]
    assert torch.allclose(got.trained["head.weight"], want.trained["head.weight"], rtol=1e-6)
