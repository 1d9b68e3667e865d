"""On a GPU: a whole run, many clients, and how much of the device's matrix rate they use; then `gpu_commands`.

Runs by itself, too: ``python benchmarks/gpu.py [--out FILE]``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a file: the folder above has the package, and this one hides no other `cuda`
    sys.path[0] = str(Path(__file__).parents[1])

import torch
from rich.console import Console

from benchmarks.limit import EPOCHS, POINTS, forward_flops, lenet, training_flops
from benchmarks.loop import LeNet5, fedavg
from benchmarks.report import clock, machine, show
from benchmarks.rounds import our_rounds
from benchmarks.workload import as_tensors, make_federation
from fedc2i.methods.fedc2i import FedC2I

PROBE = 32  # samples that influence is measured on
WIDE = {"channels": (64, 64), "hidden": (384, 192)}
FORMS = ("exact", "first-order")


@dataclass(frozen=True)
class Size:
    """What is run; the defaults are the benchmark, smaller ones are for its test."""

    device: str = "cuda"
    clients: int = 5
    images: int = 743
    tests: int = 2000
    side: int = 32
    rounds: int = 20
    seeds: int = 3
    loop_rounds: int = 5
    many_clients: int = 200
    many_tests: int = 500
    many_rounds: int = 2
    matrix: int = 8192


def round_flops(clients: int, images: int, tests: int, side: int, form: str) -> float:
    """Floating-point operations of a FedC²I round of the wide LeNet by counting; mixing models is left out."""
    layers = lenet(**WIDE, side=side)
    forward, training = forward_flops(layers), training_flops(layers)
    work = clients * images * EPOCHS * training + clients * tests * POINTS * forward
    influence = clients * PROBE * (clients * forward if form == "exact" else training)
    return float(work + influence + clients * PROBE * forward)  # the last for the features under the class level


def matrix_rate(device: str, size: int, repeats: int = 10) -> float:
    """TFLOP/s of a large product in IEEE single precision, the precision our engine computes in."""
    matmul = torch.backends.cuda.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "ieee"
    try:
        a, b = torch.randn(size, size, device=device), torch.randn(size, size, device=device)
        seconds = []
        for _ in range(repeats + 3):
            _wait(device)
            began = time.perf_counter()
            torch.mm(a, b)
            _wait(device)
            seconds.append(time.perf_counter() - began)
    finally:
        matmul.fp32_precision = before
    return 2 * size**3 / statistics.median(seconds[3:]) / 1e12


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def measure(size: Size = Size()) -> dict[str, Any]:  # noqa: B008  it is frozen
    """All of it; seconds of a run are wall clock from call to return, after a short run to warm up."""
    name = torch.cuda.get_device_name() if size.device == "cuda" else size.device
    found: dict[str, Any] = {"device": name, "matrix_tflops": matrix_rate(size.device, size.matrix)}
    federation = make_federation(size.clients, size.images, size.tests, side=size.side)
    options: dict[str, Any] = {"model": "lenet-wide", "device": size.device}

    floats = as_tensors(federation, size.device)
    net = LeNet5(side=size.side, **WIDE).to(size.device)
    laps = [own.seconds for own in fedavg(floats, net, size.loop_rounds + 1)][1:]
    del floats
    found["loop_round"] = statistics.median(laps)

    seeds = range(size.seeds)
    our_rounds(FedC2I(), federation, 2, seeds=seeds, **options)
    _wait(size.device)
    began = time.perf_counter()
    laps = our_rounds(FedC2I(), federation, size.rounds, seeds=seeds, **options).seconds
    _wait(size.device)
    seconds = time.perf_counter() - began
    work = size.rounds * size.seeds * round_flops(size.clients, size.images, size.tests, size.side, "exact")
    found["run"] = {
        "seconds": seconds,
        "round_of_all_seeds": statistics.median(laps),
        "to_the_loop": seconds / (size.rounds * size.seeds * found["loop_round"]),
        "share_of_matrix_rate": work / seconds / 1e12 / found["matrix_tflops"],
    }
    del federation

    many = make_federation(size.many_clients, size.images, size.many_tests, side=size.side)
    for form in FORMS:
        if size.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        laps = our_rounds(FedC2I(influence=form), many, size.many_rounds + 1, **options).seconds[1:]
        work = round_flops(size.many_clients, size.images, size.many_tests, size.side, form)
        found[f"many_{form}"] = {
            "round": statistics.median(laps),
            "share_of_matrix_rate": work / statistics.median(laps) / 1e12 / found["matrix_tflops"],
            "peak_gb": torch.cuda.max_memory_allocated() / 2**30 if size.device == "cuda" else None,
        }
    return found


def present(console: Console, result: Mapping[str, Any], size: Size = Size()) -> None:  # noqa: B008
    """One table."""
    run = result["run"]
    rows = [
        ("hand-written FedAvg loop, a round", clock(result["loop_round"]), "-", "-"),
        (
            f"FedC²I, {size.rounds} rounds, {size.seeds} seeds, whole run",
            clock(run["seconds"]),
            f"{run['share_of_matrix_rate']:.1%}",
            "-",
        ),
        ("... a round of all seeds", clock(run["round_of_all_seeds"]), "-", "-"),
    ]
    for form in FORMS:
        own = result[f"many_{form}"]
        peak = "-" if own["peak_gb"] is None else f"{own['peak_gb']:.1f} GB"
        title = f"FedC²I {form}, {size.many_clients} clients, a round"
        rows.append((title, clock(own["round"]), f"{own['share_of_matrix_rate']:.1%}", peak))
    notes = [
        f"{result['device']}: torch.mm in IEEE single precision {result['matrix_tflops']:.1f} TFLOP/s.",
        f"{size.clients} x {size.images} images 3x{size.side}x{size.side}, wide LeNet, {size.tests} test images each "
        f"({size.many_tests} with {size.many_clients} clients), both points.",
        f"The run takes {run['to_the_loop']:.2f} of the time of as many rounds of the loop (without influence).",
    ]
    show(console, "GPU", ("", "seconds", "of the matrix rate", "peak memory"), rows, notes)


def add_commands(result: dict[str, Any]) -> None:
    """Adds whole commands and models of real size, which take two minutes more."""
    from benchmarks import gpu_commands

    result |= gpu_commands.measure()


def main() -> None:
    """Prints the table and, with ``--out``, writes the numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="a file for the numbers as JSON")
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/gpu.py needs a CUDA device; there is none")
    result = {"machine": machine(), **measure()}
    present(Console(width=120), result)
    add_commands(result)
    text = json.dumps(result, indent=2) + "\n"
    print(text)
    if chosen.out is not None:
        chosen.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
