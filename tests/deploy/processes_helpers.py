"""A tiny Flower App, and keys and certificates for loopback, for the tests of real processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedc2i.deploy import keys, tls
from fedc2i.deploy.superlink import Tls

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
rounds = 1
fail = false
seconds = 0.0
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
    for number in range(int(context.run_config["rounds"])):
        names = {node.node_id: (node.name, node.public_key) for node in grid.get_nodes()}
        began = time.time()
        config = {"sent": began, "seconds": float(context.run_config["seconds"])}
        out = [Message(RecordDict({"config": ConfigRecord(config)}), node, "train", ttl=120.0) for node in names]
        open_ids = set(grid.push_messages(out))
        while open_ids:
            for reply in grid.pull_messages(list(open_ids)):
                open_ids.discard(reply.metadata.reply_to_message_id)
                now = time.time() - began
                if reply.has_error():
                    line = f"error {reply.error.code} {reply.error.reason} from {reply.metadata.src_node_id} {now:.2f}"
                else:
                    told = dict(reply.content["told"])
                    name, key = names[reply.metadata.src_node_id]
                    line = f"reply of {name} site={told['site']} {told['began'] - began:.2f} {now:.2f} {key[:26]}"
                if context.run_config["out"]:
                    with open(context.run_config["out"], "a") as file:
                        print(line, file=file)
            time.sleep(0.1)
""",
    "stub/client_app.py": """
import time
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message, context):
    began = time.time()
    time.sleep(message.content["config"]["seconds"])
    told = ConfigRecord({"site": str(context.node_config.get("site", "")), "began": began})
    return Message(RecordDict({"told": told}), reply_to=message)
""",
}


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


def write_key(folder: Path, name: str) -> tuple[Path, bytes]:
    """The file of a site's new private key, and its public key as Flower keeps it."""
    key = keys.new_key()
    (folder / name).write_bytes(keys.ssh_private(key))
    (folder / name).chmod(0o600)
    return folder / name, keys.pem_public(keys.ssh_public(key.public_key()))


def write_tls(folder: Path) -> Tls:
    """A new authority, and a certificate for 127.0.0.1 and localhost."""
    folder.mkdir(parents=True, exist_ok=True)
    files = Tls(folder / "ca.crt", folder / "server.crt", folder / "server.key")
    authority_key, authority = tls.new_authority("test ca")
    key = keys.new_key()
    files.ca.write_bytes(authority)
    files.certificate.write_bytes(tls.server_certificate(authority_key, authority, key.public_key(), ["localhost"]))
    files.key.write_bytes(keys.tls_private(key))
    return files
