"""On a GPU, what a user waits for: whole commands, models of real size beside a plain loop, client steps a second.

Runs by itself, too: ``python -m benchmarks.gpu_commands``; the commands need the files of Digit-5 and, for `paper all`,
of Office-10 (``FEDC2I_DATA``), and are skipped without.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch

import fedc2i
from benchmarks.commands import command
from benchmarks.models import BATCH, NETS, loop_round
from benchmarks.workload import make_federation
from fedc2i.core.settings import EngineSettings
from fedc2i.data.federation import Federation
from fedc2i.engine.simulator import simulate
from fedc2i.methods.base import Method
from fedc2i.methods.fedavg import FedAvg
from fedc2i.methods.fedc2i import FedC2I
from fedc2i.methods.fedc2i_plus import FedC2IPlus
from fedc2i.models.model import Model
from fedc2i.models.networks import build

CLIENTS, IMAGES = 10, 1000
KINDS = ("tf32", "bf16")  # of models of real size
FEDAVG = FedAvg()
MEASURING = {"fedc2i": FedC2I(), "plus_unguarded": FedC2IPlus(guard=False), "plus": FedC2IPlus()}
SEEDS, FEW, STEPS = 10, 5, 48  # of the wide LeNet: seeds, clients, steps of a client in a round


def our_round(
    model: Model,
    federation: Federation,
    seeds: Sequence[int],
    device: str,
    method: Method = FEDAVG,
    **settings: Any,
) -> float:
    """Seconds of a round of all seeds without scores: the median of the third to the fifth of six."""
    seconds = [0.0] * 6

    def note(report: Any) -> None:
        seconds[report.round - 1] += report.seconds

    how = EngineSettings(rounds=len(seconds), evaluate_every=0, **settings)
    simulate(method, model, federation, how, seeds, device, note)
    return statistics.median(seconds[2:5])  # the first two capture graphs, the last is scored


def real_models(
    device: str, names: Sequence[str], clients: int = CLIENTS, images: int = IMAGES, kinds: Sequence[str] = KINDS
) -> dict[str, Any]:
    """By model: seconds of a round of the loop as torch comes and in each precision, ours, and peak memory."""
    federation = make_federation(clients, images, 16, side=32)
    floats = [
        ((own.train.x.to(device, torch.float32) * (2 / 255) - 1), own.train.y.to(device)) for own in federation.clients
    ]
    found: dict[str, Any] = {}
    for name in names:
        net, model = NETS[name]().to(device), fedc2i.split(NETS[name], head="fc", name=name)
        loop_round(net, floats[:1])
        loop = {kind: loop_round(net, floats, kind) for kind in ("default", *kinds)}
        ours, peak = {}, {}
        for kind in kinds:
            if device == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            ours[kind] = our_round(model, federation, [0], device, batch_size=BATCH, precision=kind)
            peak[kind] = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None
            print(json.dumps({f"{name} {kind}": {"loop": loop, "ours": ours[kind]}}), flush=True)
        found[name] = {"loop": loop, "ours": ours, "peak_gb": peak}
        print(json.dumps({name: found[name]}), flush=True)
    return found


def client_steps(device: str, clients: int = FEW, images: int = 743) -> dict[str, float]:
    """Client steps a second of the wide LeNet, ten seeds side by side, by precision."""
    federation = make_federation(clients, images, 64, side=32)
    model = build("lenet-wide", 10, federation.input)
    found = {
        kind: SEEDS * clients * STEPS / our_round(model, federation, range(SEEDS), device, precision=kind)
        for kind in ("ieee", "tf32", "bf16")
    }
    print(json.dumps({"client_steps": found}), flush=True)
    return found


def influence_cost(device: str, clients: int = FEW, images: int = 743) -> dict[str, float]:
    """A round of the wide LeNet with influence / a FedAvg round, by method and number of seeds."""
    federation = make_federation(clients, images, 64, side=32)
    model = build("lenet-wide", 10, federation.input)
    found = {}
    for seeds in (SEEDS, 1):
        plain = our_round(model, federation, range(seeds), device)
        for name, method in MEASURING.items():
            found[f"{name}_{seeds}"] = our_round(model, federation, range(seeds), device, method) / plain
    print(json.dumps({"influence_cost": found}), flush=True)
    return found


def whole_commands() -> dict[str, Any]:
    """`fedc2i run fedavg --data digit5` with 3 and 10 seeds, and `fedc2i paper all`."""
    found: dict[str, Any] = {}
    for seeds in (3, 10):
        own = command("fedavg", "digit5", "rounds=20", f"seeds=0-{seeds - 1}", "evaluate_every=0", "device=cuda")
        found[f"run_{seeds}_seeds"] = own
        print(json.dumps({f"run_{seeds}_seeds": own}), flush=True)
    with tempfile.TemporaryDirectory() as place:
        began = time.time()
        paper = [sys.executable, "-m", "fedc2i", "paper", "all", "--out", f"{place}/paper"]
        done = subprocess.run(paper, capture_output=True, text=True, check=False)
        found["paper_seconds"] = time.time() - began if done.returncode == 0 else None
    return found


def measure(device: str = "cuda") -> dict[str, Any]:
    """All of it, with the numbers that are looked at from version to version under ``headline``."""
    resnets = real_models(device, ("resnet18_gn", "resnet18_bn"), kinds=("ieee", *KINDS))
    models = resnets | real_models(device, ("vit",))
    steps, cost = client_steps(device), influence_cost(device)
    try:
        commands = whole_commands()
    except RuntimeError as error:  # no data here
        commands = {"error": str(error).strip().splitlines()[-1]}
    gn, bn, vit = (models[name] for name in ("resnet18_gn", "resnet18_bn", "vit"))
    headline = {
        "resnet18_gn_vs_loop": gn["ours"]["tf32"] / gn["loop"]["tf32"],
        "resnet18_bn_vs_loop": bn["ours"]["tf32"] / bn["loop"]["tf32"],
        "resnet18_bf16_vs_loop": bn["ours"]["bf16"] / bn["loop"]["default"],
        "resnet18_gn_ieee_vs_loop": gn["ours"]["ieee"] / gn["loop"]["ieee"],
        "resnet18_bn_ieee_vs_loop": bn["ours"]["ieee"] / bn["loop"]["ieee"],
        "vit_vs_loop": vit["ours"]["tf32"] / vit["loop"]["tf32"],
        "client_steps_per_second": max(steps.values()),
    }
    for seeds in (3, 10):
        if f"run_{seeds}_seeds" in commands:
            headline[f"run_wall_{seeds}_seeds"] = commands[f"run_{seeds}_seeds"]["wall"]
    if commands.get("paper_seconds"):
        headline["paper_seconds"] = commands["paper_seconds"]
    return {
        "models": models,
        "client_steps": steps,
        "influence_cost": cost,
        "commands": commands,
        "headline": headline,
    }


def main() -> None:
    """Prints each result as it comes, and the headline numbers."""
    argparse.ArgumentParser(prog="python -m benchmarks.gpu_commands", description=(__doc__ or "")).parse_args()
    if not torch.cuda.is_available():
        sys.exit("error: gpu_commands needs a GPU")
    print(json.dumps(measure()["headline"], indent=2))


if __name__ == "__main__":
    main()
