"""A site's part in secure aggregation: its secrets of a round, and what it refuses to do with them.

A site answers each stage of a round once. Asked again, since a message was lost, it sends the same reply: two uploads
under one mask would show their difference.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from flwr.app import ConfigRecord, RecordDict

from fedc2i.core.errors import UserError, one_line
from fedc2i.core.files import write_atomically
from fedc2i.core.params import Params
from fedc2i.flower import compat, masking
from fedc2i.flower.masking import COLLECT, LEAST, SETUP, SHARE, STAGES, SumTerms
from fedc2i.flower.message_format import Answer, masking_size
from fedc2i.flower.site import complain

OWN = "this site"  # its identity, in its own log
_PLAIN, _REPLY = "session", "reply"  # records of the file, beside Flower's


@dataclass(frozen=True)
class Session:
    """One attempt at a round, as the site remembers it between messages.

    Attributes:
        run, round, token: which one.
        site: the site's number in the run.
        stage: the last one that was answered.
        state: Flower's record with the site's secrets; empty once they have served.
        reply: the last one.
        terms: what all sites agree on, from stage ``share`` on.
        identities: of the sites by number, from stage ``share`` on; numbers are the coordinator's choice.
        sources: whose masks are in the site's upload, from stage ``collect`` on.
        upload: the hash of the upload before masks, from stage ``collect`` on.
        active: the sites in the sum, from stage ``unmask`` on.
    """

    run: str
    round: int
    token: str
    site: int
    stage: str
    state: RecordDict
    reply: Answer
    terms: SumTerms | None = None
    identities: Mapping[int, str] = field(default_factory=dict)
    sources: tuple[int, ...] = ()
    upload: str = ""
    active: tuple[int, ...] = ()

    @property
    def sum(self) -> list[str]:
        """The identities of the sites in the sum."""
        return sorted(self.identities[site] for site in self.active)

    def to_bytes(self) -> bytes:
        """As a file."""
        own = {"run": self.run, "round": self.round, "token": self.token, "site": self.site, "stage": self.stage}
        told: dict[str, Any] = {**own, "upload": self.upload, "terms": ""}
        told |= {"sources": list(self.sources), "active": list(self.active)}
        if (terms := self.terms) is not None:
            keys = [[site, *(key.hex() for key in pair)] for site, pair in terms.keys.items()]
            told["terms"] = json.dumps(
                [keys, list(terms.weights.items()), terms.largest, list(self.identities.items())]
            )
        reply = ConfigRecord({"bytes": compat.to_bytes(self.reply.to_record(False))})
        return compat.to_bytes(RecordDict({**self.state, _PLAIN: ConfigRecord(told), _REPLY: reply}))

    @classmethod
    def from_bytes(cls, content: bytes) -> Session:
        """Reads what `to_bytes` made."""
        state = compat.from_bytes(content)
        told, reply = dict(state.pop(_PLAIN)), state.pop(_REPLY)
        text, sources, active = str(told.pop("terms")), tuple(told.pop("sources")), tuple(told.pop("active"))
        terms, identities = None, []
        if text:
            listed, weights, largest, identities = json.loads(text)
            keys = {site: (bytes.fromhex(first), bytes.fromhex(second)) for site, first, second in listed}
            terms = SumTerms(told["run"], told["round"], told["token"], keys, dict(weights), largest)
        answer = Answer.from_record(compat.from_bytes(reply["bytes"]))
        found = cls(**told, state=state, reply=answer, terms=terms, identities=dict(identities))
        return replace(found, sources=sources, active=active)


class Signatures(Protocol):
    """How a site proves that keys are its own, and whether it asks others for a proof."""

    def signed(self, content: bytes) -> tuple[str, bytes]:
        """The site's public key, and its signature."""

    def check(self, others: Sequence[tuple[str, bytes, bytes]]) -> list[str]:
        """The identities of the others, each given as a public key with signature and content.

        Raises:
            UserError: if one of them may not take part.
        """


class SecureSite:
    """A site's part in the rounds of a run; its secrets are in one file, of the present round only."""

    def __init__(self, file: Path, run: str, signatures: Signatures, least: int = LEAST, largest: float = 64.0) -> None:
        """``least`` is the number of sites that a sum needs, by the site's policy, ``largest`` the run's range."""
        self._file, self._run, self._signatures = file, run, signatures
        self._least, self._largest = max(LEAST, least), largest

    def _statement(self, round: int, token: str, site: int, keys: tuple[bytes, bytes]) -> bytes:
        """What a site signs: that these are its keys for this attempt at a round."""
        return json.dumps([self._run, round, token, site, *(key.hex() for key in keys)]).encode()

    def forget(self) -> None:
        """Removes all secrets."""
        self._file.unlink(missing_ok=True)

    def answer(
        self,
        round: int,
        asked: Mapping[str, Any],
        train: Callable[[], Answer],
        allow: Callable[[Session], None] = lambda session: None,
    ) -> Answer:
        """The reply to a stage.

        Args:
            round: its number.
            asked: the stage, and what belongs to it.
            train: does the round's task and gives the upload without masks.
            allow: called before a reply leaves, also one that is repeated; raises a `UserError` to keep it here.

        Raises:
            UserError: if the site refuses.
        """
        stage, token, site = masking.read(asked, stage=str, session=str, site=int)
        if stage not in STAGES or not 0 <= site < masking.MOST:
            raise UserError(f"secure aggregation has no stage '{one_line(stage, 20)}' for site {site}")
        known = self._known(round, token)
        if known is not None and known.stage == stage:
            allow(known)
            return known.reply
        if stage == SETUP:
            state = RecordDict()
            pair = compat.secagg_setup(state, site)
            public, signature = self._signatures.signed(self._statement(round, token, site, pair))
            reply = _reply(key1=pair[0], key2=pair[1], identity=public, signature=signature)
            return self._keep(Session(self._run, round, token, site, stage, state, reply))
        if known is None or STAGES.index(known.stage) + 1 != STAGES.index(stage):
            raise UserError(f"this site has no keys for stage '{stage}' of round {round}; the round must start again")
        if stage == COLLECT:
            after = self._collect(known, asked, train)
        else:
            after = self._share(known, asked) if stage == SHARE else self._unmask(known, asked)
        allow(after)
        return self._keep(replace(after, stage=stage))

    def _share(self, own: Session, asked: Mapping[str, Any]) -> Session:
        sites, first, second, weights = masking.read(asked, sites=[int], keys1=[bytes], keys2=[bytes], weights=[float])
        keys = masking.by_site(sites, first, second)
        terms = SumTerms(self._run, own.round, own.token, keys, masking.by_site(sites, weights), self._largest)
        terms.check(self._least)
        if own.site not in keys:
            raise UserError("secure aggregation without this site's own key")
        signed = masking.by_site(sites, *masking.read(asked, identities=[str], signatures=[bytes]))
        others = [m for m in sites if m != own.site]
        statements = [(*signed[m], self._statement(own.round, own.token, m, keys[m])) for m in others]
        identities = dict(zip(others, self._signatures.check(statements), strict=True)) | {own.site: OWN}
        limit = masking.threshold(len(keys))
        to, shares = compat.secagg_share(own.state, own.site, keys, limit, terms.levels)
        return replace(own, terms=terms, identities=identities, reply=_reply(sites=to, shares=shares))

    def _collect(self, own: Session, asked: Mapping[str, Any], train: Callable[[], Answer]) -> Session:
        terms = _agreed(own)
        sources, shares = masking.read(asked, sources=[int], shares=[bytes])
        found = masking.by_site(sources, shares)
        if not found.keys() <= terms.keys.keys() - {own.site}:
            raise UserError("secure aggregation with shares of sites that take no part")
        self._require(len(found) + 1, terms)
        answer = train()
        if reason := masking.outside(answer.upload, terms.largest):
            complain(reason)  # the coordinator chose the range: told more, it could read the upload number by number
            raise UserError(
                f"its upload has a number that is not finite, or outside of the range of {terms.largest:g}; the site's "
                "own log names it, --set secure_range=R allows larger ones"
            )
        numbers = masking.quantised(answer.upload, terms, own.site)
        masked = compat.secagg_mask(own.state, own.site, sources, shares, numbers, terms.stream)
        tensor = torch.from_numpy(masked.astype(np.uint32).view(np.int32))
        reply = Answer({masking.UPLOAD: tensor}, {}, answer.metrics, tensor.nbytes)
        return replace(own, sources=tuple(sources), upload=digest(answer.upload), reply=reply)

    def _unmask(self, own: Session, asked: Mapping[str, Any]) -> Session:
        terms = _agreed(own)
        active, dropped = masking.read(asked, active=[int], dropped=[int])
        named, known = [*active, *dropped], {*own.sources, own.site}
        if len(set(named)) != len(named):
            raise UserError(
                "the coordinator names a site twice, as in the sum or dropped out; this would show its upload"
            )
        if set(named) != known or own.site not in active:
            raise UserError("the coordinator names other sites than those whose masks are in the sum")
        self._require(len(active), terms)
        terms.check_weights(active, self._least)
        sites, shares = compat.secagg_unmask(own.state, own.site, active, dropped)
        reply = _reply(sites=sites, shares=shares)
        return replace(own, state=RecordDict(), active=tuple(active), reply=reply)  # the secrets have served

    def _require(self, sites: int, terms: SumTerms) -> None:
        needed = max(self._least, masking.threshold(len(terms.keys)))
        if sites < needed:
            raise UserError(f"a sum of {sites} sites; this one takes part if there are at least {needed}")

    def _known(self, round: int, token: str) -> Session | None:
        """The present attempt, if the message belongs to it."""
        try:
            found = Session.from_bytes(self._file.read_bytes())
        except FileNotFoundError:
            return None
        except Exception:  # damaged: whatever Flower or JSON raise
            self.forget()
            return None
        return found if (found.run, found.round, found.token) == (self._run, round, token) else None

    def _keep(self, session: Session) -> Answer:
        write_atomically(self._file, session.to_bytes(), mode=0o600)
        return session.reply


def digest(upload: Params) -> str:
    """The SHA-256 of an upload; empty if there is none."""
    found = hashlib.sha256()
    for name, tensor in sorted(upload.items()):
        found.update(f"|{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode() + tensor.numpy().tobytes())
    return found.hexdigest() if upload else ""


def _reply(**values: Any) -> Answer:
    return Answer(bytes=masking_size(values), masking=values)


def _agreed(own: Session) -> SumTerms:
    assert own.terms is not None  # since stage `share`
    return own.terms
