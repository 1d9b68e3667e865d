"""A client's last model of a finished run, with all that is needed to predict with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedc2i.core.errors import UserError, flaw
from fedc2i.core.files import read_json
from fedc2i.core.params import Params
from fedc2i.data.encoder import Encoder
from fedc2i.data.federation import InputSpec
from fedc2i.data.scaling import SCALING, Scaling
from fedc2i.data.table import ENCODING
from fedc2i.engine.records import Point
from fedc2i.methods.base import Method, Site
from fedc2i.models.model import Model
from fedc2i.runs.finished_run import is_of_site, read_run, read_site_run
from fedc2i.runs.folder import SUMMARY
from fedc2i.runs.plan import build_model
from fedc2i.runs.results import Result
from fedc2i.runs.stored_models import no_client, read_model


@dataclass(frozen=True)
class ClientModel:
    """A client's last model of a run, with all that is needed to predict with it."""

    client: str
    seed: int
    point: Point
    method: Method
    model: Model
    params: Params
    sample: InputSpec
    result: Result
    encoder: Encoder | None = None  # of a table's rows
    scaling: Scaling | None = None  # of other inputs, if it is known

    def logits(self, x: Tensor) -> Tensor:
        """What the method predicts."""
        site = Site(self.model, torch.zeros(self.model.classes), torch.tensor(-1), {})
        return self.method.predict(self.params, x, site)

    @property
    def is_of_site(self) -> bool:
        """Whether a site has kept it, which has no scores and sees nobody's weight."""
        return not self.result.rounds

    @property
    def network(self) -> nn.Module:
        """The network alone, in evaluation mode; of a pretrained one, without its preprocessing."""
        module = self.model.module_with(self.params).eval()
        return module.get_submodule("net") if hasattr(module, "preprocessing") else module


def read_client(
    folder: Path, client: str, seed: int | None = None, point: Point = "trained", model: Model | None = None
) -> ClientModel:
    """A client's last model of a finished run, or of what a site keeps of one.

    ``model`` is needed if the run was started with an object of Python.

    Raises:
        UserError: if there is no such run, client or seed, or the model cannot be built here.
    """
    result = read_site_run(folder) if _is_of_site(folder) else read_run(folder)
    if client not in result.federation.names:
        raise no_client(folder, client, result.federation.names)
    config, sample = result.config, result.federation.input
    if type(result.method).__name__ == "Stored":
        raise UserError(f"{folder}: its method '{config.method}' is a user's own, which cannot be exported")
    try:
        built = build_model(config, result.federation.classes, sample, model)
    except UserError as error:
        raise UserError(f"{folder}: its model cannot be built here ({error})") from None
    if result.model == "auto":
        result = replace(result, model_name=built.name)
    chosen = config.seeds[0] if seed is None else seed
    params = read_model(folder, client, chosen, point)
    has_rows = (folder / ENCODING).is_file()
    encoder = read_encoder(folder, client, {"clients": list(result.federation.names)}) if has_rows else None
    scaling = read_scaling(folder, client, sample) if (folder / SCALING).is_file() else None
    return ClientModel(client, chosen, point, result.method, built, params, sample, result, encoder, scaling)


def read_encoder(folder: Path, client: str, summary: Mapping[str, Any]) -> Encoder:
    """How the client's rows were encoded.

    Raises:
        UserError: if the folder has no such client.
    """
    try:
        encoders = read_json(folder / ENCODING)["clients"]
        # A partition splits a client after its rows were encoded; a site has its own encoder only.
        named = summary.get("clients", list(encoders))
        by_client = {name: encoders.get(name) or encoders.get(name.rpartition("/")[0]) for name in named}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{folder / ENCODING}: cannot be read ({flaw(error)})") from None
    names = [name for name, own in by_client.items() if own]
    if client not in names:
        raise no_client(folder, client, names)
    return Encoder.from_json(by_client[client])


def read_scaling(folder: Path, client: str, sample: InputSpec) -> Scaling:
    """How the client's samples were standardised.

    Raises:
        UserError: if the file is damaged, or is not of this client and such samples.
    """
    try:
        found = Scaling.from_json(read_json(folder / SCALING)["clients"][client])
        if len(found.mean) != sample.shape[0]:
            raise ValueError(f"{len(found.mean)} means for {sample}")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{folder / SCALING}: cannot be read ({flaw(error)})") from None
    return found


def _is_of_site(folder: Path) -> bool:
    try:
        return is_of_site(read_json(folder / SUMMARY))
    except (OSError, ValueError, TypeError, RecursionError):
        return False  # `read_run` says what is wrong
