"""Whether the benchmark data on this machine is sound: checksums, shapes, label ranges and class counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedc2i.core.errors import UserError
from fedc2i.data import catalog, converted_files, digit5, office10
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


def _class_counts(one: DomainStatus, part: str, labels: Labels) -> list[int]:
    classes = catalog.CLASSES[one.domain.source]
    counts: list[int] = np.bincount(labels, minlength=len(classes)).tolist()
    if 0 in counts:
        raise UserError(f"{one.paths[0]}: no {part} image of class '{classes[counts.index(0)]}'")
    return counts
