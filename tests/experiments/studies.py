"""What the tests of all studies need: calling one, and reading its tables and runs."""

from __future__ import annotations

import contextlib
import csv
import io
import json
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from support.helpers import Answer


def ask(main: Callable[[Sequence[str]], int], *arguments: str) -> Answer:
    """A study's command in this process."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            code = main(arguments)
        except SystemExit as end:  # of argparse
            code = int(end.code or 0)
    return Answer(code, out.getvalue(), err.getvalue())


def namespace(data: Path, out: Path, seeds: str) -> Namespace:
    """The options that all studies have, without a trial."""
    return Namespace(data_dir=data, out=out, seeds=seeds, device="cpu", rounds=None)


def read_csv(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.open(encoding="utf-8", newline="")))


def metric(out: Path, run: str, seed: int, point: str, name: str) -> float:
    """The mean over clients that have it, from a run's own file."""
    (file,) = out.glob(f"runs/{run}-seed{seed}-????????????/metrics.jsonl")
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return float(np.mean([line["value"] for line in lines if (line["point"], line["metric"]) == (point, name)]))
