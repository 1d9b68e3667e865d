"""The command ``fedc2i resume``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedc2i.cli import flower
from fedc2i.cli.common import Device, Json, Track, resumable, show
from fedc2i.core.errors import UserError
from fedc2i.report.progress import ProgressView
from fedc2i.report.tracking import Observers
from fedc2i.report.tracking import track as trackers_of
from fedc2i.runs import resume as resuming


def resume(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run or of a comparison.")],
    device: Device = None,
    track: Track = None,
    json: Json = False,
) -> None:
    """Go on with a run or a comparison that was cut off.

    It ends with the numbers of an uninterrupted run, bit for bit on the same device. One that is finished is shown.
    With --track every seed is a new run of the tracker, which is told the rounds before the interruption as well.
    """
    if flower.is_local(folder):
        if device is not None or track:
            raise UserError(f"{folder}: of `fedc2i flower-local`, which knows neither --device nor --track")
        flower.go_on(folder, json)
        return
    tracking = trackers_of(*(track or []))
    console = Console(stderr=True)
    left = resuming.unfinished(folder)
    if not left:
        ignored = "; --device and --track change nothing of it" if device is not None or track else ""
        console.print(f"{folder} is finished{ignored}", highlight=False, markup=False, soft_wrap=True)
    with resumable(folder), ProgressView(console, left) as view, tracking:
        found = resuming.resume(folder, device=device, observer=Observers(view, tracking))
    show(found if isinstance(found, list) else [found], folder, json)
