"""What happens to an upload on its way from a client to the server, the same in this process and at a real site.

Steps that protect an honest client come first, then what a dishonest one does: it has seen its upload as it would
leave, and may send something else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fedc2i.core.errors import UserError
from fedc2i.core.params import Params, Stacked, replace_rows, row, stack
from fedc2i.engine import attacks, clip_noise
from fedc2i.engine.client import RunContext
from fedc2i.engine.settings import EngineSettings


def leave(
    uploads: Stacked,
    starts: Stacked,
    clients: Sequence[str],
    number: int,
    recipe: RunContext,
    settings: EngineSettings,
    received: Callable[[int], Params] = lambda k: {},
    secret: bytes = b"",
) -> Stacked:
    """The uploads as the server will see them; the same tensors where nothing is asked for.

    Args:
        uploads: what `Method.upload` made for each client, every tensor ``(K, ...)``.
        starts: the models their local runs started from, ``(K, ...)``.
        clients: their names, in that order.
        number: the round, from 1.
        recipe: the run's, with its seed and its attackers.
        settings: how the run is run.
        received: what the server had sent to the client at this place of ``clients``.
        secret: at a real site, its key for noise that nobody else can make.

    Raises:
        UserError: if a real site were to attack a run with noise: what it sends instead has none.
    """
    if secret and any(name in recipe.attacks for name in clients):
        raise UserError("with noise a real site sends nothing but its upload; leave out attack or noise")
    uploads = clip_noise.protect(uploads, clients, number, recipe, settings, received, secret)
    return _attacked(uploads, starts, clients, number, recipe)


def _attacked(uploads: Stacked, starts: Stacked, clients: Sequence[str], number: int, recipe: RunContext) -> Stacked:
    """With the rows of attackers replaced by what they send instead."""
    bad = [k for k, name in enumerate(clients) if name in recipe.attacks]
    if not bad or not uploads:
        return uploads
    sent = []
    for k in bad:
        upload, start = row(uploads, k), row(starts, k)
        for attack in recipe.attacks[clients[k]]:
            upload = attacks.apply(attack, upload, start, (recipe.seed, clients[k], number))
        sent.append(upload)
    return replace_rows(uploads, bad, stack(sent))
