"""Methods on cuts of the training data: choose a form or an option here, and keep the test data for the report.

A cut holds out a quarter of every client's training samples, of each class, and scores on them; validation data stays
what it is. HAPT, a sequence, is cut in time order. Every cut has its own seeds.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import replace

import torch

import fedc2i
from experiments.against_local import print_methods
from experiments.grid import launch
from fedc2i.data.federation import Client, Federation
from fedc2i.runs.settings import parse_seeds

SHARE = 0.25
FIRST_SEED = 100  # those below it are reported
APART = 20  # seeds between those of two cuts
IN_TIME = ("hapt",)


def cut(federation: Federation, number: int, in_time: bool = False) -> Federation:
    """The same clients, trained on three quarters of their training data and tested on the rest."""
    clients = []
    for m, client in enumerate(federation.clients):
        count = len(client.train)
        generator = torch.Generator().manual_seed(7000 + 31 * number + m)
        order = torch.arange(count).flip(0) if in_time else torch.randperm(count, generator=generator)
        labels, tested = client.train.y[order], torch.zeros(count, dtype=torch.bool)
        for label in sorted(set(labels.tolist())):
            places = (labels == label).nonzero()[:, 0]
            tested[places[: round(SHARE * len(places))]] = True
        clients.append(
            Client(client.name, client.train.take(order[~tested]), client.validation, client.train.take(order[tested]))
        )
    return replace(federation, clients=tuple(clients))


def study(given: Namespace) -> None:
    """Runs every method on every cut, and prints means and the worst client against Local."""
    for data in given.data:
        federation = fedc2i.load(data, **({"data_dir": given.data_dir} if given.data_dir else {}))
        parts = [
            (
                cut(federation, number, data in IN_TIME),
                [FIRST_SEED + APART * number + own for own in range(given.seeds)],
            )
            for number in parse_seeds(given.cuts)
        ]
        print_methods(f"{data:10}", given.methods, parts, given.device, 40)


def main(typed: Sequence[str] | None = None) -> int:
    """``python -m experiments.cuts``."""
    options = ArgumentParser(prog="python -m experiments.cuts", description=(__doc__ or "").splitlines()[0])
    options.add_argument("--data", nargs="+", default=["heart"], help="data sets")
    options.add_argument("--methods", nargs="+", default=["fedc2i-plus"], help="with or without options, beside Local")
    options.add_argument("--cuts", default="0-7", help="numbers of cuts, for example 0,1,2 or 0-7")
    options.add_argument("--seeds", type=int, default=4, help="seeds for each cut")
    options.add_argument("--data-dir", help="folder of the data sets; or the variable FEDC2I_DATA")
    options.add_argument("--device", default="auto", help="auto, cpu or cuda")
    return launch(study, options, sys.argv[1:] if typed is None else typed)


if __name__ == "__main__":
    sys.exit(main())
