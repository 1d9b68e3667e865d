"""Methods on several federations of one kind: a line for each, with its means and its worst client against Local."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

import fedc2i
from fedc2i.data.federation import Federation


def print_methods(
    name: str, methods: Iterable[str], federations: Sequence[tuple[Federation, Sequence[int]]], device: str, width: int
) -> None:
    """Runs Local and every method on all federations, each with its seeds; ``name`` is in front of every line.

    The federations have the same clients. ``width`` is that of the column of methods.
    """
    alone = None
    for method in dict.fromkeys(("local", *methods)):
        runs = [fedc2i.run(method, own, seeds=seeds, evaluate_every=0, device=device) for own, seeds in federations]
        received, trained = (np.concatenate([own.accuracy(point) for own in runs]) for point in ("received", "trained"))
        alone = trained if alone is None else alone
        worst = [(own - alone).mean(0).min() for own in (received, trained)]
        print(
            f"{name} {method:{width}} {received.mean():.2f} / {trained.mean():.2f}, worst client against Local "
            f"{worst[0]:+.2f} / {worst[1]:+.2f}",
            flush=True,
        )
