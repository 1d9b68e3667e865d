"""Many clients: the mass of a λ by hand, verdicts both ways, and the whole command."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from experiments.grid import Grid
from experiments.many import GAMMAS
from experiments.many_verdict import (
    CLIENTS,
    INFLUENCE,
    PARTICIPATION,
    SPLITS,
    TOLERANCE,
    Compared,
    Measured,
    Setting,
    verdict,
)
from studies import ask, namespace, read_csv

from experiments import many
from experiments import many_tables as tables
from fedc2i.analysis.weights import DomainShare, domain_of
from fedc2i.data.partition import partition
from fedc2i.engine.records import POINTS
from fedc2i.methods.fedavg import FedAvg
from fedc2i.methods.fedc2i import FedC2I
from fedc2i.methods.fedc2i_many import FedC2IMany
from fedc2i.methods.math.influence import Gamma
from fedc2i.report.table import WHEN
from support.benchmarks import runs_below, small_benchmarks
from support.helpers import DIGIT5, Answer, blank_federation, made_up

NAN = np.nan

# Domains.


@pytest.mark.parametrize(
    ("name", "domain"),
    [("SVHN/3", "SVHN"), ("MNIST-M/12", "MNIST-M"), ("SVHN", "SVHN"), ("a/b/2", "a/b"), ("a/b", "a/b"), ("/1", "/1")],
)
def test_domain_of_a_client(name: str, domain: str) -> None:
    assert domain_of(name) == domain


def test_parts_of_a_client_are_of_its_domain() -> None:
    whole = blank_federation(DIGIT5, classes=4)
    for spec in ("iid:2", "dirichlet:2:0.5"):
        names = partition(whole, spec, min_samples=1).names
        assert [domain_of(name) for name in names] == [name for name in DIGIT5 for _ in range(2)]
    assert [domain_of(name) for name in whole.names] == list(DIGIT5)


# The mass of a λ.

NAMES = ("a/1", "a/2", "b/1", "b/2")


def test_mass_by_hand() -> None:
    vectors = np.array(
        [
            [0.50, 0.25, 0.15, 0.10],  # 0.75 of it in its domain
            [0.10, 0.30, 0.30, 0.30],  # 0.40
            [0.00, 0.10, 0.60, 0.30],  # 0.90
            [0.25, 0.25, 0.30, 0.20],  # 0.50
        ]
    )
    mass = DomainShare.of(vectors, NAMES, gamma=5.0)
    assert (mass.domain, mass.itself, mass.peers) == pytest.approx((0.6375, 0.4, 0.2375))
    assert (mass.uniform, mass.uniform_itself, mass.gamma) == (0.5, 0.25, 5.0)
    assert (mass.times, mass.peers_times) == pytest.approx((1.275, 0.95))


def test_mass_with_clients_whose_own_model_was_too_old() -> None:
    """Only a/1 and b/2 have sent lately; a/2 measures all the same, and gives nothing to itself."""
    vectors = np.full((4, 4), NAN)
    vectors[:3, [0, 3]] = [[0.7, 0.3], [0.9, 0.1], [0.2, 0.8]]
    mass = DomainShare.of(vectors, ("a/1", "a/2", "b/1", "b/2"), strangers=True)
    assert mass.domain == pytest.approx((0.7 + 0.9 + 0.8) / 3)
    assert mass.itself == pytest.approx(0.7 / 3)
    assert (mass.uniform, mass.uniform_itself) == pytest.approx((0.5, 0.5 / 3))


def test_mass_is_of_the_clients_that_measured() -> None:
    vectors = np.array(
        [
            [0.60, 0.10, 0.30, NAN],  # b/2 has sent nothing yet: 0.7 of 2/3
            [NAN, NAN, NAN, NAN],  # not in the audience
            [0.10, 0.10, 0.80, NAN],  # alone of its domain: 0.8 of 1/3
            [1 / 3, 1 / 3, 1 / 3, NAN],  # its own model is not there: it takes the plain mean, unmeasured
        ]
    )
    mass = DomainShare.of(vectors, NAMES)
    assert (mass.domain, mass.itself, mass.peers) == pytest.approx((0.75, 0.7, 0.05))
    assert (mass.uniform, mass.uniform_itself) == pytest.approx((0.5, 1 / 3))
    assert np.isnan(mass.gamma)


def test_nothing_measured_is_not_a_number() -> None:
    mass = DomainShare.of(np.full((4, 4), NAN), NAMES)
    assert np.isnan([mass.domain, mass.times, mass.peers, mass.peers_times]).all()


def test_domains_of_one_client_have_no_peers() -> None:
    mass = DomainShare.of(np.array([[0.8, 0.2], [0.4, 0.6]]), ("a/1", "b/1"))
    assert (mass.domain, mass.peers, mass.times) == pytest.approx((0.7, 0, 1.4))
    assert np.isnan(mass.peers_times)


def test_results_are_measured_after_the_last_round() -> None:
    federation = blank_federation(NAMES)
    uniform, own = np.full((4, 4), 0.25), np.eye(4)
    vectors = {0: [own, uniform], 1: [uniform, own]}
    gammas = {0: [[1, 1, 1, 1], [2, 4, NAN, NAN]], 1: [[1, 1, 1, 1], [NAN] * 4]}
    accuracy = {0: [[10, 20, 30, 40], [50, 60, 70, 80]], 1: [[0, 0, 0, 0], [20, 30, 40, 50]]}
    seen: dict[str, Any] = {"influence_vector": vectors, "gamma": gammas}
    row = Measured.of(made_up(federation, accuracy, method=FedC2I(gamma=Gamma("perplexity(2)")), influence=seen))
    assert row.share().tolist() == [0.5, 1.0]
    assert row.share("itself").tolist() == [0.25, 1.0]
    assert row.share("gamma").tolist() == [3.0, pytest.approx(NAN, nan_ok=True)]
    assert row.accuracy["received"]["Avg"].tolist() == [65, 35]
    fixed = Measured.of(made_up(federation, {0: [[1, 2, 3, 4]]}, influence={"influence_vector": {0: [own]}}))
    assert fixed.share("gamma").tolist() == [5.0]
    assert np.isnan(Measured.of(made_up(federation, {0: [[1, 2, 3, 4]]})).share()).all()  # nothing was ever measured
    fedavg = Measured.of(made_up(federation, accuracy, method=FedAvg()))
    assert fedavg.shares == ()
    assert row.minus(fedavg, "trained").mean == 0


# Verdicts.

SETTINGS = [Setting(*parts) for parts in itertools.product((10, CLIENTS), SPLITS, PARTICIPATION)]
M100 = [setting for setting in SETTINGS if setting.clients == CLIENTS]


def measured(label: str, level: float, share: float | None = None, seeds: int = 3) -> Measured:
    """Accuracy ``level`` with every seed at both points, and that share of λ in a domain of a fifth of the clients."""
    accuracy = {point: {"Avg": np.full(seeds, 1.0), "Avg-4": np.full(seeds, level)} for point in POINTS}
    masses = () if share is None else (DomainShare(share, 0.1, 0.2, 0.05, 5.0),) * seeds
    return Measured(label, accuracy, masses)


def found(**rows: tuple[float, float]) -> dict[Setting, Compared]:
    """Every setting alike: FedAvg at 70, the rows by γ with (accuracy, share); by first-order 0.01 more."""
    given = {"fixed": (70.0, 0.2), "scaled": (70.0, 0.2), "ramp": (70.0, 0.2), "perplexity": (70.0, 0.2), **rows}
    cells = {
        (name, form): measured(f"{name} {form}", level, share + 0.01 * (form != "exact"))
        for name, (level, share) in given.items()
        for form in INFLUENCE
    }
    return {setting: Compared(measured("FedAvg", 70), cells) for setting in SETTINGS}


def changed(
    all_of: dict[Setting, Compared], setting: Setting, key: tuple[str, str], row: Measured
) -> dict[Setting, Compared]:
    return {**all_of, setting: Compared(all_of[setting].fedavg, {**all_of[setting].rows, key: row})}


def test_met_and_who_met_it_is_said() -> None:
    said = verdict(found(perplexity=(70, 0.4), fixed=(99, 0.9)))  # equal is not below, and a fixed γ is no candidate
    assert said.targets == {"many clients": True, "first-order": True}
    for name, count in (("scaled", 0), ("ramp", 0), ("perplexity", 4)):
        for form in INFLUENCE:
            start = f"{name} {form} at M = 100, of 4 settings: 2 times the uniform share in {count}, not below FedAvg"
            assert sum(sentence.startswith(start) for sentence in said.sentences) == 1
    assert said.sentences[-2].endswith("at either point: met (perplexity exact, perplexity first-order).")
    assert "met (32 of 32 pairs; the furthest is +1.00 points, γ fixed, M = 50" in said.sentences[-1]


def test_missed_by_domain_share_is_said_as_plainly() -> None:
    said = verdict(found(scaled=(90, 0.389)))
    assert not said.targets["many clients"]
    text = "\n".join(said.sentences)
    assert "not below FedAvg at either point: missed.\n" in text
    assert "met it in" not in text
    assert "scaled exact at M = 100, of 4 settings: 2 times the uniform share in 0, not below FedAvg before" in text


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("point", POINTS)
def test_accuracy_counts_at_both_points_in_every_setting_of_a_hundred(setting: Setting, point: Any) -> None:
    rows = found(ramp=(75, 0.5))
    below = measured("ramp exact", 75, 0.5)
    below.accuracy[point]["Avg-4"][:] = [69, 70, 70]
    rows = changed(rows, setting, ("ramp", "exact"), below)
    decides = setting in M100
    text = "\n".join(verdict(rows).sentences)
    assert verdict(rows).targets["many clients"]  # the other form still meets it
    assert f"met ({'' if decides else 'ramp exact, '}ramp first-order)." in text
    assert (f"not below FedAvg {WHEN[point]} in 3" in text) is decides


def test_one_gamma_must_do_in_all_settings() -> None:
    rows = found(scaled=(75, 0.5))
    for form in INFLUENCE:
        rows = changed(rows, M100[0], ("scaled", form), measured(f"scaled {form}", 75, 0.3))
        rows = changed(rows, M100[0], ("ramp", form), measured(f"ramp {form}", 75, 0.5))
    said = verdict(rows)
    assert not said.targets["many clients"]
    others = "; ".join(str(setting) for setting in M100[1:])
    assert (
        f"at either point: missed (scaled exact met it in {others}, scaled first-order met it in {others}, "
        f"ramp exact met it in {M100[0]}, ramp first-order met it in {M100[0]})." in "\n".join(said.sentences)
    )


def test_first_order_beyond_the_tolerance() -> None:
    far = measured("ramp first-order", 70, 0.2 - TOLERANCE - 0.001)
    said = verdict(changed(found(), SETTINGS[1], ("ramp", "first-order"), far))
    assert said.targets["first-order"] is False
    assert said.sentences[-1].endswith(
        "missed (31 of 32 pairs; the furthest is -2.10 points, γ ramp, M = 50, even, 20%)."
    )
    for share, met in ((0.2 + TOLERANCE, True), (NAN, False)):
        edge = verdict(changed(found(), SETTINGS[1], ("ramp", "first-order"), measured("edge", 70, share)))
        assert edge.targets["first-order"] is met
    assert edge.sentences[-1].endswith(
        "missed (31 of 32 pairs; the furthest is +nan points, γ ramp, M = 50, even, 20%)."
    )


def test_not_a_number_meets_nothing() -> None:
    said = verdict(found(scaled=(NAN, 0.5), ramp=(80, NAN)))
    assert said.targets == {"many clients": False, "first-order": False}


def test_without_an_adaptive_gamma_nothing_is_missed() -> None:
    fixed = {
        setting: Compared(own.fedavg, {("fixed", "exact"): own.rows["fixed", "exact"]})
        for setting, own in found().items()
    }
    assert verdict(fixed).targets == {"many clients": False}
    assert verdict(fixed).sentences[0].endswith("at either point: no adaptive γ was run.")


def test_a_part_is_called_a_part() -> None:
    rows = found(scaled=(75, 0.5))
    said = verdict({setting: rows[setting] for setting in M100[:3]}, ["A trial."])
    assert said.sentences[:2] == (
        "A trial.",
        "A part of the study, judged at M = 100; the target also needs M = 100, skewed, 20%.",
    )
    assert ": met as far as it was run (scaled exact, scaled first-order)." in "\n".join(said.sentences)
    assert not said.targets["many clients"]
    said = verdict({SETTINGS[0]: Compared(rows[M100[0]].fedavg, {("scaled", "exact"): measured("scaled", 75, 0.5)})})
    assert said.sentences[0].startswith(
        "A part of the study, judged at M = 50; the target also needs M = 100, even, 100%"
    )
    assert "scaled at M = 50, of 1 setting: 2 times the uniform share in 1" in said.sentences[1]
    assert said.targets == {"many clients": False}
    assert said.sentences[-1] == "First-order and exact influence were not both run: nothing to compare."


# Tables.


def test_bold_is_what_keeps_twice_the_share() -> None:
    rows = tables.domain_share(found(scaled=(70, 0.4)), []).rows
    assert [row.cells[1] for row in rows[:8] if row.best] == ["scaled exact", "scaled first-order"]
    assert rows[2].cells == (
        *("M = 50, even, 100%", "scaled exact", "40.00 ± 0.00", "2.00 ± 0.00"),
        *("30.00 ± 0.00", "2.00 ± 0.00", "20.00 ± 0.00", "5.00 ± 0.00"),
    )
    assert [row.ends_section for row in rows[:8]] == [False] * 7 + [True]


def test_accuracy_beside_fedavg() -> None:
    fedavg, fixed = tables.accuracy(found(fixed=(71.5, 0.2)), []).rows[:2]
    assert fedavg.cells[1:] == ("FedAvg", *["1.00 ± 0.00", "70.00 ± 0.00", "", "", ""] * 2)
    assert fixed.cells[1:] == ("fixed exact", *["1.00 ± 0.00", "71.50 ± 0.00", "+1.50", "0.00", "3 / 0 / 0"] * 2)


def test_first_order_beside_exact() -> None:
    rows = changed(found(), SETTINGS[0], ("ramp", "first-order"), measured("far", 69, 0.25))
    lines = tables.first_order(rows, []).rows
    assert lines[0].cells[2:] == ("20.00 ± 0.00", "21.00 ± 0.00", "+1.00", "yes", "+0.00", "0.00", "+0.00", "0.00")
    assert lines[2].cells[1:6] == ("ramp exact", "20.00 ± 0.00", "25.00 ± 0.00", "+5.00", "no")
    assert lines[2].cells[6:] == ("-1.00", "0.00", "-1.00", "0.00")


# The command.

TRIAL = "trial-2-rounds"
FILES = [f"many-{name}.{end}" for name in ("domain-share", "accuracy", "first-order") for end in ("md", "csv", "tex")]
ROWS = ["FedC²I", "FedC²I (influence=first-order)", "FedC²I (gamma=perplexity(2))"]
ROWS += ["FedC²I (gamma=perplexity(2), influence=first-order)"]
CUT = ("--clients", "2", "--splits", "skewed", "--gammas", "fixed", "perplexity")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("benchmarks")
    with small_benchmarks(folder):
        yield folder


def study(data: Path, out: Path, *more: str) -> Answer:
    fixed = ("--rounds", "2", "--device", "cpu", "--seeds", "0,1", "--data-dir", str(data), "--out", str(out))
    return ask(many.main, *fixed, *more)


@pytest.fixture(scope="module")
def finished(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Answer]:
    """The whole command on ten clients; tests only read it, or ask for what is there already."""
    out = tmp_path_factory.mktemp("study") / "results"
    return out, study(data, out, *CUT)


def test_everything_is_written_and_said(finished: tuple[Path, Answer]) -> None:
    out, answer = finished
    assert answer.code == 0, answer.err
    files, _, rest = answer.out.partition("\n\n")
    said = rest.splitlines()
    assert files.splitlines() == [str(out / TRIAL / name) for name in FILES]
    assert {path.name for path in (out / TRIAL).iterdir()} == set(FILES)
    assert said[0] == "A trial on digit5 with 2 rounds, not the protocol's 20: it proves nothing."
    assert "judged at M = 10;" in said[1]
    text = (out / TRIAL / "many-accuracy.md").read_text(encoding="utf-8")
    assert text.endswith("".join(f"- {sentence}\n" for sentence in said))
    assert all((out / TRIAL / name).read_text().count("A trial on digit5") == 1 for name in FILES if ".md" in name)
    lines = answer.err.splitlines()
    assert lines[0].endswith("; 20 runs to compute")
    assert [line for line in lines if line.startswith("M =")] == [f"M = 10, skewed, {share}" for share in PARTICIPATION]
    assert len(runs_below(out)) == 20
    assert not list(out.rglob("*.safetensors"))  # a hundred models for every run would fill the disk


def test_domain_share_is_that_of_the_runs(finished: tuple[Path, Answer]) -> None:
    out = finished[0]
    rows = read_csv(out / TRIAL / "many-domain-share.csv")
    assert [row["Method"] for row in rows] == ROWS * 2
    for number, share in ((0, "100%"), (4, "20%")):
        masses = []
        for file in out.glob("runs/digit5-fedc2i-seed?-*/config.toml"):
            text = file.read_text(encoding="utf-8")
            if 'partition = "dirichlet:2:0.5"' in text and f'clients_per_round = "{share}"' in text:
                with np.load(file.with_name("influence.npz")) as stored:
                    (name,) = [name for name in stored.files if name.endswith("_influence_vector")]
                    vectors, names = stored[name][-1], list(stored["clients"])
                own = [m for m in range(10) if np.isfinite(vectors[m, m])]
                assert (len(own) == 10) is (share == "100%")  # else some have not trained yet
                inside = [[i for i in range(10) if names[i].split("/")[0] == names[m].split("/")[0]] for m in own]
                masses.append(100 * np.mean([np.nansum(vectors[m, at]) for m, at in zip(own, inside, strict=True)]))
        assert len(masses) == 2
        assert float(rows[number]["in the domain (%)"]) == pytest.approx(np.mean(masses), abs=0.0051)
    full, some = rows[2], rows[6]
    assert full["Setting"] == "M = 10, skewed, 100%"
    assert full["uniform (%)"] == "20.00"
    assert float(full["in the domain (%)"]) > float(full["on peers (%)"]) >= 0
    assert some["Setting"] == "M = 10, skewed, 20%"
    assert float(some["uniform (%)"]) > 20  # of fewer models, its own always among them


def test_only_what_is_missing_is_computed(finished: tuple[Path, Answer], data: Path) -> None:
    out, _ = finished
    for seeds, gammas, left in (("0-2", ["fixed", "perplexity"], 10), ("0,1", ["fixed", "perplexity", "ramp"], 4)):
        given = namespace(data, out, seeds)
        vars(given).update(rounds="2", clients=[2], splits=["skewed"], participation=PARTICIPATION)
        vars(given).update(gammas=gammas, influence=INFLUENCE)
        grid = Grid(given)
        plans = [plan for own in many.plans(grid, given).values() for plan in own.values()]
        missing = grid.missing(plans)
        assert len(missing) == left
        assert {plan.config.seeds for plan in missing} == ({(2,)} if seeds == "0-2" else {(0, 1)})


def test_all_runs_are_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str, list[Any]]] = []

    class Remembering:
        def plan(self, data: str, methods: list[Any], partition: str, clients_per_round: str) -> list[Any]:
            asked.append((partition, clients_per_round, methods))
            return methods

    monkeypatch.setattr(many, "launch", lambda run, options, typed: options.parse_args(typed))
    many.plans(Remembering(), many.main([]))  # type: ignore[arg-type]
    splits = ["iid:10", "dirichlet:10:0.5", "iid:20", "dirichlet:20:0.5"]
    assert [(name, share) for name, share, _ in asked] == [(name, share) for name in splits for share in PARTICIPATION]
    gammas = [5.0, "scaled(5)", "ramp(10)", "perplexity(20)"]
    rows = [FedC2I(gamma=g, influence=form) for g in gammas for form in INFLUENCE]  # type: ignore[arg-type]
    assert asked[-1][2] == [FedAvg(), *rows, *(FedC2IMany(influence=form) for form in INFLUENCE)]  # type: ignore[arg-type]
    assert len(GAMMAS) == len(gammas)


# Mistakes.


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--clients", "16"), "use a smaller K"),
        (("--splits", "odd"), "invalid choice: 'odd'"),
        (("--participation", "101%"), "clients_per_round"),
        (("--gammas", "5"), "invalid choice"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_mistakes_are_found_before_anything_is_written(
    data: Path, tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    answer = ask(many.main, "--out", str(tmp_path / "results"), *CUT, "--data-dir", str(data), *arguments)
    assert (answer.code, answer.out) == (2, "")
    assert said in answer.err
    assert not (tmp_path / "results").exists()
