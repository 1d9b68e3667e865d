"""``python -m benchmarks.virtual_sites``: bytes, seconds and memory of Flower's simulation, 10 to 200 virtual sites.

LeNet-5, 20 made-up images a site, one thread. Each run is a process of its own, watched from outside; one that leaves
the machine too little memory is ended, and its line says so.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

import torch

from benchmarks.memory import ROOT, held
from benchmarks.workload import make_federation
from fedc2i.core import memory
from fedc2i.core.params import size_in_bytes
from fedc2i.core.settings import EngineSettings
from fedc2i.engine.records import Round
from fedc2i.methods.base import Method
from fedc2i.methods.fedavg import FedAvg
from fedc2i.methods.fedc2i import FedC2I
from fedc2i.methods.fedc2i_top_k import FedC2ITopK
from fedc2i.models import networks

METHODS: dict[str, type[Method]] = {"fedavg": FedAvg, "fedc2i-top-k": FedC2ITopK, "fedc2i": FedC2I}
SITES, IMAGES, TESTS = (10, 50, 100, 200), 20, 10
DEADLINE = 3600.0  # seconds for a round: nobody may be too late on a slow machine
LEAST_FREE = 3 * 2**30  # bytes that every run leaves to others
EVERY = 1.0  # seconds between two looks at memory


def measure(name: str, sites: int, rounds: int) -> dict[str, Any]:
    """One run in this process; bytes and seconds of each round."""
    from fedc2i.flower.answer_collector import Policy
    from fedc2i.flower.simulation import federate

    torch.set_num_threads(1)
    federation = make_federation(sites, IMAGES, TESTS)
    model = networks.build("lenet5", len(federation.classes), federation.input)
    settings = EngineSettings(rounds=rounds, epochs=1, evaluate_every=0)
    began, reports = time.perf_counter(), list[Round]()
    federate(METHODS[name](), model, federation, settings, [0], Policy(DEADLINE, poll=0.05), on_round=reports.append)
    return {
        "model_bytes": size_in_bytes(model.init(0)),
        "answers": [len(report.participants) for report in reports],
        "bytes_up": [report.bytes_up for report in reports],
        "bytes_down": [report.bytes_down for report in reports],
        "round_seconds": [round(report.seconds, 1) for report in reports],
        "seconds": round(time.perf_counter() - began, 1),
        "coordinator_cpu_seconds": round(time.process_time(), 1),
    }


def watch(name: str, sites: int, rounds: int) -> dict[str, Any]:
    """The same in a process of its own, with the most memory that it and Ray's processes held."""
    command = [sys.executable, "-m", "benchmarks.virtual_sites", "--one", name, str(sites), "--rounds", str(rounds)]
    child = subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE)
    most, stopped = 0.0, False
    while child.poll() is None:
        most = max(most, held(child.pid)["pss"])
        if memory.available() < LEAST_FREE and not stopped:
            stopped = True
            child.terminate()
        with suppress(subprocess.TimeoutExpired):
            child.wait(EVERY)
    said = child.communicate()[0].splitlines()
    end = "ended, memory is short" if stopped else f"failed with status {child.returncode}"
    found = json.loads(said[-1]) if child.returncode == 0 else {"error": end}
    return {"method": name, "sites": sites, "peak_mb": round(most), **found}


def main() -> None:
    """Prints one JSON object for each method and number of sites."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.virtual_sites", description=__doc__)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--sites", nargs="+", type=int, default=SITES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", nargs=2, metavar=("METHOD", "SITES"), help="this run only, in this process")
    asked = parser.parse_args()
    if asked.one:
        print(json.dumps(measure(asked.one[0], int(asked.one[1]), asked.rounds)), flush=True)
        return
    for sites in asked.sites:
        for name in asked.methods:
            print(json.dumps(watch(name, sites, asked.rounds)), flush=True)


if __name__ == "__main__":
    main()
