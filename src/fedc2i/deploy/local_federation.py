"""A federation of real processes on this machine: an authority for the day, a SuperLink, a SuperNode for each site."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Mapping
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

FEDERATION = "federation"  # of a run folder, until the run is finished
COORDINATOR, SITES = "coordinator", "sites"  # in there


def set_up(
    job: Job,
    data: str,
    clients: Mapping[str, str],
    keep: Path | None = None,
    data_dir: Path | None = None,
    image_size: int | None = None,
) -> Job:
    """Makes the folders and keys of a coordinator and of all its sites, and writes down where they are.

    Args:
        job: what to run.
        data: whose clients the sites are.
        clients: by site, the client of the data that it is.
        keep: a new folder for them; by default they lie in the run folder until the run is finished.
        data_dir: where the data lies.
        image_size: side of the images, if not the data's own.

    Returns:
        The job with its sites and keys.

    Raises:
        UserError: if something cannot be written.
    """
    folder = job.out / FEDERATION if keep is None else keep.absolute()
    own = make_coordinator(folder / COORDINATOR, [LOOPBACK], free_port(), LOOPBACK)
    for name, client in clients.items():
        site, _ = make_site(
            folder / SITES / name,
            name,
            data,
            f"{LOOPBACK}:{own.port}",
            data_dir=data_dir,
            client=client,
            image_size=image_size,
            authority=read_small(own.authority),
            check=False,
        )
        admit(own, read_request(read_small(site.request), str(site.request)))
    local = FEDERATION if keep is None else str(folder)
    job = replace(job, sites=tuple(clients), keys=admitted(own), local=local)
    write_atomically(job.out / JOB, job.to_json().encode())
    return job


def read_job(out: Path) -> Job:
    """The job that was set up in a run folder, wherever that lies by now.

    Raises:
        UserError: if it cannot be read, the sites' folders are gone, or the method's or model's file was changed.
    """
    try:
        job = replace(Job.from_json((out / JOB).read_text(encoding="utf-8")), out=out.absolute())
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{out / JOB}: cannot be read ({one_line(error)}); run again with another --out") from None
    if not job.is_finished and not (job.out / job.local / SITES).is_dir():
        raise UserError(
            f"{job.out / job.local}: the sites' folders are gone, and their models with them; run again with another "
            "--out"
        )
    refuse_changed_files(job)
    return job


def run_locally(job: Job, say: Callable[[str], None]) -> None:
    """Runs a job that was set up over real processes, and ends every one of them, whatever happens.

    A run that was cut off goes on from its last finished round.

    Raises:
        UserError: if something does not start, or the run fails.
    """
    folder = job.out / job.local
    own = replace(read_coordinator(folder / COORDINATOR), port=free_port())  # the one of before may be taken by now
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
    """Removes the folders of a finished job, unless they were to be kept."""
    if job.local == FEDERATION:
        shutil.rmtree(job.out / FEDERATION, ignore_errors=True)


def _to_file(path: Path) -> Callable[[str], None]:
    def write(line: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")

    return write
