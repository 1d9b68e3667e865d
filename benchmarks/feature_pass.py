"""The feature pass against the bare network: ``python -m benchmarks.feature_pass [--device cuda] [--images N]``.

The bare network is EfficientNet-Lite0 by itself, in a plain loop, on batches that lie ready as scaled floats of the
right size. The feature pass starts from stored uint8 images of 96x96: it converts, enlarges and normalises them, too.
On a GPU both compute in bfloat16 with channels last, in batches of 256; on a CPU the bare loop takes torch's defaults.
"""

from __future__ import annotations

import argparse
import json
import time

import torch

from fedc2i.core.settings import cores
from fedc2i.data.federation import InputSpec
from fedc2i.models import backbones, features

AT_ONCE_BARE = 32  # on a CPU
TRIES = 3


def compare(device: torch.device, images: int) -> dict[str, float]:
    """Images a second of both, the best of three tries each, and their ratio."""
    sample = InputSpec((3, 96, 96))
    model = backbones.build("efficientnet-lite0", 10, sample).restricted("head", statistics=False)
    x, module = sample.noise(images), features.body_of(model, device)
    net = module.get_submodule("net")
    size = features.AT_ONCE_ON_GPU if device.type == "cuda" else AT_ONCE_BARE
    ready = torch.randn(size, 3, 224, 224, device=device, dtype=next(net.parameters()).dtype)
    if device.type == "cuda":
        ready = ready.contiguous(memory_format=torch.channels_last)
    else:
        net = model.body_module().get_submodule("net")
        torch.set_num_threads(cores())

    def bare() -> None:
        with torch.no_grad():
            for low in range(0, images, size):
                made = net(ready[: min(size, images - low)])
            made.float().cpu()

    def whole() -> None:
        features.extract(module, x, device, lambda done: None)

    seconds: dict[str, list[float]] = {"bare": [], "pass": []}
    for attempt in range(TRIES + 1):  # the first one warms up; in turns, so that both see the same machine
        for name, work in (("bare", bare), ("pass", whole)):
            began = time.perf_counter()
            work()
            if attempt:
                seconds[name].append(time.perf_counter() - began)
    rates = {name: images / min(own) for name, own in seconds.items()}
    return {**rates, "ratio": rates["pass"] / rates["bare"]}


def main() -> None:
    """Prints one JSON line."""
    options = argparse.ArgumentParser(prog="python -m benchmarks.feature_pass", description=__doc__)
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--images", type=int, default=0)
    given = options.parse_args()
    device = torch.device(given.device)
    found = compare(device, given.images or (8192 if device.type == "cuda" else 64))
    where = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {cores()} cores"
    print(json.dumps({"machine": where, **{name: round(value, 2) for name, value in found.items()}}))


if __name__ == "__main__":
    main()
