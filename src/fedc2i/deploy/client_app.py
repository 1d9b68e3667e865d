"""Flower's entry point at a node of another federation, or of Flower's own simulation.

The node is the client number ``partition-id`` of the data set that the run's configuration names. A site with a folder
needs `fedc2i site start`, which never executes this: it checks the site's policy first, see `fedc2i.deploy.guard`.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from flwr.app import Context
from flwr.clientapp import ClientApp

from fedc2i.core.errors import UserError
from fedc2i.data import sources
from fedc2i.deploy.run_description import understand
from fedc2i.flower.site import Home, make_app


@lru_cache(maxsize=64)
def _partition_home(data: str, data_dir: str, number: int) -> Home:
    federation = sources.load(data, data_dir=Path(data_dir) if data_dir else None)
    if not 0 <= number < len(federation.clients):
        raise UserError(f"{data} has {len(federation.clients)} clients, and no partition {number}")
    return Home(federation.clients[number], federation.classes)


def home_of(context: Context) -> Home:
    """The node's part of the data set that the run names."""
    if "partition-id" in context.node_config and context.run_config.get("data"):
        run = context.run_config
        return _partition_home(str(run["data"]), str(run.get("data-dir", "")), int(context.node_config["partition-id"]))
    raise UserError("this node has no partition-id, or the run no data; a site's folder needs `fedc2i site start`")


def app_in(root: Path | None = None) -> ClientApp:
    """The Flower App; the user's own methods and models lie in ``root``."""
    known = lru_cache(maxsize=4)(lambda setup: understand(setup, root))
    return make_app(home_of, lambda task: known(task.setup))
