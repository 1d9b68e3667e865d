"""Ways to change sound files into bad ones, for the table of `bad_inputs`."""

from __future__ import annotations

import bz2
import io
import json
import os
import struct
import zipfile
import zlib
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import scipy.io
import torch
from PIL import Image
from readers import plan, write_files

from fedc2i.data import arrays
from fedc2i.deploy import run_description

GIGABYTE = 2**30
DEEP = 100_000

Change = Callable[[Path], object]


class Trap:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


# Changes of any file.


def holds(name: str, content: bytes | str) -> Change:
    """The file gets this content."""
    content = content.encode() if isinstance(content, str) else content
    return lambda path: write_files(path, {name: content})


def cut(name: str, keep: int) -> Change:
    """Only the first bytes stay; a negative number counts from the end."""
    return lambda path: (path / name).write_bytes((path / name).read_bytes()[:keep])


def removed(name: str) -> Change:
    return lambda path: (path / name).unlink()


def pipe(name: str) -> Change:
    return lambda path: ((path / name).unlink(missing_ok=True), os.mkfifo(path / name))


def huge(name: str) -> Change:
    return lambda path: ((path / name).touch(), os.truncate(path / name, 2 * GIGABYTE))


def picture(*names: str) -> Change:
    def change(path: Path) -> None:
        for name in names:
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (5, 5)).save(path / name)

    return change


def link(name: str, target: str) -> Change:
    return lambda path: ((path / name).unlink(missing_ok=True), (path / name).symlink_to(path / target))


def deep(begin: str = "[", end: str = "]") -> bytes:
    return (begin * DEEP + end * DEEP).encode()


# Packed files.


def deflated(begin: bytes, zeros: int) -> bytes:
    """A raw deflate stream of these bytes and very many zeros, made without packing them all."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    first = packer.compress(begin) + packer.flush(zlib.Z_FULL_FLUSH)
    block = packer.compress(bytes(2**24)) + packer.flush(zlib.Z_FULL_FLUSH)
    return first + block * (zeros // 2**24) + packer.flush()


def zip_of(begin: bytes, zeros: int, *names: str) -> bytes:
    """A zip archive whose members all unpack to these bytes and this many zeros."""
    packed, size = deflated(begin, zeros), len(begin) + zeros // 2**24 * 2**24
    content, directory = b"", b""
    for name in (f"{name}.npy".encode() for name in names):
        sizes = struct.pack("<IIIHH", 0, len(packed), size, len(name), 0)
        directory += b"PK\x01\x02" + struct.pack("<6H", 20, 20, 0, 8, 0, 0) + sizes
        directory += struct.pack("<HHHII", 0, 0, 0, 0, len(content)) + name
        content += b"PK\x03\x04" + struct.pack("<5H", 20, 0, 8, 0, 0) + sizes + name + packed
    end = struct.pack("<4H2IH", 0, 0, len(names), len(names), len(directory), len(content), 0)
    return content + directory + b"PK\x05\x06" + end


def npy(shape: tuple[int, ...], descr: str = "|u1", version: int = 1, header: int | None = None) -> bytes:
    text = str({"descr": descr, "fortran_order": False, "shape": shape}).encode() + b"\n"
    return b"\x93NUMPY" + bytes([version, 0]) + struct.pack("<H" if version == 1 else "<I", header or len(text)) + text


def members(name: str = "a.npz", packing: int = zipfile.ZIP_DEFLATED, **contents: bytes) -> Change:
    """An npz archive of these members."""

    def change(path: Path) -> None:
        with zipfile.ZipFile(path / name, "w", packing) as archive:
            for member, content in contents.items():
                archive.writestr(f"{member}.npy", content)

    return change


def header(text: str) -> Change:
    """An array of 432 bytes whose header is this text."""
    line = text.encode() + b"\n"
    return members(x_train=b"\x93NUMPY\x01\x00" + len(line).to_bytes(2, "little") + line + bytes(432))


def with_arrays(name: str = "a.npz", **changes: Any) -> Change:
    """Some arrays of the archive replaced, or removed by None."""

    def change(path: Path) -> None:
        held = dict(np.load(path / "a.npz")) | changes
        np.savez(path / name, **{key: value for key, value in held.items() if value is not None})

    return change


def objects(path: Path) -> None:
    buffer = io.BytesIO()
    np.save(buffer, np.array([Trap(path / "sprung")], dtype=object), allow_pickle=True)
    members(**dict.fromkeys(arrays.REQUIRED, buffer.getvalue()))(path)


def torch_file(name: str) -> Change:
    return lambda path: torch.save({"x": Trap(path / "sprung")}, path / name)


def mat_of(**content: Any) -> Change:
    return lambda path: scipy.io.savemat(path / "a.mat", content)


def mat_type_code(path: Path) -> None:
    """`scipy.io.loadmat` ends the interpreter on this file."""
    content = bytearray((path / "b.mat").read_bytes())
    content[content.rindex(b"y\0\0\0") + 4] = 89
    (path / "b.mat").write_bytes(content)


def lines(content: bytes) -> Change:
    return holds("a.bz2", bz2.compress(content + b"\n"))


def png(width: int, height: int) -> bytes:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(bytes(2**20))) + chunk(b"IEND", b"")


def postscript(path: Path) -> None:
    code = f"({path / 'sprung'}) (w) file closefile"
    text = f"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n{code}\nshowpage\n"
    (path / "a.png").write_text(text)


# Run folders, checkpoints and messages.


def in_summary(**changes: Any) -> Change:
    def change(path: Path) -> None:
        file = path / "summary.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return change


def late_round(path: Path) -> None:
    file = path / "metrics.jsonl"
    file.write_text(file.read_text().replace('"round": 2', '"round": 1000000000000'))


def own_method(path: Path) -> None:
    """A run folder that brings its method along."""
    (path / "evil.py").write_text(f"from pathlib import Path\nPath({str(path / 'sprung')!r}).touch()\n")
    file = path / "config.toml"
    file.write_text(file.read_text().replace('method = "fedc2i"', f'method = "{path / "evil.py"}:Method"'))


def tensors(content: bytes) -> Change:
    """A checkpoint's tensors are damaged, under checksums that are right."""

    def change(path: Path) -> None:
        (described,) = path.glob("*.json")
        values = json.loads(described.read_text())
        values.pop("checksum")
        values["sha256"] = sha256(content).hexdigest()
        values["checksum"] = sha256(json.dumps(values).encode()).hexdigest()
        described.write_text(json.dumps(values))
        next(path.glob("*.safetensors")).write_bytes(content)

    return change


def given_parts(path: Path, *places: str) -> None:
    """One client whose folders are splits."""
    (path / "one").rename(path / ".one")
    picture(*(f"one/{place}/1.png" for place in places))(path)


COLUMN = {"name": "age", "kind": "number", "categories": [], "missing": False}


def setup_with(**changes: Any) -> Change:
    return lambda path: (path / "setup.json").write_text(
        json.dumps({**json.loads(run_description.describe(plan(), 0)), **changes})
    )
