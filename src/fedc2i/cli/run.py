"""``fedc2i run``: one method."""

from __future__ import annotations

from typing import Annotated

import typer

from fedc2i.cli import shared
from fedc2i.cli.shared import ConfigFile, Json, Out, Set, Track

app = typer.Typer(add_completion=False)


@app.command()
@shared.setting_flags("run")
def run(
    settings: dict[str, str],
    method: Annotated[str | None, typer.Argument(help="A method's name or FILE.py:CLASS.")] = None,
    set_: Set = None,
    out: Out = None,
    config_file: ConfigFile = None,
    track: Track = None,
    json: Json = False,
) -> None:
    """Run one method and write its run folder.

    METHOD is a name that `fedc2i methods` lists (fedc2i by default), with or without options (fedc2i:gamma=2), or
    FILE.py:CLASS. Options of the method can also be given as --set NAME=VALUE.
    """
    from fedc2i.report.figures import draw_run
    from fedc2i.runs.driver import execute
    from fedc2i.runs.folder import claimed, new_folder, slug, started

    values = shared.values_of(settings, set_, config_file)
    trackers = shared.trackers_of(track)
    (plan,) = shared.plans_of([method or values.get("method", "fedc2i")], values, config_file)
    is_new = shared.is_free(out)
    folder = new_folder(out, f"{slug(plan.key)}-{shared.short_name(plan.config.data)}")
    shared.announce(plan, folder, is_new=is_new)
    with (
        shared.watched(folder, 1, trackers, plan.config.engine, is_new=is_new) as observer,
        started(folder),
        claimed(folder),
    ):
        result = execute(plan, folder, observer, draw_run)
    shared.show([result], folder, json)
