"""Predictions of a client's model: for new rows of a table, encoded as its training rows were, or for new images."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedc2i.core.errors import UserError, one_line
from fedc2i.core.files import is_plugin, read_json, refuse_code
from fedc2i.data.encoder import Encoder
from fedc2i.data.federation import InputSpec
from fedc2i.data.table import ENCODING
from fedc2i.data.table_reader import read
from fedc2i.engine.records import Point
from fedc2i.methods.base import Method, Site, find_method
from fedc2i.runs.client_model import read_encoder
from fedc2i.runs.folder import SUMMARY
from fedc2i.runs.plan import build_model, parse_method
from fedc2i.runs.settings import make, read_toml
from fedc2i.runs.stored_models import read_model, require_models
from fedc2i.training.metrics import AT_ONCE

MOST_NAMED = 8  # categories listed in a line
MOST_COLUMNS = 5  # with a line about their numbers

if TYPE_CHECKING:
    import pandas

    from fedc2i.models.model import Model


def predict(
    folder: Path | str,
    client: str,
    rows: pandas.DataFrame | Path | str,
    *,
    seed: int | None = None,
    point: Point = "trained",
    trust: bool = False,
    model: Model | None = None,
    method: Method | None = None,
) -> pandas.DataFrame:
    """A client's predictions for new rows of a table, or for new images.

    Warns of categories that the run never saw, and of numbers far from those of the training rows.

    Args:
        folder: a finished run on a table or on images.
        client: whose model and encoding are used.
        rows: a CSV or Parquet file, or a DataFrame, with the columns of the table that are inputs; others are ignored.
            Of a run on images, an image file or a folder of some.
        seed: of the run; its first by default.
        trust: execute the Python files (``FILE.py:NAME``) that the folder names as its method or model.
        point: the model after the last local training (``trained``), or after the exchange that follows (``received``).
        model: the run's, if it was an object of Python.
        method: the run's, if it was an object of Python.

    Returns:
        One line a row: ``prediction``, the class, and ``p(CLASS)``, its probabilities; of images, ``file`` first.

    Raises:
        UserError: if the run has no encoding or no such client, or a column or image is missing.
    """
    folder = Path(folder)
    if not (folder / SUMMARY).is_file():
        runs = sorted(path.parent.name for path in folder.glob(f"*/{SUMMARY}"))
        several = f"it holds several, name one of them: {', '.join(runs)}"
        raise UserError(f"{folder}: not the folder of a finished run; {several if runs else f'it has no {SUMMARY}'}")
    require_models(folder)
    summary = read_json(folder / SUMMARY)
    if (folder / ENCODING).is_file():
        x, index = _rows(read_encoder(folder, client, summary), rows)
        first: dict[str, list[str]] = {}
    else:
        x, files = _images(folder, summary, rows)
        index, first = range(len(files)), {"file": [str(file) for file in files]}
    settings = read_toml(folder / "config.toml")
    refuse_code(folder, [settings.get(name) for name in ("method", "model")], trust)
    classes = tuple(map(str, summary["classes"]))
    wanted = method or str(settings["method"])
    if isinstance(wanted, str) and not is_plugin(wanted) and find_method(wanted) is None:
        raise UserError(f"{folder}: its method '{wanted}' was an object of Python; predict in Python with method=...")
    if model is None and settings["model"] == "custom":
        raise UserError(f"{folder}: its model was an object of Python; predict in Python with model=...")
    kind, name, _ = parse_method(wanted)
    config = make(kind, {**settings, "method": name})
    used = wanted if isinstance(wanted, Method) else kind(**config.options)
    network = build_model(config, classes, InputSpec.of(x), model)
    params = read_model(folder, client, summary["seeds"][0] if seed is None else seed, point)
    site = Site(network, torch.zeros(len(classes)), torch.tensor(-1), {})
    with torch.no_grad():
        pieces = [used.predict(params, piece, site).softmax(1) for piece in torch.split(x, AT_ONCE)]
    return _table(classes, torch.cat(pieces), index, first)


def _rows(encoder: Encoder, rows: Any) -> tuple[Tensor, Any]:
    """Rows as the run has read them, and their index."""
    if isinstance(rows, str | Path):
        kinds = {column.name: column.kind for column in encoder.schema.columns}
        table = read({"": Path(rows)}, kinds=kinds)[""]
    else:
        table = rows.set_axis([str(name) for name in rows.columns], axis=1)
    where = str(rows) if isinstance(rows, str | Path) else "rows"
    encoded = torch.from_numpy(encoder.encode(where, table))
    for column, values in encoder.unseen(table).items():
        shown = [f"'{one_line(value, 80)}' in {count} row{'s' * (count != 1)}" for value, count in values.items()]
        more = f", and {len(shown) - MOST_NAMED} more" if len(shown) > MOST_NAMED else ""
        warnings.warn(
            f"{where}: column '{one_line(column, 80)}' has {', '.join(shown[:MOST_NAMED])}{more}, which the run never "
            "saw; it counts as none of the known categories",
            stacklevel=3,
        )
    distant = encoder.distant(table)
    for own in distant[:MOST_COLUMNS]:
        count = f"{own.far} of {own.known} values {'is' if own.far == 1 else 'are'}"
        warnings.warn(
            f"{where}: column '{one_line(own.column, 80)}': {count} more than {own.limit} standard deviations from the "
            f"mean of the training rows ({own.mean:.3g} ± {own.sd:.2g}); another unit, or rows of another kind?",
            stacklevel=3,
        )
    if (rest := len(distant) - MOST_COLUMNS) > 0:
        warnings.warn(f"{where}: {rest} more column{'s' * (rest != 1)} with such values", stacklevel=3)
    return encoded, table.index


def _images(folder: Path, summary: Any, where: Any) -> tuple[Tensor, list[Path]]:
    """Images as the run has read them, and their files."""
    from fedc2i.data import images

    sample = InputSpec.from_json(summary["input"]) if "input" in summary else None
    if sample is None or not sample.is_image or not isinstance(where, str | Path):
        raise UserError(f"{folder}: not the folder of a finished run on a table (no {ENCODING}) or on images")
    path = Path(where)
    files = sorted(file for file in path.rglob("*") if images.is_image(file)) if path.is_dir() else [path]
    if not files:
        raise UserError(f"{path}: no images in this folder, allowed are files ending in {', '.join(images.SUFFIXES)}")
    pixels = images.read_images(files, sample.shape[1])
    return torch.from_numpy(pixels.transpose(0, 3, 1, 2).copy()), files


def _table(
    classes: tuple[str, ...], probabilities: Tensor, index: Any, first: Mapping[str, Sequence[str]]
) -> pandas.DataFrame:
    import pandas

    columns = {f"p({name})": probabilities[:, k].tolist() for k, name in enumerate(classes)}
    guesses = [classes[label] for label in probabilities.argmax(1).tolist()]
    return pandas.DataFrame({**first, "prediction": guesses, **columns}, index=index)
