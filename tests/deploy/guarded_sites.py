"""A run over sites in one process: everything but Flower's network is real, down to the sandboxed workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeGrid, node
from flwr.app import Context, Message

from fedc2i import Federation, Result
from fedc2i.deploy.guard import Guard
from fedc2i.deploy.job import Job, split_policy
from fedc2i.deploy.policy import SitePolicy
from fedc2i.deploy.server_app import run_job
from fedc2i.deploy.site_folder import make_site
from fedc2i.deploy.superlink import _app
from fedc2i.deploy.worker import Worker
from fedc2i.flower import compat
from support.helpers import write_arrays

SITES = ("north", "south")
QUICK: dict[str, Any] = {"model": "lenet5", "rounds": 2, "epochs": 1, "batch_size": 5}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pauses before something is tried again, and no figures."""
    monkeypatch.setattr("fedc2i.flower.connections._AGAIN", 0.0)
    monkeypatch.setattr("fedc2i.flower.answer_collector.TRIES", 1)
    monkeypatch.setattr("fedc2i.flower.answer_collector.PAUSE", 0.0)
    monkeypatch.setattr("fedc2i.deploy.server_app.figures.draw_run", lambda result, folder: None)


class GuardedSites:
    """Folders of sites, by default two, and runs over them."""

    def __init__(
        self, folder: Path, federation: Federation, policy: SitePolicy | None = None, names: Sequence[str] = SITES
    ) -> None:
        self.folder, self.names, self.said = folder, tuple(names), list[str]()
        data = write_arrays(folder / "arrays", federation)
        for name, client in zip(names, federation.names, strict=False):
            make_site(folder / name, name, data, "localhost:9092", client=client, check=False, policy=policy)

    def run(self, out: str = "run", method: str = "fedavg", bundle: bytes | None = None, **settings: Any) -> Result:
        policy, values = split_policy({"deadline": 20.0, "min_sites": 2, **QUICK, **settings})
        job = Job(self.folder / out, method, values, self.names, wait=0.0, policy=replace(policy, poll=0.0))
        with _app(job) as app:
            sent = compat.bundle(app) if bundle is None else bundle
        nodes = {100 + k: node(100 + k, self.app(name, sent)) for k, name in enumerate(self.names)}
        self.said.clear()
        self.grid = FakeGrid(nodes, self.before)
        return run_job(self.grid, job, self.said.append)

    def before(self, number: int, message: Message) -> None:
        """Called before a node gets a message."""

    def app(self, name: str, bundle: bytes) -> Callable[[Message, Context], Message]:
        def call(message: Message, context: Context) -> Message:
            guard = Guard(self.folder / name, Worker())
            return Message(guard.answer(bundle, message.metadata.message_type, message.content), reply_to=message)

        return call
