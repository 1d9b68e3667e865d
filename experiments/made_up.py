"""Six federations that are made here to try methods on: some where sharing must help, some where it must not harm.

Clients have no validation data, as most data of users. Other numbers are other draws. What FedC²I⁺ does without
validation data was chosen on draws below `FIRST`; no other choice was made on these federations.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from sklearn.datasets import load_breast_cancer, load_digits

import fedc2i
from experiments.against_local import print_methods
from experiments.grid import launch
from fedc2i.data.federation import Federation

FIRST = 300  # draw that is reported
METHODS = ("local", "fedavg", "ditto", "fedrep", "fedfomo", "fedproto", "fedic", "fedc2i", "fedc2i-plus")
Arrays = Mapping[str, tuple[np.ndarray, ...]]
Generator = np.random.Generator


def one_distribution(generator: Generator) -> Arrays:
    """Ten clients with 60 samples each, all of one distribution: an average is the best there is."""
    inner, outer = generator.normal(size=(30, 12)), generator.normal(size=(12, 5))
    return {f"client {m}": _drawn(generator, 60, 500, lambda x: np.tanh(x @ inner) @ outer, 30) for m in range(10)}


def contradiction(generator: Generator) -> Arrays:
    """Eight clients with 80 or 300 samples; one half labels the same inputs otherwise than the other half."""
    ways = generator.normal(size=(2, 20, 4))

    def client(m: int) -> tuple[np.ndarray, ...]:
        return _drawn(generator, (300, 80)[m % 2], 400, lambda x: x @ ways[m % 2], 20, noise=1.5)

    return {f"client {m}": client(m) for m in range(8)}


def label_skew(generator: Generator) -> Arrays:
    """Scikit-learn's digits over 15 clients, each class by shares of a Dirichlet distribution with α = 0.5."""
    x, y = load_digits(return_X_y=True)
    owner = np.zeros(len(y), int)
    for label in range(10):
        rows = generator.permutation(np.flatnonzero(y == label))
        ends = np.cumsum(generator.dirichlet(np.full(15, 0.5)))[:-1] * len(rows)
        for m, part in enumerate(np.split(rows, ends.astype(int))):
            owner[part] = m
    return _split(generator, x.astype(np.float32), y, owner, 0.5)


def skewed_tables(generator: Generator) -> Arrays:
    """The same digits over ten clients with 100 samples each, drawn with other odds for each class: mixtures fail."""
    x, y = load_digits(return_X_y=True)
    clients = {}
    for m in range(10):
        odds = generator.dirichlet(np.full(10, 0.4))[y]
        rows = generator.choice(len(y), 170, replace=False, p=odds / odds.sum())
        trained, tested = np.split(rows, [100])
        clients[f"client {m}"] = (x[trained].astype(np.float32), y[trained], x[tested].astype(np.float32), y[tested])
    return clients


def by_quantile(generator: Generator) -> Arrays:
    """Scikit-learn's breast cancer over six clients, by the texture of the tissue."""
    x, y = load_breast_cancer(return_X_y=True)
    order = (x[:, 1] + generator.normal(size=len(y))).argsort().argsort()
    return _split(generator, x.astype(np.float32), y, order * 6 // len(y), 0.5)


def rotated(generator: Generator) -> Arrays:
    """Scikit-learn's digits as images over four clients, each of which sees them turned by another quarter."""
    x, y = load_digits(return_X_y=True)
    owner = generator.integers(0, 4, len(y))
    turned = np.stack([np.rot90(image, k) for image, k in zip(x.reshape(-1, 8, 8), owner, strict=True)])
    large = np.kron(turned * 255 / 16, np.ones((1, 4, 4))).astype(np.uint8)
    return _split(generator, large[:, None].repeat(3, 1), y, owner, 0.6)


KINDS: Mapping[str, Callable[[Generator], Arrays]] = {
    own.__name__: own for own in (one_distribution, contradiction, label_skew, skewed_tables, by_quantile, rotated)
}


def _drawn(
    generator: Generator,
    train: int,
    test: int,
    score: Callable[[np.ndarray], np.ndarray],
    inputs: int,
    noise: float = 1.0,
) -> tuple[np.ndarray, ...]:
    """Normal inputs with the label of the highest score, to which noise is added."""
    x = generator.normal(size=(train + test, inputs)).astype(np.float32)
    scores = score(x)
    y = (scores + noise * generator.normal(size=scores.shape)).argmax(1)
    return x[:train], y[:train], x[train:], y[train:]


def _split(generator: Generator, x: np.ndarray, y: np.ndarray, owner: np.ndarray, test: float) -> Arrays:
    clients = {}
    for m in sorted(set(owner.tolist())):
        rows = generator.permutation(np.flatnonzero(owner == m))
        tested, trained = np.split(rows, [int(test * len(rows))])
        clients[f"client {m}"] = (x[trained], y[trained], x[tested], y[tested])
    return clients


def federation(kind: str, number: int) -> Federation:
    """A federation of this kind; other numbers are other draws."""
    return fedc2i.from_arrays(KINDS[kind](np.random.default_rng(number)), name=kind)


def study(given: Namespace) -> None:
    """Runs every method on some draws of every federation; prints means, and the worst client against Local."""
    for kind in given.data:
        drawn = [(federation(kind, FIRST + k), (10 + k, 20 + k)) for k in range(given.draws)]
        print_methods(f"{kind:17}", given.methods, drawn, given.device, 20)


def main(typed: Sequence[str] | None = None) -> int:
    """``python -m experiments.made_up``."""
    options = ArgumentParser(prog="python -m experiments.made_up", description=(__doc__ or "").splitlines()[0])
    options.add_argument("--data", nargs="+", choices=list(KINDS), default=list(KINDS), help="kinds of federations")
    options.add_argument("--methods", nargs="+", default=METHODS, help="with or without options, beside Local")
    options.add_argument("--draws", type=int, default=5, help="how often each federation is drawn")
    options.add_argument("--device", default="auto", help="auto, cpu or cuda")
    return launch(study, options, sys.argv[1:] if typed is None else typed)


if __name__ == "__main__":
    sys.exit(main())
