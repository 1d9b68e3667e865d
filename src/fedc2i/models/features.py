"""Features of a constant body, computed once: images become features, and a linear head is trained on those.

They are cached on disk for each client, by what decides them: the body's tensors and what it computes, the client's
data, and the kind of device. On a GPU the body computes in bfloat16, on a CPU one image batch on each core; both with
channels last. Features are data of the client: they stay where the client's images are.
"""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from fedc2i.core.files import write_atomically
from fedc2i.core.settings import cores
from fedc2i.data.converted_files import root
from fedc2i.data.federation import Client, Federation, InputSpec, Split
from fedc2i.models.model import Model, scale

AT_ONCE, AT_ONCE_ON_GPU = 8, 256  # larger batches leave the CPU's caches
PARTS = ("train", "validation", "test")
Report = Callable[[int, int], None]  # images done, and of how many
_made: WeakKeyDictionary[Model, dict[str, Client]] = WeakKeyDictionary()


@dataclass(frozen=True)
class FeatureFederation(Federation):
    """Features in place of images; its checksums are those of the images."""

    origin: Federation | None = None

    @functools.cached_property
    def checksums(self) -> dict[str, str]:
        """SHA-256 of every client's images and labels."""
        assert self.origin is not None
        return {name: self.origin.checksums[name] for name in self.names}


def of_federation(federation: Federation, model: Model, device: torch.device, report: Report) -> FeatureFederation:
    """All clients' features, from the cache where they are there."""
    missing = [client for client in federation.clients if _find(client, model, device) is None]
    of, before = sum(len(getattr(client, part)) for client in missing for part in PARTS), 0
    for client in missing:
        of_client(client, model, device, lambda done, _, before=before: report(before + done, of))  # type: ignore[misc]
        before += sum(len(getattr(client, part)) for part in PARTS)
    clients = tuple(of_client(client, model, device) for client in federation.clients)
    more = {name: getattr(federation, name) for name in ("notes", "preset", "averages", "attachments", "warnings")}
    return FeatureFederation(federation.name, clients, federation.classes, **more, origin=federation)


def of_client(client: Client, model: Model, device: torch.device, report: Report = lambda done, of: None) -> Client:
    """A client's features, from memory or the cache, else computed and cached."""
    found = _find(client, model, device)
    if found is None:
        splits = {part: getattr(client, part) for part in PARTS}
        of, before, made = sum(map(len, splits.values())), 0, {}
        module = body_of(model, device)
        for part, split in splits.items():
            made[part] = extract(module, split.x, device, lambda done, before=before: report(before + done, of))  # type: ignore[misc]
            before += len(split)
        write_atomically(_path(client, model, device), save(made))
        found = _with(client, made)
    _made.setdefault(model, {})[client.checksum + device.type] = found
    return replace(found, name=client.name)  # two clients may have the same data


def body_of(model: Model, device: torch.device) -> nn.Module:
    """The body as a plain module for the fastest pass: channels last, on a GPU in bfloat16."""
    module = model.body_module().to(device)
    module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return module.to(torch.bfloat16) if device.type == "cuda" else module


def extract(module: nn.Module, x: Tensor, device: torch.device, report: Callable[[int], None]) -> Tensor:
    """Features ``(N, d)`` of samples ``(N, ...)``, float32 on the CPU."""
    size = AT_ONCE if device.type == "cpu" else AT_ONCE_ON_GPU
    precision = torch.float32 if device.type == "cpu" else torch.bfloat16
    smallest = 0 if device.type == "cpu" else size  # a GPU plans its kernels for each size, which takes seconds

    def compute(piece: Tensor) -> Tensor:
        torch.set_num_threads(1)  # of this thread: one batch a core is faster than one batch over cores
        with torch.no_grad():
            read = scale(filled(piece.to(device, non_blocking=True), smallest), precision)
            found: Tensor = module(read.contiguous(memory_format=torch.channels_last) if read.ndim == 4 else read)
            return found[: len(piece)]

    pieces, done, made = torch.split(x, size) if len(x) else (), 0, []
    for features in _over_cores(compute, pieces) if device.type == "cpu" else map(compute, pieces):
        made.append(features)
        done += len(features)
        report(done)
    return torch.cat(made).float().cpu() if made else torch.zeros(0, 1)


def filled(x: Tensor, least: int) -> Tensor:
    """The samples, the first of them repeated at the end until there are ``least``."""
    return torch.cat([x, x[:1].expand(least - len(x), *x.shape[1:])]) if len(x) < least else x


def _over_cores(compute: Callable[[Tensor], Tensor], pieces: tuple[Tensor, ...]) -> Iterator[Tensor]:
    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(cores()) as pool:
            yield from pool.map(compute, pieces)
    finally:
        torch.set_num_threads(before)


def timed(say: Callable[[str], None], every: float = 20.0) -> Report:
    """Says every few seconds how many images are done and how much time is left, and the total at the end."""
    began = last = time.monotonic()

    def report(done: int, of: int) -> None:
        nonlocal last
        now = time.monotonic()
        if done == of:
            say(f"features: {of:,} images in {now - began:.0f} s; they are cached in {folder()}")
        elif now - last >= every:
            last = now
            left = (now - began) * (of - done) / done
            say(f"features: {done:,} of {of:,} images, {done / (now - began):.0f} a second, {left:.0f} s left")

    return report


def _find(client: Client, model: Model, device: torch.device) -> Client | None:
    """From memory or the cache."""
    own = _made.get(model, {}).get(client.checksum + device.type)
    if own is not None:
        return own
    try:
        return _with(client, load(_path(client, model, device).read_bytes()))
    except (OSError, SafetensorError, KeyError, ValueError):  # not there, or damaged
        return None


def _with(client: Client, made: dict[str, Tensor]) -> Client:
    parts = {part: getattr(client, part) for part in PARTS}
    if any(len(made[part]) != len(split) for part, split in parts.items()):
        raise ValueError("features of other samples")
    width = made["train"].shape[1]
    splits = [Split(made[part].reshape(len(split), width), split.y) for part, split in parts.items()]
    return Client(client.name, *splits)


def folder() -> Path:
    """Where features are cached."""
    return root() / "features"


def _path(client: Client, model: Model, device: torch.device) -> Path:
    decided = f"{_body_digest(model, InputSpec.of(client.train.x))} {device.type} {client.checksum}"
    return folder() / f"{hashlib.sha256(decided.encode()).hexdigest()[:32]}.safetensors"


@functools.lru_cache(maxsize=4)
def _body_digest(model: Model, sample: InputSpec) -> str:
    """Of the body's tensors, and of what it makes of two samples, since equal tensors may belong to other layers."""
    module, found = model.body_module(), hashlib.sha256()
    for name, tensor in module.state_dict().items():
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode() + tensor.contiguous().numpy().tobytes())
    with torch.no_grad():
        features: Tensor = module(scale(sample.noise(2), torch.float32))
    found.update((features / features.abs().max().clamp(min=1e-9) * 256).round().to(torch.int32).numpy().tobytes())
    return found.hexdigest()
