"""Your own model: any torch module whose last operation is a linear layer. `python examples/own_model.py`.

`fedc2i.split` divides it at that layer, the head. Methods such as FedC²I and FedRep treat the layers before it (the
body) and the rows of the head, one for each class, separately. Images arrive scaled to -1..1, as
(batch, 3, height, width).
"""

from __future__ import annotations

import argparse

from torch import Tensor, nn

import fedc2i


class Residual(nn.Module):
    """Two convolutions with a skip connection."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.GroupNorm(4, channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        """``(B, channels, H, W)`` to the same shape."""
        return nn.functional.relu(x + self.layers(x))


def small_resnet(classes: int = 10) -> nn.Module:
    """Builds a new module for each seed, so that each has its own initial weights."""
    stem = [nn.Conv2d(3, 12, 5, stride=2), nn.ReLU(), Residual(12), nn.MaxPool2d(2), Residual(12)]
    head = nn.Sequential(nn.Dropout(0.1), nn.Linear(12, classes))
    return nn.Sequential(*stem, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)


def build(classes: int, image: tuple[int, int, int]) -> fedc2i.Model:
    """For the command line: `fedc2i run fedc2i --model examples/own_model.py:build`."""
    return fedc2i.split(lambda: small_resnet(classes), head="7.1", name="small-resnet")


def main() -> None:
    """Runs FedC²I with this model. With a pre-trained module instead of a function, every client starts from it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    data = fedc2i.load("digits:scans,ink")
    model = build(len(data.classes), data.input.shape)
    print(f"the head is {' and '.join(model.head_names)}: {model.classes} classes of {model.feature_size} features")
    result = fedc2i.run("fedc2i", data, model=model, rounds=rounds, lr=3e-3)
    for point in ("received", "trained"):
        print(point, {name: str(score) for name, score in result.scores(point).items()})


if __name__ == "__main__":
    main()
