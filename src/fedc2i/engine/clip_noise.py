"""Clipping and Gaussian noise on what leaves a client.

An upload u is sent as r + c(u − r) + z. The reference r is what the server knows beforehand, c scales a difference down
to the norm ``clip``, and z is Gaussian with standard deviation ``noise · clip`` on every number. Whatever data the
client has, c(u − r) lies in a ball of radius ``clip``: another data set moves it by ``2 · clip`` at most, and that is
what z has to cover (see `fedc2i.engine.accountant` for ε).

This needs an r that does not depend on the client's data. The model that a local run starts from will not do: where a
client measures influence, or keeps private parts, its start has seen its data. So r is made of what the server sent.
"""

from __future__ import annotations

import functools
import hashlib
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedc2i.core import seeding
from fedc2i.core.errors import UserError
from fedc2i.core.params import Params, Stacked, row, stack
from fedc2i.core.settings import EngineSettings, TrainingSettings
from fedc2i.data.federation import Client, Federation, Split
from fedc2i.engine.client import ClientData, LocalClient, RunContext
from fedc2i.methods.base import Method
from fedc2i.methods.messages import model_name, valid_flags
from fedc2i.models.model import Model

KEY_BYTES = 32
COUNTS = ("class_counts", "class_present")  # of floating point or not: with noise, weights by them mean nothing
Draw = Callable[[int], Tensor]  # that number of standard normal numbers, float64, on the CPU
Means = dict[tuple[int, int], Tensor | None]  # of relayed models, by the tensors they are made of; none: no valid one


def reference(upload: Params, received: Params, first: Callable[[], Params], means: Means | None = None) -> Params:
    """What the server knows of an upload before it comes, entry by entry.

    The entry of the same name that it sent to the client last, of relayed models their plain mean; the client's initial
    model, which follows from the run's seed, where it sent none; zero for what is neither.

    ``first`` makes the client's initial model, if it is needed. ``means`` caches means of relayed models for the other
    clients of the round.
    """
    means = {} if means is None else means
    sent = {name: _sent(model_name(name), tensor, received, means) for name, tensor in upload.items()}
    initial = first() if any(own is None for own in sent.values()) else {}
    known = {}
    for name, tensor in upload.items():
        own = sent[name] if sent[name] is not None else initial.get(model_name(name))
        known[name] = torch.zeros_like(tensor) if own is None or own.shape != tensor.shape else own.to(tensor)
    return known


def _sent(name: str, like: Tensor, received: Params, means: Means) -> Tensor | None:
    """What the server sent of this shape: an entry, or the mean of entries; none if it did not."""
    sent = received.get(name)
    if sent is None or sent.shape == like.shape:
        return sent
    if sent.shape[1:] != like.shape:
        return None
    flags = valid_flags(received)
    key = id(sent), id(flags)
    if key not in means:
        models = sent if flags is None or len(flags) != len(sent) else sent[flags]
        means[key] = models.to(torch.float64).mean(0) if len(models) else None
    return means[key]


def clip_and_noise(upload: Params, known: Params, clip: float, noise: float, draw: Draw) -> Params:
    """One client's upload as it may leave.

    All entries together count as one vector, ``known`` is its `reference`. An upload with nan or infinity is sent as
    its reference plus noise: that training failed is private, too. Without noise, one within ``clip`` is not changed.

    Raises:
        UserError: if an entry is a count or a flag, which clipping does not cover.
    """
    reject_uncovered(upload)
    gaps = {name: tensor.to(torch.float64) - known[name].to(torch.float64) for name, tensor in upload.items()}
    if not all(bool(torch.isfinite(gap).all()) for gap in gaps.values()):
        gaps = {name: torch.zeros_like(gap) for name, gap in gaps.items()}
    norm = sum(float(gap.square().sum()) for gap in gaps.values()) ** 0.5
    if not noise and norm <= clip and all(bool(torch.isfinite(tensor).all()) for tensor in upload.values()):
        return upload
    scale = clip / max(norm, clip)
    names = sorted(upload)
    sizes = [upload[name].numel() for name in names]
    noises = dict(zip(names, torch.split(draw(sum(sizes)), sizes), strict=True))
    sent = {}
    for name, tensor in upload.items():
        own = noises[name].to(tensor.device).reshape(tensor.shape)
        sent[name] = (known[name].to(torch.float64) + scale * gaps[name] + noise * clip * own).to(tensor.dtype)
    return sent


def protect(
    uploads: Stacked,
    clients: Sequence[str],
    number: int,
    context: RunContext,
    settings: EngineSettings,
    received: Callable[[int], Params],
    secret: bytes = b"",
) -> Stacked:
    """Uploads ``(K, ...)`` of a round after clipping and noise; arguments as for `upload.process`."""
    sent, mail = [], [received(k) for k in range(len(clients))]
    means: Means = {}  # relayed models are one for all
    drawn = functools.lru_cache(maxsize=1)(lambda name: context.first_model(name, settings.init))
    for k, name in enumerate(clients):
        upload = row(uploads, k)
        first = functools.partial(drawn, name if settings.init == "independent" else clients[0])
        known, bounds = reference(upload, mail[k], first, means), (settings.clip, settings.noise)
        own = from_secret(secret, upload, known, *bounds) if secret else from_seed(context.seed, name, number)
        sent.append(clip_and_noise(upload, known, *bounds, own))
    return stack(sent)


def from_seed(seed: int, client: str, number: int) -> Draw:
    """Noise that a run repeats, the same on every engine and device: for experiments.

    Who knows the seed can subtract it.
    """
    made = seeding.generator(seed, client, number, "noise")
    return lambda count: torch.randn(count, generator=made, dtype=torch.float64)


def from_secret(secret: bytes, upload: Params, known: Params, clip: float, noise: float) -> Draw:
    """Noise that only a site can make, 52 bits of SHAKE-256 for every number.

    It is a function of a key that never leaves the site and of everything the answer is made of. A site that is asked
    the same again, for example by a resumed coordinator, answers the same bits and reveals nothing new; any other
    question gets other noise.
    """
    mixed = hashlib.shake_256(secret + repr((clip, noise)).encode())
    for name in sorted(upload):
        for tensor in (upload[name], known[name]):
            mixed.update(f"|{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
            mixed.update(tensor.detach().to("cpu", torch.float64).numpy().tobytes())

    return lambda count: normal(mixed.digest(8 * count))


def normal(uniform: bytes) -> Tensor:
    """A normal number for every eight bytes, up to 8.2 in size: the quantile of (k + ½)/2^52 for their upper 52 bits k.

    One bit more, and k + ½ would be rounded: to 1 for the largest k, whose quantile is infinite.
    """
    bits = np.frombuffer(uniform, dtype="<u8") >> np.uint64(12)
    found: Tensor = torch.special.ndtri(torch.from_numpy((bits + 0.5) * 2.0**-52))
    return found


def secret_in(folder: Path) -> bytes:
    """The site's key for `from_secret`, made from the operating system's entropy when it is first asked for."""
    path = folder / "noise.key"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        made = folder / f".noise-{secrets.token_hex(8)}"
        made.touch(mode=0o600)
        made.write_bytes(secrets.token_bytes(KEY_BYTES))
        made.replace(path)
    found = path.read_bytes()
    if len(found) != KEY_BYTES:
        raise UserError(f"{path}: not a key of {KEY_BYTES} bytes; remove it and a new one is made")
    return found


def run_secret(folder: Path, run: str) -> bytes:
    """A site's key for the noise of one run; whoever learns it learns nothing about other runs."""
    return hashlib.blake2b(run.encode(), key=secret_in(folder), digest_size=KEY_BYTES).digest()


def reject_uncovered(upload: Params, who: str = "the method") -> None:
    """Rejects an upload with counts or flags, by a `UserError` that names them."""
    names = [name for name, tensor in upload.items() if not tensor.is_floating_point() or name in COUNTS]
    if names:
        raise UserError(
            f"clip and noise do not cover {', '.join(names)}, which {who} sends; "
            "allowed are methods and options that send no counts and flags, see docs/privacy.md"
        )


def check(method: Method, model: Model, federation: Federation, settings: EngineSettings) -> None:
    """Rejects, if ``clip`` is set, what clipping does not cover.

    Raises:
        UserError: for a method that sends counts, flags or reports, or noise on BatchNorm's statistics.
    """
    if not settings.clip:
        return
    if method.reads_reports:
        raise UserError(
            f"clip and noise do not cover {', '.join(method.reads_reports)}, which {method.name} with these options "
            "tells the server; use fedc2i"
        )
    upload = _example(method, model, federation, settings)
    reject_uncovered(upload, method.name)
    still = {*model.body_names, *model.head_names} - set(model.trainable)
    if settings.noise and model.has_statistics and any(model_name(name) in still for name in upload):
        raise UserError(
            f"noise={settings.noise:g}: {method.name} sends the BatchNorm statistics of model '{model.name}', where a "
            "variance could become negative; use a model without them, or fedbn, which keeps them private"
        )


def _example(method: Method, model: Model, federation: Federation, settings: EngineSettings) -> Params:
    """An upload of the right names, shapes and types, made from a few images."""
    whole = federation.clients[0].train
    few = Split(whole.x[:2], whole.y[:2])
    data = ClientData.place(Client("example", few, few, few), len(federation.classes), torch.device("cpu"))
    context = RunContext(method, model, TrainingSettings(), 1, 0)
    first = context.first_model("example", settings.init)
    return LocalClient(context, data).upload(first, first, {}, -1, 1)
