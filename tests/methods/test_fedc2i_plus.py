"""FedC²I⁺: the guard by hand, what is held out, and the same numbers on every executor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedc2i
from fedc2i.core.params import Params
from fedc2i.data.federation import Client, Federation, Split
from fedc2i.engine.client import RunContext
from fedc2i.methods.fedc2i import FedC2I
from fedc2i.methods.fedc2i_plus import CAUTION, DESIGN, POSTERIOR, FedC2IPlus
from fedc2i.methods.math.prototypes import spread
from fedc2i.models.model import Model, split
from fedc2i.training.local import Batch
from support.method_checks import TRAINING, make_site, place, run

UNKNOWN = torch.full((7,), -1.0)


def posterior(
    models: list[Params], samples: Batch, model: Model, federation: Federation, before: Tensor = UNKNOWN
) -> tuple[np.ndarray, np.ndarray]:
    site = replace(make_site(model, place(federation)), held_out=samples)
    return tuple(own.numpy() for own in FedC2IPlus().posterior(models, before, site))


def three(model: Model) -> list[Params]:
    return [model.init(seed) for seed in range(3)]


def noise(model: Model) -> Params:
    return {name: 1e3 * torch.randn_like(tensor) for name, tensor in model.init(0).items()}


def by_hand(models: list[Params], samples: Batch, model: Model) -> np.ndarray:
    """p(a) ∝ exp(−n·L(a) − κ·a_3), one sample, temperature and point at a time."""
    powers = []
    for point in DESIGN:
        mean = {name: sum(share * own[name] for share, own in zip(point, models, strict=True)) for name in models[0]}
        logits = model.head(mean, model.features(mean, samples.x)).double().numpy()
        losses = [
            sum(np.log(np.exp(row / degree).sum()) - row[y] / degree for row, y in zip(logits, samples.y, strict=True))
            for degree in (1, 2, 4, 8)
        ]
        powers.append(np.exp(-min(losses) - CAUTION * point[2]))
    return np.array(powers) / np.sum(powers)


def test_guard_is_the_posterior_over_the_design(federation: Federation, model: Model) -> None:
    models, samples = three(model), place(federation).train.take(torch.arange(5))
    wanted = by_hand(models, samples, model)
    found, kept = posterior(models, samples, model, federation)
    assert found == pytest.approx(wanted, rel=1e-3)
    assert kept == pytest.approx(wanted, rel=1e-3)
    before = torch.full((7,), 1 / 7)
    found, kept = posterior(models, samples, model, federation, before)
    assert found == pytest.approx(wanted, rel=1e-3)
    assert kept == pytest.approx(0.8 / 7 + 0.2 * wanted, rel=1e-3)


def test_design_holds_each_model_and_each_mean() -> None:
    assert sorted(sum(share > 0 for share in point) for point in DESIGN) == [1, 1, 1, 2, 2, 2, 3]
    assert np.sum(DESIGN, 1) == pytest.approx(1)
    assert len(set(DESIGN)) == 7


def test_samples_that_were_trained_on_decide_nothing(federation: Federation, model: Model) -> None:
    seen = place(federation).train.take(torch.arange(5))._replace(w=torch.zeros(5))
    before = torch.arange(1.0, 8) / 28
    found, kept = posterior(three(model), seen, model, federation, before)
    assert (found, kept) == (pytest.approx(before.numpy()), pytest.approx(before.numpy()))
    found, kept = posterior(three(model), seen, model, federation)
    prior = np.exp(-CAUTION * np.array(DESIGN)[:, 2])
    assert found == pytest.approx(prior / prior.sum())
    assert kept == pytest.approx(UNKNOWN.numpy())


@pytest.mark.parametrize("useless", [0, 1, 2])
def test_a_model_of_no_use_is_not_taken(federation: Federation, model: Model, useless: int) -> None:
    models = three(model)
    models[useless] = noise(model)
    found, _ = posterior(models, place(federation).train, model, federation)
    assert (found @ np.array(DESIGN))[useless] < 0.02


def test_a_model_that_is_not_a_number_is_not_taken(federation: Federation, model: Model) -> None:
    models = three(model)
    models[2] = {name: tensor * torch.nan for name, tensor in models[2].items()}
    found, _ = posterior(models, place(federation).train, model, federation)
    assert np.isfinite(found).all()


def test_without_its_parts_it_is_fedc2i(federation: Federation, model: Model) -> None:
    plain = FedC2I(influence="first-order", influence_samples=64)
    parts = FedC2IPlus(ld=0.0, guard=False, gamma=5.0)
    one, two = run(plain, model, federation)[0], run(parts, model, federation)[0]
    assert one.received.keys() == two.received.keys()
    for name, tensor in one.received.items():
        assert torch.equal(tensor, two.received[name])


def test_next_round_starts_from_the_mean_and_remembers_it(federation: Federation, model: Model) -> None:
    outcome, reports = run(FedC2IPlus(), model, federation, rounds=3)
    shares = reports[-1].influence["guard"]
    assert shares.sum(-1) == pytest.approx(1)
    for name in (*model.body_names, *model.head_names):
        assert torch.equal(outcome.received[name], outcome.received[f"guard.start.{name}"])


@pytest.mark.parametrize(("samples", "wanted"), [(14, 3), (100, 25), (160, 32), (400, 40), (5000, 128)])
def test_a_tenth_is_held_out_but_neither_few_samples_nor_most(
    make_federation: Callable[..., Federation], model: Model, samples: int, wanted: int
) -> None:
    context = RunContext(FedC2IPlus(), model, replace(TRAINING, batch_size=1000), rounds=4, seed=0)
    held = context.draw_held_out(place(make_federation(sizes=(samples, 4))), 1)
    assert held is not None
    assert (held.split, len(held.rows.unique())) == ("train", wanted)


def test_samples_are_held_out_until_half_of_the_rounds(federation: Federation, model: Model) -> None:
    data = place(federation)  # 12 samples, no validation data
    context = RunContext(FedC2IPlus(), model, replace(TRAINING, batch_size=4), rounds=4, seed=0)
    held = [context.draw_held_out(data, number) for number in (1, 2, 3, 4)]
    assert [own.unseen for own in held if own] == [True, True, False, False]
    rows = {tuple(own.rows.tolist()) for own in held if own}
    assert len(rows) == 1
    first, *_ = rows.pop()
    for number, trains in ((1, False), (2, False), (3, True), (4, True)):
        batches = torch.cat([index for epoch in context.epochs(data, number) for index in epoch])
        assert (first in batches.tolist()) == trains


def test_validation_data_is_used_instead(make_federation: Callable[..., Federation], model: Model) -> None:
    data = place(make_federation(validation=6))
    context = RunContext(FedC2IPlus(), model, TRAINING, rounds=4, seed=0)
    held = context.draw_held_out(data, 4)
    assert held is not None
    assert (held.split, sorted(held.rows.tolist()), held.unseen) == ("validation", list(range(6)), True)
    batches = torch.cat(context.epochs(data, 1)[0])
    assert sorted(batches.tolist()) == list(range(data.samples))


@pytest.mark.parametrize("executor", ["stacked", "workers"])
@pytest.mark.parametrize("validation", [0, 6])
def test_every_executor_agrees(
    executor: str, validation: int, make_federation: Callable[..., Federation], model: Model
) -> None:
    data = make_federation(sizes=(12, 20, 7), validation=validation)
    settings = {"rounds": 4, "seeds": [0], "batch_size": 5}
    looped, other = (
        fedc2i.run("fedc2i-plus", data, model=model, executor=own, **settings) for own in ("looped", executor)
    )
    for name in ("guard", "influence_vector"):
        assert other.influence(name) == pytest.approx(looped.influence(name), rel=1e-3, abs=1e-5)
    assert other.accuracy("received", "loss") == pytest.approx(looped.accuracy("received", "loss"), rel=1e-3)


def test_guard_is_private(federation: Federation, model: Model) -> None:
    method = FedC2IPlus()
    start = method.setup(model.init(0), model)
    sent = method.upload(start, place(federation).train, make_site(model, place(federation)))
    assert POSTERIOR in start
    assert not any(name.startswith("guard") for name in sent)


def test_no_batch_of_one_is_left_when_samples_are_held_out(
    make_federation: Callable[..., Federation], model: Model
) -> None:
    data = place(make_federation(sizes=(8, 4)))  # holding out two of eight would leave a batch of five and one of one
    context = RunContext(FedC2IPlus(), model, TRAINING, rounds=4, seed=0)
    assert {len(index) for epoch in context.epochs(data, 1) for index in epoch} == {5, 2}


@pytest.mark.parametrize(("count", "rows"), [(3, [0, 1, 2]), (4, [0, 1, 2, 3]), (8, [0, 2, 4, 6]), (10, [0, 2, 5, 7])])
def test_prototypes_are_means_of_samples_at_equal_distances(count: int, rows: list[int]) -> None:
    for padding in (0, 5):
        y = torch.arange(count + padding)
        some = spread(Batch(y, y, (y < count).float()), torch.tensor(count), 4)
        assert some.y[some.w > 0].tolist() == rows


def contradicting() -> Federation:
    """Three clients whose classes are told apart by a sum of inputs; for the last one the classes are swapped."""
    generator = torch.Generator().manual_seed(0)

    def client(name: str, swap: bool) -> Client:
        x = torch.randn(160, 8, generator=generator)
        y = ((x[:, :4].sum(1) > 0) ^ swap).long()
        return Client(name, *(Split(x[low:high], y[low:high]) for low, high in ((0, 60), (60, 60), (60, 160))))

    return Federation("contradicting", tuple(client(f"c{k}", k == 2) for k in range(3)), ("a", "b"))


@pytest.mark.parametrize("batch_norm", [True, False])
def test_a_client_that_the_others_contradict_is_not_harmed(batch_norm: bool) -> None:
    def build() -> nn.Module:
        middle = nn.BatchNorm1d(16) if batch_norm else nn.Identity()
        return nn.Sequential(nn.Linear(8, 16), middle, nn.ReLU(), nn.Linear(16, 2))

    data = contradicting()
    settings = {"rounds": 20, "seeds": [0, 1], "lr": 0.01, "executor": "stacked", "evaluate_every": 0}
    alone, plain, guarded = (
        fedc2i.run(method, data, model=split(build, head="3"), **settings)
        for method in ("local", "fedavg", "fedc2i-plus")
    )
    last = -1  # the client in question
    floor = alone.accuracy("trained").mean(0)[last]
    assert floor > 80
    assert plain.accuracy("received").mean(0)[last] < 40  # what it is guarded against
    for point in ("received", "trained"):
        assert guarded.accuracy(point).mean(0)[last] > floor - 3
