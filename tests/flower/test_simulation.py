"""Flower's simulation on Ray: the adapter with virtual sites in other processes."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("flwr.app")
pytest.importorskip("ray")
from fakes import FakeGrid, node

import fedc2i
from fedc2i.core.errors import UserError
from fedc2i.data.federation import Federation
from fedc2i.flower.connections import SiteConnections
from fedc2i.flower.enrolment import wait_for_sites
from fedc2i.flower.site import Home, make_app
from fedc2i.models.model import Model

OWN = """
from dataclasses import dataclass
from fedc2i.methods.fedc2i import FedC2I

@dataclass(frozen=True)
class Own(FedC2I):
    name, title = "own", "Own"
"""
DEADLINE = 40.0  # seconds; sites that do not answer cost no more


def test_every_client_as_a_site_on_ray(
    model: Model,
    make_federation: Callable[..., Federation],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two seeds of FedC²I as a method of a file that Ray's processes cannot import, beside another of the user's."""
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "beside_own.py").write_text(OWN.replace("own", "beside"))
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("beside_own")
    settings = {"model": model, "rounds": 2, "seeds": (0, 3), "batch_size": 5}
    there, here = (
        fedc2i.run(f"{tmp_path}/own.py:Own", make_federation(), **settings, **how)
        for how in ({"engine": "flower-sim", "deadline": DEADLINE}, {"executor": "looped"})
    )
    for point in ("received", "trained"):
        assert (there.accuracy(point) == here.accuracy(point)).all()
    assert there.influence().tolist() == here.influence().tolist()
    assert "Traceback" not in capfd.readouterr().err


def test_a_site_that_cannot_start_ends_the_wait_with_its_reason() -> None:
    """At once: in a simulation nobody else can come."""

    def home(context: object) -> Home:
        raise ModuleNotFoundError("No module named 'mine'")

    grid = FakeGrid({100: node(100, make_app(home, lambda task: pytest.fail("no site has joined")))})
    connections = SiteConnections(grid, lambda line: None)
    with pytest.raises(UserError, match=r"^a site cannot start: .*ModuleNotFoundError: No module named 'mine'$"):
        wait_for_sites(connections, ["a"], 1, 1, DEADLINE, lambda line: None, 0.01, closed=True)


def test_no_cluster_at_the_address_is_one_line(model: Model, federation: Federation) -> None:
    with pytest.raises(UserError, match=r"Ray at '127.0.0.1:1': "):
        fedc2i.run("fedavg", federation, model=model, rounds=1, engine="flower-sim", ray_address="127.0.0.1:1")
