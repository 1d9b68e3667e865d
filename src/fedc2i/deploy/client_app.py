"""Flower's entry point at a site.

The node's configuration names the site's folder (``site``). A node without one, as in Flower's own simulation, is the
client number ``partition-id`` of the data set that the run's configuration names.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from flwr.app import Context
from flwr.clientapp import ClientApp

from fedc2i.core.errors import UserError
from fedc2i.data import sources
from fedc2i.deploy.run_description import understand
from fedc2i.deploy.site_folder import read_site
from fedc2i.flower.site import Home, make_app, private_reasons


@lru_cache(maxsize=1)
def site_home(folder: Path) -> Home:
    """The data of the site with this folder."""
    site = read_site(folder, ready=False)  # the SuperNode has checked its key and certificates
    with private_reasons():
        rows = site.rows()
        encoded = None if rows is None else site.load(rows)
    found = encoded or site.load()
    return Home(found.clients[0], found.classes, site.state, rows=rows)


@lru_cache(maxsize=64)
def _partition_home(data: str, data_dir: str, number: int) -> Home:
    federation = sources.load(data, data_dir=Path(data_dir) if data_dir else None)
    if not 0 <= number < len(federation.clients):
        raise UserError(f"{data} has {len(federation.clients)} clients, and no partition {number}")
    return Home(federation.clients[number], federation.classes)


def home_of(context: Context) -> Home:
    """The node's site folder, or its part of the data set that the run names."""
    if "site" in context.node_config:
        return site_home(Path(str(context.node_config["site"])))
    if "partition-id" in context.node_config and context.run_config.get("data"):
        run = context.run_config
        return _partition_home(str(run["data"]), str(run.get("data-dir", "")), int(context.node_config["partition-id"]))
    raise UserError("this node has no site folder; start it with `fedc2i site start`, or name the run's data")


def app_in(root: Path | None = None) -> ClientApp:
    """The Flower App; the user's own methods and models lie in ``root``."""
    known = lru_cache(maxsize=4)(lambda setup: understand(setup, root))
    return make_app(home_of, lambda task: known(task.setup))
