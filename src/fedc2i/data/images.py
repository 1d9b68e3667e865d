"""Image files and arrays to uint8 RGB of one size, with errors that name the file."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from fedc2i.errors import UserError

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm")
MAX_PIXELS = 64_000_000  # a photo of 8000x8000; anything larger is a mistake or a decompression bomb


def is_image(path: Path) -> bool:
    """Whether the file's ending is that of an image; hidden files are not."""
    return path.suffix.lower() in SUFFIXES and not path.name.startswith(".")


def read_image(path: Path, size: int | None = None) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """One image file as uint8 ``(H, W, 3)``, resized (bilinear, antialiased) to ``size`` x ``size`` if given.

    Raises:
        UserError: if the file is not an image, is cut off, or has more than `MAX_PIXELS` pixels.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            with Image.open(path) as image:
                if image.width * image.height > MAX_PIXELS:
                    raise UserError(f"{path}: {image.width}x{image.height} pixels, allowed are {MAX_PIXELS:,}")
                picture = _to_rgb(image)
    except UserError:
        raise
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UserError(f"{path}: cannot be read as an image ({error})") from None
    if size is not None and picture.size != (size, size):
        picture = picture.resize((size, size), Image.Resampling.BILINEAR)
    return np.asarray(picture, dtype=np.uint8)


def _to_rgb(image: Image.Image) -> Image.Image:
    """As 8-bit RGB: 16-bit grey is scaled (Pillow would clip it to white), transparency is laid on white."""
    if image.mode == "F":
        raise ValueError("floating-point pixels have no fixed range, allowed are 8 or 16 bits")
    if image.mode.startswith("I"):
        image = Image.fromarray((np.clip(np.asarray(image), 0, 65535) >> 8).astype(np.uint8))
    elif image.mode.lower().endswith("a") or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def read_images(paths: Iterable[Path], size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Many image files as one uint8 ``(N, size, size, 3)``."""
    images = [read_image(path, size) for path in paths]
    return np.stack(images) if images else np.zeros((0, size, size, 3), dtype=np.uint8)


def resize(images: np.ndarray[Any, Any], size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """uint8 images ``(N, H, W)`` or ``(N, H, W, C)`` to ``size`` x ``size``, bilinear as PIL does it."""
    if images.shape[1:3] == (size, size):
        return images
    resized = [np.asarray(Image.fromarray(image).resize((size, size), Image.Resampling.BILINEAR)) for image in images]
    return np.stack(resized) if resized else np.zeros((0, size, size, *images.shape[3:]), dtype=np.uint8)
