"""Digit-5: MNIST, SVHN, USPS, SynthDigits and MNIST-M as five clients that share the ten digits.

Training and test images are those of FedBN (Li et al., ICLR 2021): the published training and test parts are pooled
and split 80/20, stratified by class, and the first 7438 training images kept. A client trains on the first tenth.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedc2i.core.errors import UserError
from fedc2i.data import catalog, formats, images
from fedc2i.data.benchmark_cut import first_per_class, split_of, stratified_split
from fedc2i.data.federation import Client, DataOptions, Federation
from fedc2i.data.formats import Labelled, Labels

PRESET: Mapping[str, Any] = {"model": "lenet-wide", "rounds": 20, "figure_rounds": (1, 2, 10, 20)}
PUBLISHED = ("MNIST", "SVHN", "USPS", "MNIST-M")  # compared with the paper; SynthDigits may be a stand-in
IMAGE_SIZE = 32
TRAIN, VALIDATION, TEST_PER_CLASS = 743, 74, 200
STORED_SIZE = 28
KEPT_TRAIN, KEPT_TEST = 7438, 5000
WHOLE_TEST = ("mnist", "usps")

STAND_IN_NOTE = "SynthDigits is a rendered stand-in for the published set; Avg-4 leaves it out."
RECUT_NOTE = "SVHN is a re-cut of the published photos, so its pixels differ from the published 32x32 files."
MEMBERS_NOTE = "MNIST-M has other members than FedBN's."


def load(argument: str, options: DataOptions) -> Federation:
    """The benchmark with its preset.

    Args:
        argument: domains in lower case, separated by commas; empty for all five.
        options: of these ``data_dir`` and ``image_size`` matter (32 by default).

    Raises:
        UserError: if data is missing, damaged or too small, or an argument is not allowed.
    """
    size = options.image_size or IMAGE_SIZE
    found = catalog.locate(catalog.choose("digit5", argument), options.data_dir)
    catalog.require(found, options.data_dir)
    clients: list[Client] = []
    notes: list[str] = []
    for entry in found:
        prepared = catalog.obtain(entry, convert)
        clients.append(_client(entry.domain, prepared, size))
        notes += [*prepared.notes, *_notes(entry.domain.key, prepared.from_published)]
    name = f"digit5:{argument}" if argument else "digit5"
    everything = {client.name for client in clients} >= set(PUBLISHED)
    averages = {"Avg-4": PUBLISHED} if everything and STAND_IN_NOTE in notes else {}
    return Federation(name, tuple(clients), catalog.DIGIT_CLASSES, tuple(notes), PRESET, averages)


def _client(domain: catalog.Domain, prepared: catalog.Prepared, size: int) -> Client:
    (x, y), (x_test, y_test) = prepared.train, prepared.test
    needed = require_train(domain, y)
    rows = first_per_class(y_test, TEST_PER_CLASS)
    if len(rows) < TEST_PER_CLASS * len(catalog.DIGIT_CLASSES):
        rows = np.arange(len(y_test))  # USPS: its list has too few of some digits, so all of it is used
    cut = split_of(x[:needed], y[:needed], size)
    order = range(needed)
    return Client(
        domain.client, cut.take(order[:TRAIN]), cut.take(order[TRAIN:]), split_of(x_test[rows], y_test[rows], size)
    )


def require_train(domain: catalog.Domain, labels: Labels) -> int:
    """How many training images the benchmark takes.

    Raises:
        UserError: if there are fewer.
    """
    needed = TRAIN + VALIDATION
    if len(labels) < needed:
        raise UserError(f"digit5: {domain.client} has {len(labels)} training images, the benchmark takes {needed}")
    return needed


def _notes(key: str, from_published: bool) -> list[str]:
    if key == "mnistm":
        return [MEMBERS_NOTE]
    if from_published:
        return []
    return {"synth": [STAND_IN_NOTE], "svhn": [RECUT_NOTE]}.get(key, [])


def convert(domain: catalog.Domain, paths: Sequence[Path]) -> tuple[Labelled, Labelled, tuple[str, ...]]:
    """FedBN's training and test images of a domain, 28x28, from its published files."""
    parts = _READERS[domain.key](paths)
    train, test = stratified_split(np.concatenate([labels for _, labels in parts]), str(paths[0]))
    kept = test if domain.key in WHOLE_TEST else test[:KEPT_TEST]
    return _pick(parts, train[:KEPT_TRAIN]), _pick(parts, kept), ()


def _pick(parts: Sequence[Labelled], rows: Labels) -> Labelled:
    """The pooled images at ``rows``, in that order; all of the pool might not fit into memory twice."""
    starts = np.cumsum([0, *(len(labels) for _, labels in parts)])
    labels = np.concatenate([labels for _, labels in parts])[rows]
    picked = [
        parts[part][0][row - starts[part]]
        for row, part in zip(rows, np.searchsorted(starts, rows, "right") - 1, strict=True)
    ]
    return images.resize(np.stack(picked), STORED_SIZE), labels


def _read_mnistm(paths: Sequence[Path]) -> list[Labelled]:
    if paths[0].suffix == ".npz":
        return list(formats.read_npz(paths[0]))
    return [formats.read_png_folder(paths[0], paths[1]), formats.read_png_folder(paths[2], paths[3])]


_READERS: Mapping[str, Callable[[Sequence[Path]], list[Labelled]]] = {
    "mnist": lambda paths: [formats.read_mnist(paths[0], paths[1]), formats.read_mnist(paths[2], paths[3])],
    "svhn": lambda paths: [formats.read_mat(path) for path in paths],
    "synth": lambda paths: [formats.read_mat(path) for path in paths],
    "usps": lambda paths: [formats.read_usps(path) for path in paths],
    "mnistm": _read_mnistm,
}
