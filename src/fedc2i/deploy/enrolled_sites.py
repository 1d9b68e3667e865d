"""Who takes part in a run over real sites, as its folder keeps it in ``run.json``."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from fedc2i.core.errors import UserError
from fedc2i.core.files import to_json, write_atomically
from fedc2i.data.federation import InputSpec
from fedc2i.data.remote import RemoteFederation
from fedc2i.data.schema import Schema
from fedc2i.deploy.job import RUN_FILE, Job
from fedc2i.flower.enrolment import common_federation
from fedc2i.flower.message_format import Introduction

_DAMAGED = (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError)


@dataclass(frozen=True)
class Enrolled:
    """The sites of a run.

    Attributes:
        run: how sites call the run, with its seed.
        federation: names, classes, shapes and sizes.
        agreed: the sites that let a coordinator measure contributions.
    """

    run: str
    federation: RemoteFederation
    agreed: tuple[str, ...] = ()


def enrol(job: Job, federation: RemoteFederation, agreed: Collection[str] = ()) -> Enrolled:
    """Writes down who takes part, under a new name of the run."""
    run = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
    described = {
        "run": run,
        "job": job.digest,
        "names": federation.names,
        "classes": federation.classes,
        "input": federation.input.to_json(),
        "schema": None if federation.schema is None else federation.schema.to_json(),
        "sizes": {name: dict(own) for name, own in federation.sizes.items()},
        "files": job.checksums(),
        "agreed": sorted(agreed),
    }
    write_atomically(job.out / RUN_FILE, to_json(described).encode())
    return Enrolled(run, federation, tuple(sorted(agreed)))


def enrolled(job: Job, say: Callable[[str], None]) -> Enrolled | None:
    """The sites of the run that was started in the job's folder; None if there is none.

    Raises:
        UserError: if the file is damaged, or of a run with other settings or files.
    """
    path = job.out / RUN_FILE
    if not path.is_file():
        return None
    job.refuse_changed_files()
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values["job"] != job.digest:
            raise UserError(f"{job.out}: holds a run with other settings; choose another --out")
        classes, sample = tuple(values["classes"]), InputSpec.from_json(values["input"])
        schema = None if values.get("schema") is None else Schema.from_json(values["schema"])
        there = [Introduction(name, own, classes, sample, schema) for name, own in values["sizes"].items()]
        federation = common_federation(there, values["names"], classes, say)
        return Enrolled(str(values["run"]), federation, tuple(map(str, values.get("agreed", ()))))
    except _DAMAGED as error:
        raise UserError(f"{path}: cannot be read ({error}); choose another --out") from None
