"""Memory: the most that a run and its worker processes hold at once, each run in a process of its own.

``rss`` adds up resident memory, so pages that processes share count for each of them; ``pss`` counts them once.
Both are read from /proc every few hundredths of a second; where there is none (not Linux) this part is skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.effort import Effort
from benchmarks.report import show

ROOT = Path(__file__).parents[1]
PROC = Path("/proc")
EVERY = 0.03  # seconds between two looks
CONTENDERS = ("loop", "fedavg", "fedc2i")
MARK = "result: "  # what comes before a child's answer on its stdout


def family(pid: int) -> list[int]:
    """A process and all that descend from it."""
    parents: dict[int, int] = {}
    for folder in PROC.iterdir():
        if folder.name.isdigit():
            try:
                after_name = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it ended meanwhile
                continue
            parents[int(folder.name)] = int(after_name[1])
    members = [pid]
    for member in members:  # grows while it is walked
        members += [child for child, parent in parents.items() if parent == member]
    return members


def held(pid: int) -> dict[str, float]:
    """MB of a process and its descendants, now."""
    total = {"rss": 0.0, "pss": 0.0}
    for member in family(pid):
        for field, file, key in (("rss", "status", "VmRSS:"), ("pss", "smaps_rollup", "Pss:")):
            try:
                lines = (PROC / str(member) / file).read_text().splitlines()
            except OSError:
                continue
            total[field] += sum(int(line.split()[1]) for line in lines if line.startswith(key)) / 1024
    return total


def peak_of(module: str, task: Mapping[str, Any]) -> tuple[dict[str, float], Any]:
    """Runs ``python -m MODULE TASK`` and watches it: its highest memory, and the JSON it answers with.

    Raises:
        RuntimeError: if it fails, with the end of what it said.
    """
    child = subprocess.Popen(
        [sys.executable, "-m", module, json.dumps(dict(task))],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,  # its answer is short, so the pipe cannot fill up while nobody reads
    )
    highest = {"rss": 0.0, "pss": 0.0}
    while child.poll() is None:
        now = held(child.pid)
        highest = {name: max(highest[name], now[name]) for name in highest}
        time.sleep(EVERY)
    said = child.communicate()[0]
    answers = [line.removeprefix(MARK) for line in said.splitlines() if line.startswith(MARK)]
    if child.returncode or not answers:
        raise RuntimeError(f"{module} {json.dumps(dict(task))} failed:\n{said[-2000:]}")
    return highest, json.loads(answers[-1])


def answer(value: Any) -> None:
    """What a child tells the process that watches it."""
    print(MARK + json.dumps(value), flush=True)


def measure(effort: Effort) -> dict[str, Any]:
    """Peak memory of each contender; ``imports`` is the part of torch and this package alone."""
    if not (PROC / "self" / "status").exists():
        return {"skipped": "no /proc on this system"}
    size = {"images": effort.images, "tests": effort.tests}
    found: dict[str, Any] = {"imports": peak_of(__name__, {"what": "imports", "clients": 1, "rounds": 1, **size})[0]}
    for clients, rounds in effort.memory.items():
        for what in CONTENDERS:
            task = {"what": what, "clients": clients, "rounds": rounds, **size}
            found[f"{what}_{clients}"] = peak_of(__name__, task)[0]
    return found


def present(console: Console, result: Mapping[str, Any], effort: Effort) -> None:
    """One line a contender."""
    if "skipped" in result:
        console.print(f"Memory: skipped, {result['skipped']}.")
        return
    rows = []
    for name, most in result.items():
        what, _, clients = name.partition("_")
        loop = result.get(f"loop_{clients}")
        ratio = f"{most['rss'] / loop['rss']:.2f}" if loop else "-"
        rows.append((what, clients or "-", f"{most['rss']:.0f} MB", f"{most['pss']:.0f} MB", ratio))
    notes = [
        "Process and children together, highest value seen. A page that processes share counts once for each in",
        "resident, once in all in proportional. imports: Python with torch and this package, no data.",
        "The loop keeps float images, ours uint8 and two worker processes.",
    ]
    show(console, "Peak memory", ("", "clients", "resident", "proportional", "to the loop"), rows, notes)


def main(task: Mapping[str, Any]) -> None:
    """In the child: one run that is being watched."""
    from benchmarks.rounds import loop_rounds, our_rounds
    from benchmarks.workload import as_tensors, make_federation
    from fedc2i.methods.fedavg import FedAvg
    from fedc2i.methods.fedc2i import FedC2I

    if task["what"] == "imports":
        time.sleep(10 * EVERY)
        return answer(held(os.getpid()))
    federation = make_federation(task["clients"], task["images"], task["tests"])
    if task["what"] == "loop":
        floats = as_tensors(federation)
        del federation  # the loop has no use for it
        return answer(loop_rounds(floats, task["rounds"]).seconds)
    method = {"fedavg": FedAvg, "fedc2i": FedC2I}[task["what"]]()
    return answer(our_rounds(method, federation, task["rounds"], executor="workers").seconds)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
