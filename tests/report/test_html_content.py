"""What a report computes before anything is drawn: packed numbers, insights, groups, words; by hand, tiny cases."""

from __future__ import annotations

import base64
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedc2i.analysis.weights import at_ceiling, finite_mean, mean_weights, of_last_round, of_seeds, round_numbers
from fedc2i.core.errors import UserError
from fedc2i.engine.records import POINTS, Predictions
from fedc2i.methods.base import Method
from fedc2i.methods.fedavg import FedAvg
from fedc2i.methods.fedc2i import FedC2I
from fedc2i.methods.fedc2i_plus import FedC2IPlus
from fedc2i.report.comparison import comparison_table
from fedc2i.report.html.chart_data import chart_data, pack, round_scores, rounds_to_keep, to_script
from fedc2i.report.html.graph import MOST_NODES, clusters, graph_nodes
from fedc2i.report.html.influence_text import client_influences, influence_text
from fedc2i.report.html.side_by_side import (
    common_seeds,
    difference_table,
    differences,
    distinct,
    score_table,
    settings_that_differ,
)
from fedc2i.report.html.verdict import Text, key_numbers, verdict_text, warning_notes
from fedc2i.runs.results import Array, Result
from support.helpers import blank_federation, made_up

NAN = float("nan")
ABC = blank_federation(("a", "b", "c"))


def unpack(packed: dict[str, Any]) -> Array:
    """As the page's script does it, number by number."""
    coded = np.frombuffer(base64.b64decode(packed["data"]), "<u2").reshape(packed["shape"])
    return np.array(np.where(coded == 65535, np.nan, packed["low"] + packed["step"] * coded))


# λ: a leans on b, b on c in one seed and on a in the other, c measured nothing in the last round.
FIRST = [[[0.6, 0.3, 0.1], [0.1, 0.7, 0.2], [0.2, 0.2, 0.6]], [[0.5, 0.4, 0.1], [0.1, 0.6, 0.3], [NAN, NAN, NAN]]]
SECOND = [[[0.6, 0.3, 0.1], [0.1, 0.7, 0.2], [0.2, 0.2, 0.6]], [[0.7, 0.2, 0.1], [0.3, 0.6, 0.1], [NAN, NAN, NAN]]]
# Λ: a's class 1 leans on c, where b has next to nothing; its class 2 on c by a hair.
CLASSES = np.full((2, 3, 3, 3), 1 / 3)
CLASSES[:, 0, :, 1] = [0.4, 0.1, 0.5]
CLASSES[:, 0, :, 2] = [0.3, 0.34, 0.36]


def influential(**more: Any) -> Result:
    seen = {"influence_vector": {0: FIRST, 1: SECOND}, "influence_matrix": {0: CLASSES, 1: CLASSES}}
    return made_up(ABC, {0: [[50, 60, 70]] * 2, 1: [[52, 62, 72]] * 2}, influence=seen, **more)


# Packed numbers.


def story(result: Result) -> Text:
    return influence_text(result, client_influences(result))


def test_packing_keeps_numbers_to_a_step_and_nan() -> None:
    values = np.array([[0.25, NAN, 1.0], [-3.0, 0.0, 7.5]])
    packed = pack(values)
    assert packed["shape"] == [2, 3]
    assert np.allclose(unpack(packed), values, atol=10.5 / 65534, rtol=0, equal_nan=True)


@pytest.mark.parametrize("values", [np.full((2, 2), 0.2), np.full((3,), NAN), np.zeros((0, 4))])
def test_packing_of_nothing_to_tell_apart(values: Array) -> None:
    assert np.array_equal(unpack(pack(values)), values, equal_nan=True)


def test_mean_is_of_what_is_there() -> None:
    assert np.array_equal(finite_mean(np.array([[1, NAN, NAN], [3, 5, NAN]])), [2, 5, NAN], equal_nan=True)


def test_the_mean_of_weights_sums_to_one_where_other_models_were_received() -> None:
    """By hand: the first client received two models in one seed and three in the other, the last one nothing in one."""
    third = 1 / 3
    first = [[0.5, 0.5, NAN], [0.2, 0.2, 0.6], [NAN, NAN, NAN]]
    second = [[third, third, third], [0.4, 0.2, 0.4], [0.1, 0.9, NAN]]
    found = mean_weights(np.array([first, second]), helpers=2)
    np.testing.assert_allclose(found, [[2.5 / 6, 2.5 / 6, 1 / 6], [0.3, 0.2, 0.5], [0.1, 0.9, NAN]])
    np.testing.assert_allclose(np.nansum(found, 1), 1)
    accuracy = {0: [[1, 2, 3]], 1: [[1, 2, 3]]}
    result = made_up(ABC, accuracy, influence={"influence_vector": {0: [first], 1: [second]}})
    np.testing.assert_allclose(of_last_round(result, "influence_vector"), found)
    shown = unpack(chart_data([result])["runs"][0]["views"][0]["vector"])
    np.testing.assert_allclose(shown, [found], atol=1e-4)


def test_last_influence_is_the_last_round_that_measured_anything() -> None:
    result = influential()
    silent = [replace(report, influence={}) if report.round == 2 else report for report in result.rounds]
    assert np.allclose(of_last_round(result, "influence_vector")[0], [0.6, 0.3, 0.1])
    assert np.allclose(of_last_round(replace(result, rounds=silent), "influence_vector")[2], [0.2, 0.2, 0.6])
    assert of_last_round(replace(result, rounds=silent), "nothing").shape == (0,)


def test_kept_rounds_leave_out_silent_ones_and_what_does_not_fit() -> None:
    values = np.ones((2, 10, 3, 3))
    values[:, 4] = NAN
    assert rounds_to_keep(values, views=3, most=1000) == ([0, 1, 2, 3, 5, 6, 7, 8, 9], True)
    assert rounds_to_keep(values, views=3, most=27) == ([0, 5, 9], False)
    assert rounds_to_keep(values, views=3, most=9) == ([9], False)
    assert rounds_to_keep(values, views=3, most=8) == ([], False)


def test_seeds_that_stopped_earlier_are_nan_later() -> None:
    result = made_up(ABC, {0: [[1, 2, 3]] * 3, 1: [[5, 6, 7]]})
    rounds, values = round_scores(result, "received")
    assert rounds == [1, 2, 3]
    assert values.shape == (2, 3, 3)
    assert np.isnan(values[1, 1:]).all()
    assert of_seeds(result, "influence_vector").shape == (0,)


# Insights.


def test_insights_by_hand() -> None:
    a, b, c = client_influences(influential())
    assert a.itself == pytest.approx(0.6)
    assert [i for i, _ in a.learned] == [1, 2]
    assert [share for _, share in a.learned] == pytest.approx([0.3, 0.1])
    assert [i for i, _ in a.taught] == [1]
    assert (a.steady, a.seeds) == (2, 2)
    assert (b.steady, b.seeds) == (1, 2)  # seed 0 says c, seed 1 says a; the mean is a tie, which goes to a
    assert b.learned[0][0] == 0
    assert c.learned == ()
    assert np.isnan(c.itself)
    assert [i for i, _ in c.taught] == [1, 0]


def test_classes_with_another_helper_by_hand() -> None:
    a, b, _ = client_influences(influential())
    assert [(one.label, one.helper) for one in a.exceptions] == [(1, 2)]  # class 2: 0.36 is no fifth above 0.34
    assert a.exceptions[0].share == pytest.approx(0.5)
    assert a.exceptions[0].usual == pytest.approx(0.1)
    assert b.exceptions == ()


def test_who_has_next_to_nothing_is_no_helper() -> None:
    rows = [[[0.99, 0.009, 0.001], [0.3, 0.4, 0.3], [0.0, 0.0, 1.0]]]
    a, b, c = client_influences(made_up(ABC, {0: [[1, 2, 3]]}, influence={"influence_vector": {0: rows}}))
    assert a.learned == ()
    assert [i for i, _ in b.learned] == [0, 2]
    assert c.learned == ()
    assert [i for i, _ in a.taught] == [1]


# Nodes of the graph.


def test_few_clients_are_nodes_themselves() -> None:
    names = [f"c{k}" for k in range(MOST_NODES)]
    assert graph_nodes(names, None).kind == "client"
    assert graph_nodes(names, None).labels == tuple(names)


def test_many_clients_are_grouped_by_domain() -> None:
    names = [f"{domain}/{k}" for domain in ("x", "y/z") for k in range(10)]
    found = graph_nodes(names, None)
    assert (found.kind, found.labels) == ("domain", ("x", "y/z"))
    assert found.members == (0,) * 10 + (1,) * 10


def test_many_clients_without_domains_are_clustered_by_mutual_influence() -> None:
    order = np.random.default_rng(0).permutation(30)
    block = np.where((order[:, None] < 10) == (order[None] < 10), 0.08, 0.01)
    found = clusters(block, 2)
    assert found[0] == 0
    for k in range(30):
        assert (found[k] == found[0]) == ((order[k] < 10) == (order[0] < 10))
    assert graph_nodes([f"c{k}" for k in range(30)], block).kind == "cluster"
    assert len(graph_nodes([f"c{k}" for k in range(30)], None).labels) == 1


# Words.


def test_verdict_names_the_best_with_its_interval() -> None:
    better = made_up(ABC, {seed: [[60 + seed] * 3] for seed in range(5)})
    worse = made_up(ABC, {seed: [[58] * 3] for seed in range(5)}, method=FedAvg())
    said = verdict_text([worse, better])
    assert said.headline == "FedC²I has the highest average accuracy at both points, beyond chance."
    assert said.sentences[0] == (
        "Before local training, FedC²I has the highest Avg accuracy, 62.00 ± 1.58 %: ahead of FedAvg by 4.00 points "
        "(95 % interval 2.80 to 5.20)."
    )


def test_one_run_is_scored_at_both_points_and_they_are_not_subtracted() -> None:
    """What is scored before local training is made of the trained models: their difference is of two models."""
    said = verdict_text([made_up(ABC, {0: [[60] * 3]}, lift=-5)])
    assert said.headline == "FedC²I reaches 55.00 % on toy after 1 round."
    assert said.sentences[0] == (
        "That is Avg after local training, the point that the method's authors report; before local training it is "
        "60.00 %."
    )


def test_nothing_is_clear_below_five_seeds_and_no_method_is_dropped() -> None:
    better = made_up(ABC, {seed: [[60 + seed] * 3] for seed in range(4)})
    others = [
        made_up(ABC, {seed: [[40 + k] * 3] for seed in range(4)}, method=FedAvg(), key=f"fedavg:{k}") for k in range(9)
    ]
    said = verdict_text([*others, better])
    assert said.headline == (
        "FedC²I has the highest average accuracy at both points in these 4 seeds; 5 seeds are needed to call it "
        "clearly best."
    )
    assert all(one.label in said.sentences[point] for one in others for point in (0, 1))
    assert "4 seeds cannot show that a run is clearly best; 5 or more can." in said.sentences
    assert not any("clearly" in sentence for sentence in said.sentences[:2])


def test_leaders_that_differ_are_named() -> None:
    before, after = (made_up(ABC, {0: [[60] * 3]}, lift=own, key=f"fedc2i:gamma={own}") for own in (-1, 1))
    before.rounds[0].metrics["received"][0]["accuracy"] += 1
    line = f"{before.label} leads before local training, {after.label} leads after local training"
    assert verdict_text([before, after]).headline == f"No run is clearly best: {line}."


def test_lower_is_better_for_the_loss() -> None:
    results = [made_up(ABC, {0: [[60, 50, 40]]}), made_up(ABC, {0: [[50, 40, 30]]}, method=FedAvg())]
    for result in results:
        for report in result.rounds:
            for own in (entry for metrics in report.metrics.values() for entry in metrics):
                own["loss"] = own["accuracy"] / 100
    shown = [result.showing("loss") for result in results]
    table = comparison_table(shown)
    assert table.title.startswith("Test log-loss (lower is better) on toy")
    assert [row.cells[2:] for row in table.rows[::2]] == [
        ("0.600", "0.500", "0.400", "0.500", "0.600"),
        ("0.500", "0.400", "0.300", "0.400", "0.500"),
    ]
    assert [bool(row.best) for row in table.rows] == [False, False, True, True]
    assert "FedAvg has the lowest Avg log-loss, 0.400: " not in verdict_text(shown).sentences[0]
    assert verdict_text(shown).sentences[0] == (
        "Before local training, FedAvg has the lowest Avg log-loss, 0.400. Ahead of FedC²I by 0.100."
    )
    assert chart_data(shown)["metric"] == {"name": "log-loss", "unit": "", "points": "", "sign": -1}


def test_verdict_does_not_claim_what_seeds_do_not_show() -> None:
    first = made_up(ABC, {0: [[60] * 3], 1: [[50] * 3]})
    second = made_up(ABC, {0: [[50] * 3], 1: [[59] * 3]}, method=FedAvg())
    third = made_up(ABC, {0: [[10] * 3], 1: [[70] * 3]}, method=FedAvg(), key="fedavg:far")  # the widest interval
    said = verdict_text([first, second, third])
    assert said.headline.endswith("accuracy at both points, but its lead over FedAvg may be chance.")
    assert "It may be chance that it is ahead of FedAvg by 0.50 points (95 % interval " in said.sentences[0]


def test_equal_scores_have_no_winner_and_one_client_no_federation() -> None:
    alone = blank_federation("a")
    results = [made_up(alone, {0: [[60]], 1: [[50]]}), made_up(alone, {0: [[60]], 1: [[50]]}, method=FedAvg())]
    said = verdict_text(results)
    assert said.headline == "All 2 runs have the same average accuracy at both points."
    assert said.warnings == ("There is one client: nothing to federate.",)


@pytest.mark.parametrize(("ill", "warns"), [(1, True), (5, False)])
def test_intervals_over_a_class_with_few_samples_are_called_too_narrow(ill: int, warns: bool) -> None:
    labels = np.array([1] * ill + [0] * 10)
    found = {}
    for method, sure in ((FedC2I(), 0.9), (FedAvg(), 0.6)):
        rows = np.log(np.where(np.eye(2)[labels] > 0, sure, 1 - sure)).astype(np.float32)
        one = made_up(blank_federation("a"), {seed: [[60]] for seed in range(2)}, method=method)
        for report in one.rounds:
            for own in (entry for metrics in report.metrics.values() for entry in metrics):
                own["balanced_accuracy"] = 100 * sure
        logs = {(seed, point): rows for seed in range(2) for point in POINTS}
        one.predictions = Predictions(labels, (len(labels),), logs)
        found[method.name] = one.showing("balanced_accuracy")
    said = verdict_text(list(found.values()))
    line = "The intervals are too narrow: they treat classes with fewer than 5 test samples as certain, at a."
    assert (line in said.warnings) == warns


@pytest.mark.parametrize(("seed", "words"), [(0, "share one seed"), (7, "share no seed")])
def test_verdict_without_pairs_says_so(seed: int, words: str) -> None:
    results = [made_up(ABC, {0: [[60] * 3]}), made_up(ABC, {seed: [[50] * 3]}, method=FedAvg())]
    assert any(words in sentence for sentence in verdict_text(results).sentences)
    assert [row.kind for row in score_table(results).rows] == [*["plain"] * 4, "majority"]
    assert len(differences(results, "trained")[1]) == (seed == 0)
    assert bool(difference_table(results).rows) == (seed == 0)


def test_only_common_seeds_are_paired() -> None:
    first = made_up(ABC, {0: [[10] * 3], 1: [[60] * 3], 2: [[62] * 3]})
    second = made_up(ABC, {2: [[61] * 3], 1: [[57] * 3], 5: [[99] * 3]}, method=FedAvg())
    assert common_seeds([first, second]) == (1, 2)
    best, (found,) = differences([first, second], "received")
    assert best == 0
    assert found.paired.mean == pytest.approx(2.0)
    assert found.interval == (1.0, 3.0)


def test_influence_in_words() -> None:
    said = story(influential())
    assert said.headline == (
        "No client weighs clearly more than an equal share with another; least c with a: λ 0.10, 0.3 times an equal "
        "share."
    )
    text = " ".join(said.sentences)
    assert "gives 60 % of λ to its own model; an equal share is 33 %" in text
    assert "Most weight goes to " in text
    assert "1 client of 3 has another first client" in text
    assert "clearest: a on class 1, where c weighs most (Λ 0.50, 1.5 times an equal share)" in text


def test_a_client_is_a_helper_only_clearly_above_an_equal_share() -> None:
    """A weight far below an equal share makes nobody else a helper."""
    third = [1 / 3] * 3

    def headline(first: list[float]) -> str:
        seen = {"influence_vector": {seed: [[first, third, third]] for seed in (0, 1)}}
        said = story(made_up(ABC, {0: [[1, 2, 3]], 1: [[1, 2, 3]]}, influence=seen))
        return " ".join([said.headline, *said.sentences[:1]])

    assert headline([0.2, 0.43, 0.37]).startswith(
        "b weighs most with a: λ 0.43, 1.3 times an equal share. b is first in 2 of 2 seeds. In the other direction, a "
        "has λ 0.33 at b."
    )
    assert headline([0.55, 0.35, 0.1]).startswith(
        "No client weighs clearly more than an equal share with another; least c"
    )
    assert headline([0.3, 0.34, 0.36]).startswith("Influence is close to equal")


@pytest.mark.parametrize(
    ("method", "row", "noted"),
    [
        (FedC2IPlus(), [0.496, 0.496, 0.008], True),
        (FedC2IPlus(), [0.48, 0.48, 0.04], False),
        (FedC2I(), [0.496, 0.496, 0.008], False),
    ],
)
def test_half_is_called_the_largest_weight_where_the_own_one_is_not_measured(
    method: Method, row: list[float], noted: bool
) -> None:
    seen = {"influence_vector": {seed: [[row, [1 / 3] * 3, [1 / 3] * 3]] for seed in (0, 1)}}
    said = story(made_up(ABC, {0: [[61, 62, 63]], 1: [[61, 62, 63]]}, influence=seen, method=method))
    assert said.headline == (
        f"b weighs most with a: λ {row[1]:.2f}{' (0.5 is the largest possible)' if noted else ''}, "
        f"{3 * row[1]:.1f} times an equal share."
    )
    assert (FedC2IPlus.influence_note in said.sentences) == noted


def test_half_of_two_clients_is_an_equal_share_and_no_ceiling() -> None:
    assert not at_ceiling(np.full((2, 2), 0.5), 0)
    assert at_ceiling(np.array([[0.5, 0.5, 0.0, NAN]] * 4), 0)
    assert not at_ceiling(np.array([[0.495, 0.499, 0.006]] * 3), 0)  # the own one is not by definition the same


@pytest.mark.parametrize(("share", "mentioned"), [(0.41, False), (0.42, True)])  # 1.25 times a third is 0.4167
def test_a_class_near_the_equal_share_is_no_finding(share: float, mentioned: bool) -> None:
    matrix = np.full((1, 3, 3, 3), 1 / 3)
    matrix[0, 0, :, 1] = [0.9 - share, 0.1, share]  # a's own weight is above an equal share in any case
    seen = {"influence_vector": {0: FIRST[:1]}, "influence_matrix": {0: matrix}}
    result = made_up(ABC, {0: [[1, 2, 3]]}, influence=seen)
    assert [one.label for one in client_influences(result)[0].exceptions] == [1] * mentioned
    assert ("clearest: a on class 1, where c weighs most" in " ".join(story(result).sentences)) == mentioned


def test_equal_influence_singles_nobody_out() -> None:
    rows = [[0.34, 0.33, 0.33], [0.34, 0.33, 0.33], [0.33, 0.33, 0.34]]  # a is ahead by a hair
    said = story(made_up(ABC, {0: [[1, 2, 3]]}, influence={"influence_vector": {0: [rows]}}))
    assert "no client is singled out" in said.headline
    assert "Most weight goes to" not in " ".join(said.sentences)


def test_a_method_without_influence_says_so() -> None:
    assert "measures no influence" in story(made_up(ABC, {0: [[1, 2, 3]]}, method=FedAvg())).headline


# Several runs, and what goes into the page.


def test_the_same_method_twice_is_told_apart_by_its_folder() -> None:
    found = distinct([influential()] * 3, [Path("a/x"), Path("b/y"), Path("b/y")])
    assert [one.label for one in found] == ["FedC²I [a/x]", "FedC²I [b/y]", "FedC²I [b/y]'"]
    assert [one.label for one in distinct(found[:1] * 2, [Path("a/x"), Path("b/y")])] == [
        "FedC²I [a/x] [x]",
        "FedC²I [a/x] [y]",
    ]
    assert len({row.cells[0] for row in score_table(found).rows if row.kind == "plain"}) == 3


def test_the_best_is_marked_among_the_rows_of_one_point() -> None:
    first = made_up(ABC, {0: [[50, 60, NAN]]}, lift=20)
    second = made_up(ABC, {0: [[55, 60, NAN]]}, method=FedAvg(), lift=1)
    rows = comparison_table([first, second]).rows[:-1]
    assert [(row.cells[0], row.cells[1].strip(" *")) for row in rows] == [
        (label, point) for label in ("FedC²I", "FedAvg") for point in ("before", "after")
    ]
    assert [set(row.best) for row in rows] == [
        {3},
        {2, 3, 5, 6},
        {2, 3, 5, 6},
        set(),
    ]  # a: 50, 70, 55, 56; b: 60, 80, 60, 61
    assert not any(row.best for row in score_table([first]).rows)


def test_other_rounds_are_in_title_and_tile() -> None:
    short = made_up(ABC, {0: [[1, 2, 3]] * 3})
    long = made_up(ABC, {0: [[1, 2, 3]] * 6}, method=FedAvg())
    assert score_table([long, short]).title == "Test accuracy (%) on toy, lenet5, 3 to 6 rounds, seed 0"
    assert score_table([long, long]).title == comparison_table([long]).title
    assert [(one.value, one.name) for one in key_numbers([long, short])][3] == ("3 to 6", "rounds")
    assert [(one.value, one.name) for one in key_numbers([long, long])][3] == ("6", "rounds")


def test_runs_on_other_terms_are_said_next_to_the_verdict() -> None:
    short = made_up(ABC, {0: [[61, 62, 63]] * 3})
    long = made_up(ABC, {0: [[61, 62, 63]] * 6}, method=FedAvg())
    assert warning_notes([long]) == warning_notes([long, long]) == ()
    both = verdict_text([long, short])
    assert both.warnings == ("Not on equal terms: rounds 6 (FedAvg), 3 (FedC²I).",)
    stopped = replace(short, config=long.config)
    assert warning_notes([long, stopped]) == ("Not on equal terms: rounds run 6 (FedAvg), 3 (FedC²I).",)


def test_attacks_and_uploads_left_out_are_said() -> None:
    honest = made_up(ABC, {0: [[61, 62, 63]] * 2})
    config = replace(honest.config, attack="sign-flip@a,c")
    rounds = [replace(report, refused=("a", "c")[: report.round]) for report in honest.rounds]
    attacked = replace(honest, label="other", config=config, rounds=rounds)
    said = ("Under attack: sign-flip@a,c; averages include the attackers.", "Rejected uploads: a 2, c 1.")
    assert verdict_text([attacked]).warnings == said
    assert warning_notes([honest, attacked]) == (
        "Not on equal terms: attack not set (FedC²I), sign-flip@a,c (other).",
        "Under attack: sign-flip@a,c (other); averages include the attackers.",
        "Rejected uploads of other: a 2, c 1.",
    )


def test_other_clients_are_refused() -> None:
    with pytest.raises(UserError, match="has other clients or classes"):
        distinct([influential(), made_up(blank_federation(("a", "b")), {0: [[1, 2]]})], [Path("x"), Path("y")])


def test_settings_that_differ_are_named() -> None:
    other = influential()
    other = replace(other, config=replace(other.config, epochs=5, device="auto"))
    assert settings_that_differ([influential(), other]) == [("epochs", ["2", "5"])]


def test_payload_holds_the_mean_and_every_seed() -> None:
    (run,) = chart_data([influential()])["runs"]
    assert [view["label"] for view in run["views"]] == ["mean over seeds 0, 1", "seed 0", "seed 1"]
    mixed, *single = (unpack(view["vector"]) for view in run["views"])
    assert np.allclose(single[0], FIRST, atol=1e-4, equal_nan=True)
    assert np.allclose(mixed[1, 0], [0.6, 0.3, 0.1], atol=1e-4)
    assert np.isnan(mixed[1, 2]).all()
    assert np.allclose(unpack(run["views"][0]["scores"]["trained"])[-1], [52, 62, 72], atol=1e-2)
    assert run["average"]["trained"] == {"mean": [62.0, 62.0], "sd": [1.414, 1.414]}


def test_of_very_many_rounds_and_clients_some_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every view holds the same rounds, the first and the last among them, and the page knows how many there were."""
    monkeypatch.setattr("fedc2i.report.html.chart_data.MOST_VALUES", 75)
    accuracy = {seed: np.arange(60.0).reshape(20, 3) + seed for seed in (0, 1)}
    (found,) = chart_data([made_up(ABC, accuracy)])["runs"]
    assert (found["rounds"], found["scored"]) == ([1, 7, 14, 20], 20)  # 72 = 2 points, 3 views, 3 clients, 4 rounds
    for view, shift in zip(found["views"], (0.5, 0, 1), strict=True):
        rows = np.array([[0, 1, 2], [18, 19, 20], [39, 40, 41], [57, 58, 59]]) + shift
        np.testing.assert_allclose(unpack(view["scores"]["received"]), rows, atol=1e-2)
    assert len(found["average"]["trained"]["mean"]) == 4


def test_influence_of_the_last_round_alone_is_labelled_so(monkeypatch: pytest.MonkeyPatch) -> None:
    result = influential()
    assert chart_data([result])["runs"][0]["influenceRounds"] == {"vector": [1, 2], "matrix": [1, 2]}
    for module in ("fedc2i.runs.results", "fedc2i.analysis.weights"):
        monkeypatch.setattr(f"{module}.LARGE", CLASSES[0].nbytes - 1)  # as for Λ of 650 clients; λ stays small
    result.rounds = [
        replace(one, influence={k: v for k, v in one.influence.items() if one.round == 2 or k == "influence_vector"})
        for one in result.rounds
    ]
    assert of_seeds(result, "influence_matrix").shape == (2, 1, 3, 3, 3)
    assert round_numbers(result, "influence_matrix") == [2]
    assert chart_data([result])["runs"][0]["influenceRounds"] == {"vector": [1, 2], "matrix": [2]}


def test_script_data_cannot_end_its_element() -> None:
    text = to_script({"name": "</script><script>alert(1)</script>&\u2028"})
    assert not set("<>&\u2028") & set(text)
