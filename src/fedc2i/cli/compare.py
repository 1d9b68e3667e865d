"""``fedc2i compare``: several methods on equal terms."""

from __future__ import annotations

from typing import Annotated

import typer

from fedc2i.cli.options import (
    Attack,
    ConfigFile,
    Data,
    DataDir,
    Device,
    Engine,
    Json,
    ModelName,
    Out,
    Partition,
    RayAddress,
    Rounds,
    Seeds,
    Set,
    Topology,
    Track,
    values_of,
)
from fedc2i.cli.output import show

app = typer.Typer(add_completion=False)


@app.command()
def compare(
    methods: Annotated[list[str], typer.Argument(metavar="METHOD...", help="E.g. local fedavg fedc2i fedc2i:gamma=2.")],
    data: Data = None,
    data_dir: DataDir = None,
    partition: Partition = None,
    model: ModelName = None,
    rounds: Rounds = None,
    seeds: Seeds = None,
    topology: Topology = None,
    attack: Attack = None,
    engine: Engine = None,
    ray_address: RayAddress = None,
    set_: Set = None,
    out: Out = None,
    device: Device = None,
    config_file: ConfigFile = None,
    track: Track = None,
    json: Json = False,
) -> None:
    """Run several methods on equal terms and print one table.

    METHOD is a name that `fedc2i methods` lists, with or without options (fedc2i:gamma=2), or FILE.py:CLASS.
    """
    from fedc2i import api
    from fedc2i.cli.simulation import plans_of, short_name, shown
    from fedc2i.report.tracking import track as tracking_of
    from fedc2i.runs.folder import new_folder

    named_options = data, data_dir, partition, model, rounds, seeds, topology, device, engine, ray_address, attack
    values = values_of(config_file, set_, *named_options)
    tracking = tracking_of(*(track or []))
    plans = plans_of(methods, values, config_file)
    folder = new_folder(out, f"compare-{short_name(plans[0].config.data)}")
    with shown(plans, folder, tracking) as observer:
        results = api.execute_all(plans, folder, observer)
    show(results, folder, json)
