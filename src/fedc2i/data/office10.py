"""Office-10: Amazon, Caltech, DSLR and WebCam as four clients that share ten classes of office objects.

Training and test images are FedBN's (Li et al., ICLR 2021) by its split lists; without lists, a split of the
same proportions is made and said so in the notes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedc2i.core.errors import UserError, one_line
from fedc2i.data import catalog, images, split_lists
from fedc2i.data.benchmark_cut import first_per_class, split_of, stratified_split
from fedc2i.data.catalog import OFFICE_CLASSES
from fedc2i.data.federation import Client, Federation
from fedc2i.data.formats import Labelled, require_inside

PRESET: Mapping[str, Any] = {"model": "lenet5", "rounds": 40, "figure_rounds": (1, 4, 10, 40)}
IMAGE_SIZE = 64
TRAIN_PER_CLASS, VALIDATION_PER_CLASS = 25, 10

_MAX_IMAGES = 50_000


def load(argument: str, *, data_dir: Path | None, image_size: int | None) -> Federation:
    """The benchmark with its preset.

    Args:
        argument: domains in lower case, separated by commas; empty for all four.
        data_dir: where the data lies; see `catalog.data_root` for None.
        image_size: side of the images, 64 for None.

    Raises:
        UserError: if data is missing or damaged, or an argument is not allowed.
    """
    size = image_size or IMAGE_SIZE
    found = catalog.locate(catalog.choose("office10", argument), data_dir)
    catalog.require(found, data_dir)
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


def convert(domain: catalog.Domain, paths: Sequence[Path]) -> tuple[Labelled, Labelled, tuple[str, ...]]:
    """Training and test images of a domain, 64x64, from ``<domain>/<class>/`` and the split lists beside, if any."""
    folder, *lists = paths
    _check_folder(folder)
    if not lists:
        files = [file for name in OFFICE_CLASSES for file in sorted((folder / name).iterdir()) if images.is_image(file)]
        labels = np.array([OFFICE_CLASSES.index(file.parent.name) for file in files], dtype=np.int64)
        train, test = stratified_split(labels, str(folder))
        note = f"{domain.client} has no split lists, so its split is a stratified 80/20 one, not FedBN's."
        return _read([files[row] for row in train]), _read([files[row] for row in test]), (note,)
    if len(lists) == 1:
        raise UserError(
            f"{lists[0]}: the other of {domain.key}_train.pkl and {domain.key}_test.pkl is missing beside it"
        )
    train_files, test_files = (_listed(folder, path) for path in lists)
    return _read(train_files), _read(test_files), ()


def _check_folder(folder: Path) -> None:
    """Refuse folders that are not exactly the ten classes."""
    present = {child.name for child in folder.iterdir() if child.is_dir() and not child.name.startswith(".")}
    if unknown := sorted(present - set(OFFICE_CLASSES)):
        raise UserError(f"{folder}: class folder '{unknown[0]}' is not known, allowed are {', '.join(OFFICE_CLASSES)}")
    if absent := sorted(set(OFFICE_CLASSES) - present):
        raise UserError(f"{folder}: class folder '{absent[0]}' is missing")


def _listed(folder: Path, path: Path) -> list[Path]:
    """The files that a split list names, all of them inside ``folder``."""
    files = []
    for entry, label in split_lists.read(path):
        name, file_name = split_lists.class_and_file(path, entry)
        if name not in OFFICE_CLASSES or label not in (name, OFFICE_CLASSES.index(name)):
            allowed = ", ".join(OFFICE_CLASSES)
            raise UserError(
                f"{path}: class '{one_line(name)}' labelled '{one_line(label)}', allowed are {allowed}, labelled alike"
            )
        files.append(require_inside(path, folder, f"{name}/{file_name}"))
    if not files:
        raise UserError(f"{path}: the list is empty")
    return files


def _read(files: Sequence[Path]) -> Labelled:
    if len(files) > _MAX_IMAGES:
        raise UserError(f"{files[0].parent.parent}: {len(files):,} images, allowed are {_MAX_IMAGES:,}")
    labels = np.array([OFFICE_CLASSES.index(file.parent.name) for file in files], dtype=np.int64)
    return images.read_images(files, IMAGE_SIZE), labels
