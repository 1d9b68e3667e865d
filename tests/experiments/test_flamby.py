"""The comparison with FLamby: its protocol, its published rows, and the page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from studies import ask

from experiments import flamby
from fedc2i.data import heart
from fedc2i.data.federation import DataOptions


def test_the_mean_of_a_published_row_is_that_of_its_hospitals() -> None:
    for own in flamby.PUBLISHED.values():
        assert np.mean(own[:-1]) == pytest.approx(own[-1], abs=0.11)  # each is rounded


def test_pooled_data_is_scaled_by_the_union_and_tested_as_each_hospital_scales() -> None:
    mixed, alike = list(flamby.data().values())[1:3]
    train = np.concatenate([client.train.x.numpy() for client in mixed.clients])
    assert np.abs(train.mean(0)).max() < 1e-5
    assert np.allclose(train.std(0), 1, atol=0.01)
    own = heart.load("", DataOptions())
    for one, two, three in zip(mixed.clients, own.clients, alike.clients, strict=True):
        assert (one.test.x == two.test.x).all()
        assert (one.train.x == three.train.x).all()


def test_the_page_has_every_row_and_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ALONE", "TOGETHER"):  # as long as a test may take
        own: dict[str, Any] = getattr(flamby, name)
        monkeypatch.setitem(own, "rounds", 1)
        monkeypatch.setitem(own, "epochs", 1)
    monkeypatch.setitem(flamby.TOGETHER, "steps", 2)
    answer = ask(flamby.main, "--seeds", "0,1", "--out", str(tmp_path / "page.md"))
    assert answer.code == 0, answer.err
    page = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert "python -m experiments.flamby --seeds 0,1\n" in page
    titles: Sequence[str] = [f"| FLamby: {name} |" for name in flamby.PUBLISHED]
    titles = [
        *titles,
        "| Local |",
        *(f"| {name}, {point} |" for name in ("FedAvg", "FedC²I") for point in flamby.POINTS.values()),
    ]
    assert all(title in page for title in titles)
    assert "nan" not in page
    assert {line.count("|") for line in page.splitlines() if line.startswith("|")} == {
        len(flamby.PUBLISHED["Local"]) + 2
    }


def test_one_seed_is_refused_before_anything_is_computed(tmp_path: Path) -> None:
    answer = ask(flamby.main, "--seeds", "3", "--out", str(tmp_path / "page.md"))
    assert answer.code == 2
    assert "at least two are needed" in answer.err
