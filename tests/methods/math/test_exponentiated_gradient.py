"""Influence by descent: a slow oracle, FedC²I as its first step, and what must follow from any numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F  # noqa: N812

from fedc2i.core.params import Params, stack
from fedc2i.methods.math.exponentiated_gradient import descend, mixed, normalised
from fedc2i.methods.math.first_order import first_order_losses
from fedc2i.methods.math.influence import influence
from fedc2i.methods.messages import Peers, relay
from fedc2i.models.model import split
from fedc2i.training.local import Batch

CLASSES, INPUTS, CLIENTS = 3, 4, 5


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(INPUTS, 6), nn.Tanh(), nn.Linear(6, CLASSES)).double()


MODEL = split(build, head="2")


def models_of(seed: int, count: int = CLIENTS) -> list[Params]:
    torch.manual_seed(seed)
    return [{name: tensor.detach().clone() for name, tensor in build().state_dict().items()} for _ in range(count)]


def samples_of(seed: int, count: int = 12) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, INPUTS, generator=generator, dtype=torch.float64)
    return Batch(x, torch.randint(CLASSES, (count,), generator=generator), torch.ones(count, dtype=torch.float64))


def peers_of(models: list[Params], position: int = 1) -> Peers:
    return Peers.read(relay(stack(models)), torch.tensor(position), MODEL)


def logits(params: Params, x: Tensor) -> Tensor:
    return MODEL.head(params, MODEL.features(params, x))


def found(models: list[Params], parts: list[Batch], rate: float, position: int = 1) -> tuple[Tensor, Tensor]:
    return descend(logits, peers_of(models, position), parts, rate, MODEL.trainable, CLASSES)


def by_hand(models: list[Params], parts: list[Batch], rate: float, position: int) -> tuple[Tensor, Tensor]:
    """One model and one class at a time, with autograd on whole mixtures and weights that are multiplied."""
    count, heads, module = len(models), ("2.weight", "2.bias"), build()
    vector, matrix = np.ones(count), np.ones((count, CLASSES))

    def shares(column: np.ndarray) -> np.ndarray:
        column = column.copy()
        column[position] = max(column[i] for i in range(count) if i != position)
        return column / column.sum()

    for samples in parts:
        lam, rows = shares(vector), [shares(matrix[:, c]) for c in range(CLASSES)]
        mixture = {}
        for name in models[0]:
            if name in heads:
                own = [sum(rows[c][i] * models[i][name][c] for i in range(count)) for c in range(CLASSES)]
                mixture[name] = torch.stack([torch.as_tensor(row) for row in own]).requires_grad_()
            else:
                mixture[name] = sum(lam[i] * models[i][name] for i in range(count)).requires_grad_()
        loss = F.cross_entropy(functional_call(module, mixture, samples.x), samples.y)
        loss.backward()
        step = rate / max(loss.item(), 0.5)
        for i in range(count):
            for name, tensor in models[i].items():
                if name not in heads:
                    vector[i] *= np.exp(-step * (mixture[name].grad * tensor).sum().item())
                else:
                    for c in range(CLASSES):
                        matrix[i, c] *= np.exp(-step * (mixture[name].grad[c] * tensor[c]).sum().item())
    return torch.tensor(shares(vector)), torch.tensor(np.stack([shares(matrix[:, c]) for c in range(CLASSES)], 1))


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("scale", [1.0, 8.0])  # losses above and, for the second, far above a half
def test_it_is_descent_by_hand(steps: int, scale: float) -> None:
    models = [{name: scale * tensor for name, tensor in own.items()} for own in models_of(0)]
    parts = [samples_of(seed) for seed in range(steps)]
    for got, wanted in zip(found(models, parts, 2.0), by_hand(models, parts, 2.0, 1), strict=True):
        assert torch.allclose(got, wanted, rtol=1e-8)


def test_a_fitted_loss_counts_as_a_half() -> None:
    """All samples of one class, which every model predicts: the loss is small, and l itself is what counts."""
    samples = samples_of(0)._replace(y=torch.zeros(12, dtype=torch.int64))
    models = models_of(3)
    for own in models:
        own["2.bias"] += torch.tensor([6.0, 0.0, 0.0], dtype=torch.float64)
    for got, wanted in zip(found(models, [samples], 50.0), by_hand(models, [samples], 50.0, 1), strict=True):
        assert torch.allclose(got, wanted, rtol=1e-8)


def test_one_step_is_the_influence_of_fedc2i_to_first_order() -> None:
    """With γ = η·(K − 1), of bodies near each other."""
    start, near = models_of(0, 1)[0], models_of(1)
    models = [{name: start[name] + 1e-4 * own[name] for name in start} for own in near]
    samples, rate = samples_of(2), 3e4
    peers = peers_of(models, -1)  # the own model is not among them, so all are measured

    def loss(body: Params) -> Tensor:
        mean = {name: tensor.mean(0) for name, tensor in peers.models.items()}
        return F.cross_entropy(functional_call(build(), {**mean, **body}, samples.x), samples.y)

    losses = first_order_losses(loss, peers.bodies, peers.valid, peers.bodies)
    wanted = influence(losses, rate * (CLIENTS - 1), peers.valid)
    assert wanted.max() > 1.03 / CLIENTS
    assert torch.allclose(found(models, [samples], rate, -1)[0], wanted, rtol=1e-3)


def test_models_that_contradict_the_client_lose_their_weight() -> None:
    """Three have the client's labels, six others: small steps turn the majority, and a large one decides at once."""
    torch.manual_seed(0)
    samples = samples_of(0, 64)
    truth = torch.randn(INPUTS, CLASSES, dtype=torch.float64)
    samples = samples._replace(y=(samples.x @ truth).argmax(1))

    def fitted(y: Tensor) -> Params:
        module = build()
        optimiser = torch.optim.Adam(module.parameters(), lr=0.05)
        module.load_state_dict(start)
        for _ in range(60):
            optimiser.zero_grad()
            F.cross_entropy(module(samples.x), y).backward()
            optimiser.step()
        return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}

    start = build().state_dict()
    friend, foe = fitted(samples.y), fitted((samples.y + 1) % CLASSES)
    models = [friend] * 3 + [foe] * 6
    shares = [float(found(models, [samples] * steps, 0.2, 0)[0][3:].sum()) for steps in (1, 2, 4)]  # of the six
    assert 2 / 3 > shares[0] > 0.5 > shares[1] > shares[2]
    vector, matrix = found(models, [samples] * 2, 20.0, 0)
    assert vector[:3].tolist() == pytest.approx([1 / 3] * 3, abs=0.01)
    assert matrix[3:].max() < 0.05


def test_weights_are_a_distribution_and_the_own_one_is_that_of_the_best_other() -> None:
    models = models_of(0)
    models[3] = {name: tensor * torch.nan for name, tensor in models[3].items()}
    for weights in found(models, [samples_of(0), samples_of(1)], 20.0):
        assert torch.allclose(weights.sum(0), torch.ones_like(weights.sum(0)))
        assert bool((weights >= 0).all())
        assert weights[3].max() == 0  # a broken model
        assert torch.equal(weights[1], weights[[0, 2, 4]].amax(0))


@pytest.mark.parametrize("position", [-1, 0])
def test_without_samples_others_or_a_rate_weights_are_equal(position: int) -> None:
    models, none = models_of(0), samples_of(0)._replace(w=torch.zeros(12, dtype=torch.float64))
    for weights in (*found(models, [none], 20.0, position), *found(models, [samples_of(0)], 0.0, position)):
        assert torch.equal(weights, torch.full_like(weights, 1 / CLIENTS))
    for weights in found(models[:1], [samples_of(0)], 20.0, position):
        assert torch.equal(weights, torch.ones_like(weights))


def test_where_a_gradient_is_not_finite_weights_stay_as_they_are() -> None:
    models, samples = models_of(0), samples_of(0)
    broken = samples._replace(x=samples.x * torch.nan)
    for weights, wanted in zip(found(models, [samples, broken], 20.0), found(models, [samples], 20.0), strict=True):
        assert torch.equal(weights, wanted)


def test_a_broken_own_model_has_no_weight() -> None:
    models = models_of(0)
    others = [models[k] for k in (0, 2, 3, 4)]
    models[1] = {name: tensor * torch.nan for name, tensor in models[1].items()}
    for weights, wanted in zip(
        found(models, [samples_of(0)], 20.0), found(others, [samples_of(0)], 20.0, -1), strict=True
    ):
        assert weights[1].max() == 0
        assert torch.allclose(weights[[0, 2, 3, 4]], wanted)


def test_where_no_model_is_valid_there_are_no_weights() -> None:
    broken = [{name: tensor * torch.nan for name, tensor in own.items()} for own in models_of(0)]
    peers = peers_of(broken)
    assert torch.equal(normalised(torch.zeros(CLIENTS), peers), torch.zeros(CLIENTS))


def test_buffers_are_mixed_but_not_measured_and_a_head_needs_no_bias() -> None:
    """Models that differ in running statistics alone have equal weights, and the mixture has the mean of these."""

    def normed() -> nn.Module:
        layers = nn.Linear(INPUTS, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, CLASSES, bias=False)
        return nn.Sequential(*layers).double()

    model, generator = split(normed, head="3"), torch.Generator().manual_seed(0)
    start = {name: tensor for name, tensor in model.init(0).items() if tensor.is_floating_point()}
    statistics = [name for name in start if name not in model.trainable]
    assert statistics == ["1.running_mean", "1.running_var"]
    drawn = {name: torch.rand(CLIENTS, 6, generator=generator, dtype=torch.float64) for name in statistics}
    same = {name: tensor[None].repeat(CLIENTS, *[1] * tensor.ndim) for name, tensor in start.items()}
    own = model.init(0)  # with the counter of batches, which is not sent

    def weights(models: Params) -> tuple[Tensor, Tensor, Params]:
        peers = Peers.read(relay(models), torch.tensor(-1), model)

        def logits(params: Params, x: Tensor) -> Tensor:
            return model.head(params, model.features({**own, **params}, x))

        found = descend(logits, peers, [samples_of(0), samples_of(1)], 20.0, model.trainable, CLASSES)
        return *found, mixed(peers, *found)

    vector, matrix, mixture = weights(same | drawn)
    assert torch.allclose(vector, torch.full_like(vector, 1 / CLIENTS))
    assert torch.allclose(matrix, torch.full_like(matrix, 1 / CLIENTS))
    for name in statistics:
        assert torch.allclose(mixture[name], drawn[name].mean(0))
    others = torch.randn(CLIENTS, CLASSES, 6, generator=generator, dtype=torch.float64)
    assert weights(same | drawn | {"3.weight": others})[1].std(0).min() > 0.01


def test_it_can_be_lifted_over_clients_and_ignores_padding() -> None:
    models, parts, positions = models_of(0), [samples_of(0), samples_of(1)], (3, -1)
    padded = [
        Batch(torch.cat([own.x, 100 * own.x]), torch.cat([own.y, own.y]), torch.cat([own.w, torch.zeros_like(own.w)]))
        for own in parts
    ]
    both, relayed = Batch(*(torch.stack(tensors) for tensors in zip(*padded, strict=True))), relay(stack(models))

    def lifted(x: Tensor, y: Tensor, w: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        peers = Peers.read(relayed, position, MODEL)
        return descend(logits, peers, [Batch(x, y, w)], 20.0, MODEL.trainable, CLASSES)

    vectors, matrices = vmap(lifted)(*both, torch.tensor(positions))
    for k, own in enumerate(parts):
        vector, matrix = found(models, [own], 20.0, positions[k])
        assert torch.allclose(vectors[k], vector)
        assert torch.allclose(matrices[k], matrix)
