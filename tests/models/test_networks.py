"""Models by name on every kind of input, and every method on every one of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fedc2i
from fedc2i.core.errors import UserError
from fedc2i.data.federation import Federation, InputSpec
from fedc2i.methods.base import method_names
from fedc2i.models.networks import NAMES, build
from fedc2i.models.validation import validate

TABLE, SIGNAL, IMAGE = (InputSpec(shape, torch.float32) for shape in ((5,), (2, 16), (3, 16, 16)))


def federation(shape: tuple[int, ...]) -> Federation:
    rng = np.random.default_rng(0)
    y = np.arange(12) % 3
    clients = {name: (rng.normal(size=(12, *shape)), y, rng.normal(size=(6, *shape)), y[:6]) for name in "abc"}
    return fedc2i.from_arrays(clients)


@pytest.mark.parametrize(
    ("sample", "name"), [(TABLE, "mlp"), (SIGNAL, "cnn1d"), (IMAGE, "lenet5"), (InputSpec((2, 2, 2, 2)), "mlp")]
)
def test_auto_picks_by_shape(sample: InputSpec, name: str) -> None:
    if len(sample.shape) == 4:
        with pytest.raises(UserError, match=r"allowed are FILE\.py:FUNCTION"):
            build("auto", 3, sample)
        return
    assert build("auto", 3, sample).name == name


@pytest.mark.parametrize(
    ("name", "sample", "numbers"),
    [
        ("logistic", TABLE, 5 * 3 + 3),
        ("mlp", TABLE, 5 * 64 + 64 + 64 * 32 + 32 + 32 * 3 + 3),
        ("cnn1d", SIGNAL, 2 * 32 * 5 + 32 + 32 * 64 * 5 + 64 + 64 * 4 * 64 + 64 + 64 * 3 + 3),
    ],
)
def test_sizes_by_hand(name: str, sample: InputSpec, numbers: int) -> None:
    model = build(name, 3, sample)
    params = model.init(0)
    assert sum(tensor.numel() for tensor in params.values()) == numbers
    assert model.head(params, model.features(params, sample.noise(4))).shape == (4, 3)


@pytest.mark.parametrize(
    ("name", "sample", "words"),
    [
        ("lenet5", TABLE, "reads images.*the data has 5 features; allowed are logistic, mlp"),
        ("cnn1d", IMAGE, "reads signals.*allowed are logistic, mlp, lenet5"),
        ("cnn1d", InputSpec((2, 8), torch.float32), "at least 16 time steps, got 8"),
        ("logistics", TABLE, "did you mean .*logistic"),
    ],
)
def test_models_that_do_not_fit_are_refused(name: str, sample: InputSpec, words: str) -> None:
    with pytest.raises(UserError, match=words):
        build(name, 3, sample)


def test_a_model_is_as_valid_as_it_is_taken_for_and_refused_elsewhere() -> None:
    """Built for the very samples of a run it is not validated there, so it is here."""
    samples = {"logistic": (4,), "mlp": (4,), "cnn1d": (2, 16), **dict.fromkeys(NAMES[3:], (3, 16, 16))}
    for name, shape in samples.items():
        sample = InputSpec(shape, torch.float32)
        model = build(name, 3, sample)
        assert model.made_for == (sample, 3)
        validate(model, sample.noise(2), 3)
        assert not model.has_dropout
    for model, words in (
        (build("mlp", 3, InputSpec((5,), torch.float32)), "cannot read 4 features"),
        (build("mlp", 4, InputSpec((4,), torch.float32)), "has 4 outputs, but the data has 3 classes"),
    ):
        with pytest.raises(UserError, match=words):
            fedc2i.run("fedavg", federation((4,)), model=model, rounds=1)


@pytest.mark.parametrize("model", ["logistic", "cnn1d", pytest.param("mlp", marks=pytest.mark.slow)])
@pytest.mark.parametrize("method", method_names())
def test_every_method_runs_on_every_kind_of_data_or_says_why_not(method: str, model: str) -> None:
    data = federation((2, 16) if model == "cnn1d" else (4,))
    settings = {"model": model, "rounds": 2, "seeds": [0], "batch_size": 4}
    if method == "fedbn":
        with pytest.raises(UserError, match="no normalisation layers"):
            fedc2i.run(method, data, **settings)
        return
    result = fedc2i.run(method, data, **settings)
    assert np.isfinite(result.accuracy("trained")).all()


@pytest.mark.parametrize("model", ["logistic", "mlp", "cnn1d"])
def test_executors_agree(model: str) -> None:
    data = federation((2, 16) if model == "cnn1d" else (4,))
    looped, stacked = (
        fedc2i.run("fedc2i", data, model=model, rounds=2, seeds=[0], batch_size=5, executor=executor)
        for executor in ("looped", "stacked")
    )
    assert stacked.accuracy("trained", "loss") == pytest.approx(looped.accuracy("trained", "loss"), rel=1e-4)
    assert stacked.influence() == pytest.approx(looped.influence(), rel=1e-4)
