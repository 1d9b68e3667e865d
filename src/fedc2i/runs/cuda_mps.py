"""A CUDA Multi-Process Service (MPS) of our own, for a few processes that share a GPU.

Without it the GPU gives each process time slices, and small kernels of one run leave most of the GPU idle in its slice.
Under MPS kernels of all processes run at the same time. It changes no number: each kernel is the same.

The service runs in a separate folder, known only to processes that are given its `environment`. A shell watches over
it: when this process ends, in whatever way, its end of a pipe is closed, and the shell ends the service.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

TOOL = "nvidia-cuda-mps-control"  # comes with the driver
_PIPES, _LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
_STARTING, _ENDING = 2.0, 15.0  # seconds
_WATCH = """
"$TOOL" -f </dev/null & control=$!
read -r line
servers=$(echo get_server_list | timeout 2 "$TOOL")
echo quit | timeout 5 "$TOOL" || kill -9 $servers  # quit waits for processes that are about to end
{ sleep 5; kill -9 $servers "$control"; } & late=$!
wait "$control"
kill "$late"
rm -rf "$FOLDER"
"""


class PrivateMps:
    """The service, from `start` until `end`, or until this process ends.

    Attributes:
        environment: variables with which a process finds it.
    """

    def __init__(self, tool: str, folder: Path) -> None:
        """Starts it; the first process that opens the GPU under it takes a second longer."""
        self.environment = {_PIPES: str(folder / "pipes"), _LOGS: str(folder / "logs")}
        for path in self.environment.values():
            Path(path).mkdir()
        self._watcher = subprocess.Popen(
            ["/bin/sh", "-c", _WATCH],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **self.environment, "TOOL": tool, "FOLDER": str(folder)},
            start_new_session=True,  # Ctrl-C is ours to handle
        )

    @classmethod
    def start(cls) -> PrivateMps | None:
        """A new service; None where there is no such program, another one runs, or GPUs would be numbered otherwise."""
        tool = shutil.which(TOOL)
        if tool is None or _PIPES in os.environ or _renumbers() or _runs_already():
            return None
        try:
            folder = Path(tempfile.mkdtemp(prefix="fedc2i-mps-"))
        except OSError:
            return None
        try:
            return cls(tool, folder)
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            return None

    def end(self) -> None:
        """Asks the service to end as soon as nobody uses it; `wait` waits for that."""
        assert self._watcher.stdin is not None
        self._watcher.stdin.close()

    def wait(self) -> None:
        """Returns when nothing of it is left."""
        try:
            self._watcher.wait(_ENDING)
        except subprocess.TimeoutExpired:
            self._watcher.kill()
            self._watcher.wait()


def await_service() -> None:
    """Waits, in a process that is about to use it, until the service runs: CUDA would do without it before."""
    until = time.monotonic() + _STARTING
    with suppress(OSError):
        while _PIPES in os.environ and not Path(os.environ[_PIPES], "control").exists() and time.monotonic() < until:
            time.sleep(0.02)


def _renumbers() -> bool:
    """Whether a service would number GPUs otherwise than its clients do: it counts the visible ones from 0."""
    visible = [own.strip() for own in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    return any(own.isdecimal() and int(own) != place for place, own in enumerate(visible))


def _runs_already() -> bool:
    """Whether a process of this machine is such a service, by its name, of which the system keeps 15 letters.

    With one for the whole machine processes share the GPU anyway; one of another command may use the GPU for itself.
    """
    for path in Path("/proc").glob("[0-9]*/comm"):
        with suppress(OSError):  # it has ended
            if path.read_bytes().strip() == TOOL[:15].encode():
                return True
    return False
