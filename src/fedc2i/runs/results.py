"""The result of a run: every round's report, and the numbers a table needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from fedc2i.data.federation import Federation
from fedc2i.engine import attacks
from fedc2i.engine.accountant import Cost, cost
from fedc2i.engine.diagnostics import LARGE
from fedc2i.engine.records import POINTS, Outcome, Point, Round
from fedc2i.methods.base import Method
from fedc2i.runs.settings import RunSettings

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Score:
    """Mean and sample standard deviation (none for a single seed) over seeds."""

    mean: float
    sd: float | None

    @classmethod
    def of(cls, values: Sequence[float] | Array) -> Score:
        """Over one value a seed."""
        sd = float(np.std(values, ddof=1)) if len(values) > 1 else None
        return cls(float(np.mean(values)), sd)

    def __str__(self) -> str:
        return f"{self.mean:.2f}" if self.sd is None else f"{self.mean:.2f} ± {self.sd:.2f}"


@dataclass(repr=False)
class Result:
    """All rounds of all seeds of one method on one federation.

    Attributes:
        method: what was run.
        config: how.
        federation: on what.
        rounds: the reports, in order, seed after seed.
        outcomes: the last models, by seed.
        label: the method's title with the options that were set, for tables.
        key: the same as typed on a command line.
        asked: over real sites with noise, by seed and round, how often different uploads were asked for.
    """

    method: Method
    config: RunSettings
    federation: Federation
    label: str
    key: str
    rounds: list[Round] = field(default_factory=list)
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    asked: dict[int, Mapping[int, int]] = field(default_factory=dict)

    def __repr__(self) -> str:
        if not self.rounds:
            return f"<Result of {self.label} on {self.config.data}: no rounds yet>"
        scores = ", ".join(f"{point} {self.scores(point)['Avg']}" for point in POINTS)
        return f"<Result of {self.label} on {self.config.data}, seeds {list(self.config.seeds)}: accuracy {scores}>"

    def last(self, seed: int) -> Round:
        """The last evaluated round of a seed."""
        return next(report for report in reversed(self.rounds) if report.seed == seed and report.metrics)

    def accuracy(self, point: Point, metric: str = "accuracy") -> Array:
        """``(seeds, clients)`` after the last round; nan where a client has no such metric."""
        return np.array(
            [[own.get(metric, np.nan) for own in self.last(seed).metrics[point]] for seed in self.config.seeds]
        )

    def averages(self, point: Point, metric: str = "accuracy") -> dict[str, Array]:
        """``(seeds,)`` the mean over the clients that were scored: ``Avg``, then the data set's further averages."""
        values, names = self.accuracy(point, metric), self.federation.names
        return {
            title: _mean(values[:, [names.index(name) for name in members]])
            for title, members in {"Avg": names, **self.federation.averages}.items()
        }

    def scores(self, point: Point, metric: str = "accuracy") -> dict[str, Score]:
        """By client, then the averages: within a seed first, then over seeds."""
        values = self.accuracy(point, metric)
        clients = {name: Score.of(values[:, k]) for k, name in enumerate(self.federation.names)}
        return clients | {title: Score.of(own) for title, own in self.averages(point, metric).items()}

    def curve(self, point: Point, metric: str = "accuracy") -> tuple[Array, Array]:
        """Evaluated rounds ``(R,)`` and the metric ``(R, clients)``, mean over seeds."""
        by_round: dict[int, list[list[float]]] = {}
        for report in self.rounds:
            if report.metrics:
                by_round.setdefault(report.round, []).append([own.get(metric, np.nan) for own in report.metrics[point]])
        return np.array(list(by_round)), np.array([np.mean(values, axis=0) for values in by_round.values()])

    def influence(self, name: str = "influence_vector", seed: int | None = None) -> Array:
        """Every round's diagnostics of a seed (the first by default), stacked: ``(rounds, M, M, ...)``.

        Entry ``[t, m, i]`` is what client m measured of client i after the exchange of round t + 1, nan where it
        measured nothing. ``(0,)`` if no round measured anything. Of very many clients, where a round's would be more
        than 16 MB (Λ of 650 clients and ten classes), only the last round's is kept: ``(1, M, M, ...)``.
        """
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
        """What it received; with `top_k` rounds differ."""
        return round(float(np.mean([report.bytes_down for report in self.rounds])))

    @property
    def privacy(self) -> Cost | None:
        """What the uploads of the rounds so far cost; None where they were not clipped."""
        rounds = max((report.round for report in self.rounds), default=0)
        sends = any(report.bytes_up for report in self.rounds)
        return cost(self.config, len(self.federation.names), rounds, sends, self.asked)

    @property
    def refused(self) -> dict[str, int]:
        """How many uploads were left out, by client."""
        return dict(Counter(name for report in self.rounds for name in report.refused))

    @property
    def attackers(self) -> dict[int, dict[str, list[str]]]:
        """Who attacked, by seed and by attack; empty without one."""
        if not self.config.attack:
            return {}
        names = self.federation.names
        return {seed: attacks.by_kind(self.config.attack, names, seed) for seed in self.config.seeds}

    @property
    def unheard(self) -> tuple[int, ...]:
        """Seeds in which every upload of every round was left out."""
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
        from fedc2i.report import notebook

        return notebook.to_pandas(self)

    def plot_accuracy(self, point: Point | None = None, *, seed: int | None = None, ax: Axes | None = None) -> Axes:
        """Plots test accuracy over rounds: a line for each client, and their average in black.

        Args:
            point: ``received`` or ``trained``; the method's headline by default.
            seed: one of the seeds; the mean over all by default.
            ax: where to draw; a new figure by default.

        Returns:
            The axes, for titles and limits of your own.
        """
        from fedc2i.report import notebook

        return notebook.plot_accuracy(self, point, seed, ax)

    def plot_influence(
        self,
        round: int | None = None,
        *,
        seed: int | None = None,
        client: str | None = None,
        ax: Axes | None = None,
    ) -> Axes:
        """Plots who helps whom: the influence vectors, or with ``client`` its influence matrix by class.

        Args:
            round: from 1; the last by default.
            seed: one of the seeds; the mean over all by default.
            client: whose matrix; without it the vectors of all clients, a row for each.
            ax: where to draw; a new figure by default.

        Returns:
            The axes, for titles of your own.

        Raises:
            UserError: if the method measured no influence, or there is no such round, seed or client.
        """
        from fedc2i.report import notebook

        return notebook.plot_influence(self, round, seed, client, ax)

    def _repr_html_(self) -> str:
        from fedc2i.report import notebook

        return notebook.html(self)

    def summary(self) -> dict[str, Any]:
        """What ``summary.json`` holds: scores at both points, cost, versions and data checksums."""
        from fedc2i.runs import summary

        return summary.summary(self)


def _mean(values: Array) -> Array:
    """Over clients, of each seed; nan if none was scored."""
    counts = np.isfinite(values).sum(1)
    return np.where(counts > 0, np.nansum(values, axis=1) / np.maximum(counts, 1), np.nan)
