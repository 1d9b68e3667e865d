"""FedC²I⁺: the guard by hand, what is held out, and the same numbers on every executor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F  # noqa: N812

import fedc2i
from fedc2i.data.federation import Federation
from fedc2i.engine.client import RunContext
from fedc2i.methods.fedc2i import FedC2I
from fedc2i.methods.fedc2i_plus import ALPHA, SHARES, FedC2IPlus
from fedc2i.models.model import Model
from fedc2i.training.local import Batch
from support.method_checks import TRAINING, make_site, place, run


def linear_site(model: Model, federation: Federation, samples: Batch) -> fedc2i.Site:
    return replace(make_site(model, place(federation)), held_out=samples)


def test_guard_is_the_posterior_mean_of_the_share(federation: Federation, model: Model) -> None:
    data = place(federation)
    samples = data.train.take(torch.arange(5))
    own = {**model.init(0), ALPHA: torch.tensor(-1.0)}
    mixture = {**model.init(1), ALPHA: own[ALPHA]}
    weights = []
    for share in SHARES:
        between = {name: (1 - share) * own[name] + share * mixture[name] for name in model.init(0)}
        logits = model.head(between, model.features(between, samples.x))
        weights.append(np.exp(-float(F.cross_entropy(logits, samples.y, reduction="sum"))))
    wanted = np.dot(SHARES, weights) / np.sum(weights)
    alpha, kept = FedC2IPlus().shares(own, mixture, linear_site(model, federation, samples))
    assert float(alpha) == pytest.approx(wanted, rel=1e-4)
    assert float(kept) == pytest.approx(wanted, rel=1e-4)
    _, moved = FedC2IPlus().shares({**own, ALPHA: torch.tensor(0.5)}, mixture, linear_site(model, federation, samples))
    assert float(moved) == pytest.approx(0.8 * 0.5 + 0.2 * wanted, rel=1e-4)


@pytest.mark.parametrize(("before", "used"), [(0.3, 0.3), (-1.0, 1.0)])
def test_samples_that_were_trained_on_decide_nothing(
    federation: Federation, model: Model, before: float, used: float
) -> None:
    samples = place(federation).train.take(torch.arange(5))
    seen = samples._replace(w=torch.zeros(5))
    own = {**model.init(0), ALPHA: torch.tensor(before)}
    alpha, kept = FedC2IPlus().shares(own, {**model.init(1), ALPHA: own[ALPHA]}, linear_site(model, federation, seen))
    assert (float(alpha), float(kept)) == (pytest.approx(used), pytest.approx(before))


def test_a_mixture_of_no_use_is_not_taken(federation: Federation, model: Model) -> None:
    samples = place(federation).train
    own = {**model.init(0), ALPHA: torch.tensor(-1.0)}
    noise = {name: 1e3 * torch.randn_like(tensor) for name, tensor in model.init(1).items()}
    alpha, _ = FedC2IPlus().shares(own, {**noise, ALPHA: own[ALPHA]}, linear_site(model, federation, samples))
    assert float(alpha) < 0.05


def test_without_its_parts_it_is_fedc2i(federation: Federation, model: Model) -> None:
    plain, parts = FedC2I(influence_samples=256), FedC2IPlus(ld=0.0, guard=False)
    one, two = run(plain, model, federation)[0], run(parts, model, federation)[0]
    assert one.received.keys() == two.received.keys()
    for name, tensor in one.received.items():
        assert torch.equal(tensor, two.received[name])


def test_a_tenth_is_held_out_until_half_of_the_rounds(federation: Federation, model: Model) -> None:
    data = place(federation)  # 12 samples, no validation data
    context = RunContext(FedC2IPlus(), model, replace(TRAINING, batch_size=4), rounds=4, seed=0)
    held = [context.draw_held_out(data, number) for number in (1, 2, 3, 4)]
    assert [own.unseen for own in held if own] == [True, True, False, False]
    rows = {tuple(own.rows.tolist()) for own in held if own}
    assert len(rows) == 1
    (row,) = rows.pop()
    for number, trains in ((1, False), (2, False), (3, True), (4, True)):
        batches = torch.cat([index for epoch in context.epochs(data, number) for index in epoch])
        assert (row in batches.tolist()) == trains


def test_validation_data_is_used_instead(make_federation: Callable[..., Federation], model: Model) -> None:
    data = place(make_federation(validation=6))
    context = RunContext(FedC2IPlus(), model, TRAINING, rounds=4, seed=0)
    held = context.draw_held_out(data, 4)
    assert held is not None
    assert (held.split, len(held.rows), held.unseen) == ("validation", len(data.validation.y), True)
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


def test_share_is_private(federation: Federation, model: Model) -> None:
    method = FedC2IPlus()
    start = method.setup(model.init(0), model)
    sent = method.upload(start, place(federation).train, make_site(model, place(federation)))
    assert ALPHA in start
    assert ALPHA not in sent


def test_no_batch_of_one_is_left_when_samples_are_held_out(federation: Federation, model: Model) -> None:
    data = place(federation)  # 12 samples: holding out one would leave two batches of five and one of one
    context = RunContext(FedC2IPlus(), model, TRAINING, rounds=4, seed=0)
    assert {len(index) for epoch in context.epochs(data, 1) for index in epoch} == {5, 2}
