"""The limit: what a round must compute and move at least, and what one core of this machine can do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch.nn import functional as F  # noqa: N812

from benchmarks.effort import Effort
from benchmarks.influence_speed import timed
from benchmarks.report import cores, show
from benchmarks.rounds import threads

BATCH, EPOCHS, POINTS = 32, 2, 2


class Layer(NamedTuple):
    """Multiply-adds of one image, numbers that come out, and parameters."""

    name: str
    multiply_adds: int
    outputs: int
    parameters: int


def lenet(
    channels: Sequence[int] = (6, 16), hidden: Sequence[int] = (120, 84), classes: int = 10, side: int = 28
) -> list[Layer]:
    """The layers of a LeNet with two 5x5 convolutions, each followed by 2x2 pooling."""
    layers, inputs = [], 3
    for number, outputs in enumerate(channels, 1):
        side -= 4
        values = outputs * side * side
        layers.append(Layer(f"conv{number}", values * inputs * 25, values, outputs * (inputs * 25 + 1)))
        side, inputs = side // 2, outputs
    inputs *= side * side
    for number, outputs in enumerate((*hidden, classes), 1):
        layers.append(Layer(f"fc{number}", inputs * outputs, outputs, outputs * (inputs + 1)))
        inputs = outputs
    return layers


def forward_flops(layers: Sequence[Layer]) -> int:
    """Of one image; a multiply-add is two."""
    return 2 * sum(layer.multiply_adds for layer in layers)


def training_flops(layers: Sequence[Layer]) -> int:
    """Forward, gradients of weights, gradients of inputs: three times forward, less the images' own gradient."""
    return 3 * forward_flops(layers) - 2 * layers[0].multiply_adds


def forward_bytes(layers: Sequence[Layer], pixels: int) -> int:
    """Activations of one image, each written once and read once: scaled image, layers, ReLUs, pools (a quarter)."""
    convolutions = sum(layer.outputs for layer in layers if layer.name.startswith("conv"))
    linear = sum(layer.outputs for layer in layers if layer.name.startswith("fc"))
    numbers = pixels + 2 * convolutions + convolutions // 4 + 2 * linear - layers[-1].outputs
    return 2 * 4 * numbers


def round_of_work(clients: int, images: int, tests: int) -> dict[str, float]:
    """Floating-point operations and bytes of a FedAvg round with LeNet-5 on 28x28 images."""
    layers = lenet()
    pixels = 3 * 28 * 28
    trained, scored = clients * images * EPOCHS, clients * tests * POINTS
    steps = clients * EPOCHS * -(-images // BATCH)
    adam = 7 * 4 * sum(layer.parameters for layer in layers)  # reads weight, gradient, two moments; writes all but one
    activations = forward_bytes(layers, pixels)
    return {
        "flops": float(trained * training_flops(layers) + scored * forward_flops(layers)),
        "bytes": float((3 * trained + scored) * activations + steps * adam),
        "image_bytes": float((trained + scored) * pixels),
    }


def rates(repeats: int = 5) -> dict[str, float]:
    """What one thread does: GFLOP/s of matrix products and of LeNet-5's convolutions, GB/s of copies in cache."""
    with threads(1), torch.no_grad():
        size = 1024
        a, b = torch.randn(size, size), torch.randn(size, size)
        product = timed(lambda: torch.mm(a, b), repeats)
        found = {"matmul_gflops": 2 * size**3 / product / 1e9}
        shapes = {"conv1": (3, 6, 28), "conv2": (6, 16, 12)}
        for name, (inputs, outputs, side) in shapes.items():
            x, weight = torch.randn(BATCH, inputs, side, side), torch.randn(outputs, inputs, 5, 5)
            multiply_adds = BATCH * outputs * (side - 4) ** 2 * inputs * 25
            seconds = timed(lambda x=x, weight=weight: F.conv2d(x, weight), repeats)
            found[f"{name}_gflops"] = 2 * multiply_adds / seconds / 1e9
        source = torch.randn(2**18)  # 1 MB, about the activations of a batch: in the caches, as they are
        target = torch.empty_like(source)
        found["copy_gbs"] = 2 * 2**20 / timed(lambda: target.copy_(source), repeats) / 1e9
    return found


def measure(effort: Effort) -> dict[str, Any]:
    """Work of a round, rates of a core, and the seconds that follow with all cores busy."""
    found: dict[str, Any] = {"rates": rates(max(effort.repeats, 3)), "cores": cores(), "rounds": {}}
    layers = {layer.name: layer for layer in lenet()}
    convolving = sum(layers[name].multiply_adds for name in ("conv1", "conv2"))
    slower = sum(layers[name].multiply_adds / found["rates"][f"{name}_gflops"] for name in ("conv1", "conv2"))
    found["rates"]["conv_gflops"] = convolving / slower
    for clients in effort.rounds:
        work = round_of_work(clients, effort.images, effort.tests)
        best = {
            f"seconds_at_{name}": work[amount] / (found["rates"][rate] * 1e9 * found["cores"])
            for name, amount, rate in (
                ("matmul", "flops", "matmul_gflops"),
                ("conv", "flops", "conv_gflops"),
                ("copy", "bytes", "copy_gbs"),
            )
        }
        found["rounds"][str(clients)] = {**work, **best}
    return found


def present(console: Console, result: Mapping[str, Any], effort: Effort) -> None:
    """The two numbers of a round, and the seconds they would take at the rates measured."""
    rate = result["rates"]
    rows = [
        (
            f"{clients} clients",
            f"{own['flops'] / 1e9:.1f}",
            f"{own['bytes'] / 1e9:.2f}",
            f"{own['seconds_at_matmul']:.2f} s",
            f"{own['seconds_at_conv']:.2f} s",
            f"{own['seconds_at_copy']:.2f} s",
        )
        for clients, own in result["rounds"].items()
    ]
    notes = [
        f"One thread: matrix product {rate['matmul_gflops']:.0f} GFLOP/s, forward convolutions of LeNet-5 at batch 32 "
        f"{rate['conv_gflops']:.0f} GFLOP/s,",
        f"copies in cache {rate['copy_gbs']:.0f} GB/s; seconds are for {result['cores']} cores, each at that rate.",
    ]
    header = ("FedAvg round", "GFLOP", "GB", "at matmul rate", "at conv rate", "at copy rate")
    show(console, "The limit", header, rows, notes)
