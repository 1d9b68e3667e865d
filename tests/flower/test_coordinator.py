"""The coordinator over sites that exchange nothing but Flower messages: the same numbers, whatever goes wrong."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr.app")
from fakes import Stage, assert_same_rounds, changed, identity, look_at_once, node, with_report  # noqa: F401
from flwr.app import ConfigRecord, Message, RecordDict

from fedc2i.core.errors import UserError
from fedc2i.data.federation import Federation
from fedc2i.engine import checkpoint
from fedc2i.engine.records import Round
from fedc2i.flower import wire
from fedc2i.flower.answer_collector import Policy
from fedc2i.flower.connections import SiteConnections
from fedc2i.flower.coordinator import Coordinator
from fedc2i.flower.message_format import Answer
from fedc2i.methods.base import Method, get_method
from fedc2i.methods.fedavg import FedAvg
from fedc2i.methods.fedc2i import FedC2I
from fedc2i.methods.fedc2i_top_k import FedC2ITopK
from fedc2i.models.model import Model

both_methods = pytest.mark.parametrize("method", [FedAvg(), FedC2I()], ids=["fedavg", "fedc2i"])


@pytest.mark.parametrize(
    "name", [name for name, own in sorted(Method.registry.items()) if name != "fedbn" and not own.pools_data]
)
def test_every_method_gives_the_numbers_of_the_in_process_engine(
    name: str, model: Model, federation: Federation
) -> None:
    stage = Stage(get_method(name)(), model, federation, rounds=2)
    assert_same_rounds(stage.run(), stage.in_process())


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        (FedC2I(), {"clients_per_round": 2}),
        (FedC2I(), {"topology": "ring"}),
        (FedC2I(), {"init": "independent", "evaluate_every": 0}),
        (FedC2I(), {"patience": 2, "evaluate_every": 2}),
        (FedAvg(), {"patience": 1}),
        (FedAvg(), {"evaluate_every": 2, "clients_per_round": 1}),
    ],
    ids=str,
)
def test_settings_mean_the_same(
    method: Method, settings: dict[str, Any], model: Model, make_federation: Callable[..., Federation]
) -> None:
    stage = Stage(method, model, make_federation(sizes=(12, 9, 7), validation=5), rounds=5, **settings)
    assert_same_rounds(stage.run(), stage.in_process())


# How models travel.


def test_bytes_are_those_of_the_models_and_half_precision_halves_them(model: Model, federation: Federation) -> None:
    full = Stage(FedC2I(), model, federation).run()[-1]
    one = sum(tensor.numel() * 4 for tensor in model.init(0).values())
    assert one < full.bytes_up < one + 2000
    assert 3 * one < full.bytes_down < 3 * one + 1000
    half = Stage(FedC2I(), model, federation, Policy(20.0, poll=0.0, half=True)).run()[-1]
    assert half.bytes_up < 0.55 * full.bytes_up
    assert half.bytes_down < 0.55 * full.bytes_down
    for point in ("received", "trained"):
        assert half.mean(point, "loss") == pytest.approx(full.mean(point, "loss"), abs=5e-3)


def test_nothing_but_the_upload_scores_and_diagnostics_leaves_a_site(model: Model, federation: Federation) -> None:
    stage = Stage(get_method("fedrep")(), model, federation)
    seen: list[set[str]] = []

    def look(reply: Message) -> Message:
        seen.append({*reply.content, *(wire.unpack(reply.content["upload"]) if "upload" in reply.content else ())})
        return reply

    stage.grid.nodes[100].spoil = look
    stage.run()
    assert any("upload" in names for names in seen)
    assert set().union(*seen) <= {"introduction", "upload", "report", "metrics", *model.body_names}


def test_a_site_is_sent_no_model_that_the_topology_keeps_from_it(
    model: Model, make_federation: Callable[..., Federation]
) -> None:
    stage = Stage(FedC2I(), model, make_federation(sizes=(5, 6, 7, 8, 9)), rounds=3, topology="ring")
    uploads: dict[int, list[torch.Tensor]] = {number: [] for number in stage.grid.nodes}
    sent: list[tuple[int, torch.Tensor]] = []
    for number, own in stage.grid.nodes.items():

        def take(answer: Answer, number: int = number) -> Answer:
            uploads[number] += [answer.upload["hidden.weight"]] if answer.upload else []
            return answer

        own.spoil = changed(take)

    def look(to: int, message: Message) -> None:
        shared = wire.unpack(message.content["shared"]) if "shared" in message.content else {}
        sent.extend([(to, shared["hidden.weight"])] if shared else [])

    stage.grid.before = look
    stage.run()
    assert len(sent) == 5 * 3
    for to, stack in sent:
        allowed = {to, 100 + (to - 101) % 5, 100 + (to - 99) % 5}
        came_from = {n for n, own in uploads.items() for one in own for row in stack if torch.equal(one, row)}
        assert came_from == allowed


# What goes wrong at a site.


def of_upload(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Message], Message]:
    return changed(lambda own: replace(own, upload={name: change(tensor) for name, tensor in own.upload.items()}))


nan_upload = of_upload(lambda tensor: torch.full_like(tensor, torch.nan))
other_architecture = of_upload(lambda tensor: tensor[:1])


def garbage(reply: Message) -> Message:
    if "introduction" not in reply.content:
        reply.content = RecordDict({"upload": ConfigRecord({"a": 1})})
    return reply


@pytest.mark.parametrize(
    ("spoil", "line"),
    [
        (nan_upload, "round 1: the upload of b is not finite; ignored"),
        (other_architecture, "round 1: the upload of b is of another architecture; ignored"),
        (garbage, "round 1: b failed: "),
    ],
)
@both_methods
def test_a_broken_site_is_ignored_and_named(
    method: Method, spoil: Any, line: str, model: Model, federation: Federation
) -> None:
    stage = Stage(method, model, federation)
    stage.grid.nodes[101].spoil = spoil
    reports = stage.run()
    assert len(reports) == 2
    assert any(said.startswith(line) for said in stage.said), stage.said
    for point in ("received", "trained"):
        assert np.isfinite([reports[-1].metrics[point][k]["accuracy"] for k in (0, 2)]).all()
    if spoil is garbage:
        assert reports[0].participants == ("a", "c")
        assert reports[-1].metrics["trained"][1] == {}
    else:
        assert reports[0].refused == ("b",)


@pytest.mark.parametrize("number", [100, 101])
def test_of_two_sites_the_honest_one_is_kept_whichever_comes_first(
    number: int, model: Model, make_federation: Callable[..., Federation]
) -> None:
    stage = Stage(FedC2I(), model, make_federation(sizes=(6, 7)))
    stage.grid.nodes[number].spoil = other_architecture
    odd = "ab"[number - 100]
    assert [report.refused for report in stage.run()] == [(odd,), (odd,)]


SHAPES = [(0, 2**30, 2**30), (), (5, 4)]  # impossible, a number, one of each client and class


@pytest.mark.parametrize(
    ("method", "topology"),
    [(FedC2I(), "ring"), (FedC2ITopK(k=1), "full")],  # the latter's server reads them
    ids=["all-ring", "top_k"],
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_report_in_a_form_that_others_do_not_use_is_dropped(
    shape: tuple[int, ...], method: Method, topology: str, model: Model, make_federation: Callable[..., Federation]
) -> None:
    stage = Stage(method, model, make_federation(sizes=(5, 6, 7, 8, 9)), topology=topology, rounds=3)
    assert len(stage.federation.classes) == 4
    stage.grid.nodes[100].spoil = with_report({"influence_vector": torch.ones(shape)})
    vector = stage.run()[-1].influence["influence_vector"]
    assert vector.shape == (5, 5)
    assert np.isnan(vector[0]).all()
    assert np.isfinite(vector[1:]).any(1).all()


def test_sites_that_invent_diagnostics_do_not_fill_the_memory(model: Model, federation: Federation) -> None:
    """Each may name 32 that no other has; of all together no more than 32 are kept, those that most sites give."""
    stage = Stage(FedC2I(), model, federation, rounds=1)
    for k, name in enumerate(federation.names):

        def invent(answer: Answer, name: str = name) -> Answer:
            more = {f"{name}{number}": torch.ones(3, 4) for number in range(32 - len(answer.report))}
            return replace(answer, report={**more, **answer.report})

        stage.grid.nodes[100 + k].spoil = changed(invent)
    (report,) = stage.run()
    assert set(stage.in_process()[0].influence) < set(report.influence)
    assert len(report.influence) == 32


def test_large_diagnostics_are_kept_of_the_last_round_only(
    model: Model, federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedc2i.engine.records.LARGE", 3 * 3 * 4 * 4 - 1)  # Λ of 3 clients and 4 classes is large
    stage = Stage(FedC2I(), model, federation, rounds=3)
    reports = stage.run()
    assert [("influence_matrix" in report.influence) for report in reports] == [False, False, True]
    assert_same_rounds(reports, stage.in_process())


def test_a_failing_site_says_why_in_one_line(model: Model, make_federation: Callable[..., Federation]) -> None:
    method = FedC2I(influence_split="validation")  # which no site has
    stage = Stage(method, model, make_federation(), Policy(0.2, min_sites=0, poll=0.0), rounds=1)
    stage.run()
    lines = [line for line in stage.said if " failed: " in line]
    assert lines
    assert all("\n" not in line and line.startswith("round 2: ") for line in lines)


def test_a_dead_site_is_missed_once_and_its_model_stays(model: Model, federation: Federation) -> None:
    stage = Stage(FedC2I(), model, federation, rounds=5)
    gone = {}

    def kill(number: int, message: Message) -> None:
        rounds = [kind for to, kind in stage.grid.log if to == 100 and kind == "train"]
        if len(rounds) == 3 and 101 in stage.grid.nodes:
            gone[101] = stage.grid.nodes.pop(101)
        if len(rounds) == 5 and gone:
            stage.grid.nodes[201] = gone.pop(101)  # another number, as an unauthenticated node has
            stage.grid.nodes[100].delay = 3  # so that the round is still going on

    stage.grid.before = kill
    reports = stage.run()
    assert ["".join(report.participants) for report in reports] == ["abc", "abc", "ac", "ac", "abc"]
    assert np.isfinite(reports[2].influence["influence_vector"][:, 1][[0, 2]]).all()  # still weighed, from round 2
    assert sum(line.startswith("round 3: 2 of 3 sites answered; b ") for line in stage.said) == 1
    assert "b is back" in stage.said
    assert any(line.startswith("round 5: b takes part again") for line in stage.said), stage.said


def test_a_slow_site_is_not_waited_for_and_its_late_model_is_used(model: Model, federation: Federation) -> None:
    stage = Stage(FedC2I(), model, federation, Policy(0.05, poll=0.001), rounds=4)
    rounds = []

    def slow_down(number: int, message: Message) -> None:
        rounds.extend([number] * (number == 100))
        stage.grid.nodes[102].delay = 10**9 if len(rounds) == 2 else 0
        if len(rounds) == 3:
            stage.grid.release()

    stage.grid.before = slow_down
    reports = stage.run()
    assert ["".join(report.participants) for report in reports[:2]] == ["abc", "ab"]
    assert "round 2: 2 of 3 sites answered; c did not answer within 0 s" in stage.said
    assert any("c answered round 2; its model is used" in line for line in stage.said), stage.said


@pytest.mark.parametrize(
    ("spoil", "needed", "line"),
    [
        ([lambda reply: None], 3, "round 1: 2 of the 3 sites needed answered within .*the same command resumes"),
        ([nan_upload, nan_upload], 2, "round 1: 1 of the 2 sites needed answered"),
    ],
    ids=["no answer", "unusable answers"],
)
def test_too_few_usable_answers_end_the_run_with_a_line(
    spoil: list[Any], needed: int, line: str, model: Model, federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedc2i.flower.answer_collector.TRIES", 2)
    monkeypatch.setattr("fedc2i.flower.answer_collector.PAUSE", 0.0)
    stage = Stage(FedAvg(), model, federation, Policy(0.05, min_sites=needed, poll=0.0))
    for k, own in enumerate(spoil):
        stage.grid.nodes[100 + k].spoil = own
    with pytest.raises(UserError, match=line):
        stage.run()


def test_a_method_that_fails_everywhere_ends_the_run_soon(
    model: Model, federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedc2i.flower.answer_collector.PAUSE", 0.01)

    class Broken(FedAvg):
        def loss(self, params: Any, batch: Any, site: Any) -> torch.Tensor:
            raise ValueError("oops")

    stage = Stage(Broken(), model, federation, Policy(600.0, poll=0.0), rounds=1)
    with pytest.raises(UserError, match=r"round 1: 0 of the 1 sites needed answered within 0 s"):
        stage.run()
    assert stage.said.count("round 1: b failed: ValueError: oops") == 3


def test_no_more_sites_are_needed_than_train(model: Model, federation: Federation) -> None:
    """All three are asked for their scores, one of them for a model."""
    stage = Stage(FedAvg(), model, federation, Policy(0.2, min_sites=3, poll=0.0), clients_per_round=1)
    assert [len(report.participants) for report in stage.run()] == [1, 1]
    assert not any("needed" in line for line in stage.said)


def test_a_late_model_does_not_take_the_place_of_a_newer_one(model: Model, federation: Federation) -> None:
    coordinator = Stage(FedC2I(), model, federation).coordinator
    list(coordinator.rounds())
    kept = coordinator._exchange.mailbox.of([1])
    late = Answer({name: torch.zeros_like(own[0]) for name, own in kept.items()})
    for number, taken in ((1, False), (2, False), (3, True)):
        assert coordinator._take_late(1, late, number) is taken
        now = coordinator._exchange.mailbox.of([1])
        assert all(torch.equal(own, late.upload[name][None] if taken else kept[name]) for name, own in now.items())


def test_a_late_score_is_not_taken_for_training(model: Model, make_federation: Callable[..., Federation]) -> None:
    federation = make_federation(sizes=(12, 9, 7), validation=4)
    stage = Stage(FedC2I(), model, federation, Policy(0.05, poll=0.001), rounds=4, patience=3)
    asked = []

    def slow(number: int, message: Message) -> None:
        asked.extend([number] * (number == 102))
        stage.grid.nodes[102].delay = 10**9 if len(asked) == 2 else 0  # round 1, and now the scores of its exchange
        if number == 100 and len(asked) >= 2:
            stage.grid.release()

    stage.grid.before = slow
    assert not any(report.refused for report in stage.run())
    assert not any("another architecture" in line for line in stage.said), stage.said


def test_a_site_that_returns_as_another_node_is_asked_again_in_the_same_round(
    model: Model, federation: Federation
) -> None:
    stage = Stage(FedC2I(), model, federation, Policy(60.0, poll=0.0))

    def move(number: int, message: Message) -> None:
        if number == 101 and message.metadata.message_type == "train":
            moved = stage.grid.nodes.pop(101)
            stage.grid.nodes[201] = moved
            stage.grid.nodes[101] = node(101, moved.app)
            stage.grid.nodes[101].spoil = lambda reply: None  # the old one never answers, and is gone at the next look
            stage.grid.before = lambda to, sent: stage.grid.nodes.pop(101, None) and None

    stage.grid.before = move
    began = time.monotonic()
    assert [report.participants for report in stage.run()] == [tuple("abc"), tuple("abc")]
    assert time.monotonic() - began < 30


# Who is who.


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ([b"A", b"B", b"B"], "a site is rejected: it calls itself 'c', but holds another site's key"),
        ([b"A", b"A", b"B"], "a site is rejected: it calls itself 'a', which is online already"),
    ],
    ids=["another key", "twice"],
)
def test_a_node_can_only_be_the_one_site_whose_key_it_holds(
    keys: list[bytes], line: str, model: Model, federation: Federation
) -> None:
    stage, said = Stage(FedAvg(), model, federation), list[str]()
    for own, key in zip(stage.grid.nodes.values(), keys, strict=True):
        own.key = key
    if keys[0] == keys[1]:
        stage.grid.nodes[101].app = stage.grid.nodes[100].app
    connections = SiteConnections(stage.grid, said.append, {b"A": "a", b"B": "b", b"C": "c"})
    connections.collect()
    assert line in said
    assert "c" not in connections.sites


# A coordinator that is killed and started again.


RESUMED = ("fedavg", "fedc2i", "fedproto", "pfedgraph", "fedcalm", "fedpac", "fedc2i-top")
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "partial": {"clients_per_round": 1},
    "ring": {"topology": "ring"},
    "patient": {"patience": 3},
}
# Methods with a state at the clients, at the server, and at both, each in ways of its own; the slow tests have all.
QUICK = {("fedc2i", "partial"), ("fedc2i", "ring"), ("fedcalm", "patient"), ("fedc2i-top", "plain")}


@pytest.mark.parametrize(
    ("name", "way"),
    [
        pytest.param(name, way, marks=() if (name, way) in QUICK else pytest.mark.slow)
        for name in RESUMED
        for way in WAYS
    ],
)
def test_resumed_after_any_round_it_ends_with_the_same_numbers(
    name: str, way: str, model: Model, make_federation: Callable[..., Federation], tmp_path: Path
) -> None:
    federation, settings = make_federation(sizes=(12, 9, 7), validation=4), WAYS[way]
    method = FedC2ITopK(k=1, refresh=3) if name == "fedc2i-top" else get_method(name)()
    want = Stage(method, model, federation, rounds=5, **settings).run()
    for killed in (1, 4):
        stage, reports = Stage(method, model, federation, rounds=5, **settings), list[Round]()
        folder = tmp_path / f"{killed}"

        def keep(stage: Stage = stage, folder: Path = folder) -> None:
            state = stage.coordinator.checkpoint()
            assert state is not None
            json.dumps(state.values)
            checkpoint.save(folder, *state)

        course = stage.coordinator.rounds(keep)
        while not (folder / f"round{killed:06d}.json").exists():
            reports.append(next(course))
            if len(reports) == len(want):
                break
        course.close()
        if killed == 4:  # the newest one is damaged: the sites are two rounds ahead
            for path in folder.glob(f"round{killed:06d}.*"):
                path.unlink()
        saved = checkpoint.load(folder)
        assert saved is not None
        stage.coordinator = stage.new_coordinator()
        stage.coordinator.restore(saved)
        got = [report for report in reports if report.round < saved.round] + stage.run()
        assert_same_rounds(got, want)


def test_a_checkpoint_of_other_sites_is_refused(model: Model, make_federation: Callable[..., Federation]) -> None:
    stage = Stage(FedAvg(), model, make_federation(), rounds=1)
    stage.run()
    state = stage.coordinator.checkpoint()
    assert state is not None
    other = Stage(FedAvg(), model, make_federation(sizes=(5, 6)), rounds=1)
    with pytest.raises(UserError, match="the run was started with the sites a, b, c"):
        other.coordinator.restore(state)


def test_a_round_without_a_usable_upload_is_resumed_as_it_went_on(
    model: Model, federation: Federation, tmp_path: Path
) -> None:
    def stage() -> Stage:
        made = Stage(FedAvg(), model, federation, Policy(20.0, min_sites=0, poll=0.0), rounds=3)
        for own in made.grid.nodes.values():
            asked: list[Message] = []

            def second(reply: Message, asked: list[Message] = asked) -> Message:
                asked += [reply] * ("upload" in reply.content)
                return nan_upload(reply) if len(asked) == 2 else reply

            own.spoil = second
        return made

    want = stage().run()
    assert want[1].refused == ("a", "b", "c")
    cut = stage()
    course = cut.coordinator.rounds(lambda: checkpoint.save(tmp_path, *(cut.coordinator.checkpoint() or ())))
    first = next(course)
    next(course)
    course.close()
    saved = checkpoint.load(tmp_path)
    assert saved is not None
    assert saved.round == 2
    cut.coordinator = cut.new_coordinator()
    cut.coordinator.restore(saved)
    assert_same_rounds([first, *cut.run()], want)


def test_a_resumed_round_keeps_the_reason_of_a_rejected_upload(model: Model, federation: Federation) -> None:
    stage = Stage(FedAvg(), model, federation)
    stage.grid.nodes[101].spoil = nan_upload
    states = list[checkpoint.Checkpoint | None]()
    for _ in stage.coordinator.rounds(lambda: states.append(stage.coordinator.checkpoint())):
        break
    assert states[0] is not None
    stage.coordinator = stage.new_coordinator()
    stage.coordinator.restore(states[0])
    assert [(report.refused, report.why) for report in stage.run()] == [(("b",), {"b": "not finite"})] * 2


@pytest.mark.parametrize(("change", "same"), [("nothing", True), ("data", False), ("a rejected upload", False)])
def test_other_answers_make_another_course(
    change: str, same: bool, model: Model, make_federation: Callable[..., Federation]
) -> None:
    """With noise: nobody knows what a site does whose upload was rejected, so what follows is never asked the same."""
    courses = []
    for seed in (0, 1):
        federation, seen = make_federation(seed=seed if change == "data" else 0), list[str]()
        stage = Stage(FedAvg(), model, federation, clip=0.5, noise=1.0, evaluate_every=0)
        if change == "a rejected upload":
            stage.grid.nodes[101].spoil = nan_upload
        list(stage.coordinator.rounds(asking=lambda number, course, seen=seen: bool(seen.append(course))))
        courses.append(seen)
    one, two = courses
    assert one[0] == two[0] == ""
    assert (one[1] == two[1]) is same


def test_a_claimed_number_of_samples_is_bounded_by_those_of_the_others(model: Model, federation: Federation) -> None:
    """A site that claims a trillion samples would be the whole mean of FedAvg."""
    stage = Stage(FedAvg(weighting="samples"), model, federation)
    stage.run()
    honest = stage.coordinator._samples.tolist()
    assert honest == [len(client.train) for client in federation.clients]
    sites = stage.coordinator._connections.sites
    liar, *others = federation.names
    sites[liar] = replace(sites[liar], samples={**sites[liar].samples, "train": 2**40})
    again = Coordinator(
        stage.coordinator._connections, federation, stage.work, stage.policy, "again", say=stage.said.append
    )
    list(again.rounds())
    median = sorted(honest[1:])[(len(others) - 1) // 2]
    assert again._samples.tolist() == [10 * median, *honest[1:]]
    assert [line for line in stage.said if "they count as" in line] == [
        f"{liar} reports 1,099,511,627,776 training samples; they count as {10 * median}, 10 times the median of the "
        "other sites"
    ]
