"""The command ``fedc2i resume``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedc2i import resuming
from fedc2i.cli_common import Device, Json, show
from fedc2i.progress import ProgressView


def resume(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run or of a comparison.")],
    device: Device = None,
    json: Json = False,
) -> None:
    """Go on with a run or a comparison that was cut off.

    It ends with the numbers of an uninterrupted run, bit for bit on the same device. One that is finished is shown.
    """
    console = Console(stderr=True)
    left = resuming.unfinished(folder)
    if not left:
        console.print(f"{folder} is finished", highlight=False, markup=False, soft_wrap=True)
    with ProgressView(console, left) as view:
        found = resuming.resume(folder, device=device, observer=view)
    show(found if isinstance(found, list) else [found], folder, json)
