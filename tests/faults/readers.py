"""Every reader of files and messages in fedc2i, with sound files for it that are made by code."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from PIL import Image
from safetensors.torch import save

from fedc2i.cli.flower_local import is_local
from fedc2i.core.errors import UserError
from fedc2i.data import arrays, converted_files, folder, formats, images
from fedc2i.data.federation import DataOptions
from fedc2i.data.schema import Column, Schema
from fedc2i.deploy import approval, audit, coordinator_folder, keys, run_description, site_folder, tls
from fedc2i.deploy.folder_settings import check_address, check_host
from fedc2i.deploy.job import Job
from fedc2i.deploy.local_federation import FEDERATION, read_job
from fedc2i.engine import checkpoint
from fedc2i.engine.records import Round
from fedc2i.engine.topology import parse as parse_topology
from fedc2i.flower import compat, message_format, wire
from fedc2i.methods.fedc2i import FedC2I
from fedc2i.runs.driver import execute
from fedc2i.runs.fingerprint import Fingerprint
from fedc2i.runs.finished_run import read_run
from fedc2i.runs.folder import read_reports, write_report
from fedc2i.runs.interrupted_run import unfinished, write_plan
from fedc2i.runs.plan import prepare
from fedc2i.runs.results import summary
from fedc2i.runs.settings import make, read_toml
from fedc2i.runs.stored_models import read_model
from support.published_files import digits, write_idx, write_libsvm, write_mat, write_npz, write_png_folder

Files = dict[str, bytes]

QUICK = {"rounds": 2, "epochs": 1, "seeds": "0", "device": "cpu", "model": "lenet5"}
IMAGES = tuple(f"a.{ending}" for ending in ("png", "jpg", "bmp", "gif", "tif", "webp", "ppm"))


@dataclass(frozen=True)
class Reader:
    """A function that reads a folder, how to make sound files for it, and which of them to damage (all for none).

    Where checksums guard the files, ``seal`` makes them fit what was damaged, as an attacker would.
    """

    make: Callable[[Path], object]
    read: Callable[[Path], object]
    victims: tuple[str, ...] = ()
    seal: Callable[[Files], Files] = dict


def _client(path: Path) -> None:
    x, y = digits(6, 8)
    write_npz(path / "a.npz", (x, y), (x, y), classes=np.array(list("abcdef")))


def _idx(path: Path) -> None:
    for name in ("a.idx", "a.idx.gz"):
        write_idx(path / name, digits(3, 8, None)[0])


def _mat(path: Path) -> None:
    write_mat(path / "a.mat", *digits(2, 32))
    write_mat(path / "b.mat", *digits(2, 32), compress=False)


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


def _folder(path: Path) -> None:
    for kind in ("one/x", "one/y"):
        (path / kind).mkdir(parents=True)
        for number in range(1, 6):
            Image.fromarray(digits(number, 12)[0][0]).save(path / kind / f"{number}.png")


def _report() -> Round:
    metrics: Any = {point: [{"accuracy": 50.0, "loss": 1.0}] * 3 for point in ("received", "trained")}
    return Round(0, 1, 0.5, ("a", "b"), metrics, {"influence_vector": np.eye(3)}, (), 8, 16)


def _checkpoint(path: Path) -> None:
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.zeros(0), "c": torch.zeros(2, dtype=torch.int64)}
    checkpoint.save(path, 3, tensors, {"gamma": 2.0, "names": ["a"]})


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
def plan() -> Any:
    x, y = digits(12, 16)
    federation = arrays.from_arrays(dict.fromkeys("abc", (x, y % 3, x[:6], y[:6] % 3)), name="toy")
    return prepare(["fedc2i"], QUICK, federation)[0]


def _run(path: Path) -> None:
    execute(plan(), path)


def _read_run(path: Path) -> object:
    result = read_run(path)
    return repr(result), summary(result), result.influence(), result.predictions


def _interrupted(path: Path) -> None:
    write_plan([plan()], path)
    write_files(path / "checkpoints", {"fingerprint.json": json.dumps(vars(plan().fingerprint)).encode()})


def _resumption(path: Path) -> object:
    return unfinished(path), Fingerprint.read(path)


def _job(path: Path) -> None:
    (path / FEDERATION / "sites").mkdir(parents=True)
    (path / FEDERATION / "sites" / "kept").touch()
    Job(path, "fedavg", {"rounds": 1}, ("a", "b"), classes=("x", "y"), local=FEDERATION).write()


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
    said = {"name": "a", "samples": {"train": 1, "validation": 0, "test": 1}, "classes": ["x"]}
    columns = [Column("age", "number"), Column("sex", "category", ("f", "m"), missing=True)]
    schema = Schema(tuple(columns))
    said |= {"input": schema.input.to_json(), "schema": schema.to_json()}
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
    readers = {
        "task": message_format.Task,
        "answer": message_format.Answer,
        "introduction": message_format.Introduction,
    }
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
    run_description.read_terms(text)
    return run_description.understand(text)


def _site(path: Path) -> None:
    site_folder.make_site(path / "site", "clinic", "folder:mine", "fed.example.org:9092", check=False)
    coordinator_folder.rotate(coordinator_folder.make_coordinator(path / "coordinator", ["fed.example.org"]))
    (path / "site" / "ca.crt").write_bytes((path / "coordinator" / "ca.crt").read_bytes())
    (path / "addresses").write_text("fed.example.org:9092\n[::1]:80\n")


def _read_site(path: Path) -> object:
    for key in path.rglob("*.key"):
        key.chmod(0o600)
    found: list[object] = [
        site_folder.read_site(path / "site"),
        coordinator_folder.read_coordinator(path / "coordinator"),
    ]
    found.append(keys.read_request(path / "site" / "clinic.csr"))
    found += map(tls.describe, tls.read_authorities(path / "site" / "ca.crt"))
    for line in (path / "addresses").read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        found += [check_address(line), check_host(line.rpartition(":")[0].strip("[]"))]
    return found


def _audit(path: Path) -> None:
    log = audit.AuditLog(path)
    for number in range(3):
        told = {"run": "r", "round": number, "terms": "t", "upload": str(number), "noise": 1.0, "outcome": "sent"}
        log.append("task", **told)
    log.path.with_suffix(".lock").unlink()


def _read_audit(path: Path) -> object:
    entries = audit.AuditLog(path).entries()
    audit.check_course(entries, "r", "t", 1)
    return audit.spent(entries)


def _bundle(path: Path) -> None:
    (path / "app.fab").write_bytes(compat.bundle(approval.APP))


def _topology(path: Path) -> None:
    (path / "circle.txt").write_text('# who hears whom\na: b\nb: a, "c"\nc:\n')


READERS: dict[str, Reader] = {
    "config": Reader(
        lambda path: (path / "run.toml").write_text(plan().config.to_toml()),
        lambda path: make(FedC2I, read_toml(path / "run.toml")),
    ),
    "arrays": Reader(_client, lambda path: arrays.load(str(path), DataOptions(image_size=16))),
    "idx": Reader(_idx, lambda path: [formats.read_idx(path / name) for name in ("a.idx", "a.idx.gz")]),
    "mat": Reader(_mat, lambda path: [formats.read_mat(path / name) for name in ("a.mat", "b.mat")]),
    "usps": Reader(
        lambda path: write_libsvm(path / "a.bz2", *digits(2, 16, None)), lambda path: formats.read_usps(path / "a.bz2")
    ),
    "domain": Reader(
        lambda path: write_npz(path / "a.npz", digits(4, 8), digits(2, 8)),
        lambda path: formats.read_npz(path / "a.npz"),
    ),
    "images": Reader(_images, _read_images),
    "listing": Reader(
        lambda path: write_png_folder(path / "png", *digits(3, 12)),
        lambda path: formats.read_png_folder(path / "png", path / "png_labels.txt"),
        ("png_labels.txt",),
    ),
    "folder": Reader(_folder, lambda path: folder.load(str(path), DataOptions(image_size=8))),
    "manifest": Reader(
        lambda path: converted_files.write(path / "a.npz", {"x": np.arange(3)}, []),
        lambda path: converted_files.verify(path / "a.npz"),
    ),
    "topology": Reader(_topology, lambda path: parse_topology(str(path / "circle.txt"), ("a", "b", "c"), 0)),
    "checkpoint": Reader(_checkpoint, checkpoint.load, seal=_sealed_checkpoint),
    "journal": Reader(lambda path: write_report(path, _report()), lambda path: read_reports(path, 2)),
    "run folder": Reader(
        _run, _read_run, ("summary.json", "metrics.jsonl", "influence.npz", "predictions.npz", "config.toml")
    ),
    "interrupted run": Reader(_interrupted, _resumption),
    "job": Reader(_job, lambda path: (read_job(path), is_local(path))),
    "model": Reader(
        lambda path: ((path / "models").mkdir(), (path / "models/seed0-trained.safetensors").write_bytes(_model())),
        lambda path: read_model(path, "a"),
    ),
    "messages": Reader(_messages, _read_messages),
    "setup": Reader(lambda path: (path / "setup.json").write_text(run_description.describe(plan(), 0)), _understand),
    "site": Reader(_site, _read_site),
    "audit": Reader(_audit, _read_audit),
    "bundle": Reader(_bundle, lambda path: approval.own_files_in((path / "app.fab").read_bytes())),
}


def _model() -> bytes:
    return save({"a/w": torch.ones(2, 3), "b/w": torch.zeros(2, 3)})


def below(path: Path) -> Files:
    """All files below a folder, by relative name."""
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def write_files(path: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)


@cache
def sound(reader: str) -> Files:
    """A reader's sound files; made once."""
    with TemporaryDirectory() as folder:
        READERS[reader].make(Path(folder))
        return below(Path(folder))


def is_refused(error: BaseException) -> bool:
    """Whether an exception is one clear line for a person."""
    message = str(error)
    return isinstance(error, UserError) and 0 < len(message) < 2000 and message.isprintable()


def attempt(reader: Reader, path: Path) -> BaseException | None:
    """What reading raised, unless that is one clear line."""
    try:
        reader.read(path)
    except Exception as error:
        return None if is_refused(error) else error
    return None
