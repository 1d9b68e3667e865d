"""Checkpoints that a model starts from: safetensors files, and where weights lie that cannot be downloaded."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from fedc2i.core.errors import UserError, listed, one_line
from fedc2i.data.converted_files import root
from fedc2i.models.model import Model

_COUNTER = "num_batches_tracked"  # of BatchNorm; not every checkpoint has it, and nothing reads it


def folder() -> Path:
    """Where weights are looked for by name: ``weights`` in the cache folder."""
    return root() / "weights"


def locate(name: str) -> Path:
    """The file: a path, else a file of that name in `folder`.

    Raises:
        UserError: if there is none, or it is no safetensors file.
    """
    path, stored = Path(name).expanduser(), folder() / Path(name).name
    if path.suffix != ".safetensors":
        raise UserError(f"weights '{one_line(name)}': allowed are safetensors files, ending in .safetensors")
    for found in (path, stored):
        if found.is_file():
            return found
    raise UserError(f"weights '{one_line(name)}': no such file; put it there, or at {stored}")


def checksum(name: str) -> str:
    """SHA-256 of the file's content."""
    with locate(name).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read(path: Path) -> dict[str, Tensor]:
    """All tensors of a file."""
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as safetensors ({one_line(error)})") from None


def given_to(model: Model, weights: str) -> Model:
    """The model, started from a file."""
    path = locate(weights)
    return model.rebuilt(lambda build: starting_from(build, model.head_layer, read(path), str(path)))


def starting_from(
    build: Callable[[], nn.Module], head: str, tensors: Mapping[str, Tensor], where: str
) -> Callable[[], nn.Module]:
    """A function that builds the module with these tensors in it.

    The head stays freshly drawn if the file has none, or one for other classes. All other tensors must be there, with
    the same shapes; names may have a prefix in common that the module has and the file has not.

    Raises:
        UserError: naming the tensors that do not fit.
    """
    module = build()
    own = {**dict(module.named_parameters()), **dict(module.named_buffers(remove_duplicate=False))}
    saved = {name: own[name] for name in module.state_dict() if name in own}
    prefix = "net." if all(name.startswith("net.") for name in saved) and not _starts("net.", tensors) else ""
    given = {prefix + name: tensor for name, tensor in tensors.items()}
    heads = {name for name in saved if name.rpartition(".")[0] == head}
    fresh = any(name not in given or given[name].shape != saved[name].shape for name in heads)
    ignored = {name for name in {**saved, **given} if name.endswith(_COUNTER)} | (heads if fresh else set())
    problems = {
        "missing": [name for name in saved if name not in given and name not in ignored],
        "not in the model": [name for name in given if name not in saved and name not in ignored],
        "of another shape": [
            f"{name} {_shape(given[name])}, in the model {_shape(saved[name])}"
            for name in saved
            if name in given and name not in ignored and given[name].shape != saved[name].shape
        ],
    }
    if any(problems.values()):
        told = "; ".join(f"{what}: {_some(found)}" for what, found in problems.items() if found)
        raise UserError(f"{where}: its tensors do not fit the model; {told}")
    taken = {name: given[name] for name in saved if name in given and name not in ignored}

    def built() -> nn.Module:
        made = build()
        places = {**dict(made.named_parameters()), **dict(made.named_buffers())}
        with torch.no_grad():
            for name, tensor in taken.items():
                places[name].copy_(tensor)
        return made

    return built


def _starts(prefix: str, tensors: Mapping[str, Tensor]) -> bool:
    return all(name.startswith(prefix) for name in tensors)


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "()"


def _some(names: Sequence[str]) -> str:
    return listed([one_line(name) for name in names])
