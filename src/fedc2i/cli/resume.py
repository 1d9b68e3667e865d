"""The command ``fedc2i resume``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedc2i.cli import shared
from fedc2i.cli.shared import Device, Json, Track, Trust
from fedc2i.core.errors import UserError

app = typer.Typer(add_completion=False)


@app.command()
def resume(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run or of a comparison.")],
    device: Device = None,
    track: Track = None,
    trust: Trust = False,
    json: Json = False,
) -> None:
    """Resume an interrupted run or comparison.

    Its numbers are those of an uninterrupted run, bit for bit on the same device. A finished run is shown.
    If its method or model is your own Python file, --trust executes it again; do not trust a stranger's folder.
    With --track every seed is a new run of the tracker, which gets the rounds before the interruption as well.
    """
    from fedc2i import api
    from fedc2i.cli import flower_local
    from fedc2i.runs.interrupted_run import unfinished

    if flower_local.is_local(folder):
        if device is not None or track:
            raise UserError(f"{folder}: of `fedc2i flower-local`, which has neither --device nor --track")
        flower_local.resume_local(folder, json, trust)
        return
    trackers = shared.trackers_of(track)
    left = unfinished(folder)
    if not left:
        ignored = "; --device and --track change nothing of it" if device is not None or track else ""
        shared.say(f"{folder} is finished{ignored}")
    with shared.watched(folder, left, trackers) as observer:
        found = api.resume(folder, device=device, observer=observer, trust=trust)
    shared.show(found if isinstance(found, list) else [found], folder, json)
