"""The upload pipeline: clipping, noise and attacks between a client's upload and the server, here and at a site."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fedc2i.core.errors import UserError
from fedc2i.core.params import Params, Stacked
from fedc2i.core.settings import EngineSettings
from fedc2i.engine.client import RunContext


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
    """The upload pipeline: the uploads ``(K, ...)`` of ``clients`` as the server will see them, here and at a site.

    Clipping and noise, which protect an honest client, come first; then a dishonest client, which has seen the upload
    that it would send, may send something else. ``starts`` are the models their local runs started from, ``received``
    gives what the server had sent to the k-th client, ``secret`` is a site's key for noise that no one else can draw.

    Raises:
        UserError: if a real site would attack a run with noise: the attack has no noise.
    """
    if secret and any(name in context.attacks for name in clients):
        raise UserError("with noise a real site sends nothing but its upload; use either attack or noise")
    if settings.clip and uploads:
        from fedc2i.engine import clip_noise

        uploads = clip_noise.protect(uploads, clients, number, context, settings, received, secret)
    if any(name in context.attacks for name in clients) and uploads:
        from fedc2i.engine import attacks

        uploads = attacks.replace_uploads(context.attacks, uploads, starts, clients, context.seed, number)
    return uploads
