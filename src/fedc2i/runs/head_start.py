"""Processes for a GPU that start before torch is imported here: they do that, and open the GPU, while data is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from fedc2i.core.settings import cores
from fedc2i.runs.gpu_share import most_processes
from fedc2i.runs.side_by_side_runs import Processes

GPU_FILES = "nvidia[0-9]*"


@contextmanager
def started_ahead(settings: Mapping[str, str]) -> Iterator[Processes | None]:
    """Processes for the GPU that these settings will use; None where they surely use none, or one process does all.

    A device file says whether there is a GPU: torch, which knows better, takes seconds to import.
    """
    workers = settings.get("workers", "0")
    count = min(most_processes(int(workers)), cores()) if workers.isdecimal() else 1  # wrong ones are refused later
    if count < 2 or settings.get("device", "auto") == "cpu" or not any(Path("/dev").glob(GPU_FILES)):
        yield None
        return
    with Processes(count, on_gpu=True) as processes:
        yield processes
