"""Predictions of a client's model for new rows of a table, encoded as the client's training rows were."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from fedc2i.core.errors import UserError, nearest, one_line
from fedc2i.core.files import read_json, refuse_code
from fedc2i.data.federation import InputSpec
from fedc2i.data.schema import Encoder
from fedc2i.data.table import ENCODING, read
from fedc2i.engine.records import Point
from fedc2i.methods.base import Site
from fedc2i.runs.finished_run import read_model
from fedc2i.runs.plan import build_model, parse_method
from fedc2i.runs.settings import make, read_toml

if TYPE_CHECKING:
    import pandas


def predict(
    folder: Path | str,
    client: str,
    rows: pandas.DataFrame | Path | str,
    *,
    seed: int | None = None,
    point: Point = "trained",
    trust: bool = False,
) -> pandas.DataFrame:
    """A client's predictions for new rows.

    Args:
        folder: a finished run on a table.
        client: whose model and encoding are used.
        rows: a CSV or Parquet file, or a DataFrame, with the columns of the table that are inputs; others are ignored.
        seed: of the run; its first by default.
        trust: execute the Python files (``FILE.py:NAME``) that the folder names as its method or model.
        point: the model before (``received``) or after (``trained``) the last local training.

    Returns:
        One line a row: ``prediction``, the class, and ``p(CLASS)``, its probabilities.

    Raises:
        UserError: if the run has no encoding or no such client, or a column is missing.
    """
    folder = Path(folder)
    if not (folder / ENCODING).is_file() or not (folder / "summary.json").is_file():
        raise UserError(
            f"{folder}: not the folder of a finished run on a table (no {ENCODING}), so rows cannot be encoded"
        )
    stored, summary = read_json(folder / ENCODING), read_json(folder / "summary.json")
    encoders = stored["clients"]
    if client not in encoders:
        hint = nearest(client, list(encoders))
        raise UserError(f"{folder}: no client '{one_line(client)}'{hint}, allowed are {', '.join(encoders)}")
    encoder = Encoder.from_json(encoders[client])
    table = read(Path(rows)) if isinstance(rows, str | Path) else rows
    x = torch.from_numpy(encoder.encode(str(rows) if isinstance(rows, str | Path) else "rows", table))
    settings = read_toml(folder / "config.toml")
    refuse_code(folder, [settings.get(name) for name in ("method", "model")], trust)
    classes = tuple(map(str, summary["classes"]))
    kind, name, _ = parse_method(str(settings["method"]))
    config = make(kind, {**settings, "method": name})
    method, model = kind(**settings.get("options", {})), build_model(config, classes, InputSpec.of(x))
    params = read_model(folder, client, summary["seeds"][0] if seed is None else seed, point)
    site = Site(model, torch.zeros(len(classes)), torch.tensor(-1), {})
    with torch.no_grad():
        probabilities = method.predict(params, x, site).softmax(1)
    return _table(classes, probabilities, table)


def _table(classes: tuple[str, ...], probabilities: torch.Tensor, rows: pandas.DataFrame) -> pandas.DataFrame:
    import pandas

    columns = {f"p({name})": probabilities[:, k].tolist() for k, name in enumerate(classes)}
    guesses = [classes[label] for label in probabilities.argmax(1).tolist()]
    return pandas.DataFrame({"prediction": guesses, **columns}, index=rows.index)
