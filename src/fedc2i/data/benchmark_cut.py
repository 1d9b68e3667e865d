"""How the published benchmarks select their images: stratified by class, or the first few of every class."""

from __future__ import annotations

import numpy as np

from fedc2i.core.errors import UserError
from fedc2i.data import formats, images
from fedc2i.data.federation import Split
from fedc2i.data.formats import Labels


def stratified_split(labels: Labels, where: str) -> tuple[Labels, Labels]:
    """Rows for training (80 %) and test (20 %), chosen and ordered as in FedBN's code.

    Raises:
        UserError: if a class has fewer than two samples, or there are fewer samples than such a split needs.
    """
    from sklearn.model_selection import StratifiedShuffleSplit  # takes a second; files that are split need none

    splitter = StratifiedShuffleSplit(n_splits=1, test_size=0.2, random_state=0)
    try:
        train, test = next(splitter.split(np.zeros(len(labels)), labels))
    except ValueError as error:
        raise UserError(f"{where}: cannot be split into training and test images ({error})") from None
    return train, test


def first_per_class(labels: Labels, count: int, skip: int = 0) -> Labels:
    """Rows of the first ``count`` samples of each class after its first ``skip``, in list order."""
    rows = [np.flatnonzero(labels == label)[skip : skip + count] for label in np.unique(labels)]
    return np.sort(np.concatenate(rows))


def split_of(x: formats.Images, y: Labels, size: int) -> Split:
    """Stored images as a `Split` of the size asked for."""
    return Split.from_numpy(images.resize(x, size), y)
