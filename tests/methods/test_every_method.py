"""What holds for every method: names, options, what leaves a client, and that it learns, the same on any engine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import fedc2i
from fedc2i.core.errors import UserError
from fedc2i.core.options import options_of
from fedc2i.data.federation import Federation
from fedc2i.methods.base import Method, find_method, get_method, method_names
from fedc2i.methods.messages import Uploads
from fedc2i.models.model import Model
from fedc2i.runs.plan import parse_method
from support.method_checks import OF_THEIR_OWN, SIZES, each_kind, run, upload

LOAD_ONE = """
import sys
from fedc2i import Method, UserError
from fedc2i.methods.base import get_method, method_names
assert get_method("fedc2i").title == "FedC²I"
assert get_method("fedc2i-server").title
assert not {"fedc2i.methods.fedavg", "fedc2i.methods.fedrep"} & {*sys.modules}
try:
    type("Impostor", (Method,), {"name": "fedrep", "title": "Impostor"})
except UserError as error:
    assert "'fedrep' is taken by fedc2i.methods.fedrep" in str(error)
else:
    raise AssertionError
assert get_method("fedc2i-client").title  # a file of several methods
assert len(method_names()) > 20
"""


def test_only_what_is_asked_for_is_imported() -> None:
    subprocess.run([sys.executable, "-c", LOAD_ONE], check=True)


@pytest.mark.parametrize("name", ["fedc2", "base", "", "math", "../fedavg", "fedc2i_top_k"])
def test_an_unknown_name_is_told_with_those_there_are(name: str) -> None:
    assert find_method(name) is None
    with pytest.raises(UserError, match=r"unknown method .*allowed are ditto, .*trimmed-mean and FILE\.py:CLASS"):
        get_method(name)


def test_all_names_are_listed_and_reconstructions_say_so() -> None:
    assert method_names() == sorted(Method.registry)
    assert {name for name, kind in Method.registry.items() if kind.reconstruction} == {"fedcalm", "fedic"}
    assert all("reconstruction" in get_method(name).reconstruction for name in ("fedcalm", "fedic"))


# Privacy: the complete list of what leaves a client, of a model with BatchNorm. A prefix is for the server.

WEIGHTS = {"hidden.weight", "norm.weight", "norm.bias"}
STATISTICS = {"norm.running_mean", "norm.running_var"}
HEAD = {"head.weight", "head.bias"}
MODEL = WEIGHTS | STATISTICS | HEAD
OF_HEAD = {f"head/{name}" for name in HEAD}
OF_STATISTICS = {f"buffer/{name}" for name in STATISTICS}
STATEMENT = {f"statement/{name}" for name in ("loss", "gradient", "class_losses", "class_gradients")}
LEAVES: dict[str, set[str]] = {
    "local": set(),
    "pooled": set(),  # no upload: its training data itself is pooled, see test_pooled
    **dict.fromkeys(("fedavg", "fedprox", "ditto", "fedala", "fedfomo", "fedrod"), MODEL),
    **dict.fromkeys(("median", "trimmed-mean", "multi-krum"), MODEL),
    **dict.fromkeys(("fedc2i", "fedc2i-many", "fedc2i-top-k"), MODEL),
    **dict.fromkeys(("fedc2i-client", "fedc2i-class-global", "fedc2i-class-local"), MODEL),
    **dict.fromkeys(("fedrep",), WEIGHTS | STATISTICS),
    **dict.fromkeys(("fedcalm", "pfedgraph"), WEIGHTS | HEAD | OF_STATISTICS),
    "fedc2i-server": WEIGHTS | OF_STATISTICS | OF_HEAD | STATEMENT,
    "fedbn": {"hidden.weight"} | HEAD,
    "fedic": WEIGHTS | STATISTICS | OF_HEAD | {"prototypes", "class_counts", "variance"},
    "fedpac": WEIGHTS | STATISTICS | OF_HEAD | {"prototypes", "class_counts", "reference", "variance"},
    "fedproto": {"prototypes", "class_present"},
    "fedc2i-plus": MODEL | {"prototypes", "class_present"},
    "fedproto:weighting=counts": {"prototypes", "class_counts"},
}


@pytest.mark.parametrize("name", sorted({*Method.registry, *LEAVES}))
def test_exactly_these_tensors_leave_a_client(
    name: str, federation: Federation, make_model: Callable[..., Model]
) -> None:
    assert name in LEAVES, f"say in LEAVES what '{name}' uploads"
    kind, _, options = parse_method(name)
    sent = upload(kind(**options), make_model(batch_norm=True), federation)
    assert sent.keys() == LEAVES[name]
    if "class_present" in sent:
        assert sent["class_present"].tolist() == [True, True, True, False]
    if name == "fedproto:weighting=counts":
        assert sent["class_counts"].tolist() == [4, 4, 4, 0]


# What every option accepts and rejects, at the edges of its range. Classes share the options of their parents.

INF, NAN = float("inf"), float("nan")
AT_LEAST_0 = ([0, 0.5], [-0.1, NAN, INF, "much", True, None])
COUNT = ([1, 7], [0, -1, 1.5, True, "all"])
COUNT_FROM_0 = ([0, 7], [-1, 0.5, True, "all"])
SAMPLES = ([1, 300, "all"], [0, -1, 2.5, True, "some", None])
YES_OR_NO = ([True, False], [1, "yes", None])
GAMMA = ([0, 2, "ramp(3)"], [-1, NAN, INF, "five", "ramp(-1)", True])
RANGES: dict[tuple[str, str], tuple[list[Any], list[Any]]] = {
    ("fedavg", "anchor"): AT_LEAST_0,
    ("fedavg", "average"): YES_OR_NO,
    ("fedavg", "weighting"): (["uniform", "samples"], ["size", "", None]),
    ("fedprox", "mu"): AT_LEAST_0,
    ("ditto", "mu"): AT_LEAST_0,
    ("fedrep", "body_epochs"): COUNT,
    ("fedrod", "gamma_bsm"): AT_LEAST_0,
    ("fedproto", "ld"): AT_LEAST_0,
    ("fedc2i-plus", "rate"): AT_LEAST_0,
    ("fedc2i-plus", "influence_samples"): COUNT,
    ("fedc2i-plus", "ld"): AT_LEAST_0,
    ("fedc2i-plus", "guard"): YES_OR_NO,
    ("fedc2i-plus", "held_out"): ([0.01, 0.5], [0, 1, -0.1, NAN, True, "some"]),
    ("fedproto", "weighting"): (["uniform", "counts"], ["samples"]),
    ("fedpac", "lam"): AT_LEAST_0,
    ("fedpac", "head_epochs"): COUNT,
    ("fedic", "alternate"): YES_OR_NO,
    ("fedcalm", "epsilon"): AT_LEAST_0,
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


# Engines. `test_stacked` shows the same with four clients, `test_shared_options` with BatchNorm.

OPTIONS = {"fedala": ":layers=2", "fedc2i-top-k": ":k=1", "fedic": ":alternate=true", "fedproto": ":weighting=counts"}
RUNS = [(name, 3, {"layer_norm": name == "fedbn"}) for name in OF_THEIR_OWN]
RUNS += [(name, 1, {}) for name in ("fedavg", "fedc2i", "fedproto", "fedc2i-server")]
RUNS += [(name + options, 3, {}) for name, options in OPTIONS.items()]
RUNS += [(name, 3, {"bias": False}) for name in ("fedc2i-server", "fedpac", "fedrod")]


@pytest.mark.parametrize(("name", "clients", "kind"), RUNS, ids=str)
def test_looped_and_stacked_agree(
    name: str,
    clients: int,
    kind: dict[str, bool],
    make_model: Callable[..., Model],
    make_federation: Callable[..., Federation],
) -> None:
    """Three clients, or only one, which has no sample of one class.

    Tensors are compared by norm: where a single number's gradient is next to nothing, Adam blows its rounding up.
    """
    cls, _, options = parse_method(name)
    method, model = cls(**options), make_model(**kind)
    federation = make_federation(sizes=SIZES[:clients], validation=2)
    looped, reports = run(method, model, federation)
    stacked, others = run(method, model, federation, executor="stacked")
    for got, want in ((stacked.trained, looped.trained), (stacked.received, looped.received)):
        assert got.keys() == want.keys()
        for name, tensor in want.items():
            assert torch.isfinite(tensor).all(), name
            assert torch.dist(got[name].float(), tensor.float()) <= 1e-4 * tensor.float().norm() + 1e-6, name
    for one, two in zip(reports, others, strict=True):
        for point, metrics in one.metrics.items():
            for a, b in zip(metrics, two.metrics[point], strict=True):
                ranks = {"auroc": a["auroc"]} if "auroc" in a else {}  # rounding may change one pair of a few
                assert a == pytest.approx(b | ranks, rel=1e-3, abs=1e-5)


# Four rounds on three of the digits clients, where chance is 10 %: accuracy at a point, or of another prediction.

LEARNS: dict[str, dict[tuple[str, str], float]] = {
    "ditto": {("trained", "accuracy"): 45, ("received", "accuracy/global"): 35},
    "fedala": {("received", "accuracy"): 35, ("trained", "accuracy"): 50},
    "fedbn": {("received", "accuracy"): 60, ("trained", "accuracy"): 65},
    "fedcalm": {("trained", "accuracy"): 40},
    "fedfomo": {("trained", "accuracy"): 40},
    "fedic": {("trained", "accuracy"): 40},
    "fedpac": {("trained", "accuracy"): 30},
    "fedproto": {("trained", "accuracy"): 60, ("received", "accuracy/prototype"): 50},
    "fedrep": {("trained", "accuracy"): 40, ("received", "accuracy"): 25},
    "fedrod": {("trained", "accuracy"): 50, ("received", "accuracy/generic"): 35},
    "median": {("received", "accuracy"): 25, ("trained", "accuracy"): 40},
    "multi-krum": {("received", "accuracy"): 25, ("trained", "accuracy"): 40},
    "pfedgraph": {("trained", "accuracy"): 40},
    "pooled": {("received", "accuracy"): 45, ("trained", "accuracy"): 45},
    "trimmed-mean": {("received", "accuracy"): 25, ("trained", "accuracy"): 40},
}


@pytest.mark.parametrize("name", each_kind([*LEARNS]))
def test_it_learns(name: str) -> None:
    federation = fedc2i.load("digits")
    three, settings = federation.select(federation.names[:3]), {"model": "lenet5-bn"} if name == "fedbn" else {}
    last = fedc2i.run(name, three, rounds=4, evaluate_every=4, **settings).rounds[-1]
    for (point, metric), least in LEARNS[name].items():
        assert last.mean(point, metric) > least


ONLY_MEAN = ["ditto", "fedala", "fedavg", "fedbn", "fedprox", "fedrep", "fedrod"]


def test_what_needs_only_the_mean_gives_the_same_from_it() -> None:
    """So that the mean of masked uploads may stand in for each of them."""
    assert [name for name in method_names() if Method.registry[name].needs_only_mean] == ONLY_MEAN
    rows, samples = torch.randn(4, 3, 2, generator=torch.Generator().manual_seed(1)), torch.tensor([3, 1, 2, 2])
    for name in ONLY_MEAN:
        for weighting in ("uniform", "samples"):
            method = get_method(name)(weighting=weighting)
            sent = Uploads({"w": rows}, (0, 1, 2, 3), samples, torch.zeros(4))
            weights = method.weights(replace(sent, tensors={}))  # of sample counts alone
            mean = torch.tensordot(weights, rows, 1)
            got, _ = method.combine(replace(sent, tensors={"w": mean.expand(4, 3, 2)}), {})
            want, _ = method.combine(sent, {})
            torch.testing.assert_close(got.shared, want.shared)
            assert not want.personal
            assert not method.keeps_uploads
            assert not method.reads_reports


def test_a_method_with_its_own_server_must_say_that_the_mean_will_do() -> None:
    class Trains(fedc2i.Method):
        """Differs at the clients."""

    class Weighs(fedc2i.Method):
        """May look at uploads."""

        def weights(self, uploads: Uploads) -> torch.Tensor:
            return super().weights(uploads)

    class Says(Weighs):
        """Does not."""

        needs_only_mean = True

    class Further(Says):
        """Inherits what it says."""

    assert [kind.needs_only_mean for kind in (Trains, Weighs, Says, Further)] == [True, False, True, True]
