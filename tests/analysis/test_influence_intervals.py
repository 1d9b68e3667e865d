"""Bootstrap intervals of influence, against a bootstrap that really draws samples and against cases with one answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedc2i
from fedc2i.analysis import influence_intervals
from fedc2i.analysis.influence_intervals import (
    FILE,
    InfluenceIntervals,
    Interval,
    draw_weights,
    interval,
    intervals,
    measure,
    resample,
)
from fedc2i.core.errors import UserError
from fedc2i.core.params import Stacked, row, stack
from fedc2i.data.federation import Federation
from fedc2i.engine.client import ClientData
from fedc2i.methods.base import Method, Site
from fedc2i.methods.fedc2i import FedC2I
from fedc2i.methods.fedc2i_ablation import FedC2IClient
from fedc2i.methods.fedc2i_many import FedC2IMany
from fedc2i.methods.messages import relay
from fedc2i.models.model import Model
from fedc2i.runs.driver import execute
from fedc2i.runs.plan import Plan, prepare
from fedc2i.training.local import Batch
from support.helpers import call, write_arrays

DRAWS = 25


def test_draws_are_drawn_with_replacement() -> None:
    weights = draw_weights(50, 400, torch.Generator().manual_seed(1))
    assert weights.shape == (400, 50)
    assert torch.equal(weights.sum(1), torch.full((400,), 50.0))
    assert weights.max() > 1
    left_out = (weights == 0).float().mean()  # (1 - 1/50)^50
    assert abs(float(left_out) - 0.98**50) < 0.01


def test_interval_of_known_draws() -> None:
    drawn = torch.arange(101.0)[:, None] / 100  # 0.00 .. 1.00
    found = interval(torch.tensor([0.5]), drawn, level=0.9)
    assert (found.low.item(), found.high.item()) == (pytest.approx(0.05), pytest.approx(0.95))
    assert [found.differs(share).item() for share in (0.04, 0.5, 0.96)] == [True, False, True]
    for value, differs in ((0.2 + 1e-5, False), (0.201, True)):  # a thousandth of the share is no difference
        assert Interval(*(torch.tensor([value]) for _ in range(3))).differs(0.2).item() is differs


def _models(model: Model, count: int) -> Stacked:
    return stack([model.init(seed, "some") for seed in range(count)])


@pytest.mark.parametrize(
    "method",
    [FedC2I(), FedC2I(gamma="perplexity(2)"), FedC2IMany(gamma=5.0)],
    ids=["default", "adaptive", "first-order"],
)
def test_resampling_equals_measuring_on_drawn_samples(method: Method, federation: Federation, model: Model) -> None:
    """The slow way: take the drawn samples, some of them twice, as a batch of their own; in double precision."""
    models = {name: tensor.double() for name, tensor in _models(model, 3).items()}
    data = ClientData.place(federation.clients[1], len(federation.classes), torch.device("cpu"))
    own, batch = row(models, 1), data.train._replace(w=data.train.w.double())
    site = Site(model, data.counts, torch.tensor(1), relay(models), round=3, rounds=5)
    weights = draw_weights(len(batch.y), DRAWS, torch.Generator().manual_seed(3)).double()

    def measured(w: torch.Tensor) -> dict[str, torch.Tensor]:
        report = method.personalise(own, batch._replace(w=w), site)[1]
        return {name: report[name] for name in ("influence_vector", "influence_matrix")}

    for at_once in (None, 7):
        found = resample(measured, weights, at_once)
        for d in range(DRAWS):
            index = torch.repeat_interleave(torch.arange(len(batch.y)), weights[d].to(torch.int64))
            with torch.no_grad():
                slow = method.personalise(own, batch.take(index), site)[1]
            for name, values in found.items():
                torch.testing.assert_close(values[d], slow[name], rtol=1e-9, atol=0)
        assert found["influence_vector"].std(0).max() > 1e-4  # draws do differ


def _plan(federation: Federation, model: Model, method: str = "fedc2i", **options: object) -> Plan:
    (plan,) = prepare([method], {"rounds": 1, "device": "cpu", **options}, federation, model)
    return plan


def test_equal_models_cannot_be_told_apart(make_federation: Callable[..., Federation], model: Model) -> None:
    federation = make_federation((30, 30, 30, 30))
    same = stack([model.init(0, "some")] * 4)
    found = measure(_plan(federation, model), same, 0, 1, 256, 100, 0.95)
    assert found.vector is not None
    assert found.matrix is not None
    torch.testing.assert_close(found.vector.estimate, torch.full((4, 4), 0.25), rtol=1e-4, atol=0)
    assert not found.differs("vector").any()
    assert not found.differs("matrix").any()


def test_only_what_is_received_is_measured(make_federation: Callable[..., Federation], model: Model) -> None:
    """Neighbours alone in a ring, and nothing that the server rejects, such as a model that is far too large."""
    ring = _plan(make_federation((6,) * 5), model, "fedc2i-client", topology="ring")
    near = torch.tensor([[(m - k) % 5 in (0, 1, 4) for k in range(5)] for m in range(5)])
    full = _plan(make_federation((6,) * 4), model, "fedc2i-client")
    huge = {name: torch.cat([tensor[:3], 1e6 * tensor[3:]]) for name, tensor in _models(model, 4).items()}
    sound = (torch.arange(4) < 3).expand(4, 4)
    for plan, models, expected in ((ring, _models(model, 5), near), (full, huge, sound)):
        found = measure(plan, models, 0, 1, 6, 20, 0.95)
        assert found.vector is not None
        assert torch.equal(torch.isfinite(found.vector.estimate), expected)
        assert torch.equal(torch.isfinite(found.vector.low), expected)
        torch.testing.assert_close(found.vector.estimate.nansum(1), torch.ones(len(expected)))
        assert found.share.tolist() == pytest.approx([1 / 3] * len(expected))


def test_a_clearly_better_model_is_told_apart(make_federation: Callable[..., Federation], model: Model) -> None:
    """All have the same data; three bodies are blind, their features 0, the second was trained, and so was its head."""
    one = make_federation((40, 40)).clients[1]
    federation = Federation("toy", tuple(replace(one, name=name) for name in "abcd"), tuple("wxyz"))
    trained = fedc2i.run("local", federation, model=model, rounds=15, device="cpu", lr=0.01).outcomes[0]
    good = row(trained.trained, 1)
    blind = {name: t if name in model.head_names else torch.zeros_like(t) for name, t in good.items()}
    found = measure(_plan(federation, model), stack([blind, good, blind, blind]), 0, 1, 256, 100, 0.95)
    assert found.vector is not None
    differs = found.differs("vector")
    assert differs[:, 1].all()
    assert (found.vector.low[:, 1] > 0.25).all()
    assert (found.vector.estimate.argmax(1) == 1).all()
    assert (found.vector.low <= found.vector.estimate).all()
    assert (found.vector.estimate <= found.vector.high).all()


def test_more_samples_give_narrower_intervals(make_federation: Callable[..., Federation], model: Model) -> None:
    federation, models = make_federation((400, 400, 400)), _models(model, 3)
    widths = []
    for samples in (16, 256):
        found = measure(_plan(federation, model), models, 0, 1, samples, 100, 0.95).vector
        assert found is not None
        widths.append(float((found.high - found.low).mean()))
    assert widths[1] < 0.5 * widths[0]  # a quarter, if all were normal


def test_intervals_hold_the_truth_about_as_often_as_they_say(model: Model) -> None:
    """The truth is λ on a whole population; 95 % intervals come from 80 samples of it at a time."""
    generator = torch.Generator().manual_seed(7)
    y = torch.randint(model.classes, (2000,), generator=generator)
    x = torch.randint(0, 100, (2000, 3, 16, 16), generator=generator) + 30 * y[:, None, None, None]
    models, method = _models(model, 3), FedC2IClient()
    site = Site(model, torch.bincount(y), torch.tensor(0), relay(models))
    x = x / 127.5 - 1

    def measured(index: torch.Tensor, w: torch.Tensor) -> dict[str, torch.Tensor]:
        report = method.personalise(row(models, 0), Batch(x[index], y[index], w), site)[1]
        return {"vector": report["influence_vector"]}

    with torch.no_grad():
        truth = measured(torch.arange(2000), torch.ones(2000))["vector"]
    held = []
    for _ in range(100):
        index = torch.randint(2000, (80,), generator=generator)
        drawn = resample(lambda w, index=index: measured(index, w), draw_weights(80, 200, generator))["vector"]
        found = interval(truth, drawn)
        held.append((found.low <= truth) & (truth <= found.high))
    assert 0.87 < float(torch.stack(held).float().mean()) <= 0.99


def test_a_matrix_of_very_many_clients_stays_out_of_the_file() -> None:
    def whole(*shape: int) -> Interval:
        return Interval(*(torch.zeros(shape) for _ in range(3)))

    names, share = tuple(map(str, range(120))), torch.full((120,), 1 / 120)
    found = InfluenceIntervals(
        0, 0.95, 20, names, tuple("wxyzuvabc"), {}, {}, share, whole(120, 120), whole(120, 120, 9), ()
    )
    written = found.to_json()
    assert np.shape(written["vector"]["low"]) == (120, 120)
    assert written["matrix"] is None


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory, make_federation: Callable[..., Federation]) -> Path:
    """Three rounds of LeNet on three clients with files, so that the command line can open them again."""
    folder = tmp_path_factory.mktemp("uncertain")
    data = write_arrays(folder / "data", make_federation((60, 50, 40)))
    settings = {"rounds": 3, "seeds": (0, 4), "epochs": 1, "model": "lenet5", "device": "cpu"}
    (plan,) = prepare(["fedc2i:influence_samples=16"], settings, data)
    execute(plan, folder / "run")
    return folder / "run"


@pytest.mark.parametrize("seed", [0, 4])
def test_with_the_runs_own_samples_it_is_the_runs_own_influence(run_folder: Path, seed: int) -> None:
    found = intervals(run_folder, seed=seed, samples=16, draws=20)
    with np.load(run_folder / "influence.npz") as run:
        for name in ("vector", "matrix"):
            np.testing.assert_allclose(
                getattr(found, name).estimate, run[f"seed{seed}_influence_{name}"][-1], rtol=1e-5
            )


@pytest.mark.parametrize("validation", [0, 6])
def test_influence_by_descent_is_the_runs_own_too(
    validation: int, tmp_path: Path, make_federation: Callable[..., Federation], model: Model, monkeypatch: Any
) -> None:
    """Its method needs held-out samples as well, and a gradient for each draw: a few of them at once."""
    federation, at_once = make_federation((30, 20, 9), validation=validation), []

    def counted(measured: Any, weights: torch.Tensor, most: int | None = None) -> dict[str, torch.Tensor]:
        at_once.append(most)
        return resample(measured, weights, most)

    monkeypatch.setattr(influence_intervals, "resample", counted)
    settings = {"rounds": 2, "epochs": 1, "device": "cpu"}
    (plan,) = prepare(["fedc2i-plus:influence_samples=8"], settings, federation, model)
    execute(plan, tmp_path / "run")
    found = intervals(tmp_path / "run", samples=16, draws=20, data=federation, model=model)
    with np.load(tmp_path / "run" / "influence.npz") as run:
        for own, name in ((found.vector, "vector"), (found.matrix, "matrix")):
            assert own is not None
            np.testing.assert_allclose(own.estimate, run[f"seed0_influence_{name}"][-1], rtol=1e-4)
            assert (own.high - own.low).max() > 0
    assert at_once == [influence_intervals.FEW_AT_ONCE] * 3
    assert any("own model is not measured" in note for note in found.notes)


@pytest.mark.parametrize(("rate", "noted"), [("0", False), ("1e6", True)])
def test_half_for_the_best_other_one_is_called_the_largest_weight(
    rate: str, noted: bool, tmp_path: Path, make_federation: Callable[..., Federation]
) -> None:
    """By steep descent all weight goes to one other client, and by definition as much to the own one."""
    data = write_arrays(tmp_path / "data", make_federation((30, 20, 9)))
    settings = {"rounds": 1, "epochs": 1, "model": "lenet5", "device": "cpu"}
    (plan,) = prepare([f"fedc2i-plus:rate={rate}"], settings, data)
    execute(plan, tmp_path / "run")
    shown = call("influence", "show", str(tmp_path / "run"), "--samples", "16", "--draws", "20")
    assert ("0.500" in shown.out) == noted
    assert shown.out.count("So 0.5 is the largest possible weight: ") == noted


def test_command_shows_marks_and_writes_the_file(run_folder: Path) -> None:
    answer = call("influence", "show", str(run_folder), "--draws", "50", "--samples", "30")
    assert answer.code == 0, answer.err
    for text in ("weighs for a", "weighs for b", "weighs for c", "equal share 0.333", "30 training samples"):
        assert text in answer.out, answer.out
    written = json.loads((run_folder / FILE).read_text(encoding="utf-8"))
    assert written["clients"] == ["a", "b", "c"]
    assert written["samples"] == {"a": 30, "b": 30, "c": 30}
    assert np.shape(written["vector"]["low"]) == (3, 3)
    assert np.shape(written["matrix"]["differs"]) == (3, 3, 4)
    assert answer.out.count("≈ equal") == np.sum(~np.array(written["vector"]["differs"]))
    as_json = json.loads(call("influence", "show", str(run_folder), "--draws", "50", "--samples", "30", "--json").out)
    assert as_json == written  # the draws are the same every time


def test_what_is_fixed_is_not_counted(tmp_path: Path, make_federation: Callable[..., Federation]) -> None:
    """In fedc2i-many a client's own λ is 1/3 for all samples, and 6 of 9 are measured."""
    data = write_arrays(tmp_path / "data", make_federation((20, 20, 20)))
    settings = {"rounds": 1, "epochs": 1, "model": "lenet5", "device": "cpu"}
    (plan,) = prepare(["fedc2i-many"], settings, data)
    execute(plan, tmp_path / "run")
    found = intervals(tmp_path / "run", draws=20)
    assert torch.equal(found.fixed(), torch.eye(3, dtype=torch.bool))
    answer = call("influence", "show", str(tmp_path / "run"), "--draws", "20")
    told = int(found.differs().sum())
    assert f"{told} of 6 influences differ" in answer.out
    assert "about 0 of 6 would" in answer.out
    assert "Not counted: 3" in answer.out
    assert len([line for line in answer.out.splitlines() if line.split()[-1:] == ["fixed"]]) == 3


def test_one_client_alone(run_folder: Path) -> None:
    assert not intervals(run_folder, draws=20).fixed().any()
    answer = call("influence", "show", str(run_folder), "--draws", "20", "--client", "b")
    assert "weighs for b" in answer.out
    assert "weighs for a" not in answer.out
    assert " of 9 influences differ" in answer.out
    refused = call("influence", "show", str(run_folder), "--draws", "20", "--client", "nobody")
    assert (refused.code, "allowed are a, b, c" in refused.err) == (2, True)
    for wrong, said in (({"seed": 9}, "allowed are 0, 4"), ({"draws": 3}, "draws"), ({"samples": 1}, "samples")):
        with pytest.raises(UserError, match=said):
            intervals(run_folder, **wrong)


def test_refuses_other_data_and_methods_without_influence(
    tmp_path: Path, make_federation: Callable[..., Federation], model: Model
) -> None:
    federation = make_federation((10, 10, 10))
    for plan in prepare(["fedavg", "fedc2i"], {"rounds": 1, "epochs": 1, "device": "cpu"}, federation, model):
        execute(plan, tmp_path / plan.key)
    with pytest.raises(UserError, match="measures no influence"):
        intervals(tmp_path / "fedavg", data=federation, model=model)
    with pytest.raises(UserError, match="the data is not what it was run on"):
        intervals(tmp_path / "fedc2i", data=make_federation((10, 10, 10), seed=1), model=model)
    assert intervals(tmp_path / "fedc2i", data=federation, model=model, draws=20).samples == {"a": 10, "b": 10, "c": 10}


def test_a_batch_of_a_draw_needs_no_new_images(federation: Federation, model: Model) -> None:
    """However many draws, the model reads each image as often: cheap is part of what is promised."""
    models, calls = _models(model, 3), []
    site = Site(model, torch.tensor([5, 5, 5, 5]), torch.tensor(0), relay(models))
    train = federation.clients[1].train
    batch = Batch(train.x, train.y, torch.ones(len(train)))
    original = model.features

    def counted(params: dict[str, torch.Tensor], x: torch.Tensor, training: bool = False) -> torch.Tensor:
        calls.append(x.shape)
        return original(params, x, training)

    model.features = counted  # type: ignore[method-assign]
    try:
        for draws in (10, 100):
            calls.clear()
            weights = draw_weights(len(batch.y), draws, torch.Generator().manual_seed(0))
            resample(
                lambda w: {"λ": FedC2I().personalise(row(models, 0), batch._replace(w=w), site)[1]["influence_vector"]},
                weights,
            )
            assert len(calls) == 4  # three bodies, and the client's own features under the class losses
    finally:
        model.features = original  # type: ignore[method-assign]
