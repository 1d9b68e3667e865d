"""Modules as users write them: as plain torch trains them, on both executors, or refused in a line that says why."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from fedc2i.core import memory, seeding
from fedc2i.core.errors import UserError
from fedc2i.core.settings import EngineSettings, TrainingSettings
from fedc2i.data.arrays import from_arrays
from fedc2i.data.federation import Federation, InputSpec
from fedc2i.engine.client import ClientData, RunContext
from fedc2i.engine.executors.base import LoopedExecutor
from fedc2i.engine.executors.choice import new_executor
from fedc2i.engine.executors.stacked.chunks import bytes_of_a_step, clients_that_fit
from fedc2i.engine.executors.stacked.compatibility import obstacle
from fedc2i.engine.executors.stacked.executor import StackedExecutor
from fedc2i.engine.records import Outcome
from fedc2i.engine.simulator import check, simulate
from fedc2i.methods.base import Method
from fedc2i.methods.fedavg import FedAvg
from fedc2i.methods.fedc2i import FedC2I
from fedc2i.methods.pooled import Pooled
from fedc2i.models.model import Model, scale, split
from fedc2i.training.local import draw_epochs
from oracles.training import local_run

CLASSES, PIXELS = 4, 3 * 16 * 16
SIZES = (12, 20, 7, 9)
TRAINING = TrainingSettings(epochs=2, batch_size=5, optimizer="sgd", lr=0.05)


class Net(nn.Module):
    """A convolution, ``between`` the two, and the head ``fc``; what differs is in subclasses."""

    def __init__(self, between: nn.Module | None = None) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1, bias=not isinstance(between, nn.modules.batchnorm._NormBase))
        self.between = between or nn.Identity()
        self.fc = nn.Linear(64, CLASSES)

    def body(self, x: Tensor) -> Tensor:
        return F.adaptive_avg_pool2d(torch.tanh(self.between(self.conv(x))), 4).flatten(1)

    def forward(self, x: Tensor) -> Any:
        return self.fc(self.body(x))


def with_layer(layer: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: Net(layer())


def net_of(forward: Callable[[Net, Tensor], Any], **buffers: Tensor) -> Callable[[], nn.Module]:
    """`Net` with another forward, and buffers."""

    def build() -> nn.Module:
        module: nn.Module = type("Own", (Net,), {"forward": forward})()
        for name, tensor in buffers.items():
            module.register_buffer(name, tensor.clone())
        return module

    return build


def changed(change: Callable[[Net], Any]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        module = Net()
        change(module)
        return module

    return build


class Tokens(nn.Module):
    """16 tokens of an image through a layer; the head reads their mean."""

    def __init__(self, layer: nn.Module, call: Callable[[Any, Tensor], Tensor] = lambda layer, t: layer(t)) -> None:
        super().__init__()
        self.embed, self.layer, self.fc = nn.Linear(48, 8), layer, nn.Linear(8, CLASSES)
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.call(self.layer, self.embed(x.reshape(len(x), 16, 48))).mean(1))  # type: ignore[no-any-return]


class Tied(nn.Module):
    def __init__(self, head: bool) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(PIXELS, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.fc = nn.Linear(4, CLASSES)
        (self.fc if head else self.third).weight = self.second.weight

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.second(torch.tanh(self.first(x.flatten(1)))))
        return self.fc(torch.tanh(self.third(x)))  # type: ignore[no-any-return]


def transformer(dropout: float = 0.0) -> Callable[[], nn.Module]:
    return lambda: Tokens(nn.TransformerEncoderLayer(8, 2, 16, dropout=dropout, batch_first=True))


def attention(need_weights: bool) -> Callable[[], nn.Module]:
    call = lambda layer, t: layer(t, t, t, need_weights=need_weights)[0]  # noqa: E731
    return lambda: Tokens(nn.MultiheadAttention(8, 2, batch_first=True), call)


def attend(causal: bool, dropout: float = 0.0) -> Callable[[], nn.Module]:
    def call(layer: nn.Module, t: Tensor) -> Tensor:
        p = dropout if layer.training else 0.0
        return F.scaled_dot_product_attention(t[:, None], t[:, None], t[:, None], None, p, causal)[:, 0]

    return lambda: Tokens(nn.Identity(), call)


def recurrent(kind: Callable[..., nn.Module]) -> Callable[[], nn.Module]:
    return lambda: Tokens(kind(48 // 6, 8, batch_first=True), lambda layer, t: layer(t)[0])


def assign(own: Any, x: Tensor) -> Tensor:
    h: Tensor = own.body(x)
    if own.training:
        own.mean = 0.9 * own.mean + 0.1 * h.detach().mean(0)
    return own.fc(h - own.mean)  # type: ignore[no-any-return]


def count(own: Any, x: Tensor) -> Tensor:
    if own.training:
        own.steps = own.steps + 1
    return own.fc(own.body(x)[:, own.order])  # type: ignore[no-any-return]


def branch(own: Net, x: Tensor) -> Tensor:
    h = own.body(x)
    return own.fc(2 * h if h.mean() > 0 else h)  # type: ignore[no-any-return]


def mask(own: Net, x: Tensor) -> Tensor:
    h = own.body(x).clone()
    h[h < 0] = 0
    return own.fc(h)  # type: ignore[no-any-return]


def centre(own: Net, x: Tensor) -> Tensor:
    h = own.body(x)
    return own.fc(h - h.mean(0) if own.training else h)  # type: ignore[no-any-return]


def drop_centred(own: Net, x: Tensor) -> Tensor:
    h = own.body(x)
    return own.fc(F.dropout(h - h.mean(0) if own.training else h, 0.2, own.training))  # type: ignore[no-any-return]


def drop(own: Net, x: Tensor) -> Tensor:
    return own.fc(F.dropout(own.body(x), training=own.training))  # type: ignore[no-any-return]


def jitter(own: Net, x: Tensor) -> Tensor:
    h = own.body(x)
    return own.fc(h + torch.randn_like(h) if own.training else h)  # type: ignore[no-any-return]


STACKS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": with_layer(lambda: nn.BatchNorm2d(4)),
    "synchronised batch norm": with_layer(lambda: nn.SyncBatchNorm(4)),
    "instance norm": with_layer(lambda: nn.InstanceNorm2d(4, affine=True)),
    "group norm": with_layer(lambda: nn.GroupNorm(2, 4)),
    "layer norm": with_layer(lambda: nn.LayerNorm([4, 16, 16])),
    "relu in place": with_layer(lambda: nn.ReLU(inplace=True)),
    "transposed and grouped": with_layer(
        lambda: nn.Sequential(nn.ConvTranspose2d(4, 4, 3), nn.Conv2d(4, 4, 3, groups=4))
    ),
    "tied in the body": lambda: Tied(head=False),
    "integer buffers, one exchanged": net_of(count, steps=torch.tensor(0), order=torch.arange(64).flip(0)),
    "weight norm": changed(lambda own: parametrizations.weight_norm(own.conv)),
    "orthogonal weights": changed(lambda own: parametrizations.orthogonal(own.conv)),
    "frozen body": changed(lambda own: own.conv.requires_grad_(False)),
    "head without bias": changed(lambda own: setattr(own, "fc", nn.Linear(64, CLASSES, bias=False))),
    "attention": attention(need_weights=True),
    "attention without weights": attention(need_weights=False),
    "causal attention": attend(causal=True),
    "transformer": transformer(),
}
DRAWS: dict[str, Callable[[], nn.Module]] = {
    "functional dropout": net_of(drop),
    "dropout of channels": with_layer(lambda: nn.Dropout2d(0.3)),
    "alpha dropout": with_layer(lambda: nn.AlphaDropout(0.3)),
    "noise": net_of(jitter),
    "transformer with dropout": transformer(dropout=0.1),
    "attention with dropout": attend(causal=False, dropout=0.2),
}
CANNOT, MIXES = "has an operation that cannot run for several clients at once", "mixes the samples of a batch"
LOOPED_ONLY: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "cumulative batch norm": (with_layer(lambda: nn.BatchNorm2d(4, momentum=None)), CANNOT),
    "batch norm without statistics": (with_layer(lambda: nn.BatchNorm2d(4, track_running_stats=False)), "takes batch"),
    "instance norm with statistics": (with_layer(lambda: nn.InstanceNorm2d(4, track_running_stats=True)), MIXES),
    "spectral norm": (changed(lambda own: parametrizations.spectral_norm(own.conv)), CANNOT),
    "lstm": (recurrent(nn.LSTM), CANNOT),
    "gru": (recurrent(nn.GRU), CANNOT),
    "rnn": (recurrent(nn.RNN), CANNOT),
    "branch on a value": (net_of(branch), CANNOT),
    "number out of a tensor": (net_of(lambda own, x: own.fc(own.body(x) / (1 + x.max().item()))), CANNOT),
    "mask as index": (net_of(mask), CANNOT),
    "mean of a batch": (net_of(centre), MIXES),
    "mean of a batch and dropout": (net_of(drop_centred), MIXES),
    "running mean, exchanged": (net_of(assign, mean=torch.zeros(64, dtype=torch.float64)), MIXES),
    "random slopes": (with_layer(nn.RReLU), CANNOT),
}


def double(build: Callable[[], nn.Module]) -> Model:
    return split(lambda: build().double(), head="fc")


def run(model: Model, federation: Federation, executor: str, method: Method | None = None, **more: Any) -> Outcome:
    settings = EngineSettings(rounds=more.pop("rounds", 1), executor=executor, **vars(TRAINING))  # type: ignore[arg-type]
    return simulate(method or FedAvg(), model, federation, settings, more.pop("seeds", [0]), **more)[0]


def distance(one: Outcome, two: Outcome) -> float:
    """The largest of all models' tensors, relative to its norm."""
    pairs = [(own, two.trained[n]) for n, own in one.trained.items()]
    pairs += [(own, two.received[n]) for n, own in one.received.items()]
    return max(float(torch.dist(a.double(), b.double()) / (b.double().norm() + 1e-12)) for a, b in pairs)


@pytest.fixture(scope="module")
def uneven(make_federation: Callable[..., Federation]) -> Federation:
    return make_federation(sizes=SIZES, validation=3)


# The numbers.


@pytest.mark.parametrize("kind", [*STACKS, *DRAWS, *LOOPED_ONLY])
def test_looped_as_plain_torch(kind: str, uneven: Federation) -> None:
    """Against the module itself, trained by torch's own optimiser, its random numbers drawn from the same seed."""
    build = {**STACKS, **DRAWS, **{name: own for name, (own, _) in LOOPED_ONLY.items()}}[kind]
    outcome = run(double(build), uneven, "looped")
    for k, client in enumerate(uneven.clients):
        with seeding.isolated(torch.device("cpu"), 0, "init"):
            net = build().double()
        epochs = draw_epochs(len(client.train), TRAINING, seeding.generator(0, client.name, 1, "batches"))
        sgd = partial(torch.optim.SGD, lr=TRAINING.lr)
        with seeding.isolated(torch.device("cpu"), 0, client.name, 1, "all"):
            batches = [index for epoch in epochs for index in epoch]
            want = local_run(net, scale(client.train.x, torch.float64), client.train.y, batches, sgd)
        for name, tensor in outcome.trained.items():
            assert torch.allclose(tensor[k], want[name], rtol=1e-9, atol=1e-12), name


@pytest.mark.parametrize("kind", STACKS)
def test_stacked_as_looped(kind: str, uneven: Federation) -> None:
    both = partial(run, double(STACKS[kind]), uneven, method=FedC2I(), rounds=2)
    assert distance(both(executor="stacked"), both(executor="looped")) < 1e-9


@pytest.mark.parametrize("kind", DRAWS)
def test_what_draws_is_a_seed_s_own_when_stacked(kind: str, uneven: Federation) -> None:
    """Masks differ from looped ones, but neither from run to run nor with the seeds computed beside them."""
    model = double(DRAWS[kind])
    alone, beside = (run(model, uneven, "stacked", seeds=seeds) for seeds in ([0], [0, 7]))
    assert model.has_dropout
    assert distance(alone, beside) == 0
    assert 0 < distance(alone, run(model, uneven, "looped")) < 1


# What can only be computed one client after the other.


@pytest.mark.parametrize("kind", LOOPED_ONLY)
def test_what_cannot_be_stacked_is_refused(kind: str, uneven: Federation) -> None:
    build, reason = LOOPED_ONLY[kind]
    with pytest.raises(UserError) as caught:
        check(FedAvg(), double(build), uneven, EngineSettings(executor="stacked"))
    assert str(caught.value).startswith(f"executor=stacked: model 'custom' {reason}")
    assert str(caught.value).endswith("; use executor=looped")
    assert "\n" not in str(caught.value)


def test_a_short_reason() -> None:
    model = double(recurrent(nn.LSTM))
    assert obstacle(model, InputSpec((3, 16, 16))) == f"{CANNOT} (Batching rule not implemented for aten::lstm.input)"


def test_single_precision_where_double_cannot_run() -> None:
    """A module that casts to float32 itself is tried as it is."""
    model = split(net_of(lambda own, x: own.fc(own.body(x.float()).float())), head="fc")
    assert obstacle(model, InputSpec((3, 16, 16))) is None


@pytest.mark.parametrize(("kind", "kept"), [("branch on a value", LoopedExecutor), ("batch norm", StackedExecutor)])
def test_auto_takes_the_loop_by_itself(
    kind: str, kept: type, uneven: Federation, recwarn: pytest.WarningsRecorder
) -> None:
    """As on a GPU."""
    model = double({**STACKS, **{name: own for name, (own, _) in LOOPED_ONLY.items()}}[kind])
    data = [ClientData.place(client, CLASSES, torch.device("cpu")) for client in uneven.clients]
    recipes = [RunContext(FedAvg(), model, TRAINING, 1, 0)]
    executor = new_executor(recipes, data, EngineSettings(), torch.device("cuda"), None)
    assert isinstance(executor, kept)
    said = [str(warning.message) for warning in recwarn if "executor" in str(warning.message)]
    expected = (
        f"executor=auto: looped, because model 'custom' {CANNOT} (It looks like you're attempting to use a Tensor"
    )
    assert [line.startswith(expected) for line in said] == ([True] if kept is LoopedExecutor else [])


# What no executor can compute.


class Cosine(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return F.linear(F.normalize(input), F.normalize(self.weight))


def remember(own: Any, x: Tensor) -> Tensor:
    own.calls = getattr(own, "calls", 0) + own.training
    return own.fc(own.body(x) * (1 + own.calls))  # type: ignore[no-any-return]


def count_always(own: Any, x: Tensor) -> Tensor:
    own.steps += 1
    return own.fc(own.body(x))  # type: ignore[no-any-return]


def without_gradient(own: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = own.body(x)
    return own.fc(h)  # type: ignore[no-any-return]


def spoil(own: Net, x: Tensor) -> Tensor:
    return own.fc(torch.tanh(own.body(x)).mul_(2))  # type: ignore[no-any-return]


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "computed again": (
        net_of(lambda own, x: own.fc(checkpoint(own.body, x, use_reentrant=False))),
        "other gradients when it is given its parameters from outside; torch.utils.checkpoint does that",
    ),
    "dropout at evaluation": (
        net_of(lambda own, x: own.fc(F.dropout(own.body(x)))),
        "other results every time at eval",
    ),
    "noise at evaluation": (net_of(lambda own, x: own.fc(own.body(x + torch.rand(())))), "F.dropout.x, training=self"),
    "python's random numbers": (
        net_of(lambda own, x: own.fc(own.body(x) * (random.random() if own.training else 1))),
        "from torch alone",
    ),
    "memory outside buffers": (net_of(remember), "keep what it remembers in buffers"),
    "buffers at evaluation": (net_of(count_always, steps=torch.tensor(0)), "changes its buffers at evaluation"),
    "tied head": (lambda: Tied(head=True), "head 'fc' shares its weight with 'second.weight'"),
    "cosine head": (
        changed(lambda own: setattr(own, "fc", Cosine(64, CLASSES))),
        "must be its last operation .* plain",
    ),
    "head with weight norm": (
        changed(lambda own: parametrizations.weight_norm(own.fc)),
        "must have a weight and at most a",
    ),
    "several layers as head": (
        changed(lambda own: setattr(own, "fc", nn.Sequential(nn.Linear(64, 9), nn.Linear(9, 4)))),
        "allowed are fc.0, fc.1",
    ),
    "old weight norm": (
        changed(lambda own: nn.utils.weight_norm(own.conv)),
        "use torch.nn.utils.parametrizations.weight_norm",
    ),
    "tuple": (net_of(lambda own, x: (own.fc(own.body(x)), x)), "one tensor of logits .* got a tuple"),
    "dict": (
        net_of(lambda own, x: {"logits": own.fc(own.body(x))}),
        "got a dict; let its forward return the logits alone",
    ),
    "lazy": (changed(lambda own: setattr(own, "between", nn.LazyBatchNorm2d())), "'between.weight' has no shape yet"),
    "half precision": (lambda: Net().half(), "'conv.weight' is float16, allowed are float32 and float64"),
    "bfloat16": (lambda: Net().bfloat16(), "is bfloat16, allowed are"),
    "scripted": (
        lambda: torch.jit.trace(Net(), torch.zeros(2, 3, 16, 16)),  # type: ignore[no-untyped-call]
        "made by torch.jit; give the torch.nn.Module",
    ),
    "compiled": (lambda: torch.compile(Net(), backend="eager"), "made by torch.compile; give the torch.nn.Module"),
    "no module": (lambda: 3, "must be a torch.nn.Module or a function that builds one, got a int"),
    "no gradient": (net_of(without_gradient), r"no gradient reaches .* freeze them with requires_grad_\(False\)"),
    "spoilt gradient": (net_of(spoil), "cannot be trained: one of the variables needed for gradient computation"),
    "two precisions": (changed(lambda own: own.fc.double()), r"cannot read images 16x16"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", REFUSED)
def test_what_nobody_can_compute_is_refused(kind: str, federation: Federation) -> None:
    build, message = REFUSED[kind]
    with pytest.raises(UserError, match=message) as caught:
        check(FedAvg(), split(build, head="fc"), federation, EngineSettings())
    assert "\n" not in str(caught.value)


def features_normed() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(PIXELS, 6, bias=False), nn.BatchNorm1d(6), nn.Linear(6, CLASSES))


@pytest.mark.parametrize("executor", ["looped", "stacked"])
@pytest.mark.parametrize(
    ("sizes", "how", "message"),
    [
        (
            (12, 11),
            {"batch_size": 5},
            r"'b' has 11 training samples.*; set drop_last=true or another batch_size \(",
        ),
        (
            (12, 1),
            {"batch_size": 5, "drop_last": True},
            "'b' has 1 training sample, .*; give it more or leave it",
        ),
        (
            (12, 11),
            {"batch_size": 1},
            r"'a' .*; set another batch_size \(Expected more than 1 value",
        ),
        ((12, 11), {"batch_size": 5, "drop_last": True}, ""),
        ((12, 10), {"batch_size": 5}, ""),
    ],
)
def test_batch_norm_of_a_single_sample(
    executor: str, sizes: tuple[int, ...], how: dict[str, Any], message: str, make_federation: Callable[..., Federation]
) -> None:
    """torch refuses to train on it; stacked, padding would hide that."""
    settings = EngineSettings(rounds=1, executor=executor, **vars(TrainingSettings(**how)))  # type: ignore[arg-type]
    work = partial(simulate, FedAvg(), split(features_normed, head="3"), make_federation(sizes=sizes), settings, [0])
    if not message:
        assert torch.isfinite(work()[0].trained["3.weight"]).all()
        return
    with pytest.raises(UserError, match=message):
        work()


@pytest.mark.parametrize(("sizes", "fits"), [((8, 3), False), ((6, 9), True)])
def test_pooled_training_has_the_batches_of_the_union(
    sizes: tuple[int, ...], fits: bool, make_federation: Callable[..., Federation]
) -> None:
    """In batches of five, 8 + 3 leave one sample and 6 + 9 none; by client it would be the other way."""
    settings = EngineSettings(rounds=1, **vars(TrainingSettings(batch_size=5)))
    work = partial(simulate, Pooled(), split(features_normed, head="3"), make_federation(sizes=sizes), settings, [0])
    if fits:
        assert torch.isfinite(work()[0].trained["3.weight"]).all()
        return
    with pytest.raises(UserError, match="'all together' has 11 training samples, which leaves a batch of one"):
        work()


def test_batch_norm_of_a_single_image_is_as_torch_s(make_federation: Callable[..., Federation]) -> None:
    both = partial(run, double(STACKS["batch norm"]), make_federation(sizes=(11, 6)), rounds=2)
    assert distance(both(executor="stacked"), both(executor="looped")) < 1e-9


# Inputs.


def test_grey_images_that_are_not_square() -> None:
    """As the same images with three channels, on both executors."""
    draws = np.random.default_rng(0)
    x, y = draws.integers(0, 256, (2, 14, 10, 23), dtype=np.uint8), np.arange(14) % CLASSES
    grey = from_arrays({name: (x[k], y, x[k], y) for k, name in enumerate("ab")})
    coloured = x[..., None].repeat(3, axis=-1)
    colour = from_arrays({name: (coloured[k], y, coloured[k], y) for k, name in enumerate("ab")})
    want = run(double(Net), colour, "looped")
    assert all(distance(run(double(Net), grey, executor), want) < 1e-9 for executor in ("looped", "stacked"))


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (np.full((4, 9), np.inf), np.arange(4), "sample 0 holds a number that is missing, infinite or beyond float32"),
        (np.zeros(4), np.arange(4), r"shape \(4,\), allowed are \(N, features\), .*"),
        (np.zeros((4, 5, 30), np.uint8), np.arange(4), r"shape \(4, 5, 30\), allowed are .* with H and W from 8"),
        (
            np.zeros((4, 9, 9), np.uint8),
            np.array([0, 1, -100, 0]),
            "label -100 is out .*; remove samples without a label",
        ),
        (np.zeros((4, 9, 9), np.uint8), np.arange(4.0), "float64 of shape .* whole numbers"),
        (np.zeros((4, 9, 9), np.uint8), np.zeros((4, 1), int), r"of shape \(4, 1\), but whole numbers of shape \(N,\)"),
    ],
)
def test_arrays_that_are_no_labelled_images(x: Any, y: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        from_arrays({"a": (x, y, x, y)})


def test_labels_beyond_the_named_classes() -> None:
    x = np.zeros((4, 9, 9), np.uint8)
    with pytest.raises(UserError, match=r"label 3 is out of range, allowed are 0\.\.2"):
        from_arrays({"a": (x, np.arange(4), x, np.arange(4))}, ["x", "y", "z"])


# Memory.


def flat() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(PIXELS, 6), nn.Tanh(), nn.Linear(6, CLASSES))


def test_bytes_of_a_step_by_hand() -> None:
    """Of each sample the scaled image and the six features are kept, in float32; the model is there eight times."""
    parameters = 6 * PIXELS + 6 + CLASSES * 6 + CLASSES
    assert bytes_of_a_step(split(flat, head="3"), InputSpec((3, 16, 16)), samples=10) == 4 * (
        8 * parameters + 15 * (PIXELS + 6)
    )


def test_fewer_clients_at_a_time_where_memory_is_short(uneven: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    model = split(lambda: flat().double(), head="3")
    want, whole, parts = run(model, uneven, "stacked"), StackedExecutor._train, []

    def train(executor: StackedExecutor, part: Any, evaluate: bool) -> Any:
        parts.append(sum(len(turn.clients) for turn in part))
        return whole(executor, part, evaluate)

    monkeypatch.setattr(StackedExecutor, "_train", train)
    monkeypatch.setattr(memory, "available", lambda: 3 * bytes_of_a_step(model, InputSpec((3, 16, 16)), 5))
    assert clients_that_fit(model, InputSpec((3, 16, 16)), samples=5) == 2
    assert distance(run(model, uneven, "stacked"), want) < 1e-12
    assert parts == [2, 2]


def test_not_one_client_fits(uneven: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available", lambda: 1000)
    with pytest.raises(UserError, match=r"a step of one client needs about .* GiB are free; use executor=looped"):
        run(split(flat, head="3"), uneven, "stacked")


class Residual(nn.Module):
    def __init__(self, ins: int, outs: int, stride: int) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(ins, outs, 3, stride, 1, bias=False), nn.Conv2d(outs, outs, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outs), nn.BatchNorm2d(outs)
        narrow = ins == outs and stride == 1
        past = nn.Sequential(nn.Conv2d(ins, outs, 1, stride, bias=False), nn.BatchNorm2d(outs))
        self.past = nn.Identity() if narrow else past

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm1(self.one(x)), inplace=True)
        return F.relu(self.norm2(self.two(h)) + self.past(x), inplace=True)


def resnet18(width: int) -> nn.Module:
    """18 layers with weights; 64 wide, it has 11.2 million parameters."""
    sides = [(1, 1, 1), (1, 1, 1), (1, 2, 2), (2, 2, 1), (2, 4, 2), (4, 4, 1), (4, 8, 2), (8, 8, 1)]
    return nn.Sequential(
        *(
            nn.Conv2d(3, width, 7, 2, 3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        ),
        *(Residual(ins * width, outs * width, stride) for ins, outs, stride in sides),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, CLASSES)),
    )


@pytest.mark.parametrize("width", [4, pytest.param(64, marks=pytest.mark.slow)])
def test_a_resnet_18_of_four_clients(width: int, make_federation: Callable[..., Federation]) -> None:
    federation = make_federation(sizes=(5, 5, 5, 3))
    both = partial(run, split(lambda: resnet18(width).double(), head="14"), federation)
    assert distance(both(executor="stacked"), both(executor="looped")) < 1e-6
