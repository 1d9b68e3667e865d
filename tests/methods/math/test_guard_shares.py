"""The guard's shares by hand: a posterior over ways to combine networks, and how a mixture loses its share."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from fedc2i.methods.math.guard import best_logs, distrusted, mean_log, posterior
from fedc2i.training.local import Batch

DESIGN = [(a / 4, b / 4, (4 - a - b) / 4) for a in range(5) for b in range(5 - a)]


def samples_of(labels: list[int]) -> Batch:
    y = torch.tensor(labels)
    return Batch(y, y, torch.ones(len(y)))


def shares(logits: Tensor, labels: list[int]) -> list[float]:
    logs, _ = best_logs(logits, samples_of(labels))
    return posterior(logs, torch.ones(len(labels))).tolist()


def by_hand(logits: Tensor, labels: list[int]) -> tuple[list[float], list[int]]:
    """β, and the best temperature of each network, one sample, temperature and point at a time."""
    likely, degrees = [], []
    for own in logits.double().numpy():
        found = {}
        for degree in (1, 2, 4, 8):
            powers = np.exp(own / degree)
            found[degree] = [row[y] / row.sum() for row, y in zip(powers, labels, strict=True)]
        degrees.append(max(found, key=lambda degree: np.prod(found[degree])))
        likely.append(found[degrees[-1]])
    weights = [np.prod(np.array(a) @ np.array(likely)) for a in DESIGN]
    return (np.array(weights) @ np.array(DESIGN) / np.sum(weights)).tolist(), degrees


@pytest.mark.parametrize("confidence", [1.0, 10.0])
def test_shares_are_the_posterior_mean(confidence: float) -> None:
    labels = [0, 2, 1, 1, 0, 2]
    logits = confidence * torch.randn(3, 6, 3, generator=torch.Generator().manual_seed(0))
    logits[1, torch.arange(6), labels] += confidence
    wanted, degrees = by_hand(logits, labels)
    assert shares(logits, labels) == pytest.approx(wanted, rel=1e-4)
    assert best_logs(logits, samples_of(labels))[1].tolist() == degrees


def test_networks_that_predict_alike_have_equal_shares() -> None:
    assert shares(torch.zeros(3, 4, 2), [0, 1, 0, 1]) == pytest.approx([1 / 3] * 3)


@pytest.mark.parametrize("useless", [0, 1, 2])
@pytest.mark.parametrize("value", [-20.0, torch.nan])
def test_a_network_of_no_use_has_no_share(useless: int, value: float) -> None:
    labels = [0, 1] * 20
    logits = 4 * torch.eye(2)[torch.tensor(labels)].repeat(3, 1, 1)
    logits[useless] *= value
    assert shares(logits, labels)[useless] < 0.02


@pytest.mark.parametrize("is_mixed", [True, False])
def test_what_a_mixture_loses_goes_to_the_own_network(is_mixed: bool) -> None:
    found = distrusted(torch.tensor([0.5, 0.3, 0.2]), torch.tensor(0.1), torch.tensor(is_mixed))
    assert found.tolist() == pytest.approx([0.95, 0.03, 0.02] if is_mixed else [0.77, 0.03, 0.2])


def test_no_share_is_negative_where_nothing_is_lost() -> None:
    shares = torch.tensor([1.5e-08, 0.50449073, 0.49550936])  # 1 − the others is negative in single precision
    assert 1 - shares[1:].sum() < 0
    assert torch.equal(distrusted(shares, torch.ones(()), torch.tensor(True)), shares)


def test_the_mean_ignores_padding_and_knows_no_samples() -> None:
    logs = torch.tensor([-1.0, -3.0, -100.0])
    assert mean_log(logs, torch.tensor([1.0, 1.0, 0.0])).item() == -2
    assert mean_log(logs, torch.zeros(3)).item() == 0
