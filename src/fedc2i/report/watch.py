"""``fedc2i watch``: a run, while another process computes it, drawn in a terminal; plain lines elsewhere."""

from __future__ import annotations

import json
import math
import shlex
import time
from collections.abc import Sequence
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
from fedc2i.report.progress import left_out
from fedc2i.report.run_state import Follower, State

BARS = "▁▂▃▄▅▆▇█"
MOST_CLIENTS = 20  # with a line of their own
WIDEST = 40  # rounds in a curve
SILENT = 60.0  # seconds without a word from which on that is said
GRACE = 5.0  # seconds without a word and without a process, after which nobody is waited for
SHADE = (38, 110, 200)


def watch(folder: Path, console: Console, every: float = 1.0, once: bool = False) -> None:
    """Shows a run until it has ended or nobody works on it any more, or a comparison, run after run.

    Args:
        folder: of a run or of a comparison.
        console: where to; if that is no terminal, a line for every round and the picture at the end.
        every: seconds between looks.
        once: only what there is now.

    Raises:
        UserError: if it is neither.
    """
    if every <= 0:
        raise UserError(f"every must be a number of seconds above 0, got {every}")
    goes_on = True
    for own in _runs(folder):
        if own != folder and not (own / "config.toml").is_file():
            goes_on = goes_on and (is_locked(folder) if once else _is_begun(own, folder, every))
        if own == folder or (own / "config.toml").is_file():
            goes_on = _watch_run(Follower(own, comparison=folder), console, every, once) and goes_on
        if not goes_on and not once:
            break
    if not goes_on:
        said = f"nobody is working on it; `fedc2i resume {shlex.quote(str(folder))}` goes on"
        console.print(said, style="yellow", highlight=False, markup=False, soft_wrap=True)


def _is_begun(own: Path, comparison: Path, every: float) -> bool:
    """Waits for a run of a comparison to begin; false if nobody is there who would."""
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


def _watch_run(follower: Follower, console: Console, every: float, once: bool) -> bool:
    """Shows one run; whether it has ended, or somebody is working on it."""
    state = follower.read()
    if once or state.finished:
        console.print(view(state, console.width))
    elif not console.is_terminal:
        _tell(follower, state, console, every)
    else:
        with Live(view(state, console.width), console=console, auto_refresh=False) as live:
            waits = _Patience()
            while waits.on(state):
                time.sleep(every)
                state = follower.read()
                live.update(view(state, console.width), refresh=True)
    return not state.cut_off


class _Patience:
    """Whether to look at a run again: a process that goes on with it may just be starting."""

    def __init__(self) -> None:
        self._since = time.monotonic()

    def on(self, state: State) -> bool:
        """Until it has ended, or has been silent and without a process for some seconds."""
        if not state.cut_off:
            self._since = time.monotonic()
        return not state.finished and min(time.monotonic() - self._since, state.silent_for) <= GRACE


def _tell(follower: Follower, state: State, console: Console, every: float) -> None:
    """A line whenever a round has ended."""
    told, waits = -1, _Patience()
    while True:
        if state.round != told:
            told = state.round
            console.print(_headline(state) + _said(state), highlight=False, markup=False, soft_wrap=True)
        if not waits.on(state):
            break
        time.sleep(every)
        state = follower.read()
    console.print(view(state, console.width))


def view(state: State, width: int) -> RenderableType:
    """The whole picture: how far it is, accuracy of every client at both points, and who helps whom."""
    parts: list[RenderableType] = [Text(_headline(state), "bold")]
    if state.rounds and not state.finished:
        parts.append(ProgressBar(total=state.rounds, completed=state.round, width=min(width, 60)))
    if state.silent_for > SILENT and not state.finished and not state.cut_off:
        parts.append(Text(f"nothing new for {_time(state.silent_for)}; is the run still going?", "yellow"))
    parts.append(_curves(state, width) if state.accuracy else Text("no round has been scored yet", "dim"))
    if state.influence is not None:
        parts.append(_influence(state, width))
    if state.refused:
        parts.append(Text(left_out(state.refused).removeprefix("; "), "yellow"))
    return Group(*parts)


def _headline(state: State) -> str:
    of = f" of {state.rounds}" if state.rounds else ""
    seeds = ", ".join(map(str, state.seeds))
    text = f"{state.title}, seed{'s' * (len(state.seeds) > 1)} {seeds}: round {state.round}{of}"
    if state.finished:
        return text + ", finished"
    if state.cut_off:
        return text + ", nobody is working on it"
    return text if state.seconds_left is None else f"{text}, {_time(state.seconds_left)} left"


def _said(state: State) -> str:
    means = [(point, state.curve(point, most=2)) for point in POINTS]
    scores = "".join(f", {point} {curve[-1]:.2f} %" for point, curve in means if curve)
    return scores + left_out(state.refused)


def _time(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"


def _curves(state: State, width: int) -> RenderableType:
    """A line for every client: its curve and last value at both points, all on one scale."""
    names = state.clients[:MOST_CLIENTS]
    longest = max([len(name) for name in names] + [7])
    room = max(5, min(WIDEST, (width - longest - 30) // 2))
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    table.add_column("")
    for point in POINTS:
        table.add_column(point, no_wrap=True, min_width=min(room, 8))
        table.add_column("%", justify="right")
    curves = {(name, point): state.curve(point, name, room) for name in names for point in POINTS}
    means = {point: state.curve(point, most=room) for point in POINTS}
    values = [value for curve in (*curves.values(), *means.values()) for value in curve if math.isfinite(value)]
    low, high = (min(values), max(values)) if values else (0.0, 100.0)
    for name in names:
        table.add_row(Text(name), *_cells([curves[name, point] for point in POINTS], low, high))
    table.add_section()
    table.add_row("average", *_cells([means[point] for point in POINTS], low, high), style="bold")
    more = len(state.clients) - len(names)
    said = f"curves from {low:.1f} % to {high:.1f} %"
    return Group(table, Text(said + (f"; {more} more clients are in the average" if more > 0 else ""), "dim"))


def _cells(curves: Sequence[Sequence[float]], low: float, high: float) -> list[Text]:
    cells = []
    for curve in curves:
        last = f"{curve[-1]:.2f}" if curve and math.isfinite(curve[-1]) else "-"
        cells += [Text(sparkline(curve, low, high), "cyan"), Text(last)]
    return cells


def sparkline(values: Sequence[float], low: float, high: float) -> str:
    """Values as bars between ``low`` and ``high``."""
    span = (high - low) or 1.0
    steps = [(value - low) / span * (len(BARS) - 1) if math.isfinite(value) else None for value in values]
    return "".join(" " if step is None else BARS[max(0, min(len(BARS) - 1, round(step)))] for step in steps)


def _influence(state: State, width: int) -> RenderableType:
    """Row: who is helped; the larger the influence, the bluer."""
    assert state.influence is not None
    number, vectors = state.influence
    names = state.clients
    title = f"who helps whom, influence λ after round {number} (row: who is helped)"
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
    share = max(0.0, min(1.0, value * clients / 2.5))  # two and a half times the equal share is as dark as it gets
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
