"""``python -m benchmarks.many_clients``: memory and seconds of a run whose clients' models rest in a scratch file.

Each run is a process of its own that believes that ``--free`` GB of memory are free, so that models rest although this
machine may have room for them. Its peak is compared with what a run with all models in memory takes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import fedc2i
from fedc2i.core import memory
from fedc2i.core.params import size_in_bytes
from fedc2i.core.settings import EngineSettings
from fedc2i.engine.records import Round
from fedc2i.engine.simulator import simulate
from fedc2i.methods.fedavg import FedAvg

RUNS = ((200, 20), (1000, 20), (1000, 100))  # clients, and how many take part in a round
WIDTH, SIDE, CLASSES, TRAIN, TEST, ROUNDS = 650, 16, 10, 8, 4, 2


def build() -> nn.Module:
    """A model of 2 MB."""
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * SIDE * SIDE, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES))


def peak() -> int:
    """Bytes of this process at its largest."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return 1024 * int(line.split()[1])


def measure(clients: int, participants: int, free: float) -> dict[str, Any]:
    """One run in this process; ``free`` is the memory in GB, 0 for what there really is."""
    torch.set_num_threads(1)
    draw = np.random.default_rng(0)
    x = draw.integers(0, 256, (clients, TRAIN + TEST, SIDE, SIDE), np.uint8)
    y = np.arange(TRAIN + TEST) % CLASSES
    parts = {f"{m}": (x[m, :TRAIN], y[:TRAIN], x[m, TRAIN:], y[TRAIN:]) for m in range(clients)}
    federation, model = fedc2i.from_arrays(parts, list(map(str, range(CLASSES)))), fedc2i.split(build, head="3")
    if free:
        memory.available = memory.total = lambda: int(free * 2**30)
    settings = EngineSettings(rounds=ROUNDS, epochs=1, executor="looped", clients_per_round=participants)
    start, began, rounds = peak(), time.perf_counter(), list[Round]()
    simulate(FedAvg(), model, federation, settings, [0], on_round=rounds.append)
    return {
        "clients": clients,
        "participants": participants,
        "free_gb": free,
        "model_mb": size_in_bytes(model.init(0)) / 2**20,
        "before_mb": start / 2**20,
        "peak_mb": peak() / 2**20,
        "seconds_a_round": (time.perf_counter() - began) / ROUNDS,
        "accuracy": rounds[-1].mean("trained"),
    }


def main() -> None:
    """Every run in a process of its own; prints one JSON object a line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.many_clients", description=__doc__)
    parser.add_argument("--free", type=float, default=1.0, help="GB that a run believes to be free; 0: as it is")
    parser.add_argument("--one", type=int, nargs=2, metavar=("CLIENTS", "PARTICIPANTS"), help="this run only, here")
    asked = parser.parse_args()
    if asked.one:
        print(json.dumps(measure(*asked.one, asked.free)))
        return
    for run in RUNS:
        command = [sys.executable, "-m", "benchmarks.many_clients", "--free", str(asked.free)]
        subprocess.run([*command, "--one", *map(str, run)], check=True)


if __name__ == "__main__":
    main()
