"""Trackers: what their own libraries read back is what the run wrote into its folder."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

import fedc2i
from fedc2i.core.errors import UserError
from fedc2i.data.federation import Federation
from fedc2i.models.model import Model
from fedc2i.report.progress import Observers
from fedc2i.report.trackers import Tracking, heat_map, track
from fedc2i.runs.driver import execute
from fedc2i.runs.plan import prepare
from fedc2i.runs.results import Result
from support.helpers import call, write_arrays

SETTINGS = {"rounds": 2, "seeds": (0, 5), "epochs": 1, "device": "cpu"}


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(package) is None, reason=f"{package} is not installed")


class Recorder:
    """A tracker that keeps everything."""

    def __init__(self) -> None:
        self.name = ""
        self.settings: dict[str, Any] = {}
        self.values: dict[int, dict[str, float]] = {}
        self.images: dict[int, Any] = {}
        self.ended: list[tuple[dict[str, float], bool]] = []

    def begin(self, name: str, settings: Mapping[str, Any]) -> None:
        self.name, self.settings = name, dict(settings)

    def scalars(self, round: int, values: Mapping[str, float]) -> None:
        assert round not in self.values  # every round once
        self.values[round] = dict(values)

    def image(self, round: int, name: str, picture: Any) -> None:
        self.images[round] = picture

    def end(self, scores: Mapping[str, float], failed: bool) -> None:
        self.ended.append((dict(scores), failed))


class Ends:
    """An observer that interrupts a run."""

    def __init__(self, round: int, seed: int) -> None:
        self._last = (round, seed)

    begin = client = lambda *_: None

    def round(self, report: Any) -> None:
        if (report.round, report.seed) == self._last:
            raise KeyboardInterrupt


def recorded(kind: type[Recorder] = Recorder) -> tuple[Tracking, list[Recorder]]:
    made: list[Recorder] = []

    def make() -> Recorder:
        made.append(kind())
        return made[-1]

    return Tracking([make]), made


def run(federation: Federation, model: Model, observer: Any, **more: Any) -> Result:
    return fedc2i.run("fedc2i", federation, model=model, observer=observer, **{**SETTINGS, **more})


def test_every_seed_has_its_own_and_all_numbers(federation: Federation, model: Model) -> None:
    tracking, made = recorded()
    with tracking:
        result = run(federation, model, tracking)
    assert [one.settings["seed"] for one in made] == [0, 5]
    assert [one.name for one in made] == ["fedc2i-toy-seed0", "fedc2i-toy-seed5"]
    assert made[0].settings["lr"] == 1e-3
    assert made[0].settings["options.gamma"] == 5.0
    for seed, one in zip((0, 5), made, strict=True):
        for report in (report for report in result.rounds if report.seed == seed):
            values = one.values[report.round]
            for point in ("received", "trained"):
                assert values[f"{point}/accuracy"] == report.mean(point)
                for k, name in enumerate(federation.names):
                    assert values[f"{point}/loss/{name}"] == report.metrics[point][k]["loss"]
            np.testing.assert_array_equal(one.images[report.round], heat_map(report.influence["influence_vector"]))
        ((scores, failed),) = one.ended
        assert scores["last/trained/accuracy"] == result.last(seed).mean("trained")
        assert not failed


def test_runs_in_a_row_end_one_another(federation: Federation, model: Model) -> None:
    tracking, made = recorded()
    with tracking:
        fedc2i.compare(["fedavg", "local"], federation, model=model, observer=tracking, **{**SETTINGS, "seeds": (1,)})
    assert [one.name for one in made] == ["fedavg-toy-seed1", "local-toy-seed1"]
    assert [len(one.ended) for one in made] == [1, 1]
    assert made[0].images == {}  # FedAvg measures nothing


def test_what_is_cut_off_is_marked(federation: Federation, model: Model) -> None:
    tracking, made = recorded()
    with pytest.raises(KeyboardInterrupt), tracking:
        run(federation, model, Observers(tracking, Ends(1, 0), None))  # type: ignore[arg-type]
    assert [failed for one in made for _, failed in one.ended] == [True, True]


def test_a_tracker_that_fails_does_not_end_the_run(federation: Federation, model: Model) -> None:
    class Broken(Recorder):
        """Its server is gone from the second round on."""

        def scalars(self, round: int, values: Mapping[str, float]) -> None:
            if round > 1:
                raise ConnectionError("no route to host")
            super().scalars(round, values)

    tracking, made = recorded(Broken)
    with pytest.warns(UserWarning, match="no route to host") as said, tracking:
        result = run(federation, model, tracking, rounds=4)
    assert len(result.rounds) == 8
    assert len(said) == 2  # once for each seed
    assert [sorted(one.values) for one in made] == [[1], [1]]
    assert [one.ended for one in made] == [[({}, True)]] * 2  # closed, once


def test_one_that_cannot_begin_is_one_line_and_the_others_are_closed(federation: Federation, model: Model) -> None:
    tracking, made = recorded()

    class Refuses(Recorder):
        def begin(self, name: str, settings: Mapping[str, Any]) -> None:
            raise UserError("no such server")

        def end(self, scores: Mapping[str, float], failed: bool) -> None:
            raise AssertionError("it never began")

    both = Tracking([*tracking._makes, Refuses])
    with pytest.raises(UserError, match="no such server"), both:
        run(federation, model, both)
    assert [one.ended for one in made] == [[({}, True)]]


def test_one_that_cannot_end_keeps_neither_the_run_nor_the_others(federation: Federation, model: Model) -> None:
    tracking, made = recorded()

    class Stuck(Recorder):
        def end(self, scores: Mapping[str, float], failed: bool) -> None:
            raise ConnectionError("gone")

    both = Tracking([Stuck, *tracking._makes])
    with pytest.warns(UserWarning, match="Stuck failed at the end of the run: gone"), both:
        result = run(federation, model, both)
    assert len(result.rounds) == 4
    assert [len(one.ended) for one in made] == [1, 1]


@needs("tensorboard")
@needs("mlflow")
@pytest.mark.parametrize("wanted", ["tensorboard:{}/file/logs", "mlflow:{}/file/flow", "mlflow:nosuch://server"])
def test_a_place_that_is_none_is_one_line(
    tmp_path: Path, make_federation: Callable[..., Federation], wanted: str
) -> None:
    (tmp_path / "file").touch()
    data = write_arrays(tmp_path / "data", make_federation((8, 8)))
    where = ("--track", wanted.format(tmp_path), "--out", str(tmp_path / "run"))
    answer = call("run", "fedavg", "--data", data, "--rounds", "1", "--model", "lenet5", *where)
    assert answer.code == 2
    assert answer.err.splitlines()[-1].startswith(f"fedc2i: error: --track {wanted.partition(':')[0]}: ")


def test_a_run_that_is_gone_on_with_is_told_from_its_first_round(
    tmp_path: Path, federation: Federation, model: Model
) -> None:
    """By `resume`, as another run of the tracker, with every number of an uninterrupted one, each once."""
    settings = {**SETTINGS, "rounds": 3}
    (plan,) = prepare(["fedc2i"], settings, federation, model)
    with pytest.raises(KeyboardInterrupt):
        execute(plan, tmp_path / "run", Ends(2, 5))  # type: ignore[arg-type]
    tracking, made = recorded()
    with tracking:
        result = fedc2i.resume(tmp_path / "run", federation, model, observer=tracking)
    whole, expected = recorded()
    with whole:
        run(federation, model, whole, rounds=3)
    assert len(result.rounds) == 6  # type: ignore[union-attr]
    assert [sorted(one.values) for one in made] == [[1, 2, 3]] * 2
    for one, other in zip(made, expected, strict=True):
        without = [
            {k: {n: v for n, v in own.items() if n != "seconds"} for k, own in x.values.items()} for x in (one, other)
        ]
        assert without[0] == without[1]
        assert sorted(one.images) == [1, 2, 3]


def test_heat_map() -> None:
    picture = heat_map(np.array([[0.0, 1.0], [np.nan, 0.5]]))
    assert picture.dtype == np.uint8
    assert min(picture.shape[:2]) >= 480
    half = len(picture) // 2
    assert picture[0, 0].tolist() == [255, 255, 255]
    assert picture[0, -1].tolist() == [8, 48, 107]
    assert picture[-1, 0].tolist() == [200, 200, 200]
    assert (picture[:half, :half] == picture[0, 0]).all()
    assert heat_map(np.full((3, 3), np.nan)).std() == 0
    assert heat_map(np.array([[-0.2, 1.0], [0.0, 0.5]]))[0, 0].tolist() == [255, 255, 255]


def test_refusals() -> None:
    with pytest.raises(UserError, match=r"no tracker 'comet', allowed are tensorboard\[:DIR\]"):
        track("comet")
    with (
        mock.patch("importlib.util.find_spec", return_value=None),
        pytest.raises(UserError, match=r"pip install 'fedc2i\[wandb\]'"),
    ):
        track("wandb")


def test_command_refuses_before_anything_is_made(tmp_path: Path) -> None:
    answer = call("run", "fedavg", "--track", "neptune", "--out", str(tmp_path / "run"))
    assert (answer.code, "no tracker 'neptune'" in answer.err) == (2, True)
    assert not (tmp_path / "run").exists()


def written(folder: Path, seed: int) -> dict[tuple[str, int], float]:
    """``metrics.jsonl`` by the trackers' names and round."""
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return {
        (f"{entry['point']}/{entry['metric']}/{entry['client']}", entry["round"]): entry["value"]
        for entry in entries
        if entry["seed"] == seed
    }


@pytest.fixture
def run_folder(tmp_path: Path, make_federation: Callable[..., Federation]) -> Callable[..., Path]:
    """Runs the command with trackers, two seeds."""

    def make(*trackers: str) -> Path:
        data = write_arrays(tmp_path / "data", make_federation((12, 10, 8)))
        tracked = [part for one in trackers for part in ("--track", one)]
        settings = ("--model", "lenet5", "--rounds", "2", "--seeds", "0,5", "--set", "epochs=1", "--device", "cpu")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # the libraries' own
            answer = call("run", "fedc2i", "--data", data, *settings, *tracked, "--out", str(tmp_path / "run"))
        assert answer.code == 0, answer.err
        return tmp_path / "run"

    return make


@needs("tensorboard")
def test_tensorboard(tmp_path: Path, run_folder: Callable[..., Path]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = run_folder(f"tensorboard:{tmp_path / 'board'}")
    found = sorted((tmp_path / "board").iterdir())
    assert [path.name.rpartition("-")[2] for path in found] == ["seed0", "seed5"]
    for seed, path in zip((0, 5), found, strict=True):
        events = EventAccumulator(str(path), size_guidance={"images": 0})
        events.Reload()
        tags = events.Tags()
        read = {
            (name, event.step): event.value
            for name in tags["scalars"]
            if name.count("/") == 2
            for event in events.Scalars(name)
        }
        assert read == pytest.approx(written(folder, seed), rel=1e-6, abs=1e-6)
        assert [image.step for image in events.Images("influence_vector")] == [1, 2]
        assert tags["tensors"] == ["settings/text_summary"]


@needs("tensorboard")
def test_tensorboard_does_not_mix_two_runs(tmp_path: Path, federation: Federation, model: Model) -> None:
    for _ in range(2):
        with track(f"tensorboard:{tmp_path}") as tracking:
            run(federation, model, tracking, seeds=(0,), rounds=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fedc2i-toy-seed0", "fedc2i-toy-seed0-2"]


@needs("mlflow")
def test_mlflow(tmp_path: Path, run_folder: Callable[..., Path]) -> None:
    folder = run_folder(f"mlflow:{tmp_path / 'flow'}")
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path / 'flow' / 'mlflow.db'}")
    runs = client.search_runs([client.get_experiment_by_name("fedc2i").experiment_id])
    assert len(runs) == 2
    for one in runs:
        seed = int(one.data.params["seed"])
        assert one.info.status == "FINISHED"
        assert one.data.params["options.gamma"] == "5.0"
        read = {
            (name, metric.step): metric.value
            for name in one.data.metrics
            if name.count("/") == 2
            for metric in client.get_metric_history(one.info.run_id, name)
        }
        assert read == pytest.approx(written(folder, seed), rel=1e-6, abs=1e-6)
        pictures = [file.path for file in client.list_artifacts(one.info.run_id, "influence_vector")]
        assert pictures == ["influence_vector/round0001.png", "influence_vector/round0002.png"]


@needs("wandb")
def test_wandb(tmp_path: Path, run_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = run_folder("wandb:trial")
    from wandb.proto.wandb_internal_pb2 import Record
    from wandb.sdk.internal.datastore import DataStore

    files = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2
    seeds = set()
    for file in files:
        store, record, read, config = DataStore(), Record(), {}, {}
        store.open_for_scan(str(file))
        while (data := store.scan_data()) is not None:
            record.ParseFromString(data)
            for item in record.run.config.update if record.WhichOneof("record_type") == "run" else ():
                config[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
            if record.WhichOneof("record_type") == "history":
                values = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
                step = json.loads(values["_step"])
                read |= {(key, step): json.loads(own) for key, own in values.items() if key.count("/") == 2}
        seeds.add(seed := int(config["seed"]))
        assert read == pytest.approx(written(folder, seed), rel=1e-6, abs=1e-6)
        assert len(list(file.parent.glob("files/media/images/*.png"))) == 2
    assert seeds == {0, 5}
