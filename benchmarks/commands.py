"""Whole commands as a user waits for them, from the start of the process to its end, and real models beside the loop.

``python -m benchmarks.commands FOLDER METHOD DATA [KEY=VALUE ...]`` is one such run, with its times as a line of JSON.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rich.console import Console

from benchmarks.effort import Effort
from benchmarks.report import clock, show

if TYPE_CHECKING:
    from fedc2i.engine.records import Round
    from fedc2i.runs.results import Result

TABLE_ROUNDS = 3


class Stamps:
    """An observer that notes when the first round began, and the rounds' own seconds."""

    def __init__(self) -> None:
        self.begun, self.seconds, self._seeds = 0.0, 0.0, 1

    def begin(self, result: Result) -> None:
        """A run starts."""
        self._seeds = len(result.config.seeds)

    def client(self, done: int, of: int) -> None:
        """A client has trained."""

    def round(self, report: Round) -> None:
        """A round of one seed ended; each seed reports its share of the time of all."""
        self.begun = self.begun or time.time() - self._seeds * report.seconds
        self.seconds += report.seconds


def one(folder: Path, method: str, data: str, *settings: str) -> dict[str, float]:
    """`fedc2i run` itself, into a folder: when its rounds began and ended, and their own seconds."""
    from fedc2i.cli import shared
    from fedc2i.cli.main import main
    from fedc2i.report import figures

    stamps, ended, draw_run = Stamps(), list[float](), figures.draw_run

    def draw(result: Result, place: Path) -> None:
        ended.append(time.time())  # all rounds are computed and written
        draw_run(result, place)

    figures.draw_run = draw
    shared.trackers_of = lambda wanted: nullcontext(stamps)
    sys.argv = ["fedc2i", "run", method, "--data", data, "--out", str(folder), *(f"--set={own}" for own in settings)]
    try:
        main()
    except SystemExit as end:
        if end.code:
            raise
    return {"begun": stamps.begun, "ended": ended[0], "rounds": stamps.seconds}


def command(method: str, data: str, *settings: str, repeats: int = 1) -> dict[str, float]:
    """Medians over runs in processes of their own.

    ``startup``: from the start of the process to the first round; ``rounds``: their own seconds; ``overhead_share``:
    of the time from the first round's start until the last is written, what is not theirs; ``after``: figures, models,
    summary and the end of the process; ``wall``: the whole process.
    """
    found: list[dict[str, float]] = []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as place:
            child = [sys.executable, "-m", "benchmarks.commands", f"{place}/run", method, data, *settings]
            began = time.time()
            done = subprocess.run(child, capture_output=True, text=True, check=False)
            ended = time.time()
        if done.returncode:
            raise RuntimeError(done.stderr)
        own = json.loads(done.stdout.splitlines()[-1])
        found.append(
            {
                "startup": own["begun"] - began,
                "rounds": own["rounds"],
                "overhead_share": 1 - own["rounds"] / (own["ended"] - own["begun"]),
                "after": ended - own["ended"],
                "wall": ended - began,
            }
        )
    return {name: statistics.median(own[name] for own in found) for name in found[0]}


def write_table(path: Path, rows: int, columns: int, sites: int) -> None:
    """Numbers with a target that some of them decide, as CSV."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(rows, columns)).round(3)
    y = (x[:, :5].sum(1) + generator.normal(size=rows) > 0).astype(int)
    with path.open("w", encoding="ascii") as file:
        file.write(",".join([*(f"x{k}" for k in range(columns)), "y", "site"]) + "\n")
        for k, row in enumerate(x.tolist()):
            file.write(",".join(map(str, [*row, y[k], f"s{k % sites}"])) + "\n")


def table(rows: int, columns: int = 50, sites: int = 20) -> dict[str, float]:
    """FedAvg with the MLP on a CSV file of a table."""
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "table.csv"
        write_table(path, rows, columns, sites)
        where = ("target=y", "clients=site", f"rounds={TABLE_ROUNDS}", "device=cpu")
        return command("fedavg", f"table:{path}", *where)


def resnet(clients: int, images: int, blocks: int) -> dict[str, float]:
    """ResNet-8 with BatchNorm: a round of the loop with two threads and one of FedAvg, in turn, without scores."""
    import fedc2i
    from benchmarks.models import BATCH, NETS, loop_round
    from benchmarks.rounds import LOOP_THREADS, threads
    from benchmarks.workload import make_federation
    from fedc2i.core.settings import EngineSettings
    from fedc2i.engine.simulator import simulate
    from fedc2i.methods.fedavg import FedAvg

    federation = make_federation(clients, images, 8, side=32)
    floats = [((own.train.x.to(torch.float32) * (2 / 255) - 1), own.train.y) for own in federation.clients]
    net, model = NETS["resnet8_bn"](), fedc2i.split(NETS["resnet8_bn"], head="fc", name="resnet8")
    how = EngineSettings(rounds=3, batch_size=BATCH, evaluate_every=0, executor="workers")
    loop, ours = list[float](), list[float]()
    for _ in range(blocks):
        with threads(LOOP_THREADS):
            loop += [loop_round(net, floats) for _ in range(2)][1:]
        laps = list[float]()
        simulate(FedAvg(), model, federation, how, [0], "cpu", lambda report, laps=laps: laps.append(report.seconds))
        ours += laps[1:2]  # the first starts processes, the last scores
    found = {"loop": statistics.median(loop), "ours": statistics.median(ours)}
    return {**found, "resnet_vs_loop_cpu": found["ours"] / found["loop"]}


def measure(effort: Effort) -> dict[str, Any]:
    """All of it, on the CPU."""
    return {
        "run": command("fedavg", "digits", f"rounds={effort.command_rounds}", "device=cpu", repeats=effort.repeats),
        "table": table(effort.table_rows),
        "resnet": resnet(4, effort.images // 2, 2),
    }


def present(console: Console, result: Mapping[str, Any], effort: Effort) -> None:
    """One table."""
    titles = {
        "run": f"fedc2i run fedavg --data digits, {effort.command_rounds} rounds",
        "table": f"fedc2i run fedavg, table of {effort.table_rows:,} x 50, 20 clients, {TABLE_ROUNDS} rounds",
    }
    rows = [
        (title, *(clock(result[name][part]) for part in ("startup", "rounds", "after", "wall")),
         f"{result[name]['overhead_share']:.1%}")
        for name, title in titles.items()
    ]  # fmt: skip
    own = result["resnet"]
    notes = [
        "start: from the start of the process to the first round; after: figures, models, summary, exit;",
        "around the rounds: share of the time between the first round's start and the last one's end on disk.",
        f"ResNet-8 with BatchNorm, a round without scores: loop with 2 threads {clock(own['loop'])}, ours "
        f"{clock(own['ours'])}, {own['resnet_vs_loop_cpu']:.2f} of it.",
    ]
    show(console, "whole commands", ("", "start", "rounds", "after", "process", "around the rounds"), rows, notes)


if __name__ == "__main__":
    print(json.dumps(one(Path(sys.argv[1]), *sys.argv[2:])))
