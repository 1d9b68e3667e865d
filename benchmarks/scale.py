"""Scale: a thousand clients of which a tenth takes part, what a round adds to memory, and many classes."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console

from benchmarks.effort import Effort
from benchmarks.memory import PROC, answer, held, peak_of
from benchmarks.report import clock, show
from benchmarks.rounds import our_rounds
from benchmarks.workload import make_federation
from fedc2i.engine.records import Round
from fedc2i.methods.base import Method
from fedc2i.methods.fedavg import FedAvg
from fedc2i.methods.fedc2i import FedC2I

IMAGES, TESTS = 20, 10  # of each of the thousand
MEGABYTE = 2**20
METHODS: dict[str, Method] = {"fedavg": FedAvg(), "fedc2i_first_order": FedC2I(influence="first-order")}


class Enough(Exception):  # noqa: N818  nothing is wrong
    """The last mark is reached, or time is up: the closing evaluation of all clients is left out."""


def measure(effort: Effort) -> dict[str, Any]:
    """The scale check of both methods, each in its own process, and many classes."""
    found: dict[str, Any] = {"clients": {}, "classes": {}}
    if (PROC / "self" / "status").exists():
        for name in METHODS:
            task = {
                "method": name,
                "clients": effort.scale_clients,
                "marks": effort.scale_marks,
                "seconds": effort.scale_seconds,
            }
            peak, notes = peak_of(__name__, task)
            found["clients"][name] = {"peak": peak, **notes, **growth(notes["marks"])}
    for classes in effort.many_classes:
        federation = make_federation(5, effort.images, effort.tests, classes)
        found["classes"][str(classes)] = our_rounds(FedC2I(), federation, 2).seconds[-1]
    return found


def growth(marks: list[dict[str, float]]) -> dict[str, float | None]:
    """MB that a round adds between the first mark and the last, and how much of it the relayed models are."""
    if len(marks) < 2:
        return {"mb_per_round": None, "relayed_mb_per_round": None}
    first, last = marks[0], marks[-1]
    rounds = last["round"] - first["round"]
    return {
        "mb_per_round": (last["rss"] - first["rss"]) / rounds,
        "relayed_mb_per_round": (last["relayed"] - first["relayed"]) / rounds,
    }


def present(console: Console, result: Mapping[str, Any], effort: Effort) -> None:
    """Memory after some rounds, its growth, and rounds with many classes."""
    rows = []
    for name, found in result["clients"].items():
        after = ", ".join(f"{mark['rss']:.0f} ({mark['round']})" for mark in found["marks"])
        grown = [found["mb_per_round"], found["relayed_mb_per_round"]]
        rows.append(
            (
                name.replace("_", " "),
                after,
                *(f"{value:+.1f}" if value is not None else "-" for value in grown),
                clock(found["seconds"] / max(found["rounds"], 1)),
                f"{found['rounds']} of {effort.scale_marks[-1]}",
            )
        )
    notes = [
        f"{IMAGES} images each, LeNet-5, 10 % take part in a round. relayed: of the growth, the models that one client",
        "is sent (FedC²I keeps the latest of every client it has seen, so this grows until all were seen once).",
        f"A run ends after {effort.scale_seconds:.0f} s, and without the closing evaluation of all clients.",
    ]
    header = ("", "MB after (round)", "MB a round", "relayed", "a round", "rounds")
    if rows:
        show(console, f"{effort.scale_clients} clients", header, rows, notes)
    classes = [(count, clock(seconds)) for count, seconds in result["classes"].items()]
    show(console, "FedC²I, 5 clients, many classes", ("classes", "a round"), classes)


def main(task: Mapping[str, Any]) -> None:
    """In the child: rounds with a note of the memory after some of them."""
    federation = make_federation(task["clients"], IMAGES, TESTS)
    marks: list[dict[str, float]] = []
    done: list[float] = []
    began = time.perf_counter()

    def note(last: Round) -> None:
        done.append(last.seconds)
        if last.round in task["marks"]:
            marks.append({"round": last.round, "relayed": last.bytes_down / MEGABYTE, **held(os.getpid())})
        if last.round == task["marks"][-1] or time.perf_counter() - began > task["seconds"]:
            raise Enough

    rounds = task["marks"][-1] + 1
    settings = {"clients_per_round": "10%", "evaluate_every": rounds}
    try:
        our_rounds(METHODS[task["method"]], federation, rounds, on_round=note, **settings)
    except Enough:
        answer({"marks": marks, "rounds": len(done), "seconds": sum(done)})


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
