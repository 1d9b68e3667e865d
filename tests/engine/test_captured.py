"""Clients one after the other over captured steps, and the precision of local training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from fedc2i import Federation, Method, Model, UserError, split
from fedc2i.core.params import Params, row
from fedc2i.core.seeding import repeatable
from fedc2i.core.settings import EngineSettings, TrainingSettings
from fedc2i.engine.client import ClientData, RunContext
from fedc2i.engine.executors import captured, choice
from fedc2i.engine.executors.base import ClientBatch, LoopedExecutor
from fedc2i.engine.executors.captured_steps import CapturedSteps
from fedc2i.engine.simulator import simulate
from fedc2i.methods.base import Download, Phase, Site
from fedc2i.methods.fedavg import FedAvg
from fedc2i.models.networks import build
from fedc2i.training import local
from fedc2i.training.local import Batch, train
from support.cut_runs import assert_same_end


class Net(nn.Module):
    """Convolutions that are faster with the channels last, BatchNorm, and a ``view`` as many modules have it."""

    def __init__(self, wide: int = 16, classes: int = 4) -> None:
        super().__init__()
        # Before BatchNorm, the gradient of a bias would be rounding noise, which Adam amplifies.
        self.conv1, self.norm1 = nn.Conv2d(3, wide, 3, 2, bias=False), nn.BatchNorm2d(wide)
        self.conv2, self.norm2 = nn.Conv2d(wide, wide, 3, 2, bias=False), nn.BatchNorm2d(wide)
        self.fc = nn.Linear(wide * 9, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))
        return self.fc(x.view(x.size(0), -1))  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def net() -> Model:
    return split(Net, head="fc", name="net")


@pytest.mark.parametrize(
    ("name", "options"),
    [("fedavg", {"average": True}), ("fedrep", {}), ("fedc2i", {}), ("ditto", {})],
    ids=str,
)
def test_the_bits_of_the_plain_loop(
    monkeypatch: pytest.MonkeyPatch,
    net: Model,
    make_federation: Callable[..., Federation],
    name: str,
    options: dict[str, Any],
) -> None:
    """Two seeds, batches of several sizes; without a GPU the steps run uncaptured, from the same places in memory."""
    federation, method = make_federation((11, 9, 6)), Method.registry[name](**options)
    how = EngineSettings(rounds=2, epochs=2, batch_size=4, lr=0.01, executor="looped", drop_last=True)
    plain = simulate(method, net, federation, how, (0, 3))
    monkeypatch.setattr(choice, "LoopedExecutor", captured.CapturedExecutor)
    assert_same_end(simulate(method, net, federation, how, (0, 3)), plain)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["ieee", "tf32", "bf16"])
@pytest.mark.parametrize("name", ["fedavg", "fedrep", "fedc2i"])
def test_a_gpu_trains_as_without_graphs(
    net: Model, make_federation: Callable[..., Federation], name: str, precision: Any
) -> None:
    federation, cuda = make_federation((11, 9, 6)), torch.device("cuda")
    # By SGD: of a gradient that is all rounding, Adam makes whole steps.
    how = EngineSettings(rounds=1, batch_size=4, optimizer="sgd", lr=0.05, precision=precision, drop_last=True)
    data = [ClientData.place(client, len(federation.classes), cuda) for client in federation.clients]
    context = RunContext(Method.registry[name](), net, how, 1, 0)
    models = {own: tensor.to(cuda) for own, tensor in context.first_models(federation.names, "common").items()}
    batch = ClientBatch(context, (0, 1, 2), models, Download(), 1)
    with repeatable(how):
        (got,), (want,) = (kind(data).train([batch], False) for kind in (captured.CapturedExecutor, LoopedExecutor))
    for k in range(3):
        for own, tensor in row(want.params, k).items():
            assert torch.allclose(
                row(got.params, k)[own], tensor, rtol=0.05, atol=0.03 if precision == "bf16" else 3e-3
            )


class GroupNormNet(Net):
    """With group normalisation in place of BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(2, 16), nn.GroupNorm(4, 16)


class DropoutNet(Net):
    """Draws random numbers in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.norm2 = nn.Sequential(self.norm2, nn.Dropout(0.3))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["ieee", "tf32", "bf16"])
@pytest.mark.parametrize("kind", [Net, GroupNormNet, DropoutNet])
def test_clients_side_by_side_on_a_gpu_have_the_bits_of_clients_in_turn(
    monkeypatch: pytest.MonkeyPatch, make_federation: Callable[..., Federation], kind: type[Net], precision: Any
) -> None:
    """Twice the same, too; one client flips its labels, which are made for it alone."""
    federation, model = make_federation((11, 9, 14, 6)), split(kind, head="fc")
    how = EngineSettings(rounds=3, batch_size=4, lr=0.01, precision=precision, drop_last=True, attack="label-flip@b")
    found = []
    for tracks in (1, 2, 2):
        monkeypatch.setattr(captured, "TRACKS", tracks)
        found.append(simulate(FedAvg(), model, federation, replace(how, executor="looped"), (0, 3), "cuda"))
    assert_same_end(found[1], found[0])
    assert_same_end(found[2], found[0])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_s_group_norm_and_products_are_those_of_a_cpu(make_federation: Callable[..., Federation]) -> None:
    federation, model = make_federation((11, 9, 6)), split(GroupNormNet, head="fc")
    how = EngineSettings(rounds=2, batch_size=4, optimizer="sgd", lr=0.05, drop_last=True, executor="looped")
    got, want = (simulate(FedAvg(), model, federation, how, [0], kind)[0].trained for kind in ("cuda", "cpu"))
    for name, tensor in want.items():
        assert torch.allclose(got[name].cpu(), tensor, rtol=0.01, atol=1e-4), name


@dataclass(frozen=True)
class RoundLoss(FedAvg):
    """Reads the round in its second phase."""

    def phases(self, epochs: int) -> tuple[Phase, ...]:
        return Phase(1, "head"), Phase(epochs - 1)

    def loss(self, params: Params, batch: Batch, site: Site) -> Tensor:
        return super().loss(params, batch, site) * (site.round if site.training else 1)


def test_a_loss_that_reads_the_round_has_that_of_its_round(
    monkeypatch: pytest.MonkeyPatch, net: Model, make_federation: Callable[..., Federation]
) -> None:
    how = EngineSettings(rounds=3, epochs=2, batch_size=4, optimizer="sgd", lr=0.05, executor="looped")
    plain = simulate(RoundLoss(), net, make_federation((8, 6)), how, (0, 3))
    monkeypatch.setattr(choice, "LoopedExecutor", captured.CapturedExecutor)
    assert_same_end(simulate(RoundLoss(), net, make_federation((8, 6)), how, (0, 3)), plain)


def test_a_track_keeps_the_steps_of_each_phase_for_the_last_shapes_alone(
    monkeypatch: pytest.MonkeyPatch, net: Model, make_federation: Callable[..., Federation]
) -> None:
    """They are made again where something else is received, and every round for the phase that reads the round."""
    federation, made = make_federation((8, 8)), []
    monkeypatch.setattr(captured, "CapturedSteps", lambda *given: made.append(given) or CapturedSteps(*given))
    executor = captured.CapturedExecutor([ClientData.place(own, 4, torch.device("cpu")) for own in federation.clients])
    context = RunContext(RoundLoss(), net, TrainingSettings(batch_size=4), 3, 0)
    models = context.first_models(federation.names, "common")
    downloads, counts = (Download(), Download(shared=row(models, 0)), Download(shared=row(models, 1))), []
    for round, download in enumerate(downloads, 1):
        executor.train([ClientBatch(context, (0, 1), models, download, round)], False)
        assert sorted(key[0] for key in executor._tracks[0].steps) == [0, 1]  # phases
        counts.append(len(made))
    assert counts == [3, 5, 6]  # in round 1 the first client's loss tells that it reads the round


def test_some_sizes_of_batches_have_a_graph(net: Model, make_federation: Callable[..., Federation]) -> None:
    """Others are trained without."""
    federation = make_federation(tuple(range(4, 14)))
    data = [ClientData.place(client, 4, torch.device("cpu")) for client in federation.clients]
    executor = captured.CapturedExecutor(data)
    context = RunContext(FedAvg(), net, TrainingSettings(batch_size=16), 1, 0)
    models = context.first_models(federation.names, "common")
    batch = ClientBatch(context, tuple(range(10)), models, Download(), 1)
    (got,), (want,) = (own.train([batch], False) for own in (executor, LoopedExecutor(data)))
    assert all(torch.equal(got.params[name], tensor) for name, tensor in want.params.items())
    (steps,) = executor._tracks[0].steps.values()
    assert list(steps._graphs) == list(range(4, 12))


def test_a_second_track_needs_memory(
    monkeypatch: pytest.MonkeyPatch, net: Model, make_federation: Callable[..., Federation]
) -> None:
    data = [ClientData.place(client, 4, torch.device("cpu")) for client in make_federation((4, 4)).clients]
    executor = captured.CapturedExecutor(data)
    executor._tracks = first, second = [captured.Track(torch.device("cpu")) for _ in range(2)]
    assert executor._track(1) is first  # whose graphs are not in memory yet
    first.steps["captured"] = Any
    for free, wanted in ((60, second), (40, first)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, 100))
        assert [executor._track(turn) for turn in range(3)] == [first, wanted, first]
    second.steps["captured"] = Any  # what it has stays in use
    assert executor._track(1) is second


@pytest.mark.parametrize("kind", [Net, DropoutNet])
def test_steps_that_draw_random_numbers_take_turns(
    monkeypatch: pytest.MonkeyPatch, kind: type[Net], make_federation: Callable[..., Federation]
) -> None:
    """The state of the generator is in one place of the GPU, which a graph in another track would change."""
    federation, model = make_federation((8, 8, 8)), split(kind, head="fc")
    data = [ClientData.place(client, 4, torch.device("cpu")) for client in federation.clients]
    executor, plain = captured.CapturedExecutor(data), LoopedExecutor(data)
    executor._tracks = [captured.Track(torch.device("cpu")) for _ in range(2)]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60, 100))
    context = RunContext(FedAvg(), model, TrainingSettings(batch_size=4), 1, 0)
    batch = ClientBatch(context, (0, 1, 2), context.first_models(federation.names, "common"), Download(), 1)
    (got,), (want,) = (own.train([batch], False) for own in (executor, plain))
    assert all(torch.equal(got.params[name], tensor) for name, tensor in want.params.items())
    assert [bool(track.steps) for track in executor._tracks] == [True, kind is Net]
    assert executor._tracks[0].draws is (kind is DropoutNet)


@pytest.mark.parametrize("full", [0, 1], ids=["first", "second"])
def test_a_track_without_memory_leaves_the_clients_to_the_first(
    monkeypatch: pytest.MonkeyPatch, net: Model, make_federation: Callable[..., Federation], full: int
) -> None:
    """Whichever it is: alone, the first has all the memory. There the same clients get the same bits."""
    federation, failed = make_federation((8, 8, 8, 8)), []
    data = [ClientData.place(client, 4, torch.device("cpu")) for client in federation.clients]
    executor, plain = captured.CapturedExecutor(data), LoopedExecutor(data)
    executor._tracks = tracks = [captured.Track(torch.device("cpu")) for _ in range(2)]
    (first, second), run = tracks, CapturedSteps.run

    def limited(self: CapturedSteps, *given: Any) -> Any:
        if self in (second.steps if full else first.steps).values() and second.steps:
            failed.append(self)
            raise torch.OutOfMemoryError
        return run(self, *given)

    monkeypatch.setattr(CapturedSteps, "run", limited)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60, 100))
    context = RunContext(FedAvg(), net, TrainingSettings(batch_size=4), 1, 0)
    batch = ClientBatch(context, (0, 1, 2, 3), context.first_models(federation.names, "common"), Download(), 1)
    (got,), (want,) = (own.train([batch], True) for own in (executor, plain))
    assert all(torch.equal(got.params[name], tensor) for name, tensor in want.params.items())
    assert len(failed) == len(tracks) == 1
    assert failed[0] not in first.steps.values()  # it may lack a part of its memory


def test_a_client_that_does_not_fit_is_one_line(
    monkeypatch: pytest.MonkeyPatch, net: Model, make_federation: Callable[..., Federation]
) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(CapturedSteps, "run", full)
    monkeypatch.setattr(choice, "LoopedExecutor", captured.CapturedExecutor)
    with pytest.raises(UserError, match="a single client does not fit into the device's memory; use device=cpu"):
        trained(net, make_federation((4, 4)))


def test_large_models_are_not_stacked(
    monkeypatch: pytest.MonkeyPatch, make_federation: Callable[..., Federation]
) -> None:
    """By what a step keeps for the backward pass: 32 images of the wide LeNet less than 16 MB, of 16x16 pixels."""
    federation = make_federation((64, 64))
    data = [ClientData.place(client, 4, torch.device("cpu")) for client in federation.clients]

    def stacks(model: Model, size: int) -> bool:
        return choice._should_stack(RunContext(FedAvg(), model, TrainingSettings(batch_size=size), 1, 0), data)

    lenet = build("lenet-wide", 4, federation.input)
    assert stacks(lenet, 32)
    monkeypatch.setattr(choice, "_LARGE", 2**24)
    assert stacks(lenet, 32)
    monkeypatch.setattr(choice, "_LARGE", 2**20)
    assert not stacks(lenet, 32)


# Precision.


def trained(model: Model, federation: Federation, **settings: Any) -> Tensor:
    how = EngineSettings(rounds=2, epochs=1, batch_size=4, lr=0.01, **{"executor": "looped", **settings})
    return simulate(FedAvg(), model, federation, how, [0])[0].trained["fc.weight"]


@pytest.mark.parametrize("executor", ["looped", "stacked"])
def test_bf16_trains_in_bfloat16_and_keeps_single_precision(
    net: Model, make_federation: Callable[..., Federation], executor: str
) -> None:
    federation = make_federation((12, 8))
    exact, rough = (trained(net, federation, precision=kind, executor=executor) for kind in ("ieee", "bf16"))
    start = net.init(0, "init")["fc.weight"]
    assert rough.dtype == torch.float32
    assert not torch.equal(exact, rough)
    assert torch.dist(exact, rough) < 0.3 * torch.dist(exact, start.expand_as(exact))
    assert torch.equal(rough, trained(net, federation, precision="bf16", executor=executor))
    if executor == "looped":
        assert torch.equal(exact, trained(net, federation, precision="tf32"))  # a CPU has no other single precision


def flags() -> tuple[str | bool, ...]:
    cudnn, matmul, on_cpu = torch.backends.cudnn, torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    new = [part.fp32_precision for part in (cudnn.conv, cudnn.rnn, matmul, on_cpu)]  # type: ignore[attr-defined]
    old = cudnn.allow_tf32, matmul.allow_tf32, torch.get_float32_matmul_precision()
    return (*new, *old, cudnn.deterministic, cudnn.benchmark)


@pytest.mark.parametrize("own", [None, "medium", "high", "highest"])
def test_the_precision_of_products_is_set_and_restored(own: str | None) -> None:
    """Whatever the user has asked torch for."""
    untouched = [part.fp32_precision for part in (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)]  # type: ignore[attr-defined]
    if own:
        torch.set_float32_matmul_precision(own)
    before = flags()
    exact, rough = ("ieee",) * 4 + (False, False, "highest"), ("tf32",) * 3 + ("ieee", True, True, "high")
    for kind, expected in (("ieee", exact), ("tf32", rough), ("bf16", rough)):
        with repeatable(EngineSettings(precision=kind)):  # type: ignore[arg-type]
            assert flags() == (*expected, True, False)
        assert flags() == before
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision = untouched  # type: ignore[attr-defined]


def test_a_precision_that_does_not_exist() -> None:
    with pytest.raises(UserError, match=r"precision must be ieee \| tf32 \| bf16, got 'fp8'"):
        EngineSettings(precision="fp8")  # type: ignore[arg-type]


def test_flags_of_overlapping_runs_end_with_the_last() -> None:
    """As of sites in threads of one process, where the first to start is the first to end."""
    before = flags()
    first, second = repeatable(EngineSettings(precision="tf32")), repeatable(EngineSettings())
    first.__enter__()
    second.__enter__()
    during = flags()
    first.__exit__(None, None, None)
    assert flags() == during != before
    second.__exit__(None, None, None)
    assert flags() == before


def test_a_model_is_exported_during_and_after_a_run(net: Model, make_federation: Callable[..., Federation]) -> None:
    """Torch refuses while its older and newer flags of precision contradict each other."""
    layer, x = torch.nn.Conv2d(1, 2, 3), torch.zeros(2, 1, 5, 5)
    with repeatable(EngineSettings()):
        torch.export.export(layer, (x,))
    before = flags()
    trained(net, make_federation((12, 8)))
    assert flags() == before
    torch.export.export(layer, (x,))


# Memory layout.


def test_channels_last_changes_rounding_alone(monkeypatch: pytest.MonkeyPatch, net: Model) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 255, (12, 3, 16, 16), generator=generator, dtype=torch.uint8)
    data = Batch(x, torch.arange(12) % 4, torch.ones(12))
    params = {name: own.double() if own.is_floating_point() else own for name, own in net.init(0).items()}
    formats = []

    def loss(params: Any, batch: Batch) -> Tensor:
        formats.append(batch.x.is_contiguous(memory_format=torch.channels_last))
        return batch.mean(F.cross_entropy(net.head(params, net.features(params, batch.x, True)), batch.y))

    def result() -> Any:
        batches = list(torch.arange(12).split(5))
        return train(loss, params, net.trainable, data, batches, TrainingSettings(optimizer="sgd", lr=0.1))

    got = result()
    monkeypatch.setattr(local, "has_wide_convolutions", lambda params: False)
    want = result()
    assert formats == [True] * 3 + [False] * 3
    for name, tensor in want.items():
        assert got[name].is_contiguous()
        assert torch.allclose(got[name].double(), tensor.double(), rtol=1e-9, atol=1e-12), name
