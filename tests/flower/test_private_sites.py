"""Clipping and noise at sites that exchange nothing but Flower messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr.app")
from fakes import Stage, assert_same_rounds, changed, identity, look_at_once, node  # noqa: F401

from fedc2i.core.params import Params
from fedc2i.data.federation import Federation
from fedc2i.flower.message_format import Answer
from fedc2i.flower.site import Home
from fedc2i.methods.base import Method
from fedc2i.methods.fedavg import FedAvg
from fedc2i.methods.fedc2i import FedC2I
from fedc2i.models.model import Model

PRIVATE = {"clip": 0.3, "noise": 0.1}


def listen(stage: Stage, number: int) -> list[Answer]:
    """Every answer of a site from now on."""
    heard: list[Answer] = []
    stage.grid.nodes[number].spoil = changed(lambda answer: heard.append(answer) or answer)
    return heard


@pytest.mark.parametrize("method", [FedAvg(), FedC2I()], ids=["fedavg", "fedc2i"])
def test_simulated_sites_have_the_numbers_of_the_in_process_engine(
    method: Method, model: Model, federation: Federation
) -> None:
    """But what a site measured of others stays there."""
    stage = Stage(method, model, federation, rounds=3, **PRIVATE)
    heard = listen(stage, 100)
    rounds = stage.run()
    want = stage.in_process()
    for report in want:
        report.influence.clear()  # type: ignore[attr-defined]
    assert_same_rounds(rounds, want)
    assert any(answer.upload for answer in heard)
    assert all(not answer.report for answer in heard)


def uploads_of(model: Model, federation: Federation, folder: Path | None, **settings: Any) -> list[Params]:
    """What the first client sent in a round, as a real site if it has a folder."""
    stage = Stage(FedAvg(), model, federation, rounds=1, **settings)
    if folder is not None:
        home = Home(federation.clients[0], federation.classes, folder, torch.device("cpu"))
        stage.grid.nodes[100] = node(100, stage.app(home))
    heard = listen(stage, 100)
    stage.run()
    return [answer.upload for answer in heard if answer.upload]


def test_a_real_site_draws_noise_that_the_seed_does_not_tell(
    model: Model, federation: Federation, tmp_path: Path
) -> None:
    places = (None, tmp_path / "a", tmp_path / "b", tmp_path / "a")
    by_seed, mine, others, again = (uploads_of(model, federation, own, **PRIVATE)[0] for own in places)
    for name in by_seed:
        assert not torch.isclose(by_seed[name], mine[name], rtol=0, atol=1e-7).all()
        assert not torch.isclose(others[name], mine[name], rtol=0, atol=1e-7).all()
        assert torch.equal(again[name], mine[name])  # asked the same again, it tells nothing new
    away = torch.cat([(mine[name] - by_seed[name]).flatten() for name in mine])
    assert away.std().item() == pytest.approx(2**0.5 * 0.03, rel=0.05)  # the difference of two such noises
    assert (tmp_path / "a" / "noise.key").is_file()
    uploads_of(model, federation, tmp_path / "c", clip=0.3)
    assert not (tmp_path / "c" / "noise.key").exists()  # no noise, no key
