"""A program that runs a federation and says what it cost: ``long``, ``wide`` or ``store``; see the tests beside it."""

from __future__ import annotations

import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import fedc2i
from fedc2i.engine.records import Round
from fedc2i.runs.cache import RunCache
from fedc2i.runs.driver import execute
from fedc2i.runs.plan import prepare
from fedc2i.runs.results import Result

CLASSES = 10
STORED = 3  # rounds of a run in a store
torch.set_num_threads(1)


def kilobytes(field: str) -> int:
    """``VmRSS``, what is in memory now, or ``VmHWM``, its peak."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field)]
    return int(line.split()[1])


class Watch:
    """Memory every few rounds, and who took part."""

    def __init__(self, every: int) -> None:
        self.every, self.memory, self.rounds, self.participants = every, list[tuple[int, int]](), 0, list[int]()

    def begin(self, result: Result) -> None:
        self.began = time.perf_counter()

    def client(self, done: int, of: int) -> None:
        pass

    def round(self, report: Round) -> None:
        self.rounds += 1
        self.participants.append(len(report.participants))
        if report.round % self.every == 0:
            gc.collect()
            self.memory.append((report.round, kilobytes("VmRSS")))

    def found(self) -> dict[str, Any]:
        seconds = time.perf_counter() - self.began
        return {"rounds": self.rounds, "memory": self.memory, "seconds a round": round(seconds / self.rounds, 4)}


def small(head: int = 16, side: int = 32) -> Any:
    def build() -> nn.Module:
        net = nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(3 * (side // 4) ** 2, head), nn.Tanh())
        net.add_module("head", nn.Linear(head, CLASSES))
        return net

    return fedc2i.split(build, head="head", name="small")


def made_up(clients: int, train: int, test: int) -> fedc2i.Federation:
    """Clients whose images are noise, brighter for a higher class."""
    draw = np.random.default_rng(0)
    arrays = {}
    for number in range(clients):
        y = draw.integers(0, CLASSES, train + test)
        x = np.clip(20 * y[:, None, None] + draw.integers(0, 60, (train + test, 16, 16)), 0, 255).astype(np.uint8)
        arrays[f"client{number}"] = (x[:train], y[:train], x[train:], y[train:])
    return fedc2i.from_arrays(arrays, list(map(str, range(CLASSES))))


def long(method: str, rounds: str, every: str) -> dict[str, Any]:
    """Very many rounds on few clients."""
    data, watch = made_up(clients=5, train=40, test=20), Watch(int(every))
    settings = {
        "rounds": int(rounds),
        "epochs": 1,
        "seeds": "0",
        "device": "cpu",
        "executor": "looped",
        "batch_size": 40,
    }
    (plan,) = prepare([method], settings, data, small(side=16))
    result = execute(plan, observer=watch)
    assert len(result.rounds) == int(rounds)
    return watch.found()


def wide(method: str, clients: str, rounds: str) -> dict[str, Any]:
    """Very many clients, a tenth of them in a round."""
    data = made_up(int(clients), train=16, test=8)
    start, watch = kilobytes("VmHWM"), Watch(1)
    settings = {"rounds": int(rounds), "epochs": 1, "seeds": "0", "device": "cpu", "clients_per_round": "10%"}
    (plan,) = prepare([method], settings, data, small(side=16))
    execute(plan, observer=watch)
    return {**watch.found(), "participants": watch.participants, "start": start, "peak": kilobytes("VmHWM")}


def store(folder: str) -> dict[str, Any]:
    """Two methods and two seeds from a store that other processes use as well."""
    x = np.random.default_rng(0).integers(0, 256, (40, 16, 16), np.uint8)
    y = np.arange(40) % CLASSES
    data = fedc2i.from_arrays(dict.fromkeys("abc", (x, y, x, y)))
    settings = {"rounds": STORED, "epochs": 1, "seeds": "0,1", "device": "cpu", "executor": "looped"}
    watch, accuracy = Watch(1), []
    for plan in prepare(["fedavg", "fedc2i"], settings, data, small(side=16)):
        accuracy.append(RunCache(Path(folder)).compute(plan, watch).accuracy("trained").tolist())
    return {"accuracy": accuracy, "computed": watch.rounds / STORED}


if __name__ == "__main__":
    print(json.dumps({"long": long, "wide": wide, "store": store}[sys.argv[1]](*sys.argv[2:])))
