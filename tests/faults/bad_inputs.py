"""One table of bad inputs: by reader, each by a name, how it changes sound files, and key words of the refusal.

``python bad_inputs.py FOLDER`` reads each of them and prints a line of JSON: how reading ended, the message, seconds,
and by how many megabytes the peak of memory grew. Address space is limited to 3 GB more than the start needs. Some
inputs are made to exhaust memory or time, to run code or to reach other files.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import resource
import signal
import struct
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from file_changes import (
    COLUMN,
    GIGABYTE,
    Change,
    cut,
    deep,
    deflated,
    given_parts,
    header,
    holds,
    huge,
    in_summary,
    late_round,
    lines,
    link,
    mat_of,
    mat_type_code,
    members,
    npy,
    objects,
    own_method,
    picture,
    pipe,
    png,
    postscript,
    removed,
    setup_with,
    tensors,
    torch_file,
    with_arrays,
    zip_of,
)
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from PIL import Image
from readers import READERS, below, sound, write_files

from fedc2i.data import arrays
from fedc2i.deploy.keys import read_small
from fedc2i.flower import message_format, wire
from fedc2i.runs.finished_run import read_run
from support.published_files import digits, write_npz

MOST_SECONDS = 60  # then a signal ends the program
LENGTH_2_60 = struct.pack("<Q", 2**60) + b"{}"
TENSORS_2_50 = b'{"a/w":{"dtype":"F32","shape":[1125899906842624],"data_offsets":[0,4503599627370496]}}'


def unpack_message(path: Path) -> object:
    record = wire.pack({"w": torch.ones(2)})
    buffer = io.BytesIO()
    np.save(buffer, np.frombuffer((path / "header").read_bytes(), np.uint8))
    own = {name: array for name, array in record.items() if name != "header"}
    return wire.unpack(ArrayRecord({"header": Array("uint8", (1,), "numpy.ndarray", buffer.getvalue()), **own}))


def read_introduction(path: Path) -> object:
    text = (path / "json").read_text()
    return message_format.Introduction.from_record(RecordDict({"introduction": ConfigRecord({"json": text})}))


OTHER_READERS: dict[str, Callable[[Path], object]] = {  # without sound files
    "key": lambda path: read_small(path / "a.key"),
    "message": unpack_message,
    "introduction": read_introduction,
    "run folder twice": lambda path: (read_run(path), read_run(path / "nowhere")),
}
SMALL_X = np.zeros((6, 8, 8), np.uint8)
TENSORS = "models/seed0-trained.safetensors"

BAD_INPUTS: dict[str, dict[str, tuple[Change, *tuple[str, ...]]]] = {
    "arrays": {
        "unpacks to 3 GB": (
            lambda path: (path / "a.npz").write_bytes(zip_of(npy((3 * GIGABYTE,)), 3 * GIGABYTE, *arrays.REQUIRED)),
            "200 times its size",
        ),
        "claims 2**62 numbers": (members(x_train=npy((2**62,))), "header declares"),
        "header of 2 GB": (
            lambda path: (path / "a.npz").write_bytes(
                zip_of(npy((1,), version=2, header=2 * GIGABYTE), 2 * GIGABYTE, *arrays.REQUIRED)
            ),
            "a header of 2,147,483,648 bytes",
        ),
        "2**40 empty strings": (members(classes=npy((2**40,), "<U0")), "declared as"),
        "letters that do not exist": (
            with_arrays(classes=np.array([65, 0x110000], "<u4").view("<U1")),
            "letters that do not exist",
        ),
        "letters that do not exist, big-endian": (
            with_arrays(classes=np.array([65, 0x110000], ">u4").view(">U1")),
            "letters that do not exist",
        ),
        "npz in an npz": (
            lambda path: members("b.npz", x_train=(path / "a.npz").read_bytes())(path),
            "b.npz: cannot be read",
        ),
        "Python objects": (objects, "an array of Python objects"),
        "torch file": (torch_file("a.npz"), "client 'a': unknown"),
        "no x_train and y_test": (with_arrays(x_train=None, y_test=None), "missing x_train, y_test"),
        "an unknown array": (with_arrays(x_val=np.zeros(3)), "client 'a': unknown x_val"),
        "x_validation alone": (with_arrays(x_validation=SMALL_X[:0]), "missing y_validation"),
        "floats and images": (with_arrays(x_train=np.zeros((6, 8, 8))), "but the first client has", "one shape"),
        "images and int64": (with_arrays(x_test=np.zeros((6, 8, 8), int)), "but the first client has", "one shape"),
        "labels of floats": (with_arrays(y_train=np.zeros(6)), "y_train: float64", "whole numbers"),
        "labels with two axes": (with_arrays(y_train=np.zeros((6, 1), int)), "y_train: int64", "whole numbers"),
        "a negative label": (with_arrays(y_train=np.array([0, 1, 2, 0, 1, -1])), "label -1 is out of range"),
        "a label of 2**63": (
            with_arrays(y_test=np.array([0, 1, 2, 3, 4, 2**63], np.uint64)),
            "label 9223372036854775808 is out of range",
        ),
        "a label without class": (
            with_arrays(y_test=np.array([0, 1, 2, 3, 4, 6])),
            "label 6 is out of range, allowed are 0..5",
        ),
        "too few labels": (with_arrays(y_test=np.arange(2)), "x_test has 6 samples but y_test has 2 labels"),
        "no test images": (with_arrays(x_test=SMALL_X[:0], y_test=np.zeros(0, int)), "test: no samples"),
        "labels of objects": (with_arrays(y_train=np.array([{}, 1], dtype=object)), "y_train: an array of Python obj"),
        "classes of objects": (with_arrays(classes=np.array(["a", None], dtype=object)), "classes: an array of Python"),
        "classes that are numbers": (with_arrays(classes=np.arange(6)), "expected are distinct strings"),
        "a class twice": (with_arrays(classes=np.array(list("abcdee"))), "expected are distinct strings"),
        "other classes": (
            with_arrays("b.npz", classes=np.array(list("fedcba"))),
            "'classes' differs",
            "a.npz has a, b, c, d, e, f; b.npz has f, e",
        ),
        "header of 43 GB": (
            header("{'descr': '|u1', 'fortran_order': False, 'shape': (600000000, 8, 9)}"),
            "declares 43,200,000,000 bytes but the archive holds 432",
        ),
        "negative shape": (header("{'descr': '|u1', 'fortran_order': False, 'shape': (-6, -8, 9)}"), "cannot be read"),
        "objects of no bytes": (header("{'descr': '|O', 'fortran_order': False, 'shape': (54,)}"), "Python objects"),
        "header cut off": (header("{'descr': '|u1', 'fortran_order': False, 'shape': ("), "cannot be read"),
        "header with bytes": (header("{'descr': '|u1', b'fortran_order': False, 'shape': (432,)}"), "cannot be read"),
        "header of a comma": (header(",1"), "cannot be read"),
        "header of brackets": (header("(" * 9000), "cannot be read"),
        "header of signs": (header("-" * 9000 + "1"), "cannot be read"),
        "header of spaces": (header(" " * 30000), "cannot be read"),
        "version 3 of the format": (members(x_train=b"\x93NUMPY\x03\x00" + bytes(100)), "allowed are 1.0 and 2.0"),
        "packed by LZMA": (members(packing=zipfile.ZIP_LZMA, x_train=bytes(5000)), "packed in a way", "deflated"),
        "packed by bzip2": (members(packing=zipfile.ZIP_BZIP2, x_train=bytes(5000)), "packed in a way", "deflated"),
        "a member of text": (members(x_train=b"text"), "cannot be read as an .npz archive"),
        "text": (holds("a.npz", "text"), "a.npz: cannot be read as an .npz archive"),
        "cut off": (cut("a.npz", -100), "a.npz: cannot be read as an .npz archive"),
        "a stray npy": (holds("a.npy", ""), "not a <client>.npz file"),
        "a stray text": (holds("notes.txt", ""), "not a <client>.npz file"),
        "a folder": (lambda path: (path / "folder.npz").mkdir(), "not a <client>.npz file"),
        "no clients": (lambda path: (removed("a.npz")(path), holds("README.md", "")(path)), "no clients"),
    },
    "domain": {
        "unpacks to 3 GB": (
            lambda path: (path / "a.npz").write_bytes(zip_of(npy((3 * GIGABYTE,)), 3 * GIGABYTE, *arrays.REQUIRED)),
            "200 times its size",
        ),
        "Python objects": (objects, "x_train: an array of Python objects"),
        "declares more than it holds": (
            members(**dict.fromkeys(arrays.REQUIRED, npy((10**12, 28, 28)))),
            "header declares 784,000,000,000,000 bytes",
        ),
        "an array missing": (with_arrays(y_train=None), "no y_train", "expected an npz with x_train"),
        "no zip": (holds("a.npz", b"not a zip"), "a.npz: cannot be read"),
        "sizes differ": (lambda path: write_npz(path / "a.npz", digits(4, 28), digits(2, 32)), "(28, 28, 3)"),
    },
    "idx": {
        "cut off": (cut("a.idx", 100), "a.idx", "expected an idx file"),
        "gz cut off": (cut("a.idx.gz", 100), "a.idx.gz", "expected an idx file"),
        "empty": (holds("a.idx", b""), "expected an idx file"),
        "empty gz": (holds("a.idx.gz", b""), "expected an idx file"),
        "missing": (removed("a.idx"), "a.idx: no such file"),
        "2**31 images": (holds("a.idx", b"\0\0\x08\x03" + struct.pack(">3I", 2**31, 28, 28)), "the file can hold"),
        "10**9 bytes": (holds("a.idx", b"\0\0\x08\x03" + struct.pack(">3I", 1000, 1000, 1000)), "the file can hold"),
        "gz of 10**9 bytes": (
            holds("a.idx.gz", gzip.compress(b"\0\0\x08\x03" + struct.pack(">3I", 1000, 1000, 1000))),
            "the file can hold",
        ),
        "a byte too many": (
            lambda path: (path / "a.idx").write_bytes((path / "a.idx").read_bytes() + b"x"),
            "more than the 192 bytes",
        ),
        "gz of 8 GB": (
            lambda path: (path / "a.idx.gz").write_bytes(
                b"\x1f\x8b\x08" + bytes(7) + deflated(b"\0\0\x08\x03" + struct.pack(">3I", 2, 8, 8), 8 * GIGABYTE)
            ),
            "more than the 128 bytes",
        ),
    },
    "mat": {
        "an object in place of numbers": (
            holds(
                "a.mat",
                bytes(124)
                + b"\x00\x01IM"
                + struct.pack("<2I", 14, 64)
                + struct.pack("<2I2I", 6, 8, 16, 0)
                + struct.pack("<2I2i", 5, 8, 1, 1)
                + struct.pack("<HH4s", 1, 1, b"X\0\0\0")
                + struct.pack("<2I", 14, 8)
                + bytes(16),
            ),
            "expected a MATLAB 5 file",
        ),
        "version 7.3": (
            holds("a.mat", b"MATLAB 7.3 MAT-file".ljust(124) + b"\0\x02IM" + bytes(384) + b"\x89HDF"),
            "expected a MATLAB 5 file",
        ),
        "another header": (holds("a.mat", b"MATLAB 7.3 MAT-file".ljust(200)), "not that of MATLAB 5"),
        "a damaged type code": (mat_type_code, "b.mat: cannot be read"),
        "cut off": (cut("a.mat", -7), "it is truncated"),
        "other names": (mat_of(A=np.zeros(3)), "it holds neither"),
        "images of floats": (mat_of(X=np.zeros((32, 32, 3, 4)), y=np.zeros((4, 1))), "images are float64"),
        "another shape": (mat_of(X=np.zeros((5, 5), np.uint8), y=np.zeros((4, 1))), "it holds X uint8 (5, 5)"),
        "too few labels": (
            mat_of(X=np.zeros((32, 32, 3, 4), np.uint8), y=np.zeros((3, 1))),
            "4 images but 3 labels",
        ),
        "labels that are not whole": (
            mat_of(X=np.zeros((32, 32, 3, 2), np.uint8), y=np.array([[1.5], [2]])),
            "not whole",
        ),
        "a cell array": (mat_of(X=np.array([{}], dtype=object), y=np.zeros((3, 1))), "expected a MATLAB 5 file"),
    },
    "usps": {
        "index 257": (lines(b"1 257:0"), "index 257 in line 1"),
        "index 0": (lines(b"1 0:0"), "index 0 in line 1"),
        "value 2": (lines(b"1 1:2"), "outside -1..1 in line 1"),
        "value nan": (lines(b"1 1:nan"), "outside -1..1 in line 1"),
        "label 11": (lines(b"11 1:0"), "label 10 is out of range"),
        "label x": (lines(b"x 1:0"), "invalid literal"),
        "no value": (lines(b"1 1"), "not enough values"),
        "an empty line": (lines(b""), "cannot be read"),
        "a long line": (lines(b"1 " + b"1:0 " * 9000), "16,384 bytes in a line"),
    },
    "listing": {
        "empty": (holds("png_labels.txt", ""), "it is empty"),
        "a file above": (holds("png_labels.txt", "../../secret.png 3\n"), "name '../../secret.png'"),
        "a file elsewhere": (holds("png_labels.txt", "/etc/passwd 3\n"), "name '/etc/passwd'"),
        "no label": (holds("png_labels.txt", "00000000.png\n"), "not enough values"),
        "label x": (holds("png_labels.txt", "00000000.png x\n"), "label 'x' in line 1"),
        "label -1": (holds("png_labels.txt", "00000000.png -1\n"), "label '-1' in line 1"),
        "label 10": (holds("png_labels.txt", "00000000.png 10\n"), "label 10 is out of range"),
        "label 2**70": (holds("png_labels.txt", f"00000000.png {2**70}\n"), "is out of range"),
        "a file below": (
            lambda path: (picture("png/below/x.png")(path), holds("png_labels.txt", "below/x.png 3\n")(path)),
            "name 'below/x.png' with label '3' in line 1",
        ),
        "a link": (
            lambda path: (picture("b.png")(path), link("png/00000001.png", "b.png")(path)),
            "'00000001.png' is not a file inside",
        ),
        "a long name": (holds("png_labels.txt", f"{'a' * 5000} 3\n"), "is not a file inside"),
        "an image of another size": (picture("png/00000001.png"), "00000001.png: 5x5"),
        "an image cut off": (cut("png/00000001.png", 50), "00000001.png: cannot be read as an image"),
    },
    "images": {
        "png of 60000x60000": (holds("a.png", png(60_000, 60_000)), "exceeds limit"),
        "png of 9000x9000": (holds("a.png", png(9000, 9000)), "9000x9000 pixels, allowed are 64,000,000"),
        "ppm of 100000x100000": (holds("a.ppm", b"P6 100000 100000 255\n"), "a.ppm"),
        "PostScript": (postscript, "a.png: cannot be read as an image, allowed are PNG"),
        "a pipe": (pipe("a.png"), "a.png: not a file"),
    },
    "folder": {
        "no clients": (lambda path: (path / "one").rename(path / ".one"), "no client folders, expected DIR/"),
        "layouts mixed in a client": (picture("one/train/x/1.png"), "mixed layouts, 'train' beside 'x'"),
        "layouts mixed": (
            picture("two/train/x/1.png", "two/test/x/1.png"),
            "mixed layouts, 'two' has",
            "'one' has none",
        ),
        "an empty class": (lambda path: (path / "one/empty").mkdir(), "one/empty: an empty class folder"),
        "an empty client": (lambda path: (path / "two").mkdir(), "two: an empty client folder"),
        "one image": (picture("two/x/1.png"), "two: 1 image, at least one for training and one for test"),
        "an image cut off": (cut("one/x/3.png", 40), "x/3.png: cannot be read as an image"),
        "pixels of floats": (
            lambda path: Image.fromarray(np.zeros((8, 8), np.float32)).save(path / "one/x/float.tif"),
            "x/float.tif: cannot be read as an image",
            "8 or 16 bits",
        ),
        "a file as a client": (holds("labels.csv", ""), "labels.csv: a file where a folder per client is expected"),
        "a file as a class": (picture("one/stray.png"), "stray.png: a file where a folder per class or split"),
        "no image": (holds("one/x/notes.txt", ""), "notes.txt: not an image file", ".png"),
        "too deep": (picture("one/x/more/1.png"), "x/more: a folder, expected are files"),
        "a link to its parent": (link("one/loop", "."), "one/loop: a symbolic link that leads back"),
        "a link to itself": (link("one/loop", "one/loop"), "one/loop: a symbolic link that is broken or loops"),
        "a broken link": (link("one/x/gone.png", "nowhere.png"), "gone.png: a symbolic link that is broken or loops"),
        "no test images": (lambda path: given_parts(path, "train/x"), "no test images"),
        "no training images": (lambda path: given_parts(path, "test/x"), "no train images"),
        "a class only tested": (
            lambda path: given_parts(path, "train/x", "test/x", "test/z"),
            "class 'z' has test images but no training image",
        ),
        "a class only validated": (
            lambda path: given_parts(path, "train/x", "test/x", "val/z"),
            "class 'z' has validation images but no training image",
        ),
        "two validation folders": (
            lambda path: given_parts(path, "train/x", "test/x", "val/x", "validation/x"),
            "both 'val' and 'validation'",
        ),
    },
    "manifest": {
        "nested deep": (holds("a.manifest.json", deep()), "not a manifest"),
        "empty": (holds("a.manifest.json", ""), "not a manifest"),
        "no entries": (holds("a.manifest.json", "{}"), "not a manifest"),
        "a list": (holds("a.manifest.json", "[1]"), "not a manifest"),
        "entries of other types": (
            holds("a.manifest.json", '{"sha256": 1, "bytes": "x", "sources": [], "notes": []}'),
            "not a manifest",
        ),
    },
    "config": {
        "a pipe": (pipe("run.toml"), "run.toml"),
        "nested deep": (holds("run.toml", b"lr = " + deep()), "not a TOML file"),
        "10,000 digits": (holds("run.toml", "rounds = " + "9" * 10_000), "run.toml"),
        "10,000 hexadecimal digits": (holds("run.toml", "rounds = 0x" + "f" * 10_000), "rounds"),
        "seeds with 10,000 digits": (holds("run.toml", "seeds = [0x" + "f" * 10_000 + "]"), "seeds"),
        "2 GB": (huge("run.toml"), "run.toml"),
    },
    "topology": {"2 GB": (huge("circle.txt"), "circle.txt: too large")},
    "key": {"a pipe": (pipe("a.key"), "a.key")},
    "run folder": {
        "influence with a header of 2 GB": (
            lambda path: (path / "influence.npz").write_bytes(
                zip_of(npy((1,), version=2, header=2 * GIGABYTE), 2 * GIGABYTE, "seed0_influence_vector")
            ),
            "influence.npz",
        ),
        "summary nested deep": (holds("summary.json", deep()), "summary.json"),
        "deep clients": (in_summary(clients=json.loads("[" * 500 + "]" * 500)), "summary.json"),
        "metrics nested deep": (holds("metrics.jsonl", deep('{"seed":', "}")), "metrics.jsonl"),
        "round 10**12": (late_round, "metrics.jsonl"),
    },
    "run folder twice": {
        "its own method": (lambda path: (write_files(path, sound("run folder")), own_method(path)), "nowhere"),
    },
    "model": {
        "header of 2**60": (holds(TENSORS, LENGTH_2_60), TENSORS),
        "2**50 numbers": (holds(TENSORS, struct.pack("<Q", len(TENSORS_2_50)) + TENSORS_2_50), TENSORS),
        "torch file": (torch_file(TENSORS), TENSORS),
    },
    "checkpoint": {
        "header of 2**60": (tensors(LENGTH_2_60), "damaged"),
        "nested deep": (lambda path: next(path.glob("*.json")).write_bytes(deep()), "damaged"),
    },
    "message": {"nested deep": (holds("header", deep()), "record")},
    "introduction": {"nested deep": (holds("json", deep()), "introduction")},
    "setup": {
        "nested deep": (holds("setup.json", deep()), "description"),
        "images of 10**9": (setup_with(input={"shape": [3, 10**9, 10**9], "dtype": "uint8"}), "description"),
        "infinite images": (setup_with(input={"shape": [3, float("inf"), 8], "dtype": "uint8"}), "description"),
        "a schema of other inputs": (setup_with(schema=[COLUMN]), "of a table"),
        "a schema with a column twice": (setup_with(schema=[COLUMN, COLUMN]), "not the schema of a table"),
        "a schema of 10**5 columns": (setup_with(schema=[COLUMN] * 10**5), "not the schema of a table"),
        "a million classes": (setup_with(classes=[str(n) for n in range(10**6)]), "classes"),
    },
}
NAMES = [(reader, name) for reader, inputs in BAD_INPUTS.items() for name in inputs]


def _peak() -> int:
    """The most memory since the last `_forget`, in megabytes."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) // 1024


def _forget() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def main(root: Path) -> None:
    """Reads every bad input."""
    gzip.decompress(gzip.compress(b""))
    size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    for number, (reader, name) in enumerate(NAMES):
        folder = root / str(number)
        folder.mkdir()
        write_files(folder, {} if reader in OTHER_READERS else sound(reader))
        BAD_INPUTS[reader][name][0](folder)
        read = OTHER_READERS[reader] if reader in OTHER_READERS else READERS[reader].read
        before = below(folder) if "GB" not in name else {}
        resource.setrlimit(resource.RLIMIT_AS, (size + 3 * GIGABYTE, resource.RLIM_INFINITY))
        found: dict[str, Any] = {"reader": reader, "name": name}
        print(json.dumps(found), flush=True)
        signal.alarm(MOST_SECONDS)
        _forget()
        start, began = _peak(), time.process_time()
        ended, message = "read", ""
        try:
            read(folder)
        except BaseException as error:
            ended, message = type(error).__name__, str(error)
        signal.alarm(0)
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        found |= {"ended": ended, "message": message[:3000], "seconds": time.process_time() - began}
        found |= {"grown": _peak() - start, "sprung": (folder / "sprung").exists()}
        found |= {"same": not before or below(folder) == before}
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
