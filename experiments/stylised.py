"""A PACS-like folder of our own making: four disjoint quarters of Office-10's originals, each drawn in its own style.

PACS (Li et al., ICCV 2017) has photos, paintings, cartoons and sketches of the same classes. Here an image belongs to
one style only, decided by its name, so no image is at two clients. Styles are filters, not artists: results on this
folder say how methods cope with such a shift, and nothing about PACS itself.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from PIL import Image, ImageChops, ImageFilter, ImageOps

from fedc2i.core.settings import cores

SIDE = 224
QUALITY = 92


def photo(image: Image.Image) -> Image.Image:
    """Unchanged."""
    return image


def painting(image: Image.Image) -> Image.Image:
    """Strokes of one colour: the most frequent one around each pixel, and stronger colours."""
    strokes = image.quantize(24).convert("RGB").filter(ImageFilter.ModeFilter(9))
    return ImageOps.autocontrast(Image.blend(strokes, ImageOps.posterize(strokes, 3), 0.4))


def cartoon(image: Image.Image) -> Image.Image:
    """Few flat colours with dark outlines."""
    flat = image.filter(ImageFilter.MedianFilter(5)).quantize(8).convert("RGB")
    return ImageChops.multiply(flat, ImageOps.grayscale(_lines(image, 40)).convert("RGB"))


def sketch(image: Image.Image) -> Image.Image:
    """Pencil lines on white paper."""
    return _lines(image, 18).convert("RGB")


STYLES: dict[str, Callable[[Image.Image], Image.Image]] = {
    "photo": photo,
    "painting": painting,
    "cartoon": cartoon,
    "sketch": sketch,
}


def _lines(image: Image.Image, threshold: int) -> Image.Image:
    """Black where brightness changes by more than the threshold, else white."""
    edges = ImageOps.grayscale(image).filter(ImageFilter.GaussianBlur(1)).filter(ImageFilter.FIND_EDGES)
    return edges.point(lambda value: 0 if value > threshold else 255)


def make(originals: Path, target: Path) -> Path:
    """Writes ``target/<style>/<class>/*.jpg`` from ``originals/<domain>/<class>/*``; returns ``target``."""
    if (target / "done").is_file():
        return target / "images"
    with ProcessPoolExecutor(cores(), get_context("spawn")) as pool:
        list(pool.map(functools.partial(_draw, target), sorted(originals.glob("*/*/*.jpg")), chunksize=16))
    (target / "done").touch()
    return target / "images"


def _draw(target: Path, file: Path) -> None:
    """One image, in the style that its name decides."""
    domain, label = file.parts[-3], file.parts[-2]
    digest = hashlib.sha256(f"{domain}/{label}/{file.name}".encode()).digest()
    style = list(STYLES)[digest[0] % len(STYLES)]
    with Image.open(file) as image:
        drawn = STYLES[style](image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BILINEAR))
    place = target / "images" / style / label / f"{domain}-{file.stem}.jpg"
    place.parent.mkdir(parents=True, exist_ok=True)
    drawn.save(place, quality=QUALITY)
