"""All clients as virtual sites in Flower's simulation, on this machine or on a Ray cluster."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import cloudpickle
import torch

from fedc2i.core.errors import UserError, one_line
from fedc2i.engine import attacks
from fedc2i.engine.checks import check
from fedc2i.engine.client import RunContext
from fedc2i.engine.executors.workers.pool import cores
from fedc2i.engine.records import Round
from fedc2i.engine.settings import EngineSettings
from fedc2i.flower.compat import ENVIRONMENT
from fedc2i.methods.base import Method
from fedc2i.models.model import Model

os.environ.update({**ENVIRONMENT, **os.environ})
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import ray
from flwr.app import Context, Message
from flwr.serverapp import ServerApp
from flwr.simulation import run_simulation

from fedc2i.data.federation import Federation
from fedc2i.flower import message_handlers
from fedc2i.flower.answer_collector import Policy
from fedc2i.flower.connections import Grid, SiteConnections
from fedc2i.flower.coordinator import Coordinator
from fedc2i.flower.enrolment import wait_for_sites
from fedc2i.flower.messages import Task
from fedc2i.flower.site import Assignment, expected_upload

was_interrupted = False  # if True, some of Flower's threads may never end


@dataclass(frozen=True)
class _World:
    """What every process of the simulation needs; it is sent once to each."""

    method: Method
    model: Model
    federation: Federation
    settings: EngineSettings
    device: torch.device


def federate(
    method: Method,
    model: Model,
    federation: Federation,
    settings: EngineSettings,
    seeds: Sequence[int],
    policy: Policy,
    ray_address: str | None = None,
    device: torch.device | str = "cpu",
    on_round: Callable[[Round], None] | None = None,
    on_client: Callable[[int, int], None] | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> None:
    """Runs one federation with every seed, one after the other; arguments as for the simulator's `federate`.

    The models stay with the virtual sites; only reports come back.

    Args:
        policy: how long to wait for whom, and how models travel.
        device: where sites compute.
        ray_address: of a running cluster, ``auto`` for the one on this machine; None starts one here.
        say: takes one line for the log.
    """
    check(method, model, federation, settings)
    stop = threading.Event()
    with _ray(ray_address):
        seen = _World(method, model, federation, settings, torch.device(device))
        world = ray.put(cloudpickle.dumps(seen))  # Ray's own pickle cannot send classes from a user's file
        server = ServerApp()

        @server.main()
        def main(grid: Any, context: Context) -> None:
            connections = SiteConnections(_Stoppable(grid, stop), say, ttl=2 * policy.deadline + 60)
            count = len(federation.clients)
            wait_for_sites(connections, federation.names, count, count, policy.deadline, lambda line: None, policy.poll)
            samples = {client.name: len(client.train) for client in federation.clients}
            for seed in seeds:
                recipe = RunContext(method, model, settings, settings.rounds, seed)
                work, classes = Assignment(recipe, settings), len(federation.classes)
                expected = expected_upload(work, federation.clients[0], classes)

                def say_seed(line: str, seed: int = seed) -> None:
                    say(f"seed {seed}, {line}")

                run = Coordinator(
                    connections,
                    samples,
                    work,
                    expected,
                    classes,
                    policy,
                    f"seed{seed}",
                    say=say_seed,
                    on_client=on_client,
                )
                for report in run.rounds():
                    if on_round is not None:
                        on_round(report)

        try:
            run_simulation(
                server,
                message_handlers.make(_home(world), _assignment(world)),
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

    def get_nodes(self) -> Iterable[Any]:
        return self._going().get_nodes()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return self._going().push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return self._going().pull_messages(message_ids)

    def _going(self) -> Grid:
        if self._stop.is_set():
            raise UserError("interrupted")
        return self._grid


_worlds: dict[str, _World] = {}  # in each of Ray's processes, at most one


def _load(world: Any) -> _World:
    if world.hex() not in _worlds:
        _worlds.clear()
        _worlds[world.hex()] = cloudpickle.loads(ray.get(world))
    return _worlds[world.hex()]


def _home(world: Any) -> Callable[[Context], message_handlers.Home]:
    def find(context: Context) -> message_handlers.Home:
        own, number = _load(world), int(context.node_config["partition-id"])
        return message_handlers.Home(own.federation.clients[number], own.federation.classes, device=own.device)

    return find


def _assignment(world: Any) -> Callable[[Task], tuple[Assignment, tuple[str, ...]]]:
    def find(task: Task) -> tuple[Assignment, tuple[str, ...]]:
        own, seed = _load(world), int(task.run.removeprefix("seed"))
        attackers = attacks.parse(own.settings.attack, own.federation.names, seed)
        recipe = RunContext(own.method, own.model, own.settings, own.settings.rounds, seed, attackers)
        return Assignment(recipe, own.settings), own.federation.classes

    return find


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
