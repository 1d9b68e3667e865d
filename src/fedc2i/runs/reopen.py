"""A finished run made ready to compute on once more: its settings, data, model and last models."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from fedc2i.core.errors import UserError
from fedc2i.core.files import is_plugin
from fedc2i.core.options import names
from fedc2i.core.params import Stacked
from fedc2i.data.federation import Federation
from fedc2i.methods import registry
from fedc2i.methods.base import Method
from fedc2i.models.model import Model
from fedc2i.runs.plan import Plan, prepare
from fedc2i.runs.read import read_run
from fedc2i.runs.settings import RunSettings, read_toml


def reopen(
    folder: Path | str,
    data: Federation | None = None,
    model: Model | None = None,
    method: Method | None = None,
    data_dir: Path | None = None,
) -> Plan:
    """The plan of a finished run, on the data it was run on.

    Args:
        folder: the run's.
        data: the `Federation`, if the run was started with one.
        model: the `Model`, if the run was started with one.
        method: the `Method`, if the run was started with your own.
        data_dir: where the data lies now, if it was moved.

    Raises:
        UserError: if it is not the folder of a finished run, or the data is not what it was.
    """
    folder = Path(folder)
    summary = read_run(folder).written
    settings = read_toml(folder / "config.toml")
    named = method or str(settings["method"])
    not_needed = {"method", "engine", *names(RunSettings, engine="flower")}  # it is computed in this process
    if isinstance(data, Federation):
        not_needed |= {*names(RunSettings, scope="data")}
    rest = {name: value for name, value in settings.items() if name not in not_needed}
    rest["device"] = "auto"  # what was trained on a GPU can be looked at without one
    if data_dir is not None:
        rest["data_dir"] = str(data_dir)
    if method is not None:
        rest.pop("options", None)
    if method is None and not is_plugin(str(named)) and registry.find(str(named)) is None:
        raise UserError(f"{folder}: its method '{named}' was an object of Python; give it there as method=...")
    (plan,) = prepare([named], rest, data, model)
    was, now = summary["data_checksums"], plan.federation.checksums
    if was != now:
        other = [name for name in {**was, **now} if was.get(name) != now.get(name)]
        raise UserError(f"{folder}: the data is not what it was run on (clients {', '.join(other)})")
    return plan


def read_models(folder: Path, names: tuple[str, ...], seed: int) -> Stacked:
    """Every client's last trained model, stacked in the order of ``names``.

    Raises:
        UserError: if the file is missing, damaged, or of other clients.
    """
    path = folder / "models" / f"seed{seed}-trained.safetensors"
    if not path.is_file():
        raise UserError(f"{path}: no such file; the run keeps no models, or seed {seed} was not part of it")
    try:
        tensors = load_file(path)
        parts = dict.fromkeys(name.removeprefix(f"{names[0]}/") for name in tensors if name.startswith(f"{names[0]}/"))
        return {part: torch.stack([tensors[f"{client}/{part}"] for client in names]) for part in parts}
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: cannot be read as safetensors ({error})") from None
    except (KeyError, RuntimeError):
        raise UserError(f"{path}: not the models of the clients {', '.join(names)}") from None
