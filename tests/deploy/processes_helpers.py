"""A tiny Flower App, and folders of a coordinator and its sites on loopback, for the tests of real processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedc2i.deploy import keys
from fedc2i.deploy.child_process import ChildProcess, free_port
from fedc2i.deploy.coordinator_folder import make_coordinator
from fedc2i.deploy.site_folder import make_site
from fedc2i.deploy.superlink import SuperLink
from fedc2i.deploy.supernode import SuperNode

_FILES = {
    "pyproject.toml": """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "stub"
version = "1.0.0"
description = ""
license = "Apache-2.0"
dependencies = ["flwr"]
[tool.hatch.build.targets.wheel]
packages = ["."]
[tool.flwr.app]
publisher = "nobody"
[tool.flwr.app.components]
serverapp = "stub.server_app:app"
clientapp = "stub.client_app:app"
[tool.flwr.app.config]
fail = false
out = ""
""",
    "stub/__init__.py": "",
    "stub/server_app.py": """
import time
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()


@app.main()
def main(grid, context):
    if context.run_config["fail"]:
        raise RuntimeError("told to fail")
    names = {node.node_id: node.name for node in grid.get_nodes()}
    out = [Message(RecordDict({"config": ConfigRecord({})}), node, "train", ttl=120.0) for node in names]
    open_ids = set(grid.push_messages(out))
    while open_ids:
        for reply in grid.pull_messages(list(open_ids)):
            open_ids.discard(reply.metadata.reply_to_message_id)
            with open(context.run_config["out"], "a") as file:
                print(f"reply of {names[reply.metadata.src_node_id]}", dict(reply.content["failure"]), file=file)
        time.sleep(0.1)
""",
    "stub/client_app.py": """
from pathlib import Path
from flwr.clientapp import ClientApp

Path(__file__).with_name("executed").touch()
app = ClientApp()
""",
}


def pid(program: ChildProcess) -> int:
    """Of the process that ends the program and all that it started."""
    assert program.guard
    return program.guard.pid


def exists(pid: int) -> bool:
    """Whether a process is there and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait(condition: Callable[[], Any], limit: float) -> Any:
    """The condition's first true result, or its last one after ``limit`` seconds."""
    until = time.monotonic() + limit
    while not (result := condition()) and time.monotonic() < until:
        time.sleep(0.1)
    return result


def write_app(folder: Path) -> Path:
    for name, text in _FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text.lstrip(), encoding="utf-8")
    return folder


_SLEEPER = """
import time
from pathlib import Path

from fedc2i.data.federation import InputSpec
from fedc2i.models import networks

if Path(__file__).parent.name == "plugins":  # at a site
    time.sleep(600)


def build(classes, shape):
    return networks.build("lenet5", classes, InputSpec(shape))
"""


def write_sleeper(folder: Path) -> Path:
    """A model file that keeps a site busy."""
    (folder / "sleeper.py").write_text(_SLEEPER, encoding="utf-8")
    return folder / "sleeper.py"


def new_link(folder: Path) -> SuperLink:
    return SuperLink(make_coordinator(folder, ["localhost"], free_port()))


def new_node(folder: Path, link: SuperLink, kind: type[SuperNode] = SuperNode) -> SuperNode:
    """A new site that knows the SuperLink, which does not know the site; its name is the folder's."""
    coordinator, authority = f"127.0.0.1:{link.own.port}", link.own.authority
    return kind(make_site(folder, folder.name, "digits", coordinator, authority=authority, check=False)[0])


def register(link: SuperLink, node: SuperNode) -> bytes:
    """Lets the site connect; returns its public key as Flower keeps it."""
    public = keys.pem_public((node.site.folder / "site.pub").read_text())
    link.register(public, node.name)
    return public
