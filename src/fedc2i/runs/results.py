"""The result of a run as data: every round's report, scores, curves, influence and cost, and the summary of it all."""

from __future__ import annotations

import functools
import math
import platform
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from fedc2i import __version__
from fedc2i.core.errors import UserError, how_to_install, one_line
from fedc2i.core.options import convert
from fedc2i.data.federation import Federation
from fedc2i.engine.records import LARGE, POINTS, Outcome, Point, Predictions, Round
from fedc2i.methods.base import Method
from fedc2i.runs.settings import RunSettings
from fedc2i.training.metrics import HIGHER_IS_BETTER, digits

if TYPE_CHECKING:
    from fedc2i.engine.accountant import Cost

Array = np.ndarray[Any, np.dtype[np.float64]]
MEASURED = ("influence_vector", "influence_matrix")  # λ and Λ, which a method may have
WORST = "Worst"  # the column of the worst client
COLUMNS = ("seed", "round", "client", "point", "metric", "value")  # of the long table


@dataclass(frozen=True)
class Score:
    """Mean and sample standard deviation (None for a single seed) over seeds."""

    mean: float
    sd: float | None
    digits: int = 2  # that are shown

    @classmethod
    def of(cls, values: Sequence[float] | Array, digits: int = 2) -> Score:
        """From one value per seed."""
        sd = float(np.std(values, ddof=1)) if len(values) > 1 else None
        return cls(float(np.mean(values)), sd, digits)

    def __str__(self) -> str:
        if math.isnan(self.mean):
            return "–"
        return " ± ".join(f"{value:.{self.digits}f}" for value in (self.mean, self.sd) if value is not None)


@dataclass(repr=False)
class Result:
    """All rounds of all seeds of one method on one federation.

    Attributes:
        label: the method's title with the options that were set, for tables.
        key: the same as typed on a command line.
        rounds: the reports, in order, seed after seed.
        outcomes: the last models, by seed.
        predictions: theirs for every test sample; None over real sites.
        asked: over real sites with noise, by seed and round, how often different uploads were requested.
        written: the summary of a run that was read from a folder, whose metrics have six digits only.
        model_name: the model's own name, if the settings have another: that of a ``FILE.py:FUNCTION``.
        given: what came as an object of Python, which no command can name: data, model or method.
        own_kernels: whether our own kernels ran on a GPU, of a resumed run since then; None without one, or at sites.
    """

    method: Method
    config: RunSettings
    federation: Federation
    label: str
    key: str
    rounds: list[Round] = field(default_factory=list)
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    predictions: Predictions | None = None
    asked: dict[int, Mapping[int, int]] = field(default_factory=dict)
    written: dict[str, Any] = field(default_factory=dict)
    model_name: str = ""
    given: tuple[str, ...] = ()
    own_kernels: bool | None = None

    def __repr__(self) -> str:
        if not self.rounds:
            return f"<Result of {self.label} on {self.config.data}: no rounds yet>"
        before, after = (self.scores(point, self.config.metric)["Avg"] for point in POINTS)
        scores = f"{self.config.metric} {before} before local training, {after} after"
        return f"<Result of {self.label} on {self.config.data}, seeds {list(self.config.seeds)}: {scores}>"

    @property
    def model(self) -> str:
        """The model's name, for tables."""
        return self.model_name or self.config.model

    def last(self, seed: int) -> Round:
        """The last evaluated round of a seed."""
        return next(report for report in reversed(self.rounds) if report.seed == seed and report.metrics)

    def accuracy(self, point: Point, metric: str = "accuracy") -> Array:
        """``(seeds, clients)`` after the last round; nan where a client has no such metric.

        Raises:
            UserError: for another point than ``received`` and ``trained``.
        """
        _require_point(point)
        return np.array(
            [[own.get(metric, np.nan) for own in self.last(seed).metrics[point]] for seed in self.config.seeds]
        )

    def averages(self, point: Point, metric: str = "accuracy") -> dict[str, Array]:
        """``(seeds,)`` the mean over the clients that were scored: ``Avg``, then the data set's further averages.

        It is nan where a client's score is not a number: without the client, a model that diverged would look better.
        """
        values, scored, names = self.accuracy(point, metric), self._scored(point, metric), self.federation.names
        members = {"Avg": names, **self.federation.averages}
        number = {name: k for k, name in enumerate(names)}
        places = {title: [number[name] for name in own] for title, own in members.items()}
        return {title: _mean(values[:, own], scored[:, own]) for title, own in places.items()}

    def _scored(self, point: Point, metric: str) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """``(seeds, clients)`` who has such a metric."""
        return np.array([[metric in own for own in self.last(seed).metrics[point]] for seed in self.config.seeds])

    @property
    def diverged(self) -> tuple[str, ...]:
        """Clients whose last model, of any seed, has no finite log-loss."""
        last = [self.last(seed).metrics[point] for seed in self.config.seeds for point in POINTS] if self.rounds else []
        return tuple(
            name
            for k, name in enumerate(self.federation.names)
            if not all(math.isfinite(own[k].get("loss", 0.0)) for own in last)
        )

    def worst(self, point: Point, metric: str = "accuracy") -> Array:
        """``(seeds,)`` the worst client that was scored; nan where a client's score is not a number."""
        values, none = self.accuracy(point, metric), -np.inf if _is_lower_better(metric) else np.inf
        filled = np.where(self._scored(point, metric), values, none)
        found: Array = filled.max(1) if _is_lower_better(metric) else filled.min(1)
        return np.where(np.isfinite(found), found, np.nan)

    def scores(self, point: Point, metric: str = "accuracy") -> dict[str, Score]:
        """By client, then the averages and the worst client: within a seed first, then over seeds."""
        values = self.accuracy(point, metric)
        columns = {name: values[:, k] for k, name in enumerate(self.federation.names)}
        columns |= {**self.averages(point, metric), WORST: self.worst(point, metric)}
        return {title: Score.of(own, digits(metric)) for title, own in columns.items()}

    def showing(self, metric: str) -> Result:
        """The same, with another metric in tables, figures and reports.

        Raises:
            UserError: if there is no such metric.
        """
        return replace(self, config=replace(self.config, metric=convert(metric, RunSettings, "metric")))

    @property
    def majority(self) -> dict[str, float]:
        """By client the share (%) of the most frequent class in its test data; empty where that is not known."""
        if not self.federation.has_samples:
            return dict(self.written.get("majority", {}))
        counts = {client.name: client.test.y.bincount() for client in self.federation.clients}
        return {name: 100 * int(own.max()) / int(own.sum()) for name, own in counts.items()}

    def curve(self, point: Point, metric: str = "accuracy") -> tuple[Array, Array]:
        """Evaluated rounds ``(R,)`` and the metric ``(R, clients)``, mean over seeds; a point is as for `accuracy`."""
        _require_point(point)
        by_round: dict[int, list[list[float]]] = {}
        for report in self.rounds:
            if report.metrics:
                by_round.setdefault(report.round, []).append([own.get(metric, np.nan) for own in report.metrics[point]])
        return np.array(list(by_round)), np.array([np.mean(values, axis=0) for values in by_round.values()])

    def influence(self, name: str = "influence_vector", seed: int | None = None) -> Array:
        """Every round's diagnostics of a seed (the first by default), stacked: ``(rounds, M, M, ...)``.

        Entry ``[t, m, i]`` is what client m measured of client i after the exchange of round t + 1, nan where it
        measured nothing. ``(0,)`` if no round measured anything, as of a method such as Local. If one round's
        diagnostic has more than 16 MB (Λ of 650 clients and ten classes), only the last round's is kept:
        ``(1, M, M, ...)``.

        Raises:
            UserError: for a name that is neither λ's nor Λ's nor another that a round measured.
        """
        _require("diagnostic", name, dict.fromkeys((*MEASURED, *(own for one in self.rounds for own in one.influence))))
        seed = self.config.seeds[0] if seed is None else seed
        own = [report.influence.get(name) for report in self.rounds if report.seed == seed]
        measured = [array for array in own if array is not None]
        if not measured or measured[0].nbytes > LARGE:
            return np.stack(measured) if measured else np.zeros((0,))
        nothing = np.full(measured[0].shape, np.nan)
        return np.stack([nothing if array is None else array for array in own])

    def only(self, seed: int) -> Result:
        """The same of one seed alone."""
        return replace(
            self,
            config=replace(self.config, seeds=(seed,)),
            rounds=[report for report in self.rounds if report.seed == seed],
            outcomes={own: outcome for own, outcome in self.outcomes.items() if own == seed},
            predictions=None if self.predictions is None else self.predictions.only(seed),
            written={},
        )

    @property
    def seconds(self) -> float:
        """Of all rounds together."""
        return sum(report.seconds for report in self.rounds)

    @property
    def bytes_up(self) -> int:
        """What a client that trained sent in a round, on average over rounds."""
        return round(float(np.mean([report.bytes_up for report in self.rounds])))

    @property
    def bytes_down(self) -> int:
        """What it received; with `fedc2i-top-k` rounds differ."""
        return round(float(np.mean([report.bytes_down for report in self.rounds])))

    @property
    def privacy(self) -> Cost | None:
        """The privacy cost of the uploads so far; None where they were not clipped."""
        if not self.config.clip:
            return None
        from fedc2i.engine.accountant import cost

        rounds = max((report.round for report in self.rounds), default=0)
        sends = any(report.bytes_up for report in self.rounds)
        released = self.config.engine == "flower"
        return cost(self.config, len(self.federation.names), rounds, sends, self.asked, released)

    @property
    def refused(self) -> dict[str, int]:
        """How many uploads were rejected, by client."""
        return dict(Counter(name for report in self.rounds for name in report.refused))

    @property
    def attackers(self) -> dict[int, dict[str, list[str]]]:
        """Who attacked, by seed and by attack; empty without one."""
        if not self.config.attack:
            return {}
        from fedc2i.engine import attacks

        names = self.federation.names
        return {seed: attacks.by_kind(self.config.attack, names, seed) for seed in self.config.seeds}

    @property
    def unheard(self) -> tuple[int, ...]:
        """Seeds in which every upload of every round was rejected."""
        heard = {
            report.seed
            for report in self.rounds
            if not report.participants or not {*report.participants} <= {*report.refused}
        }
        return tuple(seed for seed in self.config.seeds if self.rounds and seed not in heard)

    def to_pandas(self) -> Any:
        """Every metric of every scored round as a pandas table: seed, round, client, point, metric, value.

        A client that has no such metric, or gave no answer in a round, has no row.

        Raises:
            UserError: if pandas is not installed.
        """
        return frame(COLUMNS, self._long_rows())

    def _long_rows(self) -> Iterator[tuple[int, int, str, str, str, float]]:
        """One row per value, as in ``metrics.jsonl``."""
        for report in self.rounds:
            for point, clients in report.metrics.items():
                for name, own in zip(self.federation.names, clients, strict=True):
                    for metric, value in own.items():
                        yield report.seed, report.round, name, point, metric, value


class Comparison(list[Result]):
    """What `compare` returns: a list of results, one for each method.

    Runs that were read back make one, too: ``Comparison([read_run(a), read_run(b)])``.
    """

    def to_pandas(self) -> Any:
        """The long table of all results, with the method in the first column."""
        return frame(("method", *COLUMNS), ((own.key, *row) for own in self for row in own._long_rows()))


def _require(what: str, name: str, allowed: Collection[str]) -> None:
    if name not in allowed:
        raise UserError(f"{what} '{one_line(name)}' is unknown, allowed are {', '.join(allowed)}")


def _require_point(point: str) -> None:
    if point not in POINTS:
        known = "received (before local training), trained (after it)"
        raise UserError(f"point '{one_line(point)}' is unknown, allowed are {known}")


def frame(columns: Sequence[str], rows: Iterable[tuple[Any, ...]]) -> Any:
    """A pandas table; a `UserError` if pandas is not installed."""
    try:
        import pandas
    except ImportError:
        raise UserError(f"to_pandas needs pandas: {how_to_install('notebook')}") from None
    return pandas.DataFrame.from_records(list(rows), columns=list(columns))


def _is_lower_better(metric: str) -> bool:
    """Of ``loss``, ``validation_loss`` and ``loss/prototype`` alike."""
    return not HIGHER_IS_BETTER.get(metric.removeprefix("validation_").partition("/")[0], True)


def _mean(values: Array, scored: np.ndarray[Any, np.dtype[np.bool_]]) -> Array:
    """Over the clients that were scored, of each seed; nan if none was."""
    counts = scored.sum(1)
    return np.where(counts > 0, np.where(scored, values, 0.0).sum(1) / np.maximum(counts, 1), np.nan)


def summary(result: Result) -> dict[str, Any]:
    """The content of ``summary.json``: scores at both points, cost, rejected uploads, versions and data checksums.

    That of a run that was read is as it was written.
    """
    if result.written:
        return dict(result.written)
    config, federation, rounds, spent = result.config, result.federation, result.rounds, result.privacy
    attackers = {str(seed): own for seed, own in result.attackers.items()}
    asked_again = [
        {"seed": seed, "round": number, "times": times}
        for seed, own in result.asked.items()
        for number, times in sorted(own.items())
        if times > 1
    ]
    return {
        "method": config.method,
        "title": result.label,
        "key": result.key,
        "model": result.model,
        "data": config.data,
        **({"given": list(result.given)} if result.given else {}),
        "clients": list(federation.names),
        "classes": list(federation.classes),
        "samples": federation.samples(),
        **({"class_counts": counts} if (counts := federation.class_counts()) else {}),
        "input": federation.input.to_json(),
        "averages": {title: list(members) for title, members in federation.averages.items()},
        "seeds": list(config.seeds),
        "rounds": max(report.round for report in rounds),
        "headline": result.method.headline,
        "metric": config.metric,
        **({"majority": majority} if (majority := result.majority) else {}),
        "points": {point: _scores(result, point) for point in POINTS},
        "seconds": round(result.seconds, 3),
        "seconds_per_round": round(result.seconds / len(rounds), 4),
        "bytes_up_per_client_round": result.bytes_up,
        "bytes_down_per_client_round": result.bytes_down,
        "refused": [
            {
                "seed": report.seed,
                "round": report.round,
                "clients": list(report.refused),
                "of": len(report.participants),
                "why": dict(report.why),
            }
            for report in rounds
            if report.refused
        ],
        **({"attack": config.attack, "attackers": attackers} if attackers else {}),
        "privacy": None if spent is None else spent.to_json(),
        **({"secure_aggregation": True} if config.secure_aggregation else {}),
        **({"asked_again": asked_again} if asked_again else {}),
        "refused_uploads": result.refused,
        "notes": list(federation.all_notes),
        "data_checksums": federation.checksums,
        "versions": versions(config.engine),
        "device": str(config.torch_device()),
        **({} if result.own_kernels is None else {"own_kernels": result.own_kernels}),
    }


def _scores(result: Result, point: Point) -> dict[str, Any]:
    """By metric, then by client and average."""
    metrics = sorted({name for own in result.last(result.config.seeds[0]).metrics[point] for name in own})
    return {
        metric: {name: {"mean": score.mean, "sd": score.sd} for name, score in result.scores(point, metric).items()}
        for metric in metrics
    }


@functools.cache
def versions(engine: str = "inprocess") -> dict[str, str]:
    """Of fedc2i, Python and the packages that decide numbers; Flower if that engine was used, Triton if installed."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"fedc2i": __version__, "python": platform.python_version()}
    carrier = () if engine == "inprocess" else ("flwr",)
    for package in ("torch", "numpy", "scikit-learn", "pillow", "matplotlib", *carrier):
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # e.g. a torch that was built by hand
            found[package] = "unknown"
    with suppress(PackageNotFoundError):
        found["triton"] = version("triton")
    return found
