"""Talks to a SuperLink on this machine: registers sites' keys, starts runs, follows and stops them.

Uses the interface behind Flower's ``flwr`` command, in this process: a call takes milliseconds instead of the
seconds of starting that command.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from fedc2i.core.errors import UserError

Value = bool | int | float | str


class Node(NamedTuple):
    """A registered site: its number, the name given at registration, its state, its public key (PEM)."""

    id: int
    name: str
    status: str  # registered (never seen), online, offline
    public_key: bytes


@dataclass(frozen=True)
class Run:
    """Where a run is: ``state`` is pending, starting, running, completed, failed or stopped; ``reason`` if failed."""

    id: int
    state: str
    reason: str

    @property
    def is_finished(self) -> bool:
        """Whether nothing more will happen to it."""
        return self.state in ("completed", "failed", "stopped")


def public_key(path: Path) -> bytes:
    """A site's public key file (OpenSSH) in the form that Flower keeps (PEM).

    Raises:
        UserError: if it is no key on a NIST curve.
    """
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key

    try:
        key = load_ssh_public_key(path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"no such file: {path}") from None
    except Exception as error:  # the package raises several kinds
        raise UserError(f"{path}: not a public key in OpenSSH form ({error})") from None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise UserError(f"{path}: a key on a NIST curve is needed, e.g. of ssh-keygen -t ecdsa -b 384")
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


class Control:
    """The control interface of the SuperLink at ``address``; ``ca`` is its authority's certificate, if encrypted."""

    def __init__(self, address: str, ca: Path | None) -> None:
        self.address, self.ca = address, ca

    @cached_property
    def _client(self) -> Any:
        from flwr.supercore.control import ControlHttpClient
        from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

        _bypass_proxies(self.address.rpartition(":")[0].strip("[]"))
        certificates = self.ca.read_bytes() if self.ca else None
        version = RuntimeVersionHttpInterceptor(component_name="flwr CLI")
        return ControlHttpClient.from_server_address(self.address, self.ca is None, certificates, [version])

    def _call(self, method: str, request: str, **fields: Any) -> Any:
        """One call; what goes wrong becomes one line."""
        import httpx
        from flwr.proto import control_pb2

        try:
            return getattr(self._client, method)(getattr(control_pb2, request)(**fields))
        except httpx.HTTPStatusError as error:
            raise UserError(f"the SuperLink at {self.address} refused {method}: {_reason(error)}") from None
        except httpx.TransportError as error:
            raise UserError(f"the SuperLink at {self.address} does not answer: {error}") from None

    def close(self) -> None:
        """Ends the connection; the next call opens another."""
        if "_client" in self.__dict__:
            self.__dict__.pop("_client").close()

    def nodes(self) -> list[Node]:
        """All registered sites."""
        told = self._call("ListNodes", "ListNodesRequest").nodes_info
        known = [node for node in told if node.status != "unregistered"]
        return [Node(node.node_id, node.name, node.status, node.public_key) for node in known]

    def register(self, key: bytes, name: str) -> int:
        """Lets the site with this public key in, under this name; its number. Again is no change.

        Raises:
            UserError: if the key has another name, or the name another key.
        """
        for node in self.nodes():
            if node.public_key == key and node.name == name:
                return node.id
            if node.public_key == key:
                raise UserError(f"the key of {name!r} is registered as {node.name!r} already: unregister that first")
            if node.name == name:
                raise UserError(f"{name!r} is registered with another key already: unregister it first")
        return int(self._call("RegisterNode", "RegisterNodeRequest", public_key=key, name=name).node_id)

    def unregister(self, name: str) -> bool:
        """Lets this site in no longer, at once; whether it was registered."""
        found = [node for node in self.nodes() if node.name == name]
        for node in found:
            self._call("UnregisterNode", "UnregisterNodeRequest", node_id=node.id)
        return bool(found)

    def run(self, app: Path, config: Mapping[str, Value] | None = None) -> int:
        """Starts a run of the Flower App in this folder; its number.

        Args:
            app: the folder; its files travel to the SuperLink and to every site.
            config: replaces values of the app's ``[tool.flwr.app.config]``; other keys are refused.

        Raises:
            UserError: if the folder holds no valid app, or the SuperLink refuses the run.
        """
        from flwr.common.serde import fab_to_proto, user_config_to_proto
        from flwr.supercore.fab import Fab

        content = _pack(app, config or {})
        fab = fab_to_proto(Fab(hashlib.sha256(content).hexdigest(), content, {}))
        told = self._call(
            "StartRun", "StartRunRequest", fab=fab, override_config=user_config_to_proto(dict(config or {}))
        )
        if not told.HasField("run_id"):
            raise UserError(f"the SuperLink started no run: {told.note or 'it does not say why'}")
        return int(told.run_id)

    def runs(self) -> list[Run]:
        """All runs that the SuperLink knows."""
        return [_run(run) for run in self._call("ListRuns", "ListRunsRequest").run_dict.values()]

    def status(self, run: int) -> Run:
        """Where a run is."""
        found = self._call("ListRuns", "ListRunsRequest", run_id=run).run_dict
        if run not in found:
            raise UserError(f"the SuperLink at {self.address} knows no run {run}")
        return _run(found[run])

    def stop_run(self, run: int) -> None:
        """Stops a run; no harm if it has finished."""
        if not self.status(run).is_finished:
            with contextlib.suppress(UserError):  # it may finish at this very moment
                self._call("StopRun", "StopRunRequest", run_id=run)

    def stop_all(self) -> list[int]:
        """Stops all runs that are not finished, e.g. those of before a restart; their numbers."""
        unfinished = [run.id for run in self.runs() if not run.is_finished]
        for run in unfinished:
            self.stop_run(run)
        return unfinished


def _pack(app: Path, config: Mapping[str, Value]) -> bytes:
    """The app as the one file that Flower sends around, once the configuration is known to fit it."""
    from flwr.cli.build import build_fab_from_disk
    from flwr.common.config import flatten_dict

    try:
        settings = tomllib.loads((app / "pyproject.toml").read_text(encoding="utf-8"))
        known = flatten_dict(settings["tool"]["flwr"]["app"].get("config", {}))
    except (OSError, KeyError, ValueError):
        raise UserError(f"{app}: no Flower App (a folder whose pyproject.toml has [tool.flwr.app])") from None
    if unknown := sorted(set(config) - set(known)):
        raise UserError(f"{app}: unknown settings {', '.join(unknown)}; known are {', '.join(sorted(known)) or 'none'}")
    try:
        return bytes(build_fab_from_disk(app))
    except Exception as error:  # Flower raises several kinds, some of click
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{app}: not a valid Flower App: {reason}") from None


def _run(told: Any) -> Run:
    status = told.status
    return Run(told.run_id, status.sub_status or status.status, status.details)


def _reason(error: Any) -> str:
    from flwr.supercore.error import FlowerError

    known = FlowerError.from_json(error.response.text)
    if known is None:
        return f"HTTP {error.response.status_code} {error.response.text[:200]}".strip()
    return " ".join(filter(None, (f"{known.message}", known.public_details))).replace("\n", " ")


def _bypass_proxies(host: str) -> None:
    """Calls to this machine never go through a proxy that the environment names."""
    present = (os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or "").split(",")
    os.environ["no_proxy"] = ",".join(dict.fromkeys(filter(None, (*present, "127.0.0.1", "localhost", "::1", host))))
