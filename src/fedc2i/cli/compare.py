"""``fedc2i compare``: several methods on equal terms."""

from __future__ import annotations

from typing import Annotated

import typer

from fedc2i.cli.options import ConfigFile, Json, Out, Set, Track, values_of
from fedc2i.cli.output import show
from fedc2i.cli.setting_flags import setting_flags

app = typer.Typer(add_completion=False)


@app.command()
@setting_flags("run")
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
    from fedc2i.cli.simulation import plans_of, short_name, shown, trackers_of
    from fedc2i.runs.folder import new_folder

    values = values_of(settings, set_, config_file)
    trackers = trackers_of(track)
    plans = plans_of(methods, values, config_file)
    folder = new_folder(out, f"compare-{short_name(plans[0].config.data)}")
    with shown(plans, folder, trackers) as observer:
        results = api.execute_all(plans, folder, observer)
    show(results, folder, json)
