"""Privacy: the complete list of what leaves a client, for every method there is."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fedc2i.data.federation import Federation
from fedc2i.methods.base import Method
from fedc2i.models.model import Model
from support.method_checks import upload

BODY = {"hidden.weight", "norm.weight", "norm.bias", "norm.running_mean", "norm.running_var"}
HEAD = {"head.weight", "head.bias"}
LEAVES: dict[str, set[str]] = {
    "local": set(),
    "fedavg": BODY | HEAD,
    "fedprox": BODY | HEAD,
    "fedc2i": BODY | HEAD,
    "fedc2i-server": BODY | HEAD | {"loss", "gradient", "class_losses", "class_gradients"},
    "ditto": BODY | HEAD,
    "fedala": BODY | HEAD,
    "fedbn": {"hidden.weight"} | HEAD,
    "fedcalm": BODY | HEAD,
    "fedfomo": BODY | HEAD,
    "fedic": BODY | HEAD | {"prototypes", "class_counts", "variance"},
    "fedpac": BODY | HEAD | {"prototypes", "class_counts", "reference", "variance"},
    "fedproto": {"prototypes", "class_present"},
    "fedrep": BODY,
    "fedrod": BODY | HEAD,
    "pfedgraph": BODY | HEAD,
    "fedc2i-plus": BODY | HEAD,
    "fedc2i-many": BODY | HEAD,
    "fedc2i-client": BODY | HEAD,
    "fedc2i-class-global": BODY | HEAD,
    "fedc2i-class-local": BODY | HEAD,
    "fedc2i-top-k": BODY | HEAD,
    "fedavg-plus": BODY | HEAD,
    "fedprox-plus": BODY | HEAD,
    "fedrep-plus": BODY,
    "median": BODY | HEAD,
    "trimmed-mean": BODY | HEAD,
    "multi-krum": BODY | HEAD,
}


@pytest.mark.parametrize("name", sorted(Method.registry))
def test_exactly_these_tensors_leave_a_client(
    name: str, federation: Federation, make_model: Callable[..., Model]
) -> None:
    assert name in LEAVES, f"say in LEAVES what '{name}' uploads"
    sent = upload(Method.registry[name](), make_model(batch_norm=True), federation)
    assert {key.rpartition("/")[2] for key in sent} == LEAVES[name]  # what stands before a slash is for the server
    assert len(sent) == len(LEAVES[name])
