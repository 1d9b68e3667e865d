"""Models by name, built for the data's classes and image size."""

from __future__ import annotations

from fedc2i.core.errors import UserError, nearest, one_line
from fedc2i.models.lenet import LeNet
from fedc2i.models.model import Model

_LENETS = {  # convolution channels, hidden units, BatchNorm
    "lenet5": ((6, 16), (120, 84), False),
    "lenet5-bn": ((6, 16), (120, 84), True),
    "lenet-wide": ((64, 64), (384, 192), False),
    "lenet-wide-bn": ((64, 64), (384, 192), True),
}
NAMES = tuple(_LENETS)


def build(name: str, classes: int, image: tuple[int, int, int]) -> Model:
    """A model by name, for images of shape ``image`` ``(channels, height, width)``.

    ``lenet5`` is the textbook net (6 and 16 channels, 120 and 84 hidden units), ``lenet-wide`` a wider one (64 and 64,
    384 and 192); ``-bn`` adds BatchNorm after each convolution.

    Raises:
        UserError: for an unknown name or images too small for two convolutions.
    """
    if name not in _LENETS:
        hint = nearest(name, NAMES)
        raise UserError(f"unknown model '{one_line(name)}'{hint}, allowed are {', '.join(NAMES)} and FILE.py:FUNCTION")
    if min(image[1:]) < 16:
        raise UserError(f"model '{name}' needs images of at least 16x16, got {image[1]}x{image[2]}; set image_size")
    channels, hidden, batch_norm = _LENETS[name]
    return Model(lambda: LeNet(channels, hidden, classes, image, batch_norm), head="fc3", name=name)
