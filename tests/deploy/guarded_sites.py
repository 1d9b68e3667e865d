"""A run over two sites in one process: everything but Flower's network is real, down to the sandboxed workers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fakes import FakeGrid, node
from flwr.app import Context, Message

from fedc2i import Federation, Result
from fedc2i.deploy.guard import Guard
from fedc2i.deploy.job import Job
from fedc2i.deploy.policy import SitePolicy
from fedc2i.deploy.server_app import run_job
from fedc2i.deploy.site_folder import make_site
from fedc2i.deploy.superlink import _app
from fedc2i.deploy.worker import Worker
from fedc2i.flower import compat
from fedc2i.flower.answer_collector import Policy
from support.helpers import write_arrays

SITES = ("north", "south")
QUICK: dict[str, Any] = {"model": "lenet5", "rounds": 2, "epochs": 1, "batch_size": 5}


class GuardedSites:
    """Folders of two sites, and runs over them."""

    def __init__(self, folder: Path, federation: Federation, policy: SitePolicy | None = None) -> None:
        self.folder, self.said = folder, list[str]()
        data = write_arrays(folder / "arrays", federation)
        for name, client in zip(SITES, "ab", strict=True):
            make_site(folder / name, name, data, "localhost:9092", client=client, check=False, policy=policy)

    def run(self, out: str = "run", method: str = "fedavg", bundle: bytes | None = None, **settings: Any) -> Result:
        policy = Policy(deadline=20.0, poll=0.0, min_sites=2)
        values = {**QUICK, **settings}
        job = Job(self.folder / out, method, values, SITES, wait=0.0, policy=policy)
        with _app(job) as app:
            sent = compat.bundle(app) if bundle is None else bundle
        nodes = {100 + k: node(100 + k, self.app(name, sent)) for k, name in enumerate(SITES)}
        self.said.clear()
        return run_job(FakeGrid(nodes), job, self.said.append)

    def app(self, name: str, bundle: bytes) -> Callable[[Message, Context], Message]:
        def call(message: Message, context: Context) -> Message:
            guard = Guard(self.folder / name, Worker())
            return Message(guard.answer(bundle, message.metadata.message_type, message.content), reply_to=message)

        return call
