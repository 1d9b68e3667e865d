"""The models of a finished run, from its folder: of one client, or of all of them stacked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from fedc2i.core.errors import UserError, nearest, one_line
from fedc2i.core.params import Params, Stacked
from fedc2i.data.remote import SITES
from fedc2i.engine.records import Point
from fedc2i.runs.settings import read_toml


def read_model(folder: Path | str, client: str, seed: int = 0, point: Point = "trained") -> Params:
    """A client's last model from a run folder, ready for ``module.load_state_dict``.

    Raises:
        UserError: if there is no such run, seed or client.
    """
    path, by_client = models_of(Path(folder), seed, point)
    if client not in by_client:
        raise no_client(path, client, sorted(by_client))
    return by_client[client]


def no_client(where: Path, client: str, names: Sequence[str]) -> UserError:
    """What is wrong with a client's name: there is none, or nobody has it."""
    allowed = f"allowed are {', '.join(names)}"
    if not client:
        return UserError(f"{where}: name the client with --client; {allowed}")
    return UserError(f"{where}: no client '{one_line(client)}'{nearest(client, names)}, {allowed}")


def read_models(folder: Path, clients: tuple[str, ...], seed: int) -> Stacked:
    """Every client's last trained model, stacked in the order of ``clients``.

    Raises:
        UserError: if the file is missing, damaged, or of other clients.
    """
    path, by_client = models_of(folder, seed, "trained")
    try:
        models = [by_client[client] for client in clients]
        return {part: torch.stack([own[part] for own in models]) for part in models[0]}
    except (KeyError, RuntimeError):
        raise UserError(f"{path}: not the models of the clients {', '.join(clients)}") from None


def models_of(folder: Path, seed: int, point: Point) -> tuple[Path, dict[str, Params]]:
    """The file of a seed, and the models in it by client.

    Raises:
        UserError: if it is missing or damaged.
    """
    path = folder / "models" / f"seed{seed}-{point}.safetensors"
    if not path.is_file():
        require_models(folder)
        seeds = sorted(int(own) for file in path.parent.glob("*") if (own := _seed_of(file, point)))
        allowed = (
            f"allowed are {', '.join(map(str, seeds))}" if seeds else f"it has no models/seed*-{point}.safetensors"
        )
        raise UserError(f"{folder}: no models of seed {seed}; {allowed}")
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: cannot be read as safetensors ({error})") from None
    by_client: dict[str, Params] = {}
    for name, tensor in tensors.items():
        client, _, part = name.rpartition("/")
        by_client.setdefault(client, {})[part] = tensor
    return path, by_client


def _seed_of(file: Path, point: Point) -> str:
    """The number in the name of a file of models; empty of another file."""
    number = file.name.removeprefix("seed").removesuffix(f"-{point}.safetensors")
    return number if number.isdecimal() and file.name == f"seed{number}-{point}.safetensors" else ""


def require_models(folder: Path) -> None:
    """Raises a `UserError` if the run was between sites, whose models stay with them."""
    if is_between_sites(read_toml(folder / "config.toml")) and not (folder / "models").is_dir():
        raise UserError(
            f"{folder}: ran between sites, which have its models: use a site's folder, SITE/state/RUN "
            "(of `fedc2i flower-local --keep DIR`, DIR/sites/SITE/state/RUN; without --keep they are gone)"
        )


def is_between_sites(settings: Mapping[str, Any]) -> bool:
    """Whether a run of these settings was computed by real sites."""
    return settings.get("engine") == "flower" and settings.get("data") == SITES
