"""The table of the study of pretrained networks (`experiments.backbones`), from its finished runs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Container, Mapping, Sequence
from typing import Any

from fedc2i.runs.settings import parse_seeds

METHODS = ("local", "fedavg", "fedproto", "fedbn", "fedc2i", "fedc2i-plus")
TITLES = ("Local", "FedAvg", "FedProto", "FedBN", "FedC²I", "FedC²I⁺")
DATA = {"ham10000": "HAM10000, four clinics", "office": "Office-10, originals", "stylised": "PACS-like styles"}
ARMS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "lenet": ("LeNet from scratch", {"model": "lenet5"}),
    "head": ("frozen body, head", {"model": "efficientnet-lite0", "train": "head"}),
    "last": ("last 2 blocks", {"model": "efficientnet-lite0", "train": "last:2", "executor": "looped"}),
    "lora": ("adapters of rank 8", {"model": "efficientnet-lite0", "train": "lora:8", "executor": "looped"}),
}
PROTOCOL = ("rounds", "epochs", "seeds", "most")
SCORES = ("balanced_accuracy", "auroc")

HEAD = """# Pretrained networks: what to train

For readers who have images and wonder what to train: balanced accuracy and AUROC (%), means over clients after local
training in the last round, of EfficientNet-Lite0 with its body frozen, its last two blocks or adapters trained, and of
a LeNet from scratch.

```console
{commands}
```
"""
NOTES = """
- **Data**: {data}
- **Protocol**: 20 rounds of 2 epochs, seeds 0-2, mean ± standard deviation over seeds; LeNet reads images of 64x64.
  Numbers without ± are seed 0 alone. Last blocks and adapters on HAM10000 and Office-10 train for 5 rounds of 1 epoch
  only, an eighth, because each epoch is a pass through the network. Adam, 0.001, batches of 32, tuned for nothing.
- **FedBN** needs a normalisation layer that trains: LeNet's row is `lenet5-bn`; a frozen body and adapters have none
  (–). Running statistics are constant in all pretrained rows. With a frozen body **FedProto** is Local: prototypes pull
  features, which are constant.
- **MB**: what one client sends up and receives down in a round. **s**: all rounds of all seeds, without loading; of the
  frozen body without the feature pass, which took 26 to 34 s a data set, once for all methods.
- **Machine**: {machines}, up to four of these runs side by side, so seconds compare roughly. A process plans its
  kernels in its first run: mostly Local's.
{missing}- **What it says**: a frozen body beats a LeNet from scratch by 15 to 24 points on Office-10, where methods
  with it cannot be ranked, and by 41 to 52 points on 40 images of each style. FedAvg's rounds then send a
  26th. Sharing heads gains 3 points over Local on styles, and on HAM10000 9 points of AUROC at the same
  balanced accuracy. There adapters have the best scores, after an eighth of the epochs: with hundreds of
  images unlike photographs, train more than the head. With 40 images they bring hardly anything. Last blocks
  score below adapters on both, and send ten times as much. FedC²I is never more than 1.4 points from FedAvg.
  FedC²I⁺ has the best balanced accuracy of LeNets, by two or three points, at several times the seconds; from
  shared heads on styles it gains half of what FedAvg does. Rows of one seed are a first look, no ranking.
"""


def _mean(values: Sequence[float]) -> str:
    if any(map(math.isnan, values)):
        return "–"
    mean = sum(values) / len(values)
    if len(values) == 1:
        return f"{mean:.1f}"
    sd = math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))
    return f"{mean:.1f} ± {sd:.1f}"


def joined(first: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """One row of two lines with other seeds each; of two protocols, or if a seed is in both, the later line's."""
    others = any(first[name] != more[name] for name in PROTOCOL if name != "seeds")
    if others or "refused" in first or "refused" in more or {*_seeds(first)} & {*_seeds(more)}:
        return dict(more)
    scores = {name: [*first["scores"][name], *more["scores"][name]] for name in SCORES}
    seeds = ",".join(map(str, (*_seeds(first), *_seeds(more))))
    return {**first, "seeds": seeds, "scores": scores, "seconds": first["seconds"] + more["seconds"]}


def _seeds(line: Mapping[str, Any]) -> tuple[int, ...]:
    return parse_seeds(line["seeds"])


def page(found: Sequence[Mapping[str, Any]], commands: str) -> str:
    """The table of the documentation: one for each data set."""
    by_key: dict[tuple[str, ...], dict[str, Any]] = {}
    for own in found:
        key = (own["data"], own["arm"], own["method"])
        by_key[key] = joined(by_key[key], own) if key in by_key else dict(own)
    parts, sizes = [HEAD.format(commands=commands)], []
    for data, title in DATA.items():
        rows = ["| trains | method | balanced accuracy | AUROC | MB up | MB down | s |", f"|---|---|{'---:|' * 5}"]
        for arm, method in itertools.product(ARMS, METHODS):
            row = by_key.get((data, arm, method))
            if row is None:
                continue
            cells = ["–"] * 5
            if "scores" in row:
                traffic = [f"{row[way] / 1e6:.3f}" for way in ("up", "down")]
                cells = [*(_mean(row["scores"][score]) for score in SCORES), *traffic, f"{row['seconds']:.1f}"]
            rows.append(f"| {ARMS[arm][0]} | {TITLES[METHODS.index(method)]} | {' | '.join(cells)} |")
        known: list[Any] = [own["samples"] for own in found if own["data"] == data and "samples" in own]
        if known:
            parts.append(f"\n## {title}\n\n" + "\n".join(rows) + "\n")
            listed = ", ".join(f"{client} {own['train']}/{own['test']}" for client, own in known[0].items())
            sizes.append(f"{title} (train/test: {listed})")
    machines = " and ".join(sorted({own["machine"] for own in found}))
    parts.append(NOTES.format(data="; ".join(sizes) + ".", machines=machines, missing=_missing(by_key)))
    return "".join(parts)


def _missing(known: Container[tuple[str, ...]]) -> str:
    """A note on rows that were not computed, if there are any."""
    found = []
    for (data, title), arm in itertools.product(DATA.items(), ARMS):
        methods = [TITLES[k] for k, method in enumerate(METHODS) if (data, arm, method) not in known]
        if methods:
            found.append(f"{title}, {ARMS[arm][0]}: {', '.join(methods)}")
    more = "A LeNet on HAM10000 has [a table with all methods](ham10000.md), of another protocol."
    return f"- **Not computed**: {'; '.join(found)}. {more}\n" if found else ""
