"""FedC²I top-k: who is sent what, by hand; what a client makes of a few models; bytes; every engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import fedc2i
from fedc2i.core.params import Params, size_in_bytes, stack
from fedc2i.data.federation import Federation
from fedc2i.engine.exchange import Server
from fedc2i.methods.base import Site
from fedc2i.methods.fedc2i import FedC2I
from fedc2i.methods.fedc2i_top_k import Chosen, FedC2ITopK, beside, choose, scores, spread
from fedc2i.methods.messages import Download, Uploads, relay
from fedc2i.models.model import Model, split
from fedc2i.training.local import Batch
from oracles import assert_same_model
from oracles.fedc2i import Problem, by_powers
from support.method_checks import in_double, run

SIZES = (12, 20, 7, 9, 13, 8)
CLIENTS = (0, 2, 3, 5, 7)
SCORES = torch.tensor(
    [
        [9.0, 0.1, 0.4, 0.3, 0.2],
        [0.2, 9.0, 0.5, 0.1, 0.4],
        [0.5, 0.3, 9.0, 0.2, 0.1],
        [0.1, 0.2, 0.3, 9.0, 0.4],
        [0.4, 0.1, 0.2, 0.3, 9.0],
    ]
)


@pytest.fixture(scope="module")
def six(make_federation: Callable[..., Federation]) -> Federation:
    return make_federation(sizes=SIZES, validation=2)


# The choice.


@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_best_others_and_one_more(k: int) -> None:
    best = [[2, 3, 4, 1], [2, 4, 0, 3], [0, 1, 3, 4], [4, 2, 1, 0], [0, 3, 2, 1]]  # read off SCORES
    chosen = choose(SCORES, CLIENTS, 3, k)
    assert chosen.shape == (5, k + 1)
    for place, own in enumerate(chosen.tolist()):
        assert own == sorted(set(own))
        assert place not in own  # though its own score is the highest
        assert set(best[place][:k]) < set(own)


def test_the_one_more_is_drawn_by_client_and_round_alone() -> None:
    def extra(round: int, clients: tuple[int, ...] = CLIENTS) -> list[int]:
        best = [2, 2, 0, 4, 0]
        return [
            next(i for i in own if i != best[k]) for k, own in enumerate(choose(SCORES, clients, round, 1).tolist())
        ]

    assert extra(4) == extra(4)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    assert extra(4) == extra(4, (0, 2, 3, 5, 8))[:4] + extra(4)[4:]  # another client's number moves its own draw only
    assert torch.equal(torch.get_rng_state(), before)
    drawn = [extra(round) for round in range(200)]
    for k, best in enumerate([2, 2, 0, 4, 0]):
        counts = np.bincount([own[k] for own in drawn], minlength=5)
        assert (counts > 0).tolist() == [i not in (k, best) for i in range(5)]
        assert counts.max() < 2 * counts[counts > 0].min()  # about a third each


def test_what_nothing_is_known_of_comes_last_and_equals_in_random_order() -> None:
    nothing = torch.full((5, 5), torch.nan)
    some = nothing.clone()
    some[0, 3] = 0.0  # received, and worth nothing
    found = scores({"influence_vector": some})
    assert all(3 in choose(found, CLIENTS, round, 1)[0] for round in range(20))
    drawn = {tuple(choose(found, CLIENTS, round, 1)[1].tolist()) for round in range(60)}
    assert drawn == {(0, 2), (0, 3), (0, 4), (2, 3), (2, 4), (3, 4)}


def test_scores_by_hand() -> None:
    vector = torch.tensor([[0.7, 0.3], [0.5, torch.nan]])
    matrix = torch.tensor([[[0.2, 0.4], [0.8, 0.6]], [[1.0, 0.0], [torch.nan, torch.nan]]])
    assert_close(scores({"a": vector}), torch.tensor([[0.7, 0.3], [0.5, -1.0]]))
    assert_close(scores({"a": matrix}), torch.tensor([[0.3, 0.7], [0.5, -1.0]]))
    assert_close(scores({"a": vector, "b": matrix}), torch.tensor([[1.0, 1.0], [1.0, -1.0]]))


# The server.


def uploads_of(model: Model, count: int = 5, round: int = 2, **more: Any) -> Uploads:
    tensors = stack([model.init(0, n) for n in range(count)])
    reports = more.pop("reports", {"influence_vector": SCORES[:count, :count]})
    return Uploads(tensors, tuple(range(count)), torch.ones(count), torch.zeros(count), round, reports)


def test_each_receives_its_own_few_models(model: Model) -> None:
    uploads = uploads_of(model)
    download, _ = FedC2ITopK(k=1).combine(uploads, {})
    index = Chosen.read(download.personal).candidates
    assert torch.equal(index, choose(SCORES, range(5), 2, 1))
    assert download.shared.keys() == {"valid"}
    for client in range(5):
        got = download.to(client)
        assert got.keys() == uploads.tensors.keys() | {"valid", "candidates"}
        for name, rows in uploads.tensors.items():
            assert torch.equal(got[name], rows[index[client]])


@pytest.mark.parametrize(
    ("k", "refresh", "round", "reported", "clients", "is_full"),
    [
        (1, 5, 2, True, 5, False),
        (1, 5, 4, True, 5, False),
        (1, 5, 5, True, 5, True),
        (1, 5, 10, True, 5, True),
        (1, 5, 11, True, 5, False),
        (1, 1, 3, True, 5, True),
        (1, 5, 2, False, 5, True),  # nobody has reported
        (2, 5, 2, True, 5, False),
        (3, 5, 2, True, 5, True),  # two less than all: these and one more are all the others
        (9, 5, 2, True, 5, True),
        (1, 5, 2, True, 4, False),
        (1, 5, 2, True, 3, True),
    ],
)
def test_rounds_of_full_exchange(
    k: int, refresh: int, round: int, reported: bool, clients: int, is_full: bool, model: Model
) -> None:
    uploads = uploads_of(model, clients, round, **({} if reported else {"reports": {}}))
    download, _ = FedC2ITopK(k=k, refresh=refresh).combine(uploads, {})
    plain, _ = FedC2I().combine(uploads, {})
    assert (not download.personal) == is_full
    if is_full:
        assert_same_model(download.to(1), plain.to(1), rtol=0, atol=0)


def test_a_server_passes_on_what_its_own_clients_said() -> None:
    seen: list[Uploads] = []

    class Noting(FedC2ITopK):
        def combine(self, uploads: Uploads, state: Params) -> tuple[Download, Params]:
            seen.append(uploads)
            return super().combine(uploads, state)

    samples, models = torch.ones(4), {"w": torch.zeros(4, 1)}
    server = Server(Noting(k=1), samples, models, sources=(0, 2, 3))
    server.mailbox.receive([0, 1, 3], {"w": torch.ones(3, 1)}, 1)
    server.combine(1)
    assert (seen[-1].round, seen[-1].reports, seen[-1].clients) == (1, {}, (0, 3))
    server.take_reports([3], [0, 3], {"influence_vector": torch.tensor([[0.25, 0.75]])})
    server.mailbox.receive([2], {"w": torch.ones(1, 1)}, 2)
    server.combine(2)
    nan = torch.nan
    want = torch.tensor([[nan, nan, nan], [nan, nan, nan], [0.25, nan, 0.75]])
    assert_close(seen[-1].reports["influence_vector"], want, equal_nan=True)
    server.take_reports(
        [3, 0], [0, 2], {"influence_vector": torch.tensor([[0.5, 0.5], [0.9, 0.1]])}
    )  # not itself this time
    server.combine(3)
    want = torch.tensor([[0.9, 0.1, nan], [nan, nan, nan], [0.5, 0.5, nan]])
    assert_close(seen[-1].reports["influence_vector"], want, equal_nan=True)


# The client.

GAMMA = 3.0


@pytest.fixture
def problem() -> Problem:
    return Problem.draw(clients=6, classes=5, samples=7, position=2, seed=5)


def personalise(
    problem: Problem, index: list[int], position: int | None = None, own: Params | None = None, **options: Any
) -> tuple[Params, dict[str, Tensor]]:
    """Client 2 of 6 receives these models; client -1 is one that the server has nothing of."""
    position = problem.position if position is None else position
    sent = {name: rows[index] for name, rows in stack(problem.models).items()}
    received = {**relay(stack(problem.models)), **sent, **Chosen(torch.tensor(index)).flat()}
    site = Site(split(problem.build, head="2"), torch.ones(5), torch.tensor(position), received)
    batch = Batch(problem.x, problem.y, torch.ones(len(problem.y)).double())
    start, report = FedC2ITopK(**{"gamma": GAMMA, "k": 1, **options}).personalise(own or problem.own, batch, site)
    return start, dict(report)


def among(problem: Problem, index: list[int]) -> Problem:
    """The same client with these models and its own, which comes first."""
    models = [problem.own, *(problem.models[i] for i in index)]
    return Problem(problem.build, problem.head, models, 0, problem.x, problem.y)


@pytest.mark.parametrize("index", [[0, 5], [1, 3, 4]])
def test_influence_among_those_received_and_its_own(problem: Problem, index: list[int]) -> None:
    start, report = personalise(problem, index)
    few = among(problem, index)
    vector, matrix = by_powers(few.client_losses(), GAMMA), by_powers(few.class_losses(), GAMMA)
    assert_same_model(start, {**few.mixed_body(vector), **few.mixed_head(matrix)}, rtol=1e-9)
    where, rest = [2, *index], [i for i in range(6) if i not in (2, *index)]
    assert_close(report["influence_vector"][where], vector)
    assert_close(report["influence_matrix"][where], matrix)
    assert_close(report["client_losses"][where], few.client_losses())
    assert_close(report["class_losses"][where], few.class_losses())
    assert (report["influence_vector"][rest] == 0).all()
    assert (report["influence_matrix"][rest] == 0).all()
    assert report["client_losses"][rest].isnan().all()
    assert report["class_losses"].shape == (6, 5)
    assert report["left_out"].tolist() == [False] * 6


@pytest.mark.parametrize(
    "options",
    [
        {"influence": "first-order", "gamma_class": 1.0},
        {"gamma": "scaled(3)"},
        {"gamma": "perplexity(2)"},
    ],
    ids=str,
)
def test_every_option_works_on_a_few(problem: Problem, options: dict[str, Any]) -> None:
    """As if the few were all."""
    index = [0, 1, 4]
    start, report = personalise(problem, index, **options)
    few = among(problem, index)
    site = Site(split(problem.build, head="2"), torch.ones(5), torch.tensor(0), relay(stack(few.models)))
    batch = Batch(problem.x, problem.y, torch.ones(len(problem.y)).double())
    want, wanted = FedC2I(**{"gamma": GAMMA, **options}).personalise(problem.own, batch, site)
    assert_same_model(start, want, rtol=0, atol=0)
    assert report.keys() == wanted.keys()
    for name, values in wanted.items():
        got = report[name] if name in ("gamma", "left_out") else report[name][[2, 0, 1, 4]]
        if name != "left_out":
            assert_close(got, values, rtol=0, atol=0, equal_nan=True)


def test_a_client_the_server_has_nothing_of_starts_from_the_mean_of_what_is_sent(model: Model) -> None:
    uploads = uploads_of(model)
    download, _ = FedC2ITopK(k=1).combine(uploads, {})
    times = torch.bincount(Chosen.read(download.personal).candidates.flatten(), minlength=5)
    want = {name: torch.einsum("k,k...->...", times / times.sum(), rows) for name, rows in uploads.tensors.items()}
    x = torch.randint(256, (5, 3, 16, 16), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    batch = Batch(x, torch.arange(5) % model.classes, torch.ones(5))
    for own in (model.init(0, 9), {name: tensor * torch.nan for name, tensor in model.init(0, 9).items()}):
        site = Site(model, torch.ones(model.classes), torch.tensor(-1), download.to(9))
        start, report = FedC2ITopK(k=1).personalise(own, batch, site)
        assert_same_model(start, want, rtol=1e-5, atol=1e-6)
        assert report["influence_vector"].shape == (5,)
        assert report["influence_vector"].isnan().all()


def test_a_client_whose_model_broke_starts_from_the_mean_of_what_it_received(problem: Problem) -> None:
    broken = {name: tensor * torch.nan for name, tensor in problem.own.items()}
    start, report = personalise(problem, [1, 4], own=broken)
    want = {name: (problem.models[1][name] + problem.models[4][name]) / 2 for name in problem.own}
    assert_same_model(start, want, rtol=1e-9)
    assert report["influence_vector"].tolist() == [0, 0.5, 0, 0, 0.5, 0]


def test_small_functions_by_hand() -> None:
    own, received = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor(9.0)}, {"a": torch.tensor([[3.0, 4.0]])}
    assert beside(own, received, torch.tensor(True))["a"].tolist() == [[1, 2], [3, 4]]
    assert beside({"a": own["a"] * torch.nan}, received, torch.tensor(False))["a"].tolist() == [[0, 0], [3, 4]]
    values, at = torch.tensor([5.0, torch.nan, 7.0]), torch.tensor([3, 0, 1])
    assert_close(spread(values, at, 5, 0.0), torch.tensor([torch.nan, 7.0, 0.0, 5.0, 0.0]), equal_nan=True)
    assert spread(values[:, None], torch.tensor([-1, 0, 1]), 2, 0.0)[1].tolist() == [7.0]


# Runs.


def test_so_many_that_it_is_everyone_is_the_plain_method(model: Model, six: Federation) -> None:
    plain, reports = run(FedC2I(), model, six, rounds=3)
    for k in (4, 5, 100):
        same, others = run(FedC2ITopK(k=k), model, six, rounds=3)
        assert_same_model(same.trained, plain.trained, rtol=0, atol=0)
        assert_same_model(same.received, plain.received, rtol=0, atol=0)
        assert [one.bytes_down for one in reports] == [two.bytes_down for two in others]


def test_repeatable_and_independent_of_what_is_evaluated(model: Model, six: Federation) -> None:
    for settings in ({}, {"clients_per_round": 3}):
        first, reports = run(FedC2ITopK(k=1), model, six, rounds=5, **settings)
        again, others = run(FedC2ITopK(k=1), model, six, rounds=5, **settings)
        seldom, _ = run(FedC2ITopK(k=1), model, six, rounds=5, evaluate_every=0, **settings)
        assert_same_model(again.trained, first.trained, rtol=0, atol=0)
        assert_same_model(seldom.trained, first.trained, rtol=0, atol=0)
        for one, two in zip(reports, others, strict=True):
            np.testing.assert_array_equal(one.influence["influence_vector"], two.influence["influence_vector"])


def test_weights_of_a_run(model: Model, six: Federation) -> None:
    """Rounds 1 and 3 are full; in the others the best of the round before, its own and one more have weight."""
    _, reports = run(FedC2ITopK(k=2, refresh=3), model, six, rounds=5)
    vectors = np.stack([report.influence["influence_vector"] for report in reports])
    matrices = np.stack([report.influence["influence_matrix"] for report in reports])
    np.testing.assert_allclose(vectors.sum(-1), 1, rtol=1e-5)
    np.testing.assert_allclose(matrices.sum(2), 1, rtol=1e-5)
    assert ((vectors > 0).sum(-1) == np.array([6, 4, 6, 4, 4])[:, None]).all()
    for t in (1, 3, 4):
        last = torch.from_numpy(vectors[t - 1] + matrices[t - 1].mean(-1))
        chosen = choose(last, range(6), t + 1, 2)
        for m in range(6):
            assert set(np.flatnonzero(vectors[t, m])) == {m, *chosen[m].tolist()}
        assert (np.isnan(reports[t].influence["client_losses"]) == (vectors[t] == 0)).all()


def test_bytes_by_hand(model: Model, six: Federation) -> None:
    size, flags, positions = size_in_bytes(model.init(0)), 6, 8
    _, plain = run(FedC2I(), model, six, rounds=1)
    assert (plain[0].bytes_down, plain[0].bytes_up) == (6 * size + flags, size)
    for k in (1, 3):
        _, reports = run(FedC2ITopK(k=k, refresh=3), model, six, rounds=4)
        few = (k + 1) * (size + positions) + flags
        assert [report.bytes_down for report in reports] == [6 * size + flags, few, 6 * size + flags, few]
        told = 4 * 6 + 4 * 6 * model.classes  # λ and Λ, with the next upload
        assert [report.bytes_up for report in reports] == [size, size + told, size + told, size + told]


FEW, NEIGHBOURS = {"clients_per_round": 3}, {"topology": "random:4"}


@pytest.mark.parametrize(
    ("kind", "options", "settings"),
    [
        ({}, {}, FEW),
        ({"batch_norm": True}, {"gamma": "scaled"}, FEW),
        ({"bias": False}, {"gamma": "ramp(8)", "influence": "first-order"}, NEIGHBOURS),
    ],
    ids=str,
)
def test_every_engine_agrees(
    kind: Any, options: Any, settings: Any, make_model: Callable[..., Model], six: Federation
) -> None:
    model, method = in_double(make_model(**kind)), FedC2ITopK(k=1, refresh=3, **options)
    looped, reports = run(method, model, six, rounds=4, **settings)
    for how, rtol, atol in (("stacked", 1e-5, 1e-9), ("workers", 0, 0))[: 1 if options else 2]:
        other, others = run(method, model, six, rounds=4, executor=how, **settings)
        assert_same_model(other.trained, looped.trained, rtol=rtol, atol=atol)
        assert_same_model(other.received, looped.received, rtol=rtol, atol=atol)
        for one, two in zip(reports, others, strict=True):
            assert one.bytes_down == two.bytes_down
            for name, values in one.influence.items():
                np.testing.assert_allclose(two.influence[name], values, rtol=1e-4, atol=1e-6)
    assert all(torch.isfinite(tensor).all() for tensor in looped.received.values())
    assert min(report.bytes_down for report in reports) < 0.7 * max(report.bytes_down for report in reports)


def test_fewer_clients_at_a_time_change_nothing(model: Model, six: Federation) -> None:
    whole, parts = (
        run(FedC2ITopK(k=1), in_double(model), six, rounds=3, executor="stacked", clients_at_once=many)[0]
        for many in (0, 4)
    )
    assert_same_model(parts.trained, whole.trained, rtol=1e-9)


def test_with_a_topology_only_neighbours_are_sent(model: Model, six: Federation) -> None:
    _, reports = run(FedC2ITopK(k=1), model, six, rounds=4, topology="random:4")
    heard = ~np.isnan(reports[0].influence["influence_vector"])
    assert (heard.sum(1) == 5).all()
    for report in reports[1:]:
        vector = report.influence["influence_vector"]
        assert (~np.isnan(vector) == heard).all()
        assert ((vector > 0).sum(1) == 3).all()


def test_a_newcomer_in_a_round_of_few(model: Model, six: Federation) -> None:
    """Four of six a round: some have not been met when others receive a few."""
    outcome, reports = run(FedC2ITopK(k=1, refresh=100), model, six, rounds=3, clients_per_round=4)
    assert all(torch.isfinite(tensor).all() for tensor in outcome.received.values())
    vectors = np.stack([report.influence["influence_vector"] for report in reports])
    strangers = np.isnan(vectors).all(-1)
    assert strangers.sum(1).tolist() == [0, 1, 0]
    np.testing.assert_allclose(np.nansum(vectors[~strangers], -1), 1, rtol=1e-5)


@pytest.mark.slow
def test_it_learns() -> None:
    result = fedc2i.run(FedC2ITopK(k=1, refresh=100), "digits", rounds=4, evaluate_every=4)
    assert result.rounds[-1].bytes_down < 0.5 * result.rounds[0].bytes_down
    assert result.rounds[-1].mean("trained") > 40
