"""Office-10: Amazon, Caltech, DSLR and WebCam as four clients that share ten classes of office objects.

Training and test images are those of FedBN (Li et al., ICLR 2021). ``office10_split.json`` lists them for each domain
as ``<class>/<file>``, in the order of the lists that FedBN's authors publish beside the images
(``<domain>_train.pkl``, ``<domain>_test.pkl``). A folder without these files gets a split of the same proportions,
and a note says so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from fedc2i.core.errors import UserError
from fedc2i.data import catalog, images
from fedc2i.data.benchmark_cut import first_per_class, split_of, stratified_split
from fedc2i.data.catalog import OFFICE_CLASSES
from fedc2i.data.federation import Client, DataOptions, Federation
from fedc2i.data.formats import Labelled

PRESET: Mapping[str, Any] = {"model": "lenet5", "rounds": 40, "figure_rounds": (1, 4, 10, 40)}
IMAGE_SIZE = 64
TRAIN_PER_CLASS, VALIDATION_PER_CLASS = 25, 10
MAX_IMAGES = 50_000


def load(argument: str, options: DataOptions) -> Federation:
    """The benchmark with its preset.

    Args:
        argument: domains in lower case, separated by commas; empty for all four.
        options: of these ``data_dir`` and ``image_size`` matter (64 by default).

    Raises:
        UserError: if data is missing or damaged, or an argument is not allowed.
    """
    size = options.image_size or IMAGE_SIZE
    found = catalog.locate(catalog.choose("office10", argument), options.data_dir)
    catalog.require(found, options.data_dir)
    clients: list[Client] = []
    notes: list[str] = []
    for entry in found:
        prepared = catalog.obtain(entry, convert)
        (x, y), (x_test, y_test) = prepared.train, prepared.test
        train = first_per_class(y, TRAIN_PER_CLASS)
        validation = first_per_class(y, VALIDATION_PER_CLASS, skip=TRAIN_PER_CLASS)
        cuts = (split_of(x[train], y[train], size), split_of(x[validation], y[validation], size))
        clients.append(Client(entry.domain.client, *cuts, split_of(x_test, y_test, size)))
        notes += prepared.notes
    name = f"office10:{argument}" if argument else "office10"
    return Federation(name, tuple(clients), OFFICE_CLASSES, tuple(notes), PRESET)


def split_names(domain: str) -> tuple[list[str], list[str]]:
    """FedBN's training and test images of a domain in lower case, as ``<class>/<file>``."""
    text = resources.files("fedc2i.data").joinpath("office10_split.json").read_text(encoding="utf-8")
    lists = json.loads(text)[domain]
    return lists["train"], lists["test"]


def convert(domain: catalog.Domain, paths: Sequence[Path]) -> tuple[Labelled, Labelled, tuple[str, ...]]:
    """Training and test images of a domain, 64x64, from ``<domain>/<class>/``."""
    (folder,) = paths
    _check_classes(folder)
    train, test = ([folder / name for name in names] for names in split_names(domain.key))
    missing = next((file for file in (*train, *test) if not file.is_file()), None)
    if missing is None:
        return _read(folder, train), _read(folder, test), ()
    files = [file for name in OFFICE_CLASSES for file in sorted((folder / name).iterdir()) if images.is_image(file)]
    train_rows, test_rows = stratified_split(_labels(files), str(folder))
    note = (
        f"{domain.client} lacks images of FedBN's split, such as {missing.relative_to(folder).as_posix()}; "
        "its split is a stratified 80/20 one."
    )
    train, test = ([files[row] for row in rows] for rows in (train_rows, test_rows))
    return _read(folder, train), _read(folder, test), (note,)


def _check_classes(folder: Path) -> None:
    """Refuses a folder that does not hold exactly the ten classes."""
    present = {child.name for child in folder.iterdir() if child.is_dir() and not child.name.startswith(".")}
    if unknown := sorted(present - set(OFFICE_CLASSES)):
        raise UserError(f"{folder}: class folder '{unknown[0]}' is not known, allowed are {', '.join(OFFICE_CLASSES)}")
    if absent := sorted(set(OFFICE_CLASSES) - present):
        raise UserError(f"{folder}: class folder '{absent[0]}' is missing")


def _labels(files: Sequence[Path]) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array([OFFICE_CLASSES.index(file.parent.name) for file in files], dtype=np.int64)


def _read(folder: Path, files: Sequence[Path]) -> Labelled:
    if len(files) > MAX_IMAGES:
        raise UserError(f"{folder}: {len(files):,} images, allowed are {MAX_IMAGES:,}")
    return images.read_images(files, IMAGE_SIZE), _labels(files)
