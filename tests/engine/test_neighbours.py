"""Runs in which clients receive from their neighbours only: what comes of it, that nothing else gets through."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedc2i
from fedc2i.core.params import Params, Stacked, floating, row, size_in_bytes
from fedc2i.core.settings import TrainingSettings
from fedc2i.data.federation import Federation
from fedc2i.engine.client import RunContext
from fedc2i.engine.exchange import Server
from fedc2i.engine.executors.base import ClientBatch, LoopedExecutor, Personalised, Trained
from fedc2i.methods.base import Method
from fedc2i.methods.fedavg import FedAvg
from fedc2i.methods.fedc2i import FedC2I
from fedc2i.methods.fedfomo import FedFomo
from fedc2i.methods.fedproto import FedProto
from fedc2i.methods.local import Local
from fedc2i.methods.messages import Uploads
from fedc2i.methods.multi_krum import MultiKrum
from fedc2i.methods.pfedgraph import PFedGraph
from fedc2i.models.model import Model
from fedc2i.runs.settings import read_toml
from oracles import assert_same_model
from support.helpers import QUICK, call, write_arrays
from support.method_checks import OF_THEIR_OWN, SENDS, each_kind, in_double
from support.simulation import Run, assert_close_run, assert_same_run, simulated

TRAINING = TrainingSettings(epochs=1, batch_size=5, lr=0.01)
SIZES = (12, 20, 7, 9, 15)
RING = [(0, 1, 4), (0, 1, 2), (1, 2, 3), (2, 3, 4), (0, 3, 4)]
EVERY_METHOD = [name for name in OF_THEIR_OWN if name != "pooled"]  # which needs everyone's data


@pytest.fixture
def normed(make_model: Callable[..., Model]) -> Model:
    """A model that every method can run."""
    return make_model(layer_norm=True)


def run(
    method: Method, model: Model, federation: Federation, topology: str, seeds: Sequence[int] = (0,), **settings: Any
) -> Run:
    return simulated(method, model, federation, seeds, **{"epochs": 1, "topology": topology, **settings})


def write(folder: Path, text: str) -> str:
    path = folder / "who.txt"
    path.write_text(text)
    return str(path)


# What the executor is asked for and what it answers, by round and client.


@dataclass
class Tap:
    """What clients started from, received, trained and sent, by round; ``tamper`` may change what they send."""

    mail: dict[tuple[int, int], Params] = field(default_factory=dict)
    known: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    trained: dict[tuple[int, int], Params] = field(default_factory=dict)
    starts: dict[tuple[int, int], Params] = field(default_factory=dict)
    turns: list[int] = field(default_factory=list)
    tamper: Callable[[int, Stacked], Stacked] | None = None


@pytest.fixture
def tap(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Tap]:
    """Starts a new record of what a looped executor computes."""
    train, personalise = LoopedExecutor.train, LoopedExecutor.personalise

    def start() -> Tap:
        seen = Tap()

        def train_and_note(self: LoopedExecutor, turns: Sequence[ClientBatch], evaluate: bool) -> list[Trained]:
            seen.turns.append(len(turns))
            results = train(self, turns, evaluate)
            for k, (turn, result) in enumerate(zip(turns, results, strict=True)):
                seen.trained |= {(turn.round, m): row(result.params, n) for n, m in enumerate(turn.clients)}
                if seen.tamper is not None:
                    results[k] = replace(result, uploads=tampered(turn, result.uploads))
            return results

        def tampered(turn: ClientBatch, uploads: Stacked) -> Stacked:
            assert seen.tamper is not None
            (client,) = turn.clients
            return seen.tamper(client, uploads)

        def personalise_and_note(
            self: LoopedExecutor, turns: Sequence[ClientBatch], evaluate: bool
        ) -> list[Personalised]:
            results = personalise(self, turns, evaluate)
            for turn, result in zip(turns, results, strict=True):
                seen.mail |= {(turn.round, m): turn.download.to(m) for m in turn.clients}
                seen.known |= {(turn.round, m): turn.download.clients for m in turn.clients}
                seen.starts |= {(turn.round, m): row(result.params, n) for n, m in enumerate(turn.clients)}
            return results

        monkeypatch.setattr(LoopedExecutor, "train", train_and_note)
        monkeypatch.setattr(LoopedExecutor, "personalise", personalise_and_note)
        return seen

    return start


def same_bits(one: Params, two: Params) -> bool:
    return one.keys() == two.keys() and all(
        tensor.numpy().tobytes() == two[name].numpy().tobytes() for name, tensor in one.items()
    )


def mean_of(models: Sequence[Params]) -> Params:
    return {name: torch.stack([model[name] for model in models]).mean(0) for name in models[0]}


def test_fedavg_on_a_ring_is_the_mean_over_three(
    normed: Model, make_federation: Callable[..., Federation], tap: Callable[[], Tap]
) -> None:
    seen = tap()
    outcomes, reports = run(FedAvg(), normed, make_federation(SIZES), "ring")
    for number, (m, sources) in product((1, 2), enumerate(RING)):
        mean = mean_of([seen.trained[number, i] for i in sources])
        assert_same_model(seen.mail[number, m], mean, rtol=1e-5, atol=1e-7)
        assert_same_model(seen.starts[number, m], mean, rtol=1e-5, atol=1e-7)
        assert seen.known[number, m] == sources
    assert_same_model(row(outcomes[0].received, 3), seen.starts[2, 3], 0, 0)
    assert_same_model(row(outcomes[0].trained, 3), seen.trained[2, 3], 0, 0)
    assert reports[0].participants == tuple("abcde")


def test_weights_by_samples_are_of_the_neighbourhood(
    normed: Model, make_federation: Callable[..., Federation], tap: Callable[[], Tap]
) -> None:
    seen = tap()
    run(FedAvg(weighting="samples"), normed, make_federation(SIZES), "ring", rounds=1)
    want = sum(n * seen.trained[1, i]["head.weight"] for i, n in ((0, 12), (1, 20), (2, 7))) / 39
    torch.testing.assert_close(seen.mail[1, 1]["head.weight"], want)


def test_influence_on_a_ring_is_of_the_neighbours_alone(
    normed: Model, make_federation: Callable[..., Federation]
) -> None:
    _, reports = run(FedC2I(), normed, make_federation(SIZES), "ring")
    inside = np.array([[i in own for i in range(5)] for own in RING])
    for report in reports:
        vector, matrix = report.influence["influence_vector"], report.influence["influence_matrix"]
        assert (np.isnan(vector) == ~inside).all()
        assert (np.isnan(matrix) == ~inside[..., None]).all()
        np.testing.assert_allclose(np.nansum(vector, 1), 1, rtol=1e-5)
        np.testing.assert_allclose(np.nansum(matrix, 1), 1, rtol=1e-5)
        assert len(np.unique(vector[inside])) > 5


def test_influence_with_neighbourhoods_of_different_sizes(
    normed: Model, make_federation: Callable[..., Federation], tmp_path: Path
) -> None:
    """A client on its own is all it has; sizes 4 (as many as classes), 2 and 1 go into one array."""
    topology = write(tmp_path, "a: b, c, d\nb: c\nc:\nd: a")
    _, (report,) = run(FedC2I(), normed, make_federation(SIZES[:4]), topology, rounds=1)
    vector, matrix = report.influence["influence_vector"], report.influence["influence_matrix"]
    assert vector.shape == (4, 4)
    assert matrix.shape == (4, 4, 4)
    assert (~np.isnan(vector)).tolist() == [[True] * 4, [False, True, True, False], [False] * 2 + [True, False],
                                            [True, False, False, True]]  # fmt: skip
    assert vector[2, 2] == 1
    np.testing.assert_allclose(np.nansum(matrix, 1), 1, rtol=1e-5)


# Nothing of a client reaches one that does not receive from it.


def eager(name: str) -> Method:
    """The method; pFedGraph and Multi-Krum so that they give every neighbour weight, also one that goes another way."""
    others: dict[str, Method] = {"pfedgraph": PFedGraph(alpha=100), "multi-krum": MultiKrum(attackers=0)}
    return others.get(name) or Method.registry[name]()


def poisoned(federation: Federation, client: int) -> Federation:
    """The same federation in which one client has quite other images and labels."""
    clients = list(federation.clients)
    old = clients[client]
    train = replace(old.train, x=255 - old.train.x, y=(old.train.y + 1) % len(federation.classes))
    clients[client] = replace(old, train=train)
    return replace(federation, clients=tuple(clients))


@pytest.mark.parametrize("name", each_kind(EVERY_METHOD))
def test_other_data_reaches_no_further_than_its_neighbours(
    name: str, normed: Model, make_federation: Callable[..., Federation], tap: Callable[[], Tap]
) -> None:
    """On a ring of seven, what client 3 holds goes one step an exchange: to 2 and 4, then to 1 and 5."""
    method, federation = eager(name), make_federation((12, 20, 7, 9, 15, 6, 11), validation=2)
    one = tap()
    before = run(method, normed, federation, "ring")
    two = tap()
    after = run(method, normed, poisoned(federation, 3), "ring")
    for number, m in product((1, 2), range(7)):
        far = abs(m - 3) > number
        assert same_bits(one.mail[number, m], two.mail[number, m]) or not far
        assert same_bits(one.starts[number, m], two.starts[number, m]) or not far
        assert one.known[number, m] == two.known[number, m]
        if abs(m - 3) == 1 and not isinstance(method, Local):  # else the test would show nothing
            assert not same_bits(one.mail[number, m], two.mail[number, m])
        for kind, array in before[1][number - 1].influence.items():
            assert array[m].tobytes() == after[1][number - 1].influence[kind][m].tobytes() or not far
    for m in (0, 6):
        assert same_bits(row(before[0][0].received, m), row(after[0][0].received, m))
        assert same_bits(row(before[0][0].trained, m), row(after[0][0].trained, m))


@pytest.mark.parametrize("poison", ["huge", "nan"])
@pytest.mark.parametrize("name", each_kind(EVERY_METHOD, SENDS))
def test_a_broken_upload_reaches_no_further_than_its_neighbours(
    name: str, poison: str, normed: Model, make_federation: Callable[..., Federation], tap: Callable[[], Tap]
) -> None:
    method, federation = eager(name), make_federation(SIZES, validation=2)

    def spoil(client: int, uploads: Stacked) -> Stacked:
        factor = {"huge": 1e9, "nan": torch.nan}[poison]
        return {**uploads, **{key: factor * t for key, t in floating(uploads).items()}} if client == 2 else uploads

    one = tap()
    run(method, normed, federation, "ring", rounds=1)
    two = tap()
    two.tamper = spoil
    _, (report,) = run(method, normed, federation, "ring", rounds=1, norm_bound=0.0)
    for m in (0, 4):
        assert same_bits(one.mail[1, m], two.mail[1, m])
        assert same_bits(one.starts[1, m], two.starts[1, m])
    if not isinstance(method, Local):
        assert not any(same_bits(one.mail[1, m], two.mail[1, m]) for m in (1, 3))
        assert report.refused == (("c",) if poison == "nan" else ())


@pytest.mark.parametrize("name", each_kind(EVERY_METHOD, SENDS))
def test_nothing_gets_through_when_clients_are_stacked(
    name: str, normed: Model, make_federation: Callable[..., Federation]
) -> None:
    method, federation = Method.registry[name](), make_federation(SIZES, validation=2)
    both = [
        run(method, normed, data, "ring", rounds=1, executor="stacked")[0][0]
        for data in (federation, poisoned(federation, 2))
    ]
    for m in (0, 4):
        assert same_bits(*(row(outcome.received, m) for outcome in both))
    assert not same_bits(*(row(outcome.trained, 2) for outcome in both))


def test_not_even_first_models_of_others_are_seen() -> None:
    """With independent first models pFedGraph's server would hold the mean of all of them."""
    models = {"w": torch.tensor([[1.0], [2.0], [30.0]])}
    server = Server(PFedGraph(), torch.tensor([1, 1, 1]), models, sources=(0, 1))
    assert server.state["w"].item() == 1.5


@pytest.mark.parametrize("name", each_kind(EVERY_METHOD, SENDS))
def test_two_groups_are_two_federations(
    name: str, normed: Model, make_federation: Callable[..., Federation], tmp_path: Path
) -> None:
    """Bit for bit, over rounds: clients that hear one another only are what they would be in a run of their own."""
    method, federation = Method.registry[name](), make_federation(SIZES, validation=2)
    (tmp_path / "who").write_text("a: d\nb: c, e\nc: b, e\nd: a\ne: b, c")
    together, reports = run(method, normed, federation, str(tmp_path / "who"), rounds=3)
    for group in ("ad", "bce"):
        members = [federation.names.index(one) for one in group]
        alone, alone_reports = run(method, normed, federation.select(list(group)), "full", rounds=3)
        for k, m in enumerate(members):
            assert same_bits(row(together[0].trained, m), row(alone[0].trained, k))
            assert same_bits(row(together[0].received, m), row(alone[0].received, k))
        for got, want in zip(reports, alone_reports, strict=True):
            for point, metrics in want.metrics.items():
                assert [got.metrics[point][m] for m in members] == metrics
            for kind, array in want.influence.items():
                pairs = got.influence[kind].shape[:2] == (len(SIZES),) * 2
                where = np.ix_(members, members) if pairs else members
                assert got.influence[kind][where].tobytes() == array.tobytes(), kind


# `full` is what it was; executors agree.


@pytest.mark.parametrize("participation", ["100%", pytest.param("40%", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", each_kind(EVERY_METHOD, SENDS))
def test_all_neighbours_are_no_topology(
    name: str, participation: str, normed: Model, make_federation: Callable[..., Federation], tmp_path: Path
) -> None:
    method, federation = Method.registry[name](), make_federation(SIZES, validation=2)
    settings: dict[str, Any] = {"seeds": (0, 4), "clients_per_round": participation}
    plain = run(method, normed, federation, "full", **settings)
    assert_same_run(run(method, normed, federation, "random:4", **settings), plain)


def test_full_is_one_turn_a_seed(
    normed: Model, make_federation: Callable[..., Federation], tap: Callable[[], Tap]
) -> None:
    seen = tap()
    run(FedC2I(), normed, make_federation(SIZES), "full", seeds=(0, 1, 2), rounds=3)
    assert seen.turns == [3, 3, 3]


@pytest.mark.parametrize(
    ("topology", "participation"), [("ring", "100%"), pytest.param("random:2", "40%", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", each_kind(EVERY_METHOD, SENDS))
def test_stacked_as_one_after_the_other(
    name: str, topology: str, participation: str, normed: Model, make_federation: Callable[..., Federation]
) -> None:
    federation, method = make_federation(SIZES, validation=3), Method.registry[name]()
    settings: dict[str, Any] = {"seeds": (0, 5), "rounds": 2, "clients_per_round": participation, "evaluate_every": 2}
    stacked, looped = (
        run(method, in_double(normed), federation, topology, executor=how, **settings) for how in ("stacked", "looped")
    )
    assert_close_run(stacked, looped, rtol=1e-5)


@pytest.mark.parametrize("participation", ["100%", pytest.param("40%", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", each_kind(["fedavg", "fedc2i", "fedpac", "fedcalm", "fedala"]))
def test_workers_have_the_bits_of_one_process(
    name: str, participation: str, normed: Model, make_federation: Callable[..., Federation]
) -> None:
    federation, method = make_federation(SIZES, validation=3), Method.registry[name]()
    settings: dict[str, Any] = {"seeds": (0, 5), "workers": 2, "clients_per_round": participation}
    workers, looped = (
        run(method, normed, federation, "random:2", executor=how, **settings) for how in ("workers", "looped")
    )
    assert_same_run(workers, looped)


@pytest.mark.parametrize("executor", ["looped", "stacked"])
def test_a_seed_s_numbers_do_not_depend_on_the_others(
    executor: str, normed: Model, make_federation: Callable[..., Federation]
) -> None:
    federation, model = make_federation(SIZES), in_double(normed)
    together, _ = run(FedC2I(), model, federation, "random:2", seeds=(3, 0, 11), executor=executor)
    for seed in (3, 0, 11):
        alone, _ = run(FedC2I(), model, federation, "random:2", seeds=(seed,), executor=executor)
        assert_same_model(together[seed].received, alone[seed].received, rtol=1e-6, atol=1e-9)


def test_parts_of_a_stack_and_dropout_on_a_ring(
    make_model: Callable[..., Model], make_federation: Callable[..., Federation]
) -> None:
    federation, model = make_federation(SIZES), in_double(make_model(dropout=0.5))
    both = [run(FedAvg(), model, federation, "ring", seeds=seeds, executor="stacked")[0][0] for seeds in ((0,), (7, 0))]
    assert_same_model(both[0].received, both[1].received, 0, 0)
    plain = in_double(make_model())
    parts = [
        run(FedC2I(), plain, federation, "ring", executor="stacked", clients_at_once=most)[0][0] for most in (0, 2)
    ]
    assert_same_model(parts[0].received, parts[1].received, rtol=1e-8, atol=1e-12)


# Not everyone takes part in every round.


@dataclass(frozen=True)
class Noting(FedAvg):
    """FedAvg that notes what the server is handed."""

    seen: list[Uploads] = field(default_factory=list)

    def combine(self, uploads: Uploads, state: Params) -> Any:
        self.seen.append(uploads)
        return super().combine(uploads, state)


@dataclass(frozen=True)
class NotingAll(Noting):
    """The same over the latest upload of everyone."""

    keeps_uploads = True


def test_with_some_clients_a_round_only_neighbours_that_took_part_count(
    normed: Model, make_federation: Callable[..., Federation], tap: Callable[[], Tap]
) -> None:
    """A client none of whose neighbours took part has what it had: the last mean, or its first model."""
    seen, method = tap(), Noting()
    federation, rounds = make_federation((12, 20, 7, 9, 15, 6, 11)), 5
    _, reports = run(method, normed, federation, "ring", rounds=rounds, clients_per_round=1)
    assert all(len(uploads.clients) == 1 and uploads.ages.tolist() == [0] for uploads in method.seen)
    assert len(method.seen) == 3 * rounds  # never called with nothing
    last = {m: normed.init(0, "init") for m in range(7)}
    silent = 0
    for report in reports:
        (chosen,) = (federation.names.index(name) for name in report.participants)
        for m in range(7):
            near = (m - chosen) % 7 in (0, 1, 6)
            if near:
                last[m] = seen.trained[report.round, chosen]
                assert seen.known[report.round, m] == (chosen,)
            silent += not near
            assert same_bits(seen.starts[report.round, m], last[m])
    assert silent > 0


def test_latest_uploads_of_neighbours_are_kept_with_their_ages(
    normed: Model, make_federation: Callable[..., Federation], tap: Callable[[], Tap]
) -> None:
    seen, method, federation = tap(), NotingAll(), make_federation(SIZES)
    _, reports = run(method, normed, federation, "ring", rounds=6, clients_per_round=2)
    calls, sent = iter(method.seen), {}
    for report in reports:
        for name in report.participants:
            sent[federation.names.index(name)] = report.round
        for m, sources in enumerate(RING):
            known = tuple(i for i in sources if i in sent)
            if not known:
                assert seen.known[report.round, m] == ()
                continue
            uploads = next(calls)
            assert uploads.clients == known == seen.known[report.round, m]
            assert uploads.ages.tolist() == [report.round - sent[i] for i in known]
            mean = mean_of([seen.trained[sent[i], i] for i in known])
            assert_same_model(seen.mail[report.round, m], mean, rtol=1e-5, atol=1e-7)
    assert next(calls, None) is None


def test_influence_of_neighbours_not_heard_of_yet_is_nan(
    normed: Model, make_federation: Callable[..., Federation]
) -> None:
    federation, sent = make_federation(SIZES), set[int]()
    _, reports = run(FedC2I(), normed, federation, "ring", rounds=4, clients_per_round=1)
    for report in reports:
        sent |= {federation.names.index(name) for name in report.participants}
        want = np.array([[i in own and i in sent for i in range(5)] for own in RING])
        assert (~np.isnan(report.influence["influence_vector"]) == want).all()


def test_a_server_of_a_circle_reads_nothing_else() -> None:
    samples, models = torch.tensor([1, 2, 3]), {"w": torch.zeros(3, 1)}
    server = Server(method := NotingAll(), samples, models, sources=(0, 2))
    server.mailbox.receive([1], {"w": torch.tensor([[5.0]])}, 1)
    assert server.combine(1).shared == {}
    assert method.seen == []
    server.mailbox.receive([1, 2], {"w": torch.tensor([[7.0], [9.0]])}, 2)
    assert server.combine(2).shared["w"].item() == 9
    assert method.seen[0].samples.tolist() == [3]


def test_uploads_are_clipped_around_what_the_own_circle_was_sent(
    normed: Model, make_federation: Callable[..., Federation], tmp_path: Path
) -> None:
    """With next to no room every upload is its reference: c and d stay at the mean of their own first models."""
    federation, groups = make_federation(SIZES[:4]), write(tmp_path, "a: b\nb: a\nc: d\nd: c")
    outcomes, _ = run(FedAvg(), normed, federation, groups, init="independent", clip=1e-9)
    firsts = RunContext(FedAvg(), normed, TRAINING, 2, 0).first_models(federation.names, "independent")
    for name, first in firsts.items():
        for client, group in ((1, first[:2]), (3, first[2:])):
            torch.testing.assert_close(outcomes[0].received[name][client], group.mean(0), rtol=0, atol=1e-6)


# What is reported.


def test_bytes_down_is_the_mean_of_what_clients_receive(
    normed: Model, make_federation: Callable[..., Federation], tmp_path: Path
) -> None:
    federation, size = make_federation(SIZES[:4]), size_in_bytes(normed.init(0))
    flagged = size + 1  # a relayed model comes with a flag that says it is sound
    down = {
        topology: run(FedFomo(), normed, federation, topology, rounds=1)[1][0].bytes_down / flagged
        for topology in ("full", "ring", "random:1", write(tmp_path, "a: b, c, d\nb: a\nc: d, a\nd:"))
    }
    assert list(down.values()) == pytest.approx([4, 3, 2, (4 + 2 + 3 + 1) / 4], rel=1e-4)  # whole bytes
    pair = write(tmp_path, "a: b, c, d\nb: a\nc: d\nd: c")  # c and d receive the same
    assert run(FedFomo(), normed, federation, pair, rounds=1)[1][0].bytes_down == (4 + 2 + 2 + 2) * flagged // 4
    assert run(FedAvg(), normed, federation, "ring", rounds=1)[1][0].bytes_down == size


def test_scores_come_in_the_order_of_the_table(
    normed: Model, make_federation: Callable[..., Federation], tmp_path: Path
) -> None:
    """Circles are not in the order of clients; local training does not mind."""
    federation = make_federation(SIZES, validation=2)
    topology = write(tmp_path, "a: e\nb: c\nc: b\nd:\ne: a")
    for participation in ("100%", "40%"):
        settings: dict[str, Any] = {"rounds": 3, "clients_per_round": participation}
        alone = run(Local(), normed, federation, topology, **settings)
        assert_same_run(alone, run(Local(), normed, federation, "full", **settings))


def test_prototypes_of_neighbours_alone(
    normed: Model, make_federation: Callable[..., Federation], tap: Callable[[], Tap], tmp_path: Path
) -> None:
    """Client a has no sample of the last class: on its own it knows no prototype of it."""
    seen = tap()
    run(FedProto(), normed, make_federation(SIZES[:3]), write(tmp_path, "a:\nb: c\nc: a, b"), rounds=1)
    assert seen.mail[1, 0]["known"].tolist() == [True, True, True, False]
    assert seen.mail[1, 1]["known"].all()


# From Python and from the command line.


def test_from_python(make_federation: Callable[..., Federation], tmp_path: Path) -> None:
    federation, out = make_federation(SIZES), tmp_path / "run"
    settings: dict[str, Any] = {"model": "lenet5", "rounds": 1, "epochs": 1, "executor": "looped"}
    result = fedc2i.run("fedc2i", federation, topology="ring", out=out, seeds=(0, 1), **settings)
    assert read_toml(out / "config.toml")["topology"] == "ring"
    assert np.isnan(result.influence()[-1]).sum() == 10
    assert read_toml(out / "config.toml")["clients_per_round"] == "100%"
    plain = fedc2i.run("fedavg", federation, **settings)
    assert plain.config.topology == "full"
    same = fedc2i.run("fedavg", federation, topology="full", **settings)
    assert_same_run((plain.outcomes, plain.rounds), (same.outcomes, same.rounds))


def test_from_the_command_line(make_federation: Callable[..., Federation], tmp_path: Path) -> None:
    """As an option, as a setting, and from the run's own configuration: the same run."""
    data = write_arrays(tmp_path / "data", make_federation(SIZES))
    short = ("fedc2i", "--data", data, *QUICK)
    ways = {
        "option": (*short, "--topology", "ring"),
        "set": (*short, "--set", "topology=ring"),
        "again": ("--config", str(tmp_path / "option" / "config.toml")),
    }
    found = {}
    for name, given in ways.items():
        answer = call("run", *given, "--out", str(tmp_path / name))
        assert answer.code == 0, answer.err
        assert read_toml(tmp_path / name / "config.toml")["topology"] == "ring"
        found[name] = np.load(tmp_path / name / "influence.npz")
    assert found["option"].files
    for key in found["option"].files:
        for other in ("set", "again"):
            np.testing.assert_array_equal(found["option"][key], found[other][key])


def test_compare_from_the_command_line_with_a_file(make_federation: Callable[..., Federation], tmp_path: Path) -> None:
    data, file = write_arrays(tmp_path / "data", make_federation(SIZES[:3])), write(tmp_path, "a: b\nb: c\nc: a\n")
    answer = call(
        "compare", "fedavg", "fedpac", "--data", data, *QUICK, "--topology", file, "--out", str(tmp_path / "x")
    )
    assert answer.code == 0, answer.err
    assert {read_toml(path)["topology"] for path in (tmp_path / "x").rglob("config.toml")} == {file}
