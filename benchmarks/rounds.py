"""Whole rounds: the hand-written loop and ours in turn, in one process run, so that a busy neighbour hits both."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from rich.console import Console

from benchmarks.effort import Blocks, Effort
from benchmarks.loop import LeNet5, fedavg
from benchmarks.report import clock, show, summary
from benchmarks.workload import Tensors, as_tensors, make_federation
from fedc2i.core.params import stack
from fedc2i.core.settings import EngineSettings, TrainingSettings
from fedc2i.data.federation import Federation
from fedc2i.engine.client import ClientData, RunContext
from fedc2i.engine.executors.base import ClientBatch
from fedc2i.engine.executors.choice import cores
from fedc2i.engine.executors.workers.executor import WorkersExecutor
from fedc2i.engine.executors.workers.pool import lease
from fedc2i.engine.records import Round
from fedc2i.engine.simulator import simulate
from fedc2i.methods.base import Method
from fedc2i.methods.fedavg import FedAvg
from fedc2i.methods.fedc2i import FedC2I
from fedc2i.methods.fedc2i_plus import FedC2IPlus
from fedc2i.methods.messages import Download, relay
from fedc2i.models.networks import build

LOOP_THREADS = 2


class Laps(NamedTuple):
    """Seconds of every round as the engine reports them, and from report to report by the clock on the wall."""

    seconds: list[float]
    wall: list[float]


def our_rounds(
    method: Method,
    federation: Federation,
    rounds: int,
    *,
    model: str = "lenet5",
    seeds: Sequence[int] = (0,),
    device: str = "cpu",
    on_round: Callable[[Round], None] | None = None,
    **settings: Any,
) -> Laps:
    """Our engine with its defaults. The only place that calls it; a round's seconds are those of all seeds together."""
    seconds = [0.0] * rounds
    stamps = [time.perf_counter()] * (rounds + 1)

    def note(last: Round) -> None:
        seconds[last.round - 1] += last.seconds  # each seed reports its share
        stamps[last.round] = time.perf_counter()
        if on_round is not None:
            on_round(last)

    net = build(model, len(federation.classes), federation.input)
    simulate(method, net, federation, EngineSettings(rounds=rounds, **settings), seeds, device, note)
    return Laps(seconds, [after - before for before, after in itertools.pairwise(stamps)])


def unscored_rounds(method: Method, federation: Federation, rounds: int) -> Laps:
    """Rounds of our engine that score nobody: all but the last of a run."""
    laps = our_rounds(method, federation, rounds + 1, evaluate_every=0)
    return Laps(laps.seconds[:rounds], laps.wall[:rounds])


def loop_rounds(clients: Sequence[Tensors], rounds: int, both_points: bool = True) -> Laps:
    """The hand-written loop on the same data."""
    with threads(LOOP_THREADS):
        seconds = [own.seconds for own in fedavg(clients, LeNet5(), rounds, both_points)]
    return Laps(seconds, seconds)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """That many CPU threads inside an operation, for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def influence_steps(federation: Federation, times: int) -> Laps:
    """FedC²I's influence step of all clients, as a round takes it: measuring and mixing over the workers, no scores."""
    model = build("lenet5", len(federation.classes), federation.input)
    data = [ClientData.place(own, len(federation.classes), torch.device("cpu")) for own in federation.clients]
    everyone = tuple(range(len(data)))
    models = stack([model.init(0, m) for m in everyone])
    recipe = RunContext(FedC2I(), model, TrainingSettings(), rounds=1, seed=0)
    executor = WorkersExecutor(lease(min(cores(), len(data))), [recipe], data)
    seconds = []
    for number in range(1, times + 1):
        turn = ClientBatch(recipe, everyone, models, Download(shared=relay(models), clients=everyone), number)
        began = time.perf_counter()
        executor.personalise([turn], evaluate=False)
        seconds.append(time.perf_counter() - began)
    executor.close()
    return Laps(seconds, seconds)


def in_turn(contenders: Mapping[str, Callable[[int], Laps]], plan: Blocks) -> dict[str, Laps]:
    """Every contender's timed rounds: a block of each, then a block of each again."""
    timed = {name: Laps([], []) for name in contenders}
    for _ in range(plan.blocks):
        for name, run in contenders.items():
            laps = run(plan.warmup + plan.timed)
            timed[name].seconds.extend(laps.seconds[plan.warmup :])
            timed[name].wall.extend(laps.wall[plan.warmup :])
    return timed


def measure(effort: Effort) -> dict[str, Any]:
    """Rounds of all contenders, for each number of clients."""
    our_rounds(
        FedAvg(), make_federation(2, 32, 32), 1, executor="workers"
    )  # starts the processes that longer runs find
    return {str(clients): _measure(clients, plan, effort) for clients, plan in effort.rounds.items()}


def _measure(clients: int, plan: Blocks, effort: Effort) -> dict[str, Any]:
    federation = make_federation(clients, effort.images, effort.tests)
    floats = as_tensors(federation)
    contenders: dict[str, Callable[[int], Laps]] = {
        "loop": lambda rounds: loop_rounds(floats, rounds),
        "fedavg": lambda rounds: our_rounds(FedAvg(), federation, rounds),
        "fedc2i": lambda rounds: our_rounds(FedC2I(), federation, rounds),
    }
    if clients == min(effort.rounds):  # what is asked of the small federation only
        contenders |= {
            "loop_single_eval": lambda rounds: loop_rounds(floats, rounds, both_points=False),
            "influence": lambda rounds: influence_steps(federation, rounds),
            "fedavg_unscored": lambda rounds: unscored_rounds(FedAvg(), federation, rounds),
            "plus": lambda rounds: unscored_rounds(FedC2IPlus(), federation, rounds),
            "plus_unguarded": lambda rounds: unscored_rounds(FedC2IPlus(guard=False), federation, rounds),
        }
    timed = in_turn(contenders, plan)
    median = {name: statistics.median(laps.wall) for name, laps in timed.items()}
    ratios = {
        "fedavg_vs_loop": median["fedavg"] / median["loop"],
        "fedc2i_vs_loop": median["fedc2i"] / median["loop"],
    }
    if "loop_single_eval" in median:
        ratios |= {
            "fedavg_vs_loop_single_eval": median["fedavg"] / median["loop_single_eval"],
            "fedc2i_vs_loop_single_eval": median["fedc2i"] / median["loop_single_eval"],
            "influence_share": median["influence"] / median["fedc2i"],
            "plus_vs_fedavg": median["plus"] / median["fedavg_unscored"],
            "plus_unguarded_vs_fedavg": median["plus_unguarded"] / median["fedavg_unscored"],
        }
    hidden = {name: sum(laps.wall) / sum(laps.seconds) - 1 for name, laps in timed.items()}
    return {
        "ratios": ratios,
        "seconds": {name: summary(laps.wall) for name, laps in timed.items()},
        "hidden": hidden,
        "blocks": plan.blocks,
        "timed_rounds": plan.blocks * plan.timed,
    }


TITLES = {
    "loop": "hand-written loop",
    "loop_single_eval": "hand-written loop, received only",
    "fedavg": "FedAvg",
    "fedc2i": "FedC²I",
    "influence": "FedC²I's influence step alone",
    "fedavg_unscored": "FedAvg, not scored",
    "plus": "FedC²I⁺, not scored",
    "plus_unguarded": "FedC²I⁺ without its guard, not scored",
}


def present(console: Console, result: Mapping[str, Any], effort: Effort) -> None:
    """One table for each number of clients."""
    for clients, found in result.items():
        loop = found["seconds"]["loop"]["median"]
        rows = []
        for name, times in found["seconds"].items():
            spread = f"{clock(times['fastest'])} to {clock(times['slowest'])}"
            hidden = f"{found['hidden'][name]:+.1%}"
            rows.append((TITLES[name], clock(times["median"]), spread, f"{times['median'] / loop:.2f}", hidden))
        notes = [
            f"Median of {found['timed_rounds']} rounds in {found['blocks']} blocks, in turn. All score every client at",
            "both points unless named otherwise. between rounds: wall clock that no round's seconds account for.",
        ]
        if "influence_share" in found["ratios"]:
            notes.append(f"Influence step: {found['ratios']['influence_share']:.1%} of a FedC²I round.")
        title = f"{clients} clients x {effort.images} images, LeNet-5, {effort.tests} test images each"
        show(console, title, ("", "a round", "spread", "to the loop", "between rounds"), rows, notes)
