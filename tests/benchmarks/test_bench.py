"""The benchmark measures what it says: contenders do the same work, and get the same numbers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).parents[2]))  # the benchmark is not installed

from benchmarks.effort import QUICK, Blocks, Effort
from benchmarks.workload import as_tensors, make_federation

from benchmarks import __main__ as command
from benchmarks import gpu, influence_speed, limit, loop, memory, naive, rounds, scale
from fedc2i.core import seeding
from fedc2i.core.params import Params, row
from fedc2i.core.settings import EngineSettings
from fedc2i.data.federation import Federation, InputSpec
from fedc2i.engine.records import Outcome
from fedc2i.engine.simulator import simulate
from fedc2i.methods.base import Method
from fedc2i.methods.fedavg import FedAvg
from fedc2i.methods.fedc2i import FedC2I
from fedc2i.models.networks import build

TINY = replace(
    QUICK,
    images=40,
    tests=20,
    rounds={2: Blocks(2, 1, 1)},
    cells=((3, 10), (50, 100)),
    naive_seconds=0.05,
    memory={2: 1},
    scale_clients=20,
    scale_marks=(1, 3),
    many_classes=(12,),
    repeats=1,
    command_rounds=1,
    table_rows=400,
)
LENET = build("lenet5", 10, InputSpec((3, 28, 28)))


@pytest.fixture(scope="module")
def federation() -> Federation:
    return make_federation(3, images=150, tests=40)


def engine(method: Method, federation: Federation, number: int) -> Outcome:
    return simulate(method, LENET, federation, EngineSettings(rounds=number, executor="looped"), [0])[0]


def reference(federation: Federation, number: int, seed: int = 0, both_points: bool = True) -> list[loop.LoopRound]:
    """The hand-written loop from our initial weights, with our batches of that seed."""
    net = loop.LeNet5()
    net.load_state_dict(LENET.init(0, "init"))
    names = federation.names

    def draws(client: int, number: int) -> torch.Generator:
        return seeding.generator(seed, names[client], number, "batches")

    return list(loop.fedavg(as_tensors(federation), net, number, both_points, draws))


def distance(one: Params, other: Params) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


# The hand-written loop


def test_loop_and_engine_end_at_the_same_model_and_scores(federation: Federation) -> None:
    last, ours = reference(federation, 3)[-1], engine(FedAvg(), federation, 3)
    received = row(ours.received, 0)
    assert distance(last.state, received) < 2e-4
    assert distance(last.state, LENET.init(0, "init")) > 0.02
    assert distance(reference(federation, 3, seed=1)[-1].state, received) > 2e-3  # other batches are told apart
    one_image = 100 / 40 + 1e-3
    for point, theirs in (("trained", last.trained), ("received", last.received)):
        assert [own["accuracy"] for own in ours.last.metrics[point]] == pytest.approx(theirs, abs=one_image)


def test_loop_learns_the_made_up_images(federation: Federation) -> None:
    first, *_, last = reference(federation, 12)
    assert max(first.received) < 60
    assert min(last.received) > 80


def test_loop_with_one_point_trains_the_same_and_scores_less(federation: Federation) -> None:
    both, single = (reference(federation, 1, both_points=both)[0] for both in (True, False))
    assert (len(both.trained), len(single.trained)) == (3, 0)
    assert single.received == both.received


# Whole rounds


def test_the_influence_step_is_timed_as_often_as_asked_and_is_part_of_a_round(federation: Federation) -> None:
    step = rounds.influence_steps(federation, 5)
    assert len(step.seconds) == 5
    whole = rounds.our_rounds(FedC2I(), federation, 5, executor="looped")
    assert 0 < min(step.seconds) < min(whole.seconds)


def test_our_rounds_time_all_seeds_and_hide_nothing(federation: Federation) -> None:
    laps = rounds.our_rounds(FedAvg(), federation, 3, seeds=(0, 1), executor="looped")
    assert len(laps.seconds) == len(laps.wall) == 3
    assert all(0 < own <= 1.001 * wall for own, wall in zip(laps.seconds, laps.wall, strict=True))
    assert sum(laps.seconds) > 0.5 * sum(laps.wall[1:])


def test_contenders_take_turns_and_warm_up_in_every_block() -> None:
    calls: list[str] = []

    def contender(name: str, first: float) -> rounds.Laps:
        calls.append(name)
        return rounds.Laps([first, 2.0, 3.0], [first, 2.0, 3.5])

    found = rounds.in_turn({name: lambda _, name=name: contender(name, 99.0) for name in "ab"}, Blocks(2, 1, 2))
    assert calls == ["a", "b", "a", "b"]
    assert found["a"] == ([2.0, 3.0, 2.0, 3.0], [2.0, 3.5, 2.0, 3.5])


# Influence


def test_naive_losses_are_ours_at_both_levels_and_wrong_ones_are_noticed() -> None:
    case = influence_speed.Case.make(4, 5)
    client, classes = influence_speed.naive_losses(case, seconds=60)
    assert (len(client.which), len(classes.which)) == (4, 20)
    assert influence_speed.agreement(case, client, classes) < 1e-5
    wrong = [own._replace(which=own.which.roll(1)) for own in (client, classes)]
    for pair in ((wrong[0], classes), (client, wrong[1])):
        with pytest.raises(influence_speed.DisagreementError, match="differ"):
            influence_speed.agreement(case, *pair)


def test_naive_passes_are_sampled_in_proportion() -> None:
    sampled = naive.sample(float, 1000, seconds=0)
    assert str(sampled) == "sampled 1 of 1000"
    assert sampled.seconds == pytest.approx(1000 * sampled.spent)
    complete = naive.sample(float, 7, seconds=60)
    assert str(complete) == "all"
    assert sorted(complete.values.tolist()) == list(range(7))
    assert complete.seconds == complete.spent


def test_growth_is_the_exponent() -> None:
    assert influence_speed.slope([5, 20, 50], [3 * size**1.5 for size in (5, 20, 50)]) == pytest.approx(1.5)
    cells = [
        {"clients": m, "classes": c, **dict.fromkeys(influence_speed.FORMS, m * c**0.5)}
        for m in (5, 50)
        for c in (10, 100)
    ]
    found = influence_speed.exponents(cells)
    told = [f"{own['in']} at {own['at']}" for own in found]
    assert told == ["clients at 10", "clients at 100", "classes at 5", "classes at 50"]
    assert [own["exponents"]["exact_class"] for own in found] == pytest.approx([1, 1, 0.5, 0.5])


# The limit


@pytest.mark.parametrize("shape", [{}, {**gpu.WIDE, "side": 32}], ids=["lenet5", "wide"])
def test_operations_and_parameters_are_those_torch_counts(shape: dict[str, object]) -> None:
    net, layers = loop.LeNet5(**shape), limit.lenet(**shape)
    side = int(shape.get("side", 28))
    assert sum(layer.parameters for layer in layers) == sum(own.numel() for own in net.parameters())
    x = torch.zeros(2, 3, side, side)
    with FlopCounterMode(display=False) as forward, torch.no_grad():
        net(x)
    assert forward.get_total_flops() == 2 * limit.forward_flops(layers)
    with FlopCounterMode(display=False) as training:
        net(x).sum().backward()
    assert training.get_total_flops() == 2 * limit.training_flops(layers)


def test_bytes_are_those_of_every_activation() -> None:
    sizes = [3 * 28 * 28]
    net = loop.LeNet5()
    x = torch.zeros(1, 3, 28, 28)
    for layer in (net.conv1, net.conv2):
        convolved = layer(x)
        x = torch.nn.functional.max_pool2d(convolved.relu(), 2)
        sizes += [convolved.numel(), convolved.numel(), x.numel()]
    sizes += [120, 120, 84, 84, 10]
    assert limit.forward_bytes(limit.lenet(), 3 * 28 * 28) == 2 * 4 * sum(sizes)


# Memory


@pytest.mark.skipif(not memory.PROC.joinpath("self", "status").exists(), reason="needs /proc")
def test_memory_of_children_counts() -> None:
    before = memory.held(os.getpid())
    code = "x = bytearray(b'x') * 200_000_000; print('ready', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        during = memory.held(os.getpid())
        child.communicate(b"\n")
    assert 190 < during["rss"] - before["rss"] < 260
    assert 150 < during["pss"] - before["pss"] < 260  # pages shared with others count less


@pytest.mark.slow
@pytest.mark.skipif(not memory.PROC.joinpath("self", "status").exists(), reason="needs /proc")
def test_scale_check_notes_memory_and_stops_at_the_last_mark() -> None:
    task = {"method": "fedc2i_first_order", "clients": 20, "marks": [1, 3], "seconds": 600}
    peak, notes = memory.peak_of("benchmarks.scale", task)
    assert [mark["round"] for mark in notes["marks"]] == [1, 3]
    assert notes["rounds"] == 3
    assert peak["rss"] > 0.9 * max(mark["rss"] for mark in notes["marks"]) > 100
    assert notes["marks"][1]["relayed"] > notes["marks"][0]["relayed"]  # FedC²I sends more as it knows more clients


def test_a_child_that_fails_is_reported() -> None:
    with pytest.raises(RuntimeError, match="KeyError"):
        memory.peak_of("benchmarks.scale", {"method": "nonsense", "clients": 2, "marks": [1], "seconds": 1})


def test_growth_of_memory_is_per_round() -> None:
    marks = [{"round": 2, "rss": 300.0, "relayed": 10.0}, {"round": 10, "rss": 340.0, "relayed": 26.0}]
    assert scale.growth(marks) == {"mb_per_round": 5.0, "relayed_mb_per_round": 2.0}
    assert scale.growth(marks[:1])["mb_per_round"] is None


# The commands


def run(effort: Effort, out: Path, *parts: str) -> dict[str, float]:
    chosen = {name: command.PARTS[name] for name in parts} if parts else command.PARTS
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        command.run(effort, out, Console(file=nowhere), chosen)
    return json.loads(out.read_text(encoding="utf-8"))


@pytest.mark.slow
def test_quick_run_writes_the_headline(tmp_path: Path) -> None:
    written = run(TINY, tmp_path / "latest.json", "rounds", "influence", "limit")
    assert isinstance(written["influence_share"], float)
    assert min(written["plus_vs_fedavg"], written["plus_unguarded_vs_fedavg"]) > 0
    seconds = {name: own["median"] for name, own in written["rounds"]["2"]["seconds"].items()}
    assert written["fedavg_vs_loop"] == pytest.approx(seconds["fedavg"] / seconds["loop"])
    assert written["fedc2i_vs_loop"] == pytest.approx(seconds["fedc2i"] / seconds["loop"])
    assert written["fedavg_vs_loop_single_eval"] == pytest.approx(seconds["fedavg"] / seconds["loop_single_eval"])
    assert written["class_speedup_m50_c100"] > 10
    assert {"cpu", "cores", "torch", "threads", "date"} <= written["machine"].keys()
    assert written["limit"]["rounds"]["2"]["flops"] > 0


@pytest.mark.slow
def test_all_parts_run(tmp_path: Path) -> None:
    written = run(TINY, tmp_path / "latest.json")
    assert set(command.PARTS) <= written.keys()
    assert {"imports", "loop_2", "fedavg_2", "fedc2i_2"} <= written["memory"].keys()
    assert set(written["scale"]["clients"]) == set(scale.METHODS)


@pytest.mark.slow
def test_gpu_part_runs_on_any_device() -> None:
    small = gpu.Size("cpu", clients=2, images=40, tests=8, rounds=2, seeds=2, loop_rounds=1, many_clients=3, matrix=64)
    small = replace(small, many_tests=8, many_rounds=1)
    found = gpu.measure(small)
    assert found["run"]["seconds"] >= 2 * 0.5 * found["run"]["round_of_all_seeds"]
    assert found["run"]["share_of_matrix_rate"] > 0
    assert found["many_exact"]["round"] > 0 < found["many_first-order"]["round"]
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        gpu.present(Console(file=nowhere), found, small)


def test_operations_of_a_gpu_round_are_counted() -> None:
    forward, training = (
        count(limit.lenet(**gpu.WIDE, side=32)) for count in (limit.forward_flops, limit.training_flops)
    )
    trained, scored, features = 5 * 743 * 2 * training, 5 * 2000 * 2 * forward, 5 * 32 * forward
    exact, near = (gpu.round_flops(5, 743, 2000, 32, form) for form in gpu.FORMS)
    assert exact == trained + scored + features + 5 * 5 * 32 * forward
    assert near == trained + scored + features + 5 * 32 * training
