"""ε against closed forms, where it is shown, and the document of what is revealed."""

from __future__ import annotations

import json
import math
import re
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from scipy.optimize import brentq
from scipy.stats import norm

import fedc2i
from fedc2i.core.errors import UserError
from fedc2i.core.params import Params
from fedc2i.core.settings import EngineSettings
from fedc2i.data.federation import Federation
from fedc2i.engine.accountant import ORDERS, composed, cost, epsilon, noise_for
from fedc2i.engine.clip_noise import check
from fedc2i.engine.exchange import choose
from fedc2i.methods.base import Method
from fedc2i.models.model import Model
from fedc2i.report.comparison import comparison_table, privacy_costs
from fedc2i.runs.results import summary
from fedc2i.runs.settings import RunSettings
from support.helpers import call
from support.method_checks import upload

DELTA = 1e-5
DOCUMENT = (Path(__file__).parents[2] / "docs" / "privacy.md").read_text(encoding="utf-8")


def exact(noise: float, uploads: int, delta: float) -> float:
    """The analytic Gaussian mechanism (Balle and Wang 2018): sensitivity 2, uploads as one of noise/√uploads."""
    ratio = 2 * math.sqrt(uploads) / noise

    def excess(eps: float) -> float:
        tail = math.exp(eps + norm.logcdf(-ratio / 2 - eps / ratio))
        return float(norm.cdf(ratio / 2 - eps / ratio) - tail - delta)

    return float(brentq(excess, 0.0, 10 * ratio**2 + 100 * ratio + 1))


def test_the_closed_form_is_the_known_one() -> None:
    assert exact(2.0, 1, DELTA) == pytest.approx(4.3772, abs=1e-4)  # multiplier 1, δ = 1e-5
    bound = norm.cdf(0.5 - 4.3772) - math.exp(4.3772) * norm.cdf(-0.5 - 4.3772)
    assert bound == pytest.approx(DELTA, rel=1e-3)


@pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-9])
@pytest.mark.parametrize(("noise", "uploads"), [(0.5, 1), (2.0, 1), (1.0, 20), (10.0, 20), (60.0, 300), (500.0, 5)])
def test_epsilon_lies_between_the_exact_one_and_the_bound_of_zcdp(noise: float, uploads: int, delta: float) -> None:
    rho = uploads * 4 / (2 * noise**2)  # Bun and Steinke 2016
    found = epsilon(noise, uploads, delta)
    assert exact(noise, uploads, delta) <= found <= rho + 2 * math.sqrt(rho * math.log(1 / delta))
    assert found <= 1.25 * exact(noise, uploads, delta) + 0.05


def test_one_upload_of_multiplier_one() -> None:
    assert epsilon(2.0, 1) == pytest.approx(4.7, abs=0.1)  # exactly 4.38; Rényi orders lose a little


def test_epsilon_at_the_ends() -> None:
    assert epsilon(0.0, 3) == math.inf
    assert epsilon(0.0, 0) == epsilon(1.0, 0) == 0.0
    assert epsilon(1.0, 20) < epsilon(1.0, 21)
    assert epsilon(1.1, 20) < epsilon(1.0, 20)
    assert epsilon(1e300, 1) <= epsilon(1e6, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert epsilon(1e-300, 1) == math.inf


@pytest.mark.parametrize("target", [0.1, 1.0, 8.0, 500.0])
def test_the_noise_for_a_target_reaches_it_and_no_less_does(target: float) -> None:
    sigma = noise_for(target, 20)
    assert epsilon(sigma, 20) <= target < epsilon(sigma * 0.9999, 20)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda: epsilon(-1.0, 1), "noise"),
        (lambda: epsilon(math.nan, 1), "noise"),
        (lambda: epsilon(1.0, -1), "rounds"),
        (lambda: epsilon(1.0, 1, 0.0), "delta"),
        (lambda: epsilon(1.0, 1, 1.0), "delta"),
        (lambda: noise_for(0.0, 1), "target"),
        (lambda: noise_for(1.0, 0), "at least 1"),
        (lambda: noise_for(1e-12, 10**9), "no noise"),
        (lambda: RunSettings(delta=0.0), "delta"),
    ],
)
def test_values_out_of_range_are_refused(wrong: Callable[[], object], says: str) -> None:
    with pytest.raises(UserError, match=says):
        wrong()


@pytest.mark.slow  # importing Opacus takes seconds
@pytest.mark.parametrize(("noise", "uploads"), [(0.01, 1), (0.5, 3), (2.0, 1), (5.7, 20), (80.0, 1000), (1e4, 7)])
def test_epsilon_is_that_of_opacus(noise: float, uploads: int) -> None:
    rdp = pytest.importorskip("opacus.accountants.analysis.rdp")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        spent = rdp.compute_rdp(q=1.0, noise_multiplier=noise / 2, steps=uploads, orders=ORDERS)
        want, _ = rdp.get_privacy_spent(orders=ORDERS, rdp=spent, delta=DELTA)
    assert epsilon(noise, uploads) == pytest.approx(max(0.0, want), rel=1e-9, abs=1e-12)


def test_uploads_of_different_noise_add_up() -> None:
    assert composed([]) == 0.0
    assert composed([2.0] * 20) == pytest.approx(epsilon(2.0, 20), rel=1e-9)
    assert composed([2.0, 4.0, 4.0, 4.0, 4.0]) == pytest.approx(epsilon(2.0, 2), rel=1e-9)  # 1/4 = 4 · 1/16
    assert composed([2.0, 0.0]) == composed([1e-300]) == math.inf


# A run's cost.


def test_the_cost_counts_the_uploads_of_who_takes_part_most(model: Model, federation: Federation) -> None:
    settings = {"rounds": 7, "clients_per_round": 1, "seeds": (0, 5), "evaluate_every": 0, "epochs": 1}
    result = fedc2i.run("fedavg", federation, model=model, clip=0.5, noise=2.0, delta=1e-4, device="cpu", **settings)
    turns = [
        sum(name in report.participants for report in result.rounds if report.seed == seed)
        for seed in (0, 5)
        for name in federation.names
    ]
    spent = result.privacy
    assert spent is not None
    assert 7 / 3 < spent.uploads == max(turns) < 7
    assert spent.epsilon == epsilon(2.0, max(turns), 1e-4)
    assert summary(result)["privacy"] == {
        "clip": 0.5,
        "noise": 2.0,
        "delta": 1e-4,
        "uploads": max(turns),
        "epsilon": spent.epsilon,
        "seeds": 1,
        "adjacency": "all samples of one client, by as many others",
    }
    assert spent == cost(result.config, 3)
    assert any(f"ε = {spent.epsilon:.2f} at δ = 0.0001" in note for note in comparison_table([result]).notes)


def test_the_cost_is_that_of_the_seed_that_costs_most() -> None:
    config = RunSettings(method="fedavg", rounds=7, clients_per_round=1, clip=1.0, noise=2.0)
    drawn = {seed: [choose(seed, config, 3, number)[0] for number in range(1, 8)] for seed in range(9)}
    most = {seed: max(Counter(own).values()) for seed, own in drawn.items()}
    low, *_, high = sorted(most, key=lambda seed: most[seed])
    assert most[low] < most[high]
    for seeds in ((high, low), (low, high)):
        spent = cost(replace(config, seeds=seeds), 3)
        assert spent is not None
        assert spent.uploads == most[high]


def test_at_real_sites_the_uploads_of_all_seeds_add_up() -> None:
    config = RunSettings(method="fedavg", rounds=20, clip=1.0, noise=5.70334, seeds=(0, 1, 2))
    one, all_three = cost(config, 3), cost(config, 3, released=True)
    assert one is not None
    assert all_three is not None
    assert (one.uploads, round(one.epsilon, 2)) == (20, 8.0)
    assert (all_three.uploads, round(all_three.epsilon, 2)) == (60, 15.69)
    assert "ε = 15.69" in str(all_three)
    assert "over up to 60 uploads of the runs of 3 seeds together" in str(all_three)
    few = replace(config, clients_per_round=1, rounds=7)
    drawn = Counter(choose(seed, few, 3, number)[0] for seed in few.seeds for number in range(1, 8))
    spent = cost(few, 3, released=True)
    assert spent is not None
    assert spent.uploads == max(drawn.values())


@pytest.mark.parametrize(
    ("asked", "uploads"),
    [({}, 4), ({0: {2: 3}}, 6), ({1: {2: 3}}, 6), ({0: {2: 3}, 1: {1: 2, 4: 3}}, 7), ({2: {1: 9}}, 4)],
)
def test_what_was_asked_again_counts_for_its_own_seed(asked: Mapping[int, Mapping[int, int]], uploads: int) -> None:
    spent = cost(RunSettings(method="fedavg", rounds=4, clip=1.0, noise=2.0, seeds=(0, 1)), 3, asked=asked)
    assert spent is not None
    assert (spent.uploads, spent.epsilon) == (uploads, epsilon(2.0, uploads))


def test_without_noise_or_uploads_the_cost_says_so(model: Model, federation: Federation) -> None:
    quick = {"rounds": 1, "epochs": 1, "device": "cpu"}
    assert fedc2i.run("fedavg", federation, model=model, **quick).privacy is None
    clipped = fedc2i.run("fedavg", federation, model=model, clip=1.0, **quick)
    assert summary(clipped)["privacy"]["epsilon"] is None
    assert "no guarantee" in str(clipped.privacy)
    alone = fedc2i.run("local", federation, model=model, clip=1.0, noise=1.0, **quick)
    assert summary(alone)["privacy"]["epsilon"] == 0.0
    notes = privacy_costs([clipped, alone])
    assert [note.split(":")[0] for note in notes] == ["Privacy of FedAvg", "Privacy of Local"]


# On the command line.


def test_the_command_prints_epsilon() -> None:
    answer = call("privacy", "--noise", "10", "--rounds", "20")
    assert answer.code == 0
    assert answer.out == f"noise 10, 20 uploads of a client, δ = 1e-05: ε = {epsilon(10.0, 20):.4g}\n"
    said = json.loads(call("privacy", "--noise", "10", "--rounds", "20", "--delta", "1e-6", "--json").out)
    assert said == {"noise": 10.0, "rounds": 20, "delta": 1e-6, "epsilon": epsilon(10.0, 20, 1e-6)}


def test_the_noise_it_prints_keeps_to_the_target() -> None:
    answer = call("privacy", "--target-epsilon", "8", "--rounds", "20")
    shown = re.match(r"noise (\S+), 20 uploads of a client, δ = 1e-05: ε = 8\n", answer.out)
    assert shown is not None
    assert 7.99 < epsilon(float(shown.group(1)), 20) <= 8.0


@pytest.mark.parametrize(
    "arguments",
    [
        ("--rounds", "20"),
        ("--rounds", "20", "--noise", "1", "--target-epsilon", "8"),
        ("--rounds", "0", "--noise", "1"),
        ("--rounds", "20", "--noise", "-1"),
        ("--rounds", "20", "--noise", "1", "--delta", "2"),
        ("--rounds", "20", "--target-epsilon", "-3"),
    ],
    ids=" ".join,
)
def test_bad_arguments_are_one_line(arguments: tuple[str, ...]) -> None:
    answer = call("privacy", *arguments)
    assert answer.code == 2
    assert answer.err.startswith("fedc2i: error: ")
    assert answer.err.count("\n") == 1


# The document.


def rows_of(title: str) -> list[list[str]]:
    """The cells of the first table below a heading, without its head."""
    lines = DOCUMENT.split(f"## {title}\n")[1].split("\n##")[0].splitlines()
    table = [line for line in lines if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]


METHODS = {row[0].strip("`"): row for row in rows_of("What each method reveals")}


def words(sent: Params, model: Model) -> set[str]:
    """An upload as the document says it."""
    plain = {name.removeprefix("head/").removeprefix("buffer/") for name in sent}
    norms = set(model.norm_names)
    parts = {"body": set(model.body_names), "body but normalisation": set(model.body_names) - norms}
    parts["head"] = set(model.head_names)
    floating = {name for name, tensor in model.init(0).items() if tensor.is_floating_point()}
    found: set[str] = set()
    for word in ("body", "head", "body but normalisation"):
        names = parts[word] & floating
        if names <= plain:
            found.add(word)
            plain -= names
    return found | plain


def test_the_document_has_every_method() -> None:
    assert sorted(METHODS) == sorted(Method.registry)


@pytest.mark.parametrize("name", sorted(Method.registry))
def test_the_document_lists_what_leaves_a_client(
    name: str, make_model: Callable[..., Model], federation: Federation
) -> None:
    method, model = Method.registry[name](), make_model(batch_norm=True)
    said = set(re.findall(r"`([^`]+)`", METHODS[name][1]))
    assert said == words(upload(method, model, federation), model)


@pytest.mark.parametrize("name", sorted(Method.registry))
def test_the_document_says_which_methods_can_be_clipped(
    name: str, make_model: Callable[..., Model], federation: Federation
) -> None:
    method, model = Method.registry[name](), make_model(batch_norm=name == "fedbn")
    try:
        check(method, model, federation, EngineSettings(clip=1.0, noise=1.0))
        covered = "yes"
    except UserError:
        covered = "no"
    assert METHODS[name][-1].split()[0] == covered


def test_every_figure_in_the_document_comes_from_its_command() -> None:
    asked = re.findall(r"^\$ fedc2i (privacy [^#\n]*?) *(?:#.*)?\n(.*)$", DOCUMENT, flags=re.MULTILINE)
    assert len(asked) >= 8
    for arguments, printed in asked:
        assert call(*arguments.split()).out.strip() == printed
    table = re.findall(r"^\| 1 \| ([0-9.]+) \| ([0-9.,]+) \|", DOCUMENT, flags=re.MULTILINE)
    assert len(table) == 4
    for noise, printed in table:
        number = printed.replace(",", "")
        digits = len(number.partition(".")[2])
        assert f"{epsilon(float(noise), 10):.{digits}f}" == number
