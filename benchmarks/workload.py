"""The data every contender works on: made-up uint8 images that can be learned, and the same as floats for the loop."""

from __future__ import annotations

import torch
from torch import Tensor

from fedc2i.data.federation import Client, Federation, Split

Tensors = tuple[Tensor, Tensor, Tensor, Tensor]  # a client's training images and labels, test images and labels


def make_federation(
    clients: int, images: int = 743, tests: int = 1000, classes: int = 10, side: int = 28, seed: int = 0
) -> Federation:
    """Noise over one random picture a class, the same for all clients: quick to make, and learned within rounds."""
    generator = torch.Generator().manual_seed(seed)
    pictures = torch.randint(0, 128, (classes, 3, side, side), generator=generator, dtype=torch.uint8)

    def draw(count: int) -> Split:
        y = torch.randint(0, classes, (count,), generator=generator)
        noise = torch.randint(0, 128, (count, 3, side, side), generator=generator, dtype=torch.uint8)
        return Split(pictures[y] + noise, y)

    none = Split(torch.zeros(0, 3, side, side, dtype=torch.uint8), torch.zeros(0, dtype=torch.int64))
    members = tuple(Client(f"client {m}", draw(images), none, draw(tests)) for m in range(clients))
    return Federation("made-up", members, tuple(f"class {c}" for c in range(classes)))


def as_tensors(federation: Federation, device: torch.device | str = "cpu") -> list[Tensors]:
    """What the hand-written loop is given: float images, scaled once and for all to -1..1, in memory."""

    def scaled(split: Split) -> tuple[Tensor, Tensor]:
        return (split.x.to(device, torch.float32) * (2 / 255) - 1), split.y.to(device)

    return [(*scaled(client.train), *scaled(client.test)) for client in federation.clients]
