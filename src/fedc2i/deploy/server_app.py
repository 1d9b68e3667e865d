"""Flower's entry point at the coordinator: waits for the sites, then runs every seed, and resumes after a crash.

checkpoints/       the state after the last two rounds of each seed, until the run is finished
rounds/            the reports of finished rounds, until then
log.txt            one line for everything a person should know
and what every run folder holds, but for the models, which stay at the sites
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid as FlowerGrid
from flwr.serverapp import ServerApp

from fedc2i.core.errors import UserError
from fedc2i.core.files import writing
from fedc2i.deploy.enrolled_sites import Enrolled, enrol, enrolled
from fedc2i.deploy.job import Job
from fedc2i.deploy.keys import pem_public
from fedc2i.deploy.run_counters import RunCounters
from fedc2i.deploy.run_description import describe
from fedc2i.engine import accountant
from fedc2i.engine.client import RunContext
from fedc2i.engine.records import POINTS, Point, Round
from fedc2i.flower import compat
from fedc2i.flower.connections import Grid, SiteConnections
from fedc2i.flower.coordinator import Coordinator
from fedc2i.flower.enrolment import common_federation, reject_incompatible, wait_for_sites
from fedc2i.flower.message_format import Introduction
from fedc2i.flower.site import Assignment
from fedc2i.report import figures
from fedc2i.report.progress import rejected_uploads
from fedc2i.report.table import SHORT, metric_words
from fedc2i.runs import driver, writer
from fedc2i.runs.plan import prepare
from fedc2i.runs.results import Result

Say = Callable[[str], None]  # takes one line for a person

compat.poll_objects(0.05)
app = ServerApp()


@app.main()
def main(grid: FlowerGrid, context: Context) -> None:
    """Runs the job; an error that the user can correct becomes one line instead of a traceback."""
    try:
        serve(grid, Job.from_config(context.run_config), lambda line: print(f"fedc2i: {line}", flush=True))
    except UserError as error:
        raise RuntimeError(str(error)) from None  # with other exceptions Flower takes a minute to notice the end


def serve(grid: Grid, job: Job, say: Say) -> None:
    """Does a job, whatever its purpose."""
    if job.purpose == "survey":
        survey(grid, job, say)
    else:
        run_job(grid, job, say)


def survey(grid: Grid, job: Job, say: Say) -> None:
    """Asks the sites who they are, and writes it down; a `UserError` if too few answer, or they do not fit together."""
    say = _logged(say, job.out / "log.txt")
    try:
        connections = _connections(grid, job, say)
        there = _wait(job, connections, job.sites, job.count, say)
        federation = common_federation(there, [own.name for own in there], job.classes, say)
        reject_incompatible(connections, federation, job.policy.min_sites)
    except UserError as error:
        say(f"error: {error}")
        raise
    enrol(job, federation, [own.name for own in there if own.contribution and own.name in connections.sites])


def run_job(grid: Grid, job: Job, say: Say) -> Result:
    """Runs a job to its end, from its last checkpoint if there is one.

    Raises a `UserError` if too few sites answer, or the folder is of another run.
    """
    if job.is_finished:
        writer.remove(job.out)  # a run that was killed while it ended may have left them
        raise UserError(f"{job.out}: this run is finished; choose another --out")
    say = _logged(say, job.out / "log.txt")
    try:
        return _run_job(grid, job, say)
    except UserError as error:
        say(f"error: {error}")
        raise


def _run_job(grid: Grid, job: Job, say: Say) -> Result:
    connections = _connections(grid, job, say)
    sites = _resume(job, connections, say) or _begin(job, connections, say)
    run, federation = sites.run, sites.federation
    job.write()
    reject_incompatible(connections, federation, job.policy.min_sites)
    plan = prepare([job.method], {**job.settings, **job.policy.settings(), "device": "cpu"}, federation)[0]
    planned = accountant.cost(plan.config, len(federation.names), released=True)
    if planned is not None:
        say(f"privacy: {planned}")
    if job.policy.secure:
        say("secure aggregation: uploads are masked, and only their mean is seen here; norm_bound is not checked")
    began, metric = time.monotonic(), plan.config.metric

    def coordinator(seed: int) -> Coordinator:
        context = RunContext(plan.method, plan.model, plan.config, plan.config.rounds, seed)
        work, setup = Assignment(context, plan.config), describe(plan, seed, job.purpose == "contribution")
        return Coordinator(connections, federation, work, job.policy, f"{run}-seed{seed}", setup, say)

    counters = RunCounters(len(federation.names))
    counters.write(job.out)

    def report_round(report: Round) -> None:
        counters.add(report)
        counters.write(job.out)
        say(_line(report, plan.config.rounds, time.monotonic() - began, metric))

    result = driver.execute_by_seed(plan, job.out, coordinator, report_round, say, figures.draw_run)
    words = metric_words(metric)
    scores = ", ".join(f"{SHORT[point]} {result.scores(point, metric)['Avg']}{words.unit}" for point in POINTS)
    known = any(own for report in result.rounds for metrics in report.metrics.values() for own in metrics)
    found = f"mean {words.name} {scores}" if known else "the sites' policies let no scores leave"
    say(f"finished: {found}{rejected_uploads(result.refused)}")
    return result


def _connections(grid: Grid, job: Job, say: Say) -> SiteConnections:
    keys = {pem_public(line): name for name, line in job.keys.items()} or None
    return SiteConnections(grid, say, keys, ttl=2 * job.policy.deadline + 60)


def _line(report: Round, rounds: int, elapsed: float, metric: str) -> str:
    scored = [point for point in POINTS if any(report.metrics.get(point, ()))]
    words, means = metric_words(metric), {point: report.mean(point, metric) for point in scored}
    scores = ", ".join(
        f"{SHORT[point]} {mean:.{words.digits}f}{words.unit}{_of(report, point)}" for point, mean in means.items()
    )
    size = f"{report.bytes_up / 1e6:.2f} MB up and {report.bytes_down / 1e6:.2f} MB down a site"
    return (
        f"seed {report.seed}, round {report.round}/{rounds}: {len(report.participants)} sites"
        f"{f', mean {words.name} {scores}' if scores else ''}; "
        f"took {report.seconds:.1f} s, {size}; {elapsed:.0f} s since the start"
    )


def _of(report: Round, point: Point) -> str:
    """How many sites a mean is over, where it is not the number of those that trained."""
    scored = sum(bool(own) for own in report.metrics[point])
    return "" if scored == len(report.participants) else f" (of {scored})"


def _begin(job: Job, connections: SiteConnections, say: Say) -> Enrolled:
    """Waits for the sites, and writes down who they are."""
    there = _wait(job, connections, job.sites, job.count, say)
    names = job.sites or tuple(own.name for own in there)
    return enrol(job, common_federation(there, names, job.classes, say))


def _resume(job: Job, connections: SiteConnections, say: Say) -> Enrolled | None:
    """The run that was started in this folder, if there is one; waits for all its sites, not only for the first."""
    found = enrolled(job, say)
    if found is not None:
        _wait(job, connections, found.federation.names, 0, say)
    return found


def _wait(job: Job, connections: SiteConnections, names: Sequence[str], count: int, say: Say) -> list[Introduction]:
    return wait_for_sites(connections, names, count, job.policy.min_sites, job.wait, say, job.policy.poll)


def _logged(say: Say, path: Path) -> Say:
    """Lines go to the log as well, with the time."""

    def both(line: str) -> None:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {line}\n")
        say(line)

    return both
