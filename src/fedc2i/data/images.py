"""Image files and arrays to uint8 RGB of one size, with errors that name the file."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from fedc2i.core import memory
from fedc2i.core.errors import UserError, flaw

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm")
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP", "PPM")  # Pillow knows more; of EPS it would run Ghostscript
MAX_PIXELS = 64_000_000  # a photo of 8000x8000; anything larger is a mistake or a decompression bomb
AT_ONCE = 2**22  # pixels of small images that are resized in one call
_BILINEAR = Image.Resampling.BILINEAR


def is_image(path: Path) -> bool:
    """Whether the file's ending is that of an image; hidden files are not."""
    return path.suffix.lower() in SUFFIXES and not path.name.startswith(".")


def read_image(path: Path, size: int | None = None) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """One image file as uint8 ``(H, W, 3)``, resized (bilinear, antialiased) to ``size`` x ``size`` if given.

    Raises:
        UserError: if the file is not an image, is truncated, or has more than `MAX_PIXELS` pixels.
    """
    if not path.is_file():  # a pipe or a device would never end
        raise UserError(f"{path}: not a file, an image is expected")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about sizes, which are checked below, and odd metadata
            with Image.open(path, formats=FORMATS) as image:
                if image.width * image.height > MAX_PIXELS:
                    raise UserError(f"{path}: {image.width}x{image.height} pixels, allowed are {MAX_PIXELS:,}")
                picture = _to_rgb(image)
    except UserError:
        raise
    except UnidentifiedImageError:
        raise UserError(f"{path}: cannot be read as an image, allowed are {', '.join(FORMATS)}") from None
    except Exception as error:  # Pillow raises nearly anything about a damaged file
        raise UserError(f"{path}: cannot be read as an image ({flaw(error)})") from None
    if size is not None and picture.size != (size, size):
        picture = picture.resize((size, size), _BILINEAR)
    return np.asarray(picture, dtype=np.uint8)


def _to_rgb(image: Image.Image) -> Image.Image:
    """As 8-bit RGB: 16-bit grey is scaled (Pillow would clip it to white), transparent pixels get a white ground."""
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
    files = list(paths)
    if files:
        memory.require(files[0].parent, len(files) * size * size * 3, f"{len(files):,} images")
    images = np.empty((len(files), size, size, 3), dtype=np.uint8)
    for row, path in enumerate(files):
        images[row] = read_image(path, size)
    return images


def resize(images: np.ndarray[Any, Any], size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """uint8 images ``(N, H, W)`` or ``(N, H, W, C)`` to ``size`` x ``size``, bilinear as PIL does it."""
    height, width, *channels = images.shape[1:]
    if (height, width) == (size, size):
        return images
    if not len(images):
        return np.zeros((0, size, size, *channels), dtype=np.uint8)
    if height != width:  # PIL may resize the columns first, which rounds in another way
        return np.stack([np.asarray(Image.fromarray(one).resize((size, size), _BILINEAR)) for one in images])
    count = max(1, AT_ONCE // (height * width))
    some = [images[low : low + count] for low in range(0, len(images), count)]
    return np.concatenate([_resize_together(own, size) for own in some])


def _resize_together(images: np.ndarray[Any, Any], size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Square images: rows, all images as one tall one, then columns, as one wide one; a call for each takes longer."""
    count, height, width, *channels = images.shape
    tall = Image.fromarray(np.ascontiguousarray(images).reshape(count * height, width, *channels))
    rows = np.asarray(tall.resize((size, count * height), _BILINEAR)).reshape(count, height, size, *channels)
    wide = Image.fromarray(np.ascontiguousarray(rows.swapaxes(0, 1)).reshape(height, count * size, *channels))
    both = np.asarray(wide.resize((count * size, size), _BILINEAR)).reshape(size, count, size, *channels)
    return both.swapaxes(0, 1)
