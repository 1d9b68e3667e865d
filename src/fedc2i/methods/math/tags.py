"""Names in an upload that tell the server how to treat a tensor.

The server knows no model: it cannot tell a classifier row from a convolution, or running statistics from weights. A
method whose server must know sends such tensors under ``tag/name``; what the server sends back bears the plain name.
"""

from __future__ import annotations

from collections.abc import Collection

from fedc2i.core.params import Params

HEAD = "head/"  # one row for each class
BUFFER = "buffer/"  # not trained, e.g. BatchNorm's running statistics: to be averaged, whatever happens to weights


def tag(params: Params, names: Collection[str], prefix: str) -> Params:
    """The same tensors, those in ``names`` under ``prefix``."""
    return {f"{prefix}{name}" if name in names else name: tensor for name, tensor in params.items()}


def tagged(params: Params, prefix: str) -> Params:
    """The tensors under ``prefix``, by their plain names."""
    return {name.removeprefix(prefix): tensor for name, tensor in params.items() if name.startswith(prefix)}
