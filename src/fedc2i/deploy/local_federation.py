"""A federation of real processes on this machine: a SuperLink, and a SuperNode for each site, with new keys."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedc2i.core.errors import UserError, one_line
from fedc2i.core.files import refuse_code
from fedc2i.deploy import coordinator_folder, job, keys
from fedc2i.deploy.approval import CodeStore
from fedc2i.deploy.child_process import free_port
from fedc2i.deploy.folder_settings import LOOPBACK
from fedc2i.deploy.job import Job
from fedc2i.deploy.policy import OPEN
from fedc2i.deploy.run_description import own_files
from fedc2i.deploy.site_folder import make_site, read_site
from fedc2i.deploy.superlink import open_superlink, run_on
from fedc2i.deploy.supernode import SuperNode, keep_running

FEDERATION = "federation"  # in the run folder, until the run is finished
COORDINATOR, SITES = "coordinator", "sites"  # in that folder


def set_up(
    wanted: Job, data: str, names: Sequence[str], keep: Path | None = None, settings: Mapping[str, Any] | None = None
) -> Job:
    """Makes the folders and keys of a coordinator and its sites; returns the job with these sites and keys.

    The sites are the clients ``names`` of ``data``; ``settings`` say how it is read, see `make_site`. All of it goes to
    the new folder ``keep``; by default it lies in the run folder until the run is finished.
    """
    folder = wanted.out / FEDERATION if keep is None else keep.absolute()
    files = own_files(wanted.method, wanted.settings.get("model"))
    own = coordinator_folder.make_coordinator(folder / COORDINATOR, [LOOPBACK], free_port(), LOOPBACK)
    for name in names:
        site, _ = make_site(
            folder / SITES / name,
            name,
            data,
            f"{LOOPBACK}:{own.port}",
            client=name,
            authority=own.authority,
            check=False,
            policy=OPEN,
            **(settings or {}),
        )
        coordinator_folder.admit(own, keys.read_request(site.request))
        CodeStore(site.folder).trust(file.read_bytes() for file in files.values())  # the user's own, on their machine
    local = FEDERATION if keep is None else str(folder)
    made = replace(wanted, sites=tuple(names), keys=coordinator_folder.admitted(own), local=local)
    made.write()
    return made


def read_job(out: Path, trust: bool = False) -> Job:
    """The job that was set up in a run folder, which may have been moved.

    Raises a `UserError` if it names Python files to execute, unless the user trusts it.
    """
    path = out / job.FILE
    try:
        found = replace(Job.read(path), out=out.absolute())
        place = found.out / found.local
        named = [found.method, found.settings.get("model")]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read ({one_line(error)}); run again with another --out") from None
    if not found.is_finished and not (place / SITES).is_dir():
        raise UserError(f"{place}: the sites' folders and models are missing; run again with another --out")
    if not found.is_finished:
        refuse_code(out, named, trust)
    found.refuse_changed_files()
    return found


def run_locally(job: Job, say: Callable[[str], None]) -> None:
    """Runs a job that was set up, or resumes it after its last finished round; ends all its processes."""
    folder = job.out / job.local
    port = free_port()  # the earlier one may be in use
    own = replace(coordinator_folder.read_coordinator(folder / COORDINATOR), port=port)
    sites = [replace(read_site(folder / SITES / name), coordinator=f"{LOOPBACK}:{port}") for name in job.sites]
    many = f"{len(sites)} sites (SuperNodes)" if len(sites) > 1 else "one site (a SuperNode)"
    say(f"starting a coordinator (Flower's SuperLink) on {LOOPBACK}:{port} and {many}, with TLS and keys")
    stop = threading.Event()
    link = open_superlink(own)
    watchers = []
    try:
        for site in sites:
            arguments = SuperNode(site), stop, _to_file(site.folder / "logs" / "events.log")
            watchers.append(threading.Thread(target=keep_running, args=arguments))
            watchers[-1].start()
        run_on(link, job, say)
    finally:
        stop.set()
        for watcher in watchers:
            watcher.join()
        link.stop()


def clear(job: Job) -> None:
    """Removes the folders of a finished job, unless the user asked to keep them."""
    if job.local == FEDERATION:
        shutil.rmtree(job.out / FEDERATION, ignore_errors=True)


def _to_file(path: Path) -> Callable[[str], None]:
    def write(line: str) -> None:
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")

    return write
