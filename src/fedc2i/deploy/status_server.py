"""The coordinator's local port for those who watch it: ``/healthz`` and ``/metrics``, and nothing else.

It answers with counts and the names of sites only, reads no body, and changes nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from fedc2i.core.errors import UserError
from fedc2i.deploy.folder_settings import check_bind, check_port
from fedc2i.deploy.run_counters import sample

MOST_TEXT = 2**20  # bytes of counters
_PATIENCE = 5.0  # seconds that a caller has for its request


@contextmanager
def status_server(address: str, counters: Sequence[Path], is_alive: Callable[[], bool]) -> Iterator[int]:
    """Serves a run's health and counters on ``HOST:PORT`` while the context lasts; gives the port.

    ``counters`` are the files of the run's program and of the gate, ``is_alive`` says whether the SuperLink runs.
    """
    host, _, port = address.rpartition(":")
    where = check_bind(host.strip("[]"), "--status"), check_port(int(port) if port.isdecimal() else 0, "--status")

    class Handler(BaseHTTPRequestHandler):
        timeout = _PATIENCE

        def do_GET(self) -> None:
            """Answers one request."""
            if self.path == "/healthz":
                alive = is_alive()
                self._answer(200 if alive else 503, "text/plain", b"ok\n" if alive else b"the SuperLink has ended\n")
            elif self.path == "/metrics":
                self._answer(200, "text/plain; version=0.0.4; charset=utf-8", metrics_text(counters, is_alive()))
            else:
                self._answer(404, "text/plain", b"only /healthz and /metrics are here\n")

        def _answer(self, status: int, kind: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def version_string(self) -> str:
            """Nothing about versions."""
            return "fedc2i"

        def log_message(self, format: str, *args: object) -> None:
            """Requests are not logged."""

    try:
        server = ThreadingHTTPServer(where, Handler)
    except OSError as error:
        raise UserError(f"--status {address}: cannot listen there ({error.strerror})") from None
    thread = threading.Thread(target=server.serve_forever, name="status", daemon=True)
    thread.start()
    try:
        yield int(server.server_address[1])
    finally:
        server.shutdown()
        server.server_close()


def metrics_text(counters: Sequence[Path], is_alive: bool) -> bytes:
    """Whether the SuperLink runs, and the counters as the programs wrote them."""
    text = ("\n".join(sample("up", "gauge", "Whether the SuperLink runs.", int(is_alive))) + "\n").encode()
    for path in counters:
        with suppress(OSError), path.open("rb") as file:  # the run may not have started yet
            text += file.read(MOST_TEXT)
    return text
