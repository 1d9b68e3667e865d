"""``python -m benchmarks.checkpoints``: what a checkpoint after every round costs, in seconds and in bytes.

Runs with and without take turns, in one process. The first two rounds of each are left out; of the others the median
counts, over all turns. Seconds of this process's own CPU are beside those of the clock, as another program that runs
at the same time lengthens the latter only. ``keeping`` is the time inside the calls that write reports and checkpoints.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import fedc2i
from fedc2i.engine.checkpoint import State
from fedc2i.engine.records import Round
from fedc2i.runs import driver
from fedc2i.runs.driver import execute
from fedc2i.runs.folder import Checkpoints
from fedc2i.runs.plan import prepare
from fedc2i.runs.results import Result

WARM_UP = 2


class Stopwatch:
    """An observer that takes the time at the beginning of every round's first report."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.clock: list[float] = []
        self.cpu: list[float] = []
        self.bytes = 0

    def begin(self, result: Result) -> None:
        """A run starts."""

    def client(self, done: int, of: int) -> None:
        """A client has trained."""

    def round(self, report: Round) -> None:
        """A round of one seed ended; its checkpoint follows the report of the last seed."""
        if len(self.clock) < report.round:
            self.clock.append(time.perf_counter())
            self.cpu.append(time.process_time())
            files = list(self._folder.glob("checkpoints/round*"))
            rounds = {path.stem for path in files}
            self.bytes = sum(path.stat().st_size for path in files) // max(1, len(rounds))


class Timed(Checkpoints):
    """Checkpoints that add up the time they take, by round."""

    clock: ClassVar[dict[int, float]] = {}
    cpu: ClassVar[dict[int, float]] = {}

    def record(self, report: Round) -> None:
        """Keeps a round's report."""
        with self._timing(report.round):
            super().record(report)

    def save(self, number: int, is_last: bool, state: Callable[[], State]) -> None:
        """Writes the state after a round."""
        with self._timing(number):
            super().save(number, is_last, state)

    @contextmanager
    def _timing(self, number: int) -> Iterator[None]:
        clock, cpu = time.perf_counter(), time.process_time()
        yield
        self.clock[number] = self.clock.get(number, 0.0) + time.perf_counter() - clock
        self.cpu[number] = self.cpu.get(number, 0.0) + time.process_time() - cpu


def measure(method: str, seeds: str, rounds: int, turns: int, folder: Path) -> dict[str, Any]:
    """Median seconds of a round with and without checkpoints, and the bytes of one."""
    taken: dict[int, dict[str, list[float]]] = {every: {"clock": [], "cpu": []} for every in (0, 1)}
    keeping: dict[str, list[float]] = {"clock": [], "cpu": []}
    size = 0
    driver.Checkpoints = Timed  # type: ignore[misc]
    for turn in range(turns):
        for every in (0, 1) if turn % 2 else (1, 0):
            out = folder / f"{method}-{turn}-{every}"
            settings = {"rounds": rounds, "seeds": seeds, "checkpoint_every": every, "executor": "looped"}
            watch = Stopwatch(out)
            (plan,) = prepare([method], {**settings, "device": "cpu"}, "digits")
            Timed.clock.clear()
            Timed.cpu.clear()
            execute(plan, out, watch)
            if every:
                keeping["clock"] += [own for number, own in Timed.clock.items() if number > WARM_UP]
                keeping["cpu"] += [own for number, own in Timed.cpu.items() if number > WARM_UP]
            for kind, stamps in (("clock", watch.clock), ("cpu", watch.cpu)):
                taken[every][kind] += [b - a for a, b in zip(stamps[WARM_UP - 1 :], stamps[WARM_UP:], strict=False)]
            size = max(size, watch.bytes)
    medians = {
        f"{kind}_{'with' if every else 'without'}": round(statistics.median(own), 4)
        for every, kinds in taken.items()
        for kind, own in kinds.items()
    }
    medians |= {f"{kind}_keeping": round(statistics.median(own), 4) for kind, own in keeping.items()}
    return {"method": method, "seeds": seeds, "rounds_measured": len(taken[0]["clock"]), **medians, "bytes": size}


def main() -> None:
    """Measures FedAvg and FedC²I on the digits benchmark, one seed and three."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--methods", nargs="+", default=["fedavg", "fedc2i"])
    parser.add_argument("--seeds", nargs="+", default=["0", "0-2"])
    given = parser.parse_args()
    print(json.dumps({"fedc2i": fedc2i.__version__, "cores": os.cpu_count(), "load": os.getloadavg()}), flush=True)
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        for method in given.methods:
            for seeds in given.seeds:
                print(json.dumps(measure(method, seeds, given.rounds, given.turns, Path(folder) / seeds)), flush=True)
    print(json.dumps({"load": os.getloadavg()}))


if __name__ == "__main__":
    main()
