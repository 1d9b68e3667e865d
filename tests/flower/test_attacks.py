"""Dishonest sites over Flower's messages: the same numbers as in process, and a norm that is too large is rejected."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("flwr.app")
from fakes import Stage, assert_same_rounds, changed, identity, look_at_once  # noqa: F401

from fedc2i.core.errors import UserError
from fedc2i.data.federation import Federation, InputSpec
from fedc2i.data.remote import RemoteFederation, blank_clients
from fedc2i.deploy.run_description import describe, understand
from fedc2i.engine.attacks import parse
from fedc2i.methods.base import Method
from fedc2i.methods.fedavg import FedAvg
from fedc2i.methods.fedc2i import FedC2I
from fedc2i.methods.pfedgraph import PFedGraph
from fedc2i.models.model import Model
from fedc2i.runs.plan import prepare

SETTINGS = {"model": "lenet5", "rounds": 3, "engine": "flower"}


ATTACKS = ("label-flip@b", "noise:1@2", "push:1@b", "free-rider@b", "scaled:1e20@b")  # of data, drawn, agreed, ...


@pytest.mark.parametrize(
    ("method", "attack"),
    [*((FedC2I(), attack) for attack in ATTACKS), (PFedGraph(), "nan@b")],
    ids=lambda own: getattr(own, "name", own),
)
def test_the_same_numbers_as_in_process(method: Method, attack: str, model: Model, federation: Federation) -> None:
    stage = Stage(method, model, federation, rounds=3, attack=attack)
    attackers = parse(attack, federation.names, stage.SEED)
    stage.work = replace(stage.work, context=replace(stage.work.context, attacks=attackers))
    got, want = stage.run(), stage.in_process()
    assert_same_rounds(got, want)
    assert [report.refused for report in got] == [report.refused for report in want]
    assert {report.refused for report in got} == {("b",) if attack in ("nan@b", "scaled:1e20@b") else ()}


@pytest.mark.parametrize("attack", ["", "noise:0.5@1;label-flip@b", "free-rider@50%", 'scaled:3@"a, or c"'])
def test_sites_are_told_who_attacks(attack: str) -> None:
    names = ("a, or c", "b", "d;e", "f")
    federation = RemoteFederation("sites", blank_clients(names, InputSpec((3, 16, 16))), ("no", "yes"))
    plan = prepare(["fedavg"], {**SETTINGS, "attack": attack}, federation)[0]
    for seed in (0, 5):
        context = understand(describe(plan, seed))[0].context
        assert str(context.attacks) == str(parse(attack, names, seed))


def test_an_attack_is_no_way_around_noise() -> None:
    """A free-rider would send its start, which has seen its data; neither a coordinator nor a site takes part."""
    federation = RemoteFederation("sites", blank_clients(("a", "b"), InputSpec((3, 16, 16))), ("no", "yes"))
    settings = {**SETTINGS, "attack": "free-rider@b", "clip": 1.0}
    describe(prepare(["fedavg"], settings, federation)[0], 0)
    with pytest.raises(UserError, match="attack and noise exclude each other"):
        describe(prepare(["fedavg"], {**settings, "noise": 1.0}, federation)[0], 0)


@pytest.mark.parametrize("bound", [None, 0.0])
def test_too_large_an_upload_is_rejected_and_named(bound: float | None, model: Model, federation: Federation) -> None:
    stage = Stage(FedAvg(), model, federation, **({} if bound is None else {"norm_bound": bound}))
    stage.grid.nodes[101].spoil = changed(
        lambda answer: replace(answer, upload={name: 1e6 * own for name, own in answer.upload.items()})
    )
    reports = stage.run()
    lines = [line for line in stage.said if "ignored" in line]
    if bound == 0.0:  # open to all
        assert [report.refused for report in reports] == [(), ()]
        return
    assert [report.refused for report in reports] == [("b",), ("b",)]
    assert all("times the usual size" in report.why["b"] for report in reports)
    assert lines == [f"round {own.round}: the upload of b is {own.why['b']}; ignored" for own in reports]
