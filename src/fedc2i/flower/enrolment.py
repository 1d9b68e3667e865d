"""Which sites take part: waits for them at the start of a run, and checks that they fit together."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

from fedc2i.core.errors import UserError, one_line
from fedc2i.data import schema
from fedc2i.data.folder import natural_key
from fedc2i.data.remote import SITES, RemoteFederation, blank_clients
from fedc2i.flower.connections import SiteConnections
from fedc2i.flower.message_format import MOST_CLASSES, MOST_LETTERS, Introduction

MOST_NAMED = 20  # classes in a line
MOST_LISTED = 8  # sites in a line, and classes of each


def wait_for_sites(
    connections: SiteConnections,
    expected: Sequence[str],
    count: int,
    at_least: int,
    wait: float,
    say: Callable[[str], None],
    poll: float = 0.25,
    *,
    closed: bool = False,
) -> list[Introduction]:
    """Waits for the expected sites or, if their names are not known, for ``count`` sites of any name.

    After ``wait`` seconds ``at_least`` sites are enough. ``closed``: a rejected site ends it, as nobody else can come.
    """
    if not expected and count < 1:
        raise UserError(f"the number of sites to wait for must be at least 1, got {count}")
    until = time.monotonic() + wait
    wanted = len(expected) or count
    say(f"waiting for {wanted} sites: {', '.join(expected) or 'any'}")
    while True:
        connections.collect()
        sites = connections.sites
        present = [sites[name] for name in (expected or sorted(sites)) if name in sites]
        if len(present) >= wanted:
            return present
        if closed and connections.rejections:
            raise UserError(f"a site cannot start: {connections.rejections[0]}")
        if time.monotonic() > until:
            break
        time.sleep(poll)
    missing = [name for name in expected if name not in sites]
    line = f"after {wait:.0f} s {len(present)} of {wanted} sites are connected"
    if missing:
        line += f"; missing: {', '.join(missing)}"
    if len(present) < at_least:
        raise UserError(f"{line}; at least {at_least} are needed")
    say(f"{line}; starting without the others")
    return present


def common_federation(
    present: Sequence[Introduction], names: Sequence[str], classes: Sequence[str], say: Callable[[str], None]
) -> RemoteFederation:
    """The sites as a federation, with the most common shape of samples, or a schema that most sites have in common.

    `reject_incompatible` rejects the others.

    ``names`` are all sites of the run in table order, of which some may come later. ``classes`` are in the order of
    their labels; if empty, those of the sites present.
    """
    found = {site.classes for site in present}
    if not classes:
        classes = (
            present[0].classes if len(found) == 1 else sorted({name for own in found for name in own}, key=natural_key)
        )
        if len(found) > 1:
            lists = "; ".join(f"{site.name} {_some(site.classes, MOST_LISTED)}" for site in present[:MOST_LISTED])
            say(f"the sites have different classes; the run has all {len(classes)} of them: {_some(classes)}")
            say(f"classes by site: {lists}; if that is wrong, correct the data, or fix the list with --classes")
    if len(classes) > MOST_CLASSES:
        raise UserError(f"the sites have {len(classes):,} classes in all, allowed are {MOST_CLASSES:,}; see --classes")
    tables = {site.name: site.schema for site in present if site.schema is not None}
    agreed = schema.most_common(SITES, tables) if 2 * len(tables) >= len(present) else None
    others = Counter(site.input for site in present if site.schema is None)
    sample = others.most_common(1)[0][0] if agreed is None else agreed.input
    if agreed is not None and len(classes) < 2:
        raise UserError(f"the sites have only the class {_some(classes)}, two are needed; --classes can name more")
    return RemoteFederation(
        SITES,
        blank_clients(names, sample, [site.name for site in present if not site.samples["validation"]]),
        tuple(classes),
        notes=("The data stays at the sites; sizes are as the sites report them.",),
        sizes={site.name: site.samples for site in present},
        schema=agreed,
    )


def reject_incompatible(connections: SiteConnections, federation: RemoteFederation, at_least: int) -> None:
    """Rejects sites with samples of another shape, other columns or other classes than the run, now and later."""

    def check(site: Introduction) -> None:
        if site.schema is not None and federation.schema is not None:
            schema.check_fit(site.name, site.schema, federation.schema)
        elif site.schema is not None or federation.schema is not None:
            which = ("no table", "tables") if site.schema is None else ("a table", "none")
            raise UserError(f"{site.name} has {which[0]}, the run {which[1]}")
        elif site.input != federation.input:
            hint = "; its site.toml can set image_size" if federation.input.is_image else ""
            raise UserError(f"{site.name} has {site.input}, the run {federation.input}{hint}")
        if unknown := [name for name in site.classes if name not in federation.classes]:
            raise UserError(
                f"{site.name} has the classes {_some(site.classes)}, and the run has no {_some(unknown)}; it has "
                f"{_some(federation.classes)}, and --classes can name more at its start"
            )

    connections.check = check
    for site in list(connections.sites.values()):
        try:
            check(site)
        except UserError as error:
            connections.dismiss(site.name, error)
    if len(connections.sites) < at_least:
        raise UserError(f"{len(connections.sites)} sites fit together, at least {at_least} are needed")


def _some(names: Sequence[str], most: int = MOST_NAMED) -> str:
    shown = ", ".join(one_line(name, MOST_LETTERS) for name in names[:most])
    return shown + (f", ... ({len(names)})" if len(names) > most else "")
