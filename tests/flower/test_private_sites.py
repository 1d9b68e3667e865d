"""Clipping and noise at sites that exchange nothing but Flower messages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr.app")
from fakes import FakeGrid, identity, node  # noqa: F401
from flwr.app import Message
from test_coordinator import SEED, TRAINING, Stage, in_process, look_at_once  # noqa: F401

from fedc2i.core.params import Params
from fedc2i.data.federation import Federation
from fedc2i.engine.settings import EngineSettings
from fedc2i.flower import site
from fedc2i.flower.message_format import Answer
from fedc2i.methods.base import Method
from fedc2i.methods.fedavg import FedAvg
from fedc2i.methods.fedc2i import FedC2I
from fedc2i.models.model import Model

PRIVATE = EngineSettings(rounds=3, **vars(TRAINING), executor="looped", clip=0.3, noise=0.1)


def listen(grid: FakeGrid, number: int) -> list[Answer]:
    """Every answer of a site from now on."""
    heard: list[Answer] = []

    def look(reply: Message) -> Message:
        if "upload" in reply.content:
            heard.append(Answer.from_record(reply.content))
        return reply

    grid.nodes[number].spoil = look
    return heard


@pytest.mark.parametrize("method", [FedAvg(), FedC2I()], ids=["fedavg", "fedc2i"])
def test_simulated_sites_have_the_numbers_of_the_in_process_engine(
    method: Method, model: Model, federation: Federation
) -> None:
    got = Stage(method, model, federation, PRIVATE).run()
    want = in_process(method, model, federation, PRIVATE)
    for mine, theirs in zip(got, want, strict=True):
        assert mine.metrics.keys() == theirs.metrics.keys()
        for point, metrics in theirs.metrics.items():
            for one, other in zip(mine.metrics[point], metrics, strict=True):
                assert one == pytest.approx(other, abs=0.0)


def test_what_a_site_measured_stays_there(model: Model, federation: Federation) -> None:
    stage = Stage(FedC2I(), model, federation, PRIVATE)
    heard = listen(stage.grid, 100)
    rounds = stage.run()
    assert any(answer.upload for answer in heard)
    assert all(not answer.report for answer in heard)
    assert all(not report.influence for report in rounds)


def real_site(federation: Federation, folder: Path, stage: Stage) -> site.ClientApp:
    """The first client as a site with a folder of its own."""
    home = site.Home(federation.clients[0], federation.classes, folder, torch.device("cpu"))
    return site.make_app(lambda context: home, lambda task: (stage.work, federation.classes))


def uploads_of(model: Model, federation: Federation, folder: Path | None, settings: EngineSettings) -> list[Params]:
    """What the first client sent in a run, as a real site if it has a folder."""
    stage = Stage(FedAvg(), model, federation, settings)
    if folder is not None:
        stage.grid.nodes[100] = node(100, real_site(federation, folder, stage))
    heard = listen(stage.grid, 100)
    stage.run()
    return [answer.upload for answer in heard if answer.upload]


def test_a_real_site_draws_noise_that_the_seed_does_not_tell(
    model: Model, federation: Federation, tmp_path: Path
) -> None:
    once = EngineSettings(rounds=1, **vars(TRAINING), clip=0.3, noise=0.1)
    by_seed, mine, others = (
        uploads_of(model, federation, own, once)[0] for own in (None, tmp_path / "a", tmp_path / "b")
    )
    again = uploads_of(model, federation, tmp_path / "a", once)[0]
    for name in by_seed:
        assert not torch.isclose(by_seed[name], mine[name], rtol=0, atol=1e-7).all()
        assert not torch.isclose(others[name], mine[name], rtol=0, atol=1e-7).all()
        assert torch.equal(again[name], mine[name])  # asked the same again, it tells nothing new
    away = torch.cat([(mine[name] - by_seed[name]).flatten() for name in mine])
    assert away.std().item() == pytest.approx(2**0.5 * 0.03, rel=0.05)  # the difference of two such noises
    assert (tmp_path / "a" / "noise.key").is_file()


def test_a_site_makes_no_key_where_no_noise_is_asked_for(
    model: Model, make_federation: Callable[..., Federation], tmp_path: Path
) -> None:
    uploads_of(model, make_federation(), tmp_path / "a", EngineSettings(rounds=1, **vars(TRAINING), clip=0.3))
    assert not (tmp_path / "a" / "noise.key").exists()
