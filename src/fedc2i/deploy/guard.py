"""Decides about every message that reaches a site, has a `Worker` do it, and logs what leaves.

The guard holds no data and runs no code that came with a run. It checks the code against what is installed and
approved, the task against the site's policy, and the answer against both, and writes a line to the site's log before
the answer leaves. A refusal is one line, here and at the coordinator.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from flwr.app import RecordDict

from fedc2i.core.errors import UserError, one_line
from fedc2i.deploy import sandbox
from fedc2i.deploy.approval import CodeStore, installed_code, own_files_in, sha256, unpacked
from fedc2i.deploy.audit import SENT, TASK, TRAINED, AuditLog, Entry, check_course, check_sum, spent
from fedc2i.deploy.partners import Partners
from fedc2i.deploy.run_description import RunTerms, read_terms
from fedc2i.deploy.site_folder import MASKS, SiteFolder, read_site
from fedc2i.deploy.worker import Request, Worker
from fedc2i.engine.clip_noise import run_secret
from fedc2i.flower.masking import COLLECT, SETUP, SHARE, UNMASK
from fedc2i.flower.message_format import GREETING, MASKING, MOST_REASON, Answer, Introduction, Task, failure, masking_of
from fedc2i.flower.secure_site import SecureSite, Session, digest
from fedc2i.flower.site import complain
from fedc2i.flower.site_models import run_folder

OVERHEAD = 2**20  # bytes of an answer besides its tensors
INTRODUCTION = "introduction"  # an event of the log
KEYS = (SETUP, SHARE)  # stages in which nothing of the data leaves; the log has only their refusals


class Guard:
    """Answers one message for the site in a folder."""

    def __init__(self, folder: Path, worker: Worker) -> None:
        self._folder, self._worker = folder, worker
        self._log = AuditLog(folder)
        self._name = "a site"

    def answer(self, bundle: bytes, kind: str, content: RecordDict) -> RecordDict:
        """The content of the reply: the worker's, as far as the policy lets it leave, or a failure with the reason."""
        told: dict[str, Any] = {"code": {"fedc2i": installed_code()}}
        event = INTRODUCTION if kind == GREETING else TASK
        try:
            with ExitStack() as stack:
                stack.callback(self._worker.end)
                site = read_site(self._folder, ready=False)
                self._name = site.name
                files = own_files_in(bundle)
                told["code"] |= {name: sha256(own) for name, own in files.items()}
                self._admit(site, files)
                root = stack.enter_context(unpacked(files, self._folder)) if files else None
                if kind == GREETING:
                    found = self._introduce(site, Request(str(self._folder), kind), content)
                else:
                    found = self._work(site, kind, content, root, told)
                if told.get("stage") not in KEYS:
                    self._write(event, {**told, "outcome": SENT})
                return found
        except UserError as error:
            return self._refuse(event, told, str(error))
        except Exception as error:  # nothing leaves that was not checked
            return self._refuse(event, told, f"{type(error).__name__}: {one_line(error)}")

    def _admit(self, site: SiteFolder, files: Mapping[str, bytes]) -> None:
        """Raises a `UserError` if the code that came with the run may not be executed here."""
        site.policy.check_code(list(files), sandbox.missing())
        CodeStore(self._folder).require_approved(files, site.sender())

    def _introduce(self, site: SiteFolder, request: Request, content: RecordDict) -> RecordDict:
        found = Introduction.from_record(self._worker.ask(request, content, OVERHEAD))
        return replace(found, contribution=site.policy.agrees).to_record()

    def _work(
        self, site: SiteFolder, kind: str, content: RecordDict, root: Path | None, told: dict[str, Any]
    ) -> RecordDict:
        task, _ = Task.from_record(content)
        terms = read_terms(task.setup)
        told |= {"run": one_line(task.run, 100), "round": task.round, "exchange": task.exchange, **_described(terms)}
        told["terms"] = hashlib.sha256(repr((terms, sorted(told["code"].items()))).encode()).hexdigest()
        entries = self._log.entries()
        site.policy.check_task(task, terms, spent(entries), datetime.now())
        check_course(entries, task.run, told["terms"], task.round if task.train else -1)
        models = run_folder(site.state, task.run)
        asked = masking_of(content)
        content.pop(MASKING, None)  # no business of the worker's

        def work() -> Answer:
            models.mkdir(parents=True, exist_ok=True)
            key = run_secret(site.state, task.run).hex() if terms.noise else ""
            request = Request(str(self._folder), kind, str(root or ""), str(models), key)
            found = self._worker.ask(request, content, site.policy.most_bytes + OVERHEAD)
            return site.policy.filtered(Answer.from_record(found), terms.noise)

        if terms.secure_aggregation:
            answer = self._masked(site, task, terms, asked, entries, work, told)
        else:
            (self._folder / MASKS).unlink(missing_ok=True)  # of a round that never ended
            answer = work()
            told |= _sent(answer, digest(answer.upload) if task.train else "")
        total = spent([*entries, {**told, "event": TASK, "outcome": SENT}], renewed=False).epsilon()
        told["epsilon"] = total if math.isfinite(total) else None
        return answer.to_record(task.half)

    def _masked(
        self,
        site: SiteFolder,
        task: Task,
        terms: RunTerms,
        asked: Mapping[str, Any],
        entries: Sequence[Entry],
        work: Callable[[], Answer],
        told: dict[str, Any],
    ) -> Answer:
        """The answer to a task of a run with secure aggregation, whose uploads leave only under masks."""
        secure = SecureSite(
            self._folder / MASKS, task.run, Partners(site), site.policy.secure_aggregation, terms.secure_range
        )
        stage = str(asked.get("stage", ""))
        if task.train != (stage == COLLECT):
            raise UserError("the run has secure aggregation, and this task has no masks")
        if not asked:
            secure.forget()  # the secrets of the last round
            answer = replace(work(), report={})
            told |= _sent(answer, "")
            return answer
        told["stage"] = stage

        def train() -> Answer:
            answer = work()
            told[TRAINED] = digest(answer.upload)
            return answer

        def allow(session: Session) -> None:
            if stage == UNMASK:
                check_sum(entries, task.run, task.round, session.upload, session.sum)
                told.update(sum=session.sum, summed=session.upload)
            told.pop(TRAINED, None)  # it is not refused
            told["upload"] = session.upload if stage == COLLECT else ""

        answer = secure.answer(task.round, asked, train, allow)
        told |= _sent(answer, told.get("upload", ""))
        return answer

    def _refuse(self, event: str, told: Mapping[str, Any], reason: str) -> RecordDict:
        complain(reason)
        try:
            self._write(event, {**told, "outcome": one_line(reason, MOST_REASON)})
        except UserError as error:
            complain(str(error))
        return failure(f"{self._name}: {reason}" if event == INTRODUCTION else reason)  # it is not known yet

    def _write(self, event: str, told: Mapping[str, Any]) -> None:
        """Writes a line; an introduction that repeats the line before it is skipped, since a coordinator asks often."""
        if event == INTRODUCTION:
            last = (self._log.entries() or [{}])[-1]
            if {**last, **told, "event": event} == dict(last):
                return
        self._log.append(event, **told)


def _described(terms: RunTerms) -> dict[str, Any]:
    return {name: value for name, value in asdict(terms).items() if name not in ("attack", "contribution") or value}


def _sent(answer: Answer, upload: str) -> dict[str, Any]:
    """What a line says about an answer: bytes by tensor, names of scores, and a hash of the upload, before masks."""
    parts = {"upload": answer.upload, "report": answer.report}
    tensors = {f"{part}/{name}": own.nbytes for part, found in parts.items() for name, own in found.items()}
    scores = sorted({f"{point}.{name}" for point, own in answer.metrics.items() for name in own})
    return {"bytes": tensors, "total": answer.bytes, "scores": scores, "upload": upload}
