"""Predictions for every test sample: they give the scores of the last round, and are read back as written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import fedc2i
from fedc2i.analysis.paired_bootstrap import resampled_scores
from fedc2i.core.errors import UserError
from fedc2i.engine.records import POINTS
from fedc2i.report.comparison import comparison_table
from fedc2i.runs.finished_run import read_run
from fedc2i.runs.results import Result
from fedc2i.training.metrics import HIGHER_IS_BETTER

METHODS = ("local", "fedc2i", "ditto", "fedrod")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("runs") / "both"
    fedc2i.compare(METHODS, "heart", rounds=2, seeds=(0, 1), out=place)
    return place


@pytest.fixture(scope="module")
def results(folder: Path) -> list[Result]:
    return [read_run(folder / name) for name in METHODS]


def test_they_give_the_scores_of_the_last_round(results: list[Result]) -> None:
    for result in results:
        own = result.predictions
        assert own is not None
        assert own.samples == tuple(part["test"] for part in result.federation.samples().values())
        for metric in HIGHER_IS_BETTER:
            for point in POINTS:
                for s, seed in enumerate(result.config.seeds):
                    for k in range(len(own.samples)):
                        rows = own.rows(k)
                        once = np.ones((1, own.samples[k]))
                        (value,) = resampled_scores(metric, own.logs[seed, point][rows], own.labels[rows], once)
                        wanted = result.accuracy(point, metric)[s, k]
                        assert value == pytest.approx(wanted, abs=1e-4, nan_ok=True), (result.key, metric, point)


def test_a_comparison_with_one_seed_has_marks(results: list[Result]) -> None:
    table = comparison_table([result.only(0) for result in results])
    assert any("~" in row.cells[-2] for row in table.rows)
    assert any(note.endswith("(95 % interval, paired bootstrap over seeds and test samples).") for note in table.notes)


def test_the_majority_rate_is_read_back(results: list[Result]) -> None:
    assert results[0].majority["Switzerland"] == 93.75
    assert comparison_table(results).rows[-1].cells[0] == "Majority class"


@pytest.mark.parametrize("harm", ["cut", "other"])
def test_damage_is_one_line(folder: Path, tmp_path: Path, harm: str) -> None:
    for path in (folder / "local").iterdir():
        if path.is_file():
            (tmp_path / path.name).write_bytes(path.read_bytes())
    broken = tmp_path / "predictions.npz"
    if harm == "cut":
        broken.write_bytes(broken.read_bytes()[:1000])
    else:
        np.savez(broken, labels=np.zeros(3, int), samples=np.array([3]))
    with pytest.raises(UserError, match=r"predictions.npz: cannot be read") as caught:
        read_run(tmp_path)
    assert "\n" not in str(caught.value)
    broken.unlink()
    assert read_run(tmp_path).predictions is None


def test_a_model_that_diverged_wins_nothing(tmp_path: Path) -> None:
    """Local training at a rate at which log-loss is not a number any more, beside a rate that works."""
    settings = {"rounds": 3, "seeds": (0,), "metric": "auroc"}
    good = fedc2i.run("fedavg", "heart", **settings)
    bad = fedc2i.run("local", "heart", out=tmp_path / "bad", optimizer="sgd", lr=1e30, **settings)
    for result in (bad, read_run(tmp_path / "bad")):
        assert result.diverged == ("Cleveland", "Hungary", "Switzerland", "Long Beach")
        scores = result.scores("trained", "auroc")
        assert {score.mean for score in scores.values()} == {50.0}
        assert result.scores("trained")["Avg"].mean == 0
        assert np.isnan(result.scores("trained", "loss")["Avg"].mean)
        table = comparison_table([result, good])
        assert any("Local diverged (Cleveland, Hungary, Switzerland and Long Beach)" in note for note in table.notes)
        assert not any(row.best for row in table.rows[:2])
        assert good.diverged == ()
        own = result.predictions
        assert own is not None
        (area,) = resampled_scores("auroc", own.logs[0, "trained"], own.labels, np.ones((1, len(own.labels))))
        assert area == 50
