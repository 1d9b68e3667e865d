"""The state behind any round, through a file and back: a federation that goes on from it ends the same, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fedc2i import Federation, Method, Model, UserError
from fedc2i.core.params import size_in_bytes
from fedc2i.engine import checkpoint_file
from fedc2i.engine.settings import EngineSettings
from fedc2i.engine.simulator import simulate
from fedc2i.engine.state import ResumePoint, state_size
from fedc2i.methods.fedavg import FedAvg
from fedc2i.training.settings import TrainingSettings
from support.cut_runs import (
    assert_goes_on,
)
from support.method_checks import OF_THEIR_OWN


def model_for(name: str, make_model: Callable[..., Model]) -> Model:
    return make_model(batch_norm=True) if name == "fedbn" else make_model()


@pytest.mark.parametrize("name", OF_THEIR_OWN)
def test_every_method_goes_on(
    tmp_path: Path, name: str, make_federation: Callable[..., Federation], make_model: Callable[..., Model]
) -> None:
    federation = make_federation((12, 9, 7, 8), validation=4)
    method, model = Method.registry[name](), model_for(name, make_model)
    assert_goes_on(tmp_path, method, model, federation, clients_per_round="50%", evaluate_every=2)


CASES: dict[str, dict[str, Any]] = {
    "stacked": {"executor": "stacked"},
    "stacked-half": {"executor": "stacked", "clients_per_round": "50%"},
    "workers": {"executor": "workers", "workers": 2},
    "ring": {"topology": "ring", "clients_per_round": 2, "evaluate_every": 0},
    "private": {"clip": 0.5, "noise": 0.3, "clients_per_round": 2, "evaluate_every": 2},
    "own-starts": {"init": "independent", "evaluate_every": 3, "rounds": 4},
}


@pytest.mark.parametrize(
    ("name", "case"),
    [*(("fedc2i", case) for case in CASES), *(("fedc2i-server", case) for case in ("stacked", "ring"))],
)
def test_every_way_to_run_goes_on(
    tmp_path: Path, name: str, case: str, make_federation: Callable[..., Federation], make_model: Callable[..., Model]
) -> None:
    federation = make_federation((12, 9, 7, 6), validation=4)
    assert_goes_on(tmp_path, Method.registry[name](), make_model(), federation, (3, 0), **CASES[case])


ON_A_GPU = [
    *(
        (name, case)
        for name in ("fedavg", "fedc2i", "fedc2i-plus", "fedrep", "fedproto", "pfedgraph")
        for case in ("looped", "stacked", "stacked-half")
    ),
    ("fedavg", "private"),
    ("fedc2i", "private"),
]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("name", "case"), ON_A_GPU)
def test_a_gpu_goes_on(
    tmp_path: Path, name: str, case: str, make_federation: Callable[..., Federation], make_model: Callable[..., Model]
) -> None:
    if case == "private":
        pytest.importorskip("opacus")
    federation, method = make_federation((12, 9, 7, 6), validation=4), Method.registry[name]()
    assert_goes_on(tmp_path, method, make_model(), federation, (3, 0), torch.device("cuda"), **CASES.get(case, {}))


def test_a_model_with_statistics_and_dropout_goes_on(
    tmp_path: Path, federation: Federation, make_model: Callable[..., Model]
) -> None:
    assert_goes_on(tmp_path, FedAvg(), make_model(batch_norm=True, dropout=0.3), federation)


def test_seeds_that_have_ended_are_kept(
    tmp_path: Path, make_federation: Callable[..., Federation], model: Model
) -> None:
    federation = make_federation((12, 9, 7), validation=4)
    settings: dict[str, Any] = {"rounds": 12, "patience": 1, **vars(TrainingSettings(epochs=1, lr=0.02))}
    outcomes = assert_goes_on(tmp_path, Method.registry["fedc2i"](), model, federation, (0, 1, 2), **settings)
    assert len({outcome.last.round for outcome in outcomes.values()}) > 1, "seeds are to be chosen so that they differ"


def test_what_was_told_counts_in_the_upload_behind_an_interruption(
    tmp_path: Path, make_federation: Callable[..., Federation], model: Model
) -> None:
    method, federation = Method.registry["fedc2i-top-k"](k=1), make_federation((12, 9, 7, 8))
    assert_goes_on(tmp_path, method, model, federation, rounds=2)
    saved = checkpoint_file.load(tmp_path / "1")
    assert saved is not None
    assert saved.values["0"]["report_bytes"] > 0


def test_a_client_with_unusable_uploads_goes_on(
    tmp_path: Path, make_federation: Callable[..., Federation], model: Model
) -> None:
    """One that never got through has zeros in the mailbox, with the round 0 beside them."""
    assert_goes_on(tmp_path, FedAvg(), model, make_federation((12, 9, 7)), attack="nan@b")


def test_what_is_the_same_is_written_once(
    tmp_path: Path, make_federation: Callable[..., Federation], model: Model
) -> None:
    """FedC²I relays the uploads, which are the clients' own models: a model each, and the starts of the next round."""
    federation = make_federation((12, 9, 7, 6))
    assert_goes_on(tmp_path, Method.registry["fedc2i"](), model, federation, rounds=1)
    size = (tmp_path / "1" / "round000001.safetensors").stat().st_size
    models = 4 * 4 * sum(tensor.numel() for tensor in model.init(0).values())
    assert 2 * models < size < 2.1 * models


@pytest.mark.parametrize(
    ("settings", "models"),
    [
        ({}, 3 + 3),
        ({"evaluate_every": 2}, 3 + 3),
        ({"clip": 1.0}, 3 + 3 + 3),
        ({"clients_per_round": 2}, 3 + 3 + 3),
        ({"clients_per_round": 2, "evaluate_every": 2}, 3 + 2 + 3),
    ],
)
def test_the_size_of_a_state_by_hand(
    settings: dict[str, Any], models: int, federation: Federation, model: Model
) -> None:
    found = state_size(FedAvg(), model, federation, EngineSettings(rounds=3, **settings), (0, 1))
    assert found == 2 * models * size_in_bytes(model.init(0))


def test_the_state_of_another_model_is_refused(
    tmp_path: Path, federation: Federation, make_model: Callable[..., Model]
) -> None:
    assert_goes_on(tmp_path, FedAvg(), make_model(), federation)
    saved = checkpoint_file.load(tmp_path / "1")
    assert saved is not None
    with pytest.raises(UserError, match="the checkpoint after round 1 is of another model or of other clients"):
        simulate(
            FedAvg(), make_model(bias=False), federation, EngineSettings(rounds=3), [0], resume=ResumePoint(*saved, {})
        )
