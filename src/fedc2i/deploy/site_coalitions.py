"""Coalitions of real sites: each is an ordinary run over its members, worth the scores that they report.

No prediction of a single sample leaves a site, so values have no resamples, and their intervals are over seeds alone.
Every coalition has its own run folder, in which an interrupted run resumes; a finished one is read again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedc2i.analysis.contribution.coalitions import EVERYONE, RUNS, Array, require, require_settings, run_of
from fedc2i.analysis.contribution.measure import MOST_RUNS, measured
from fedc2i.analysis.contribution.records import Contribution
from fedc2i.analysis.contribution.shapley import MOST_EXACT, Coalition, every_coalition
from fedc2i.core.errors import UserError
from fedc2i.core.options import names
from fedc2i.data.federation import Federation
from fedc2i.data.remote import RemoteFederation
from fedc2i.deploy.enrolled_sites import enrol, enrolled
from fedc2i.deploy.job import RUN_FILE, Job
from fedc2i.engine.records import POINTS, Point
from fedc2i.methods.local import Local
from fedc2i.report.table import counted, duration, size
from fedc2i.runs import driver
from fedc2i.runs.finished_run import read_run
from fedc2i.runs.folder import slug
from fedc2i.runs.plan import Plan, parse_method, prepare
from fedc2i.runs.results import Result
from fedc2i.runs.settings import RunSettings, make
from fedc2i.training.metrics import HIGHER_IS_BETTER

SURVEY = "sites"  # the folder with what the sites said about themselves
NOTE = (
    "Real sites report scores, and no predictions of single samples: the intervals are over seeds only, and say "
    "nothing about other test samples."
)


def require_measurable(job: Job) -> None:
    """Raises a `UserError` for settings by which nothing can be measured, whoever the sites are."""
    kind, name, own = parse_method(job.method)
    config = make(kind, {**job.settings, **own, "method": name, **job.policy.settings()})
    require_settings(kind, config, clients=2)
    if config.noise or config.attack:
        raise UserError("contribution over sites needs noise=0 and attack='': it is measured by scores of all sites")
    if job.policy.secure:
        raise UserError("contribution over sites needs secure_aggregation=false: coalitions of two sites hide nothing")
    if len(config.seeds) < 2:
        raise UserError("contribution over sites needs at least 2 seeds (--seeds 0-2): its intervals are over seeds")


@dataclass
class SiteCoalitions:
    """Runs among coalitions of sites, one after the other; a `fedc2i.analysis.contribution.coalitions.Game`.

    Attributes:
        job: of everyone's run; its folder holds all runs.
        sites: those that agreed.
        plan: of everyone's run.
        start: runs a job to its end.
        say: takes one line for a person.
    """

    job: Job
    sites: RemoteFederation
    plan: Plan
    start: Callable[[Job], None]
    say: Callable[[str], None] = lambda line: None
    notes: Sequence[str] = (NOTE,)
    _found: dict[Coalition, Result] = field(default_factory=dict)
    _seconds: list[float] = field(default_factory=list)

    @classmethod
    def survey(cls, job: Job, start: Callable[[Job], None], say: Callable[[str], None]) -> SiteCoalitions:
        """Plans for the sites that agree; asks them who they are until a first coalition was run.

        The job is one that `require_measurable` accepts.

        Raises:
            UserError: if fewer than two sites agree, or the folder holds coalitions of another measurement.
        """
        policy = replace(job.policy, half=False)
        asked = replace(job, out=job.out / SURVEY, method=Local.name, settings={}, policy=policy, purpose="survey")
        ran = any((job.out / RUNS).glob(f"*/{RUN_FILE}"))
        if not ran:
            (asked.out / RUN_FILE).unlink(missing_ok=True)  # policies change, and sites come online
            start(asked)
        found = enrolled(asked, say)
        if found is None:
            raise UserError(f"{asked.out}: the sites were not asked; choose another --out")
        federation = found.federation
        for name in job.sites:
            if name not in federation.names:
                say(f"{name} takes no part: it did not answer")
            elif name not in found.agreed:
                say(f"{name} takes no part: by its policy (contribution, scores), or because its data does not fit")
        if ran and len(found.agreed) < len(job.sites):
            say("sites are not asked again, since coalitions of the others were run; another --out asks all")
        if len(found.agreed) < 2:
            raise UserError(f"{len(found.agreed)} of {len(federation.names)} sites agree to it, at least 2 are needed")
        clients = federation.select([name for name in federation.names if name in found.agreed]).clients
        players = replace(federation, clients=clients)
        settings = {**job.settings, **job.policy.settings(), "min_sites": len(players.names), "device": "cpu"}
        (plan,) = prepare([job.method], settings, players)
        require(plan)
        game = cls(job, players, plan, start, say)
        game.missing([frozenset(range(len(players.names)))])  # refuses a folder of other settings at once
        return game

    def measure(self, most_runs: int = MOST_RUNS) -> Contribution:
        """Runs what is missing; writes the result beside the runs, and into the folder of everyone's run."""
        found = measured(self, self.job.out, most_runs)
        found.write(self.everyone)
        return found

    @property
    def everyone(self) -> Path:
        """The folder of the run over all sites."""
        return self.folder(frozenset(range(len(self.plan.federation.names))))

    # Cost.

    def cost(self, most_runs: int = MOST_RUNS) -> list[str]:
        """What is about to be asked of the sites, in lines for a person; none if nothing is left to run."""
        sites, config = self.plan.federation.names, self.plan.config
        count, rounds = len(sites), len(config.seeds) * config.rounds
        if count <= MOST_EXACT:
            runs = self.missing([frozenset({0}), *every_coalition(count)])
            alone = sum(len(own) == 1 for own in runs)
            sizes = [len(own) for own in runs if len(own) > 1]
        else:  # orders pass through coalitions of every size
            alone, sizes = 1, [2 + k % (count - 1) for k in range(most_runs - 1)]
        if not alone + len(sizes):
            return []
        up, two = self._traffic(2)
        _, all_of_them = self._traffic(count)
        slope = (all_of_them - two) / max(1, count - 2)
        down = rounds * sum(members * (two + slope * (members - 2)) for members in sizes)
        each = (alone + math.ceil(sum(sizes) / count)) * len(config.seeds)
        number, most = alone + len(sizes), "" if count <= MOST_EXACT else "at most "
        length = f"{counted(len(config.seeds), 'seed')} and {counted(config.rounds, 'round')}"
        return [
            f"{count} sites: {', '.join(sites)}",
            f"{most}{number} runs over some of them, with {length}: {most}{number * rounds:,} rounds; of the runs that "
            f"a site's policy allows, this takes {most}{each}",
            f"about {size(up * rounds * sum(sizes))} up and {size(round(down))} down, all sites together",
        ]

    def _traffic(self, members: int) -> tuple[int, int]:
        """Bytes that one of these sites sends and receives in a round: of a round with blank samples here."""
        blank = Federation("blank", self.sites.clients[:members], self.sites.classes)
        one = {
            "rounds": 1,
            "epochs": 1,
            "seeds": "0",
            "evaluate_every": 0,
            "patience": 0,
            "device": "cpu",
            "workers": 1,
        }
        (plan,) = prepare([self.job.method], {**self.job.settings, **one}, blank)
        report = driver.compute(plan).rounds[-1]
        half = 2 if self.job.policy.half else 1
        return report.bytes_up // half, report.bytes_down // half

    # A game.

    @property
    def count(self) -> int:
        """Of the coalitions computed so far; all single sites are one."""
        return len(self._found)

    def has(self, coalitions: Iterable[Coalition]) -> bool:
        """Whether all of these are computed."""
        return {*map(run_of, coalitions)} <= self._found.keys()

    def missing(self, coalitions: Iterable[Coalition]) -> list[Coalition]:
        """Those still to be run, the largest first; a `UserError` if one was run with other settings."""
        found = [own for own in {*map(run_of, coalitions)} if not self._is_finished(own)]
        return sorted(found, key=lambda own: (-len(own), sorted(own)))

    def compute(self, coalitions: Iterable[Coalition]) -> None:
        """Runs those that are missing, one after the other, and reads all."""
        wanted = [own for own in {*map(run_of, coalitions)} if own not in self._found]
        jobs = self.missing(wanted)
        for number, own in enumerate(jobs):
            left = (
                f"; about {duration(sum(self._seconds) / len(self._seconds) * (len(jobs) - number))} left"
                if self._seconds
                else ""
            )
            self.say(f"run {number + 1} of {len(jobs)}: {self._words(own)}{left}")
            began = time.monotonic()
            self._run(own)
            self._seconds.append(time.monotonic() - began)
        for own in wanted:
            self._found[own] = self._read(own)

    def values(self, coalition: Coalition, receiver: int, metric: str, point: Point, label: int | None) -> Array:
        """``(seeds, 1)`` of a site's score as it reports it, higher is better; never of a single class."""
        assert label is None
        place = receiver if len(coalition) == 1 else sorted(coalition).index(receiver)
        scores = self._found[run_of(coalition)].accuracy(point, metric)[:, place, None]
        return scores if HIGHER_IS_BETTER[metric] else -scores

    def has_reached(self, coalition: Coalition, receiver: int) -> bool:
        """Never: a few seeds do not say how close two scores are."""
        return False

    def class_sizes(self, receiver: int) -> list[int]:
        """Not known: sites report neither these nor scores of single classes."""
        return []

    def results(self, coalition: Coalition) -> list[Result]:
        """The runs of all seeds."""
        found = self._found[run_of(coalition)]
        return [found.only(seed) for seed in self.plan.config.seeds]

    # Runs.

    def folder(self, coalition: Coalition) -> Path:
        """Of a coalition's run."""
        everyone = len(self.plan.federation.names)
        if len(coalition) == 1:
            name = Local.name
        elif len(coalition) == everyone:
            name = EVERYONE
        else:
            name = "-".join(str(m + 1) for m in sorted(coalition))
        return self.job.out / RUNS / slug(name)

    def _members(self, coalition: Coalition) -> tuple[str, ...]:
        everyone = self.plan.federation.names
        return everyone if len(coalition) == 1 else tuple(everyone[m] for m in sorted(coalition))

    def _words(self, coalition: Coalition) -> str:
        return "each site alone" if len(coalition) == 1 else ", ".join(self._members(coalition))

    def _job(self, coalition: Coalition) -> Job:
        """All members must take part in every round."""
        members, config = self._members(coalition), self.plan.config
        policy = replace(self.job.policy, min_sites=len(members), strict=True)
        settings: Mapping[str, Any] = self.job.settings
        method = self.job.method
        if len(coalition) == 1:
            own = {*names(RunSettings)} - {"clip"}
            method, settings = Local.name, {name: value for name, value in settings.items() if name in own}
        settings = {**settings, "evaluate_every": config.evaluate_every if config.patience else 0}
        return replace(
            self.job,
            out=self.folder(coalition),
            method=method,
            settings=settings,
            sites=members,
            classes=self.sites.classes,
            policy=policy,
            purpose="contribution",
        )

    def _is_finished(self, coalition: Coalition) -> bool:
        job = self._job(coalition)
        return enrolled(job, self.say) is not None and job.is_finished

    def _run(self, coalition: Coalition) -> None:
        job = self._job(coalition)
        if enrolled(job, self.say) is None:  # all coalitions have the classes and columns of everyone
            sizes = {name: self.sites.sizes[name] for name in job.sites}
            clients = self.sites.select(job.sites).clients
            enrol(job, replace(self.sites, clients=clients, sizes=sizes))
        self.start(job)

    def _read(self, coalition: Coalition) -> Result:
        found = read_run(self.folder(coalition))
        for point in POINTS:
            unknown = np.isnan(found.accuracy(point).sum(0)).nonzero()[0]
            if len(unknown):
                lacking = ", ".join(found.federation.names[m] for m in unknown)
                raise UserError(
                    f"{self.folder(coalition)}: no scores of {lacking}; delete this folder to run the coalition again"
                )
        return found
