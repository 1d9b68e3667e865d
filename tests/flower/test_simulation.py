"""Flower's simulation on Ray: the adapter with virtual sites in other processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("flwr.app")
pytest.importorskip("ray")
import fedc2i
from fedc2i.core.errors import UserError
from fedc2i.data.federation import Federation
from fedc2i.models.model import Model

OWN = """
import fedc2i
from dataclasses import dataclass

@dataclass(frozen=True)
class Own(fedc2i.Method):
    name, title = "own", "Own"
"""


def test_every_client_as_a_site_on_ray(
    model: Model, make_federation: Callable[..., Federation], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two seeds of FedC2I, and a method of a file that Ray's processes cannot import."""
    (tmp_path / "own.py").write_text(OWN)
    federation = make_federation()
    for method in ("fedc2i", f"{tmp_path}/own.py:Own"):
        seeds = (0, 3) if method == "fedc2i" else (1,)
        settings = {"model": model, "rounds": 2, "seeds": seeds, "batch_size": 5}
        there = fedc2i.run(method, federation, engine="flower-sim", **settings)
        here = fedc2i.run(method, federation, executor="looped", **settings)
        for point in ("received", "trained"):
            assert (there.accuracy(point) == here.accuracy(point)).all()
        assert there.influence().tolist() == here.influence().tolist()
    assert "Traceback" not in capfd.readouterr().err


def test_no_cluster_at_the_address_is_one_line(model: Model, federation: Federation) -> None:
    with pytest.raises(UserError, match=r"Ray at '127.0.0.1:1': "):
        fedc2i.run("fedavg", federation, model=model, rounds=1, engine="flower-sim", ray_address="127.0.0.1:1")
