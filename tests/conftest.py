"""Small things every test may need: a toy federation and a tiny model, both made in milliseconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import hypothesis
import pytest
import torch
from torch import nn

from fedc2i.data.federation import Client, Federation, Split
from fedc2i.engine.executors import choice
from fedc2i.methods.base import Method, import_modules
from fedc2i.models.model import Model, split
from fedc2i.report import figures
from support.helpers import figures_drawn

import_modules()  # every method, for tests that take them all
torch.set_num_threads(1)  # two threads wait for each other as soon as anything else runs: ten times slower
# The same examples in every run and process, and no limit of time on one of them: a busy machine is no failure.
hypothesis.settings.register_profile("suite", derandomize=True, deadline=None)
hypothesis.settings.load_profile("suite")
CLASSES = 4
SIDE = 16
# Few tests that take long: begun last, they would leave the other processes idle at the end.
LONG = ("test_deployment.py", "test_simulation.py", "test_kill_matrix.py", "test_long_and_wide.py", "test_processes.py",
        "test_examples.py", "test_docs.py", "test_browser.py", "test_workers.py")  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONG)


def _split(count: int, labels: Sequence[int], tint: int, generator: torch.Generator) -> Split:
    """Noise whose brightness tells the class, under the client's own tint; every allowed label in turn."""
    y = torch.tensor([labels[n % len(labels)] for n in range(count)], dtype=torch.int64)
    noise = torch.randint(0, 60, (count, 3, SIDE, SIDE), generator=generator)
    return Split((noise + 40 * y[:, None, None, None] + tint).to(torch.uint8), y)


def _federation(sizes: Sequence[int] = (12, 20, 7), validation: int = 0, seed: int = 0) -> Federation:
    """Clients ``a``, ``b``, ... of these sizes; the first has no sample of the last class."""
    generator = torch.Generator().manual_seed(seed)
    clients = []
    for number, size in enumerate(sizes):
        labels = range(CLASSES - 1) if number == 0 else range(CLASSES)
        parts = [_split(count, labels, 15 * number, generator) for count in (size, validation, 8 + number)]
        clients.append(Client("abcdefghij"[number], *parts))
    return Federation("toy", tuple(clients), tuple("wxyz"))


def _model(bias: bool = True, batch_norm: bool = False, layer_norm: bool = False, dropout: float = 0.0) -> Model:
    """768 inputs, 6 features, 4 classes; its head is called ``head``."""

    def build() -> nn.Module:
        layers = {
            "flat": nn.Flatten(),
            "hidden": nn.Linear(3 * SIDE * SIDE, 6, bias=not batch_norm),  # before a norm its gradient is noise
            **({"norm": nn.BatchNorm1d(6)} if batch_norm else {}),
            **({"scale": nn.LayerNorm(6)} if layer_norm else {}),
            "squash": nn.Tanh(),
            **({"drop": nn.Dropout(dropout)} if dropout else {}),
            "head": nn.Linear(6, CLASSES, bias=bias),
        }
        net = nn.Sequential()
        for name, layer in layers.items():
            net.add_module(name, layer)
        return net

    return split(build, head="head", name="tiny")


@pytest.fixture(autouse=True)
def own_methods_end_with_their_test() -> Iterator[None]:
    """A method that a test defines or loads from a file is forgotten after it: the next may use its name."""
    before = dict(Method.registry)
    yield
    Method.registry.clear()
    Method.registry.update(before)


@pytest.fixture(scope="session")
def make_federation() -> Callable[..., Federation]:
    return _federation


@pytest.fixture(scope="session")
def make_model() -> Callable[..., Model]:
    return _model


@pytest.fixture
def federation() -> Federation:
    return _federation()


@pytest.fixture
def model() -> Model:
    return _model()


@pytest.fixture(scope="session", autouse=True)
def _without_figures() -> Iterator[None]:
    """They take longer than a small run; that they are drawn is tested `with_figures`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "draw_run", lambda result, folder: None)
        patch.setattr(figures, "draw_comparison", lambda results, folder: (folder / "comparison.png").write_bytes(b""))
        yield


@pytest.fixture(scope="session", autouse=True)
def _one_core() -> Iterator[None]:
    """Runs start no worker processes unless they ask for them: each takes longer to start than most tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice, "cores", lambda: 1)
        yield


@pytest.fixture
def with_figures() -> Iterator[None]:
    with figures_drawn():
        yield
