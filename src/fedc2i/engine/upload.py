"""The upload pipeline: what happens to an upload between a client and the server, here and at a real site.

Steps that protect an honest client come first, then the attack of a dishonest one: it has seen the upload that it
would send, and may send something else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fedc2i.core.errors import UserError
from fedc2i.core.params import Params, Stacked, replace_rows, row, stack
from fedc2i.engine import attacks, clip_noise
from fedc2i.engine.client import RunContext
from fedc2i.engine.settings import EngineSettings


def process(
    uploads: Stacked,
    starts: Stacked,
    clients: Sequence[str],
    number: int,
    context: RunContext,
    settings: EngineSettings,
    received: Callable[[int], Params] = lambda k: {},
    secret: bytes = b"",
) -> Stacked:
    """The uploads as the server will see them; the same tensors if there is nothing to do.

    Args:
        uploads: what `Method.upload` made for each client, every tensor ``(K, ...)``.
        starts: the models their local runs started from, ``(K, ...)``.
        clients: their names, in that order.
        number: the round, from 1.
        context: with the run's seed and attackers.
        settings: with clip and noise.
        received: what the server had sent to the k-th of ``clients``.
        secret: at a real site, its key for noise that no one else can draw.

    Raises:
        UserError: if a real site would attack a run with noise: the attack has no noise.
    """
    if secret and any(name in context.attacks for name in clients):
        raise UserError("with noise a real site sends nothing but its upload; use either attack or noise")
    uploads = clip_noise.protect(uploads, clients, number, context, settings, received, secret)
    return _attacked(uploads, starts, clients, number, context)


def _attacked(uploads: Stacked, starts: Stacked, clients: Sequence[str], number: int, context: RunContext) -> Stacked:
    """The uploads, with the rows of attackers replaced."""
    bad = [k for k, name in enumerate(clients) if name in context.attacks]
    if not bad or not uploads:
        return uploads
    sent = []
    for k in bad:
        upload, start = row(uploads, k), row(starts, k)
        for attack in context.attacks[clients[k]]:
            upload = attacks.apply(attack, upload, start, (context.seed, clients[k], number))
        sent.append(upload)
    return replace_rows(uploads, bad, stack(sent))
