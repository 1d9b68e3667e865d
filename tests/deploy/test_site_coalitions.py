"""Contributions of real sites: the numbers of the simulator, what they cost, who agreed, and interruptions."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr.app")
from fakes import FakeGrid, FakeNode, identity, look_at_once, node  # noqa: F401
from flwr.app import Message

from fedc2i import Federation, UserError
from fedc2i.analysis.contribution.coalitions import CoalitionRuns
from fedc2i.analysis.contribution.measure import method_weights
from fedc2i.analysis.contribution.records import read
from fedc2i.analysis.contribution.shapley import every_coalition
from fedc2i.cli.main import main
from fedc2i.data.federation import Client
from fedc2i.deploy.coordinator_folder import make_coordinator
from fedc2i.deploy.job import Job, split_policy
from fedc2i.deploy.run_description import understand
from fedc2i.deploy.server_app import serve
from fedc2i.deploy.site_coalitions import NOTE, SiteCoalitions, require_measurable
from fedc2i.engine.records import POINTS
from fedc2i.flower import site
from fedc2i.flower.message_format import Introduction, failure
from fedc2i.flower.site import Home
from fedc2i.runs.finished_run import read_run
from fedc2i.runs.plan import prepare

SETTINGS: dict[str, Any] = {"model": "lenet5", "rounds": 1, "epochs": 1, "batch_size": 5, "seeds": "0,3"}
SITES = ("a", "b", "c")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedc2i.flower.connections._AGAIN", 0.0)
    monkeypatch.setattr("fedc2i.deploy.server_app.figures.draw_run", lambda result, folder: None)


@pytest.fixture
def federation(make_federation: Callable[..., Federation]) -> Federation:
    return make_federation((12, 9, 7), validation=4)


class World:
    """Sites in this process, some of which agree, and the jobs that were started over them."""

    def __init__(self, federation: Federation, agreeing: str = "abc") -> None:
        self.asked: list[tuple[str, ...]] = []  # by started job
        self.said: list[str] = []
        self.agreeing = agreeing
        self.grid = FakeGrid(
            {k: self._node(k, own, federation.classes) for k, own in enumerate(federation.clients, 100)}
        )

    def _node(self, number: int, client: Client, classes: tuple[str, ...]) -> FakeNode:
        def introduce(reply: Message) -> Message:
            if "introduction" in reply.content:
                found = Introduction.from_record(reply.content)
                reply.content = replace(found, contribution=found.name in self.agreeing).to_record()
            return reply

        made = node(number, site.make_app(lambda _: Home(client, classes), lambda task: understand(task.setup)))
        return replace(made, spoil=introduce)

    def start(self, job: Job) -> None:
        self.asked.append(job.sites if job.purpose == "contribution" else ())
        before = len(self.grid.log)
        serve(self.grid, job, self.said.append)
        trained = {to for to, kind in self.grid.log[before:] if kind == "train"}
        assert {SITES[to - 100] for to in trained} == {*self.asked[-1]}  # sites outside are not asked

    def survey(self, out: Path, method: str = "fedc2i", **settings: Any) -> SiteCoalitions:
        policy, values = split_policy({**SETTINGS, "deadline": 20.0, **settings}, min_sites=2)
        job = Job(out, method, values, SITES, wait=0.0, policy=replace(policy, poll=0.0))
        require_measurable(job)
        return SiteCoalitions.survey(job, self.start, self.said.append)


def test_coalitions_over_sites_have_the_values_of_the_simulator(tmp_path: Path, federation: Federation) -> None:
    world = World(federation)
    game = world.survey(tmp_path / "sites")
    promised = game.cost()
    got = game.measure()
    (plan,) = prepare(["fedc2i"], {**SETTINGS, "device": "cpu", "workers": 1}, federation)
    here, coalitions = CoalitionRuns(plan, tmp_path / "here"), [frozenset({0}), *every_coalition(3)]
    here.compute(coalitions)
    for own, metric, point in itertools.product(coalitions, ("accuracy", "loss"), POINTS):
        for receiver in range(3) if len(own) == 1 else own:
            one, other = (runs.values(own, receiver, metric, point, None)[:, 0] for runs in (game, here))
            np.testing.assert_allclose(one, other, atol=1e-3)
    weights, others = method_weights(game), method_weights(here)
    assert {*weights} == {*others}
    for name, table in weights.items():
        np.testing.assert_array_equal(table, others[name])
    assert (got.exact, got.runs, got.clients, got.samples["b"]) == (True, 5, SITES, 9)
    gain = got.select("gain", "loss", "trained")[1]
    alone, together = (game.values(frozenset(own), 1, "loss", "trained", None)[:, 0] for own in ({1}, {0, 1, 2}))
    assert gain.value == pytest.approx(np.mean(together - alone))
    error = np.std(together - alone, ddof=1) / 2**0.5
    assert gain.high - gain.value == pytest.approx(12.706 * error, rel=1e-3)  # Student's t of two seeds, and no more
    assert got.notes[-1] == NOTE
    assert read(game.everyone, got.clients) == read(tmp_path / "sites", got.clients)
    # What was promised is what was done.
    assert "5 runs over some of them, with 2 seeds and 1 round: 10 rounds" in promised[1]
    assert promised[1].endswith("this takes 8")  # alone, with each of two others, with both: of two seeds
    up, down = map(float, re.findall(r"([\d.]+) MB", promised[2]))
    sent = np.zeros(2)
    for path in (tmp_path / "sites" / "coalitions").glob("*/summary.json"):
        told, sites = json.loads(path.read_text()), read_run(path.parent).federation.names
        sent += [2 * len(sites) * told[f"bytes_{way}_per_client_round"] for way in ("up", "down")]
    np.testing.assert_allclose([up, down], sent / 1e6, rtol=0.1)


def test_an_interrupted_measurement_runs_only_what_is_missing(tmp_path: Path, federation: Federation) -> None:
    world = World(federation)
    game, runs = world.survey(tmp_path, "fedavg"), world.asked
    real = world.start

    def stop(job: Job) -> None:
        if len(runs) == 3:
            raise KeyboardInterrupt
        real(job)

    game.start = stop
    with pytest.raises(KeyboardInterrupt):
        game.measure()
    assert runs == [(), SITES, ("a", "b")]
    again = world.survey(tmp_path, "fedavg")
    assert "3 runs over some of them" in again.cost()[1]
    first = again.measure()
    assert runs[3:] == [("a", "c"), ("b", "c"), SITES]  # the survey is not repeated; the last is each site alone
    assert any("each site alone; about" in line and line.endswith("left") for line in world.said)
    third = world.survey(tmp_path, "fedavg")
    assert third.cost() == []
    assert third.measure().rows == first.rows
    assert len(runs) == 6
    with pytest.raises(UserError, match="holds a run with other settings; choose another --out"):
        world.survey(tmp_path, "fedavg", rounds=2)


def test_only_sites_that_agree_are_players(tmp_path: Path, federation: Federation) -> None:
    world = World(federation, agreeing="ac")
    found = world.survey(tmp_path / "two", "fedavg").measure()
    assert found.clients == ("a", "c")
    assert {*world.asked} == {(), ("a", "c")}
    assert any(line.startswith("b takes no part: by its policy") for line in world.said)
    with pytest.raises(UserError, match=r"^1 of 3 sites agree to it, at least 2 are needed$"):
        World(federation, agreeing="b").survey(tmp_path / "one")


def test_sites_are_asked_again_until_a_coalition_was_run(tmp_path: Path, federation: Federation) -> None:
    world = World(federation, agreeing="")
    offline = world.grid.nodes.pop(102)
    with pytest.raises(UserError, match=r"^0 of 2 sites agree to it, at least 2 are needed$"):
        world.survey(tmp_path, "fedavg")
    world.agreeing = "ab"
    silent = "c takes no part: it did not answer"
    assert world.survey(tmp_path, "fedavg").sites.names == ("a", "b")
    assert sum(line.startswith(silent) for line in world.said) == 2
    world.grid.nodes[102] = offline
    world.agreeing = "bc"
    game = world.survey(tmp_path, "fedavg")
    assert game.sites.names == ("b", "c")
    assert sum(line.startswith(silent) for line in world.said) == 2
    game.compute([frozenset({0, 1})])
    world.agreeing = "abc"
    assert world.survey(tmp_path, "fedavg").sites.names == ("b", "c")
    assert world.asked == [(), (), (), ("b", "c")]


def test_a_site_that_did_not_answer_is_named_after_coalitions_were_run(tmp_path: Path, federation: Federation) -> None:
    world = World(federation)
    del world.grid.nodes[102]
    world.survey(tmp_path, "fedavg").compute([frozenset({0, 1})])
    world.said.clear()
    world.survey(tmp_path, "fedavg")
    assert world.said == [
        "c takes no part: it did not answer",
        "sites are not asked again, since coalitions of the others were run; another --out asks all",
    ]


def test_a_site_whose_data_does_not_fit_is_no_player(tmp_path: Path, federation: Federation) -> None:
    world, own = World(federation), federation.clients[1]
    wide = [replace(split, x=split.x.repeat(1, 1, 1, 2)) for split in (own.train, own.validation, own.test)]
    world.grid.nodes[101] = world._node(101, Client("b", *wide), federation.classes)
    assert world.survey(tmp_path, "fedavg").sites.names == ("a", "c")
    assert any(line.startswith("b takes no part") and "does not fit" in line for line in world.said)


def test_a_failed_survey_leaves_no_answers_of_an_earlier_one(tmp_path: Path, federation: Federation) -> None:
    world = World(federation)
    world.survey(tmp_path, "fedavg")
    world.start = lambda job: None  # type: ignore[method-assign]  # it was killed
    with pytest.raises(UserError, match="the sites were not asked"):
        world.survey(tmp_path, "fedavg")


def test_other_settings_before_any_coalition_was_run_are_no_other_measurement(
    tmp_path: Path, federation: Federation
) -> None:
    world = World(federation)
    world.survey(tmp_path, "fedavg")
    assert world.survey(tmp_path, "fedc2i", seeds="0-2", wire="float16").plan.config.seeds == (0, 1, 2)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"noise": 1.0, "clip": 1.0}, "needs noise=0 and attack=''"),
        ({"attack": "sign-flip@a"}, "needs noise=0 and attack=''"),
        ({"seeds": "0"}, "needs at least 2 seeds"),
        ({"secure_aggregation": True, "method": "fedavg"}, "needs secure_aggregation=false"),
        ({"topology": "ring"}, "needs topology=full"),
        ({"clients_per_round": "50%"}, "clients_per_round=100%"),
        ({"method": "local"}, "name another method"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_a_site_is_asked(
    settings: dict[str, Any], says: str, tmp_path: Path, federation: Federation
) -> None:
    world = World(federation)
    with pytest.raises(UserError, match=says):
        world.survey(tmp_path, **settings)
    assert not world.asked
    assert world.survey(tmp_path).sites.names == SITES  # following the error's advice


def test_fewer_than_all_clients_per_round_are_refused_once_their_number_is_known(
    tmp_path: Path, federation: Federation
) -> None:
    world = World(federation)
    with pytest.raises(UserError, match="clients_per_round=100%"):
        world.survey(tmp_path, clients_per_round=2)
    world.agreeing = "ac"
    assert world.survey(tmp_path, clients_per_round=2).sites.names == ("a", "c")


def test_the_command_refuses_settings_before_it_makes_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedc2i.deploy.coordinator_folder.admitted", lambda own: dict.fromkeys(SITES, ""))
    own = make_coordinator(tmp_path / "coordinator", ["localhost"], 9092)
    monkeypatch.setattr("sys.argv", ["fedc2i", "coordinator", "contribution", str(own.folder), "fedavg"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "needs at least 2 seeds (--seeds 0-2)" in capsys.readouterr().err
    assert not (own.folder / "runs" / "contribution-fedavg").exists()


def test_a_site_that_fails_ends_the_measurement_with_its_reason(tmp_path: Path, federation: Federation) -> None:
    world = World(federation)
    game = world.survey(tmp_path, "fedavg")
    introduce = world.grid.nodes[101].spoil

    def refuse(reply: Message) -> Message | None:
        if "introduction" not in reply.content:
            reply.content = failure("its policy lets no prototypes leave")
        return introduce(reply)

    world.grid.nodes[101].spoil = refuse
    with pytest.raises(UserError, match=r"^b: its policy lets no prototypes leave$"):
        game.measure()
