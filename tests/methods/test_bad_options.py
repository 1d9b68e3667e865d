"""What every option of every method accepts and rejects, at the edges of its range."""

from __future__ import annotations

from typing import Any

import pytest

from fedc2i.core.errors import UserError
from fedc2i.core.options import options_of
from fedc2i.methods.base import Method

INF, NAN = float("inf"), float("nan")
AT_LEAST_0 = ([0, 0.5], [-0.1, NAN, INF, "much", True, None])
COUNT = ([1, 7], [0, -1, 1.5, True, "all"])
COUNT_FROM_0 = ([0, 7], [-1, 0.5, True, "all"])
SAMPLES = ([1, 300, "all"], [0, -1, 2.5, True, "some", None])
YES_OR_NO = ([True, False], [1, "yes", None])
GAMMA = ([0, 2, "ramp(3)"], [-1, NAN, INF, "five", "ramp(-1)", True])

# By method and option: what is accepted, and what is rejected. Classes share the options of their parents.
RANGES: dict[tuple[str, str], tuple[list[Any], list[Any]]] = {
    ("fedavg", "anchor"): AT_LEAST_0,
    ("fedavg", "average"): YES_OR_NO,
    ("fedavg", "weighting"): (["uniform", "samples"], ["size", "", None]),
    ("fedprox", "mu"): AT_LEAST_0,
    ("ditto", "mu"): AT_LEAST_0,
    ("fedrep", "body_epochs"): COUNT,
    ("fedrod", "gamma_bsm"): AT_LEAST_0,
    ("fedrod", "personal_init"): (["copy", "zero"], ["random"]),
    ("fedproto", "ld"): AT_LEAST_0,
    ("fedproto", "weighting"): (["uniform", "counts"], ["samples"]),
    ("fedproto", "share_model"): YES_OR_NO,
    ("fedpac", "lam"): AT_LEAST_0,
    ("fedpac", "head_epochs"): COUNT,
    ("fedic", "alternate"): YES_OR_NO,
    ("fedcalm", "base"): (["fedavg", "fedrep"], ["ditto"]),
    ("fedcalm", "epsilon"): AT_LEAST_0,
    ("fedcalm", "margin"): (["cosine", "printed"], [""]),
    ("fedcalm", "slack"): ([0.1], [0, -1, INF]),
    ("pfedgraph", "alpha"): ([0.1], [0, -1, NAN]),
    ("pfedgraph", "lam"): AT_LEAST_0,
    ("pfedgraph", "snap"): ([-1, 0.9, 1], [-1.1, NAN]),
    ("fedala", "layers"): COUNT,
    ("fedala", "share"): ([0.1, 1], [0, 80, "most"]),
    ("fedala", "eta"): AT_LEAST_0,
    ("fedala", "start_epochs"): COUNT,
    ("fedala", "weight_epochs"): COUNT,
    ("fedala", "weight_batch"): COUNT,
    ("fedfomo", "baseline"): (["start", "trained"], ["mean"]),
    ("fedfomo", "influence_samples"): SAMPLES,
    ("trimmed-mean", "trim"): ([0, 0.49], [-0.1, 0.5, NAN]),
    ("multi-krum", "attackers"): COUNT_FROM_0,
    ("multi-krum", "keep"): COUNT_FROM_0,
    ("fedc2i", "gamma"): GAMMA,
    ("fedc2i", "gamma_class"): (GAMMA[0] + [None], GAMMA[1]),
    ("fedc2i", "influence"): (["exact", "first-order"], ["second-order"]),
    ("fedc2i", "influence_samples"): SAMPLES,
    ("fedc2i", "influence_split"): (["train", "validation"], ["test"]),
    ("fedc2i-many", "own_weight"): (["measured", "equal"], ["none"]),
    ("fedc2i-many", "max_age"): ([0, 3, None], [-1, 1.5, True, "old"]),
    ("fedc2i-top-k", "k"): COUNT,
    ("fedc2i-top-k", "refresh"): COUNT,
    ("fedc2i-server", "gamma"): GAMMA,
    ("fedc2i-server", "gamma_class"): (GAMMA[0] + [None], GAMMA[1]),
    ("fedc2i-server", "tell_weights"): YES_OR_NO,
}


@pytest.mark.parametrize(("name", "option"), RANGES, ids=str)
def test_the_range_of_an_option(name: str, option: str) -> None:
    kind, (good, bad) = Method.registry[name], RANGES[name, option]
    for value in good:
        assert getattr(kind(**{option: value}), option) == value
    for value in bad:
        with pytest.raises(UserError, match=f"^{option} must be .*, got '"):
            kind(**{option: value})


def test_every_option_is_in_the_table() -> None:
    for name, kind in Method.registry.items():
        for option in options_of(kind):
            owners = [own.name for own in kind.__mro__ if issubclass(own, Method) and own.__dict__.get("name")]
            assert any((owner, option) in RANGES for owner in [*owners, "fedavg"]), (name, option)
