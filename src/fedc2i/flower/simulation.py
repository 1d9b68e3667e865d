"""All clients as virtual sites in Flower's simulation, on this machine or on a Ray cluster."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import cloudpickle
import torch

from fedc2i.core.errors import UserError, one_line
from fedc2i.core.settings import EngineSettings, cores
from fedc2i.engine.client import RunContext
from fedc2i.engine.records import Round
from fedc2i.engine.simulator import check
from fedc2i.flower.compat import ENVIRONMENT
from fedc2i.methods.base import Method
from fedc2i.models.model import Model

os.environ.update({**ENVIRONMENT, **os.environ})
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import ray
from flwr.app import Context
from flwr.serverapp import ServerApp
from flwr.simulation import run_simulation

from fedc2i.data.federation import Federation
from fedc2i.flower import site
from fedc2i.flower.answer_collector import Policy
from fedc2i.flower.connections import Grid, SiteConnections
from fedc2i.flower.coordinator import Coordinator
from fedc2i.flower.enrolment import wait_for_sites
from fedc2i.flower.message_format import Task

was_interrupted = False  # if True, some of Flower's threads may never end


@dataclass(frozen=True)
class _World:
    """What every process of the simulation needs; it is sent once to each."""

    method: Method
    model: Model
    federation: Federation
    settings: EngineSettings
    device: torch.device

    def assignment(self, seed: int) -> site.Assignment:
        context = RunContext.of_seed(self.method, self.model, self.settings, self.federation.names, seed)
        return site.Assignment(context, self.settings)


def federate(
    method: Method,
    model: Model,
    federation: Federation,
    settings: EngineSettings,
    seeds: Sequence[int],
    policy: Policy,
    ray_address: str | None = None,
    device: torch.device | str = "cpu",
    on_round: Callable[[Round], None] = lambda report: None,
    on_client: Callable[[int, int], None] | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> None:
    """Runs one federation with every seed, one after the other; arguments as for the simulator's `simulate`.

    The models stay with the virtual sites; only reports come back. ``ray_address`` is that of a running cluster,
    ``auto`` for the one on this machine; None starts one here.
    """
    check(method, model, federation, settings)
    stop = threading.Event()
    with _ray(ray_address):
        world = _World(method, model, federation, settings, torch.device(device))
        sent = ray.put(cloudpickle.dumps(world))  # Ray's own pickle cannot send classes from a user's file
        server = ServerApp()

        @server.main()
        def main(grid: Any, context: Context) -> None:
            connections = SiteConnections(cast(Grid, _Stoppable(grid, stop)), say, ttl=2 * policy.deadline + 60)
            count = len(federation.clients)
            wait, silent = policy.deadline, lambda line: None
            wait_for_sites(connections, federation.names, count, count, wait, silent, policy.poll, closed=True)
            for seed in seeds:

                def say_seed(line: str, seed: int = seed) -> None:
                    say(f"seed {seed}, {line}")

                work, run = world.assignment(seed), f"seed{seed}"
                coordinator = Coordinator(connections, federation, work, policy, run, say=say_seed, on_client=on_client)
                for report in coordinator.rounds():
                    on_round(report)

        try:
            run_simulation(
                server,
                site.make_app(partial(_home, sent), partial(_assignment, sent)),
                num_supernodes=len(federation.clients),
                backend_config={"client_resources": {"num_cpus": settings.threads, "num_gpus": 0.0}},
            )
        except KeyboardInterrupt:
            global was_interrupted
            was_interrupted = True
            raise
        finally:
            stop.set()


class _Stoppable:
    """A grid that ends the server's thread when the main thread was interrupted."""

    def __init__(self, grid: Grid, stop: threading.Event) -> None:
        self._grid, self._stop = grid, stop

    def __getattr__(self, name: str) -> Any:
        if self._stop.is_set():
            raise UserError("interrupted")
        return getattr(self._grid, name)


_worlds: dict[str, _World] = {}  # in each of Ray's processes, at most one


def _load(sent: Any) -> _World:
    if sent.hex() not in _worlds:
        _worlds.clear()
        _worlds[sent.hex()] = cloudpickle.loads(ray.get(sent))
    return _worlds[sent.hex()]


def _home(sent: Any, context: Context) -> site.Home:
    own, number = _load(sent), int(context.node_config["partition-id"])
    return site.Home(own.federation.clients[number], own.federation.classes, device=own.device)


def _assignment(sent: Any, task: Task) -> tuple[site.Assignment, tuple[str, ...]]:
    own = _load(sent)
    return own.assignment(int(task.run.removeprefix("seed"))), own.federation.classes


def _reach(address: str | None) -> None:
    """Raises a `UserError` if nobody listens there; Ray itself would try for minutes."""
    host, colon, port = (address or "").removeprefix("ray://").rpartition(":")
    if not colon:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except (OSError, ValueError, OverflowError) as error:
        raise UserError(f"Ray at '{address}': no cluster answers there ({error})") from None


@contextmanager
def _ray(address: str | None) -> Iterator[None]:
    """Starts or joins Ray for the time of a run, and silences Flower's and Ray's own log."""
    _reach(address)
    flower = logging.getLogger("flwr")
    before = flower.level
    flower.setLevel(logging.CRITICAL)  # errors of a site come back as answers, and are logged from there
    here = {"address": "local", "num_cpus": cores()}  # also beside a cluster that runs already
    arguments: dict[str, Any] = here if address is None else {"address": address}
    try:
        ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR, **arguments)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise UserError(f"Ray at '{address or 'this machine'}': {one_line(error, 300)}") from None
    try:
        yield
    finally:
        ray.shutdown()
        flower.setLevel(before)
