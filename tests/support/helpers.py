"""The command line in this process, federations as files, and made-up results for tables and figures."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from PIL import Image

from fedc2i.cli.main import main
from fedc2i.data.federation import Client, Federation, Split
from fedc2i.engine.records import POINTS, Round
from fedc2i.methods.base import Method
from fedc2i.methods.fedc2i import FedC2I
from fedc2i.report import figures
from fedc2i.runs.results import Result
from fedc2i.runs.settings import RunSettings

DIGIT5 = ("MNIST", "SVHN", "USPS", "SynthDigits", "MNIST-M")
QUICK = ("--model", "lenet5", "--rounds", "1", "--set", "epochs=1")
DRAW_RUN, DRAW_COMPARISON = figures.draw_run, figures.draw_comparison  # before conftest replaces them


class Answer(NamedTuple):
    """How a command ended and what it printed."""

    code: int
    out: str
    err: str


def call(*arguments: str) -> Answer:
    """``fedc2i ARGUMENTS`` in this process."""
    with (
        mock.patch("sys.argv", ["fedc2i", *arguments]),
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        code: Any = 0
        try:
            main()
        except SystemExit as end:
            code = end.code
    return Answer(code, out.getvalue(), err.getvalue())


def write_arrays(folder: Path, federation: Federation) -> str:
    """The federation as one npz a client; returns how ``--data`` names it."""
    folder.mkdir(parents=True, exist_ok=True)
    for client in federation.clients:
        parts = {"train": client.train, "validation": client.validation, "test": client.test}
        arrays = {f"{axis}_{part}": getattr(split, axis).numpy() for part, split in parts.items() for axis in "xy"}
        np.savez(folder / f"{client.name}.npz", **arrays)
    return f"arrays:{folder}"


def files_below(folder: Path) -> dict[str, bytes | None]:
    """Everything below a folder by relative path, with the content of files; ``.`` is the folder itself."""
    found = [folder, *folder.rglob("*")] if folder.exists() else []
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in found}


@contextlib.contextmanager
def figures_drawn() -> Iterator[None]:
    """Runs draw their figures, as they do not in other tests."""
    with (
        mock.patch.object(figures, "draw_run", DRAW_RUN),
        mock.patch.object(figures, "draw_comparison", DRAW_COMPARISON),
    ):
        yield


def is_drawn(picture: Path | io.BytesIO) -> bool:
    """Whether a picture opens, has a decent size and more than one colour."""
    with Image.open(picture) as image:
        pixels = np.asarray(image.convert("RGB"))
    return min(pixels.shape[:2]) > 80 and pixels.std() > 5


def blank_federation(names: Sequence[str], classes: int = 3, name: str = "toy", **more: Any) -> Federation:
    """Clients with one grey image of every class."""
    y = torch.arange(classes)
    shade = torch.linspace(40, 220, classes).to(torch.uint8)[:, None, None, None]
    full, none = Split(shade.repeat(1, 3, 16, 16), y), Split(torch.zeros(0, 3, 16, 16, dtype=torch.uint8), y[:0])
    clients = tuple(Client(client, full, none, full) for client in names)
    return Federation(name, clients, tuple(f"class {c}" for c in range(classes)), **more)


def made_up(
    federation: Federation,
    accuracy: Mapping[int, Any],
    *,
    method: Method | None = None,
    key: str | None = None,
    lift: float = 1.0,
    influence: Mapping[str, Mapping[int, Any]] | None = None,
) -> Result:
    """A result with these accuracies ``(rounds, clients)`` by seed at ``received``; ``trained`` adds ``lift``.

    Args:
        federation: whose clients.
        accuracy: by seed; seeds may have different numbers of rounds; nan for a client that was not scored.
        method: FedC²I if left out.
        key: the method's name if left out; the label is the same with the method's title.
        lift: what ``trained`` has more than ``received``.
        influence: diagnostics ``(rounds, M, M, ...)`` by name and seed.
    """
    method = method or FedC2I()
    key = key or method.name
    tables = {seed: np.asarray(table, dtype=float) for seed, table in accuracy.items()}
    config = RunSettings(
        method=method.name,
        data=federation.name,
        model="lenet5",
        rounds=max(map(len, tables.values())),
        seeds=tuple(tables),
        device="cpu",
    )
    result = Result(method, config, federation, key.replace(method.name, method.title), key)
    for seed, table in tables.items():
        for t, row in enumerate(table):
            points = {
                point: [
                    {} if np.isnan(own) else {"accuracy": own + lift * (point == "trained")} for own in row.tolist()
                ]
                for point in POINTS
            }
            seen = {name: np.asarray(by_seed[seed][t]) for name, by_seed in (influence or {}).items()}
            result.rounds.append(Round(seed, t + 1, 0.5, federation.names, points, seen, (), 8, 16))
    return result
