"""Who takes part: waiting for the sites at the start of a run, and what they have in common."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

from fedc2i.core.errors import UserError, one_line
from fedc2i.data.remote import RemoteFederation, blank_clients
from fedc2i.flower.connections import SiteConnections
from fedc2i.flower.messages import MOST_LETTERS, Introduction

MOST_NAMED = 20  # classes in a line
MOST_LISTED = 8  # sites in a line, and classes of each


def wait_for_sites(
    fleet: SiteConnections,
    expected: Sequence[str],
    count: int,
    at_least: int,
    wait: float,
    say: Callable[[str], None],
    poll: float = 0.25,
) -> list[Introduction]:
    """Waits until the expected sites, or so many of any name, are there; goes on with fewer when the time is over.

    Args:
        fleet: which meets them.
        expected: names, where they are known.
        count: how many, where names are not known.
        at_least: with fewer there is no run.
        wait: seconds.
        say: takes one line for a person.
        poll: seconds between looks.

    Raises:
        UserError: if too few came.
    """
    if not expected and count < 1:
        raise UserError(f"the number of sites to wait for must be at least 1, got {count}")
    until = time.monotonic() + wait
    wanted = len(expected) or count
    say(f"waiting for {wanted} sites: {', '.join(expected) or 'any'}")
    while True:
        fleet.collect()
        there = [fleet.sites[name] for name in (expected or sorted(fleet.sites)) if name in fleet.sites]
        if len(there) >= wanted:
            return there
        if time.monotonic() > until:
            break
        time.sleep(poll)
    missing = ", ".join(name for name in expected if name not in fleet.sites)
    said = f"after {wait:.0f} s {len(there)} of {wanted} sites are there{f'; missing: {missing}' * bool(missing)}"
    if len(there) < at_least:
        raise UserError(f"{said}; at least {at_least} are needed")
    say(f"{said}; going on without")
    return there


def common_federation(
    there: Sequence[Introduction],
    names: Sequence[str],
    classes: Sequence[str],
    say: Callable[[str], None],
) -> RemoteFederation:
    """The sites as a federation, with images of the most common size; see `reject_incompatible` for the others.

    Args:
        there: the sites that introduced themselves.
        names: all sites of the run in table order, some of which may come later.
        classes: the classes' names in the order of their labels; if empty, those that the sites have.
        say: takes one line for a person.
    """
    found = {own.classes for own in there}
    if not classes:
        classes = there[0].classes if len(found) == 1 else sorted({name for own in found for name in own})
        if len(found) > 1:
            lists = "; ".join(f"{own.name} {_some(own.classes, MOST_LISTED)}" for own in there[:MOST_LISTED])
            more = f"; and {len(there) - MOST_LISTED} more sites" if len(there) > MOST_LISTED else ""
            say(f"the sites have different classes; the run has all {len(classes)} of them: {_some(classes)}")
            say(f"classes by site: {lists}{more}; if that is wrong, mend their data, or fix the list with --classes")
    shape = Counter(own.image for own in there).most_common(1)[0][0]
    return RemoteFederation(
        "sites",
        blank_clients(names, shape, [own.name for own in there if not own.samples["validation"]]),
        tuple(classes),
        notes=("The data lies at the sites; sizes are as they say.",),
        sizes={own.name: own.samples for own in there},
    )


def reject_incompatible(fleet: SiteConnections, federation: RemoteFederation, at_least: int) -> None:
    """Leaves out sites whose images have another size than the run's or that have other classes, also those to come.

    Raises:
        UserError: if too few remain.
    """

    def check(who: Introduction) -> None:
        if who.image != federation.image_shape:
            own, needed = _size(who.image), _size(federation.image_shape)
            raise UserError(f"{who.name} has images of {own}, the run of {needed}; its site.toml can set image_size")
        if unknown := [name for name in who.classes if name not in federation.classes]:
            raise UserError(
                f"{who.name} has the classes {_some(who.classes)}, and the run no {_some(unknown)}; it has "
                f"{_some(federation.classes)}, and --classes can name more at its start"
            )

    fleet.welcome = check
    for who in list(fleet.sites.values()):
        try:
            check(who)
        except UserError as error:
            fleet.dismiss(who.name, error)
    if len(fleet.sites) < at_least:
        raise UserError(f"{len(fleet.sites)} sites fit together, at least {at_least} are needed")


def _some(names: Sequence[str], most: int = MOST_NAMED) -> str:
    shown = ", ".join(one_line(name, MOST_LETTERS) for name in names[:most])
    return shown + (f", ... ({len(names)})" if len(names) > most else "")


def _size(image: Sequence[int]) -> str:
    return "x".join(map(str, image[1:]))
