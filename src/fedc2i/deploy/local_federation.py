"""A federation of real processes on this machine: a SuperLink, and a SuperNode for each site, with new keys."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from fedc2i.core.errors import UserError, one_line
from fedc2i.core.files import write_atomically
from fedc2i.deploy.addresses import LOOPBACK, free_port
from fedc2i.deploy.coordinator_folder import admit, admitted, make_coordinator, read_coordinator
from fedc2i.deploy.keys import read_request
from fedc2i.deploy.lead import JOB, Job, refuse_changed_files
from fedc2i.deploy.secret_files import read_small
from fedc2i.deploy.site_folder import make_site, read_site
from fedc2i.deploy.superlink_run import conduct, open_link
from fedc2i.deploy.supervisor import site_node, supervise

FEDERATION = "federation"  # in the run folder, until the run is finished
COORDINATOR, SITES = "coordinator", "sites"  # in that folder


def set_up(
    job: Job,
    data: str,
    names: Sequence[str],
    keep: Path | None = None,
    data_dir: Path | None = None,
    image_size: int | None = None,
) -> Job:
    """Makes the folders and keys of a coordinator and its sites; returns the job with these sites and keys.

    Args:
        job: what to run.
        data: the data set whose clients are the sites.
        names: of the clients.
        keep: a new folder for all of it; by default it lies in the run folder until the run is finished.
        data_dir: where the data lies.
        image_size: edge length of the images, if not the data's own.
    """
    folder = job.out / FEDERATION if keep is None else keep.absolute()
    own = make_coordinator(folder / COORDINATOR, [LOOPBACK], free_port(), LOOPBACK)
    for name in names:
        site, _ = make_site(
            folder / SITES / name,
            name,
            data,
            f"{LOOPBACK}:{own.port}",
            data_dir=data_dir,
            client=name,
            image_size=image_size,
            authority=read_small(own.authority),
            check=False,
        )
        admit(own, read_request(read_small(site.request), str(site.request)))
    local = FEDERATION if keep is None else str(folder)
    job = replace(job, sites=tuple(names), keys=admitted(own), local=local)
    write_atomically(job.out / JOB, job.to_json().encode())
    return job


def read_job(out: Path) -> Job:
    """The job that was set up in a run folder, which may have been moved."""
    try:
        job = replace(Job.from_json((out / JOB).read_text(encoding="utf-8")), out=out.absolute())
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{out / JOB}: cannot be read ({one_line(error)}); run again with another --out") from None
    if not job.is_finished and not (job.out / job.local / SITES).is_dir():
        raise UserError(
            f"{job.out / job.local}: the sites' folders and models are missing; run again with another --out"
        )
    refuse_changed_files(job)
    return job


def run_locally(job: Job, say: Callable[[str], None]) -> None:
    """Runs a job that was set up, or resumes it after its last finished round; ends all its processes."""
    folder = job.out / job.local
    own = replace(read_coordinator(folder / COORDINATOR), port=free_port())  # the earlier port may be in use
    sites = [replace(read_site(folder / SITES / name), coordinator=f"{LOOPBACK}:{own.port}") for name in job.sites]
    many = f"{len(sites)} sites (SuperNodes)" if len(sites) > 1 else "one site (a SuperNode)"
    say(f"starting a coordinator (Flower's SuperLink) on {LOOPBACK}:{own.port} and {many}, with TLS and keys")
    stop = threading.Event()
    link = open_link(own)
    watchers = [
        threading.Thread(target=supervise, args=(site_node(site), stop, _to_file(site.logs / "events.log")))
        for site in sites
    ]
    try:
        for watcher in watchers:
            watcher.start()
        conduct(link, job, say)
    finally:
        stop.set()
        for watcher in watchers:
            if watcher.ident is not None:
                watcher.join()
        link.stop()


def clear(job: Job) -> None:
    """Removes the folders of a finished job, unless the user asked to keep them."""
    if job.local == FEDERATION:
        shutil.rmtree(job.out / FEDERATION, ignore_errors=True)


def _to_file(path: Path) -> Callable[[str], None]:
    def write(line: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")

    return write
