"""Pretrained networks on real images: what a frozen body, last blocks and adapters bring, and what they cost.

Three federations of images: HAM10000 by clinic, the originals of Office-10, and a PACS-like folder of our own making
(`experiments.stylised`). Every finished run is a line of ``OUT/runs.jsonl``; the same command computes only what is
missing, on any machine, and ``--page`` writes the table.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import fedc2i
from experiments.backbones_table import ARMS, DATA, METHODS, PROTOCOL, SCORES, page
from experiments.grid import launch
from experiments.stylised import make
from fedc2i.core.errors import UserError
from fedc2i.core.settings import cores
from fedc2i.data.catalog import data_root
from fedc2i.data.federation import Client, Federation, Split

COMMANDS = (
    "--data ham10000,office --arms lenet,head --device cuda",
    "--data ham10000,office --arms last,lora --rounds 5 --epochs 1 --seeds 0 --device cuda",
    "--data stylised --most 40 --arms lenet,head --device cuda",
    "--data stylised --most 40 --arms last,lora --seeds 0 --device cuda --page docs/tables/backbones.md",
)


@functools.lru_cache(maxsize=1)
def federation(data: str, pretrained: bool, root: Path, out: Path) -> Federation:
    """A data set, with images of the size that the model reads; HAM10000's are 96x96."""
    if data == "ham10000":
        return fedc2i.load("ham10000", data_dir=root, image_size=96 if pretrained else 64)
    originals = root / "office10" / "images"
    if not originals.is_dir():
        raise UserError(f"{originals}: the originals of Office-10 are not there")
    folder = originals if data == "office" else make(originals, out / "stylised")
    return fedc2i.load(f"folder:{folder}", image_size=224 if pretrained else 64)


def thinned(whole: Federation, most: int) -> Federation:
    """At most so many images for training and validation at every client; test images all remain.

    They are evenly spread over the classes, which come one after another.
    """

    def some(split: Split) -> Split:
        return split.take(torch.linspace(0, len(split) - 1, most).long()) if len(split) > most else split

    clients = [Client(own.name, some(own.train), some(own.validation), own.test) for own in whole.clients]
    return replace(whole, clients=tuple(clients)) if most else whole


def machine(device: str) -> str:
    """Where a run is computed."""
    if device == "cuda":
        return str(torch.cuda.get_device_name())
    return f"CPU, {cores()} cores ({platform.machine()})"


def lines(given: Namespace) -> list[dict[str, Any]]:
    """Finished runs."""
    file = given.out / "runs.jsonl"
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.is_file() else []


def compute(given: Namespace) -> None:
    """All runs that are missing, one after the other, until the time is up."""
    until = time.monotonic() + given.minutes * 60
    protocol = {name: getattr(given, name) for name in PROTOCOL}
    done = {(own["data"], own["arm"], own["method"]) for own in lines(given) if protocol.items() <= own.items()}
    given.out.mkdir(parents=True, exist_ok=True)
    for data, arm, method in _wanted(given):
        if (data, arm, method) in done:
            continue
        if time.monotonic() > until:
            print("time is up; the same command resumes", flush=True)
            return
        settings = {**ARMS[arm][1], **protocol, "evaluate_every": 0, "device": given.device}
        del settings["most"]
        if (method, arm) == ("fedbn", "lenet"):
            settings["model"] = "lenet5-bn"
        line: dict[str, Any] = {"data": data, "arm": arm, "method": method, **protocol}
        line["machine"] = machine(given.device)
        began = time.perf_counter()
        try:
            whole = federation(data, arm != "lenet", data_root(given.data_dir), given.out)
            result = fedc2i.run(method, thinned(whole, given.most), observer=_Saying(), **settings)
        except UserError as error:
            line["refused"] = str(error)
        else:
            line["scores"] = {name: result.averages("trained", name)["Avg"].tolist() for name in SCORES}
            line |= {"up": result.bytes_up, "down": result.bytes_down, "seconds": result.seconds}
            line["samples"] = result.federation.samples()
        with (given.out / "runs.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        shown = line.get("refused") or {name: round(sum(own) / len(own), 2) for name, own in line["scores"].items()}
        print(f"{data} {arm} {method}: {shown} ({time.perf_counter() - began:.1f} s)", flush=True)


class _Saying:
    """Shows nothing but the progress of a feature pass."""

    def begin(self, result: Any) -> None:
        """A run starts."""

    def client(self, done: int, of: int) -> None:
        """A client has trained."""

    def round(self, report: Any) -> None:
        """A round ended."""

    def say(self, line: str) -> None:
        """A line about features."""
        print(line, flush=True)


def _wanted(given: Namespace) -> Iterator[tuple[str, str, str]]:
    for data in given.data.split(","):
        for arm in given.arms.split(","):
            if data not in DATA or arm not in ARMS:
                raise UserError(f"'{data}', '{arm}': data are {', '.join(DATA)}, arms {', '.join(ARMS)}")
            for method in given.methods.split(","):
                if method not in METHODS:
                    raise UserError(f"'{method}': methods are {', '.join(METHODS)}")
                yield data, arm, method


def run(given: Namespace) -> None:
    """Computes what is missing; with ``--page``, writes the table."""
    compute(given)
    if given.page is not None:
        commands = "\n".join(f"$ python -m experiments.backbones {own}" for own in COMMANDS)
        given.page.write_text(page(lines(given), commands), encoding="utf-8")
        print(given.page)


def main(typed: Sequence[str]) -> int:
    """The command; returns the exit code."""
    options = ArgumentParser(prog="python -m experiments.backbones", description="What of a network to train.")
    options.add_argument("--data", default=",".join(DATA), help="data sets, separated by commas")
    options.add_argument("--arms", default=",".join(ARMS), help="what trains, separated by commas")
    options.add_argument("--data-dir", type=Path, help="folder of the data sets; or the variable FEDC2I_DATA")
    options.add_argument("--out", type=Path, default=Path("results/backbones"), help="folder of finished runs")
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    options.add_argument("--minutes", type=float, default=1e6, help="no run starts after this time")
    options.add_argument("--most", type=int, default=0, help="images that a client trains with; 0: all")
    options.add_argument("--methods", default=",".join(METHODS), help="methods, separated by commas")
    options.add_argument("--rounds", type=int, default=20)
    options.add_argument("--epochs", type=int, default=2, help="of a round")
    options.add_argument("--seeds", default="0-2", help="computed together; more seeds of a row may follow later")
    options.add_argument("--page", type=Path, help="write the table of all finished runs there")
    return launch(run, options, typed)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main(sys.argv[1:]))
