"""``python -m benchmarks.many_clients``: memory and seconds of a run whose clients' models are offloaded.

Each run is a process of its own. On a CPU it believes that ``--free`` GB of memory are free, so that models go to a
scratch file although this machine may have room for them. With ``--device cuda`` the model is a ResNet-18, and the
models of 1,000 clients go to host memory.
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
from benchmarks.models import NETS
from fedc2i.core import memory
from fedc2i.core.params import size_in_bytes
from fedc2i.core.settings import EngineSettings
from fedc2i.engine.records import Round
from fedc2i.engine.simulator import simulate
from fedc2i.methods.fedavg import FedAvg

RUNS = ((200, 20), (1000, 20), (1000, 100))  # clients, and how many take part in a round
WIDTH, SIDE, CLASSES, TRAIN, TEST, ROUNDS = 650, 16, 10, 8, 4, 2
GPU_RUNS = ((200, 100), (1000, 20), (1000, 100))  # the first is small enough to stay on the device
GPU_SIDE, GPU_TRAIN, GPU_ROUNDS = 32, 128, 3


def build() -> nn.Module:
    """A model of 2 MB."""
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * SIDE * SIDE, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES))


def peak() -> int:
    """Bytes of this process at its largest."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return 1024 * int(line.split()[1])


def measure(clients: int, participants: int, free: float, device: str) -> dict[str, Any]:
    """One run in this process; ``free`` is the memory in GB, 0 for what there really is."""
    gpu = device == "cuda"
    if not gpu:
        torch.set_num_threads(1)
    side, train, rounds = (GPU_SIDE, GPU_TRAIN, GPU_ROUNDS) if gpu else (SIDE, TRAIN, ROUNDS)
    draw = np.random.default_rng(0)
    x = draw.integers(0, 256, (clients, train + TEST, side, side), np.uint8)
    y = np.arange(train + TEST) % CLASSES
    parts = {f"{m}": (x[m, :train], y[:train], x[m, train:], y[train:]) for m in range(clients)}
    federation = fedc2i.from_arrays(parts, list(map(str, range(CLASSES))))
    model = fedc2i.split(NETS["resnet18_gn"], head="fc") if gpu else fedc2i.split(build, head="3")
    if free:
        memory.available = memory.total = lambda: int(free * 2**30)
    settings = EngineSettings(
        rounds=rounds,
        epochs=1,
        executor="auto" if gpu else "looped",
        evaluate_every=0 if gpu else 1,
        clients_per_round=participants,
        precision="tf32" if gpu else "ieee",
    )
    start, began, reports = peak(), time.perf_counter(), list[Round]()

    def note(report: Round) -> None:
        reports.append(report)
        spent = time.perf_counter() - began
        print(
            f"round {report.round}: {report.seconds:.2f} s, {spent:.1f} s since the start", file=sys.stderr, flush=True
        )

    simulate(FedAvg(), model, federation, settings, [0], device, on_round=note)
    return {
        "clients": clients,
        "participants": participants,
        "free_gb": free,
        "model_mb": size_in_bytes(model.init(0)) / 2**20,
        "before_mb": start / 2**20,
        "peak_mb": peak() / 2**20,
        "device_peak_mb": torch.cuda.max_memory_allocated() / 2**20 if gpu else None,
        "rounds": [round(report.seconds, 2) for report in reports],
        "seconds": time.perf_counter() - began,
        "accuracy": reports[-1].mean("trained"),
    }


def main() -> None:
    """Every run in a process of its own; prints one JSON object a line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.many_clients", description=__doc__)
    parser.add_argument("--free", type=float, help="GB that a run believes to be free; 0: as it is (1; on a GPU 0)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--one", type=int, nargs=2, metavar=("CLIENTS", "PARTICIPANTS"), help="this run only, here")
    asked = parser.parse_args()
    gpu = asked.device == "cuda"
    free = (0.0 if gpu else 1.0) if asked.free is None else asked.free
    if asked.one:
        clients, participants = asked.one
        print(json.dumps(measure(clients, participants, free, asked.device)), flush=True)
        return
    for run in GPU_RUNS if gpu else RUNS:
        command = [sys.executable, "-m", "benchmarks.many_clients", "--free", str(free), "--device", asked.device]
        subprocess.run([*command, "--one", *map(str, run)], check=True)


if __name__ == "__main__":
    main()
