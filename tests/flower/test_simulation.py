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
from dataclasses import dataclass
from fedc2i.methods.fedc2i import FedC2I

@dataclass(frozen=True)
class Own(FedC2I):
    name, title = "own", "Own"
"""


def test_every_client_as_a_site_on_ray(
    model: Model, make_federation: Callable[..., Federation], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two seeds of FedC²I as a method of a file that Ray's processes cannot import."""
    (tmp_path / "own.py").write_text(OWN)
    settings = {"model": model, "rounds": 2, "seeds": (0, 3), "batch_size": 5}
    there, here = (
        fedc2i.run(f"{tmp_path}/own.py:Own", make_federation(), **settings, **how)
        for how in ({"engine": "flower-sim"}, {"executor": "looped"})
    )
    for point in ("received", "trained"):
        assert (there.accuracy(point) == here.accuracy(point)).all()
    assert there.influence().tolist() == here.influence().tolist()
    assert "Traceback" not in capfd.readouterr().err


def test_no_cluster_at_the_address_is_one_line(model: Model, federation: Federation) -> None:
    with pytest.raises(UserError, match=r"Ray at '127.0.0.1:1': "):
        fedc2i.run("fedavg", federation, model=model, rounds=1, engine="flower-sim", ray_address="127.0.0.1:1")
