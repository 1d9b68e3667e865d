"""``fedc2i watch``: a run that another process computes, drawn in a terminal; plain lines elsewhere."""

from __future__ import annotations

import json
import math
import shlex
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fedc2i.core.errors import UserError
from fedc2i.core.files import is_locked
from fedc2i.engine.records import POINTS
from fedc2i.report.progress import rejected_uploads, score_line
from fedc2i.report.table import WHEN, duration, metric_words
from fedc2i.report.watch_state import RunWatcher, WatchedRun

BARS = "▁▂▃▄▅▆▇█"
MOST_CLIENTS = 20  # with a line of their own
WIDEST = 40  # rounds in a curve
SILENT = 60.0  # seconds without news after which a line says so
GRACE = 5.0  # seconds without news and without a process, after which watching ends
SHADE = (38, 110, 200)


def watch(folder: Path, console: Console, every: float = 1.0, once: bool = False) -> None:
    """Shows a run, or a comparison run after run, until it has ended or no process works on it any more.

    It looks ``every`` few seconds, or only ``once``. Where ``console`` is no terminal, a line for every round and the
    picture at the end.

    Raises:
        UserError: if it is the folder of neither.
    """
    if every <= 0:
        raise UserError(f"every must be a number of seconds above 0, got {every}")
    alive = True
    for own in _runs(folder):
        if own != folder and not (own / "config.toml").is_file():
            alive = alive and (is_locked(folder) if once else _starts(own, folder, every))
        if own == folder or (own / "config.toml").is_file():
            alive = _watch_run(RunWatcher(own, comparison=folder), console, every, once) and alive
        if not alive and not once:
            break
    if not alive:
        line = f"interrupted: no process is working on it; `fedc2i resume {shlex.quote(str(folder))}` resumes it"
        console.print(line, style="yellow", highlight=False, markup=False, soft_wrap=True)


def _starts(own: Path, comparison: Path, every: float) -> bool:
    """Waits for a run of a comparison to start; false if no process is working on the comparison."""
    seen = time.monotonic()
    while not (own / "config.toml").is_file():
        if is_locked(comparison):
            seen = time.monotonic()
        elif time.monotonic() - seen > GRACE:
            return False
        time.sleep(every)
    return True


def _runs(folder: Path) -> list[Path]:
    plan = folder / "plan.json"
    if not plan.is_file():
        return [folder]
    try:
        return [folder / Path(entry["folder"]).name for entry in json.loads(plan.read_text(encoding="utf-8"))["runs"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise UserError(f"{plan}: not the plan of a comparison") from None


def _watch_run(reader: RunWatcher, console: Console, every: float, once: bool) -> bool:
    """Shows one run: again and again in a terminal, elsewhere a line whenever a round has ended, and the picture last.

    Returns whether it has ended, or a process is working on it. One that resumes it may just be starting.
    """
    run = reader.read()
    if once or run.finished:
        console.print(view(run, console.width))
        return not run.interrupted
    live = Live(console=console, auto_refresh=False) if console.is_terminal else None
    printed, seen = -1, time.monotonic()
    with live or nullcontext():
        while True:
            if live is not None:
                live.update(view(run, console.width), refresh=True)
            elif run.round != printed:
                printed = run.round
                console.print(_headline(run) + _scores(run), highlight=False, markup=False, soft_wrap=True)
            if not run.interrupted:
                seen = time.monotonic()
            if run.finished or min(time.monotonic() - seen, run.silent_for) > GRACE:
                break
            time.sleep(every)
            run = reader.read()
    if live is None:
        console.print(view(run, console.width))
    return not run.interrupted


def view(run: WatchedRun, width: int) -> RenderableType:
    """The whole picture: how far it is, the metric of every client at both points, and who weighs most with whom."""
    parts: list[RenderableType] = [Text(_headline(run), "bold")]
    if run.rounds and not run.finished:
        parts.append(ProgressBar(total=run.rounds, completed=run.round, width=min(width, 60)))
    if run.silent_for > SILENT and not run.finished and not run.interrupted:
        parts.append(Text(f"nothing new for {duration(run.silent_for)}; is the run still going?", "yellow"))
    parts.append(_curves(run, width) if run.scores else Text("no round has been scored yet", "dim"))
    if run.influence is not None:
        parts.append(_influence(run, width))
    if run.rejected:
        parts.append(Text(rejected_uploads(run.rejected).removeprefix("; "), "yellow"))
    return Group(*parts)


def _headline(run: WatchedRun) -> str:
    of = f" of {run.rounds}" if run.rounds else ""
    seeds = ", ".join(map(str, run.seeds))
    text = f"{run.title}, seed{'s' * (len(run.seeds) > 1)} {seeds}: round {run.round}{of}"
    if run.finished:
        return text + ", finished"
    if run.interrupted:
        return text + ", interrupted"
    return text if run.seconds_left is None else f"{text}, {duration(run.seconds_left)} left"


def _scores(run: WatchedRun) -> str:
    curves = {point: run.curve(point, most=2) for point in POINTS}
    means = {point: curve[-1] for point, curve in curves.items() if curve}
    return (f", {score_line(means, run.metric)}" if means else "") + rejected_uploads(run.rejected)


def _curves(run: WatchedRun, width: int) -> RenderableType:
    """A line for every client: its curve and last value at both points, all on one scale."""
    names, words = run.clients[:MOST_CLIENTS], metric_words(run.metric)
    longest = max([len(name) for name in names] + [7])
    room = max(5, min(WIDEST, (width - longest - 30) // 2))
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    table.add_column("")
    for point in POINTS:
        table.add_column(WHEN[point], no_wrap=True, min_width=min(room, 8))
        table.add_column(words.unit.strip(), justify="right")
    curves = {(name, point): run.curve(point, name, room) for name in names for point in POINTS}
    means = {point: run.curve(point, most=room) for point in POINTS}
    values = [value for curve in (*curves.values(), *means.values()) for value in curve if math.isfinite(value)]
    low, high = (min(values), max(values)) if values else (0.0, 100.0)
    for name in names:
        table.add_row(Text(name), *_cells([curves[name, point] for point in POINTS], low, high, words.digits))
    table.add_section()
    table.add_row("average", *_cells([means[point] for point in POINTS], low, high, words.digits), style="bold")
    more = len(run.clients) - len(names)
    ends = [f"{value:.{words.digits - 1}f}{words.unit}" for value in (low, high)]
    scale = f"{words.name}, curves from {ends[0]} to {ends[1]}"
    return Group(table, Text(scale + (f"; {more} more clients are in the average" if more > 0 else ""), "dim"))


def _cells(curves: Sequence[Sequence[float]], low: float, high: float, digits: int) -> list[Text]:
    cells = []
    for curve in curves:
        last = f"{curve[-1]:.{digits}f}" if curve and math.isfinite(curve[-1]) else "-"
        cells += [Text(sparkline(curve, low, high), "cyan"), Text(last)]
    return cells


def sparkline(values: Sequence[float], low: float, high: float) -> str:
    """Values as bars between ``low`` and ``high``."""
    span = (high - low) or 1.0
    steps = [(value - low) / span * (len(BARS) - 1) if math.isfinite(value) else None for value in values]
    return "".join(" " if step is None else BARS[max(0, min(len(BARS) - 1, round(step)))] for step in steps)


def _influence(run: WatchedRun, width: int) -> RenderableType:
    """Row: for whom; the larger the influence, the bluer."""
    assert run.influence is not None
    number, vectors = run.influence
    names = run.clients
    title = f"whose model weighs most, influence λ after round {number} (row: for whom)"
    if len(names) != len(vectors) or max(map(len, names)) + sum(max(5, len(name)) + 2 for name in names) + 4 > width:
        return _helpers(title, names, vectors)
    table = Table(box=None, padding=(0, 0, 0, 2))
    table.add_column("")
    for name in names:
        table.add_column(Text(name), justify="right")
    for name, row in zip(names, vectors, strict=True):
        table.add_row(Text(name), *(_shaded(float(value), len(names)) for value in row))
    return Group(Text(title), table)


def _shaded(value: float, clients: int) -> Text:
    if math.isnan(value):
        return Text("-", "dim")
    share = max(0.0, min(1.0, value * clients / 2.5))  # darkest at two and a half times the equal share
    red, green, blue = (round(255 + share * (end - 255)) for end in SHADE)
    ink = "rgb(255,255,255)" if share > 0.75 else "rgb(0,0,0)"
    return Text(f" {value:.3f}", f"{ink} on rgb({red},{green},{blue})")


def _helpers(title: str, names: Sequence[str], vectors: np.ndarray[Any, Any]) -> RenderableType:
    """For many clients: the largest influence on each of the first."""
    lines = [Text(title)]
    for m, row in enumerate(vectors[:MOST_CLIENTS]):
        if m >= len(names) or not np.isfinite(row).any():
            continue
        best = [int(i) for i in np.argsort(-np.nan_to_num(row, nan=-1.0))[:3] if int(i) < len(names)]
        lines.append(Text(f"  {names[m]}: " + ", ".join(f"{names[i]} {row[i]:.3f}" for i in best)))
    return Group(*lines)
