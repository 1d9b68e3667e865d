"""The coordinator over sites that exchange nothing but Flower messages: the same numbers, whatever goes wrong."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr.app")
from fakes import FakeGrid, app_of, identity, node  # noqa: F401
from flwr.app import ConfigRecord, Message, RecordDict

from fedc2i.core.errors import UserError
from fedc2i.data.federation import Federation
from fedc2i.engine import checkpoint_file
from fedc2i.engine.client import RunContext
from fedc2i.engine.records import Round
from fedc2i.engine.settings import EngineSettings
from fedc2i.engine.simulator import simulate
from fedc2i.flower import wire
from fedc2i.flower.answer_collector import Policy
from fedc2i.flower.connections import SiteConnections
from fedc2i.flower.coordinator import Coordinator
from fedc2i.flower.enrolment import wait_for_sites
from fedc2i.flower.message_format import Answer
from fedc2i.flower.site import Assignment
from fedc2i.methods import registry
from fedc2i.methods.base import Method
from fedc2i.methods.fedavg import FedAvg
from fedc2i.methods.fedc2i import FedC2I
from fedc2i.methods.fedc2i_top_k import FedC2ITopK
from fedc2i.models.model import Model
from fedc2i.training.settings import TrainingSettings

TRAINING = TrainingSettings(batch_size=5, lr=0.01)
POLICY = Policy(deadline=20.0, poll=0.0)
SEED = 3


class Stage:
    """A federation in one process: a grid, its coordinator, and what was said."""

    def __init__(
        self, method: Method, model: Model, federation: Federation, settings: EngineSettings, policy: Policy = POLICY
    ):
        self.federation, self.policy = federation, policy
        self.work = Assignment(RunContext(method, model, settings, settings.rounds, SEED), settings)
        apps = [app_of(federation, k, lambda run: self.work) for k in range(len(federation.clients))]
        self.grid = FakeGrid({100 + k: node(100 + k, app) for k, app in enumerate(apps)})
        self.said: list[str] = []
        self.coordinator = self.new_coordinator()

    def new_coordinator(self) -> Coordinator:
        fleet = SiteConnections(self.grid, self.said.append)
        wait_for_sites(fleet, self.federation.names, 0, 1, 0.0, self.said.append, 0.0)
        return Coordinator(fleet, self.federation, self.work, self.policy, "run", say=self.said.append)

    def run(self) -> list[Round]:
        return list(self.coordinator.rounds())


@pytest.fixture(autouse=True)
def look_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedc2i.flower.connections._LOOK", 0.0)


def in_process(method: Method, model: Model, federation: Federation, settings: EngineSettings) -> list[Round]:
    found: list[Round] = []
    simulate(method, model, federation, settings, [SEED], on_round=found.append)
    return found


def assert_same_rounds(got: list[Round], want: list[Round], atol: float = 0.0) -> None:
    assert [report.round for report in got] == [report.round for report in want]
    for mine, theirs in zip(got, want, strict=True):
        assert mine.participants == theirs.participants
        assert set(mine.metrics) == set(theirs.metrics)
        for point in theirs.metrics:
            for one, other in zip(mine.metrics[point], theirs.metrics[point], strict=True):
                assert one == pytest.approx(other, abs=atol)
        assert set(mine.influence) == set(theirs.influence)
        for name in theirs.influence:
            np.testing.assert_allclose(mine.influence[name], theirs.influence[name], atol=atol)


@pytest.mark.parametrize("name", [name for name in sorted(Method.registry) if name != "fedbn"])
def test_every_method_gives_the_numbers_of_the_in_process_engine(
    name: str, model: Model, federation: Federation
) -> None:
    settings = EngineSettings(rounds=3, **vars(TRAINING), executor="looped")
    method = registry.get(name)()
    assert_same_rounds(
        Stage(method, model, federation, settings).run(), in_process(method, model, federation, settings)
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"clients_per_round": 2},
        {"evaluate_every": 0},
        {"evaluate_every": 2, "clients_per_round": 1},
        {"topology": "ring"},
        {"init": "independent"},
        {"patience": 1},
        {"patience": 2, "evaluate_every": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("method", [FedAvg(), FedC2I()], ids=["fedavg", "fedc2i"])
def test_settings_mean_the_same(
    method: Method, settings: dict[str, Any], model: Model, make_federation: Callable[..., Federation]
) -> None:
    federation = make_federation(sizes=(12, 9, 7), validation=5)
    chosen = EngineSettings(rounds=5, **vars(TRAINING), executor="looped", **settings)
    want = in_process(method, model, federation, chosen)
    assert_same_rounds(Stage(method, model, federation, chosen).run(), want)


# How models travel.


def test_half_precision_halves_the_bytes_and_hardly_moves_the_numbers(model: Model, federation: Federation) -> None:
    settings = EngineSettings(rounds=3, **vars(TRAINING), executor="looped")
    full = Stage(FedC2I(), model, federation, settings).run()
    half = Stage(FedC2I(), model, federation, settings, Policy(20.0, poll=0.0, half=True)).run()
    assert half[-1].bytes_up < 0.55 * full[-1].bytes_up
    assert half[-1].bytes_down < 0.55 * full[-1].bytes_down
    for point in ("received", "trained"):
        assert half[-1].mean(point, "loss") == pytest.approx(full[-1].mean(point, "loss"), abs=5e-3)


def test_bytes_are_those_of_the_models(model: Model, federation: Federation) -> None:
    report = Stage(FedC2I(), model, federation, EngineSettings(rounds=1, **vars(TRAINING))).run()[0]
    one = sum(tensor.numel() * 4 for tensor in model.init(0).values())
    assert one < report.bytes_up < one + 2000
    assert 3 * one < report.bytes_down < 3 * one + 1000


def test_nothing_but_the_upload_scores_and_diagnostics_leaves_a_site(model: Model, federation: Federation) -> None:
    stage = Stage(registry.get("fedrep")(), model, federation, EngineSettings(rounds=2, **vars(TRAINING)))
    seen: list[set[str]] = []

    def look(reply: Message) -> Message:
        seen.append({*reply.content, *(wire.unpack(reply.content["upload"]) if "upload" in reply.content else ())})
        return reply

    stage.grid.nodes[100].spoil = look
    stage.run()
    assert seen[0] == {"introduction"} or {"upload", "report", "metrics"} <= seen[0]
    assert all(not {"head.weight", "head.bias"} & names for names in seen)
    assert set().union(*seen) <= {"introduction", "upload", "report", "metrics", *model.body_names}


# What goes wrong at a site.


def nan_upload(reply: Message) -> Message:
    answer = Answer.from_record(reply.content) if "upload" in reply.content else None
    if answer is None or not answer.upload:
        return reply
    broken = {name: torch.full_like(tensor, torch.nan) for name, tensor in answer.upload.items()}
    return _with(reply, Answer(broken, answer.report, answer.metrics).to_record(False))


def other_architecture(reply: Message) -> Message:
    answer = Answer.from_record(reply.content) if "upload" in reply.content else None
    if answer is None or not answer.upload:
        return reply
    other = {name: tensor[:1] for name, tensor in answer.upload.items()}
    return _with(reply, Answer(other, answer.report, answer.metrics).to_record(False))


def garbage(reply: Message) -> Message:
    return reply if "introduction" in reply.content else _with(reply, RecordDict({"upload": ConfigRecord({"a": 1})}))


def odd_report(reply: Message) -> Message:
    answer = Answer.from_record(reply.content) if "upload" in reply.content else None
    if answer is None or not answer.report:
        return reply
    return _with(reply, Answer(answer.upload, {"influence_vector": torch.ones(7)}, answer.metrics).to_record(False))


def _with(reply: Message, content: RecordDict) -> Message:
    reply.content = content
    return reply


@pytest.mark.parametrize(
    ("spoil", "line"),
    [
        (nan_upload, "round 1: the upload of b is not finite; ignored"),
        (other_architecture, "round 1: the upload of b is of another architecture; ignored"),
        (garbage, "round 1: b failed: "),
    ],
)
@pytest.mark.parametrize("method", [FedAvg(), FedC2I()], ids=["fedavg", "fedc2i"])
def test_a_broken_site_is_left_out_and_named(
    method: Method, spoil: Any, line: str, model: Model, federation: Federation
) -> None:
    stage = Stage(method, model, federation, EngineSettings(rounds=2, **vars(TRAINING)))
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


def test_a_report_of_another_shape_is_dropped(model: Model, federation: Federation) -> None:
    stage = Stage(FedC2I(), model, federation, EngineSettings(rounds=2, **vars(TRAINING)))
    stage.grid.nodes[101].spoil = odd_report
    vector = stage.run()[-1].influence["influence_vector"]
    assert vector.shape == (3, 3)
    assert np.isnan(vector[1]).all()
    assert np.isfinite(vector[[0, 2]]).all()


@pytest.mark.parametrize("method", [FedC2I(), FedC2ITopK(k=1)], ids=["all", "top_k"])  # the latter's server reads them
@pytest.mark.parametrize("shape", [(), (4,), (3, 4)], ids=str)
def test_a_report_in_a_form_that_others_do_not_use_is_dropped(
    shape: tuple[int, ...], method: Method, model: Model, federation: Federation
) -> None:
    """A number, one of each class, one of each client and class, where the others give one of each client."""
    assert len(federation.classes) == 4

    def spoil(reply: Message) -> Message:
        if "upload" not in reply.content:
            return reply
        answer = Answer.from_record(reply.content)
        return _with(
            reply, Answer(answer.upload, {"influence_vector": torch.ones(shape)}, answer.metrics).to_record(False)
        )

    stage = Stage(method, model, federation, EngineSettings(rounds=3, **vars(TRAINING)))
    stage.grid.nodes[100].spoil = spoil
    vector = stage.run()[-1].influence["influence_vector"]
    assert vector.shape == (3, 3)
    assert np.isnan(vector[0]).all()
    assert np.isfinite(vector[[1, 2]]).any()


def test_sites_that_invent_diagnostics_do_not_fill_the_memory(model: Model, federation: Federation) -> None:
    """Each may name 32 that no other has; of all together no more than 32 are kept, those that most sites give."""
    stage = Stage(FedC2I(), model, federation, EngineSettings(rounds=1, **vars(TRAINING)))
    known = set(in_process(FedC2I(), model, federation, EngineSettings(rounds=1, **vars(TRAINING)))[0].influence)

    def spoil(site: str) -> Callable[[Message], Message]:
        def change(reply: Message) -> Message:
            if "upload" not in reply.content:
                return reply
            answer = Answer.from_record(reply.content)
            more = {f"{site}{number}": torch.ones(3, 4) for number in range(32 - len(answer.report))}
            return _with(reply, Answer(answer.upload, {**more, **answer.report}, answer.metrics).to_record(False))

        return change

    for k, name in enumerate(federation.names):
        stage.grid.nodes[100 + k].spoil = spoil(name)
    (report,) = stage.run()
    assert known < set(report.influence)
    assert len(report.influence) == 32


def test_large_diagnostics_are_kept_of_the_last_round_only(
    model: Model, federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedc2i.engine.records.LARGE", 3 * 3 * 4 * 4 - 1)  # Λ of 3 clients and 4 classes is large
    settings = EngineSettings(rounds=3, **vars(TRAINING))
    reports = Stage(FedC2I(), model, federation, settings).run()
    assert [("influence_matrix" in report.influence) for report in reports] == [False, False, True]
    assert all("influence_vector" in report.influence for report in reports)
    assert_same_rounds(reports, in_process(FedC2I(), model, federation, settings))


def test_a_failing_site_says_why_in_one_line(model: Model, make_federation: Callable[..., Federation]) -> None:
    federation = make_federation()
    method = FedC2I(influence_split="validation")  # which no site has
    stage = Stage(
        method, model, federation, EngineSettings(rounds=1, **vars(TRAINING)), Policy(0.2, min_sites=0, poll=0.0)
    )
    stage.run()
    lines = [line for line in stage.said if " failed: " in line]
    assert lines
    assert all("\n" not in line and line.startswith("round 2: ") for line in lines)


def test_a_dead_site_is_missed_once_and_its_model_stays(model: Model, federation: Federation) -> None:
    stage = Stage(FedC2I(), model, federation, EngineSettings(rounds=5, **vars(TRAINING)))
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
    assert [report.participants for report in reports] == [
        tuple("abc"),
        tuple("abc"),
        ("a", "c"),
        ("a", "c"),
        tuple("abc"),
    ]
    assert np.isfinite(reports[2].influence["influence_vector"][:, 1][[0, 2]]).all()  # still weighed, from round 2
    assert sum(line.startswith("round 3: 2 of 3 sites answered; b ") for line in stage.said) == 1
    assert "b is back" in stage.said
    assert any(line.startswith("round 5: b takes part again") for line in stage.said), stage.said


def test_a_slow_site_is_not_waited_for_and_its_late_model_is_used(model: Model, federation: Federation) -> None:
    stage = Stage(FedC2I(), model, federation, EngineSettings(rounds=4, **vars(TRAINING)), Policy(0.05, poll=0.001))
    rounds = []

    def slow_down(number: int, message: Message) -> None:
        rounds.extend([number] * (number == 100))
        stage.grid.nodes[102].delay = 10**9 if len(rounds) == 2 else 0
        if len(rounds) == 3:
            stage.grid.release()

    stage.grid.before = slow_down
    reports = stage.run()
    assert reports[0].participants == tuple("abc")
    assert reports[1].participants == ("a", "b")
    assert "round 2: 2 of 3 sites answered; c did not answer within 0 s" in stage.said
    assert any("c answered round 2; its model is used" in line for line in stage.said), stage.said


def test_too_few_sites_end_the_run_with_a_line(
    model: Model, federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedc2i.flower.answer_collector.TRIES", 2)
    policy = Policy(0.01, min_sites=3, poll=0.0)
    stage = Stage(FedAvg(), model, federation, EngineSettings(rounds=2, **vars(TRAINING)), policy)
    stage.grid.nodes[101].spoil = lambda reply: None
    with pytest.raises(UserError, match=r"round 1: 2 of the 3 sites needed answered within .*the same command resumes"):
        stage.run()


# Who is who.


def test_a_node_can_only_be_the_site_whose_key_it_holds(model: Model, federation: Federation) -> None:
    stage = Stage(FedAvg(), model, federation, EngineSettings(rounds=1, **vars(TRAINING)))
    for number, key in ((100, b"A"), (101, b"B"), (102, b"B")):
        stage.grid.nodes[number].key = key
    said: list[str] = []
    fleet = SiteConnections(stage.grid, said.append, {b"A": "a", b"B": "b", b"C": "c"})
    fleet.collect()
    assert sorted(fleet.sites) == ["a", "b"]
    assert "a site is rejected: it calls itself 'c', but holds another site's key" in said


def test_a_second_node_of_an_authenticated_site_is_refused_while_the_first_is_there(
    model: Model, federation: Federation
) -> None:
    stage = Stage(FedAvg(), model, federation, EngineSettings(rounds=1, **vars(TRAINING)))
    stage.grid.nodes[100].key = stage.grid.nodes[101].key = b"A"
    stage.grid.nodes[101].app = stage.grid.nodes[100].app
    said: list[str] = []
    fleet = SiteConnections(stage.grid, said.append, {b"A": "a"})
    fleet.collect()
    assert list(fleet.sites) == ["a"]
    assert any("which is online already" in line for line in said)


# A coordinator that is killed and started again.


RESUMED = ("fedavg", "fedc2i", "fedproto", "pfedgraph", "fedcalm", "fedpac", "fedc2i-top")
WITH_A_STATE = ("fedc2i", "fedcalm", "fedc2i-top")  # at the clients, at the server, at both


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        pytest.param(name, settings, marks=() if not settings or name in WITH_A_STATE else pytest.mark.slow)
        for name in RESUMED
        for settings in ({}, {"clients_per_round": 1}, {"topology": "ring"}, {"patience": 3})
    ],
    ids=str,
)
def test_resumed_after_any_round_it_ends_with_the_same_numbers(
    name: str, settings: dict[str, Any], model: Model, make_federation: Callable[..., Federation], tmp_path: Path
) -> None:
    federation = make_federation(sizes=(12, 9, 7), validation=4)
    method = FedC2ITopK(k=1, refresh=3) if name == "fedc2i-top" else registry.get(name)()
    chosen = EngineSettings(rounds=5, **vars(TRAINING), executor="looped", **settings)
    want = Stage(method, model, federation, chosen).run()
    for killed in (1, 2, 4):
        stage, reports = Stage(method, model, federation, chosen), list[Round]()
        folder = tmp_path / f"{killed}"

        def keep(stage: Stage = stage, folder: Path = folder) -> None:
            state = stage.coordinator.checkpoint()
            assert state is not None
            json.dumps(state.values)
            checkpoint_file.save(folder, *state)

        course = stage.coordinator.rounds(keep)
        while not (folder / f"round{killed:06d}.json").exists():
            reports.append(next(course))
            if len(reports) == len(want):
                break
        course.close()
        if killed == 4:  # the newest one is damaged: the sites are two rounds ahead
            for path in folder.glob(f"round{killed:06d}.*"):
                path.unlink()
        saved = checkpoint_file.load(folder)
        assert saved is not None
        stage.coordinator = stage.new_coordinator()
        stage.coordinator.restore(saved)
        got = [report for report in reports if report.round < saved.round] + stage.run()
        assert_same_rounds(got, want)


def test_a_checkpoint_of_other_sites_is_refused(
    model: Model, make_federation: Callable[..., Federation], tmp_path: Path
) -> None:
    stage = Stage(FedAvg(), model, make_federation(), EngineSettings(rounds=1, **vars(TRAINING)))
    stage.run()
    state = stage.coordinator.checkpoint()
    assert state is not None
    other = Stage(FedAvg(), model, make_federation(sizes=(5, 6)), EngineSettings(rounds=1, **vars(TRAINING)))
    with pytest.raises(UserError, match="the run was started with the sites a, b, c"):
        other.coordinator.restore(state)


def test_a_site_is_sent_no_model_that_the_topology_keeps_from_it(
    model: Model, make_federation: Callable[..., Federation]
) -> None:
    federation = make_federation(sizes=(5, 6, 7, 8, 9))
    stage = Stage(FedC2I(), model, federation, EngineSettings(rounds=3, **vars(TRAINING), topology="ring"))
    uploads: dict[int, list[torch.Tensor]] = {number: [] for number in stage.grid.nodes}
    sent: list[tuple[int, torch.Tensor]] = []

    def listen(number: int) -> Callable[[Message], Message]:
        def take(reply: Message) -> Message:
            upload = wire.unpack(reply.content["upload"]) if "upload" in reply.content else {}
            uploads[number] += [upload["hidden.weight"]] if upload else []
            return reply

        return take

    for number, own in stage.grid.nodes.items():
        own.spoil = listen(number)

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


# What a review found.


@pytest.mark.parametrize("number", [100, 101])
def test_of_two_sites_the_honest_one_is_kept_whichever_comes_first(
    number: int, model: Model, make_federation: Callable[..., Federation]
) -> None:
    stage = Stage(FedC2I(), model, make_federation(sizes=(6, 7)), EngineSettings(rounds=2, **vars(TRAINING)))
    stage.grid.nodes[number].spoil = other_architecture
    odd = "ab"[number - 100]
    assert [report.refused for report in stage.run()] == [(odd,), (odd,)]


@pytest.mark.parametrize("topology", ["full", "ring"])
@pytest.mark.parametrize("shape", [(7,), (0, 2**30, 2**30), (3, 3, 3)])
def test_a_report_of_an_impossible_shape_is_dropped(
    shape: tuple[int, ...], topology: str, model: Model, make_federation: Callable[..., Federation]
) -> None:
    federation = make_federation(sizes=(5, 6, 7, 8, 9))
    stage = Stage(FedC2ITopK(k=1), model, federation, EngineSettings(rounds=3, **vars(TRAINING), topology=topology))

    def spoil(reply: Message) -> Message:
        if "upload" not in reply.content:
            return reply
        answer = Answer.from_record(reply.content)
        bad = {"influence_vector": torch.ones(shape), "influence_matrix": torch.ones(shape)}
        return _with(reply, Answer(answer.upload, bad, answer.metrics).to_record(False))

    stage.grid.nodes[100].spoil = spoil
    reports = stage.run()
    assert len(reports) == 3
    assert np.isnan(reports[-1].influence["influence_vector"][0]).all()


def test_a_round_without_a_usable_upload_is_resumed_as_it_went_on(
    model: Model, federation: Federation, tmp_path: Path
) -> None:
    def stage() -> Stage:
        made = Stage(
            FedAvg(), model, federation, EngineSettings(rounds=3, **vars(TRAINING)), Policy(20.0, min_sites=0, poll=0.0)
        )
        asked = dict.fromkeys(made.grid.nodes, 0)

        def spoil(number: int) -> Callable[[Message], Message]:
            def second(reply: Message) -> Message:
                asked[number] += "upload" in reply.content
                return nan_upload(reply) if asked[number] == 2 else reply

            return second

        for number, own in made.grid.nodes.items():
            own.spoil = spoil(number)
        return made

    want = stage().run()
    assert want[1].refused == ("a", "b", "c")
    cut = stage()
    course = cut.coordinator.rounds(lambda: checkpoint_file.save(tmp_path, *(cut.coordinator.checkpoint() or ())))
    first = next(course)
    next(course)
    course.close()
    saved = checkpoint_file.load(tmp_path)
    assert saved is not None
    assert saved.round == 2
    cut.coordinator = cut.new_coordinator()
    cut.coordinator.restore(saved)
    assert_same_rounds([first, *cut.run()], want)


def test_unusable_uploads_do_not_count_as_answers(
    model: Model, federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedc2i.flower.answer_collector.TRIES", 2)
    monkeypatch.setattr("fedc2i.flower.answer_collector.PAUSE", 0.0)
    policy = Policy(0.05, min_sites=2, poll=0.0)
    stage = Stage(FedAvg(), model, federation, EngineSettings(rounds=1, **vars(TRAINING)), policy)
    stage.grid.nodes[100].spoil = stage.grid.nodes[101].spoil = nan_upload
    with pytest.raises(UserError, match=r"round 1: 1 of the 2 sites needed answered"):
        stage.run()


def test_a_resumed_round_keeps_the_reason_of_a_rejected_upload(model: Model, federation: Federation) -> None:
    stage = Stage(FedAvg(), model, federation, EngineSettings(rounds=2, **vars(TRAINING)))
    stage.grid.nodes[101].spoil = nan_upload
    states = list[checkpoint_file.Checkpoint | None]()
    for _ in stage.coordinator.rounds(lambda: states.append(stage.coordinator.checkpoint())):
        break
    assert states[0] is not None
    stage.coordinator = stage.new_coordinator()
    stage.coordinator.restore(states[0])
    assert [(report.refused, report.why) for report in stage.run()] == [(("b",), {"b": "not finite"})] * 2


def test_no_more_sites_are_needed_than_train(model: Model, federation: Federation) -> None:
    """All three are asked for their scores, one of them for a model."""
    settings = EngineSettings(rounds=2, **vars(TRAINING), clients_per_round=1)
    stage = Stage(FedAvg(), model, federation, settings, Policy(0.2, min_sites=3, poll=0.0))
    reports = stage.run()
    assert [len(report.participants) for report in reports] == [1, 1]
    assert not any("needed" in line for line in stage.said)


def test_a_late_model_does_not_take_the_place_of_a_newer_one(model: Model, federation: Federation) -> None:
    coordinator = Stage(FedC2I(), model, federation, EngineSettings(rounds=2, **vars(TRAINING))).coordinator
    list(coordinator.rounds())
    kept = coordinator._exchange.mailbox.of([1])
    late = Answer({name: torch.zeros_like(own[0]) for name, own in kept.items()})
    for number, taken in ((1, False), (2, False), (3, True)):
        assert coordinator._take_late(1, late, number) is taken
        now = coordinator._exchange.mailbox.of([1])
        assert all(torch.equal(own, late.upload[name][None] if taken else kept[name]) for name, own in now.items())


def test_other_uploads_make_another_course(model: Model, make_federation: Callable[..., Federation]) -> None:
    settings, courses = EngineSettings(rounds=2, **vars(TRAINING), clip=0.5, noise=1.0, evaluate_every=0), list[str]()
    for seed in (0, 1):
        stage = Stage(FedAvg(), model, make_federation(seed=seed), settings)
        list(stage.coordinator.rounds(asking=lambda number, course: bool(courses.append(course))))
    assert courses[0] == courses[2] == ""
    assert courses[1] != courses[3]


@pytest.mark.parametrize("spoiled", [False, True])
def test_a_refused_upload_makes_a_course_of_its_own(spoiled: bool, model: Model, federation: Federation) -> None:
    """With noise: nobody knows what a site does whose upload was left out, so what follows is never asked the same."""
    settings, courses = (
        EngineSettings(rounds=2, **vars(TRAINING), clip=0.5, noise=1.0, evaluate_every=0),
        list[list[str]](),
    )
    for _ in range(2):
        stage, seen = Stage(FedAvg(), model, federation, settings), list[str]()
        if spoiled:
            stage.grid.nodes[101].spoil = nan_upload
        list(stage.coordinator.rounds(asking=lambda number, course, seen=seen: bool(seen.append(course))))
        courses.append(seen)
    one, two = courses
    assert one[0] == two[0] == ""
    assert (one[1] == two[1]) is not spoiled


def test_a_site_that_returns_as_another_node_is_asked_again_in_the_same_round(
    model: Model, federation: Federation
) -> None:
    stage = Stage(FedC2I(), model, federation, EngineSettings(rounds=2, **vars(TRAINING)), Policy(60.0, poll=0.0))

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


def test_a_late_score_is_not_taken_for_training(model: Model, make_federation: Callable[..., Federation]) -> None:
    federation = make_federation(sizes=(12, 9, 7), validation=4)
    settings = EngineSettings(rounds=4, **vars(TRAINING), patience=3)
    stage = Stage(FedC2I(), model, federation, settings, Policy(0.05, poll=0.001))
    asked = []

    def slow(number: int, message: Message) -> None:
        asked.extend([number] * (number == 102))
        stage.grid.nodes[102].delay = 10**9 if len(asked) == 2 else 0  # round 1, and now the scores of its exchange
        if number == 100 and len(asked) >= 2:
            stage.grid.release()

    stage.grid.before = slow
    reports = stage.run()
    assert not any(report.refused for report in reports)
    assert not any("another architecture" in line for line in stage.said), stage.said


def test_a_method_that_fails_everywhere_ends_the_run_soon(
    model: Model, federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedc2i.flower.answer_collector.PAUSE", 0.01)

    class Broken(FedAvg):
        def loss(self, params: Any, batch: Any, site: Any) -> torch.Tensor:
            raise ValueError("oops")

    stage = Stage(Broken(), model, federation, EngineSettings(rounds=1, **vars(TRAINING)), Policy(600.0, poll=0.0))
    with pytest.raises(UserError, match=r"round 1: 0 of the 1 sites needed answered within 0 s"):
        stage.run()
    assert stage.said.count("round 1: b failed: ValueError: oops") == 3
