"""Progress of runs that are computed side by side."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from fedc2i.analysis.contribution.coalitions import Work
from fedc2i.report.table import duration


class WorkView:
    """Runs that are computed side by side as one bar, with the time left; lines go above it."""

    def __init__(self, console: Console) -> None:
        self._console, self._began = console, time.perf_counter()
        self._live = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("time left"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> WorkView:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()
        if error is None:
            self.say(f"computed in {duration(time.perf_counter() - self._began)}")

    def update(self, work: Work) -> None:
        """How far the runs are."""
        label = f"run {min(work.runs + 1, work.of_runs)} of {work.of_runs}"
        if self._task is None:
            self._task = self._live.add_task(label, total=1.0)
        self._live.update(self._task, completed=work.share, description=label)
        if work.runs == work.of_runs:
            self._live.remove_task(self._task)
            self._task = None

    def say(self, line: str) -> None:
        """A line above the bar."""
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)
