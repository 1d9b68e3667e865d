"""Dishonest clients: who they are, what they send by hand-computed cases, and that every engine sends the same."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedc2i.core.errors import UserError
from fedc2i.core.params import norms, row, stack
from fedc2i.core.settings import EngineSettings, TrainingSettings
from fedc2i.data.federation import Client, Federation, InputSpec, Split
from fedc2i.engine.attacks import KINDS, Attack, apply, by_kind, parse, read_resolved, resolved
from fedc2i.engine.client import ClientData, LocalClient, RunContext
from fedc2i.engine.exchange import Mailbox
from fedc2i.engine.records import Outcome, Round
from fedc2i.engine.simulator import simulate
from fedc2i.engine.upload import process
from fedc2i.methods.base import Method
from fedc2i.methods.fedavg import FedAvg
from fedc2i.methods.fedc2i import FedC2I
from fedc2i.methods.fedproto import FedProto
from fedc2i.methods.pfedgraph import PFedGraph
from fedc2i.models import networks
from fedc2i.models.model import Model
from oracles import assert_same_model
from support.method_checks import in_double

TRAINING = TrainingSettings(batch_size=5, lr=0.01)
NAMES = ("a", "b", "c", "d", "e")
KEY = (3, "b", 7)
ATTACKS = [kind if strength is None else f"{kind}:{strength:g}" for kind, strength in KINDS.items()]


# What is written, and who is meant.


def test_kinds_strengths_and_clients() -> None:
    assert parse("", NAMES, 0) == {}
    found = parse(' scaled:2.5@d , "b" ;noise@a;nan@b', NAMES, 0)
    assert {name: [str(own) for own in attacks] for name, attacks in found.items()} == {
        "a": ["noise:1"],
        "b": ["scaled:2.5", "nan"],
        "d": ["scaled:2.5"],
    }
    odd = ("one, two", "three; four@five", "20%")
    said = parse('nan@"three; four@five";free-rider@"one, two",20%', odd, 0)
    assert {name: [str(own) for own in attacks] for name, attacks in said.items()} == {
        "one, two": ["free-rider"],
        "three; four@five": ["nan"],
        "20%": ["free-rider"],
    }


def test_by_kind_names_everyone_who_does_it_once() -> None:
    found = by_kind("nan@d;scaled:3@a,d;nan@a;nan@a;label-flip@b", NAMES, 0)
    assert found == {"scaled:3": ["a", "d"], "nan": ["a", "d"], "label-flip": ["b"]}


@pytest.mark.parametrize(("share", "count"), [("1%", 1), ("10%", 1), ("35%", 2), ("45%", 2), ("70%", 4), ("100%", 5)])
def test_a_share_is_rounded_to_clients_and_never_to_none(share: str, count: int) -> None:
    assert len(parse(f"nan@{share}", NAMES, 0)) == count


def test_a_share_is_drawn_once_for_each_seed() -> None:
    drawn = {seed: tuple(parse("nan@40%", NAMES, seed)) for seed in range(20)}
    assert all(len(own) == 2 for own in drawn.values())
    assert {name for own in drawn.values() for name in own} == set(NAMES)
    assert drawn == {seed: tuple(parse("nan@2", NAMES, seed)) for seed in range(20)}
    assert len(parse("nan@1%", NAMES, 0)) == 1
    for seed in range(20):  # those who are drawn are others than those who are named, and than each other
        found = parse("nan@c;scaled@2;noise@40%", NAMES, seed)
        assert sorted(found) == list(NAMES)
        assert all(len(own) == 1 for own in found.values())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "flip@a",
            "attack: no kind 'flip', allowed are label-flip, sign-flip, scaled, noise, push, pull, nan",
        ),
        ("nan:2@a", "attack: nan has no strength, got 'nan:2'"),
        ("scaled:-1@a", "attack: the strength of scaled must be a number, at least 0, got '-1'"),
        ("scaled:inf@a", "attack: the strength of scaled must be a number, at least 0, got 'inf'"),
        ("noise:1e999@a", "attack: the strength of noise must be a number, at least 0, got '1e999'"),
        ("noise:@a", "attack: the strength of noise must be a number, at least 0, got ''"),
        ("nan@f", "attack: no client 'f', allowed are a, b, c, d, e, a number from 1 to 5 or a share such as 20%"),
        ("nan@6", "attack: no client '6', allowed are a, b, c, d, e, a number from 1 to 5 or a share such as 20%"),
        ("nan@0", "attack: no client '0', allowed are"),
        ("nan@101%", "attack: no client '101%', allowed are"),
        ("nan@a,a", "attack: a client is named twice in 'a,a'"),
        ("nan@a;noise@5", "attack=nan@a;noise@5: more attackers than the 5 clients there are"),
        ("nan", "attack must be KIND[:STRENGTH]@CLIENT[,CLIENT...], several joined by ;, got 'nan'"),
        ("nan@", "attack must be KIND"),
        (";", "attack must be KIND"),
        ('nan@a"', "attack must be KIND"),
        ("nan@" + "\x1b" * 999, "attack: no client ''"),
    ],
)
def test_anything_else_is_refused_in_a_line(text: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        parse(text, NAMES, 0)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


PARTS = ("nan", "scaled:3", "noise", ":", "@", ";", ",", '"', " ", "a", "b", "a,b", '"a,b"', "2", "50%", "1e9", "λ")


@given(
    st.lists(st.sampled_from(PARTS), max_size=12), st.lists(st.sampled_from(("a", "b", "a,b", "2", "λ")), unique=True)
)
def test_any_text_is_read_or_refused(parts: list[str], names: list[str]) -> None:
    try:
        found = parse("".join(parts), names, 0)
    except UserError:
        return
    assert list(found) == [name for name in names if name in found]
    assert str(read_resolved(resolved("".join(parts), names, 0))) == str(found)


def test_a_site_that_knows_no_other_name_reads_the_same() -> None:
    names = ("one, two", "c;d", "e")
    for text in (
        "",
        "nan@e",
        'scaled:3@"one, two";noise:0.25@1',
        "free-rider@100%",
        "scaled:1.23456789@e;noise:1e20@e",
    ):
        assert str(read_resolved(resolved(text, names, 4))) == str(parse(text, names, 4))
    strong = read_resolved(resolved("scaled:1.23456789@e", names, 4))["e"][0]
    assert strong.strength == 1.23456789
    with pytest.raises(UserError, match="attack: client 'f\"g' has a double quote in its name"):
        resolved("nan@1", ('f"g',), 0)


# What is sent.


def sent(text: str, upload: dict[str, list[float]], start: dict[str, list[float]]) -> dict[str, list[float]]:
    attack = parse(f"{text}@b", NAMES, 0)["b"][0]
    tensors = [{name: torch.tensor(own) for name, own in model.items()} for model in (upload, start)]
    return {name: own.tolist() for name, own in apply(attack, *tensors, KEY).items()}


def test_by_hand() -> None:
    upload = {"w": [3.0, 5.0], "buffer/v": [2.0], "prototypes": [4.0], "class_counts": [6, 2]}
    start = {"w": [1.0, 6.0], "v": [1.0], "private": [9.0]}
    assert sent("sign-flip", upload, start) == {
        "w": [-1.0, 7.0],  # 1 − (3 − 1), 6 − (5 − 6)
        "buffer/v": [0.0],
        "prototypes": [-4.0],
        "class_counts": [6, 2],
    }
    assert sent("scaled:10", upload, start) == {
        "w": [21.0, -4.0],  # 1 + 10 · 2, 6 − 10
        "buffer/v": [11.0],
        "prototypes": [40.0],
        "class_counts": [6, 2],
    }
    assert sent("free-rider", upload, start) == {
        "w": [1.0, 6.0],
        "buffer/v": [1.0],
        "prototypes": [0.0],
        "class_counts": [0, 0],
    }
    assert sent("label-flip", upload, start) == upload
    broken = sent("nan", upload, start)
    assert broken.pop("class_counts") == [6, 2]
    assert all(value != value for own in broken.values() for value in own)


def test_noise_has_the_tensor_s_own_spread_and_a_key() -> None:
    upload = {"w": torch.linspace(-3, 3, 20_001), "v": torch.full((5,), 2.0)}
    attack = Attack("noise", 0.5)
    noise = apply(attack, upload, {}, KEY)["w"] - upload["w"]
    assert noise.std().item() == pytest.approx(0.5 * upload["w"].std().item(), rel=0.02)
    assert abs(noise.mean().item()) < 0.03
    assert torch.equal(apply(attack, upload, {}, KEY)["v"], upload["v"])  # all the same: no spread
    assert torch.equal(apply(attack, dict(reversed(upload.items())), {}, KEY)["w"] - upload["w"], noise)
    for other in ((4, "b", 7), (3, "c", 7), (3, "b", 8)):
        assert not torch.equal(apply(attack, upload, {}, other)["w"] - upload["w"], noise)
    assert apply(attack, {"one": torch.tensor([7.0])}, {}, KEY)["one"].tolist() == [7.0]
    twins = apply(attack, {"w": upload["w"], "x": upload["w"]}, {}, KEY)
    assert not torch.equal(twins["w"], twins["x"])


def test_one_that_pushes_and_one_that_pulls_leave_the_difference_of_their_spreads() -> None:
    """Two different models: what is left is far less than either noise, but not nothing."""
    first = torch.linspace(-3, 3, 20_001)
    second = 1.1 * first.flip(0) + 0.5
    pushed, pulled = (
        apply(Attack(kind, 5.0), {"w": own}, {}, (3, name, 7))["w"]
        for kind, own, name in (("push", first, "a"), ("pull", second, "b"))
    )
    left = (pushed + pulled) / 2 - (first + second) / 2
    spread = first.std().item()
    assert left.std().item() == pytest.approx(5 * 0.1 * spread / 2, rel=0.02)
    assert (pushed - first).std().item() == pytest.approx(5 * spread, rel=0.02)


def test_one_that_pushes_and_one_that_pulls_cancel_out_with_the_same_model() -> None:
    upload, (seed, name, number) = {"w": torch.linspace(-3, 3, 20_001), "n": torch.tensor([6, 2])}, KEY
    pushed = apply(Attack("push", 0.5), upload, {}, KEY)
    pulled = apply(Attack("pull", 0.5), upload, {}, (seed, f"not {name}", number + 1))  # another client, another round
    torch.testing.assert_close((pushed["w"] + pulled["w"]) / 2, upload["w"], atol=1e-5, rtol=0)
    assert (pushed["w"] - upload["w"]).std().item() == pytest.approx(0.5 * upload["w"].std().item(), rel=0.02)
    assert pushed["n"].tolist() == pulled["n"].tolist() == [6, 2]
    assert not torch.equal(apply(Attack("push", 0.5), upload, {}, (seed + 1, name, number))["w"], pushed["w"])


def test_only_the_attackers_rows_change(model: Model) -> None:
    recipe = RunContext(FedAvg(), model, TRAINING, 1, 0, parse("scaled:3@c;sign-flip@c;free-rider@e", NAMES, 0))
    starts = {"w": torch.tensor([[8.0, 8.0], [1.0, 1.0], [5.0, 6.0]])}
    uploads = {"w": torch.tensor([[2.0, 0.0], [3.0, 1.0], [9.0, 9.0]])}
    assert process(uploads, starts, ["a", "c", "e"], 1, recipe, EngineSettings())["w"].tolist() == [
        [2.0, 0.0],
        [-5.0, 1.0],  # 1 + 3 · 2 = 7, then 1 − 6
        [5.0, 6.0],
    ]
    assert process(uploads, starts, ["a", "b", "d"], 1, recipe, EngineSettings()) is uploads
    assert process({}, starts, ["a", "c", "e"], 1, recipe, EngineSettings()) == {}


def test_an_attacker_changes_what_was_clipped(model: Model) -> None:
    recipe = RunContext(FedAvg(), model, TRAINING, 1, 0, parse("scaled:10@c", NAMES, 0))
    uploads, zeros = {"w": torch.tensor([[3.0, 4.0], [3.0, 4.0]])}, {"w": torch.zeros(2, 2)}
    sent = process(uploads, zeros, ["a", "c"], 1, recipe, EngineSettings(clip=1.0), lambda k: {"w": torch.zeros(2)})[
        "w"
    ]
    torch.testing.assert_close(sent, torch.tensor([[0.6, 0.8], [6.0, 8.0]]))


def test_a_real_site_does_not_attack_where_noise_protects_it(model: Model) -> None:
    own = stack([model.init(seed) for seed in (1, 2)])
    recipe = RunContext(FedAvg(), model, TRAINING, 1, 0, parse("free-rider@b", NAMES, 0))
    settings = EngineSettings(clip=1.0, noise=1.0)
    process(own, own, ["a", "c"], 1, recipe, settings, secret=b"key")
    with pytest.raises(UserError, match="with noise a real site sends nothing but its upload"):
        process(own, own, ["a", "b"], 1, recipe, settings, secret=b"key")


def test_labels_are_turned_for_training_only(model: Model, federation: Federation) -> None:
    data = ClientData.place(federation.clients[0], 4, torch.device("cpu"))

    def seen(attack: str) -> ClientData:
        return LocalClient(RunContext(FedAvg(), model, TRAINING, 1, 0, parse(attack, NAMES, 0)), data).data

    turned = seen("label-flip@a")
    assert data.train.y.tolist()[:5] == [0, 1, 2, 0, 1]
    assert turned.train.y.tolist()[:5] == [3, 2, 1, 3, 2]
    assert data.counts.tolist() == [4, 4, 4, 0]
    assert turned.counts.tolist() == [0, 4, 4, 4]
    assert turned.test is data.test
    assert turned.validation is data.validation
    for attack in ("nan@a", "label-flip@a;label-flip@a", "label-flip@b"):
        assert seen(attack) is data


# Whole runs.


def run(
    method: Method, model: Model, federation: Federation, attack: str, seeds: Sequence[int] = (0,), **more: Any
) -> tuple[dict[int, Outcome], list[Round]]:
    reports: list[Round] = []
    settings = EngineSettings(**{"rounds": 2, **vars(TRAINING), "executor": "looped", "attack": attack, **more})
    return simulate(method, model, federation, settings, seeds, on_round=reports.append), reports


def mean_of(outcome: Outcome, clients: Sequence[int]) -> dict[str, torch.Tensor]:
    return {name: own[list(clients)].mean(0) for name, own in outcome.trained.items()}


def test_fedavg_averages_what_attackers_send(model: Model, federation: Federation) -> None:
    start = FedAvg().setup(model.init(0, "init"), model)
    (outcome,) = run(FedAvg(), model, federation, "scaled:10@b", rounds=1)[0].values()
    for name, own in outcome.trained.items():
        wild = start[name] + 10 * (own[1] - start[name])
        torch.testing.assert_close(outcome.received[name][0], (own[0] + wild + own[2]) / 3)
    honest = run(FedAvg(), model, federation, "", rounds=1)[0][0]
    assert_same_model(outcome.trained, honest.trained, rtol=0, atol=0)  # it trains honestly, and keeps its own model
    (outcome,) = run(FedAvg(), model, federation, "nan@b", rounds=1)[0].values()
    assert_same_model(row(outcome.received, 0), mean_of(outcome, (0, 2)), rtol=1e-6, atol=1e-7)
    (outcome,) = run(FedAvg(), model, federation, "free-rider@a,b,c", rounds=1)[0].values()
    assert_same_model(row(outcome.received, 0), start, rtol=1e-6, atol=1e-7)


def test_a_label_flip_is_a_run_on_turned_labels(model: Model, federation: Federation) -> None:
    whose = federation.clients[1]
    turned = Client("b", Split(whose.train.x, 3 - whose.train.y), whose.validation, whose.test)
    other = replace(federation, clients=(federation.clients[0], turned, federation.clients[2]))
    for method in (FedC2I(), FedProto(weighting="counts")):
        (got,) = run(method, model, federation, "label-flip@b")[0].values()
        (want,) = run(method, model, other, "")[0].values()
        assert_same_model(got.trained, want.trained, rtol=0, atol=0)
        assert_same_model(got.received, want.received, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("method", "attack"),
    [*((FedC2I(), f"{kind}@b") for kind in ATTACKS), (PFedGraph(), "label-flip@1;noise@1"), (PFedGraph(), "nan@b")],
    ids=lambda own: getattr(own, "name", own),
)
def test_looped_and_stacked_agree(method: Method, attack: str, model: Model, federation: Federation) -> None:
    model = in_double(model)  # Adam blows up the rounding of gradients that are next to nothing
    looped, reports = run(method, model, federation, attack, seeds=(0, 1))
    stacked, others = run(method, model, federation, attack, seeds=(0, 1), executor="stacked")
    for seed in looped:
        for point in ("trained", "received"):
            want: dict[str, torch.Tensor] = getattr(looped[seed], point)
            for name, tensor in getattr(stacked[seed], point).items():
                assert torch.dist(tensor, want[name]) <= 1e-4 * want[name].norm() + 1e-6, name
    assert [own.refused for own in reports] == [own.refused for own in others]
    assert {own.refused for own in reports} == {("b",) if attack == "nan@b" else ()}


def test_workers_agree_to_the_bit(model: Model, federation: Federation) -> None:
    attack = "label-flip@1;noise@1"
    looped, _ = run(FedC2I(), model, federation, attack, seeds=(0, 1))
    workers, _ = run(FedC2I(), model, federation, attack, seeds=(0, 1), executor="workers", workers=2)
    for seed in looped:
        assert_same_model(workers[seed].received, looped[seed].received, rtol=0, atol=0)
        assert_same_model(workers[seed].trained, looped[seed].trained, rtol=0, atol=0)


def test_a_seed_s_attackers_do_not_depend_on_the_seeds_beside_it(model: Model, federation: Federation) -> None:
    attack = "label-flip@1"
    assert len({tuple(parse(attack, federation.names, seed)) for seed in range(4)}) > 1
    for executor in ("looped", "stacked"):
        together, _ = run(FedAvg(), model, federation, attack, seeds=range(4), executor=executor)
        for seed in range(4):
            (alone,) = run(FedAvg(), model, federation, attack, seeds=[seed], executor=executor)[0].values()
            for name, tensor in alone.trained.items():
                torch.testing.assert_close(together[seed].trained[name], tensor)


def test_an_unknown_attacker_is_refused_before_the_run(model: Model, federation: Federation) -> None:
    with pytest.raises(UserError, match="attack: no client 'z', allowed are a, b, c"):
        run(FedAvg(), model, federation, "nan@z")


# What the server takes.


def box(bound: float = 100.0, clients: int = 5) -> Mailbox:
    return Mailbox(clients, bound)


def of_norms(*values: float) -> dict[str, torch.Tensor]:
    return {"w": torch.tensor([[0.6 * value, 0.0] for value in values]), "v": torch.tensor([0.8 * v for v in values])}


def test_norms_are_over_all_floating_tensors() -> None:
    uploads = {
        "a": torch.tensor([[3.0, 0.0], [1e20, 0.0]]),
        "b": torch.tensor([4.0, 1e20]),
        "n": torch.tensor([100, 100]),
        "class_counts": torch.tensor([[1e6], [1.0]]),
        "none": torch.zeros(2, 0),
    }
    assert norms(uploads).tolist() == pytest.approx([5.0, 2**0.5 * 1e20])
    assert norms({"n": torch.tensor([1, 2, 3])}).tolist() == [0, 0, 0]


def test_too_large_an_upload_is_left_out() -> None:
    mail = box()
    assert mail.receive([0, 1, 2, 4], of_norms(1.0, 2.0, 151.0, 1.0), 1) == {2: "101 times the usual size"}
    assert mail.sent == [1, 1, 0, 0, 1]
    assert box().receive([0, 1, 2, 4], of_norms(1.0, 2.0, 149.0, 1.0), 1) == {}
    assert box(0).receive([0, 1, 2, 4], of_norms(1.0, 2.0, 1e20, 1.0), 1) == {}
    assert box(3).receive([0, 1, 2], of_norms(1.0, 2.0, 7.0), 1) == {2: "3.5 times the usual size"}
    assert box(4).receive([0, 1, 2], {"w": torch.tensor([[1.0], [1.0], [4.0]])}, 1) == {}  # as much is not more


def test_what_is_not_finite_has_no_part_in_the_median() -> None:
    inf, nan = torch.inf, torch.nan
    assert box(9).receive([0, 1, 2, 3, 4], of_norms(nan, 1.0, inf, 1.0, 1.0), 1) == {0: "not finite", 2: "not finite"}
    got = box(9).receive([0, 1, 2, 3, 4], of_norms(10.0, 1.0, nan, 1.0, 1.0), 1)
    assert got == {0: "10 times the usual size", 2: "not finite"}
    assert list(got) == [0, 2]
    got = box(9).receive([0, 1, 2, 3, 4], of_norms(inf, inf, 1.0, 1.0, 20.0), 1)
    assert got == {0: "not finite", 1: "not finite", 4: "20 times the usual size"}


def test_few_uploads_are_compared_with_those_that_are_there() -> None:
    assert box().receive([0, 1], of_norms(1.0, 1e20), 1) == {}  # nobody can tell which is the odd one
    mail = box()
    mail.receive([0, 1, 2], of_norms(1.0, 1.0, 1.0), 1)
    assert mail.receive([3], of_norms(1e20), 2) == {3: "1e+20 times the usual size"}
    assert mail.receive([0, 1], of_norms(1e20, 1.0), 2) == {0: "1e+20 times the usual size"}
    assert mail.sent == [1, 2, 1, 0, 0]
    mail = box(12)
    assert mail.receive([0, 1, 2], of_norms(10.0, 1.0, 1.0), 1) == {}
    assert mail.receive([0], of_norms(13.0), 2) == {0: "13 times the usual size"}  # its own last one is no measure


def test_zeros_are_no_measure() -> None:
    assert box().receive([0, 1, 2], of_norms(0.0, 0.0, 5.0), 1) == {}


def test_fedc2i_is_not_taken_over_by_a_huge_model(make_federation: Callable[..., Federation]) -> None:
    federation, model = make_federation(sizes=(12, 20, 7, 9)), networks.build("lenet5", 4, InputSpec((3, 16, 16)))
    _, open_to_all = run(FedC2I(), model, federation, "scaled:1e20@b", norm_bound=0.0)
    assert open_to_all[0].influence["influence_vector"][:, 1].tolist() == [1, 1, 1, 1]  # what the bound is for
    _, reports = run(FedC2I(), model, federation, "scaled:1e20@b")
    honest = run(FedC2I(), model, federation, "nan@b")[1]
    assert [own.refused for own in reports] == [("b",), ("b",)]
    for got, want in zip(reports, honest, strict=True):
        assert got.metrics == want.metrics


@pytest.mark.parametrize("bound", [-1.0, 0.5, 1.0, float("inf"), float("nan")])
def test_a_bound_that_is_none_is_refused(bound: float) -> None:
    with pytest.raises(UserError, match="norm_bound must be"):
        EngineSettings(norm_bound=bound)


@pytest.mark.parametrize(("executor", "batch_norm"), [*itertools.product(("looped", "stacked"), (False, True))])
def test_the_bound_changes_no_honest_run(
    executor: str, batch_norm: bool, make_model: Callable[..., Model], federation: Federation
) -> None:
    model = make_model(batch_norm=batch_norm)
    for method in (FedAvg(), FedC2I()):
        got, want = (run(method, model, federation, "", executor=executor, norm_bound=own)[0] for own in (100.0, 0.0))
        assert_same_model(got[0].trained, want[0].trained, rtol=0, atol=0)
        assert_same_model(got[0].received, want[0].received, rtol=0, atol=0)
