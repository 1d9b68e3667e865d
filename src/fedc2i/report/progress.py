"""Live progress of runs: a bar in a terminal, one line a run elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from statistics import fmean
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from fedc2i.engine.records import POINTS, Point, Round
from fedc2i.report.table import SHORT, WHEN, counted, metric_words
from fedc2i.runs.plan import Observer
from fedc2i.runs.results import Result

WIDE = 120  # columns of a terminal that has room for seeds, a long bar, the client count and scores in whole words


class ProgressView:
    """An observer that shows rounds, clients, time left and current accuracies on ``console``."""

    def __init__(self, console: Console, runs: int) -> None:
        """Watches ``runs`` runs, each with all its seeds: in a row, or several at once by `add_run`."""
        self.console = console
        self.is_wide = console.width >= WIDE
        self._runs = runs
        self._started = self._ended = 0
        self.live = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24 if self.is_wide else 8),
            MofNCompleteColumn(),
            TextColumn("{task.fields[clients]}"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[accuracy]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._now: RunProgress | None = None  # of runs in a row
        self._features: TaskID | None = None
        self._lines: Callable[[int, int], None] | None = None

    def __enter__(self) -> ProgressView:
        self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._close()
        self.live.stop()

    def add_run(self) -> RunProgress:
        """The view of one of several runs at once."""
        return RunProgress(self)

    def begin(self, result: Result) -> None:
        """A run starts: its own bar; the one before it stays as a line."""
        self._close()
        self._now = self.add_run()
        self._now.begin(result)

    def count_start(self) -> str:
        """Counts a run that starts; returns what its bar begins with, such as ``[2/32]``."""
        self._started += 1
        return f"[{self._started}/{self._runs}]"

    def count_end(self) -> str:
        """Counts a run that ended; returns what its line begins with."""
        self._ended += 1
        return f"[{self._ended}/{self._runs}]"

    def preparing(self, done: int, of: int) -> None:
        """Features of images are computed before the first round; in a terminal with a separate bar."""
        if self.live.disable:
            if self._lines is None:
                from fedc2i.models.features import timed

                self._lines = timed(self.say)
            self._lines(done, of)
            return
        if self._features is None:
            self._features = self.live.add_task("features of images", total=of, clients="", accuracy="")
        self.live.update(self._features, completed=done)

    def client(self, done: int, of: int) -> None:
        """Local runs finished within the round."""
        assert self._now is not None
        self._now.client(done, of)

    def round(self, report: Round) -> None:
        """A round of one seed ended."""
        assert self._now is not None
        self._now.round(report)

    def say(self, line: str) -> None:
        """A line of an engine, e.g. of a site that is missing."""
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def heading(self, line: str) -> None:
        """A line above the runs to come and below those that ended, whose bars stay above it."""
        self._close()
        if not self.live.disable and self.live.tasks:
            ended = self.live.make_tasks_table(self.live.tasks)
            for task in self.live.task_ids:
                self.live.remove_task(task)
            self.live.refresh()
            self.console.print(ended)
        self.say(line)

    def _close(self) -> None:
        if self._now is not None:
            self._now.end()
        self._now = None


class RunProgress:
    """An observer of one run: its bar in a terminal, its line elsewhere."""

    def __init__(self, view: ProgressView) -> None:
        """Shows a run as a part of ``view``."""
        self._view = view
        self._label, self._metric = "", "accuracy"
        self._names_refused = True
        self._seconds = 0.0  # of the rounds, as summary.json and the last line have them
        self._last: dict[int, Round] = {}  # by seed, the last that was scored
        self._refused: Counter[tuple[int, str]] = Counter()  # uploads, by seed and client
        self._task: TaskID | None = None

    def begin(self, result: Result) -> None:
        """The run starts."""
        self._metric, self._seconds = result.config.metric, result.seconds
        self._names_refused = result.config.engine == "inprocess"  # others `say` it as it happens
        where = "" if ":" in result.config.data else f" on {result.config.data}"  # a path would take the whole line
        seeds = ", ".join(map(str, result.config.seeds))
        self._label = f"{result.label}{where}, seed{'s' * (',' in seeds)} {seeds}"
        shown = f"{self._view.count_start()} {self._label if self._view.is_wide else result.label}"
        before = max((report.round for report in result.rounds), default=0)  # of a run that resumes: they took no time
        live, rounds = self._view.live, result.config.rounds
        self._task = live.add_task(shown, total=rounds, completed=before, clients="", accuracy="")

    def client(self, done: int, of: int) -> None:
        """Local runs finished within the round."""
        assert self._task is not None
        self._view.live.update(self._task, clients=f"client {done}/{of}" if self._view.is_wide else "")

    def round(self, report: Round) -> None:
        """A round of one seed ended."""
        assert self._task is not None
        self._seconds += report.seconds
        self._last |= {report.seed: report} if report.metrics else {}
        self._view.live.update(self._task, completed=report.round, accuracy=self._accuracy(self._view.is_wide))
        first = [name for name in report.refused if not self._refused[report.seed, name]]
        self._refused.update((report.seed, name) for name in report.refused)
        for name in first if self._names_refused else ():
            why = report.why.get(name, "not usable")
            self._view.say(f"seed {report.seed}, round {report.round}: the upload of {name} is {why}; rejected")

    def end(self) -> None:
        """The run ended."""
        if self._task is None or not self._last:
            return
        last = max(report.round for report in self._last.values())
        rejected: Counter[str] = Counter()  # over all seeds
        for (_, name), count in self._refused.items():
            rejected[name] += count
        end = rejected_uploads(rejected)
        live = self._view.live
        live.update(self._task, clients="", total=last, accuracy=self._accuracy(self._view.is_wide) + end)
        if live.disable:
            seconds = f"{counted(last, 'round')} in {self._seconds:.1f} s"
            self._view.say(f"{self._view.count_end()} {self._label}: {seconds}, {self._accuracy()}{end}")
        self._task = None

    def _accuracy(self, in_whole_words: bool = True) -> str:
        last = self._last.values()
        means = {point: fmean(report.mean(point, self._metric) for report in last) for point in POINTS} if last else {}
        if in_whole_words:
            return score_line(means, self._metric)
        words = metric_words(self._metric)
        return ", ".join(f"{mean:.{words.digits}f}{words.unit} {SHORT[point]}" for point, mean in means.items())


class Observers:
    """Several observers as one; those that are None are ignored."""

    def __init__(self, *observers: Observer | None) -> None:
        self._observers = [one for one in observers if one is not None]

    def begin(self, result: Result) -> None:
        """A run starts."""
        for one in self._observers:
            one.begin(result)

    def preparing(self, done: int, of: int) -> None:
        """Features of images are computed, for those that show it."""
        for one in self._observers:
            getattr(one, "preparing", lambda done, of: None)(done, of)

    def client(self, done: int, of: int) -> None:
        """Some clients have finished."""
        for one in self._observers:
            one.client(done, of)

    def round(self, report: Round) -> None:
        """A round ended."""
        for one in self._observers:
            one.round(report)

    def say(self, line: str) -> None:
        """A line of an engine, for those that show lines."""
        for one in self._observers:
            getattr(one, "say", lambda line: None)(line)


def score_line(means: Mapping[Point, float], metric: str) -> str:
    """``50.00 % before local training, 60.00 % after local training``; other metrics than accuracy are named."""
    words = metric_words(metric)
    name = "" if metric == "accuracy" or not means else f"{words.name} "
    return name + ", ".join(f"{mean:.{words.digits}f}{words.unit} {WHEN[point]}" for point, mean in means.items())


def rejected_uploads(counts: Mapping[str, int]) -> str:
    """The end of a line that counts rejected uploads by client; empty if there are none."""
    listed = ", ".join(f"{name} {count}" for name, count in counts.items())
    return f"; rejected uploads: {listed}" if listed else ""
