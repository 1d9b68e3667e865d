"""Features of a constant body: computed once, cached by what decides them, and a run on them is the run on images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import fedc2i
from fedc2i.data.federation import Federation, Split
from fedc2i.engine.records import Round
from fedc2i.engine.simulator import simulate
from fedc2i.models import features
from fedc2i.models.model import Model, split
from fedc2i.runs.plan import prepare
from fedc2i.runs.results import Result
from support.helpers import blank_federation

CPU = torch.device("cpu")


class Body(nn.Module):
    """A small convolutional net with BatchNorm and dropout, which a constant body must not use."""

    def __init__(self, negated: bool = False) -> None:
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(3, 8, 5, stride=4), nn.BatchNorm2d(8), nn.Dropout(0.5)
        self.fc, self._negated = nn.Linear(8, 3), negated

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.norm(self.conv(x))).relu().mean((2, 3))
        return self.fc(-x if self._negated else x)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDC2I_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "features"


@pytest.fixture
def federation() -> Federation:
    made = blank_federation("ab")
    generator = torch.Generator().manual_seed(0)

    def noisy(own: Split) -> Split:
        noise = torch.randint(-40, 40, (40, 3, 16, 16), generator=generator)
        return Split(
            (own.x.repeat(20, 1, 1, 1)[:40].int() + noise).clamp(0, 255).to(torch.uint8), own.y.repeat(20)[:40]
        )

    clients = [replace(client, train=noisy(client.train), test=noisy(client.test)) for client in made.clients]
    return replace(made, clients=tuple(clients))


def head_only(build: Callable[[], nn.Module] = Body, seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return split(build(), head="fc").restricted("head", statistics=True)


def test_features_are_the_body_s(federation: Federation) -> None:
    model, seen = head_only(), []
    found = features.of_federation(federation, model, CPU, lambda done, of: seen.append((done, of)))
    params = model.init(0)
    for own, images in zip(found.clients, federation.clients, strict=True):
        for part in ("train", "test"):
            assert_close(getattr(own, part).x, model.features(params, getattr(images, part).x), rtol=1e-5, atol=1e-6)
            assert torch.equal(getattr(own, part).y, getattr(images, part).y)
        assert own.validation.x.shape == (0, 8)
    assert found.checksums == federation.checksums
    assert found.select(["b"]).checksums == {"b": federation.checksums["b"]}
    assert seen[-1] == (160, 160)
    assert seen == sorted(seen)


def test_a_run_on_features_is_the_run_on_images(federation: Federation) -> None:
    (plan,) = prepare(["fedc2i"], {"rounds": 3, "train": "head"}, federation, split(Body, head="fc"))
    result = fedc2i.run("fedc2i", federation, model=split(Body, head="fc"), rounds=3, train="head")
    images = simulate(*plan.parts)[0]
    for point in ("trained", "received"):
        on_features, on_images = getattr(result.outcomes[0], point), getattr(images, point)
        assert on_features.keys() == on_images.keys() == {"fc.weight", "fc.bias"}
        for name, tensor in on_images.items():
            assert_close(on_features[name], tensor, rtol=1e-3, atol=1e-5)
    assert result.federation.input.is_image  # what a reader of the result sees
    assert result.predictions is not None
    assert result.predictions.labels.tolist() == [label for own in federation.clients for label in own.test.y.tolist()]


def test_clients_with_the_same_data_keep_their_names() -> None:
    found = features.of_federation(blank_federation("ab"), head_only(), CPU, lambda done, of: None)
    assert found.names == ("a", "b")


def test_the_second_pass_reads_thecache(federation: Federation, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = features.of_federation(federation, head_only(), CPU, lambda done, of: None)
    files = sorted(cache.iterdir())
    assert len(files) == 2
    with monkeypatch.context() as never:
        never.setattr(features, "extract", None)
        again = features.of_federation(federation, head_only(), CPU, pytest.fail)
    assert all(torch.equal(one.train.x, two.train.x) for one, two in zip(first.clients, again.clients, strict=True))
    files[0].write_bytes(b"damaged")
    features.of_federation(federation, head_only(), CPU, lambda done, of: None)
    assert len(files[0].read_bytes()) > 1000
    assert sorted(cache.iterdir()) == files


@pytest.mark.parametrize("change", ["weights", "computation", "data"])
def test_whatever_decides_features_has_another_file(federation: Federation, cache: Path, change: str) -> None:
    def negated() -> nn.Module:
        return Body(negated=True)

    features.of_federation(federation, head_only(), CPU, lambda done, of: None)
    other = head_only(negated) if change == "computation" else head_only(seed=1 if change == "weights" else 0)
    data = federation
    if change == "data":
        first = data.clients[0]
        brighter = Split(first.test.x | 1, first.test.y)
        data = replace(data, clients=(replace(first, test=brighter), *data.clients[1:]))
    features.of_federation(data, other, CPU, lambda done, of: None)
    assert len(list(cache.iterdir())) == (3 if change == "data" else 4)


def test_progress_says_how_much_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now, lines = iter([0.0, 10.0, 30.0, 40.0]), []
    monkeypatch.setattr(features.time, "monotonic", lambda: next(now))  # type: ignore[attr-defined]
    report = features.timed(lines.append)
    for done in (100, 1500, 2000):
        report(done, 2000)
    assert lines[0] == "features: 1,500 of 2,000 images, 50 a second, 10 s left"
    assert lines[1].startswith("features: 2,000 images in 40 s; they are cached in ")


def test_every_core_computes_the_same_bits(federation: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = features.body_of(head_only(), CPU), federation.clients[0].train.x
    threads = torch.get_num_threads()
    found = []
    for count in (1, 3):
        monkeypatch.setattr(features, "cores", lambda count=count: count)
        found.append(features.extract(module, x, CPU, lambda done: None).numpy())
    assert np.array_equal(*found)
    assert torch.get_num_threads() == threads


def test_an_interrupted_run_resumes_to_the_same_bits(federation: Federation, tmp_path: Path) -> None:
    class Stopper:
        def begin(self, result: object) -> None: ...

        def client(self, done: int, of: int) -> None: ...

        def round(self, report: Round) -> None:
            if report.round == 1:
                raise KeyboardInterrupt

    model = split(Body, head="fc")
    settings: dict[str, Any] = {"model": model, "train": "head", "rounds": 2, "epochs": 1}
    whole = fedc2i.run("fedavg", federation, **settings)
    with pytest.raises(KeyboardInterrupt):
        fedc2i.run("fedavg", federation, out=tmp_path / "run", observer=Stopper(), **settings)
    again = fedc2i.resume(tmp_path / "run", federation, model)
    assert isinstance(again, Result)
    assert all(torch.equal(own, again.outcomes[0].trained[name]) for name, own in whole.outcomes[0].trained.items())


def test_samples_are_repeated_up_to_a_batch_of_one_size() -> None:
    x = torch.arange(12, dtype=torch.uint8).reshape(3, 1, 2, 2)
    assert features.filled(x, 3) is x
    assert torch.equal(features.filled(x, 5), x[[0, 1, 2, 0, 0]])


@pytest.mark.parametrize("method", ["fedc2i", "fedc2i-server"])
def test_with_a_head_alone_the_influence_vector_is_the_mean_of_the_matrix(federation: Federation, method: str) -> None:
    model = split(Body(), "fc").restricted("head", statistics=False)
    result = fedc2i.run(method, federation, model=model, rounds=2, lr=0.1, gamma=50.0)
    vector, matrix = (result.influence(name) for name in ("influence_vector", "influence_matrix"))
    np.testing.assert_allclose(vector, matrix.mean(-1), rtol=1e-6)
    assert np.abs(vector[-1] - 0.5).max() > 0.01
