"""A site's policy: what a run may ask of the site, as its people wrote it into ``site.toml``.

It is read again for every message, and checked at the site, before a task is done and before its answer leaves.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any, Literal, get_args, get_origin

from fedc2i.core.errors import UserError, one_line
from fedc2i.core.files import is_plugin
from fedc2i.core.options import describe, type_hints
from fedc2i.deploy.run_description import RunTerms
from fedc2i.engine import accountant
from fedc2i.engine.clip_noise import COUNTS
from fedc2i.flower.masking import LEAST
from fedc2i.flower.message_format import Answer, Task
from fedc2i.methods.messages import model_name

ALL = "*"
AGAIN = 3  # different uploads that a run may ask for in one round: a coordinator may crash and resume
PROTOTYPES = ("prototypes", "reference", "variance")  # means and spreads of features by class
_HOURS = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)")

COMMENTED = """
[policy]  # what a run may ask of this site; the site checks it, and refuses everything else
methods = ["*"]             # names of installed methods, such as ["fedavg", "fedc2i"]; "*": all of them
models = ["*"]              # the same for models
files = "approved"          # method and model files: "approved" (once `fedc2i site approve` was called) or "never"
sandbox = "required"        # such files without a sandbox: "required" refuses them, "optional" runs them
largest_upload = 256.0      # MB in one answer
largest_clip = 0.0          # uploads must be clipped to this norm or a smaller one; 0: they need not be
least_noise = 0.0           # noise multiplier; above 0 also refuses files, whose code could leave the noise out
scores = "without-noise"    # accuracies and losses leave: "always", "without-noise" or "never"
class_counts = false        # whether counts of samples by class, and which classes there are, may leave
prototypes = false          # whether means of features by class may leave
secure_aggregation = 0      # uploads leave only masked, in a mean of this many sites (3 at least); 0: unmasked, too
partners = []               # fingerprints (SHA256:...) of other sites' keys; uploads are added up with theirs alone
contribution = false        # whether contributions of sites may be measured with it; each run for that counts in `runs`
attacks = false             # whether a run may make this site attack it, for rehearsals
runs = 100                  # runs (each seed is one) until `fedc2i site renew`; 0: no limit
epsilon = 0.0               # total ε until `fedc2i site renew`; above 0 also refuses uploads without noise
hours = ""                  # when tasks are done, in local time, such as "18:00-06:00"; "": always
"""


@dataclass(frozen=True)
class Spent:
    """What has left the site since a person renewed its policy."""

    runs: tuple[str, ...] = ()
    noises: tuple[float, ...] = ()  # of every different upload; 0 for one without noise

    def epsilon(self, further: Sequence[float] = ()) -> float:
        """ε of all uploads together; infinite if one has no noise."""
        return accountant.composed((*self.noises, *further))

    def __str__(self) -> str:
        total = self.epsilon()
        cost = f"ε = {total:.4g} at δ = 1e-05" if math.isfinite(total) else "no ε, since some have no noise"
        return f"{len(self.runs)} runs, {len(self.noises)} uploads, {cost}"


@dataclass(frozen=True)
class SitePolicy:
    """See `COMMENTED`."""

    methods: tuple[str, ...] = (ALL,)
    models: tuple[str, ...] = (ALL,)
    files: Literal["approved", "never"] = "approved"
    sandbox: Literal["required", "optional"] = "required"
    largest_upload: float = 256.0
    largest_clip: float = 0.0
    least_noise: float = 0.0
    scores: Literal["always", "without-noise", "never"] = "without-noise"
    class_counts: bool = False
    prototypes: bool = False
    secure_aggregation: int = 0
    partners: tuple[str, ...] = ()
    contribution: bool = False
    attacks: bool = False
    runs: int = 100
    epsilon: float = 0.0
    hours: str = ""

    @classmethod
    def read(cls, values: Mapping[str, Any], where: str) -> SitePolicy:
        """From the table ``policy`` of ``site.toml``.

        Raises:
            UserError: for an unknown name, or a value that does not fit.
        """
        hints = type_hints(cls)
        for name, value in values.items():
            if name not in hints:
                raise UserError(f"{where}: policy has no '{one_line(name, 60)}', allowed are {', '.join(hints)}")
            if not _fits(value, hints[name]):
                raise UserError(f"{where}: policy.{name} must be {describe(hints[name])}, got '{one_line(value, 60)}'")
        given: dict[str, Any] = {name: tuple(own) if isinstance(own, list) else own for name, own in values.items()}
        made = cls(**given)
        if made.hours and not _HOURS.fullmatch(made.hours):
            raise UserError(f"{where}: policy.hours must be such as 18:00-06:00, got '{one_line(made.hours, 60)}'")
        if 0 < made.secure_aggregation < LEAST:
            raise UserError(f"{where}: policy.secure_aggregation must be {LEAST} or more sites, or 0")
        if made.partners and not made.secure_aggregation:
            raise UserError(f"{where}: policy.partners needs policy.secure_aggregation = {LEAST} or more")
        for partner in made.partners:
            if not re.fullmatch(r"SHA256:[A-Za-z0-9+/]{43}", partner):
                shown = one_line(partner, 60)
                raise UserError(f"{where}: policy.partners must be as `fedc2i coordinator sites` shows, got '{shown}'")
        return made

    def to_toml(self) -> dict[str, Any]:
        """As the table in ``site.toml``."""
        return {
            own.name: list(value) if isinstance(value := getattr(self, own.name), tuple) else value
            for own in fields(self)
        }

    @property
    def most_bytes(self) -> int:
        """In one answer."""
        return int(self.largest_upload * 1e6)

    # Before a task

    def check_code(self, files: Sequence[str], lacks: Sequence[str]) -> None:
        """Raises a `UserError` if a run may not bring these files, given what the machine lacks for a sandbox."""
        if not files:
            return
        named = ", ".join(files)
        if self.files == "never":
            raise UserError(f"its policy allows no method or model from a file (files), and the run has {named}")
        if self.least_noise:
            raise UserError(f"its policy asks for noise (least_noise), which the code in {named} could leave out")
        if self.secure_aggregation:
            raise UserError(
                f"its policy asks for masked uploads (secure_aggregation), which {named} could evade by scores"
            )
        if lacks and self.sandbox == "required":
            raise UserError(f"its policy asks for a sandbox for {named}, and its machine lacks {', '.join(lacks)}")

    def check_task(self, task: Task, terms: RunTerms, spent: Spent, now: datetime) -> None:
        """Raises a `UserError` with the reason if a task is refused."""
        for name, allowed, wanted in (("methods", self.methods, terms.method), ("models", self.models, terms.model)):
            if not is_plugin(wanted) and ALL not in allowed and wanted not in allowed:
                raise UserError(f"its policy allows the {name} {', '.join(allowed) or 'none'}, not '{wanted}'")
        if self.largest_clip and not 0 < terms.clip <= self.largest_clip:
            raise UserError(f"its policy asks for clip of at most {self.largest_clip:g}, the run has {terms.clip:g}")
        if not terms.noise >= self.least_noise:
            raise UserError(f"its policy asks for noise of at least {self.least_noise:g}, the run has {terms.noise:g}")
        if self.secure_aggregation and not terms.secure_aggregation:
            raise UserError(
                "its policy lets uploads leave only masked (secure_aggregation); the run needs --secure-aggregation"
            )
        if terms.contribution and not self.contribution:
            raise UserError("its policy lets nobody measure contributions with it (contribution)")
        if terms.contribution and self._hides_scores(terms.noise):
            raise UserError("its policy lets no scores leave (scores), and contributions are measured by scores")
        if terms.attack and not self.attacks:
            raise UserError("its policy allows no run with attack")
        if self.hours and not self._is_open(now):
            raise UserError(f"its policy allows tasks from {self.hours.replace('-', ' to ')}, it is {now:%H:%M} there")
        if self.runs and task.run not in spent.runs and len(spent.runs) >= self.runs:
            raise UserError(f"its policy allows {self.runs} runs, which are used up; `fedc2i site renew` at the site")
        if task.train and task.round > terms.rounds:
            raise UserError(f"round {task.round} of a run with {terms.rounds} rounds")
        if task.train and self.epsilon:
            total = spent.epsilon([terms.noise])
            if not total <= self.epsilon:
                raise UserError(
                    f"its policy allows ε = {self.epsilon:g} in all, and with this upload it would be {total:.4g}; "
                    "`fedc2i site renew` at the site"
                )

    @property
    def agrees(self) -> bool:
        """Whether contributions may be measured with this site: its scores leave, and uploads without mask or noise."""
        protected = self.secure_aggregation or self.least_noise or self.epsilon
        return self.contribution and not protected and not self._hides_scores(0.0)

    def _hides_scores(self, noise: float) -> bool:
        return self.scores == "never" or (self.scores == "without-noise" and noise > 0)

    def _is_open(self, now: datetime) -> bool:
        begin, end = self.hours.split("-")
        clock = f"{now:%H:%M}"
        return begin <= clock < end if begin <= end else clock >= begin or clock < end

    # Before an answer

    def filtered(self, answer: Answer, noise: float) -> Answer:
        """The answer without scores that may not leave.

        Raises:
            UserError: if something else in it may not leave.
        """
        names = {name: model_name(name) for name in answer.upload}
        counts = [name for name, plain in names.items() if plain in COUNTS]
        if counts and not self.class_counts:
            raise UserError(
                f"its policy lets no class counts leave (class_counts), the method sends {', '.join(counts)}"
            )
        means = [name for name, plain in names.items() if plain in PROTOTYPES]
        if means and not self.prototypes:
            raise UserError(f"its policy lets no prototypes leave (prototypes), the method sends {', '.join(means)}")
        if answer.bytes > self.most_bytes:
            raise UserError(
                f"its policy allows {self.largest_upload:g} MB in an answer, this has {answer.bytes / 1e6:g}"
            )
        return Answer(answer.upload, answer.report, {}, answer.bytes) if self._hides_scores(noise) else answer


def _fits(value: Any, kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if get_origin(kind) is tuple:
        return isinstance(value, list) and all(isinstance(entry, str) for entry in value)
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool)
    if kind is float:
        return isinstance(value, int | float) and 0 <= value < float("inf")
    return isinstance(value, kind) and (kind is not int or value >= 0)


OPEN = SitePolicy(
    scores="always",
    class_counts=True,
    prototypes=True,
    contribution=True,
    attacks=True,
    runs=0,
    largest_upload=1e6,
)
