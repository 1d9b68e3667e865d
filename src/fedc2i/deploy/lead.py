"""A whole run over real sites: wait for them, then run every seed with the driver, which resumes after a crash.

checkpoints/       the state after the last two rounds of each seed, until the run is finished
rounds/            the reports of finished rounds, until then
log.txt            one line for everything a person should know
and what every run folder holds, but for the models, which stay at the sites
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fedc2i.core.errors import UserError, one_line
from fedc2i.core.files import plugin_checksums, plugin_file, to_json, write_atomically, writing
from fedc2i.data.remote import RemoteFederation
from fedc2i.deploy.keys import pem_public
from fedc2i.deploy.run_description import describe
from fedc2i.engine import accountant
from fedc2i.engine.client import RunContext
from fedc2i.engine.records import POINTS, Point, Round
from fedc2i.flower.answer_collector import Policy
from fedc2i.flower.connections import Grid, SiteConnections
from fedc2i.flower.coordinator import Coordinator
from fedc2i.flower.enrolment import common_federation, reject_incompatible, wait_for_sites
from fedc2i.flower.message_format import Introduction
from fedc2i.flower.site import Assignment
from fedc2i.report import figures
from fedc2i.report.progress import rejected_uploads
from fedc2i.report.table import SHORT
from fedc2i.runs import driver
from fedc2i.runs.folder import Checkpoints
from fedc2i.runs.plan import Plan, prepare
from fedc2i.runs.results import Result

JOB = "job.json"  # what was asked for
_RUN = "run.json"  # who takes part, and how sites call the run


@dataclass(frozen=True)
class Job:
    """A run to be led, as one flat record.

    Attributes:
        out: the run folder; an unfinished run in it is resumed.
        method: a method's name, with options after a colon, or ``FILE.py:CLASS``.
        settings: run settings and method options by name.
        sites: the sites' names in table order, where they are known.
        count: how many sites to wait for, where names are not known.
        keys: the sites' public keys by name, where nodes are authenticated.
        classes: the classes' names; if empty, those that the sites have.
        wait: seconds to wait for the sites at the start.
        policy: how long to wait for whom in a round, and how models travel.
        local: where the folders of all sites lie, seen from ``out``, if they are all on this machine; see
            `fedc2i.deploy.local_federation`.
    """

    out: Path
    method: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    sites: tuple[str, ...] = ()
    count: int = 0
    keys: Mapping[str, str] = field(default_factory=dict)
    classes: tuple[str, ...] = ()
    wait: float = 300.0
    policy: Policy = field(default_factory=Policy)
    local: str = ""

    @property
    def digest(self) -> str:
        """Changes with what decides the numbers."""
        decided = [self.method, dict(self.settings), self.sites, self.classes, self.policy.half]
        return hashlib.sha256(json.dumps(decided, sort_keys=True, default=str).encode()).hexdigest()[:12]

    @property
    def is_unfinished(self) -> bool:
        """Whether its folder holds this very run, unfinished."""
        try:
            earlier = Job.from_json((self.out / JOB).read_text(encoding="utf-8"))
        except (OSError, ValueError, KeyError, TypeError):
            return False
        return earlier.digest == self.digest and not self.is_finished

    @property
    def is_finished(self) -> bool:
        """Whether its folder holds a finished run."""
        return (self.out / "summary.json").is_file()

    def to_json(self) -> str:
        """As text."""
        return json.dumps({**asdict(self), "out": str(self.out)}, default=str)

    @classmethod
    def from_json(cls, text: str) -> Job:
        """From text."""
        values = json.loads(text)
        values |= {"out": Path(values["out"]), "policy": Policy(**values["policy"])}
        return cls(**values | {name: tuple(values[name]) for name in ("sites", "classes")})


def lead(grid: Grid, job: Job, say: Callable[[str], None]) -> Result:
    """Runs a job to its end, from its last checkpoint if there is one.

    Raises:
        UserError: if too few sites answer, or the folder is of another run.
    """
    if job.is_finished:
        Checkpoints(job.out, 0).remove()  # a run that was killed while it ended may have left them
        raise UserError(f"{job.out}: this run is finished; choose another --out")
    say = _logged(say, job.out / "log.txt")
    try:
        return _lead(grid, job, say)
    except UserError as error:
        say(f"error: {error}")
        raise


def _lead(grid: Grid, job: Job, say: Callable[[str], None]) -> Result:
    keys = {pem_public(line): name for name, line in job.keys.items()} or None
    fleet = SiteConnections(grid, say, keys, ttl=2 * job.policy.deadline + 60)
    run, federation = _resume(job, fleet, say) or _begin(job, fleet, say)
    write_atomically(job.out / JOB, job.to_json().encode())
    reject_incompatible(fleet, federation, job.policy.min_sites)
    plan = prepare([job.method], {**job.settings, **job.policy.settings(), "device": "cpu"}, federation)[0]
    planned = accountant.cost(plan.config, len(federation.names))
    if planned is not None:
        say(f"privacy: {planned}")
    began = time.monotonic()
    result = driver.execute_by_seed(
        plan,
        job.out,
        lambda seed: _coordinator(fleet, plan, job, f"{run}-seed{seed}", seed, say),
        lambda report: say(_line(report, plan.config.rounds, time.monotonic() - began)),
        say,
        figures.draw_run,
    )
    scores = ", ".join(f"{SHORT[point]} {result.scores(point)['Avg']} %" for point in POINTS)
    say(f"finished: mean accuracy {scores}{rejected_uploads(result.refused)}")
    return result


def _coordinator(
    connections: SiteConnections, plan: Plan, job: Job, run: str, seed: int, say: Callable[[str], None]
) -> Coordinator:
    """The engine of one seed over the connected sites."""
    settings = plan.config
    assignment = Assignment(RunContext(plan.method, plan.model, settings, settings.rounds, seed), settings)
    return Coordinator(connections, plan.federation, assignment, job.policy, run, describe(plan, seed), say)


def _line(report: Round, rounds: int, elapsed: float) -> str:
    scored = [point for point in POINTS if point in report.metrics]
    scores = ", ".join(f"{SHORT[point]} {report.mean(point):.2f} %{_of(report, point)}" for point in scored)
    size = f"{report.bytes_up / 1e6:.2f} MB up and {report.bytes_down / 1e6:.2f} MB down a site"
    return (
        f"seed {report.seed}, round {report.round}/{rounds}: {len(report.participants)} sites"
        f"{f', mean accuracy {scores}' if scores else ''}; "
        f"took {report.seconds:.1f} s, {size}; {elapsed:.0f} s since the start"
    )


def _of(report: Round, point: Point) -> str:
    """How many sites a mean is over, where it is not the number of those that trained."""
    scored = sum(bool(own) for own in report.metrics[point])
    return "" if scored == len(report.participants) else f" (of {scored})"


def _begin(job: Job, fleet: SiteConnections, say: Callable[[str], None]) -> tuple[str, RemoteFederation]:
    """Waits for the sites, and writes down who they are."""
    there = wait_for_sites(fleet, job.sites, job.count, job.policy.min_sites, job.wait, say, job.policy.poll)
    names = job.sites or tuple(own.name for own in there)
    federation = common_federation(there, names, job.classes, say)
    run = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
    described = {
        "run": run,
        "job": job.digest,
        "names": names,
        "classes": federation.classes,
        "image": federation.image_shape,
        "sizes": {name: dict(own) for name, own in federation.sizes.items()},
        "files": _checksums(job),
    }
    write_atomically(job.out / _RUN, to_json(described).encode())
    return run, federation


def _resume(job: Job, fleet: SiteConnections, say: Callable[[str], None]) -> tuple[str, RemoteFederation] | None:
    """The run that was started in this folder, if there is one; waits for all its sites, not only for the first."""
    path = job.out / _RUN
    if not path.is_file():
        return None
    refuse_changed_files(job)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values["job"] != job.digest:
            raise UserError(f"{job.out}: holds a run with other settings; choose another --out")
        classes, image = tuple(values["classes"]), tuple(values["image"])
        there = [Introduction(name, own, classes, image) for name, own in values["sizes"].items()]
        run, federation = str(values["run"]), common_federation(there, values["names"], classes, say)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise UserError(f"{path}: cannot be read ({error}); choose another --out") from None
    wait_for_sites(fleet, federation.names, 0, job.policy.min_sites, job.wait, say, job.policy.poll)
    return run, federation


def refuse_changed_files(job: Job) -> None:
    """Refuses to resume a run whose method or model comes from a file that has changed since it started.

    Raises:
        UserError: with the file's name, and what to do.
    """
    try:
        earlier = json.loads((job.out / _RUN).read_text(encoding="utf-8")).get("files", {})  # old versions have none
        now = _checksums(job)
        others = [what for what, checksum in earlier.items() if now.get(what, checksum) != checksum]
    except (
        OSError,
        ValueError,
        AttributeError,
        RecursionError,
    ):  # not started, or another line says what is wrong
        return
    for what in others:
        file = one_line(plugin_file({"method": job.method, **job.settings}[what]))
        raise UserError(
            f"{job.out}: {file}, where its {what} comes from, is not what it was when the run started; put it back, "
            "or run again with another --out"
        )


def _checksums(job: Job) -> dict[str, str]:
    return plugin_checksums(job.method, job.settings.get("model"))


def _logged(say: Callable[[str], None], path: Path) -> Callable[[str], None]:
    """Lines go to the log as well, with the time."""

    def both(line: str) -> None:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {line}\n")
        say(line)

    return both
