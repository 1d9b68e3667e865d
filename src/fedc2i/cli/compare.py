"""``fedc2i compare``: several methods on equal terms."""

from __future__ import annotations

from typing import Annotated

import typer

from fedc2i.cli import shared
from fedc2i.cli.shared import ConfigFile, Json, Out, Set, Track

app = typer.Typer(add_completion=False)


@app.command()
@shared.setting_flags("run")
def compare(
    methods: Annotated[list[str], typer.Argument(metavar="METHOD...", help="E.g. local fedavg fedc2i fedc2i:gamma=2.")],
    settings: dict[str, str],
    set_: Set = None,
    out: Out = None,
    config_file: ConfigFile = None,
    track: Track = None,
    json: Json = False,
) -> None:
    """Run several methods on equal terms and print one table.

    METHOD is a name that `fedc2i methods` lists, with or without options (fedc2i:gamma=2), or FILE.py:CLASS.
    """
    from fedc2i import api
    from fedc2i.runs.folder import new_folder, started

    values = shared.values_of(settings, set_, config_file)
    trackers = shared.trackers_of(track)
    plans = shared.plans_of(methods, values, config_file)
    is_new = shared.is_free(out)
    folder = new_folder(out, f"compare-{shared.short_name(plans[0].config.data)}")
    shared.announce(plans[0], folder, is_new=is_new)
    with (
        shared.watched(folder, len(plans), trackers, plans[0].config.engine, is_new=is_new) as observer,
        started(folder),
    ):
        results = api.execute_all(plans, folder, observer)
    shared.show(results, folder, json)
