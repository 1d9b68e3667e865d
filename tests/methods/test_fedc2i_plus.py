"""FedC²I⁺: the guard by hand, its two networks, what is held out, and the same numbers on every executor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import fedc2i
from fedc2i.core.params import Params, prefixed, stack
from fedc2i.data.federation import Client, Federation, Split
from fedc2i.engine.client import RunContext
from fedc2i.methods.base import Site
from fedc2i.methods.fedavg import FedAvg
from fedc2i.methods.fedc2i_plus import (
    DEGREES,
    EVIDENCE,
    GUARD,
    KEPT,
    MEASURED,
    OWN,
    REPORTED,
    SHARES,
    STEPS,
    FedC2IPlus,
)
from fedc2i.methods.local import Local
from fedc2i.methods.math.exponentiated_gradient import descend
from fedc2i.methods.math.guard import best_logs, posterior
from fedc2i.methods.math.prototypes import spread
from fedc2i.methods.messages import Uploads, relay
from fedc2i.models.model import Model, split
from fedc2i.training.local import Batch
from support.method_checks import TRAINING, make_site, place, run, upload

ALONE = [1.0, 0.0, 0.0]


def exchanged(site: Site, own: Params, mixture: Params, batch: Batch | None = None) -> Params:
    """What a client makes of an exchange in which the others sent ``mixture``."""
    received = relay({name: tensor[None].repeat(2, *[1] * tensor.ndim) for name, tensor in mixture.items()})
    site = replace(site, received=received, position=torch.tensor(-1))
    assert site.held_out is not None
    return FedC2IPlus().personalise(own, batch or site.held_out, site)[0]


def test_influence_is_descent_on_one_half_of_the_samples_then_on_the_other(
    make_federation: Callable[..., Federation], make_model: Callable[..., Model]
) -> None:
    model, data = make_model(batch_norm=True), place(make_federation())
    models = stack([model.init(seed) for seed in range(4)])
    received = relay({name: tensor for name, tensor in models.items() if tensor.is_floating_point()})
    site, batch = make_site(model, data, received), data.train
    start, report = FedC2IPlus(guard=False, rate=3.0).personalise(model.init(0), batch, site)
    parts = [batch.take(torch.arange(first, len(batch.y), 2)) for first in (0, 1)]

    def logits(params: Params, x: Tensor) -> Tensor:
        return model.head(params, model.features({**model.init(0), **params}, x))

    vector, matrix = descend(logits, site.peers, parts, 3.0, model.trainable, model.classes)
    assert vector.std() > 0.01
    assert torch.allclose(report["influence_vector"], vector)
    assert torch.allclose(report["influence_matrix"], matrix)
    for name in received.keys() - {"valid"}:
        weights = matrix if name in model.head_names else vector
        wanted = (weights.reshape(*weights.shape, *[1] * (models[name].ndim - weights.ndim)) * models[name]).sum(0)
        assert torch.allclose(start[name], wanted, atol=1e-6), name


def test_samples_that_were_trained_on_decide_nothing(federation: Federation, model: Model) -> None:
    data = place(federation)
    held = data.train.take(torch.arange(5))
    start = {**FedC2IPlus().setup(model.init(0), model), **prefixed(OWN, model.init(0))}
    seen = exchanged(make_site(model, data, held_out=held._replace(w=torch.zeros(5))), start, model.init(1))
    for name, tensor in start.items():
        if name.startswith((SHARES, MEASURED, DEGREES, KEPT, OWN)):
            assert torch.equal(seen[name], tensor), name
    fresh = exchanged(make_site(model, data, held_out=held), start, model.init(1))
    logits = torch.stack([model.head(own, model.features(own, held.x)) for own in map(model.init, (0, 1))])
    losses = [F.cross_entropy(own, held.y) for own in logits]
    best = int(losses[1] < losses[0])
    for name, tensor in model.init(best).items():
        assert torch.allclose(fresh[KEPT + name], tensor)
    found = posterior(best_logs(logits[[0, 1, best]], held)[0], held.w)
    assert fresh[SHARES].tolist() == pytest.approx(((torch.tensor(ALONE) + found) / 2).tolist())


def test_the_best_network_so_far_is_kept(federation: Federation, model: Model) -> None:
    data = place(federation)
    site = make_site(model, data, held_out=data.train)
    good, bad = model.init(0), {name: 100 * torch.randn_like(tensor) for name, tensor in model.init(1).items()}
    broken = {name: tensor * torch.nan for name, tensor in good.items()}
    start = FedC2IPlus().setup(good, model)
    for worse in (bad, broken):
        after = exchanged(site, {**start, **worse, **prefixed(OWN, worse)}, bad)
        assert all(torch.equal(after[KEPT + name], tensor) for name, tensor in good.items())
        assert all(torch.allclose(after[name], tensor) for name, tensor in bad.items())  # it takes part in the mixture
    after = exchanged(site, {**FedC2IPlus().setup(bad, model), **broken, **prefixed(OWN, bad)}, good)
    assert all(torch.allclose(after[KEPT + name], tensor) for name, tensor in good.items())


@pytest.mark.parametrize("best", ["kept", "own", "trained", "mixture"])
def test_without_held_out_samples_the_kept_network_stays_or_follows_the_trained_one(
    federation: Federation, model: Model, best: str
) -> None:
    data = place(federation)
    held = data.train
    good, bad = model.init(0), {name: 100 * torch.randn_like(tensor) for name, tensor in model.init(1).items()}
    of = {name: good if name == best else bad for name in ("kept", "own", "trained", "mixture")}
    start = {**FedC2IPlus().setup(of["trained"], model), **prefixed(OWN, of["own"]), **prefixed(KEPT, of["kept"])}
    after = exchanged(make_site(model, data, held_out=held), start, of["mixture"])
    later = dict(zip(of, map(model.init, range(2, 6)), strict=True)) | {"kept": good}
    own = {**after, **later["trained"], **prefixed(OWN, later["own"])}
    seen = exchanged(make_site(model, data, held_out=held._replace(w=torch.zeros_like(held.w))), own, later["mixture"])
    followed = "kept" if best == "kept" else "trained"
    assert all(torch.equal(seen[KEPT + name], tensor) for name, tensor in later[followed].items())
    assert torch.equal(seen[MEASURED], after[SHARES])


def test_without_held_out_samples_a_mixture_loses_its_share_if_it_fails_on_training_samples(
    federation: Federation, model: Model
) -> None:
    """By hand: ℓ_w − ℓ_v is halved in the moving mean, which begins at 0."""
    data = place(federation)
    batch = data.train
    none = make_site(model, data, held_out=batch._replace(w=torch.zeros_like(batch.w)))
    shared, first = model.init(1), batch.take(torch.arange(0, len(batch.y), STEPS))  # of the samples of influence
    logits = model.head(shared, model.features(shared, first.x))[None]
    own_log = best_logs(logits, first)[0].mean()  # as if v had predicted held-out samples like this
    start = {**FedC2IPlus().setup(model.init(0), model), MEASURED: torch.tensor([0.6, 0.3, 0.1])}
    for better, trust in ((-0.5, 1.0), (0.0, 1.0), (0.4, np.exp(-10 * 0.4 / 2))):
        before = {**start, EVIDENCE: torch.tensor([float(own_log) + better, 10.0, 0.0])}
        after = exchanged(none, before, shared, batch)
        assert after[SHARES].tolist() == pytest.approx([0.9 - 0.3 * trust, 0.3 * trust, 0.1], abs=1e-5)
        assert torch.equal(after[MEASURED], start[MEASURED])
        assert after[EVIDENCE].tolist() == pytest.approx([float(own_log) + better, 10.0, -better / 2], abs=1e-5)


@pytest.mark.parametrize("best", ["kept", "own", "trained", "mixture"])
def test_what_held_out_samples_say_is_stored_and_used_without_them(
    federation: Federation, model: Model, best: str
) -> None:
    """Temperatures, ℓ_v and how many samples it is of; then shares that the mixture, and what u follows, lose."""
    data = place(federation)
    held, method = data.train, FedC2IPlus()
    sure = {"kept": 0.4, "own": 0.8, "trained": 1.6, "mixture": 32.0}  # that every sample is of the first class
    of = {name: constant(model, [logit, 0.0, 0.0, 0.0]) for name, logit in sure.items()}
    of[best] = constant(model, [0.0, 0.0, 0.0, -90.0])  # right: of the four classes the client has all but the last
    start = {**method.setup(of["trained"], model), **prefixed(OWN, of["own"]), **prefixed(KEPT, of["kept"])}
    start[EVIDENCE] = torch.tensor([-7.0, 3.0, -5.0])  # of rounds before
    after = exchanged(make_site(model, data, held_out=held), start, of["mixture"])
    logits = torch.stack([model.head(own, model.features(own, held.x)) for own in of.values()])
    logs, degrees = best_logs(logits, held)
    assert logs.sum(1).argmax() == list(of).index(best)
    assert [own for own, name in zip(degrees.tolist(), of, strict=True) if name != best] == [
        degree for degree, name in zip((1, 2, 4, 8), of, strict=True) if name != best
    ]
    assert after[DEGREES].tolist() == [degrees[1], degrees[3], degrees[list(of).index(best)]]
    assert after[EVIDENCE].tolist() == pytest.approx([logs[1].mean().item(), len(held.y), 0.0])

    own = {**after, MEASURED: torch.tensor([0.2, 0.5, 0.3]), EVIDENCE: torch.tensor([0.0, 1.0, 0.0])}
    none = make_site(model, data, held_out=held._replace(w=torch.zeros_like(held.w)))
    seen = exchanged(none, own, of["mixture"], held)
    trust = seen[EVIDENCE][2].exp().item()
    assert 0.2 < trust < 0.9
    kept = 0.3 * (1 if best == "kept" else trust)
    assert seen[SHARES].tolist() == pytest.approx([1 - 0.5 * trust - kept, 0.5 * trust, kept])
    assert torch.equal(seen[DEGREES], after[DEGREES])


def constant(model: Model, logits: list[float]) -> Params:
    """A network with the same logits for every sample."""
    weight, bias = model.head_names
    return {**model.init(9), weight: torch.zeros_like(model.init(9)[weight]), bias: torch.tensor(logits)}


def test_a_client_that_receives_nothing_usable_starts_from_its_own_model(federation: Federation, model: Model) -> None:
    data = place(federation)
    site, own = make_site(model, data, held_out=data.train), FedC2IPlus().setup(model.init(0), model)
    broken = {name: tensor * torch.nan for name, tensor in model.init(1).items()}
    after = exchanged(site, own, broken)
    assert all(torch.equal(after[name], tensor) for name, tensor in model.init(0).items())


def test_where_only_heads_are_sent_the_client_level_is_the_mean_of_the_class_level(
    federation: Federation, model: Model
) -> None:
    data, sent = place(federation), stack([model.init(seed) for seed in range(3)])
    site = make_site(model, data, relay({name: sent[name] for name in model.head_names}))
    _, report = FedC2IPlus(guard=False, rate=9.0).personalise(model.init(0), data.train, site)
    assert report["influence_vector"].std() > 0.001
    assert torch.allclose(report["influence_vector"], report["influence_matrix"].mean(1))


def test_three_networks_predict_by_their_shares(federation: Federation, model: Model) -> None:
    method, data = FedC2IPlus(), place(federation)
    networks = [model.init(seed) for seed in range(3)]
    params = {**networks[1], **prefixed(OWN, networks[0]), **prefixed(KEPT, networks[2])}
    site, x = make_site(model, data), data.train.x
    params |= {SHARES: torch.tensor([0.5, 0.3, 0.2]), DEGREES: torch.tensor([2.0, 4.0, 1.0])}
    parts = [torch.softmax(site.logits(own, x) / t, 1) for own, t in zip(networks, (2, 4, 1), strict=True)]
    wanted = 0.5 * parts[0] + 0.3 * parts[1] + 0.2 * parts[2]
    assert torch.allclose(method.predict(params, x, site).exp(), wanted)
    params |= {name: tensor * torch.nan for name, tensor in networks[1].items()} | {SHARES: torch.tensor(ALONE)}
    assert torch.equal(method.predict(params, x, site).argmax(1), parts[0].argmax(1))


def test_without_its_parts_it_is_fedavg(federation: Federation, model: Model) -> None:
    parts = FedC2IPlus(ld=0.0, guard=False, rate=0.0)
    one, two = (run(method, model, federation)[0] for method in (FedAvg(), parts))
    assert one.received.keys() == two.received.keys()
    for name, tensor in one.received.items():
        assert torch.equal(tensor, two.received[name])


def test_its_networks_are_those_of_two_methods(
    make_federation: Callable[..., Federation], make_model: Callable[..., Model]
) -> None:
    """Without prototypes the own network is Local's from its first weights; the shared one is that without a guard."""

    class FromOneDraw(FedC2IPlus):
        def setup(self, params: Params, model: Model) -> Params:
            return {**super().setup(params, model), **prefixed(OWN, params)}

    model, data = make_model(batch_norm=True), make_federation(validation=6)
    alone = run(Local(), model, data, rounds=3)[0].trained
    both = run(FromOneDraw(ld=0.0), model, data, rounds=3)[0].trained
    for name, tensor in alone.items():
        assert torch.allclose(both[OWN + name], tensor, atol=1e-6), name
    free, guarded = (run(FedC2IPlus(guard=own), model, data, rounds=3)[0].trained for own in (False, True))
    for name, tensor in free.items():
        assert torch.allclose(guarded[name], tensor, atol=1e-6), name


def test_the_own_network_starts_from_another_draw_of_the_seed(model: Model) -> None:
    def first(seed: int, client: str = "a", init: Literal["common", "independent"] = "common") -> Params:
        return RunContext(FedC2IPlus(), model, TRAINING, rounds=4, seed=seed).first_model(client, init)

    before, one = torch.get_rng_state(), first(0)
    assert torch.equal(torch.get_rng_state(), before)  # the caller's numbers are left alone
    others = [first(1), first(0, "a", "independent"), first(0, "b", "independent")]
    for name, tensor in model.init(0, "init").items():
        assert torch.equal(one[name], tensor)
        assert torch.equal(one[KEPT + name], tensor)
        assert torch.equal(one[OWN + name], first(0, "b")[OWN + name])
        drawn = [tensor, one[OWN + name], *(own[OWN + name] for own in others)]
        for k, own in enumerate(drawn if tensor.is_floating_point() else []):
            assert not any(torch.equal(own, other) for other in drawn[:k])


def test_loaded_weights_are_the_same_in_both_networks(model: Model) -> None:
    loaded = split(model.module_with(model.init(5)))
    first = RunContext(FedC2IPlus(), loaded, TRAINING, rounds=4, seed=0).first_model("a", "common")
    for name, tensor in model.init(5).items():
        assert torch.equal(first[name], tensor)
        assert torch.equal(first[OWN + name], tensor)


@pytest.mark.parametrize(("samples", "wanted"), [(14, 1), (100, 12), (160, 16), (400, 40), (5000, 128)])
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
    for name in (*REPORTED, "influence_vector"):
        assert other.influence(name) == pytest.approx(looped.influence(name), rel=1e-3, abs=1e-5)
    assert other.accuracy("received", "loss") == pytest.approx(looped.accuracy("received", "loss"), rel=1e-3)


def test_reports_have_one_shape_however_many_have_sent_a_model(
    make_federation: Callable[..., Federation], model: Model
) -> None:
    """One client trains in a round: two models, three, four have arrived; three are as many as there are shares."""
    data, settings = make_federation(sizes=(9,) * 5), {"rounds": 12, "clients_per_round": 1, "executor": "looped"}
    found = fedc2i.run("fedc2i-plus", data, model=model, epochs=1, **settings)
    sent = {int(np.isfinite(vector[0]).sum()) for vector in found.influence("influence_vector")}
    assert sent >= {1, 2, 3}
    shares = np.stack([found.influence(name) for name in REPORTED])
    assert shares.shape == (3, 12, 5)
    assert shares.sum(0) == pytest.approx(np.ones((12, 5)), abs=1e-5)


def test_guard_is_private(federation: Federation, model: Model) -> None:
    method = FedC2IPlus()
    start = method.setup(model.init(0), model)
    sent = method.upload(start, place(federation).train, make_site(model, place(federation)))
    private = {*GUARD, *(prefix + name for prefix in (OWN, KEPT) for name in model.init(0))}
    assert start.keys() - model.init(0).keys() == private
    assert not private & sent.keys()


def test_no_batch_of_one_is_left_when_samples_are_held_out(
    make_federation: Callable[..., Federation], model: Model
) -> None:
    data = place(make_federation(sizes=(8, 4)))  # holding out two of eight would leave a batch of five and one of one
    context = RunContext(FedC2IPlus(), model, TRAINING, rounds=4, seed=0)
    assert {len(index) for epoch in context.epochs(data, 1) for index in epoch} == {5, 2}


class Flattening(nn.Module):
    """As many are written; of no samples torch cannot tell what -1 stands for."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.body(x.view(x.size(0), -1))))


@pytest.mark.parametrize("executor", ["looped", "stacked"])
@pytest.mark.parametrize("sizes", [(1, 1), (2, 2), (1, 12)])  # one sample leaves none for the second step of descent
def test_clients_with_hardly_any_samples_take_part(sizes: tuple[int, ...], executor: str) -> None:
    one = contradicting().clients[0]
    clients = (
        Client(f"c{size}{k}", Split(one.train.x[:size], one.train.y[:size]), one.validation, one.test)
        for k, size in enumerate(sizes)
    )
    data, model = Federation("small", tuple(clients), ("a", "b")), split(Flattening, head="head")
    found = fedc2i.run("fedc2i-plus", data, model=model, rounds=2, seeds=[0], executor=executor, device="cpu")
    assert np.isfinite(found.influence("influence_vector")).all()
    spare_none = np.array(sizes) < 3
    assert (found.influence("guard_own")[:, spare_none] == 1).all()  # v alone predicts


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
    settings = {"rounds": 12, "seeds": list(range(8)), "lr": 0.01, "executor": "stacked", "evaluate_every": 0}
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


def test_one_client_cannot_lengthen_the_shared_prototypes(federation: Federation, model: Model) -> None:
    method, nobody = FedC2IPlus(), torch.zeros(3)
    sent = upload(method, model, federation)
    long = {**sent, "prototypes": 10 * sent["prototypes"]}
    download, _ = method.combine(Uploads(stack([sent, long, sent]), (0, 1, 2), nobody, nobody), {})
    assert torch.allclose(download.shared["prototypes"], sent["prototypes"])
