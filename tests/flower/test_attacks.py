"""Dishonest sites over Flower's messages: the same numbers as in process, and a norm that is too large is left out."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("flwr.app")
from fakes import identity  # noqa: F401
from flwr.app import Message
from test_coordinator import SEED, TRAINING, Stage, assert_same_rounds, in_process, look_at_once  # noqa: F401

from fedc2i.core.errors import UserError
from fedc2i.data.federation import Federation
from fedc2i.data.remote import RemoteFederation, blank_clients
from fedc2i.deploy.run_description import describe, understand
from fedc2i.engine.attacks import parse
from fedc2i.engine.settings import EngineSettings
from fedc2i.flower.message_format import Answer
from fedc2i.methods.base import Method
from fedc2i.methods.fedavg import FedAvg
from fedc2i.methods.fedc2i import FedC2I
from fedc2i.methods.pfedgraph import PFedGraph
from fedc2i.models.model import Model
from fedc2i.runs.plan import prepare


@pytest.mark.parametrize(
    "attack", ["label-flip@b", "sign-flip@b", "scaled:10@b", "noise:1@2", "nan@b", "free-rider@b", "scaled:1e20@b"]
)
@pytest.mark.parametrize("method", [FedC2I(), PFedGraph()], ids=lambda method: method.name)
def test_the_same_numbers_as_in_process(method: Method, attack: str, model: Model, federation: Federation) -> None:
    settings = EngineSettings(rounds=3, **vars(TRAINING), executor="looped", attack=attack)
    stage = Stage(method, model, federation, settings)
    attackers = parse(attack, federation.names, SEED)
    stage.work = replace(stage.work, context=replace(stage.work.context, attacks=attackers))
    got, want = stage.run(), in_process(method, model, federation, settings)
    assert_same_rounds(got, want)
    assert [report.refused for report in got] == [report.refused for report in want]
    assert {report.refused for report in got} == {("b",) if attack in ("nan@b", "scaled:1e20@b") else ()}


@pytest.mark.parametrize("attack", ["", "noise:0.5@1;label-flip@b", "free-rider@50%", 'scaled:3@"a, or c"'])
def test_sites_are_told_who_attacks(attack: str) -> None:
    names = ("a, or c", "b", "d;e", "f")
    federation = RemoteFederation("sites", blank_clients(names, (3, 16, 16)), ("no", "yes"))
    plan = prepare(["fedavg"], {"model": "lenet5", "rounds": 3, "engine": "flower", "attack": attack}, federation)[0]
    for seed in (0, 5):
        context = understand(describe(plan, seed))[0].context
        assert str(context.attacks) == str(parse(attack, names, seed))


def test_an_attack_is_no_way_around_noise() -> None:
    """A free-rider would send its start, which has seen its data; neither a coordinator nor a site takes part."""
    federation = RemoteFederation("sites", blank_clients(("a", "b"), (3, 16, 16)), ("no", "yes"))
    settings = {"model": "lenet5", "rounds": 3, "engine": "flower", "attack": "free-rider@b", "clip": 1.0}
    describe(prepare(["fedavg"], settings, federation)[0], 0)
    with pytest.raises(UserError, match="over real sites attack and noise exclude each other"):
        describe(prepare(["fedavg"], {**settings, "noise": 1.0}, federation)[0], 0)


def huge(reply: Message) -> Message:
    answer = Answer.from_record(reply.content) if "upload" in reply.content else None
    if answer is not None and answer.upload:
        wild = {name: 1e6 * tensor for name, tensor in answer.upload.items()}
        reply.content = Answer(wild, answer.report, answer.metrics).to_record(False)
    return reply


def test_too_large_an_upload_is_left_out_and_named(model: Model, federation: Federation) -> None:
    stage = Stage(FedAvg(), model, federation, EngineSettings(rounds=2, **vars(TRAINING)))
    stage.grid.nodes[101].spoil = huge
    reports = stage.run()
    assert [report.refused for report in reports] == [("b",), ("b",)]
    lines = [line for line in stage.said if "ignored" in line]
    assert [line[: line.index(" is ")] for line in lines] == [
        "round 1: the upload of b",
        "round 2: the upload of b",
    ]
    assert all(line.endswith(" times the usual size; ignored") for line in lines)
    assert [line.partition(" is ")[2] for line in lines] == [f"{report.why['b']}; ignored" for report in reports]
    open_to_all = Stage(FedAvg(), model, federation, EngineSettings(rounds=2, **vars(TRAINING), norm_bound=0.0))
    open_to_all.grid.nodes[101].spoil = huge
    assert [report.refused for report in open_to_all.run()] == [(), ()]
