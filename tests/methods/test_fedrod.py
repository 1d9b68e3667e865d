"""FedRoD: its two losses, what each of them trains, and its two predictions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.func import grad
from torch.nn import functional as F  # noqa: N812

from fedc2i.core.params import Params, select
from fedc2i.data.federation import Federation
from fedc2i.methods.fedavg import FedAvg
from fedc2i.methods.fedrod import FedRoD
from fedc2i.models.model import Model, scale, split
from oracles import assert_same_model
from oracles.fedrod import balanced_loss, local_run, personal_loss
from support.method_checks import (
    TRAINING,
    local_client,
    make_site,
    place,
    run,
    upload,
)

PERSONAL = {"personal.weight", "personal.bias"}


def random_state(method: FedRoD, model: Model) -> Params:
    """A state whose private head is no longer the generic one."""
    params = method.setup(model.init(0), model)
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.randn(tensor.shape, generator=generator) if name in PERSONAL else tensor
        for name, tensor in params.items()
    }


@pytest.mark.parametrize("bias", [True, False])
def test_the_private_head_starts_as_a_copy_which_doubles_the_logits(
    bias: bool, make_model: Callable[..., Model], federation: Federation
) -> None:
    model, data, method = make_model(bias=bias), place(federation), FedRoD()
    site, x = make_site(model, data), data.test.x
    params = method.setup(model.init(0), model)
    assert params.keys() == model.init(0).keys() | (PERSONAL if bias else {"personal.weight"})
    plain = site.logits(model.init(0), x)
    torch.testing.assert_close(method.predict(params, x, site), 2 * plain)
    torch.testing.assert_close(method.other_predictions(params, x, site)["generic"], plain)


@pytest.mark.parametrize("gamma", [0.0, 1.0, 0.5])
def test_both_losses_by_hand(gamma: float, model: Model, federation: Federation) -> None:
    data, method = place(federation), FedRoD(gamma_bsm=gamma)
    params = random_state(method, model)
    site = make_site(model, data)
    counts = data.counts.tolist()
    assert counts[-1] == 0  # the class that this client lacks
    h = site.features(params, data.train.x)
    g = h @ params["head.weight"].T + params["head.bias"]
    p = h @ params["personal.weight"].T + params["personal.bias"]
    balanced = balanced_loss(g, data.train.y, counts if gamma else [1] * 4, gamma)
    want = balanced + personal_loss(g + p, data.train.y)
    assert method.loss(params, data.train, site).item() == pytest.approx(want, rel=1e-5)
    torch.testing.assert_close(method.predict(params, data.train.x, site), g + p)


def test_each_loss_reaches_its_own_parameters_only(model: Model, federation: Federation) -> None:
    data, method = place(federation), FedRoD()
    params = random_state(method, model)
    site = make_site(model, data, training=True)
    log_counts = data.counts.clamp(min=1e-30).log()

    def balanced(own: Params) -> torch.Tensor:
        return F.cross_entropy(site.logits(own, data.train.x) + log_counts, data.train.y)

    def personal(own: Params) -> torch.Tensor:
        h = site.features(own, data.train.x)
        logits = site.model.head(own, h) + F.linear(h, own["personal.weight"], own["personal.bias"])
        return F.cross_entropy(logits, data.train.y)

    got = grad(lambda own: method.loss(own, data.train, site))(params)
    of_balanced, of_personal = grad(balanced)(params), grad(personal)(params)
    for name in params:
        want = of_personal if name in PERSONAL else of_balanced
        torch.testing.assert_close(got[name], want[name], rtol=1e-4, atol=1e-6)
    assert of_personal["hidden.weight"].abs().max() > 1e-3  # isolation is not for lack of a gradient


def test_one_scalar_is_two_optimisers_in_turn(federation: Federation) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(768, 6), nn.Tanh(), nn.Linear(6, 4))

    model, data, method = split(build, head="3"), place(federation), FedRoD()
    start = method.setup(model.init(0), model)
    client = local_client(method, model, federation)
    trained = client.train(start, {}, -1, 1)
    net, personal = build(), nn.Linear(6, 4)
    net.load_state_dict(select(start, lambda name: name not in PERSONAL))
    personal.load_state_dict({"weight": start["personal.weight"], "bias": start["personal.bias"]})
    local_run(
        net[:3],
        net[3],
        personal,
        scale(data.train.x, torch.float32),
        data.train.y,
        data.counts,
        [index for epoch in client.context.epochs(data, 1) for index in epoch],
        lambda leaves: torch.optim.Adam(leaves, lr=TRAINING.lr),
    )
    want = {**net.state_dict(), **{f"personal.{name}": tensor for name, tensor in personal.state_dict().items()}}
    assert_same_model(trained, want, rtol=1e-4, atol=1e-5)


def test_balanced_classes_and_a_zero_head_share_fedavg_s_model(
    model: Model, make_federation: Callable[..., Federation]
) -> None:
    """Equal counts add a constant to all logits; with γ = 0 nothing is added whatever the counts."""
    federation = make_federation(sizes=(12, 20))
    mean, _ = run(FedAvg(), model, federation)
    ours, _ = run(FedRoD(gamma_bsm=0.0), model, federation)
    assert_same_model(select(ours.trained, model.init(0)), mean.trained, rtol=1e-5, atol=1e-6)
    balanced = federation.select(["b"])
    one, _ = run(FedRoD(gamma_bsm=1.0), model, balanced)
    two, _ = run(FedRoD(gamma_bsm=0.0), model, balanced)
    assert_same_model(one.trained, two.trained, rtol=1e-4, atol=1e-5)


def test_the_private_head_stays(model: Model, federation: Federation) -> None:
    assert upload(FedRoD(), model, federation).keys() == set(model.init(0))
    outcome, reports = run(FedRoD(), model, federation)
    assert_same_model(select(outcome.received, PERSONAL), select(outcome.trained, PERSONAL), rtol=0, atol=0)
    assert {"accuracy", "accuracy/generic"} <= reports[-1].metrics["received"][0].keys()
