"""The one way from a plan to a result: start or resume, compute with an engine, and write the run folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from fedc2i.engine.records import Round
from fedc2i.engine.simulator import simulate
from fedc2i.engine.state import OnState, ResumePoint, check_state, state_size
from fedc2i.runs.checkpoint import Checkpoints
from fedc2i.runs.folder import RunFolder
from fedc2i.runs.plan import Observer, Plan
from fedc2i.runs.results import Result

Draw = Callable[[Result, Path], None]  # adds figures to the folder of a finished run


def execute(
    plan: Plan,
    folder: Path | None = None,
    observer: Observer | None = None,
    draw: Draw = lambda result, folder: None,
) -> Result:
    """Runs every seed; with a folder, writes the run into it, and resumes the run that was interrupted there."""
    if folder is None:
        return compute(plan, observer)
    result = advance(plan, folder, observer)
    draw(result, folder)
    RunFolder(folder, plan.federation.names).finish(result)
    checkpoints_of(plan, folder).remove()
    return result


def advance(plan: Plan, folder: Path, observer: Observer | None = None) -> Result:
    """Computes all rounds that a folder lacks, with checkpoints; what a finished run adds is not written.

    Raises:
        UserError: if there are checkpoints, and the run cannot resume from any of them.
    """
    files, checkpoints = RunFolder(folder, plan.federation.names), checkpoints_of(plan, folder)
    run = plan.method, plan.model, plan.federation, plan.config, plan.config.seeds
    start, reports = checkpoints.latest(plan.config.seeds, partial(check_state, *run)) or (None, [])
    checkpoints.clean()
    checkpoints.begin(plan.fingerprint)  # first: a folder with a config.toml can be resumed
    files.begin(plan.config)
    say = getattr(observer, "say", lambda line: None)
    if start is not None:
        say(f"{folder} resumes after round {start.round}")
    checkpoints.expect(checkpoint_size(plan), say)
    files.restart(reports)

    def record(report: Round) -> None:
        checkpoints.record(report)
        files.record(report)

    return compute(plan, observer, record, checkpoints.save, start, reports)


def compute(
    plan: Plan,
    observer: Observer | None = None,
    record: Callable[[Round], None] = lambda report: None,
    keep: OnState | None = None,
    start: ResumePoint | None = None,
    reports: Sequence[Round] = (),
) -> Result:
    """Runs all seeds on the plan's engine and writes nothing itself.

    Args:
        plan: what to run.
        observer: watches the run.
        record: is given every report as it comes.
        keep: is given the state after every round, by engines that have one.
        start: the state to resume from.
        reports: of the rounds up to there.
    """
    plan.require_engine()
    config = plan.config
    result = Result(plan.method, config, plan.federation, plan.label, plan.key)

    def on_round(report: Round) -> None:
        result.rounds.append(report)
        record(report)
        if observer is not None:
            observer.round(report)

    result.rounds += reports
    if observer is not None:
        observer.begin(result)
        for report in () if start is None else start.last.values():
            observer.round(report)
    on_client = None if observer is None else observer.client
    run = plan.method, plan.model, plan.federation, config, config.seeds
    if config.engine == "flower-sim":
        from fedc2i.flower import simulation  # an optional extra
        from fedc2i.flower.answer_collector import Policy

        policy = Policy(config.deadline, config.min_sites, config.wire == "float16", poll=0.05)
        say = getattr(observer, "say", lambda line: None)
        simulation.federate(*run, policy, config.ray_address, config.torch_device(), on_round, on_client, say)
    else:
        result.outcomes = simulate(*run, config.torch_device(), on_round, on_client, keep, start)
    result.rounds.sort(key=lambda report: config.seeds.index(report.seed))
    return result


def checkpoints_of(plan: Plan, folder: Path) -> Checkpoints:
    """The checkpoints of a plan's run; engines other than the simulator have none."""
    return Checkpoints(folder, plan.config.checkpoint_every if plan.config.engine == "inprocess" else 0)


def checkpoint_size(plan: Plan) -> int:
    """About how many bytes a checkpoint of all seeds has."""
    return state_size(plan.method, plan.model, plan.federation, plan.config, plan.config.seeds)
