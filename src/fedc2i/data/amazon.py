"""``amazon``: product reviews of books, DVDs, electronics and kitchen goods, positive or negative.

Counts of the 5,000 most frequent words and pairs of words (Multi-Domain Sentiment, Blitzer, Dredze and Pereira 2007),
each review scaled to length 1. The first 70 % are for training, 10 % for validation, 20 % for test. Known kinship:
books and DVDs, electronics and kitchen.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from scipy.sparse import csr_array

from fedc2i.core import memory
from fedc2i.core.errors import UserError
from fedc2i.data import catalog, npz
from fedc2i.data.federation import Client, DataOptions, Federation, Split

WORDS = 5000
PRESET = {"model": "mlp", "rounds": 12}


def load(argument: str, options: DataOptions) -> Federation:
    """All four kinds of products, or those in a comma list such as ``books,dvd``.

    Counts of words are divided by their norm, whatever ``scale`` is.

    Raises:
        UserError: if the data is missing or damaged, or there is no such kind.
    """
    paths = catalog.files("amazon", options.data_dir, argument)
    return Federation(
        name=f"amazon:{argument}" if argument else "amazon",
        clients=tuple(_client(path) for path in paths),
        classes=("negative", "positive"),
        preset=PRESET,
    )


def _client(path: Path) -> Client:
    with npz.opened(path) as archive:
        found = archive.read(("indptr", "indices", "counts", "y"))
    labels = found["y"].astype(np.int64)
    memory.require(path, len(labels) * WORDS * 4, "dense counts")
    try:
        counts = csr_array((found["counts"], found["indices"], found["indptr"]), shape=(len(labels), WORDS))
        x = counts.toarray().astype(np.float32)
    except (ValueError, IndexError, TypeError) as error:
        raise UserError(f"{path}: not a CSR matrix of {WORDS} columns ({error})") from None
    x /= np.linalg.norm(x, axis=1, keepdims=True).clip(min=1)
    ends = [int(0.7 * len(x)), int(0.8 * len(x))]
    parts = (Split.from_numpy(*part) for part in zip(np.split(x, ends), np.split(labels, ends), strict=True))
    return Client(path.stem.capitalize() if path.stem != "dvd" else "DVD", *parts)
