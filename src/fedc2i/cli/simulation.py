"""What `fedc2i run` and `fedc2i compare` share: from settings to runs that are shown while they are computed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console

from fedc2i.cli.output import resumable, say
from fedc2i.core.errors import UserError
from fedc2i.engine import accountant
from fedc2i.report.progress import Observers, ProgressView
from fedc2i.runs.folder import slug
from fedc2i.runs.plan import Observer, Plan, prepare


def plans_of(methods: Sequence[str], values: Mapping[str, Any], file: Path | None) -> list[Plan]:
    """The runs that settings describe; an error about settings names the file that some of them come from."""
    try:
        plans = prepare(methods, {name: value for name, value in values.items() if name != "method"})
        plans[0].require_engine()
    except UserError as error:
        if file is None:
            raise
        raise UserError(f"{error} (with the settings of {file})") from error
    return plans


def short_name(data: str) -> str:
    """The data as part of a folder's name: of a file or folder only its own name, e.g. ``pacs``."""
    _, _, argument = data.partition(":")
    path = Path(argument).expanduser()
    if not argument or not path.exists():
        return slug(data)
    return slug(path.resolve().name if path.is_dir() else path.resolve().stem)


def trackers_of(wanted: Sequence[str] | None) -> AbstractContextManager[Observer | None]:
    """The trackers that ``--track`` names; without any, their code is not loaded."""
    if not wanted:
        return nullcontext()
    from fedc2i.report.trackers import track

    return track(*wanted)


@contextmanager
def shown(
    plans: Sequence[Plan], folder: Path, trackers: AbstractContextManager[Observer | None]
) -> Iterator[Observers]:
    """Says what is about to run, and shows its progress in the terminal and in trackers."""
    first = plans[0]
    planned = accountant.cost(first.config, len(first.federation.names))
    for line in first.federation.describe():
        say(line)
    if planned is not None:
        say(f"Privacy: {planned}")
    say(f"Writing to {folder}")
    with (
        resumable(folder, first.config.engine),
        ProgressView(Console(stderr=True), len(plans)) as view,
        trackers as tracking,
    ):
        yield Observers(view, tracking)
