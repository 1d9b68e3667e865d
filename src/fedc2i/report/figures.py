"""Figures as PNG: the run's metric over rounds, influence heat maps, raw samples."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedc2i.analysis import weights
from fedc2i.core.files import write_atomically
from fedc2i.data.federation import Federation
from fedc2i.data.sources import shows_images
from fedc2i.engine.records import POINTS, Point
from fedc2i.report.table import WHEN, counted, metric_words
from fedc2i.runs.results import Array, Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import TwoSlopeNorm
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

MOST_PANELS = 12  # clients shown in figures that have a panel for each
MOST_CLASSES = 5  # with a sample of each client
MOST_LABELS = 40  # names on an axis that can still be read
DPI = 150
MARGIN = 0.1  # inches around everything


def draw_run(result: Result, folder: Path) -> None:
    """Every figure of one run into its folder."""
    save(accuracy(result), folder / "accuracy.png")
    if result.federation.has_samples and shows_images(result.federation):
        save(samples(result.federation), folder / "samples.png")
    vectors = weights.by_round(result, "influence_vector")
    if vectors.size:
        save(influence_vectors(result, vectors), folder / "influence.png")
    matrices = weights.by_round(result, "influence_matrix")
    if matrices.size:
        save(influence_matrices(result, matrices[-1]), folder / "influence_classes.png")


def draw_comparison(results: Sequence[Result], folder: Path) -> None:
    """The average score of all methods over rounds."""
    figure, axes = _figure(2, 1, 5.2, 3.6)
    for point, axis in zip(POINTS, axes[0], strict=True):
        comparison_panel(axis, results, point)
    axes[0][0].legend(fontsize=8)
    axes[0][1].sharey(axes[0][0])
    figure.suptitle(plain(f"{averaged(results)} on {results[0].config.data}{mean_of(results[0])}"), fontsize=11)
    save(figure, folder / "comparison.png")


def comparison_panel(axis: Axes, results: Sequence[Result], point: Point) -> None:
    """The average score of all methods over rounds at one point."""
    for result in results:
        rounds, values = result.curve(point, result.config.metric)
        marker = "." if len(rounds) < 3 else None
        axis.plot(rounds, np.ma.masked_invalid(values).mean(axis=1), label=plain(result.label), marker=marker)
    _dress(axis, WHEN[point], results[0])


def averaged(results: Sequence[Result]) -> str:
    """``average over 4 of 5 clients``: those that were scored; without numbers where they differ between results."""
    curves = [result.curve(point, result.config.metric)[1] for result in results for point in POINTS]
    scored, clients = {int(np.isfinite(own).any(axis=0).sum()) for own in curves}, {own.shape[1] for own in curves}
    if len(scored) > 1 or len(clients) > 1:
        return "average over the clients that were scored"
    (number,), (all_of_them,) = scored, clients
    return f"average over {f'{number} of ' if number < all_of_them else ''}{counted(all_of_them, 'client')}"


def accuracy(result: Result) -> Figure:
    """The metric of every client over rounds, at both points, mean over seeds."""
    figure, axes = _figure(2, 1, 5.2, 3.6)
    for point, axis in zip(POINTS, axes[0], strict=True):
        accuracy_panel(axis, result, point)
    name_lines(axes[0][1])
    figure.suptitle(plain(f"{result.label} on {result.config.data}{mean_of(result)}"), fontsize=11)
    return figure


def accuracy_panel(axis: Axes, result: Result, point: Point) -> None:
    """The metric of every client over rounds, and in black their average, at one point, mean over seeds."""
    names = result.federation.names
    rounds, values = result.curve(point, result.config.metric)
    marker = "." if len(rounds) < 3 else None
    for k, name in enumerate(names[:MOST_PANELS]):
        label = plain(name) if np.isfinite(values[:, k]).any() else None  # else in the legend without a line
        axis.plot(rounds, values[:, k], label=label, linewidth=1.2, marker=marker)
    average = np.ma.masked_invalid(values).mean(axis=1)  # a gap where nobody was scored
    scored = int(np.isfinite(values).any(axis=0).sum())
    axis.plot(rounds, average, color="black", linewidth=2, label=f"average of {scored}", marker=marker)
    _dress(axis, WHEN[point], result)


def name_lines(axis: Axes) -> None:
    """The legend of lines, outside on the right."""
    axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)


def influence_vectors(result: Result, vectors: Array) -> Figure:
    """Heat maps of the influence vectors ``(T, M, M)``: row m shows what every client is worth to client m.

    Of the rounds that the data set's preset names, or of the first, a tenth, half and the whole of the run.
    """
    preset, last = result.federation.preset.get("figure_rounds", ()), len(vectors)
    chosen = [number for number in preset if number <= last]
    chosen = chosen or sorted({1, max(1, last // 10), max(1, last // 2), last})
    names = result.federation.names
    side = min(max(2.2, 0.48 * len(names)), 7)
    figure, axes = _figure(len(chosen), 1, side, side + 0.9)
    shades = span_of(vectors, len(names))
    for number, axis in zip(chosen, axes[0], strict=True):
        image = vector_panel(axis, vectors[number - 1], shades, names, names if axis is axes[0][0] else ())
        axis.set_title(f"round {number}", fontsize=10)
    axes[0][0].set_ylabel("for whom")
    axes[0][0].set_xlabel("whose model weighs")
    figure.colorbar(image, ax=list(axes[0]), shrink=0.8, label="influence λ", pad=0.01)
    figure.suptitle(plain(f"{result.label} on {result.config.data}{mean_of(result)}"), fontsize=11)
    return figure


def vector_panel(
    axis: Axes, vectors: Array, shades: tuple[float, float], names: Sequence[str], down: Sequence[str]
) -> AxesImage:
    """The influence vectors ``(M, M)`` of one round; ``shades`` as of `span_of`, ``down`` are the rows' names."""
    image = axis.imshow(vectors, vmin=shades[0], vmax=shades[1], cmap="Blues")
    _name_axes(axis, names, down)
    cells = np.asarray(image.to_rgba(vectors))
    for (m, i), value in np.ndenumerate(vectors) if len(vectors) <= 10 else ():
        if np.isfinite(value):
            colour = readable_on(cells[m, i])
            axis.text(i, m, f"{value:.2f}", ha="center", va="center", fontsize=7, color=colour)
    return image


def readable_on(colour: Array | Sequence[float]) -> str:
    """Black or white, whichever has more contrast (WCAG) to a colour of red, green and blue up to 1."""
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in colour[:3]]
    return "black" if np.dot([0.2126, 0.7152, 0.0722], linear) > (1.05 * 0.05) ** 0.5 - 0.05 else "white"


def influence_matrices(result: Result, matrices: Array) -> Figure:
    """The influence matrix of every client after the last round, ``(M, M, C)``: who weighs most in which class."""
    names, classes = result.federation.names, result.federation.classes
    shown = min(len(names), MOST_PANELS)
    across = 2 if shown == 4 else min(shown, 3)
    wide, high = max(3.0, 0.34 * len(classes)), max(1.8, 0.3 * len(names) + 0.9)
    figure, axes = _figure(across, -(-shown // across), min(wide, 9), min(high, 7))
    shades = around_equal_share(matrices[:shown], len(names))
    for m, axis in enumerate(axes.flat):
        if m >= shown:
            axis.set_axis_off()
            continue
        image = matrix_panel(axis, matrices[m], shades, classes, names if m % across == 0 else ())
        axis.set_title(plain(f"for {names[m]}"), fontsize=9)
    axes[0][0].set_ylabel("whose classifier row weighs", fontsize=8)
    axes[0][0].set_xlabel("class", fontsize=8)
    figure.colorbar(image, ax=list(axes.flat), shrink=0.8, label="influence Λ (white: equal share)", pad=0.01)
    title = f"{result.label} on {result.config.data}: influence per class, last round{mean_of(result)}"
    figure.suptitle(plain(title), fontsize=11)
    return figure


def matrix_panel(
    axis: Axes, matrix: Array, shades: TwoSlopeNorm, classes: Sequence[str], down: Sequence[str]
) -> AxesImage:
    """One client's influence matrix ``(M, C)``; ``down`` are the names of rows that show."""
    image = axis.imshow(matrix, norm=shades, cmap="BrBG", aspect="auto")
    _name_axes(axis, classes, down)
    return image


def samples(federation: Federation) -> Figure:
    """The first test image of some classes for every client: what the shift between clients looks like."""
    clients, shown = federation.clients[:MOST_PANELS], min(MOST_CLASSES, len(federation.classes))
    figure, axes = _figure(1, 1, 0.9 * shown, 0.9 * len(clients))
    axis, (_, high, wide) = axes[0][0], federation.input.shape
    down, across = high + max(1, high // 12), wide + max(1, wide // 12)  # with a gap
    canvas = np.full((len(clients) * down, shown * across, 3), 255, dtype=np.uint8)  # axes for each image take seconds
    for row, client in enumerate(clients):
        for label in range(shown):
            found = (client.test.y == label).nonzero().flatten()
            if len(found):
                top, left = row * down, label * across
                canvas[top : top + high, left : left + wide] = client.test.x[found[0]].permute(1, 2, 0).numpy()
    axis.imshow(canvas, interpolation="nearest")
    names = [plain(name) for name in federation.classes[:shown]]
    axis.set_xticks([label * across + wide / 2 for label in range(shown)], names, fontsize=7)
    axis.set_yticks([row * down + high / 2 for row in range(len(clients))], [plain(own.name) for own in clients])
    axis.tick_params(length=0, labelsize=7, top=False, bottom=False, labeltop=True, labelbottom=False)
    axis.spines[:].set_visible(False)
    return figure


def save(figure: Figure, path: Path) -> None:
    """As PNG or SVG, by the file's ending, whole or not at all.

    The layout is computed here: `savefig` would go through everything in the figure once more for it.
    """
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    ConstrainedLayoutEngine().execute(figure)
    buffer, shown = io.BytesIO(), figure.get_tightbbox().padded(MARGIN)
    figure.savefig(buffer, format=path.suffix.removeprefix("."), dpi=DPI, bbox_inches=shown)
    write_atomically(path, buffer.getvalue())


def write(figure: Figure, folder: Path, name: str) -> list[str]:
    """As ``name.png`` and ``name.svg`` into a folder; returns the files' names."""
    files = [f"{name}.png", f"{name}.svg"]
    for file in files:
        save(figure, folder / file)
    return files


def _figure(across: int, down: int, wide: float, high: float) -> tuple[Figure, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure  # imported late: matplotlib takes half a second, pyplot is not needed

    figure = Figure(figsize=(wide * across, high * down), dpi=DPI)
    FigureCanvasAgg(figure)  # which measures text
    return figure, figure.subplots(down, across, squeeze=False)


def _dress(axis: Axes, title: str, result: Result) -> None:
    axis.set_title(title, fontsize=10)
    axis.set_xlabel("round")
    axis.set_ylabel(f"test {metric_words(result.config.metric).title}")
    axis.grid(alpha=0.3)
    axis.locator_params(axis="x", integer=True)


def mean_of(result: Result) -> str:
    """What a title says of several seeds."""
    seeds = len(result.config.seeds)
    return f", mean of {seeds} seeds" if seeds > 1 else ""


def plain(text: str) -> str:
    """Plain text: between two dollar signs matplotlib would read a formula."""
    return text.replace("$", r"\$")


def _name_axes(axis: Axes, across: Sequence[str], down: Sequence[str]) -> None:
    columns, rows = (list(map(plain, names)) if len(names) <= MOST_LABELS else [] for names in (across, down))
    axis.set_xticks(range(len(columns)), columns, fontsize=7, rotation=45, ha="right", rotation_mode="anchor")
    axis.set_yticks(range(len(rows)), rows, fontsize=7)


def span_of(vectors: Array, clients: int) -> tuple[float, float]:
    """Where λ is palest and darkest: the ends of all rounds, at least half an equal share to both sides of it.

    Less would make much of small differences.
    """
    return float(np.nanmin(vectors, initial=0.5 / clients)), float(np.nanmax(vectors, initial=1.5 / clients))


def around_equal_share(values: Array, clients: int) -> TwoSlopeNorm:
    """Colours that meet at 1/M: one side weighs more than an equal share, the other less; as pale as `span_of`."""
    from matplotlib.colors import TwoSlopeNorm

    equal = 1 / clients
    reach = float(np.abs(values - equal).max(initial=equal / 2, where=np.isfinite(values)))
    return TwoSlopeNorm(equal, equal - min(reach, equal), equal + reach)
