"""The trackers themselves: one class for each package, which is imported when a run begins."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from fedc2i.core.errors import UserError

Image = np.ndarray[Any, np.dtype[np.uint8]]  # (height, width, 3)
MOST_METRICS = 1000  # that MLflow takes at once
MOST_LETTERS = 500  # of a setting that MLflow takes


class Tracker(Protocol):
    """Where the numbers of one seed of one run go."""

    def begin(self, name: str, settings: Mapping[str, Any]) -> None:
        """A run starts: its name and its complete settings."""
        ...

    def scalars(self, round: int, values: Mapping[str, float]) -> None:
        """A round's numbers by name."""
        ...

    def image(self, round: int, name: str, picture: Image) -> None:
        """A round's picture."""
        ...

    def end(self, scores: Mapping[str, float], failed: bool) -> None:
        """The run is over: its last numbers, and whether it was interrupted."""
        ...


class TensorBoard:
    """Event files below a folder, ``runs/tensorboard`` if none is named, one folder for each run and seed."""

    def __init__(self, where: str) -> None:
        self._folder = Path(where or "runs/tensorboard")
        self._writer: Any = None

    def begin(self, name: str, settings: Mapping[str, Any]) -> None:
        """Opens the event file and writes the settings as text."""
        from torch.utils.tensorboard import SummaryWriter

        try:
            self._writer = SummaryWriter(str(_free(self._folder / name)))
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


def _plain(name: str) -> str:
    """As MLflow allows names."""
    return "".join(letter if letter.isalnum() or letter in "_-./ " else "_" for letter in name)


def _free(folder: Path) -> Path:
    """The folder itself, or the first free ``<folder>-2``, ``-3``, ...: two runs in one would be one tangled curve."""
    number, free = 1, folder
    while free.exists():
        number += 1
        free = folder.with_name(f"{folder.name}-{number}")
    return free
