"""A client's model out of a run folder: all of its tensors, or a program that only torch is needed for, and a card.

``model.safetensors`` holds the network under its own names, adapters merged and constants included: it loads into the
network wherever that comes from, and is a start for another run (``--weights``). ``model.pt2`` is what the method
predicts with, from images or encoded rows to logits, and loads with ``torch.export.load``. Beside either lies the
card, ``model.md``, and unless the inputs are images ``model.json``: how this client's samples become inputs.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from fedc2i.core.errors import UserError, one_line
from fedc2i.core.files import to_json, write_atomically
from fedc2i.data.encoder import Encoder
from fedc2i.engine.records import Point
from fedc2i.models.model import Model
from fedc2i.runs.client_model import ClientModel, read_client
from fedc2i.runs.model_card import write_card

SUFFIXES = (".safetensors", ".pt2")
_SAMPLES = 3  # that both ways to predict are compared on


class _Program(nn.Module):
    """Images or encoded rows to logits, as the method predicts."""

    def __init__(self, own: ClientModel) -> None:
        super().__init__()
        self._own = own
        self._names = list(own.params)
        for number, tensor in enumerate(own.params.values()):
            self.register_buffer(f"tensor{number}", tensor)

    def forward(self, x: Tensor) -> Tensor:
        params = {name: self.get_buffer(f"tensor{number}") for number, name in enumerate(self._names)}
        return replace(self._own, params=params).logits(x)


def export(
    folder: Path | str,
    client: str,
    out: Path | str,
    *,
    seed: int | None = None,
    point: Point = "trained",
    model: Model | None = None,
) -> Path:
    """Writes a client's model, and its card beside it.

    Args:
        folder: of a finished run.
        client: whose model.
        out: a new file, ``.safetensors`` or ``.pt2``.
        seed: of the run; its first by default.
        point: the model after the last local training (``trained``), or after the exchange that follows (``received``).
        model: the `Model` that the run was started with, if that was an object of Python.

    Returns:
        The card.

    Raises:
        UserError: if there is no such model, or a file exists already.
    """
    folder, out = Path(folder), Path(out)
    card, encoding = out.with_suffix(".md"), out.with_suffix(".json")
    if out.suffix not in SUFFIXES:
        raise UserError(f"{out}: allowed are files ending in {' or '.join(SUFFIXES)}")
    _refuse_existing(out, card, out=out)
    own = read_client(folder, client, seed, point, model)
    how = _columns(own.encoder) if own.encoder else own.scaling.to_json() if own.scaling else None
    if how is not None:
        _refuse_existing(encoding, out=out)
    content = _program(own) if out.suffix == ".pt2" else _tensors(own)
    write_atomically(out, content)
    if how is not None:
        write_atomically(encoding, to_json(how).encode())
    write_atomically(card, write_card(own, out.name).encode())
    return card


def _refuse_existing(*paths: Path, out: Path) -> None:
    twin = next((own for suffix in SUFFIXES if (own := out.with_suffix(suffix)) != out and own.exists()), None)
    for path in paths:
        if path.exists() and path != out and twin is not None:
            raise UserError(f"{path}: exists already, it belongs to {twin}; choose another --out, or remove {path}")
        if path.exists():
            raise UserError(f"{path}: exists already; choose another --out or remove it")


def _columns(encoder: Encoder) -> dict[str, Any]:
    """How a row becomes inputs, column by column, and the inputs' names in order."""
    each = zip(encoder.schema.to_json(), encoder.mean, encoder.sd, strict=True)
    return {
        "columns": [{**column, "mean": mean, "sd": sd} for column, mean, sd in each],
        "inputs": list(encoder.schema.inputs),
    }


def _tensors(own: ClientModel) -> bytes:
    """The network's tensors; refused where the method predicts with more than the network."""
    network, x = own.network, own.sample.noise(_SAMPLES)
    with torch.no_grad():
        same = torch.allclose(own.model.whole(own.params, x), own.logits(x), rtol=1e-3, atol=1e-4)
    if not same:
        raise UserError(f"{own.result.label} predicts with more than the network alone; export it as a .pt2 file")
    about = {
        "format": "pt",
        "model": own.result.model,
        "classes": json.dumps(list(own.result.federation.classes), ensure_ascii=False),
        "input": json.dumps(own.sample.to_json()),
        "client": own.client,
        "method": own.result.key,
    }
    state = {name: tensor.detach().contiguous().clone() for name, tensor in network.state_dict().items()}
    return save(state, about)


def _program(own: ClientModel) -> bytes:
    import io

    program, x = _Program(own).eval(), own.sample.noise(_SAMPLES)
    batch = torch.export.Dim("batch", min=1, max=65536)
    buffer: Any = io.BytesIO()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # of torch about its own functions
        own.logits(x)  # makes this thread's copies of the module, which torch cannot follow
        try:
            made = torch.export.export(program, (x,), dynamic_shapes={"x": {0: batch}}, strict=False)
        except Exception as error:  # whatever torch cannot follow in a user's module
            reason = one_line(str(error).splitlines()[0] if str(error) else type(error).__name__)
            raise UserError(f"torch cannot export this model ({reason}); use a .safetensors file") from None
        torch.export.save(made, buffer)
    return bytes(buffer.getvalue())
