"""The paper's tables over several data sets by hand: cost, ablation, and the γ that validation chooses."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import replace

from fedc2i.data.federation import Federation
from fedc2i.engine.records import POINTS
from fedc2i.methods.local import Local
from fedc2i.report.reproduction import (
    PUBLISHED_NOTE,
    averages_table,
    cost_table,
    gamma_table,
)
from fedc2i.report.table import Table
from fedc2i.runs.results import Result
from support.helpers import DIGIT5, blank_federation, made_up

AB = blank_federation(("a", "b"))


OFFICE = ("Amazon", "Caltech", "DSLR", "WebCam")


WITH_STAND_IN = blank_federation(DIGIT5, name="digit5", averages={"Avg-4": ("MNIST", "SVHN", "USPS", "MNIST-M")})


OFFICE10 = blank_federation(OFFICE, name="office10")


HALF = 0.5**0.5  # two seeds this far from their mean have a sample deviation of 1


def around(means: Sequence[float], sd: float = 1.0) -> dict[int, list[list[float]]]:
    """Two seeds with these means, and this sample deviation for every client."""
    return {seed: [[mean + sign * sd * HALF for mean in means]] for seed, sign in ((0, -1), (1, 1))}


def by_seed(*averages: float, federation: Federation = AB, key: str = "fedc2i", lift: float = 0.0) -> Result:
    accuracy = {seed: [[mean] * len(federation.names)] for seed, mean in enumerate(averages)}
    return made_up(federation, accuracy, key=key, lift=lift)


def test_cost_is_what_the_rounds_measured() -> None:
    first, second = (made_up(AB, {seed: [[1, 2]] * 2 for seed in (0, 1)}, key=key) for key in ("fedc2i", "fedc2i:x"))
    second.rounds = [
        replace(report, seconds=number, bytes_up=1234, bytes_down=56789)
        for number, report in enumerate(second.rounds, 1)
    ]
    table = cost_table([first, second])
    assert table.title == "Cost on toy, lenet5, 2 clients"
    assert table.header == ("Method", "Device", "up (kB)", "down (kB)", "seconds a round")
    assert [row.cells for row in table.rows] == [
        ("FedC²I", "cpu", "0.0", "0.0", "0.500"),
        ("FedC²I:x", "cpu", "1.2", "56.8", "2.500"),
    ]
    header, *rows = csv.reader(io.StringIO(table.to_csv()))
    assert tuple(header) == table.header
    assert [float(cell) for cell in rows[1][2:]] == [1.2, 56.8, 2.5]


def test_ablation_has_the_averages_of_both_data_sets() -> None:
    digits = [
        made_up(WITH_STAND_IN, around((90, 90, 90, 40, 90)), method=Local(), lift=1),
        made_up(WITH_STAND_IN, around((80, 80, 80, 80, 80)), key="fedc2i-client", lift=1),
    ]
    office = [
        made_up(OFFICE10, around((60, 62, 64, 66)), method=Local(), lift=2),
        made_up(OFFICE10, around((70, 70, 70, 70)), key="fedc2i-client", lift=2),
    ]
    table = averages_table("Ablation: λ and Λ", [digits, office])
    assert table.title == "Ablation: λ and Λ; 2 seeds, mean ± sample sd"
    assert table.header == (
        *("Method", "Local training", "digit5 Avg", "digit5 Avg-4", "digit5 published Avg", "difference"),
        *("office10 Avg", "office10 published Avg", "difference"),
    )
    assert [row.cells for row in table.rows] == [
        ("Local", "before", "80.00 ± 1.00", "90.00 ± 1.00", "", "", "63.00 ± 1.00", "", "+3.8 sd"),
        (
            *("Local", "after *", "81.00 ± 1.00", "91.00 ± 1.00", "79.81 ± 0.60", ""),
            *("65.00 ± 1.00", "60.32 ± 0.09", "+6.6 sd"),
        ),
        ("FedC²I-client", "before", "80.00 ± 1.00", "80.00 ± 1.00", "", "", "70.00 ± 1.00", "", "+3.2 sd"),
        (
            *("FedC²I-client", "after *", "81.00 ± 1.00", "81.00 ± 1.00", "84.61 ± 0.24", ""),
            *("72.00 ± 1.00", "63.07 ± 2.85", "+4.2 sd"),
        ),
    ]
    assert [row.ends_section for row in table.rows] == [False, True, False, True]
    assert [set(row.best) for row in table.rows] == [{2, 3}, {2, 3}, {2, 6}, {2, 6}]
    assert PUBLISHED_NOTE in table.notes


def test_ablation_marks_ties() -> None:
    results = [by_seed(80, 82, 84, key="best"), by_seed(79, 83, 81, key="mixed"), by_seed(79, 81, 83, key="below")]
    table = averages_table("Ablation", [results])
    marked = {row.cells[:2] for row in table.rows if row.cells[2].endswith("~")}
    assert marked == {("mixed", "before"), ("mixed", "after *")}


def of_gamma(
    gamma: float,
    test: Sequence[float],
    validation: Mapping[str, Sequence[float | None]],
    federation: Federation = AB,
) -> Result:
    """A result of one seed with validation accuracies by point; None: the client has no validation data."""
    result = made_up(federation, {0: [test]}, key=f"fedc2i:gamma={gamma}", lift=0)
    result.config = replace(result.config, options={"gamma": gamma})
    for point, metrics in result.rounds[-1].metrics.items():
        for own, value in zip(metrics, validation[point], strict=True):
            own.update({} if value is None else {"validation_accuracy": value})  # type: ignore[attr-defined]
    return result


def chosen(table: Table) -> dict[str, list[str]]:
    """By point, the γ with marked cells of each data set, in the order of the columns."""
    found: dict[str, list[str]] = {"before": [], "after": []}
    starts = [k for k, name in enumerate(table.header) if name.endswith("validation")]
    for start in starts:
        for row in table.rows:
            if start in row.best:
                found[row.cells[1].removesuffix(" *")].append(row.cells[0])
    return found


def both(*values: float | None) -> dict[str, Sequence[float | None]]:
    return dict.fromkeys(POINTS, values)


def test_gamma_is_chosen_by_validation_where_test_would_choose_another() -> None:
    table = gamma_table(
        [
            [
                of_gamma(0.5, (99, 99), both(70, 70)),
                of_gamma(5.0, (50, 50), both(80, 80)),
                of_gamma(10.0, (60, 60), both(75, 75)),
            ]
        ]
    )
    assert table.header == ("γ", "Local training", "toy validation", "toy Avg", "toy published Avg", "difference")
    assert [row.cells[:4] for row in table.rows] == [
        ("0.5", "before", "70.00", "99.00"),
        ("0.5", "after *", "70.00", "99.00"),
        ("5", "before", "80.00", "50.00"),
        ("5", "after *", "80.00", "50.00"),
        ("10", "before", "75.00", "60.00"),
        ("10", "after *", "75.00", "60.00"),
    ]
    assert [set(row.best) for row in table.rows] == [set(), set(), {2, 3}, {2, 3}, set(), set()]
    assert "validation accuracy chooses" in table.bold


def test_gamma_is_chosen_at_each_point_and_on_each_data_set() -> None:
    digits = [
        of_gamma(1.0, [50] * 5, {"received": [80] * 5, "trained": [70] * 5}, WITH_STAND_IN),
        of_gamma(2.0, [50] * 5, {"received": [70] * 5, "trained": [80] * 5}, WITH_STAND_IN),
    ]
    office = [of_gamma(1.0, [50] * 4, both(*[60] * 4), OFFICE10), of_gamma(2.0, [50] * 4, both(*[61] * 4), OFFICE10)]
    table = gamma_table([digits, office])
    assert table.header[2:] == (
        *("digit5 validation", "digit5 Avg", "digit5 Avg-4", "digit5 published Avg", "difference"),
        *("office10 validation", "office10 Avg", "office10 published Avg", "difference"),
    )
    assert chosen(table) == {"before": ["1", "2"], "after": ["2", "2"]}
    assert [set(row.best) for row in table.rows] == [{2, 3, 4}, set(), {7, 8}, {2, 3, 4, 7, 8}]
    published = [(row.cells[5], row.cells[9]) for row in table.rows]
    assert published == [("", ""), ("85.08 ± 0.60", "64.20 ± 1.12"), ("", ""), ("85.48 ± 0.27", "64.25 ± 2.11")]


def test_clients_without_validation_are_left_out_of_its_mean() -> None:
    table = gamma_table([[of_gamma(1.0, (50, 50), both(90, None)), of_gamma(2.0, (50, 50), both(80, None))]])
    assert [row.cells[2] for row in table.rows] == ["90.00", "90.00", "80.00", "80.00"]
    assert chosen(table) == {"before": ["1"], "after": ["1"]}


def test_validation_is_averaged_within_a_seed_first() -> None:
    result = made_up(AB, {0: [[50, 50]], 1: [[50, 50]]}, lift=0)
    result.config = replace(result.config, options={"gamma": 5.0})
    for report, values in zip(result.rounds, ((60, 80), (70, 72)), strict=True):
        for metrics in report.metrics.values():
            for own, value in zip(metrics, values, strict=True):
                own["validation_accuracy"] = value  # type: ignore[index]
    (row, _) = gamma_table([[result]]).rows
    assert row.cells[2] == "70.50 ± 0.71"
