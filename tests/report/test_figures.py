"""Figures: what they show, and that awkward federations can be drawn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedc2i.analysis import weights
from fedc2i.data.remote import RemoteFederation, blank_clients
from fedc2i.methods.fedavg import FedAvg
from fedc2i.methods.fedc2i import FedC2I
from fedc2i.report import figures
from fedc2i.report.plots import plot_influence
from fedc2i.runs.results import Result
from support.helpers import blank_federation, is_drawn, made_up

AB = blank_federation(("a", "b"))
pytestmark = pytest.mark.usefixtures("with_figures")


def measured(clients: int, classes: int, rounds: int = 3, seeds: int = 1, holes: bool = False) -> Result:
    """A result with random influence; with holes, some of it was not measured."""
    rng = np.random.default_rng(0)
    federation = blank_federation([f"client {k}" for k in range(clients)], classes, "digits")
    found: dict[str, dict[int, Any]] = {"influence_vector": {}, "influence_matrix": {}}
    for seed in range(seeds):
        for name, shape in (("influence_vector", ()), ("influence_matrix", (classes,))):
            values = rng.random((rounds, clients, clients, *shape))
            values /= values.sum(2, keepdims=True)
            if holes:
                values[0] = np.nan
                values[:, :, -1] = np.nan
            found[name][seed] = values
    accuracy = {seed: rng.uniform(0, 100, (rounds, clients)) for seed in range(seeds)}
    return made_up(federation, accuracy, influence=found)


@pytest.mark.parametrize(
    "result",
    [
        measured(1, 2, rounds=1),
        measured(30, 1),
        measured(3, 100, holes=True, seeds=2),
    ],
    ids=["1 client", "30 clients", "100 classes, partial participation"],
)
def test_every_figure_of_a_run(result: Result, tmp_path: Path) -> None:
    figures.draw_run(result, tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"accuracy.png", "samples.png", "influence.png", "influence_classes.png"}
    assert all(is_drawn(tmp_path / name) for name in names)


def test_blank_samples_of_data_elsewhere_are_not_shown(tmp_path: Path) -> None:
    result = made_up(RemoteFederation("digits", blank_clients(("a", "b")), ("0", "1")), {0: [[50, 80]]})
    figures.draw_run(result, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["accuracy.png"]


def test_figure_of_a_comparison(tmp_path: Path) -> None:
    figures.draw_comparison([made_up(AB, {0: [[50, 80]]}, method=method) for method in (FedAvg(), FedC2I())], tmp_path)
    assert is_drawn(tmp_path / "comparison.png")


def test_clients_without_a_value_are_not_in_the_legend_nor_counted() -> None:
    one = made_up(blank_federation("abc"), {0: [[50, np.nan, 80]] * 3})
    axis = figures.accuracy(one).axes[1]
    assert [text.get_text() for text in axis.get_legend().get_texts()] == ["a", "c", "average of 2"]
    assert figures.averaged([one, one]) == "average over 2 of 3 clients"
    whole = made_up(blank_federation("abc"), {0: [[50, 60, 80]]})
    assert figures.averaged([whole]) == "average over 3 clients"
    assert figures.averaged([whole, one]) == "average over the clients that were scored"


def test_names_that_look_like_formulas(tmp_path: Path) -> None:
    federation = blank_federation(("$\\frac$", "100$ to 200$"), name="folder:$HOME/$x_")
    vectors = {"influence_vector": {0: [[[0.9, 0.1], [0.5, 0.5]]]}}
    result = made_up(federation, {0: [[1, 2]]}, influence=vectors)
    figures.draw_run(result, tmp_path)
    figures.draw_comparison([result], tmp_path)
    assert len(list(tmp_path.iterdir())) == 3  # no samples: these images are a user's own


@pytest.mark.parametrize("lengths", [(3, 1), (1, 3)])
def test_seeds_of_unequal_length_are_drawn(lengths: tuple[int, int], tmp_path: Path) -> None:
    vectors = {seed: np.full((length, 2, 2), 0.5) for seed, length in enumerate(lengths)}
    accuracy = {seed: [[1, 2]] * length for seed, length in enumerate(lengths)}
    result = made_up(AB, accuracy, influence={"influence_vector": vectors})
    assert weights.by_round(result, "influence_vector").tolist() == [[[0.5, 0.5], [0.5, 0.5]]] * 3


def test_seed_that_measured_nothing_does_not_spoil_the_figure() -> None:
    vectors = {seed: np.full((2, 2, 2), 0.5) for seed in (0, 1)}
    result = made_up(AB, {0: [[1, 2]] * 2, 1: [[1, 2]] * 2}, influence={"influence_vector": vectors})
    for report in result.rounds[:2]:
        report.influence.clear()  # type: ignore[attr-defined]
    assert weights.by_round(result, "influence_vector").shape == (2, 2, 2)


def test_clients_that_took_part_in_some_seeds_are_drawn_by_these() -> None:
    nan = np.nan
    vectors = {0: [[[0.9, 0.1], [nan, nan]]], 1: [[[0.7, 0.3], [0.4, 0.6]]]}
    result = made_up(AB, {0: [[1, 2]], 1: [[1, 2]]}, influence={"influence_vector": vectors})
    assert np.allclose(weights.by_round(result, "influence_vector"), [[[0.8, 0.2], [0.4, 0.6]]])


def test_matrices_name_their_rows() -> None:
    result = measured(3, 2)
    figure = figures.influence_matrices(result, result.influence("influence_matrix")[-1])
    assert "whose classifier row weighs" in {axis.get_ylabel() for axis in figure.axes}


def maps_of(result: Result) -> list[Any]:
    """The panels of the figure of influence vectors."""
    return [axis for axis in figures.influence_vectors(result, result.influence()).axes if axis.get_title()]


def titles(maps: Sequence[Any]) -> list[str]:
    return [axis.get_title() for axis in maps]


def test_heat_maps_carry_names_and_values() -> None:
    result = measured(3, 4, rounds=20)
    maps = maps_of(result)
    assert titles(maps) == ["round 1", "round 2", "round 10", "round 20"]
    assert [label.get_text() for label in maps[0].get_xticklabels()] == list(result.federation.names)
    assert [label.get_text() for label in maps[0].get_yticklabels()] == list(result.federation.names)
    written = [text.get_text() for text in maps[-1].texts]
    assert written == [f"{value:.2f}" for value in result.influence()[-1].flatten()]


def test_shades_reach_as_far_as_the_weights_and_stay_pale_near_equal_ones() -> None:
    assert figures.span_of(np.array([[0.1, 0.9], [0.45, np.nan]]), 2) == (0.1, 0.9)
    assert figures.span_of(np.array([[0.49, 0.51]]), 2) == (0.25, 0.75)


def test_heat_maps_of_all_rounds_have_one_scale() -> None:
    rounds = np.array([[[0.5, 0.25, 0.25]] * 3, [[0.9, 0.05, 0.05]] * 3])
    result = made_up(blank_federation("abc"), {0: [[60.0] * 3] * 2}, influence={"influence_vector": {0: rounds}})
    assert [plot_influence(result, number).images[0].get_clim() for number in (1, 2)] == [(0.05, 0.9)] * 2


def test_values_in_heat_maps_are_black_or_white_by_contrast() -> None:
    """By hand: pure blue has a luminance of 0.07, mid grey one of 0.21."""
    assert figures.readable_on((0.0, 0.0, 1.0)) == "white"
    assert figures.readable_on((0.5, 0.5, 0.5)) == "black"
    vectors = np.array([[[0.05, 0.95], [0.5, 0.5]]])
    result = made_up(blank_federation("ab"), {0: [[1, 2]]}, influence={"influence_vector": {0: vectors}})
    assert [text.get_color() for text in maps_of(result)[0].texts] == ["black", "white", "black", "black"]


def test_panels_and_titles_do_not_overlap(tmp_path: Path) -> None:
    result = measured(5, 2, rounds=4)
    result.federation = blank_federation([f"the hospital of town {k}" for k in range(5)], 2)
    figure = figures.influence_vectors(result, result.influence())
    figures.save(figure, tmp_path / "x.png")
    boxes: list[Any] = [axes.get_tightbbox() for axes in figure.axes]
    assert len(boxes) > 2
    for k, one in enumerate(boxes):
        for other in boxes[:k]:
            across = min(one.x1, other.x1) - max(one.x0, other.x0)
            down = min(one.y1, other.y1) - max(one.y0, other.y0)
            assert min(across, down) < 20  # pixels: boxes of slanted names are larger than these


def test_equal_share_is_in_the_middle_of_the_colours() -> None:
    shades = figures.around_equal_share(np.array([[0.7, 0.3], [0.5, np.nan]]), 2)
    assert shades(0.5) == 0.5
    assert (shades.vmin, shades.vmax) == (pytest.approx(0.25), pytest.approx(0.75))  # half an equal share at least
    wide = figures.around_equal_share(np.array([[0.9, 0.1]]), 2)
    assert (wide.vmin, wide.vmax) == (pytest.approx(0.1), pytest.approx(0.9))


@pytest.mark.parametrize(("rounds", "chosen"), [(1, [1]), (2, [1, 2]), (3, [1, 3]), (200, [1, 20, 100, 200])])
def test_rounds_that_are_drawn_by_default(rounds: int, chosen: list[int]) -> None:
    assert titles(maps_of(measured(2, 2, rounds=rounds))) == [f"round {number}" for number in chosen]


def test_rounds_of_the_preset_are_drawn_if_they_were_run() -> None:
    result = measured(2, 2, rounds=5)
    federation = blank_federation(result.federation.names, preset={"figure_rounds": [1, 4, 50]})
    result.federation = federation
    assert titles(maps_of(result)) == ["round 1", "round 4"]
