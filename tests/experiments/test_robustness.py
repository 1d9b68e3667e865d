"""Methods under attack: weights and losses by hand, verdicts both ways, and the whole command."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from experiments.robustness_verdict import Attacked, Measured, given, verdict
from studies import ask

from experiments import robustness
from experiments import robustness_tables as tables
from fedc2i.core.settings import EngineSettings, TrainingSettings
from fedc2i.data.federation import Federation
from fedc2i.engine import attacks as engine
from fedc2i.engine.simulator import simulate
from fedc2i.methods.fedavg import FedAvg
from fedc2i.methods.local import Local
from fedc2i.models.model import Model
from fedc2i.runs.results import Array
from support.helpers import Answer, blank_federation, call, made_up, write_arrays

NAN = np.nan
QUICK = ("--rounds", "1", "--device", "cpu")


# By hand.


def test_the_weight_given_to_attackers() -> None:
    honest = np.array([True, False, True])
    first = [[0.5, 0.25, 0.25], [0.0, 1.0, 0.0], [0.25, 0.5, 0.25]]
    second = [[0.75, 0.125, 0.125], [0.0, 1.0, 0.0], [NAN, NAN, NAN]]
    assert given(np.array([first]), honest) == pytest.approx(0.375)
    assert given(np.array([first, second]), honest) == pytest.approx((0.25 + 0.5 + 0.125) / 3)
    left_out = [[0.5, NAN, 0.5], [NAN, NAN, NAN], [0.5, NAN, 0.5]]
    assert given(np.array([left_out]), honest) == 0
    assert np.isnan(given(np.full((1, 3, 3), NAN), honest))
    rows = np.stack([np.array([first]), np.array([left_out])], axis=-1)  # two classes
    assert given(rows, honest) == pytest.approx((0.25 + 0.5 + 0 + 0) / 4)
    two = np.array([True, False, False])
    assert given(np.array([first]), two) == pytest.approx(0.5)


def test_only_honest_clients_count() -> None:
    federation = blank_federation(("a", "b", "c"))
    weights = {"influence_vector": {0: [np.full((3, 3), 1 / 3)], 1: [[[0.5, 0.1, 0.4]] * 3]}}
    result = made_up(federation, {0: [[10.0, 90.0, 30.0]], 1: [[50.0, 0.0, 40.0]]}, influence=weights, lift=5.0)
    own = Measured.of(result, "nan@b")
    assert own.accuracy["received"].tolist() == [20.0, 45.0]
    assert own.accuracy["trained"].tolist() == [25.0, 50.0]
    assert own.weights["influence_vector"].tolist() == pytest.approx([1 / 3, 0.1])
    assert own.equal.tolist() == pytest.approx([1 / 3, 1 / 3])
    assert own.taken
    both = Measured.of(result, "nan@b,c")
    assert both.accuracy["received"].tolist() == [10.0, 50.0]
    assert both.weights["influence_vector"].tolist() == pytest.approx([2 / 3, 0.5])
    assert both.equal.tolist() == pytest.approx([2 / 3, 2 / 3])
    alone = {"influence_vector": {seed: [[[0.5, NAN, 0.5], [0.0, 1.0, 0.0], [0.5, NAN, 0.5]]] for seed in (0, 1)}}
    kept = made_up(federation, {0: [[1.0, 2.0, 3.0]], 1: [[1.0, 2.0, 3.0]]}, influence=alone)
    assert not Measured.of(kept, "nan@b").taken  # only the attacker itself has a weight for its model
    plain = Measured.of(made_up(federation, {0: [[1.0, 2.0, 3.0]]}, method=FedAvg()), "nan@b")
    assert plain.weights == {}
    assert not plain.taken


def test_attackers_are_those_of_each_seed() -> None:
    accuracy = [10.0, 20.0, 40.0]
    result = made_up(blank_federation(("a", "b", "c")), {seed: [accuracy] for seed in range(3)})
    drawn = ["abc".index(next(iter(engine.parse("nan@1", "abc", seed)))) for seed in range(3)]
    assert len({*drawn}) > 1
    assert Measured.of(result, "nan@1").accuracy["received"].tolist() == [(70 - accuracy[bad]) / 2 for bad in drawn]


def measured(label: str, received: list[float], trained: list[float], weight: float | None = None) -> Measured:
    accuracy: Mapping[str, Array] = {"received": np.array(received), "trained": np.array(trained)}
    weights = {} if weight is None else {"influence_vector": np.full(len(received), weight)}
    equal = np.full(len(received), 0.2)
    return Measured(label, "trained", accuracy, weights, equal, weight is not None and weight > 0)  # type: ignore[arg-type]


def found(fedc2i: Measured, fedavg: Measured) -> dict[str, Attacked]:
    before = {
        "local": measured("Local", [50.0, 52.0], [50.0, 52.0]),
        "fedavg": measured("FedAvg", [70.0, 72.0], [80.0, 80.0]),
        "fedc2i": measured("FedC²I", [75.0, 75.0], [82.0, 84.0], 0.2),
    }
    return {
        "toy": Attacked({"none": before, "nan": {"local": before["local"], "fedavg": fedavg, "fedc2i": fedc2i}}, "b")
    }


def met() -> dict[str, Attacked]:
    """FedC²I loses less than FedAvg, and gives the attacker little."""
    fedavg = measured("FedAvg", [40.0, 50.0], [80.0, 80.0])
    return found(measured("FedC²I", [74.0, 75.0], [83.0, 84.0], 0.15), fedavg)


def test_verdict_met() -> None:
    said = verdict(met())
    assert all(said.targets.values())
    assert said.sentences[0].startswith("On toy under nan before local training: FedC²I changes most favourably (-0.50")
    assert said.sentences[0].endswith("FedC²I -0.50, place 1 of 2; below Local (51.00 %): FedAvg.")
    assert said.sentences[1].endswith("FedC²I +0.50, place 1 of 2; below Local (51.00 %): no method.")
    assert said.sentences[2].endswith("less than the equal share (20.0 %) under 1 of 1 attacks.")
    assert all(sentence.endswith(": met.") for sentence in said.sentences[3:])


def test_verdict_missed() -> None:
    said = verdict(
        found(measured("FedC²I", [74.0, 74.0], [50.0, 50.0], 0.2), measured("FedAvg", [70.0, 72.0], [80.0, 80.0]))
    )
    assert list(said.targets.values()) == [False, False]
    assert said.sentences[1].startswith(
        "On toy under nan after local training: FedAvg changes most favourably (+0.00 points); "
        "FedC²I -33.00, place 2 of 2; "
    )
    assert said.sentences[2].endswith("under 0 of 1 attacks, not under nan.")
    assert said.sentences[3].endswith("equal share under every attack: missed (nan on toy).")
    assert said.sentences[4].endswith("at both points: missed (nan on toy).")


def test_losing_as_much_is_not_more_and_one_point_is_enough_to_miss() -> None:
    fedavg = measured("FedAvg", [69.0, 71.0], [79.0, 79.0])
    for received, trained, held in ((74.0, 82.0, True), (73.5, 82.0, False), (74.0, 81.5, False)):
        said = verdict(found(measured("FedC²I", [received] * 2, [trained] * 2, 0.1), fedavg))
        assert list(said.targets.values()) == [True, held]


def test_a_trial_meets_and_misses_no_target() -> None:
    own = found(measured("FedC²I", [75.0, 75.0], [82.0, 84.0], 0.1), measured("FedAvg", [70.0, 72.0], [80.0, 80.0]))
    said, real = verdict(own, ["A trial."]), verdict(own)
    assert said.targets == {}
    assert said.sentences == ("A trial.", *real.sentences[:3])
    assert "FedAvg and FedC²I change most favourably (+0.00 points)" in said.sentences[1]


def test_what_the_server_leaves_out_is_no_merit_of_the_weights() -> None:
    said = verdict(
        found(measured("FedC²I", [75.0, 75.0], [82.0, 84.0], 0.0), measured("FedAvg", [70.0, 72.0], [80.0, 80.0]))
    )
    assert said.sentences[2].endswith("equal share (20.0 %) under 0 of 0 attacks; rejected by the server: nan.")
    assert list(said.targets) == ["FedC²I's honest clients lose no more than FedAvg's under any attack, at both points"]


def test_tables() -> None:
    own = met()
    made = tables.tables(own, verdict(own), ["A note."])
    assert list(made) == ["robustness-toy", "robustness-toy-change", "robustness-toy-weights"]
    shown = made["robustness-toy"].to_markdown()
    assert "| FedAvg | before | 71.00 ± 1.41 | 45.00 ± 7.07 |" in shown
    assert "| FedC²I | before | **75.00 ± 0.00** | **74.50 ± 0.71** |" in shown
    assert "| Local | after * | 51.00 ± 1.41 | 51.00 ± 1.41 |" in shown
    assert "- Attackers on toy: b." in shown
    assert "- A note." in shown
    lost = made["robustness-toy-change"].to_markdown()
    assert lost.startswith("**Change of honest clients' accuracy on toy under attack (points), 2 seeds")
    assert "| FedAvg | before | -26.00 ± 5.66 |" in lost
    assert "| FedC²I | after * | **+0.50 ± 0.71** |" in lost
    assert "Local |" not in lost
    assert made["robustness-toy-weights"].to_csv().splitlines()[1] == "FedC²I,of models,20.00,20.00,0.00,15.00,0.00"


# The command.


@pytest.fixture
def toy(tmp_path: Path, make_federation: Callable[..., Federation]) -> str:
    return write_arrays(tmp_path / "data", make_federation(sizes=(12, 20, 7, 9)))


def study(data: str, out: Path, **more: list[str]) -> Answer:
    wanted = {
        "data": [data],
        "seeds": ["0"],
        "methods": ["local", "fedavg", "fedc2i"],
        "attacks": ["label-flip", "nan"],
    }
    typed = [part for name, parts in {**wanted, **more}.items() for part in (f"--{name}", *parts)]
    return ask(robustness.main, *typed, "--out", str(out), *QUICK)


def unwrapped(text: str) -> str:
    return " ".join(text.split())


def test_the_whole_command(toy: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    answer = study(toy, out)
    assert answer.code == 0, answer.err
    folder = out / "trial-1-rounds"
    files = answer.out.partition("\n\n")[0].splitlines()
    assert len(files) == 9
    assert all(Path(file).parent == folder for file in files)
    assert "; 7 runs to compute" in answer.err  # local once, two methods three times
    assert "rejected uploads: b 1" in answer.err
    lines = [line for line in answer.err.splitlines() if ", attack " in line or line.startswith("[")]
    assert [line if ", attack " in line else line[:5] for line in lines] == [
        *(f"{toy}, attack none", "[1/7]", "[2/7]", "[3/7]"),
        *(f"{toy}, attack label-flip", "[4/7]", "[5/7]"),
        *(f"{toy}, attack nan", "[6/7]", "[7/7]"),
    ]
    assert not list(out.rglob("*.safetensors"))
    refused = [json.loads(path.read_text(encoding="utf-8"))["refused_uploads"] for path in out.rglob("summary.json")]
    assert sorted(map(str, refused)) == ["{'b': 1}"] * 2 + ["{}"] * 5
    assert f"Attackers on {toy}: b." in Path(files[0]).read_text(encoding="utf-8")  # the second client
    stem = next(name for name in files if name.endswith("-weights.csv"))
    lines = Path(stem).read_text(encoding="utf-8").splitlines()
    assert lines[0] == "Method,Weights,equal share,none,label-flip,nan"
    assert [line.rpartition(",")[2] for line in lines[1:]] == ["0.00", "0.00"]
    before = {name: Path(name).read_bytes() for name in files}
    again = study(toy, out)
    assert "; 0 runs to compute" in again.err
    assert {name: Path(name).read_bytes() for name in files} == before


def test_drawn_attackers_are_named(toy: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    wanted = ("--data", toy, "--seeds", "0,1", "--rounds", "1", "--device", "cpu", "--out", str(out))
    answer = call("run", "fedavg", *wanted, "--attack", "sign-flip@25%")
    assert answer.code == 0, answer.err
    drawn = [next(iter(engine.parse("sign-flip@25%", "abcd", seed))) for seed in (0, 1)]
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    assert summary["attack"] == "sign-flip@25%"
    assert summary["attackers"] == {str(seed): {"sign-flip": [drawn[seed]]} for seed in (0, 1)}
    who = f"{drawn[0]} (seed 0), {drawn[1]} (seed 1)" if drawn[0] != drawn[1] else f"{drawn[0]} (seeds 0, 1)"
    assert f"Under attack: sign-flip by {who}; averages include the attackers." in unwrapped(answer.out)
    assert "usable" not in answer.out


def test_a_run_in_which_no_upload_was_usable_says_so(toy: str, tmp_path: Path) -> None:
    wanted = ("--data", toy, "--rounds", "2", "--device", "cpu", "--out", str(tmp_path / "out"))
    answer = call("run", "fedavg", *wanted, "--attack", "nan@100%")
    assert answer.code == 0, answer.err
    said = "FedAvg: no upload of any client was ever usable (seed 0); nobody learned from anyone else."
    assert said in unwrapped(answer.out)


def test_honest_clients_of_local_training_are_never_touched(model: Model, federation: Federation) -> None:
    settings = {"rounds": 2, **vars(TrainingSettings(batch_size=5)), "executor": "looped"}
    both = [
        simulate(Local(), model, federation, EngineSettings(**settings, attack=attack), [0])[0]  # type: ignore[arg-type]
        for attack in ("", "label-flip@b;scaled@b")
    ]
    for name, tensor in both[0].trained.items():
        assert torch.equal(both[1].trained[name][[0, 2]], tensor[[0, 2]])
        assert not torch.equal(both[1].trained[name][1], tensor[1])


def test_attackers_may_be_drawn_or_named_and_methods_have_options(toy: str, tmp_path: Path) -> None:
    few = {"methods": ["fedavg", "fedc2i:gamma=2.0,gamma_class=5"], "attacks": ["free-rider"]}
    for number, who in enumerate(("50%", "a,d")):
        answer = study(toy, tmp_path / str(number), attackers=[who], seeds=["0,1"], **few)
        assert answer.code == 0, answer.err
        text = Path(answer.out.splitlines()[0]).read_text(encoding="utf-8")
        assert f"Attackers on {toy}: {who}." in text
        assert "FedC²I (gamma=2.0" in text


def test_without_an_attack_there_is_no_change(toy: str, tmp_path: Path) -> None:
    answer = study(toy, tmp_path / "out", attacks=["none"])
    assert answer.code == 0, answer.err
    assert "-change" not in answer.out


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("attacks", "flip", "attack: no kind 'flip', allowed are label-flip"),
        ("attackers", "z", "attack: no client 'z', allowed are a, b, c, d"),
        ("attackers", "100%", "all clients of"),
        ("methods", "fedx", "unknown method 'fedx'"),
        ("seeds", "x", "seeds must be whole numbers"),
    ],
)
def test_mistakes_end_in_a_line_before_any_run(option: str, value: str, message: str, toy: str, tmp_path: Path) -> None:
    answer = study(toy, tmp_path / "out", **{option: [value]})
    assert answer.code == 2
    assert message in answer.err
    assert answer.err.count("\n") == 1
    assert not (tmp_path / "out").exists()
