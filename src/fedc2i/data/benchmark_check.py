"""Whether the benchmark data on this machine is sound: checksums, shapes, label ranges and class counts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedc2i.core.errors import UserError
from fedc2i.data import catalog, converted_files, digit5, office10, sources
from fedc2i.data.catalog import Convert, DomainStatus
from fedc2i.data.formats import Labels

CONVERTERS: Mapping[str, Convert] = {"digit5": digit5.convert, "office10": office10.convert}


def check_domain(one: DomainStatus) -> dict[str, Any]:
    """One domain's checks; ``problem`` is empty where everything is sound or nothing is there."""
    report: dict[str, Any] = {"set": one.domain.source, "domain": one.domain.key, "state": one.state, "problem": ""}
    if one.state not in ("ready", "cached"):
        return report
    (path,) = one.paths
    report["path"] = str(path)
    if one.domain.source not in CONVERTERS:
        return report | _as_it_lies(one, path)
    try:
        prepared = catalog.obtain(one, CONVERTERS[one.domain.source])
        report |= {"sha256": converted_files.sha256(path), "verified": converted_files.manifest(path) is not None}
        report["shape"] = list(prepared.train[0].shape[1:])
        for part, (_, labels) in (("train", prepared.train), ("test", prepared.test)):
            report[part] = _class_counts(one, part, labels)
        if one.domain.source == "digit5":
            digit5.require_train(one.domain, prepared.train[1])
    except UserError as error:
        report["problem"] = str(error)
    return report


def _as_it_lies(one: DomainStatus, path: Path) -> dict[str, Any]:
    """Of a domain that is not converted: whether it loads, and how many samples of each class it has."""
    source, key = one.domain.source, one.domain.key
    try:
        found = sources.load(source if key == source else f"{source}:{key}", data_dir=path.parent.parent)
    except UserError as error:
        return {"problem": str(error)}
    parts = {"train": [own.train.y for own in found.clients], "test": [own.test.y for own in found.clients]}
    counts = {part: np.bincount(np.concatenate(labels), minlength=len(found.classes)) for part, labels in parts.items()}
    checksum = converted_files.fingerprint(path).sha256
    return {
        "sha256": checksum,
        "verified": False,
        "shape": list(found.input.shape),
        **{part: own.tolist() for part, own in counts.items()},
    }


def _class_counts(one: DomainStatus, part: str, labels: Labels) -> list[int]:
    classes = catalog.CLASSES[one.domain.source]
    counts: list[int] = np.bincount(labels, minlength=len(classes)).tolist()
    if 0 in counts:
        raise UserError(f"{one.paths[0]}: no {part} image of class '{classes[counts.index(0)]}'")
    return counts
