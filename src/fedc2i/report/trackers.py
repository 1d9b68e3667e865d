"""Experiment trackers: what a run reports, passed on to TensorBoard, MLflow or Weights & Biases at once.

A `Tracker` has four methods; `Tracking` is the observer that feeds them, one for every seed:

    with fedc2i.track("tensorboard:logs", "mlflow") as tracking:
        fedc2i.run("fedc2i", "embedded", observer=tracking)

A resumed run is another run of the tracker, which first receives the rounds before the interruption.
Each is given the settings, then after every scored round ``<point>/<metric>/<client>`` and the mean over clients,
``<point>/<metric>``, a picture of the influence vectors, and at the end the mean scores. Nothing leaves the machine
unless an address is given: W&B is used offline (``wandb sync`` uploads), MLflow's and W&B's reports to their makers are
switched off. All three packages are optional, and are imported when a run begins.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np

from fedc2i.core.errors import UserError, how_to_install
from fedc2i.engine.records import Round
from fedc2i.runs.folder import slug
from fedc2i.runs.results import Result

Image = np.ndarray[Any, np.dtype[np.uint8]]  # (height, width, 3)
PIXELS = 480  # the least width and height of a picture
MOST_METRICS = 1000  # that MLflow takes at once
MOST_LETTERS = 500  # of a setting that MLflow takes
_INFLUENCE = "influence_vector"


class Tracker(Protocol):
    """Where the numbers of one seed of one run go."""

    def begin(self, name: str, settings: Mapping[str, Any]) -> None:
        """A run starts: its name and its complete settings."""

    def scalars(self, round: int, values: Mapping[str, float]) -> None:
        """A round's numbers by name."""

    def image(self, round: int, name: str, picture: Image) -> None:
        """A round's picture."""

    def end(self, scores: Mapping[str, float], failed: bool) -> None:
        """The run is over: its last numbers, and whether it was interrupted."""


def track(*wanted: str) -> Tracking:
    """An observer that passes a run on to trackers.

    Args:
        *wanted: each ``tensorboard[:DIR]``, ``mlflow[:DIR or URI]`` or ``wandb[:PROJECT]``.

    Raises:
        UserError: for a tracker that is not known, or whose package is not installed.
    """
    return Tracking([_maker(one) for one in wanted])


def _maker(wanted: str) -> Callable[[], Tracker]:
    kinds: dict[str, Callable[[str], Tracker]] = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WandB}
    name, _, where = wanted.partition(":")
    if name not in kinds:
        raise UserError(f"no tracker '{name}', allowed are tensorboard[:DIR], mlflow[:DIR or URI], wandb[:PROJECT]")
    if importlib.util.find_spec(name) is None:
        raise UserError(f"--track {name}: {name} is not installed: {how_to_install(name)}")
    return lambda: kinds[name](where)


class Tracking:
    """An observer of runs that passes everything on, a tracker for each seed; to be closed, best by ``with``."""

    def __init__(self, makes: Sequence[Callable[[], Tracker]]) -> None:
        """From functions that make a new tracker each time."""
        self._makes = makes
        self._trackers: dict[int, list[Tracker]] = {}
        self._told: dict[int, int] = {}  # by seed, the last round
        self._result: Result | None = None

    def __enter__(self) -> Tracking:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(failed=error is not None)

    def begin(self, result: Result) -> None:
        """A run starts; the one before it has ended. A resumed one is passed on from its first round."""
        self.close()
        self._result, self._told = result, {}
        for seed in result.config.seeds:
            self._trackers[seed] = []
            for make in self._makes:
                tracker = make()
                tracker.begin(f"{slug(result.key)}-{slug(result.config.data)}-seed{seed}", _settings(result, seed))
                self._trackers[seed].append(tracker)
        for report in result.rounds:
            self.round(report)

    def client(self, done: int, of: int) -> None:
        """Of single clients nothing is tracked."""

    def round(self, report: Round) -> None:
        """A round of one seed ended; one that was passed on is not passed on again."""
        assert self._result is not None
        if report.round <= self._told.get(report.seed, 0):
            return
        self._told[report.seed] = report.round
        values = scalars(report, self._result.federation.names)
        picture = heat_map(report.influence[_INFLUENCE]) if _INFLUENCE in report.influence else None
        for tracker in list(self._trackers.get(report.seed, [])):
            try:
                if values:
                    tracker.scalars(report.round, values)
                if picture is not None:
                    tracker.image(report.round, _INFLUENCE, picture)
            except Exception as error:  # a server that is gone or a full disk: no reason to lose a run
                self._trackers[report.seed].remove(tracker)
                warnings.warn(f"{type(tracker).__name__} failed and is dropped: {error}", stacklevel=2)
                with contextlib.suppress(Exception):
                    tracker.end({}, failed=True)  # what it holds open

    def close(self, failed: bool = False) -> None:
        """Ends the present run, if there is one."""
        result, trackers = self._result, self._trackers
        self._result, self._trackers = None, {}
        for seed, own in trackers.items():
            assert result is not None
            last = [report for report in result.rounds if report.seed == seed and report.metrics]
            scores = scalars(last[-1], ()) if last else {}
            for tracker in own:
                try:
                    tracker.end({f"last/{name}": value for name, value in scores.items()}, failed)
                except Exception as error:  # the run is computed, and others are to be ended
                    warnings.warn(f"{type(tracker).__name__} failed at the end of the run: {error}", stacklevel=2)


def scalars(report: Round, clients: Sequence[str]) -> dict[str, float]:
    """``point/metric`` means, ``point/metric/client`` of those named, and the cost of the round."""
    found: dict[str, float] = {}
    for point, metrics in report.metrics.items():
        for metric in dict.fromkeys(name for own in metrics for name in own):
            found[f"{point}/{metric}"] = report.mean(point, metric)
            for client, own in zip(clients, metrics, strict=False):
                if metric in own:
                    found[f"{point}/{metric}/{client}"] = own[metric]
    if found:
        found["seconds"] = report.seconds
    return {name: value for name, value in found.items() if np.isfinite(value)}


def heat_map(vectors: np.ndarray[Any, Any]) -> Image:
    """Influence ``(M, M)`` as squares, white for none, blue for the largest; grey where nothing was measured."""
    known = np.isfinite(vectors)
    top = max(float(vectors[known].max()), 1e-12) if known.any() else 1.0
    share = np.clip(np.where(known, vectors, 0.0) / top, 0.0, 1.0)
    colours = 255 + share[..., None] * (np.array([8, 48, 107]) - 255)
    colours = np.where(known[..., None], colours, 200)
    side = max(1, -(-PIXELS // len(vectors)))
    return np.round(colours).astype(np.uint8).repeat(side, axis=0).repeat(side, axis=1)


def _settings(result: Result, seed: int) -> dict[str, Any]:
    flat = {name: value for name, value in asdict(result.config).items() if name not in ("options", "seeds")}
    return {**flat, "seed": seed, **{f"options.{name}": value for name, value in result.config.options.items()}}


class TensorBoard:
    """Event files below a folder, ``runs/tensorboard`` if none is named, one folder for each run and seed."""

    def __init__(self, where: str) -> None:
        self._folder = Path(where or "runs/tensorboard")
        self._writer: Any = None

    def begin(self, name: str, settings: Mapping[str, Any]) -> None:
        """Opens the event file in a new folder, as two runs in one would be one tangled curve; writes the settings."""
        from torch.utils.tensorboard import SummaryWriter

        number, folder = 1, self._folder / name
        while folder.exists():
            number += 1
            folder = self._folder / f"{name}-{number}"
        try:
            self._writer = SummaryWriter(str(folder))
        except OSError as error:
            raise UserError(f"--track tensorboard: {self._folder}: cannot be written ({error.strerror})") from None
        rows = "\n".join(f"| {key} | {value} |" for key, value in settings.items())
        self._writer.add_text("settings", f"| setting | value |\n|---|---|\n{rows}")

    def scalars(self, round: int, values: Mapping[str, float]) -> None:
        """Each as a separate curve."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, round)
        self._writer.flush()

    def image(self, round: int, name: str, picture: Image) -> None:
        """In the images tab, with a slider over rounds."""
        self._writer.add_image(name, picture, round, dataformats="HWC")

    def end(self, scores: Mapping[str, float], failed: bool) -> None:
        """Closes the file."""
        self._writer.close()


class MLflow:
    """An MLflow run in the experiment ``fedc2i``; a folder (with a SQLite file in it) or a tracking URI."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._client: Any = None
        self._run = ""

    def begin(self, name: str, settings: Mapping[str, Any]) -> None:
        """Makes the run, and the experiment if need be."""
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        folder = None if not self._where or ":" in self._where else Path(self._where).absolute()
        uri = (self._where or None) if folder is None else f"sqlite:///{folder / 'mlflow.db'}"
        try:
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
            self._client = MlflowClient(tracking_uri=uri)
            found = self._client.get_experiment_by_name("fedc2i")
            kept = None if folder is None else (folder / "artifacts").as_uri()
            experiment = found.experiment_id if found else self._client.create_experiment("fedc2i", kept)
            self._run = self._client.create_run(experiment, run_name=name).info.run_id
            for key, value in settings.items():
                self._client.log_param(self._run, _plain(key), str(value)[:MOST_LETTERS])
        except (MlflowException, ModuleNotFoundError, OSError) as error:
            raise UserError(f"--track mlflow: {' '.join(str(error).split())[:300]}") from None

    def scalars(self, round: int, values: Mapping[str, float]) -> None:
        """All of a round at once."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        logged = [Metric(_plain(name), value, now, round) for name, value in values.items()]
        for low in range(0, len(logged), MOST_METRICS):
            self._client.log_batch(self._run, metrics=logged[low : low + MOST_METRICS])

    def image(self, round: int, name: str, picture: Image) -> None:
        """As a file of the run."""
        from PIL import Image as Pillow

        self._client.log_image(self._run, Pillow.fromarray(picture), f"{_plain(name)}/round{round:04d}.png")

    def end(self, scores: Mapping[str, float], failed: bool) -> None:
        """Marks the run as finished, or as failed."""
        for name, value in scores.items():
            self._client.set_tag(self._run, _plain(name), f"{value:.4f}")
        self._client.set_terminated(self._run, "FAILED" if failed else "FINISHED")


def _plain(name: str) -> str:
    """As MLflow allows names."""
    return "".join(letter if letter.isalnum() or letter in "_-./ " else "_" for letter in name)


class WandB:
    """An offline run of Weights & Biases below ``wandb/``, in a project, ``fedc2i`` by default."""

    def __init__(self, where: str) -> None:
        self._project = where or "fedc2i"
        self._run: Any = None

    def begin(self, name: str, settings: Mapping[str, Any]) -> None:
        """Starts an offline run."""
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        config = {key: str(value) for key, value in settings.items()}
        self._run = wandb.init(project=self._project, name=name, config=config, mode="offline", reinit="create_new")

    def scalars(self, round: int, values: Mapping[str, float]) -> None:
        """By round, which is W&B's step."""
        self._run.log({**values, "round": round}, step=round)

    def image(self, round: int, name: str, picture: Image) -> None:
        """Beside the same round's numbers."""
        import wandb

        self._run.log({name: wandb.Image(picture)}, step=round)

    def end(self, scores: Mapping[str, float], failed: bool) -> None:
        """Writes the summary and ends the run."""
        for name, value in scores.items():
            self._run.summary[name] = value
        self._run.finish(exit_code=1 if failed else 0)
