"""A federation of real processes on this machine: an authority for the day, a SuperLink, a SuperNode for each site."""

from __future__ import annotations

import fcntl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from fedc2i.deploy.conduct import PRELOAD, conduct, open_link
from fedc2i.deploy.coordinator import admit, admitted, make_coordinator
from fedc2i.deploy.files import read_small
from fedc2i.deploy.folders import Site
from fedc2i.deploy.keys import read_request
from fedc2i.deploy.launch import LOOPBACK, free_port
from fedc2i.deploy.processes import SuperNode
from fedc2i.deploy.site import make_site
from fedc2i.deploy.supervise import supervise
from fedc2i.engine.flower.lead import Job
from fedc2i.errors import UserError


def supernode(site: Site, insecure: bool = False, forced: bool = False) -> SuperNode:
    """A site's program, not started yet."""
    return SuperNode(
        site.logs,
        site.coordinator,
        root_certificates=None if insecure else site.authority,
        private_key=None if insecure else site.key,
        node_config={"site": str(site.folder)},
        preload=PRELOAD,
        name=site.name,
        forced=forced,
    )


@contextmanager
def alone(site: Site) -> Iterator[None]:
    """Holds a site's folder, whose key and state are for one program at a time.

    Raises:
        UserError: if another one holds it.
    """
    site.state.mkdir(parents=True, exist_ok=True)
    with (site.state / "running").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"{site.folder}: this site is running already") from None
        yield


def run_locally(
    job: Job,
    data: str,
    clients: Mapping[str, str],
    folder: Path,
    say: Callable[[str], None],
    data_dir: Path | None = None,
    image_size: int | None = None,
) -> None:
    """Makes all folders and keys, runs the job over real processes, and ends every one of them, whatever happens.

    Args:
        job: what to run; its sites and keys are filled in.
        data: whose clients the sites are.
        clients: by site, the client of the data that it is.
        folder: for the folders of the coordinator and of the sites.
        say: takes one line for a person.
        data_dir: where the data lies.
        image_size: side of the images, if not the data's own.

    Raises:
        UserError: if something does not start, or the run fails.
    """
    own = make_coordinator(folder / "coordinator", [LOOPBACK], free_port(), LOOPBACK)
    sites = []
    for name, client in clients.items():
        site, _ = make_site(
            folder / "sites" / name,
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
        sites.append(site)
    say(f"starting a SuperLink on {LOOPBACK}:{own.port} and {len(sites)} SuperNodes, with TLS and keys of their own")
    job = replace(job, sites=tuple(clients), keys=admitted(own))
    stop = threading.Event()
    link = open_link(own)
    watchers = [
        threading.Thread(target=supervise, args=(supernode(site), stop, _to_file(site.logs / "events.log")))
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


def _to_file(path: Path) -> Callable[[str], None]:
    def write(line: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")

    return write
