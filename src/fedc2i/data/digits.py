"""``digits``: five digit domains made of what the dependencies ship, so that a first run needs no download.

What is real: the handwriting in ``Scans``, ``Photos`` and ``Ink`` is the 1797 scanned digits of scikit-learn
(``load_digits``, 8x8 pixels), divided over the three clients so that no scan is used twice; the backgrounds of
``Photos`` and ``Signs`` are crops of scikit-learn's two colour photos (``load_sample_images``).

What is made: everything else. ``Photos`` follows MNIST-M's recipe (the absolute difference of a digit and a
random patch); ``Ink`` inverts, tints and slightly distorts the scans; ``Fonts`` and ``Signs`` are rendered
with the TrueType fonts of Matplotlib, light on a dark plain ground, and in colour on a photo between cut-off
neighbours.

Test images are made of other scans (not of other writers), other font faces (`TEST_FACES`), and crops from the
right of the photos where training uses the left. Validation is drawn as training is. The bytes are fixed for
given versions of scikit-learn, Matplotlib and Pillow.

The difficulty was set by hand, looking at a LeNet-5 trained on each client alone (40 epochs: 94, 84, 90, 87
and 71 % on test) and at nothing else: no federated method was run. The benchmark shows that a pipeline works;
it is no evidence about real sites.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from fedc2i.core.errors import UserError
from fedc2i.data.federation import Client, DataOptions, Federation, Split, stratified_order

SIZE = 28
SEED = 20_240_501
SCANNED = {"train": 300, "validation": 50, "test": 249}  # a third of the 1797 scans
RENDERED = {"train": 300, "validation": 50, "test": 240}
TRAIN_FACES = (
    *("DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-BoldOblique", "DejaVuSansMono", "DejaVuSansMono-Oblique"),
    *("DejaVuSerif", "DejaVuSerif-Bold", "DejaVuSerif-BoldItalic", "DejaVuSansMono-BoldOblique"),
    *("STIXGeneral", "STIXGeneralBolIta", "cmb10", "cmr10", "cmtt10"),
)
TEST_FACES = (
    *(
        "DejaVuSans-Oblique",
        "DejaVuSansMono-Bold",
        "DejaVuSerif-Italic",
        "STIXGeneralBol",
        "STIXGeneralItalic",
    ),
    *("cmss10", "cmti10"),
)
NOTES = (
    "Five digit domains made from scikit-learn's scanned digits and photos and Matplotlib's fonts: "
    "a demonstration that needs no download, not a published benchmark.",
)

Pixels = np.ndarray[Any, np.dtype[np.uint8]]
Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class _Painter:
    """The sources of randomness and of pixels for one part of one client."""

    rng: np.random.Generator
    test: bool

    def colour(self, low: float, high: float) -> Floats:
        """An RGB colour with every channel in ``low..high`` (0..1)."""
        return self.rng.uniform(low, high, 3)

    def patch(self) -> Floats:
        """A random square of a photo, ``(SIZE, SIZE, 3)`` in 0..1."""
        photo = _sample_photos()[self.rng.integers(2)]
        side = int(self.rng.integers(SIZE, 3 * SIZE))
        border = photo.width * 3 // 5
        left = self.rng.integers(border, photo.width - side) if self.test else self.rng.integers(border - side)
        top = self.rng.integers(photo.height - side)
        box = (int(left), int(top), int(left) + side, int(top) + side)
        return np.asarray(photo.resize((SIZE, SIZE), Image.Resampling.BILINEAR, box=box)) / 255.0

    def warp(self, mask: Image.Image, degrees: float, shear: float, zoom: float, shift: float) -> Image.Image:
        """Random rotation, slant, scale (``exp(±zoom)``) and shift (in image widths) about the centre."""
        angle = np.deg2rad(self.rng.uniform(-degrees, degrees))
        slant = np.array([[1.0, self.rng.uniform(-shear, shear)], [0.0, 1.0]])
        turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
        inverse = np.linalg.inv(np.exp(self.rng.uniform(-zoom, zoom)) * turn @ slant)
        centre = np.full(2, mask.width / 2)
        offset = centre - inverse @ (centre + self.rng.uniform(-shift, shift, 2) * mask.width)
        (a, b), (d, e) = inverse.tolist()
        matrix = (a, b, float(offset[0]), d, e, float(offset[1]))
        return mask.transform(mask.size, Image.Transform.AFFINE, matrix, Image.Resampling.BICUBIC)

    def glyph(self, digit: int, *, neighbours: bool) -> Image.Image:
        """A rendered digit as a mask, drawn at four times the size; the sides clip its neighbours."""
        faces = TEST_FACES if self.test else TRAIN_FACES
        font = _font(faces[self.rng.integers(len(faces))])
        mask = Image.new("L", (4 * SIZE, 4 * SIZE))
        draw = ImageDraw.Draw(mask)
        left, top, right, bottom = font.getbbox(str(digit))
        x, y = mask.width / 2 - (left + right) / 2, mask.height / 2 - (top + bottom) / 2
        draw.text((x, y), str(digit), font=font, fill=255)
        if neighbours:
            before, after = (str(value) for value in self.rng.integers(10, size=2))
            draw.text((x - font.getlength(before), y), before, font=font, fill=255)
            draw.text((x + font.getlength(str(digit)), y), after, font=font, fill=255)
        return mask


def _scans(painter: _Painter, mask: Image.Image) -> Floats:
    return _blend(np.zeros(3), np.ones(3), mask)


def _photos(painter: _Painter, mask: Image.Image) -> Floats:
    return np.abs(painter.patch() - _alpha(mask))


def _ink(painter: _Painter, mask: Image.Image) -> Floats:
    written = painter.warp(mask, degrees=8, shear=0.15, zoom=0.05, shift=0.03)
    return _blend(painter.colour(0.75, 1.0), painter.colour(0.0, 0.5), written)


def _fonts(painter: _Painter, mask: Image.Image) -> Floats:
    printed = painter.warp(mask, degrees=12, shear=0.1, zoom=0.2, shift=0.08)
    return _blend(painter.colour(0.0, 0.4), painter.colour(0.6, 1.0), printed)


def _signs(painter: _Painter, mask: Image.Image) -> Floats:
    printed = painter.warp(mask, degrees=6, shear=0.1, zoom=0.15, shift=0.05)
    back = painter.patch()
    front = painter.colour(0.0, 0.5) if back.mean() > 0.5 else painter.colour(0.5, 1.0)  # or some could not be read
    return _blend(back, front, printed)


_PAINT: dict[str, Callable[[_Painter, Image.Image], Floats]] = {
    "Scans": _scans,
    "Photos": _photos,
    "Ink": _ink,
    "Fonts": _fonts,
    "Signs": _signs,
}


def load(argument: str, options: DataOptions) -> Federation:
    """The five digit domains.

    Args:
        argument: empty for all five clients, or a comma list of lower-case names, e.g. ``scans,ink``.
        options: of these ``image_size`` matters (made at 28x28 and resized).

    Returns:
        The clients in the order ``Scans, Photos, Ink, Fonts, Signs``, or in the order asked for. Every call
        returns the same bytes, in new tensors.

    Raises:
        UserError: for an unknown or a repeated client name.
    """
    built = _build()
    display = {name.lower(): name for name in built}
    chosen = [name.strip() for name in argument.split(",")] if argument else list(display)
    for name in chosen:
        if name not in display:
            raise UserError(f"digits: no client '{name}', allowed are {', '.join(display)}")
    clients = tuple(
        Client(
            display[name],
            *(Split.from_numpy(_resized(x, options.image_size or SIZE), y) for x, y in built[display[name]]),
        )
        for name in chosen
    )
    return Federation(
        name=f"digits:{argument}" if argument else "digits",
        clients=clients,
        classes=tuple(str(digit) for digit in range(10)),
        notes=NOTES,
        preset={"model": "lenet5", "rounds": 20},
    )


def _resized(images: Pixels, size: int) -> Pixels:
    if size == SIZE:
        return images
    from fedc2i.data.images import resize

    return resize(images, size)


@functools.lru_cache(maxsize=1)
def _build() -> dict[str, tuple[tuple[Pixels, np.ndarray[Any, Any]], ...]]:
    """For every client its (images, labels) of train, validation and test."""
    table = np.loadtxt(_of_sklearn("data/digits.csv.gz"), delimiter=",")  # 64 pixels of 0..16 and a label in a row
    scans, scanned = np.rint(table[:, :-1].reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8), table[:, -1].astype(int)
    order = iter(stratified_order(scanned, np.random.default_rng(SEED).random(len(scans))))
    built = {}
    for number, (name, paint) in enumerate(_PAINT.items()):
        rng = np.random.default_rng([SEED, number])
        parts = []
        sizes = RENDERED if name in ("Fonts", "Signs") else SCANNED
        for part, size in sizes.items():
            painter = _Painter(rng, part == "test")
            if sizes is SCANNED:
                rows = list(itertools.islice(order, size))
                labels = scanned[rows]
                masks = [_enlarge(scan) for scan in scans[rows]]
            else:
                labels = np.arange(size) % 10
                masks = [painter.glyph(int(label), neighbours=name == "Signs") for label in labels]
            parts.append((_pixels([paint(painter, mask) for mask in masks]), labels))
        built[name] = tuple(parts)
    return built


def _pixels(pictures: list[Floats]) -> Pixels:
    return np.rint(255 * np.clip(np.stack(pictures), 0.0, 1.0)).astype(np.uint8)


def _blend(back: Floats, front: Floats, mask: Image.Image) -> Floats:
    alpha = _alpha(mask)
    return (1.0 - alpha) * back + alpha * front


def _alpha(mask: Image.Image) -> Floats:
    """A grey mask as ``(SIZE, SIZE, 1)`` in 0..1."""
    return np.asarray(mask.resize((SIZE, SIZE), Image.Resampling.BOX))[..., None] / 255.0


def _enlarge(scan: Pixels) -> Image.Image:
    """An 8x8 scan as a mask with a margin, as MNIST has it."""
    mask = Image.new("L", (SIZE, SIZE))
    mask.paste(Image.fromarray(scan).resize((SIZE - 4, SIZE - 4), Image.Resampling.BICUBIC), (2, 2))
    return mask


@functools.lru_cache(maxsize=1)
def _sample_photos() -> tuple[Image.Image, ...]:
    return tuple(Image.open(_of_sklearn(f"images/{name}.jpg")) for name in ("china", "flower"))


def _of_sklearn(file: str) -> Path:
    """A data file of scikit-learn, without importing it, which takes two seconds."""
    spec = importlib.util.find_spec("sklearn")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "datasets" / file


@functools.lru_cache(maxsize=len(TRAIN_FACES) + len(TEST_FACES))
def _font(face: str) -> ImageFont.FreeTypeFont:
    """A face at digit size; the basic layout engine gives one result whether or not Raqm is installed."""
    path = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{face}.ttf"
    return ImageFont.truetype(path, 3 * SIZE, layout_engine=ImageFont.Layout.BASIC)
