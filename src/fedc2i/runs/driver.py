"""The one way from a plan to a result: start or resume, compute with an engine, and write the run folder.

`execute` runs all seeds side by side in the simulator. `execute_by_seed` runs one seed after the other, with an engine
such as the coordinator of real sites; each seed then has its own checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from fedc2i.core.files import own_code, write_atomically
from fedc2i.engine import checkpoint
from fedc2i.engine.checkpoint import Checkpoint, OnState, ResumePoint, State, state_size
from fedc2i.engine.records import POINTS, Outcome, Predictions, Round
from fedc2i.engine.simulator import simulate
from fedc2i.runs import writer
from fedc2i.runs.folder import RunFolder, ask, asked, read_reports, reports_folder, write_report
from fedc2i.runs.plan import Observer, Plan, sayer
from fedc2i.runs.results import Result
from fedc2i.runs.writer import RunWriter, states_folder

Draw = Callable[[Result, Path], None]  # adds figures to the folder of a finished run


class SeedEngine(Protocol):
    """An engine for one seed, whose state can be saved and restored between two rounds."""

    def checkpoint(self) -> Checkpoint | None:
        """The state after the last round; None before the first."""
        ...

    def restore(self, saved: Checkpoint) -> None:
        """Continues after a checkpoint of the same run."""
        ...

    def rounds(self, collected: Callable[[], None], asking: Callable[[int, str], bool]) -> Iterator[Round]:
        """Computes all rounds that are left.

        Args:
            collected: called when the state after a round is complete.
            asking: called before uploads with noise are asked for, with the round and a digest of the answers so far;
                returns whether the round was asked for before with another digest.
        """
        ...


def execute(
    plan: Plan,
    folder: Path | None = None,
    observer: Observer | None = None,
    draw: Draw = lambda result, folder: None,
) -> Result:
    """Runs every seed; with a folder, writes the run into it, and resumes the run that was interrupted there."""
    with own_code(plan.config.method, plan.config.model):
        result = compute(plan, observer) if folder is None else advance(plan, folder, observer)
        result.predictions = test_predictions(plan, result.outcomes)
    if folder is None:
        return result
    draw(result, folder)
    RunFolder(folder, plan.federation.names).finish(result)
    writer.remove(folder)
    return result


def advance(plan: Plan, folder: Path, observer: Observer | None = None) -> Result:
    """Computes all rounds that a folder lacks, with checkpoints; what a finished run adds is not written.

    Raises:
        UserError: if there are checkpoints, and the run cannot resume from any of them.
    """
    files, seconds = RunFolder(folder, plan.federation.names), _seconds(plan)
    say = sayer(observer)
    resume, reports = latest(plan, folder) or (None, [])
    if resume is not None:
        say(f"{folder} resumes after round {resume.round}")
    size = state_size(*plan.parts)
    writer.begin(folder, plan.fingerprint, size, seconds, say)  # first: a folder with config.toml can be resumed
    files.begin(plan.config)
    files.restart(reports)
    with RunWriter(files, seconds) as writing:
        return compute(plan, observer, writing.record, on_state=writing.save, resume=resume, reports=reports)


def latest(plan: Plan, folder: Path) -> tuple[ResumePoint, list[Round]] | None:
    """The state to resume from, with the reports up to there; None if the run has to start.

    Raises:
        UserError: if there are checkpoints, and the run cannot resume from any of them.
    """

    def require_fit(state: State, number: int) -> None:
        from fedc2i.engine.checkpoint_check import check_state  # for a run that resumes

        check_state(*plan.parts, state, number)

    return writer.latest(folder, plan.config.seeds, require_fit)


def _seconds(plan: Plan) -> float | None:
    """The time between checkpoints; engines other than the simulator have none."""
    return plan.config.checkpoint_seconds if plan.config.engine == "inprocess" else None


def compute(
    plan: Plan,
    observer: Observer | None = None,
    on_round: Callable[[Round], None] = lambda report: None,
    on_state: OnState | None = None,
    resume: ResumePoint | None = None,
    reports: Sequence[Round] = (),
) -> Result:
    """Runs all seeds on the plan's engine and writes nothing itself.

    Args:
        plan: what to run.
        observer: watches the run.
        on_round: is given every report at once.
        on_state: is called after every round by engines that have a state.
        resume: the state to resume from.
        reports: of the rounds up to there.
    """
    plan.require_engine()
    config, result = plan.config, plan.empty_result()
    work = plan.on_features(observer)

    def take(report: Round) -> None:
        result.rounds.append(report)
        on_round(report)
        if observer is not None:
            observer.round(report)

    result.rounds += reports
    if observer is not None:
        observer.begin(result)
        for report in () if resume is None else resume.last.values():
            observer.round(report)
    on_client = None if observer is None else observer.client
    if config.engine == "flower-sim":
        from fedc2i.flower import simulation  # an optional extra
        from fedc2i.flower.answer_collector import Policy

        policy = Policy(config.deadline, config.min_sites, config.wire == "float16", poll=0.05)
        how = config.ray_address, config.torch_device(), take, on_client, sayer(observer)
        simulation.federate(*work.parts, policy, *how)
    else:
        device = config.torch_device()
        before = _kernel_uses(device)
        result.outcomes = simulate(*work.parts, device, take, on_client, on_state, resume)
        result.own_kernels = _kernel_uses(device) > before if device.type == "cuda" else None
    result.rounds.sort(key=lambda report: config.seeds.index(report.seed))
    return result


def _kernel_uses(device: torch.device) -> int:
    """How often layers were computed by our own kernels in this process; 0 without a GPU."""
    if device.type != "cuda":
        return 0
    from fedc2i.engine.executors.stacked import kernel_uses  # a run on a CPU does without

    return kernel_uses.uses()


def test_predictions(plan: Plan, outcomes: Mapping[int, Outcome]) -> Predictions | None:
    """What the last models predict for the test samples; None without models here, or for very many samples."""
    if not outcomes or not all(own.logits for own in outcomes.values()):
        return None
    clients = plan.federation.clients
    logs = {  # a transfer from the device for each seed and point
        (seed, point): own.logits[point].cpu().double().log_softmax(1).float().numpy()
        for seed, own in outcomes.items()
        for point in POINTS
    }
    labels = torch.cat([client.test.y for client in clients]).numpy().astype(np.int32)
    return Predictions(labels, tuple(len(client.test) for client in clients), logs)


def execute_by_seed(
    plan: Plan,
    folder: Path,
    engine: Callable[[int], SeedEngine],
    on_round: Callable[[Round], None],
    say: Callable[[str], None],
    draw: Draw,
) -> Result:
    """Runs one seed after the other into a folder, and resumes the run that was interrupted there."""
    files, result = RunFolder(folder, plan.federation.names), plan.empty_result()
    files.begin(plan.config)
    for seed in plan.config.seeds:
        reports = reports_folder(folder, seed)
        finished = reports / "finished"
        if finished.is_file():
            result.rounds += read_reports(reports, int(finished.read_text(encoding="ascii")) + 1)
        else:
            for report in _advance_seed(engine(seed), folder, seed, result, files, say):
                on_round(report)
            write_atomically(finished, str(result.rounds[-1].round).encode())
        result.asked[seed] = asked(reports)
    draw(result, folder)
    files.finish(result)
    writer.remove(folder)
    return result


def _advance_seed(
    engine: SeedEngine, folder: Path, seed: int, result: Result, files: RunFolder, say: Callable[[str], None]
) -> Iterator[Round]:
    """Computes the rounds that a seed lacks, from its last checkpoint if there is one."""
    states, reports = states_folder(folder) / f"seed{seed}", reports_folder(folder, seed)

    def save() -> None:
        state = engine.checkpoint()
        if state is not None:
            checkpoint.save(states, *state)

    saved = checkpoint.load(states)
    if saved is not None:
        engine.restore(saved)
        result.rounds += read_reports(reports, saved.round)
        say(f"seed {seed} resumes in round {saved.round}, whose uploads had arrived")
    files.restart(result.rounds)
    for report in engine.rounds(save, partial(ask, reports)):
        write_report(reports, report)
        files.record(report)
        result.rounds.append(report)
        yield report
