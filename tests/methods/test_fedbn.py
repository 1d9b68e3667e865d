"""FedBN: normalisation layers stay where they are, everything else is FedAvg."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fedc2i.core.errors import UserError
from fedc2i.core.params import select
from fedc2i.data.federation import Federation
from fedc2i.methods.fedavg import FedAvg
from fedc2i.methods.fedbn import FedBN
from fedc2i.models.model import Model
from oracles import assert_same_model
from support.method_checks import run


def test_norm_layers_are_private_the_rest_is_the_mean(make_model: Callable[..., Model], federation: Federation) -> None:
    model = make_model(batch_norm=True)
    outcome, _ = run(FedBN(), model, federation)
    private = set(model.norm_names)
    assert private == {"norm.weight", "norm.bias", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    assert_same_model(select(outcome.received, private), select(outcome.trained, private), rtol=0, atol=0)
    for name in ("norm.weight", "norm.running_mean"):
        assert not torch.equal(outcome.received[name][0], outcome.received[name][1])
    for name in ("hidden.weight", "head.weight", "head.bias"):
        mean = outcome.trained[name].mean(0)
        for m in range(3):
            torch.testing.assert_close(outcome.received[name][m], mean)


def test_the_first_local_run_is_fedavg_s(make_model: Callable[..., Model], federation: Federation) -> None:
    model = make_model(batch_norm=True)
    ours, mean = (run(method, model, federation, rounds=1)[0] for method in (FedBN(), FedAvg()))
    assert_same_model(ours.trained, mean.trained, rtol=0, atol=0)


def test_a_model_without_normalisation_is_refused_at_the_start(model: Model, federation: Federation) -> None:
    message = r"fedbn: model 'tiny' has no normalisation layers; use one that has, e.g. lenet5-bn, lenet-wide-bn"
    with pytest.raises(UserError, match=message):
        run(FedBN(), model, federation)
