"""``folder:DIR``: people's own image files, one folder per client.

Two layouts, one for all clients::

    DIR/<client>/<class>/*                      divided 70/10/20 into train, validation and test
    DIR/<client>/{train,test}/<class>/*         as given; ``validation`` (or ``val``) is optional

Hidden files, a README and files that Windows makes (Thumbs.db, desktop.ini) are ignored; any other stray file is
refused.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from fedc2i.core.errors import UserError
from fedc2i.data import images
from fedc2i.data.converted_files import WINDOWS_FILES
from fedc2i.data.federation import Client, DataOptions, Federation, Split, stratified_order

SIZE = 32
TEST_SHARE, VALIDATION_SHARE = 0.2, 0.1
PARTS = {"train": "train", "test": "test", "validation": "validation", "val": "validation"}
LAYOUTS = "DIR/<client>/<class>/* or DIR/<client>/{train,test}/<class>/*"

Files = list[tuple[str, Path]]  # (class, image file)
Parts = dict[str, Files]  # by "train", "validation", "test"


def load(argument: str, options: DataOptions) -> Federation:
    """Clients from a folder of image files.

    Classes are the union over all clients, and a client may lack some; clients and classes are in natural order
    (``10`` after ``9``). Without given splits, only the names of client, class and file decide an image's split.

    Args:
        argument: the directory ``DIR``, relative to the working directory.
        options: of these ``image_size`` matters (32 by default; aspect ratios are not kept).

    Raises:
        UserError: for a layout that is not one of the two, an unreadable image, a client without training or
            test images, or a class that is tested but trained nowhere.
    """
    if not argument:
        raise UserError(f"folder: a directory is needed, as folder:DIR with {LAYOUTS}")
    root = Path(argument).expanduser()
    directories = _directories(root, "a folder per client")
    if not directories:
        raise UserError(f"{root}: no client folders, expected {LAYOUTS}")
    return replace(read_clients(directories, options.image_size or SIZE), name=f"folder:{argument}")


def read_clients(directories: Sequence[Path], size: int) -> Federation:
    """A federation of some clients' folders, with square images of this size."""
    root = directories[0].parent
    given = [bool(_part_names(directory)) for directory in directories]
    if len(set(given)) == 2:
        with_parts, without = directories[given.index(True)].name, directories[given.index(False)].name
        raise UserError(
            f"{root}: mixed layouts, '{with_parts}' has a train or test folder but '{without}' has none, "
            f"expected {LAYOUTS}"
        )
    read = _given_parts if given[0] else _divided
    found = {directory.name: read(directory) for directory in directories}
    classes = _classes(root, list(found.values()))
    clients = [
        Client(name, **{part: _split(files, classes, size) for part, files in parts.items()})
        for name, parts in found.items()
    ]
    return Federation(name="folder", clients=tuple(clients), classes=classes)


def natural_key(name: str) -> tuple[list[str | int], str]:
    """Sorts numbers inside names by value; the name itself breaks ties such as ``1`` and ``01``."""
    pieces = re.split(r"([0-9]+)", name)
    return [int(piece) if index % 2 else piece for index, piece in enumerate(pieces)], name


def entries(directory: Path) -> list[Path]:
    """The files and folders in a directory, in natural order, without those that are ignored.

    Raises:
        UserError: if it cannot be read, or holds a symbolic link that is broken or leads back to it.
    """
    try:
        paths = [path for path in directory.iterdir() if not path.name.lower().startswith((".", *WINDOWS_FILES))]
    except OSError as error:
        raise UserError(f"{directory}: not a readable directory ({error.strerror})") from None
    paths = [path for path in paths if path.is_dir() or path.stem.lower() != "readme"]
    for path in filter(Path.is_symlink, paths):
        try:
            target = path.resolve(strict=True)
        except (OSError, RuntimeError):
            raise UserError(f"{path}: a symbolic link that is broken or loops; remove it") from None
        if directory.resolve().is_relative_to(target):
            raise UserError(f"{path}: a symbolic link that leads back to its own folder; remove it")
    return sorted(paths, key=lambda path: natural_key(path.name))


def _directories(directory: Path, expected: str) -> list[Path]:
    paths = entries(directory)
    for path in paths:
        if not path.is_dir():
            raise UserError(f"{path}: a file where {expected} is expected ({LAYOUTS}); move it elsewhere")
    return paths


def _part_names(client: Path) -> list[str]:
    """The names of the given splits; empty if the client's folders are classes."""
    names = [path.name for path in _directories(client, "a folder per class or split")]
    parts = [name for name in names if name in PARTS]
    if not names:
        raise UserError(f"{client}: an empty client folder, expected {LAYOUTS}")
    if parts and len(parts) < len(names):
        other = next(name for name in names if name not in PARTS)
        raise UserError(f"{client}: mixed layouts, '{parts[0]}' beside '{other}'; expected {LAYOUTS}")
    return parts


def _class_files(directory: Path) -> Files:
    """All images of ``directory/<class>/*``."""
    files: Files = []
    for folder in _directories(directory, "a folder per class"):
        paths = entries(folder)
        for path in paths:
            if not path.is_file() or not images.is_image(path):
                kind = "a folder" if path.is_dir() else "not an image file" if path.is_file() else "not a regular file"
                raise UserError(f"{path}: {kind}, expected are files ending in {', '.join(images.SUFFIXES)}")
        if not paths:
            raise UserError(f"{folder}: an empty class folder; remove it or put images into it")
        files += [(folder.name, path) for path in paths]
    return files


def _given_parts(client: Path) -> Parts:
    names = _part_names(client)
    if len(names) > len({PARTS[name] for name in names}):
        raise UserError(f"{client}: both 'val' and 'validation', allowed is one of them")
    parts: Parts = {"train": [], "validation": [], "test": []}
    parts |= {PARTS[name]: _class_files(client / name) for name in names}
    for part in ("train", "test"):
        if not parts[part]:
            raise UserError(f"{client}: no {part} images, expected some in {client.name}/{part}/<class>/*")
    return parts


def _divided(client: Path) -> Parts:
    """Divides a client's images, stratified by class, in an order that only the names decide."""
    files = _class_files(client)
    if len(files) < 2:
        raise UserError(f"{client}: {len(files)} image, at least one for training and one for test are needed")
    names = [os.fsencode(f"{client.name}/{label}/{path.name}") for label, path in files]
    keys = np.array([int.from_bytes(hashlib.sha256(name).digest()[:8], "big") for name in names], np.uint64)
    order = stratified_order(np.array([label for label, _ in files]), keys)
    test, validation = max(1, round(TEST_SHARE * len(files))), round(VALIDATION_SHARE * len(files))
    # Test comes before validation: in a class of two to four images the later ones are then test images.
    train_rows, test_rows, validation_rows = np.split(order, [len(files) - test - validation, len(files) - validation])
    rows = {"train": train_rows, "validation": validation_rows, "test": test_rows}
    return {part: [files[row] for row in np.sort(index)] for part, index in rows.items()}


def _classes(root: Path, clients: list[Parts]) -> tuple[str, ...]:
    seen = {part: {label for parts in clients for label, _ in parts[part]} for part in clients[0]}
    for part in ("validation", "test"):
        for label in sorted(seen[part] - seen["train"], key=natural_key):
            raise UserError(f"{root}: class '{label}' has {part} images but no training image in any client; add one")
    return tuple(sorted(seen["train"], key=natural_key))


def _split(files: Files, classes: tuple[str, ...], size: int) -> Split:
    number = {name: index for index, name in enumerate(classes)}
    labels = np.array([number[label] for label, _ in files], np.int64)
    return Split.from_numpy(images.read_images((path for _, path in files), size), labels)
