"""Sound files of every kind that fedc2i reads, who reads them, and how to damage them.

A target is a folder of sound files, made by code, and the function that reads it. `damaged` changes one file by a list
of small steps; the steps are plain numbers, so that hypothesis and a coverage-guided fuzzer can both make them up.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import json
import pickle
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import scipy.io
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from PIL import Image
from safetensors.torch import save

from fedc2i.core.errors import UserError
from fedc2i.data import arrays, converted, folder, formats, images, office10
from fedc2i.data.catalog import OFFICE_CLASSES
from fedc2i.deploy import coordinator_folder, keys, run_description, site_folder, tls
from fedc2i.deploy.addresses import check_host, parse_address
from fedc2i.deploy.secret_files import read_small
from fedc2i.engine import checkpoint_file
from fedc2i.engine.records import Round
from fedc2i.engine.topology import parse as parse_topology
from fedc2i.flower import messages, wire
from fedc2i.methods.fedc2i import FedC2I
from fedc2i.runs import journal
from fedc2i.runs.folder import read_model
from fedc2i.runs.plan import prepare
from fedc2i.runs.read import read_run
from fedc2i.runs.settings import make, read_toml

Files = dict[str, bytes]
Step = tuple[int, int, int]  # what to do, where, with what

QUICK = {"rounds": 2, "epochs": 1, "seeds": "0", "device": "cpu", "model": "lenet5"}
WORDS = (
    *(b"\0", b"\xff\xff\xff\xff", b"\xff\xff\xff\x7f", b"\0\0\0\x80", b"\xff" * 8, b"\n", b'"', b"/", b"../", b":"),
    *(b"PK\x05\x06", b"1e999", b"-1", b"9" * 30, b"[" * 300, b"{", b"}", b"\x1b[31m", b"\xed\xa0\x80", b"<U0", b"|O"),
)
VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 2**63, 2**400, 1e308, float("inf"), float("nan"), "", "\0", "a" * 300, "../x", "x\ny"),
    *([], {}, [[]], [None], {"a": {"b": []}}, "\ud800", "none", "evil.py:Method", "/etc/passwd", "9" * 5000),
)


@dataclass(frozen=True)
class Target:
    """Something that reads files: where sound ones come from, which of them to damage, and the reader.

    Where checksums guard the files, ``seal`` makes them fit what was damaged, as someone who means harm would.
    """

    make: Callable[[Path], object]
    read: Callable[[Path], object]
    victims: tuple[str, ...] = ()
    seal: Callable[[Files], Files] = dict


def digits(count: int, side: int, seed: int = 0) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    draw = np.random.default_rng(seed)
    return draw.integers(0, 256, (count, side, side, 3), np.uint8), np.arange(count) % 10


def _client(path: Path) -> None:
    x, y = digits(6, 8)
    np.savez_compressed(path / "a.npz", x_train=x, y_train=y, x_test=x, y_test=y, classes=np.array(list("abcdef")))


def _idx(path: Path) -> None:
    content = b"\0\0\x08\x03" + b"".join(n.to_bytes(4, "big") for n in (3, 8, 8)) + digits(3, 8)[0][..., 0].tobytes()
    (path / "a.idx").write_bytes(content)
    (path / "a.idx.gz").write_bytes(gzip.compress(content, mtime=0))


def _mat(path: Path) -> None:
    x, y = digits(2, 32)
    for name, packed in (("a.mat", True), ("b.mat", False)):
        scipy.io.savemat(path / name, {"X": x.transpose(1, 2, 3, 0), "y": y[:, None]}, do_compression=packed)


def _libsvm(path: Path) -> None:
    lines = [f"{label} " + " ".join(f"{i}:{(i % 3) - 1}" for i in range(1, 257)) for label in (1, 10)]
    (path / "a.bz2").write_bytes(bz2.compress(("\n".join(lines) + "\n").encode()))


def _h5(path: Path) -> None:
    with h5py.File(path / "usps.h5", "w") as file:
        for part in ("train", "test"):
            file.create_dataset(
                f"{part}/data", data=np.linspace(0, 1, 512, dtype="f4").reshape(2, 256), chunks=(1, 256)
            )
            file.create_dataset(f"{part}/target", data=np.arange(2))


def _domain(path: Path) -> None:
    x, y = digits(4, 8)
    np.savez_compressed(path / "a.npz", x_train=x, y_train=y, x_test=x[:2], y_test=y[:2])


IMAGES = tuple(f"a.{ending}" for ending in ("png", "jpg", "bmp", "gif", "tif", "webp", "ppm"))


def _images(path: Path) -> None:
    for name in IMAGES:
        Image.fromarray(digits(1, 12)[0][0]).save(path / name)


def _read_images(path: Path) -> object:
    """All seven; a damaged one must not keep the others from being read."""
    refused = None
    for name in IMAGES:
        try:
            images.read_image(path / name, 8)
        except UserError as error:
            refused = error
    if refused is not None:
        raise refused
    return None


def _listing(path: Path) -> None:
    (path / "png").mkdir()
    Image.fromarray(digits(1, 12)[0][0]).save(path / "png" / "a.png")
    (path / "list.txt").write_text("a.png 3\n")


def _folder(path: Path) -> None:
    for kind in ("one/x", "one/y"):
        (path / kind).mkdir(parents=True)
        for number in (1, 2):
            Image.fromarray(digits(1, 12, number)[0][0]).save(path / kind / f"{number}.png")


def _split_list(path: Path) -> None:
    name = OFFICE_CLASSES[1]
    (path / name).mkdir()
    (path / name / "a.jpg").write_bytes(b"")
    names, labels = [f"office/{name}/a.jpg"] * 2, [1, 1]
    for number, content in enumerate(((names, labels), (np.array(names), np.array(labels)))):
        (path / f"{number}.pkl").write_bytes(pickle.dumps(content, protocol=number * 2))


def _read_split_lists(path: Path) -> object:
    return [office10._listed(path, path / f"{number}.pkl") for number in range(2)]


def _report() -> Round:
    metrics: Any = {point: [{"accuracy": 50.0, "loss": 1.0}] * 3 for point in ("received", "trained")}
    return Round(0, 1, 0.5, ("a", "b"), metrics, {"influence_vector": np.eye(3)}, (), 8, 16)


def _checkpoint(path: Path) -> None:
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.zeros(0), "c": torch.zeros(2, dtype=torch.int64)}
    checkpoint_file.save(path, 3, tensors, {"gamma": 2.0, "names": ["a"]})


def _sealed_checkpoint(files: Files) -> Files:
    try:
        (name,) = (name for name in files if name.endswith(".json"))
        said = json.loads(files[name])
        said["sha256"] = hashlib.sha256(files[name.replace(".json", ".safetensors")]).hexdigest()
        said.pop("checksum", None)
        said["checksum"] = hashlib.sha256(json.dumps(said).encode()).hexdigest()
        return {**files, name: json.dumps(said).encode()}
    except (ValueError, TypeError, AttributeError, RecursionError):
        return files


@lru_cache(maxsize=1)
def _plan() -> Any:
    x, y = digits(12, 16)
    federation = arrays.from_arrays(dict.fromkeys("abc", (x, y % 3, x[:6], y[:6] % 3)), name="toy")
    return prepare(["fedc2i"], QUICK, federation)[0]


def _run(path: Path) -> None:
    _plan().execute(path)


def _read_run(path: Path) -> object:
    result = read_run(path)
    return repr(result), result.summary(), result.influence()


def _record(content: Mapping[str, Any]) -> RecordDict:
    """A Flower message from JSON: arrays as hexadecimal text, so that damage reaches their bytes."""
    made: dict[str, Any] = {}
    for name, values in content.items():
        if "arrays" in values:
            own = {
                key: Array("float32", (1,), "numpy.ndarray", bytes.fromhex(text))
                for key, text in values["arrays"].items()
            }
            made[name] = ArrayRecord(own)
        else:
            made[name] = (MetricRecord if "metrics" in values else ConfigRecord)(next(iter(values.values())))
    return RecordDict(made)


def _arrays(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {"arrays": {name: array.data.hex() for name, array in wire.pack(tensors).items()}}


def _messages(path: Path) -> None:
    tensors = {"w": torch.arange(6.0).reshape(2, 3), "n": torch.tensor([1, 2]), "e": torch.zeros(0, 4)}
    task = {"run": "r", "round": 1, "exchange": 0, "position": 0, "train": True, "score_received": True}
    task |= {"score_trained": True, "half": False, "setup": "{}"}
    said = {"name": "a", "samples": {"train": 1, "validation": 0, "test": 1}, "classes": ["x"], "image": [3, 8, 8]}
    messages = {
        "task": {"task": {"config": task}, "shared": _arrays(tensors), "personal": _arrays({"p": torch.ones(1)})},
        "answer": {
            "upload": _arrays(tensors),
            "report": _arrays({"influence_vector": torch.ones(3)}),
            "metrics": {"metrics": {"trained.accuracy": 5.0, "received.loss": 1.0}},
        },
        "introduction": {"introduction": {"config": {"json": json.dumps(said)}}},
    }
    for name, message in messages.items():
        (path / f"{name}.json").write_text(json.dumps(message))


def _read_messages(path: Path) -> object:
    readers = {"task": messages.Task, "answer": messages.Answer, "introduction": messages.Introduction}
    found = []
    for name, kind in readers.items():
        try:
            content = _record(json.loads((path / f"{name}.json").read_text(encoding="utf-8")))
        except Exception:  # what Flower itself does not let through is none of ours
            continue
        found.append(kind.from_record(content))  # type: ignore[attr-defined]
    return found


def _understand(path: Path) -> object:
    try:
        text = (path / "setup.json").read_text(encoding="utf-8")
    except UnicodeDecodeError:  # Flower's messages hold text
        return None
    return run_description.understand(text)


def _site(path: Path) -> None:
    site_folder.make_site(path / "site", "clinic", "folder:mine", "fed.example.org:9092", check=False)
    coordinator_folder.make_coordinator(path / "coordinator", ["fed.example.org"])
    (path / "site" / "ca.crt").write_bytes((path / "coordinator" / "ca.crt").read_bytes())
    (path / "addresses").write_text("fed.example.org:9092\n[::1]:80\n")


def _read_site(path: Path) -> object:
    for key in path.rglob("*.key"):
        key.chmod(0o600)
    found: list[object] = [
        site_folder.read_site(path / "site"),
        coordinator_folder.read_coordinator(path / "coordinator"),
    ]
    found.append(keys.read_request(read_small(path / "site" / "clinic.csr")))
    found.append(tls.describe(tls.read_certificate(read_small(path / "site" / "ca.crt"), "ca.crt")))
    for line in (path / "addresses").read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        found += [parse_address(line), check_host(line.rpartition(":")[0].strip("[]"))]
    return found


def _topology(path: Path) -> None:
    (path / "circle.txt").write_text('# who hears whom\na: b\nb: a, "c"\nc:\n')


TARGETS: dict[str, Target] = {
    "config": Target(
        lambda path: (path / "run.toml").write_text(_plan().config.to_toml()),
        lambda path: make(FedC2I, read_toml(path / "run.toml")).settings(),
    ),
    "arrays": Target(_client, lambda path: arrays.load(str(path), data_dir=None, image_size=16)),
    "idx": Target(_idx, lambda path: [formats.read_idx(path / name) for name in ("a.idx", "a.idx.gz")]),
    "mat": Target(_mat, lambda path: [formats.read_mat(path / name) for name in ("a.mat", "b.mat")]),
    "libsvm": Target(_libsvm, lambda path: formats.read_usps_libsvm(path / "a.bz2")),
    "h5": Target(_h5, lambda path: [formats.read_usps_h5(path / "usps.h5", part) for part in ("train", "test")]),
    "domain": Target(_domain, lambda path: formats.read_npz(path / "a.npz")),
    "images": Target(_images, _read_images),
    "listing": Target(_listing, lambda path: formats.read_png_folder(path / "png", path / "list.txt"), ("list.txt",)),
    "folder": Target(_folder, lambda path: folder.load(str(path), data_dir=None, image_size=8)),
    "split list": Target(_split_list, _read_split_lists, ("0.pkl", "1.pkl")),
    "manifest": Target(
        lambda path: converted.store(path / "a.npz", {"x": np.arange(3)}, []),
        lambda path: converted.verify(path / "a.npz"),
    ),
    "topology": Target(_topology, lambda path: parse_topology(str(path / "circle.txt"), ("a", "b", "c"), 0)),
    "checkpoint": Target(_checkpoint, checkpoint_file.load, seal=_sealed_checkpoint),
    "journal": Target(lambda path: journal.write(path, _report()), lambda path: journal.read(path, 2)),
    "run folder": Target(_run, _read_run, ("summary.json", "metrics.jsonl", "influence.npz", "config.toml")),
    "model": Target(
        lambda path: ((path / "models").mkdir(), (path / "models/seed0-trained.safetensors").write_bytes(_model())),
        lambda path: read_model(path, "a"),
    ),
    "messages": Target(_messages, _read_messages),
    "setup": Target(lambda path: (path / "setup.json").write_text(run_description.describe(_plan(), 0)), _understand),
    "site": Target(_site, _read_site),
}


def _model() -> bytes:
    return save({"a/w": torch.ones(2, 3), "b/w": torch.zeros(2, 3)})


def below(path: Path) -> Files:
    """All files below a folder, by relative name."""
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def lay(path: Path, files: Mapping[str, bytes]) -> None:
    """Writes the files."""
    for name, content in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)


def damaged(files: Files, target: Target, steps: Sequence[Step], inside: int) -> Files:
    """The same files, one of them changed.

    An odd ``inside`` changes what is packed in it, which is packed again; one from 128 puts checksums right.
    """
    names = list(target.victims) or list(files)
    name = names[inside // 2 % len(names)]
    layers = [layer for layer in _LAYERS if inside % 2 and layer[0](files[name])]
    parts = layers[0][1](files[name]) if layers else {"": files[name]}
    chosen = list(parts)[inside // 8 % len(parts)]
    for step in steps:
        parts = {**parts, chosen: _changed(parts[chosen], *step)}
    new = {**files, name: layers[0][2](parts) if layers else parts[""]}
    return target.seal(new) if inside >= 128 else new


def _changed(content: bytes, kind: int, place: int, value: int) -> bytes:
    low = place % (len(content) + 1)
    high = min(len(content), low + 1 + value % 64)
    match kind % 9:
        case 0:
            return content[:low]
        case 1:
            return content[:low] + bytes([value % 256]) + content[low + 1 :]
        case 2:
            return content[:low] + bytes(byte ^ 1 << value % 8 for byte in content[low : low + 1]) + content[low + 1 :]
        case 3:
            word = WORDS[value % len(WORDS)]
            return content[:low] + word + content[low + len(word) :]
        case 4:
            return content[:low] + WORDS[value % len(WORDS)] + content[low:]
        case 5:
            return content[:low] + content[high:]
        case 6:
            return content[:high] + content[low:]
        case 7:
            return content[:low] + value.to_bytes(8, "little", signed=False)[: 1 + place % 8] + content[low + 8 :]
    return _changed_value(content, place, value)


def _changed_value(content: bytes, place: int, value: int) -> bytes:
    """Another value in a JSON file, in a line of JSON or of TOML; else another number in a text."""
    new = VALUES[value % len(VALUES)]
    lines = content.split(b"\n")
    number = place % len(lines)
    for text, before, after in (
        (content, b"", b""),
        (lines[number], b"\n".join([*lines[:number], b""]), b"\n".join([b"", *lines[number + 1 :]])),
    ):
        try:
            tree = json.loads(text)
        except (ValueError, RecursionError):
            continue
        nodes = list(_nodes(tree))
        if not nodes:
            continue
        holder, key = nodes[place // 7 % len(nodes)]
        holder[key] = new
        return before + json.dumps(tree).encode() + after
    found = [*re.finditer(rb"(?<== ).*|[0-9]+", content)]
    if not found:
        return content
    start, end = found[place % len(found)].span()
    return (
        content[:start] + (json.dumps(new) if value % 3 else str(new)[:2000]).encode("utf-8", "replace") + content[end:]
    )


def _nodes(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every place in nested lists and tables."""
    for key in tree if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ():
        yield tree, key
        yield from _nodes(tree[key])


def _unzip(content: bytes) -> Files:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def _zip(parts: Files) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
    return buffer.getvalue()


_LAYERS: tuple[tuple[Callable[[bytes], bool], Callable[[bytes], Files], Callable[[Files], bytes]], ...] = (
    (lambda own: own[:2] == b"PK", _unzip, _zip),
    (lambda own: own[:2] == b"\x1f\x8b", lambda own: {"": gzip.decompress(own)}, lambda own: gzip.compress(own[""])),
    (lambda own: own[:3] == b"BZh", lambda own: {"": bz2.decompress(own)}, lambda own: bz2.compress(own[""])),
)


def is_refused(error: BaseException) -> bool:
    """Whether an exception is one clear line for a person."""
    said = str(error)
    return isinstance(error, UserError) and 0 < len(said) < 2000 and said.isprintable()


def attempt(target: Target, path: Path) -> BaseException | None:
    """What reading raised, if it is not as it should be."""
    try:
        target.read(path)
    except Exception as error:
        return None if is_refused(error) else error
    return None
