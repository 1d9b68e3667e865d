"""``python -m benchmarks``: every measurement, as tables and as JSON."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from rich.console import Console

from benchmarks import commands, influence_speed, limit, memory, rounds, scale
from benchmarks.effort import FULL, NORMAL, QUICK, Effort
from benchmarks.report import machine

PARTS: dict[str, ModuleType] = {
    "commands": commands,
    "rounds": rounds,
    "influence": influence_speed,
    "limit": limit,
    "memory": memory,
    "scale": scale,
}
LATEST = Path(__file__).parent / "latest.json"


def run(effort: Effort, out: Path, console: Console, parts: Mapping[str, ModuleType] = PARTS) -> dict[str, Any]:
    """Measures part after part, prints the tables and writes everything to ``out``."""
    began = time.perf_counter()
    results: dict[str, Any] = {"effort": effort.name, "machine": machine()}
    own = results["machine"]
    console.print(f"{own['cpu']}, {own['cores']} cores, torch {own['torch']}, effort '{effort.name}'")
    for name, part in parts.items():
        console.print(f"[dim]{name} ...[/dim]")
        started = time.perf_counter()
        results[name] = part.measure(effort)
        results[name]["took"] = time.perf_counter() - started
        part.present(console, {key: value for key, value in results[name].items() if key != "took"}, effort)
    if parts is PARTS and torch.cuda.is_available():
        from benchmarks import gpu

        results["cuda"] = gpu.measure()
        gpu.add_commands(results["cuda"])
        gpu.present(console, results["cuda"])
    results["seconds"] = time.perf_counter() - began
    results = {**headline(results), **results}
    out.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    console.print(f"Written to {out.name} ({results['seconds']:.0f} s). A ratio below 1 means faster than the loop.")
    return results


def headline(results: Mapping[str, Any]) -> dict[str, float]:
    """The numbers that are looked at from version to version."""
    found: dict[str, float] = {}
    if "rounds" in results:
        small, *larger = (own for name, own in results["rounds"].items() if name != "took")
        found |= small["ratios"]
        sizes = [name for name in results["rounds"] if name != "took"][1:]
        for clients, own in zip(sizes, larger, strict=True):
            found |= {f"{name}_{clients}": value for name, value in own["ratios"].items()}
    if "commands" in results:
        own = results["commands"]
        found |= {"overhead_share": own["run"]["overhead_share"], "startup_seconds": own["run"]["startup"]}
        found |= {"after_seconds": own["run"]["after"], "after_vs_rounds": own["run"]["after"] / own["run"]["rounds"]}
        found |= {"run_wall_cpu": own["run"]["wall"], "table_round": own["table"]["rounds"] / commands.TABLE_ROUNDS}
        found["resnet_vs_loop_cpu"] = own["resnet"]["resnet_vs_loop_cpu"]
    for name, value in results.get("cuda", {}).get("headline", {}).items():
        found[name] = value
    for cell in results.get("influence", {}).get("cells", ()):
        size = f"m{cell['clients']}_c{cell['classes']}"
        if size in ("m5_c10", "m50_c10", "m50_c100"):
            found |= {f"{level}_speedup_{size}": cell[f"{level}_speedup"] for level in ("client", "class")}
    return found


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Speed and memory, measured side by side."
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="about two minutes: fewer blocks, fewer sizes")
    size.add_argument("--full", action="store_true", help="more rounds and repeats, about half an hour")
    parser.add_argument("--only", choices=list(PARTS), nargs="+", help="these parts only")
    parser.add_argument("--out", type=Path, default=LATEST, help="where to write the JSON (benchmarks/latest.json)")
    chosen = parser.parse_args()
    effort = QUICK if chosen.quick else FULL if chosen.full else NORMAL
    parts = {name: PARTS[name] for name in chosen.only} if chosen.only else PARTS
    console = Console()
    run(effort, chosen.out, console if console.is_terminal else Console(width=130), parts)


if __name__ == "__main__":
    main()
