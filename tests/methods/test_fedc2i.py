"""Every option of FedC²I on a tiny case with an independent result, its refusals, and what leaves a client."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from fedc2i.core.errors import UserError
from fedc2i.core.params import Params, relay, stack
from fedc2i.data.federation import Federation
from fedc2i.engine.client import ClientData, LocalClient, RunContext
from fedc2i.engine.settings import Settings
from fedc2i.engine.simulator import simulate
from fedc2i.methods.base import Method, Probe, Site, Uploads
from fedc2i.methods.fedavg import FedAvg
from fedc2i.methods.fedc2i import FedC2I
from fedc2i.methods.math.gamma import Gamma
from fedc2i.models.model import Model, split
from fedc2i.training.local import Batch, Training
from oracles import assert_same_model
from oracles.fedc2i import Problem, by_powers, class_losses, client_losses, mixed_body, mixed_head

GAMMA = 3.0
MISSING = 4  # the class that the client of `problem` has no sample of


@pytest.fixture
def problem() -> Problem:
    return Problem.draw(clients=4, classes=5, labels=[0, 1, 2, 3], samples=7, position=2, seed=5)


def personalise(problem: Problem, extra: Params | None = None, **options: Any) -> tuple[Params, dict[str, Tensor]]:
    model = split(problem.build, head="2")
    counts = torch.tensor([3, 1, 2, 9, 0])
    received = {**relay(stack(problem.models)), **(extra or {})}
    site = Site(model, counts, torch.tensor(problem.position), received)
    batch = Batch(problem.x, problem.y, torch.ones(len(problem.y)).double())
    start, report = FedC2I(**{"gamma": GAMMA, **options}).personalise(problem.own, batch, site)
    return start, dict(report)


def mean(problem: Problem) -> Params:
    return {name: tensor.mean(0) for name, tensor in stack(problem.models).items()}


def part(problem: Problem, model: Params, head: bool) -> Params:
    return {name: tensor for name, tensor in model.items() if (name in problem.head) == head}


# Options.


@pytest.mark.parametrize("head", ["client", "own", "uniform"])
def test_variant_client_has_no_matrix(problem: Problem, head: str) -> None:
    start, report = personalise(problem, variant="client", head=head)
    vector = by_powers(problem.client_losses(), GAMMA)
    want_head = {
        "client": problem.mixed_head(vector[:, None].expand(-1, 5)),
        "own": part(problem, problem.own, head=True),
        "uniform": part(problem, mean(problem), head=True),
    }[head]
    assert_same_model(start, {**problem.mixed_body(vector), **want_head}, rtol=1e-9)
    assert report.keys() == {"left_out", "client_losses", "influence_vector"}


@pytest.mark.parametrize("variant", ["class-local", "class-global"])
def test_class_variants_have_no_vector(problem: Problem, variant: str) -> None:
    start, report = personalise(problem, variant=variant)
    body = part(problem, problem.own if variant == "class-local" else mean(problem), head=False)
    matrix = by_powers(problem.class_losses(), GAMMA)
    assert_same_model(start, {**body, **problem.mixed_head(matrix)}, rtol=1e-9)
    assert report.keys() == {"left_out", "class_losses", "influence_matrix"}


@pytest.mark.parametrize("variant", ["full", "class-global", "class-local"])
def test_class_features_aggregated_measures_on_the_new_body(problem: Problem, variant: str) -> None:
    start, report = personalise(problem, variant=variant, class_features="aggregated")
    body = {
        "full": problem.mixed_body(by_powers(problem.client_losses(), GAMMA)),
        "class-global": part(problem, mean(problem), head=False),
        "class-local": part(problem, problem.own, head=False),
    }[variant]
    losses = problem.class_losses(body=body)
    assert_close(report["class_losses"], losses, rtol=1e-9, atol=0)
    assert_same_model(start, {**body, **problem.mixed_head(by_powers(losses, GAMMA))}, rtol=1e-9)
    moved = not torch.allclose(losses, problem.class_losses())
    assert moved == (variant != "class-local")


def test_gamma_class_is_the_matrix_s_own(problem: Problem) -> None:
    _, report = personalise(problem, gamma=2.0, gamma_class=7.0)
    assert_close(report["influence_vector"], by_powers(problem.client_losses(), 2.0))
    assert_close(report["influence_matrix"], by_powers(problem.class_losses(), 7.0))


@pytest.mark.parametrize("missing", ["formula", "uniform", "own"])
def test_a_class_the_client_lacks(problem: Problem, missing: str) -> None:
    start, report = personalise(problem, missing=missing)
    matrix = by_powers(problem.class_losses(), GAMMA)
    if missing == "uniform":
        matrix[:, MISSING] = 1 / 4
    if missing == "own":
        matrix[:, MISSING] = torch.eye(4)[problem.position]
    assert_close(report["influence_matrix"], matrix)
    assert_same_model(part(problem, start, head=True), problem.mixed_head(matrix), rtol=1e-9)


def test_untrained_rows_are_left_out(problem: Problem) -> None:
    counts = torch.tensor([[1, 1, 0, 0, 0], [1, 1, 9, 0, 0], [1, 0, 1, 5, 0], [1, 2, 0, 0, 0]])
    start, report = personalise(problem, {"class_counts": counts}, untrained_rows="exclude")
    matrix = by_powers(problem.class_losses(takes_part=counts > 0), GAMMA)
    assert matrix[:, 3].tolist() == [0, 0, 1, 0]  # a class that one client has
    matrix[:, 4] = torch.eye(4)[problem.position]  # a class that nobody has: its own row stays
    assert_close(report["influence_matrix"], matrix)
    assert_same_model(part(problem, start, head=True), problem.mixed_head(matrix), rtol=1e-9)
    assert_close(report["influence_vector"], by_powers(problem.client_losses(), GAMMA))  # bodies all count


@pytest.mark.parametrize("variant", ["class-local", "class-global"])
def test_first_order_is_of_no_account_without_a_vector(problem: Problem, variant: str) -> None:
    exact, _ = personalise(problem, variant=variant)
    start, _ = personalise(problem, variant=variant, influence="first-order")
    assert all(torch.equal(start[name], tensor) for name, tensor in exact.items())


@pytest.mark.parametrize("influence", ["exact", "first-order"])
def test_gamma_zero_is_fedavg_bit_for_bit(influence: Any, model: Model) -> None:
    uploads = Uploads(stack([model.init(0, n) for n in range(7)]), tuple(range(7)), torch.ones(7), torch.zeros(7))
    mean, _ = FedAvg().combine(uploads, {})
    own = model.init(0, 3)
    x = torch.randint(256, (5, 3, 16, 16), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    batch = Batch(x, torch.arange(5) % model.classes, torch.ones(5))
    site = Site(model, torch.ones(model.classes), torch.tensor(3), relay(uploads.tensors))
    start, _ = FedC2I(gamma=0, influence=influence).personalise(own, batch, site)
    for name, tensor in mean.shared.items():
        assert torch.equal(start[name], tensor)


# Old models.


def uploads_of(problem: Problem, ages: list[int]) -> Uploads:
    count = len(problem.models)
    return Uploads(stack(problem.models), tuple(range(count)), torch.ones(count), torch.tensor(ages), round=9)


@pytest.mark.parametrize(
    ("max_age", "ages", "kept"),
    [
        (0, [0, 3, 0, 1], (0, 2)),
        (1, [0, 3, 0, 1], (0, 2, 3)),
        (9, [0, 3, 0, 1], (0, 1, 2, 3)),
        (0, [2, 3, 5, 2], (0, 3)),
    ],
    ids=["this round's", "up to one", "all", "the youngest if none is young enough"],
)
def test_old_models_are_not_sent(problem: Problem, max_age: int, ages: list[int], kept: tuple[int, ...]) -> None:
    download, _ = FedC2I(max_age=max_age).combine(uploads_of(problem, ages), {})
    assert download.clients == kept
    for name, tensor in stack([problem.models[k] for k in kept]).items():
        assert torch.equal(download.shared[name], tensor)


@pytest.mark.parametrize("class_features", ["own", "aggregated"])
def test_a_client_whose_model_is_old_measures_with_the_mean(class_features: Any) -> None:
    """As if the mean of the models it received were its own, and had not been sent."""
    everyone = Problem.draw(clients=4, classes=5, labels=[0, 1, 2, 3], samples=7, position=2, seed=5)
    others = [everyone.models[k] for k in (0, 1, 3)]
    received = relay(stack(others))
    site = Site(split(everyone.build, head="2"), torch.ones(5), torch.tensor(-1), received)
    batch = Batch(everyone.x, everyone.y, torch.ones(7).double())
    method = FedC2I(gamma=GAMMA, max_age=0, class_features=class_features)
    start, report = method.personalise(everyone.own, batch, site)
    mean = {name: tensor.mean(0) for name, tensor in stack(others).items()}
    vector = by_powers(client_losses(everyone.build, everyone.head, others, mean, everyone.x, everyone.y), GAMMA)
    assert_close(report["influence_vector"], vector)
    body = mixed_body(others, everyone.head, vector)
    seen = {**mean, **(body if class_features == "aggregated" else {})}
    matrix = by_powers(class_losses(everyone.build, everyone.head, others, seen, everyone.x, everyone.y), GAMMA)
    assert_same_model(start, {**body, **mixed_head(others, everyone.head, matrix)}, rtol=1e-9)


def test_what_a_client_keeps_private_stays_its_own(problem: Problem) -> None:
    received = relay(stack([problem.models[k] for k in (0, 1, 3)]))
    site = Site(split(problem.build, head="2"), torch.ones(5), torch.tensor(-1), received)
    batch = Batch(problem.x, problem.y, torch.ones(len(problem.y)).double())
    start, _ = FedC2I(gamma=GAMMA, max_age=0, variant="class-local").personalise(problem.own, batch, site)
    for name, tensor in part(problem, problem.own, head=False).items():
        assert torch.equal(start[name], tensor)


@pytest.mark.parametrize("executor", ["looped", "stacked"])
def test_gamma_zero_without_old_models_is_fedavg_when_few_take_part(
    executor: Any, model: Model, make_federation: Callable[..., Federation]
) -> None:
    federation = make_federation(sizes=(9, 12, 7, 9, 8))
    settings = Settings(rounds=4, clients_per_round=2, training=Training(batch_size=5), executor=executor)
    both = [simulate(method, model, federation, settings, (0,)) for method in (FedAvg(), FedC2I(gamma=0, max_age=0))]
    for point in ("trained", "received"):
        want, got = (getattr(own[0], point) for own in both)
        for name, tensor in want.items():
            assert torch.equal(got[name], tensor), (point, name)
    kept = simulate(FedC2I(gamma=0), model, federation, settings, (0,))
    assert not torch.equal(kept[0].received[name], both[0][0].received[name])


@pytest.mark.parametrize("bad", [-1, 1.5, True, "old"])
def test_bad_max_age(bad: Any) -> None:
    with pytest.raises(UserError, match="max_age must be a whole number of at least 0"):
        FedC2I(max_age=bad)


def test_max_age_with_top_k() -> None:
    with pytest.raises(UserError, match="top_k and max_age cannot be used together"):
        FedC2I(max_age=0, top_k=2)


# The weight of the client's own model.


@pytest.mark.parametrize("position", [2, -1], ids=["among those received", "not among them"])
def test_own_weight_equal_by_hand(problem: Problem, position: int) -> None:
    """Of four models the own has a quarter, and the others share the rest by their influence."""
    site = Site(split(problem.build, head="2"), torch.ones(5), torch.tensor(position), relay(stack(problem.models)))
    losses = torch.tensor([1.0, 2.0, 100.0, 3.0])
    weights, _ = FedC2I(own_weight="equal")._weigh(losses, 1.0, torch.ones(4, dtype=torch.bool), site)
    want = [0.125, 0.25, 0.25, 0.375] if position == 2 else [1 / 106, 2 / 106, 100 / 106, 3 / 106]
    assert_close(weights, torch.tensor(want))


def test_own_weight_equal_for_each_class(problem: Problem) -> None:
    usable = torch.tensor([[True, True], [True, True], [True, False], [True, False]])
    site = Site(split(problem.build, head="2"), torch.ones(5), torch.tensor(2), relay(stack(problem.models)))
    losses = torch.tensor([[1.0, 1.0], [2.0, 3.0], [9.0, 9.0], [1.0, 9.0]])
    weights, _ = FedC2I(own_weight="equal")._weigh(losses, 1.0, usable, site)
    assert_close(weights, torch.tensor([[0.1875, 0.25], [0.375, 0.75], [0.25, 0.0], [0.1875, 0.0]]))


def test_own_weight_equal_in_an_exchange(problem: Problem) -> None:
    start, report = personalise(problem, own_weight="equal")
    vector = report["influence_vector"]
    others = torch.tensor([k for k in range(4) if k != problem.position])
    powers = problem.client_losses()[others] ** GAMMA
    assert_close(vector[problem.position].item(), 0.25)
    assert_close(vector[others], 0.75 * powers / powers.sum())
    assert_same_model(part(problem, start, head=False), problem.mixed_body(vector), rtol=1e-9)


def test_own_weight_equal_of_a_single_model(problem: Problem) -> None:
    site = Site(split(problem.build, head="2"), torch.ones(5), torch.tensor(0), relay(stack(problem.models[:1])))
    weights, _ = FedC2I(own_weight="equal")._weigh(torch.ones(1), 5.0, torch.ones(1, dtype=torch.bool), site)
    assert weights.tolist() == [1.0]


@pytest.mark.parametrize("gamma", [5.0, Gamma.parse("perplexity(40%)")], ids=str)
def test_own_weight_equal_where_no_other_loss_is_finite(problem: Problem, gamma: float | Gamma) -> None:
    """All of it is the own model's then: a share alone would shrink the model."""
    site = Site(split(problem.build, head="2"), torch.ones(5), torch.tensor(2), relay(stack(problem.models)))
    losses = torch.tensor([[torch.inf, 1.0], [torch.nan, 2.0], [9.0, 1.0], [torch.inf, torch.nan]])
    weights, _ = FedC2I(own_weight="equal")._weigh(losses, gamma, torch.ones(4, 2, dtype=torch.bool), site)
    assert weights[:, 0].tolist() == [0.0, 0.0, 1.0, 0.0]
    assert_close(weights.sum(0), torch.ones(2))
    assert weights[2, 1] == 0.25


def recipe(method: Method, model: Model) -> RunContext:
    return RunContext(method, model, Training(), rounds=3, seed=0)


def placed(federation: Federation, client: int = 0) -> ClientData:
    return ClientData.place(federation.clients[client], len(federation.classes), torch.device("cpu"))


def pixels(batch: Batch) -> set[bytes]:
    return {image.numpy().tobytes() for image in batch.x}


@pytest.mark.parametrize(("samples", "want"), [(5, 5), (1, 1), (12, 12), (13, 12), (1000, 12), ("all", 12)])
def test_influence_samples_are_distinct_training_samples(
    federation: Federation, model: Model, samples: Any, want: int
) -> None:
    data = placed(federation)
    batch = recipe(FedC2I(influence_samples=samples), model).probe(data, 1)
    assert batch is not None
    assert len(batch.y) == len(pixels(batch)) == want
    assert pixels(batch) <= pixels(data.train)
    assert batch.w.tolist() == [1.0] * want


def test_influence_samples_are_drawn_anew_for_every_round_and_client(federation: Federation, model: Model) -> None:
    own = recipe(FedC2I(influence_samples=4), model)
    first, again, second = (own.probe(placed(federation), number) for number in (1, 1, 2))
    assert torch.equal(first.x, again.x)
    assert pixels(first) != pixels(second)
    training_batch = own.epochs(placed(federation), 1)[0][0][:4]
    assert pixels(first) != pixels(placed(federation).train.take(training_batch))


def test_influence_split(make_federation: Callable[..., Federation], model: Model) -> None:
    data = placed(make_federation(validation=6))
    batch = recipe(FedC2I(influence_split="validation", influence_samples="all"), model).probe(data, 1)
    assert pixels(batch) == pixels(data.validation)
    assert not pixels(batch) & pixels(data.train)


@dataclass(frozen=True)
class HeldOut(Method):
    """Asks for held-out samples, as any method may."""

    @property
    def probe(self) -> Probe:
        return Probe("all", "held-out")


@pytest.mark.parametrize("validation", [0, 6])
def test_held_out_samples_are_validation_data_where_there_are_any(
    validation: int, make_federation: Callable[..., Federation], model: Model
) -> None:
    data = placed(make_federation(validation=validation))
    batch = recipe(HeldOut(), model).probe(data, 1)
    assert pixels(batch) == pixels(data.validation if validation else data.train)


def test_the_probe_reaches_personalise(make_federation: Callable[..., Federation], model: Model) -> None:
    """The whole path of a client: what it measures on is the probe, nothing else."""
    data, method = placed(make_federation(validation=6)), FedC2I(influence_split="validation", influence_samples=4)
    models = [model.init(0, n) for n in range(3)]
    client = LocalClient(recipe(method, model), data)
    _, got = client.personalise(models[0], relay(stack(models)), 0, 2)
    probe = client.recipe.probe(data, 2)
    _, want = method.personalise(models[0], probe, Site(model, data.counts, torch.tensor(0), relay(stack(models))))
    assert torch.equal(got["client_losses"], want["client_losses"])


def test_the_server_relays_every_model_unchanged() -> None:
    tensors = {"a": torch.arange(6.0).reshape(3, 2)}
    uploads = Uploads(tensors, (0, 2, 4), torch.tensor([5, 6, 7]), torch.tensor([0, 1, 0]))
    download, _ = FedC2I().combine(uploads, {})
    assert download.clients == (0, 2, 4)
    for client in (0, 1, 4):
        assert torch.equal(download.to(client)["a"], tensors["a"])
    assert [download.position(client) for client in range(5)] == [0, -1, 1, -1, 2]


# Refusals.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gamma": -1.0}, "gamma must be a finite number of at least 0, got -1.0"),
        ({"gamma": float("nan")}, "gamma .* at least 0"),
        ({"gamma": float("inf")}, "gamma .* finite"),
        ({"gamma": "five"}, "gamma .* number"),
        ({"gamma_class": -0.1}, "gamma_class .* at least 0"),
        ({"variant": "both"}, r"variant must be full \| client \| class-local \| class-global, got 'both'"),
        ({"head": "mine"}, r"head must be client \| own \| uniform"),
        ({"class_features": ""}, r"class_features must be own \| aggregated"),
        ({"influence": "second-order"}, r"influence must be exact \| first-order, got 'second-order'"),
        ({"influence_samples": 0}, "influence_samples must be a whole number of at least 1, or all, got '0'"),
        ({"influence_samples": 2.5}, "influence_samples .* at least 1, or all"),
        ({"influence_samples": "some"}, "influence_samples .* at least 1, or all"),
        ({"influence_split": "test"}, r"influence_split must be train \| validation, got 'test'"),
        ({"missing": None}, r"missing must be formula \| uniform \| own"),
        ({"untrained_rows": True}, r"untrained_rows must be include \| exclude"),
    ],
)
def test_refusals_name_what_is_allowed(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        FedC2I(**options)


# Privacy: the complete list of what leaves a client, for every method there is.

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
    "fedavg-plus": BODY | HEAD,
    "fedprox-plus": BODY | HEAD,
    "fedrep-plus": BODY,
    "median": BODY | HEAD,
    "trimmed-mean": BODY | HEAD,
    "multi-krum": BODY | HEAD,
}


def uploaded(method: Method, federation: Federation, model: Model) -> Params:
    start = method.setup(model.init(0), model)
    return LocalClient(recipe(method, model), placed(federation)).upload(start, start, {}, -1, 1)


@pytest.mark.parametrize("name", sorted(Method.registry))
def test_exactly_these_tensors_leave_a_client(
    name: str, federation: Federation, make_model: Callable[..., Model]
) -> None:
    assert name in LEAVES, f"say in LEAVES what '{name}' uploads"
    method, model = Method.registry[name](), make_model(batch_norm=True)
    sent = uploaded(method, federation, model)
    assert {key.rpartition("/")[2] for key in sent} == LEAVES[name]  # what stands before a slash is for the server
    assert len(sent) == len(LEAVES[name])


def test_class_counts_leave_only_when_asked_for(federation: Federation, make_model: Callable[..., Model]) -> None:
    upload = uploaded(FedC2I(untrained_rows="exclude"), federation, make_model(batch_norm=True))
    assert upload.keys() == BODY | HEAD | {"class_counts"}
    assert upload["class_counts"].tolist() == [4, 4, 4, 0]
