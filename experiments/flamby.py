"""Fed-Heart-Disease under FLamby's protocol: do Local, pooled and FedAvg reach the published accuracy, and what do we?

FLamby: Ogier du Terrail et al., NeurIPS 2022; the settings are those of its code. Local and pooled take 50 epochs of
Adam. Federated methods take 15 rounds of 100 updates of SGD. Batches have 4 samples, the learning rate is 0.001.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import fedc2i
from experiments.grid import launch
from fedc2i.core.errors import UserError
from fedc2i.data.federation import Federation
from fedc2i.engine.records import Point
from fedc2i.runs.results import WORST, Result
from fedc2i.runs.settings import parse_seeds

# FLamby's model has one output, ours two: their difference, which decides, moves twice as far in a step.
RATE = 0.001 / 2
COMMON: Mapping[str, Any] = {"model": "logistic", "batch_size": 4, "lr": RATE, "evaluate_every": 0}
ALONE: Mapping[str, Any] = {"optimizer": "adam", "rounds": 1, "epochs": 50}  # one round: the optimiser never restarts
TOGETHER: Mapping[str, Any] = {"optimizer": "sgd", "rounds": 15, "epochs": 1, "steps": 100}
METHODS: Mapping[str, tuple[str, Mapping[str, Any]]] = {  # by the title of a row
    "Local": ("local", ALONE),
    "Pooled, scaled as FLamby does": ("pooled", ALONE),
    "Pooled, scaled alike": ("pooled", ALONE),
    "FedAvg": ("fedavg:weighting=samples", TOGETHER),
    "FedProto": ("fedproto", TOGETHER),
    "FedC²I": ("fedc2i", TOGETHER),
    "FedC²I⁺": ("fedc2i-plus", TOGETHER),
}
PUBLISHED: Mapping[str, tuple[float, ...]] = {  # means over 5 seeds; clients in the order of the table, and their mean
    "Local": (74.6, 74.6, 72.5, 70.2, 73.0),
    "Pooled": (78.3, 76.4, 75.0, 64.4, 73.5),
    "FedAvg, FedProx": (73.1, 71.9, 65.0, 64.0, 68.5),
    "SCAFFOLD": (72.7, 71.9, 65.0, 64.0, 68.4),
    "FedAdam": (75.2, 74.6, 73.8, 66.7, 72.6),
    "FedYogi": (76.0, 75.3, 73.8, 67.6, 73.1),
}
POINTS: Mapping[Point, str] = {"received": "before", "trained": "after"}

HEAD = """# Four hospitals under FLamby's protocol

For readers who want to compare with published numbers: test accuracy (%) on Fed-Heart-Disease, logistic regression,
batches of 4, learning rate 0.001.

```console
$ python -m experiments.flamby{typed}
```
"""
NOTES = """
- **Ours**: mean ± sample standard deviation over seeds {seeds}. `before` and `after`: a client's model before and
  after its local training in the last round; FLamby evaluates the global model, which is `before`.
- **FLamby**: the published means over 5 seeds.
- **Protocol**, from FLamby's code: Local and Pooled take 50 epochs of Adam; the federated methods take 15 rounds of 100
  updates of SGD, and FedAvg weighs clients by samples. All of ours use FedAvg's settings, tuned for none of them;
  FLamby tuned the rates of each of its methods.
- **Scaling**: FLamby scales the pooled training data by statistics of the union, but each test set by those of its own
  hospital. The first Pooled row does the same. In the second one both are scaled by the union (`scale=federated`).
- **What differs**: FLamby's model has one output and ours two, so we halve the rate. Our batches start afresh every
  round; FLamby's continue where the last round ended. Seeds and initial models are our own.
- A logistic model has no body: FedC²I mixes classifiers by Λ alone, and prototypes are means of the inputs, which
  training cannot move.
- Switzerland has 16 test patients, 15 of them ill: a patient is 6.25 points, and calling everybody ill scores 93.75.
  Long Beach has 45. So look at balanced accuracy (%), too:
"""


def rows(results: Mapping[str, Result], metric: str) -> list[str]:
    """Our rows of a table: each method at both points, once where they are the same."""
    lines = []
    for name, result in results.items():
        alone = METHODS[name][1] is ALONE
        points: Sequence[Point] = ("trained",) if alone else tuple(POINTS)
        for point in points:
            scores = result.scores(point, metric)
            cells = [f"{own.mean:.1f} ± {own.sd:.1f}" for title, own in scores.items() if title != WORST]
            lines.append(f"| {name}{'' if alone else f', {POINTS[point]}'} | {' | '.join(cells)} |")
    return lines


def page(results: Mapping[str, Result], typed: str) -> str:
    """The table of the documentation."""
    first = next(iter(results.values()))
    title = f"| | {' | '.join(first.federation.names)} | Avg |\n|---|{'---:|' * (len(first.federation.names) + 1)}"
    published = [f"| FLamby: {name} | {' | '.join(f'{cell:.1f}' for cell in own)} |" for name, own in PUBLISHED.items()]
    notes = NOTES.format(seeds=", ".join(map(str, first.config.seeds)))
    parts = [HEAD.format(typed=typed), title, *published, *rows(results, "accuracy"), notes, title]
    return "\n".join([*parts, *rows(results, "balanced_accuracy")]) + "\n"


def data() -> dict[str, Federation]:
    """What rows are computed on, where it is not the hospitals scaled each by itself, which is everybody's default."""
    own, alike = (fedc2i.load("heart", scale=scale) for scale in ("client", "federated"))
    pairs = zip(own.clients, alike.clients, strict=True)
    mixed = replace(own, clients=tuple(replace(mine, train=theirs.train) for mine, theirs in pairs))
    return dict.fromkeys(METHODS, own) | dict(zip(list(METHODS)[1:3], (mixed, alike), strict=True))


def run(given: Namespace) -> None:
    """Computes all rows and writes the page."""
    if len(parse_seeds(given.seeds)) < 2:
        raise UserError(f"--seeds {given.seeds}: at least two are needed for a standard deviation")
    results = {}
    for title, federation in data().items():
        method, own = METHODS[title]
        results[title] = fedc2i.run(method, federation, seeds=given.seeds, device="cpu", **COMMON, **own)
    text = page(results, "" if given.seeds == "0-4" else f" --seeds {given.seeds}")
    given.out.write_text(text, encoding="utf-8")
    print(text)


def main(typed: Sequence[str]) -> int:
    """The command; returns the exit code."""
    options = ArgumentParser(prog="python -m experiments.flamby", description="Fed-Heart-Disease as in FLamby.")
    options.add_argument("--seeds", default="0-4", help="at least two, for example 0-4")
    options.add_argument("--out", type=Path, default=Path("docs/tables/flamby.md"), help="the page")
    return launch(run, options, typed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
