"""The coordinator's part in secure aggregation: the four stages of a round, and the mean that they yield.

A site that drops out before its upload is missing in the mean. One that drops out after it is part of the mean: the
others can still remove its masks. If too few are left, the round is tried once more with those that answer. Sites that
have already helped to remove masks help again only for the same sum.
"""

from __future__ import annotations

import math
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fedc2i.core.errors import UserError
from fedc2i.core.params import Params
from fedc2i.flower import compat, masking
from fedc2i.flower.masking import COLLECT, LEAST, SETUP, SHARE, UNMASK, SumTerms
from fedc2i.flower.message_format import Answer, Task, masking_size

TRIES = 2  # attempts at a round
Requests = Mapping[int, Mapping[str, Any]]  # a stage's, by client
Shapes = Sequence[tuple[str, str, tuple[int, ...]]]  # name, type and shape of each tensor
Tasks = Callable[[Collection[int]], Mapping[int, Task]]  # of all who are asked, from those that train


class Ask(Protocol):
    """Sends tasks with a stage of secure aggregation, and collects the answers."""

    def __call__(self, number: int, tasks: Mapping[int, Task], requests: Requests, needed: int) -> dict[int, Answer]:
        """The answers by client; it does not end before ``needed`` are there."""


@dataclass
class SecureRound:
    """One round of a run.

    Attributes:
        run, number: which one.
        names: of the sites.
        ask: how a message gets to them.
        shapes: of an upload.
        weights: of clients in the mean.
        least: the number of sites that a mean needs.
        largest: the largest number in an upload.
        say: takes one line for a person.
        bytes_up, bytes_down: of keys and shares, from each client and to all of them.
    """

    run: str
    number: int
    names: Sequence[str]
    ask: Ask
    shapes: Shapes
    weights: Callable[[Sequence[int]], Sequence[float]]
    least: int
    largest: float
    say: Callable[[str], None]
    bytes_up: Counter[int] = field(default_factory=Counter)
    bytes_down: int = 0

    def collect(self, chosen: Collection[int], tasks: Tasks) -> dict[int, Answer]:
        """The answers to the round; those of sites that trained have the mean of all uploads in place of theirs.

        Raises:
            UserError: if the sites that answer are too few, or their masks do not cancel, twice.
        """
        problem = ""
        for attempt in range(TRIES):
            if attempt:
                self.say(f"round {self.number}: {problem}; it starts again with the sites that answer")
            try:
                return _Attempt(self, tasks).answers(chosen)
            except _AttemptError as error:
                problem = str(error)
        raise UserError(f"round {self.number}: {problem}; the same command resumes the run")


class _AttemptError(UserError):
    """An attempt at a round that may be tried again."""


class _Attempt:
    """One pass through the stages."""

    def __init__(self, round: SecureRound, tasks: Tasks) -> None:
        self._round, self._tasks = round, tasks
        self._least = max(LEAST, round.least)
        self._session = secrets.token_hex(16)
        self._signed: dict[int, tuple[str, bytes]] = {}  # by whom keys are signed, for sites that check it

    def answers(self, chosen: Collection[int]) -> dict[int, Answer]:
        terms = self._setup(chosen)
        shares = self._share(terms)
        answers = self._collect(terms, shares)
        masked = {m: own.upload for m, own in answers.items() if m in shares and _fits(own.upload, self._count)}
        self._require(len(masked), terms, "sent a masked upload")
        try:
            terms.check_weights(masked, self._least)
        except UserError as error:
            raise _AttemptError(str(error)) from None
        upload = self._unmask(terms, masked, sorted(shares.keys() - masked.keys()))
        found = {m: own for m, own in answers.items() if m not in shares}
        for m in sorted(masked):
            size = answers[m].bytes + self._round.bytes_up[m]
            found[m] = replace(answers[m], upload=upload, bytes=size, masking={})
        return found

    @property
    def _count(self) -> int:
        """Numbers in a masked upload."""
        return 1 + sum(math.prod(shape) for _, _, shape in self._round.shapes)

    def _setup(self, chosen: Collection[int]) -> SumTerms:
        """The keys of the sites that take part."""
        answers = self._stage(SETUP, {m: {} for m in chosen}, self._least)
        found = self._read(answers, key1=bytes, key2=bytes, identity=str, signature=bytes)
        self._signed = {m: (own[2], own[3]) for m, own in found.items()}
        sites, own = sorted(found), self._round
        weights = dict(zip(sites, map(float, own.weights(sites)), strict=True))
        keys = {m: (found[m][0], found[m][1]) for m in sites}
        terms = SumTerms(own.run, own.number, self._session, keys, weights, own.largest)
        terms.check(self._least)
        return terms

    def _share(self, terms: SumTerms) -> dict[int, dict[int, bytes]]:
        """Each site's shares for each of the others, encrypted."""
        sites = list(terms.keys)
        told = {
            "sites": sites,
            "keys1": [terms.keys[m][0] for m in sites],
            "keys2": [terms.keys[m][1] for m in sites],
            "weights": [terms.weights[m] for m in sites],
            "identities": [self._signed[m][0] for m in sites],
            "signatures": [self._signed[m][1] for m in sites],
        }
        found = self._read(self._stage(SHARE, dict.fromkeys(sites, told)), sites=[int], shares=[bytes])
        shares = {m: dict(zip(*own, strict=False)) for m, own in found.items()}
        shares = {m: own for m, own in shares.items() if {m, *own} == set(sites)}
        self._require(len(shares), terms, "shared their keys")
        return shares

    def _collect(self, terms: SumTerms, shares: Mapping[int, Mapping[int, bytes]]) -> dict[int, Answer]:
        """The masked uploads, with everything else that the round's tasks ask for."""
        others = {m: [k for k in shares if k != m] for m in shares}
        told = {m: {"sources": own, "shares": [shares[k][m] for k in own]} for m, own in others.items()}
        return self._stage(COLLECT, told)

    def _unmask(self, terms: SumTerms, masked: Mapping[int, Params], dropped: list[int]) -> Params:
        """The mean of the uploads."""
        active, limit = sorted(masked), masking.threshold(len(terms.keys))
        found: dict[int, list[bytes]] = {m: [] for m in (*active, *dropped)}
        told = {"active": active, "dropped": dropped}
        answers = self._read(self._stage(UNMASK, dict.fromkeys(active, told)), sites=[int], shares=[bytes])
        if len(answers) < limit:
            raise _AttemptError(f"{len(answers)} of the {limit} sites needed have helped to remove masks")
        for named, shares in answers.values():
            for m, share in dict(zip(named, shares, strict=False)).items():
                found.get(m, []).append(share)
        total: NDArray[np.int64] = np.zeros(self._count, np.int64)
        for upload in masked.values():
            total += upload[masking.UPLOAD].numpy().view(np.uint32)
        try:
            for m in active:
                total -= terms.stream(compat.secagg_secret(found[m][:limit]), self._count)
            for m in dropped:
                private = compat.secagg_secret(found[m][:limit])
                for other in active:
                    secret = compat.secagg_pair_secret(private, terms.keys[other][0])
                    total += (1 if m > other else -1) * terms.stream(secret, self._count)
            return masking.like(masking.mean(total, terms, active), self._round.shapes)
        except UserError as error:
            raise _AttemptError(str(error)) from None

    def _stage(self, name: str, told: Requests, needed: int = 0) -> dict[int, Answer]:
        """The answers to one stage."""
        own = self._round
        requests = {m: {"stage": name, "session": self._session, "site": m, **values} for m, values in told.items()}
        own.bytes_down += sum(map(masking_size, requests.values()))
        tasks = self._tasks(told.keys())
        if name == COLLECT:
            return own.ask(own.number, tasks, requests, needed)
        idle = {m: replace(tasks[m], train=False, score_received=False, score_trained=False) for m in requests}
        answers = own.ask(own.number, idle, requests, needed)
        own.bytes_up.update({m: answer.bytes for m, answer in answers.items()})
        return answers

    def _read(self, answers: Mapping[int, Answer], **kinds: type | list[type]) -> dict[int, list[Any]]:
        """What sites sent for a stage; a site that sent something else is skipped."""
        found = {}
        for m, own in answers.items():
            try:
                found[m] = masking.read(own.masking, **kinds)
            except UserError as error:
                self._round.say(f"round {self._round.number}: {self._round.names[m]} sent {error}; ignored")
        return found

    def _require(self, sites: int, terms: SumTerms, done: str) -> None:
        needed = max(self._least, masking.threshold(len(terms.keys)))
        if sites < needed:
            raise _AttemptError(f"{sites} of the {needed} sites that secure aggregation needs have {done}")


def _fits(upload: Params, count: int) -> bool:
    own = upload.get(masking.UPLOAD)
    return len(upload) == 1 and own is not None and str(own.dtype) == "torch.int32" and own.shape == (count,)
