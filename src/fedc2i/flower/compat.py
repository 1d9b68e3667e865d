"""Everything that depends on Flower's internals: what this package calls, patches or reads there.

Flower promises stability only for its public modules, and the rest changes with every version. No other module may
import it. This one is written for one version, `SUPPORTED`; for a new version, read it top to bottom, change it, and
run ``tests/flower/test_compat.py`` and ``tests/deploy``. Flower is imported inside functions, because it is optional.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.metadata
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from fedc2i.core.errors import UserError, one_line

SUPPORTED = "1.41.0"
PUBLIC = ("flwr.app", "flwr.clientapp", "flwr.serverapp", "flwr.simulation")  # what other modules may import
ENVIRONMENT = {  # for every process that runs Flower
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",  # else it installs packages from the internet
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",  # seconds; by default a second is lost with every message
}


# Error codes and log lines

_LOST = (3, 4, 5)  # a message did not arrive, in either direction
_ERRORS = {
    1: "its Flower App could not be loaded; is fedc2i installed there?",
    2: "its program failed",
    3: "the message was lost",
    4: "it did not answer in time",
    5: "its connection was lost",
    7: "it rejected the Flower App",
    8: "its program crashed",
}
_REJECTED = 305  # exit code of a node that the SuperLink rejects


def is_lost(error: Any) -> bool:
    """Whether an error reply only says that a message was lost, so that it can be sent again."""
    return error.code in _LOST


def explain(error: Any) -> str:
    """An error reply in words, with Flower's own reason where that adds something."""
    words = _ERRORS.get(error.code, f"error {error.code}")
    reason = one_line(error.reason or "", 300)
    return f"{words} ({reason})" if reason and error.code not in _LOST else words


def node_id(log: str) -> int | None:
    """A SuperNode's number from its log; None until the SuperLink has accepted it."""
    found = re.findall(r"SuperNode ID: (\d+)", log)
    return int(found[-1]) if found else None


def rejection(log: str) -> str | None:
    """Why the SuperLink rejected a SuperNode, from its log; None if it did not."""
    lines = log.splitlines()
    at = [number for number, line in enumerate(lines) if f"Exit Code: {_REJECTED}" in line]
    if not at:
        return None
    reason = [line.strip() for line in lines[at[-1] + 1 : at[-1] + 4] if "Failed to initialize" not in line]
    return " ".join(filter(None, reason))


# The SuperLink


def is_from_its_node(body: bytes) -> bool:
    """Whether the messages in a request of a node say that they come from this node, whose key Flower checks."""
    from flwr.proto.fleet_pb2 import PushMessagesRequest
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    try:
        request = PushMessagesRequest.FromString(body)
    except DecodeError:
        return False
    return all(message.metadata.src_node_id == request.node.node_id for message in request.messages_list)


def run_superlink(gate: Any, words: Sequence[str], **options: Any) -> None:
    """Runs ``flower-superlink`` with an ASGI middleware, which has these options, as its outermost layer."""
    import uvicorn
    from flwr.superlink import extensions
    from flwr.superlink.cli.flower_superlink import flower_superlink
    from starlette.middleware import Middleware

    extensions.get_middleware = lambda: (Middleware(gate, **options),)
    from flwr.superlink import main as superlink  # reads the line above

    layers: list[Any] = [layer.cls for layer in superlink._get_middleware()]
    if gate not in layers:
        sys.exit(f"this version of Flower has no place for the gate; flwr {SUPPORTED} is needed")
    # By default it waits for sites to hang up, and trusts X-Forwarded-For from callers on this machine.
    uvicorn.run = partial(uvicorn.run, timeout_graceful_shutdown=2, proxy_headers=False)
    sys.argv = ["flower-superlink", *words]
    flower_superlink()


_PATIENCE = 20.0  # seconds that a SuperLink whose coordinator was killed has to end
_MESSAGES = (  # tables of the SuperLink's database that hold messages, or parts of them
    *("objects", "object_children", "run_objects", "message", "message_ins", "message_res", "task_message"),
    *("object_push_sessions", "object_push_session_roots", "object_push_session_pending", "series_context"),
)


def erase_messages(database: Path) -> None:
    """Removes the messages of all runs, with the models in them, from the database of a SuperLink that has ended.

    Flower deletes rows, but their bytes stay in free pages of the file and in its write-ahead log. Nodes and keys stay.
    The SuperLink of a coordinator that was killed may still be about to end: its database is waited for.
    Raises a `UserError` if the database is damaged or remains in use.
    """
    import sqlite3

    until = time.monotonic() + _PATIENCE
    while database.exists():
        try:
            with contextlib.closing(sqlite3.connect(database, isolation_level=None)) as found:
                found.execute("PRAGMA secure_delete = ON")
                found.execute("PRAGMA journal_mode = DELETE")  # the write-ahead log goes into the database; never waits
                tables = {name for (name,) in found.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
                for name in _MESSAGES:
                    if name in tables:
                        found.execute(f"DELETE FROM {name}")
                found.execute("VACUUM")
            return
        except sqlite3.Error as error:
            if getattr(error, "sqlite_errorcode", None) != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                raise UserError(f"{database}: its messages cannot be erased ({one_line(error)})") from None
        time.sleep(0.1)


# The SuperNode and the processes of its app


class _Clock:
    """Replaces the module ``time`` in the SuperNode's loop, to poll every second in place of every three."""

    def sleep(self, seconds: float) -> None:
        """Pauses of a second and more are between questions to the SuperLink, shorter ones wait for the app."""
        time.sleep(1.0 if seconds >= 1 else 0.05)

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


def run_supernode(words: Sequence[str], layer: Callable[[Any], Any]) -> None:
    """Runs ``flower-supernode`` with an ASGI middleware as the outermost layer of its own interface."""
    poll_objects(0.1)
    interface = importlib.import_module("flwr.supernode.main")
    make = interface.create_app
    interface.create_app = lambda **given: layer(make(**given))  # type: ignore[attr-defined]
    loop = importlib.import_module("flwr.supernode.start_client_internal")
    loop.time = _Clock()  # type: ignore[attr-defined]
    sys.argv = ["flower-supernode", *words]
    importlib.import_module("flwr.supernode.cli.flower_supernode").flower_supernode()


def poll_objects(seconds: float) -> None:
    """Sets the pause before asking again for parts of a message, which often arrive just after it; Flower's is 1 s."""
    pull = importlib.import_module("flwr.supercore.inflatable.inflatable_utils").pull_objects
    pull.__kwdefaults__["initial_backoff"] = seconds


Answering = Callable[[bytes, str, Any], Any]  # from a run's bundle, a message's kind and its content to a content
Launch = Callable[[Callable[[Answering], None]], None]


class _Executor:
    """Flower's executor protocol: calls ``launch`` with what fetches and answers each message."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch

    def get_eligible_capacity(self, supported_task_types: set[Any], **_: Any) -> tuple[set[Any], set[str]]:
        return {kind for kind in supported_task_types if kind.value == "flwr-clientapp"}, set()

    def wait_for_capacity(self, *_: Any, **__: Any) -> None:
        """There is always capacity: the SuperNode handles one message at a time."""

    def launch(self, spec: Any) -> Any:
        from flwr.supercore.superexec.executor import LaunchResult

        self._launch(partial(_run_app, spec))
        return LaunchResult.accepted()

    def reconcile(self) -> None:
        """Collects the exit codes of processes that have ended."""
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass

    def close(self) -> None:
        """The processes end with this one."""


def _run_app(spec: Any, answer: Answering) -> None:
    """Answers one message. Flower would unpack the run's bundle and execute it; nothing of that is done here."""
    from flwr.app import Message
    from flwr.supercore.exit import exit_handler

    runtime: Any = importlib.import_module("flwr.supernode.runtime.run_clientapp")
    exit_handler.registered_exit_handlers.clear()  # those of the executor
    bundles: list[bytes] = []

    def call(message: Any, context: Any) -> Any:
        return Message(answer(bundles[0], message.metadata.message_type, message.content), reply_to=message)

    runtime.install_from_fab = lambda content, **_: bundles.append(bytes(content))
    runtime.get_project_dir = lambda *_: Path()
    runtime.get_load_client_app_fn = lambda **_: lambda *_: call
    runtime.run_clientapp(spec.runtime_api_address, spec.token, spec.insecure)


def run_executor(address: str, secret: bytes, preload: Sequence[str], launch: Launch) -> None:
    """Takes messages from the SuperNode at ``address``; ``launch`` handles each in its own process.

    It is given a function that fetches the message, and sends the answer of the function that this is given.
    """
    if importlib.metadata.version("flwr") != SUPPORTED:
        sys.exit(f"flwr {SUPPORTED} is needed: another version might execute the code that comes with a run")
    loop = importlib.import_module("flwr.supercore.superexec.run_superexec")
    for name in ("flwr.supernode.runtime.run_clientapp", _SECAGG_MODULE, *preload):
        importlib.import_module(name)
    loop.get_executor = lambda *_, **__: _Executor(launch)  # type: ignore[attr-defined]
    loop.run_superexec(address, insecure=True, superexec_auth_secret=secret)


def to_bytes(content: Any) -> bytes:
    """The content of a message."""
    from flwr.common.serde import recorddict_to_proto

    return bytes(recorddict_to_proto(content).SerializeToString())


def from_bytes(content: bytes) -> Any:
    """The reverse; raises one of several exceptions for bytes that are none."""
    from flwr.common.serde import recorddict_from_proto
    from flwr.proto.recorddict_pb2 import RecordDict

    return recorddict_from_proto(RecordDict.FromString(content))


def bundle(app: Path) -> bytes:
    """The Flower App in a folder as it travels: a ZIP archive."""
    from flwr.cli.build import build_fab_from_disk

    try:
        return bytes(build_fab_from_disk(app))
    except Exception as error:  # Flower raises several kinds, some of click
        raise UserError(f"{app}: not a valid Flower App: {one_line(error) or type(error).__name__}") from None


# The SuperLink's control interface


class ControlClient:
    """Calls what is behind Flower's ``flwr`` command, without the seconds that starting this command takes."""

    def __init__(self, address: str, ca: Path) -> None:
        self.address, self._ca = address, ca

    @cached_property
    def _client(self) -> Any:
        from flwr.supercore.control import ControlHttpClient
        from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

        version = RuntimeVersionHttpInterceptor(component_name="flwr CLI")
        return ControlHttpClient.from_server_address(self.address, False, self._ca.read_bytes(), [version])

    def call(self, method: str, **fields: Any) -> Any:
        """One call, for example ``ListNodes``."""
        import httpx
        from flwr.proto import control_pb2

        try:
            return getattr(self._client, method)(getattr(control_pb2, f"{method}Request")(**fields))
        except httpx.HTTPStatusError as error:
            raise UserError(f"the SuperLink at {self.address} refused {method}: {_reason(error)}") from None
        except httpx.TransportError as error:
            raise UserError(f"the SuperLink at {self.address} does not answer: {error}") from None

    def start_run(self, app: Path, config: Mapping[str, bool | int | float | str]) -> int:
        """Starts the Flower App in a folder, and returns the run's number."""
        from flwr.common.serde import fab_to_proto, user_config_to_proto
        from flwr.supercore.fab import Fab

        content = bundle(app)
        fab = fab_to_proto(Fab(hashlib.sha256(content).hexdigest(), content, {}))
        reply = self.call("StartRun", fab=fab, override_config=user_config_to_proto(dict(config)))
        if not reply.HasField("run_id"):
            raise UserError(f"the SuperLink started no run: {reply.note or 'it gave no reason'}")
        return int(reply.run_id)

    def close(self) -> None:
        """Closes the connection; the next call opens another."""
        if "_client" in self.__dict__:
            self.__dict__.pop("_client").close()


def _reason(error: Any) -> str:
    from flwr.supercore.error import FlowerError

    known = FlowerError.from_json(error.response.text)
    if known is None:
        return f"HTTP {error.response.status_code} {one_line(error.response.text)}".strip()
    return one_line(f"{known.message} {known.public_details or ''}", 500)


# Secure aggregation

_SECAGG_MODULE = "flwr.client.mod.secure_aggregation.secaggplus_mod"
_SECAGG, _SECAGG_STATE = "secaggplus_configs", "secaggplus_state"  # records of a message and of a node
Stream = Callable[[bytes, int], Any]  # the mask of a secret, as this many numbers


def _secagg(
    stage: str, state: Any, site: int, values: Mapping[str, Any], numbers: Any = None, stream: Stream | None = None
) -> dict[str, Any]:
    """A site's part in one stage of Flower's SecAgg+; ``state``, a record of a node, holds its secrets meanwhile."""
    from flwr.app import ConfigRecord, Context, Message, RecordDict

    module = importlib.import_module(_SECAGG_MODULE)
    module.pseudo_rand_gen = partial(_masks, stream)  # type: ignore[attr-defined]
    content = RecordDict({_SECAGG: ConfigRecord({"stage": stage, **values})})
    message = Message(content, dst_node_id=site, message_type="train")
    try:
        reply = module.secaggplus_mod(message, Context(0, site, {}, state, {}), lambda *_: _upload(numbers, message))
    except UserError:
        raise
    except Exception as error:  # Flower raises several kinds; its words may quote what came from outside
        raise UserError(f"secure aggregation failed ({type(error).__name__}: {one_line(error)})") from None
    return dict(reply.content[_SECAGG])


def secagg_setup(state: Any, site: int) -> tuple[bytes, bytes]:
    """Makes the site's two pairs of keys; returns the public ones."""
    numbers = {"sample_num": 0, "share_num": 0, "threshold": 0, "target_range": 0, "mod_range": 2**32}
    found = _secagg("setup", state, site, {**numbers, "clipping_range": 0.0, "max_weight": 1.0})
    return found["pk1"], found["pk2"]


def secagg_share(
    state: Any, site: int, keys: Mapping[int, tuple[bytes, bytes]], threshold: int, levels: int
) -> tuple[list[int], list[bytes]]:
    """Shares of the site's secrets for the others, encrypted."""
    sizes = {"sample_num": len(keys), "share_num": len(keys), "threshold": threshold, "target_range": levels}
    state[_SECAGG_STATE].update({**sizes, "clipping_range": levels / 2})
    found = _secagg("share_keys", state, site, {str(number): list(pair) for number, pair in keys.items()})
    return found["dsts"], found["ctxts"]


def secagg_mask(
    state: Any, site: int, sources: Sequence[int], ciphertexts: Sequence[bytes], numbers: Any, stream: Stream
) -> Any:
    """Whole numbers from -levels/2 to levels/2 under the site's masks, preceded by one more; all below 2³²."""
    import numpy as np
    from flwr.common import bytes_to_ndarray

    values = {"srcs": list(sources), "ctxts": list(ciphertexts)}
    found = _secagg("collect_masked_vectors", state, site, values, numbers, stream)
    return np.concatenate([bytes_to_ndarray(part) for part in found["masked_params"]])


def secagg_unmask(
    state: Any, site: int, active: Sequence[int], dropped: Sequence[int]
) -> tuple[list[int], list[bytes]]:
    """Shares of the private masks of active sites and of the keys of those that have dropped out."""
    found = _secagg("unmask", state, site, {"active_nids": list(active), "dead_nids": list(dropped)})
    return found["nids"], found["shares"]


def _masks(stream: Stream | None, secret: bytes, _: int, shapes: Sequence[tuple[int, ...]]) -> list[Any]:
    """In place of Flower's generator, whose seed has 32 bits."""
    assert stream is not None  # given for the one stage that has masks
    sizes = [shape[0] for shape in shapes]  # all are flat
    found, low = stream(secret, sum(sizes)), 0
    parts = []
    for size in sizes:
        parts.append(found[low : low + size])
        low += size
    return parts


def _upload(numbers: Any, message: Any) -> Any:
    from flwr.app import Message
    from flwr.common import Code, FitRes, Status, ndarrays_to_parameters
    from flwr.compat.common.recorddict_compat import fitres_to_recorddict

    result = FitRes(Status(Code.OK, ""), ndarrays_to_parameters([numbers]), 1, {})
    return Message(fitres_to_recorddict(result, False), reply_to=message)


def secagg_secret(shares: Sequence[bytes]) -> bytes:
    """A secret from enough of its shares; raises a `UserError` if they do not fit together."""
    from flwr.common.secure_aggregation.crypto.shamir import combine_shares

    try:
        return bytes(combine_shares(list(shares)))
    except (ValueError, IndexError, TypeError) as error:
        raise UserError(f"shares that do not fit together ({one_line(error)})") from None


def secagg_pair_secret(private: bytes, public: bytes) -> bytes:
    """What two sites derive their common mask from; raises a `UserError` for bytes that are no keys."""
    from flwr.common.secure_aggregation.crypto.symmetric_encryption import generate_shared_key
    from flwr.supercore.primitives.asymmetric import bytes_to_private_key, bytes_to_public_key

    try:
        return bytes(generate_shared_key(bytes_to_private_key(private), bytes_to_public_key(public)))
    except (ValueError, TypeError) as error:
        raise UserError(f"a key that is none ({one_line(error)})") from None
