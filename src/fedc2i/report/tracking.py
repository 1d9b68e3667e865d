"""Experiment trackers: what a run reports, passed on to TensorBoard, MLflow or Weights & Biases at once.

A tracker is four functions (`tracker_kinds.Tracker`); `Tracking` is the observer that feeds them, one for every seed:

    with fedc2i.track("tensorboard:logs", "mlflow") as tracking:
        fedc2i.run("fedc2i", "embedded", observer=tracking)

A resumed run is another run of the tracker, which first receives the rounds before the interruption.
Each is given the settings, then after every scored round ``<point>/<metric>/<client>`` and the mean over clients,
``<point>/<metric>``, a picture of the influence vectors, and at the end the mean scores. Nothing leaves the machine
unless an address is given: W&B is used offline (``wandb sync`` uploads), MLflow's and W&B's reports to their makers are
switched off. All three packages are optional, and are imported when asked for.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from types import TracebackType
from typing import Any

import numpy as np

from fedc2i.core.errors import UserError
from fedc2i.engine.records import Round
from fedc2i.report.trackers import Image, MLflow, TensorBoard, Tracker, WandB
from fedc2i.runs.folder import slug
from fedc2i.runs.plan import Observer
from fedc2i.runs.results import Result

PIXELS = 480  # the least width and height of a picture
_INFLUENCE = "influence_vector"


_KINDS: dict[str, tuple[Callable[[str], Tracker], str]] = {  # with the module that must be there
    "tensorboard": (TensorBoard, "tensorboard"),
    "mlflow": (MLflow, "mlflow"),
    "wandb": (WandB, "wandb"),
}


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
        names = self._result.federation.names
        values = scalars(report, names)
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


class Observers:
    """Several observers as one."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    def begin(self, result: Result) -> None:
        """A run starts."""
        for one in self._observers:
            one.begin(result)

    def client(self, done: int, of: int) -> None:
        """Some clients have finished."""
        for one in self._observers:
            one.client(done, of)

    def round(self, report: Round) -> None:
        """A round ended."""
        for one in self._observers:
            one.round(report)

    def say(self, line: str) -> None:
        """A line of an engine, for those that show lines."""
        for one in self._observers:
            getattr(one, "say", lambda line: None)(line)


def track(*wanted: str) -> Tracking:
    """An observer that passes a run on to trackers.

    Args:
        *wanted: each ``tensorboard[:DIR]``, ``mlflow[:DIR or URI]`` or ``wandb[:PROJECT]``.

    Raises:
        UserError: for a tracker that is not known, or whose package is not installed.
    """
    return Tracking([_maker(one) for one in wanted])


def _maker(wanted: str) -> Callable[[], Tracker]:
    from importlib.util import find_spec

    name, _, where = wanted.partition(":")
    if name not in _KINDS:
        raise UserError(f"no tracker '{name}', allowed are tensorboard[:DIR], mlflow[:DIR or URI], wandb[:PROJECT]")
    kind, module = _KINDS[name]
    if find_spec(module) is None:
        raise UserError(f"--track {name}: {module} is not installed: pip install 'fedc2i[{name}]'")
    return lambda: kind(where)


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
