"""Runs computed side by side by processes that share a GPU; the numbers are those of one process.

One run leaves much of a GPU idle: its kernels are small, and it pauses between rounds. The processes write into the
cache, one plan at a time each. This process plans, shows progress, and reads the results. If memory runs out, a process
computes fewer clients at a time, which rounds differently; how many processes there are is chosen to avoid that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Protocol

from fedc2i.core.errors import UserError
from fedc2i.engine.records import Round
from fedc2i.runs.cache import RunCache
from fedc2i.runs.gpu_share import processes_for
from fedc2i.runs.job_process import Report
from fedc2i.runs.job_processes import JobProcesses
from fedc2i.runs.plan import Observer, Plan
from fedc2i.runs.results import Result


class RunView(Observer, Protocol):
    """Shows one of several runs."""

    def end(self) -> None:
        """The run ended."""
        ...


class Views(Protocol):
    """Shows several runs at once."""

    def add_run(self) -> RunView:
        """The view of one more run."""
        ...

    def say(self, line: str) -> None:
        """A line of a log."""
        ...


def compute_all(
    cache: RunCache,
    plans: Sequence[Plan],
    views: Views | None = None,
    processes: JobProcesses | None = None,
    on_computed: Callable[[Plan], None] = lambda plan: None,
) -> None:
    """Computes what a cache lacks of plans, side by side; nothing where one process would do it.

    Args:
        cache: takes the runs.
        plans: with the same device.
        views: shows them.
        processes: that were started early.
        on_computed: is given each plan when it is complete.

    Raises:
        UserError: if a process ends unexpectedly; and whatever a run raises.
    """
    if len(plans) < 2 or processes_for(plans[0].config) == 1:
        return
    missing = in_order([plan for plan in plans if cache.missing(plan)])
    most = processes_for(plans[0].config, missing)
    if min(most, len(missing)) < 2:
        return
    shown: dict[int, RunView] = {}

    def run(job: int, report: Report) -> None:
        plan = missing[job]
        try:
            cache.complete(plan, _Sender(report))
        except UserError as error:
            raise UserError(f"{plan.label} on {plan.config.data}: {error}") from error

    def on_report(job: int, content: tuple[str, Any]) -> None:
        if views is not None:
            _show(views, shown, job, missing[job], *content)

    is_gpu = plans[0].config.torch_device().type == "cuda"
    with nullcontext(processes) if processes is not None else JobProcesses(min(most, len(missing)), is_gpu) as used:
        used.keep(most)
        for job, _ in used.work(run, range(len(missing)), on_report):
            if job in shown:
                shown.pop(job).end()
            on_computed(missing[job])


def in_order(plans: Sequence[Plan]) -> list[Plan]:
    """The order in which plans are started: different data in turn, because their kernels fill different gaps, and long
    runs first, so that all processes end at about the same time."""
    places: dict[int, tuple[float, float]] = {}
    for federation in {id(plan.federation): plan.federation for plan in plans}.values():
        samples = sum(len(client.train) for client in federation.clients)
        own = [(samples * plan.config.rounds, k) for k, plan in enumerate(plans) if plan.federation is federation]
        own.sort(key=lambda pair: -pair[0])
        places |= {k: ((place + 0.5) / len(own), -work) for place, (work, k) in enumerate(own)}
    return [plans[k] for k in sorted(places, key=lambda k: places[k])]


def _show(views: Views, shown: dict[int, RunView], job: int, plan: Plan, kind: str, content: Any) -> None:
    """What a process reports of a run, in its view."""
    if kind == "say":
        views.say(content)
    elif kind == "begin":
        seeds, rounds = content
        result = plan.with_seeds(seeds).empty_result()
        result.rounds += rounds
        shown[job] = views.add_run()
        shown[job].begin(result)
    elif kind == "client":
        shown[job].client(*content)
    else:
        shown[job].round(content)


class _Sender:
    """An observer that reports to another process, without arrays and tensors."""

    def __init__(self, report: Report) -> None:
        self._report = report

    def begin(self, result: Result) -> None:
        """A run starts."""
        self._report(("begin", (result.config.seeds, [_light(own) for own in result.rounds])))

    def client(self, done: int, of: int) -> None:
        """Some clients have finished."""
        self._report(("client", (done, of)))

    def round(self, report: Round) -> None:
        """A round ended."""
        self._report(("round", _light(report)))

    def say(self, line: str) -> None:
        """A line of a log."""
        self._report(("say", line))


def _light(report: Round) -> Round:
    metrics = {point: [dict(own) for own in scores] for point, scores in report.metrics.items()}
    return replace(report, influence={}, metrics=metrics)
