"""From what a user names to runs that are ready to start: methods with options, objects, and files of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from fedc2i import Federation, Method, Model, UserError, compare, run, split
from fedc2i.methods.base import get_method, method_names
from fedc2i.methods.fedavg import FedAvg
from fedc2i.methods.fedc2i import FedC2I
from fedc2i.report.comparison import comparison_table
from fedc2i.report.published import PUBLISHED
from fedc2i.runs.plan import Plan, prepare

PLUGIN = """
from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fedc2i import Method, split


@dataclass(frozen=True)
class Mine(Method):
    name = "mine"
    title = "Mine"
    strength: float = 1.0


class Nameless(Method):
    pass


def small(classes, image_shape):
    return split(lambda: nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, classes)), head="1", name="small")


def wide(classes, image_shape):
    return split(lambda: nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, classes + 1)), head="1")


def other_size(classes, image_shape):
    return split(lambda: nn.Sequential(nn.Flatten(), nn.Linear(99, classes)), head="1", name="tall")


def bare(classes, image_shape):
    return nn.Linear(3, classes)


def one_argument(classes):
    return None


def fails(classes, image_shape):
    return {}["weights"]


number = 3
"""


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    file = tmp_path / "own.py"
    file.write_text(PLUGIN)
    return file


def plan(wanted: str | Method, federation: Federation, model: str | Model | None = "lenet5", **settings: Any) -> Plan:
    (found,) = prepare([wanted], settings, federation, model)
    return found


# Methods by name, with options.


def test_spec_with_options(federation: Federation) -> None:
    found = plan("fedc2i:gamma=2,influence_samples=all", federation)
    assert found.method == FedC2I(gamma=2.0, influence_samples="all")
    assert (found.key, found.label) == (
        "fedc2i:gamma=2.0,influence_samples=all",
        "FedC²I (gamma=2.0, influence_samples=all)",
    )
    assert found.config.options["gamma"] == 2.0
    assert found.config.options["influence"] == "exact"  # all of them are recorded, not only those that were said


@pytest.mark.parametrize("spec", ["fedc2i", "fedc2i:", "fedc2i:gamma=5", "fedc2i:influence=exact,gamma=5.0"])
def test_defaults_leave_no_trace_in_the_name(federation: Federation, spec: str) -> None:
    assert (plan(spec, federation).key, plan(spec, federation).label) == ("fedc2i", "FedC²I")


@pytest.mark.parametrize("spec", ["FedC²I⁺", "FedC2I+", "fedc2i+:", "FEDC2I-PLUS"])
def test_method_by_its_title_or_in_another_case(federation: Federation, spec: str) -> None:
    found = plan(spec, federation)
    assert (found.key, found.config.method) == ("fedc2i-plus", "fedc2i-plus")


def test_every_title_names_its_method() -> None:
    built_in = [kind for kind in map(get_method, method_names()) if kind.__module__.startswith("fedc2i.methods.")]
    assert [get_method(kind.title.upper()) for kind in built_in] == built_in


def test_own_options_outrank_shared_ones(federation: Federation) -> None:
    found = prepare(["fedc2i", "fedc2i:gamma=2"], {"gamma": 3}, federation, "lenet5")
    assert [one.method.gamma for one in found] == [3.0, 2.0]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("fedsgd", r"unknown method 'fedsgd', allowed are .*fedavg, .*fedc2i, .*local.* and FILE\.py:CLASS"),
        ("", "unknown method ''"),
        ("FedC²I⁺⁺", r"unknown method 'FedC²I⁺⁺' \(did you mean 'fedc2i\+'\?\)"),
        ("mine.toml", r"'mine\.toml' is no method; a file of settings is given as --config mine\.toml"),
        ("fedc2i:gama=2", "'fedc2i:gama=2': no option 'gama' .did you mean 'gamma'.., allowed are gamma, gamma_class"),
        ("fedc2i:gamma", "no option 'gamma', .* written name=value"),
        ("fedc2i:lr=1", "no option 'lr'"),
        ("local:gamma=1", "'local:gamma=1': no option 'gamma', allowed are anchor, average"),
        ("fedc2i:gamma=big", r"'fedc2i:gamma=big': gamma must be a finite number of at least 0 \| ramp\(.*, got 'big'"),
        ("fedc2i:gamma=-1", "gamma must be a finite number of at least 0 .*, got '-1"),
        (3, "a method is a name such as fedc2i or a fedc2i.Method, got '3'"),
        (FedC2I, "a method is a name such as fedc2i or a fedc2i.Method"),
    ],
)
def test_specs_that_are_refused(federation: Federation, spec: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        prepare([spec], {}, federation)


def test_nothing_named(federation: Federation) -> None:
    with pytest.raises(UserError, match="name at least one method"):
        prepare([], {}, federation)


@pytest.mark.parametrize(
    "wanted",
    [["local", "local"], ["fedc2i", "fedc2i:gamma=5"], ["fedavg", FedAvg()], ["fedc2i:gamma=2", FedC2I(gamma=2)]],
)
def test_same_method_twice(federation: Federation, wanted: list[str | Method]) -> None:
    with pytest.raises(UserError, match="is named 2 times"):
        prepare(wanted, {}, federation)


def test_methods_whose_folders_would_be_one(federation: Federation) -> None:
    @dataclass(frozen=True)
    class Twin(FedAvg):
        name = "fed-avg."  # as a folder it is fed-avg, like the next
        title = "Twin"

    @dataclass(frozen=True)
    class Other(FedAvg):
        name = "fed avg"
        title = "Other"

    with pytest.raises(UserError, match="fed-avg is named 2 times"):
        prepare([Twin(), Other()], {}, federation)


def test_options_reach_only_the_methods_that_have_them(federation: Federation) -> None:
    settings = {"gamma": 2, "weighting": "samples"}
    found = {one.method.name: one for one in prepare(["local", "fedavg", "fedprox", "fedc2i"], settings, federation)}
    assert {name: one.key for name, one in found.items()} == {
        "local": "local",
        "fedavg": "fedavg:weighting=samples",
        "fedprox": "fedprox:weighting=samples",
        "fedc2i": "fedc2i:gamma=2.0",
    }


def test_option_that_no_method_has(federation: Federation) -> None:
    with pytest.raises(UserError, match=r"unknown setting 'mu'; these methods: .*gamma.*weighting; every run: data, "):
        prepare(["fedavg", "fedc2i"], {"gamma": 1, "mu": 1}, federation)
    with pytest.raises(UserError, match="unknown setting 'mu'; local: anchor, average; every run: data, "):
        prepare(["local"], {"mu": 1}, federation)


def test_keys_are_those_of_the_published_rows(federation: Federation) -> None:
    for name in ("local", "fedavg", "fedprox", "fedc2i", *(f"fedc2i:gamma={gamma}" for gamma in (0.5, 1, 2, 10))):
        assert PUBLISHED["digit5"][plan(name, federation).key]["Avg"].mean > 75
    for name in ("fedc2i-client", "fedc2i-class-local", "fedc2i-class-global"):
        assert PUBLISHED["office10"][plan(name, federation).key]["Avg"].mean > 60


# Objects from Python.


def test_objects_are_taken_as_they_are(federation: Federation, model: Model) -> None:
    method = FedC2I(gamma=0.5, influence="first-order")
    found = plan(method, federation, model, rounds=2)
    assert found.method == method
    assert found.model is model
    assert found.federation is federation
    assert (found.config.data, found.config.model, found.config.method) == ("toy", "tiny", "fedc2i")


def test_preset_of_a_federation_is_used_where_nothing_is_said(federation: Federation) -> None:
    preset = replace(federation, preset={"model": "lenet5-bn", "rounds": 7})
    silent, said = plan("local", preset, None), plan("local", preset, "lenet5", rounds=3)
    assert (silent.model.name, silent.config.model, silent.config.rounds) == ("lenet5-bn", "lenet5-bn", 7)
    assert (said.model.name, said.config.model, said.config.rounds) == ("lenet5", "lenet5", 3)


def test_compare_takes_names_and_objects_together(federation: Federation, model: Model) -> None:
    results = compare(["local", FedC2I(gamma=1)], federation, model=model, rounds=1, epochs=1)
    assert [result.key for result in results] == ["local", "fedc2i:gamma=1.0"]
    assert all(result.last(0).round == 1 for result in results)


@pytest.mark.parametrize(
    ("data", "model", "words"),
    [
        (Path("images"), None, "data must be a data set's name or a fedc2i.Federation, got PosixPath"),
        (None, nn.Linear(1, 1), r"model must be a name or fedc2i.split\(module, head=...\), got Linear"),
    ],
)
def test_objects_of_another_kind_are_not_silently_left_out(
    federation: Federation, data: Any, model: Any, words: str
) -> None:
    with pytest.raises(UserError, match=words):
        run("local", data or federation, model=model, rounds=1)


def test_method_without_a_name(federation: Federation) -> None:
    with pytest.raises(UserError, match="Method needs its own class attributes name and title"):
        run(Method(), federation)


def test_model_that_does_not_fit_the_data(make_federation: Callable[..., Federation]) -> None:
    other = split(lambda: nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 7)), head="1", name="seven")
    with pytest.raises(UserError, match="model 'seven' has 7 outputs, but the data has 4 classes"):
        plan("local", make_federation(), other)


def test_executor_that_cannot_run_the_model_is_refused_before_the_run(federation: Federation) -> None:
    def untracked() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(768, track_running_stats=False), nn.Linear(768, 4))

    with pytest.raises(UserError, match="executor=stacked: model 'odd' takes batch statistics at evaluation"):
        plan("local", federation, split(untracked, head="2", name="odd"), executor="stacked")


# Files of one's own.


def test_method_from_a_file(federation: Federation, plugin: Path) -> None:
    found = prepare([f"{plugin}:Mine", f"{plugin}:Mine:strength=2"], {}, federation, "lenet5")
    assert [one.label for one in found] == ["Mine", "Mine (strength=2.0)"]
    assert [one.key for one in found] == ["mine", "mine:strength=2.0"]
    assert found[0].config.method == f"{plugin}:Mine"


def test_method_and_model_from_a_file_run(federation: Federation, plugin: Path) -> None:
    result = run(f"{plugin}:Mine", federation, model=f"{plugin}:small", rounds=1, epochs=1, strength=3)
    assert result.key == "mine:strength=3.0"
    assert (result.config.model, result.model) == (f"{plugin}:small", "small")
    assert result.last(0).round == 1
    assert "on toy, small, 1 round" in comparison_table([result]).title


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Mime", r"own\.py defines no 'Mime' \(did you mean 'Mine'\?\), only Mine, Nameless$"),
        ("", r"own\.py defines no '', only Mine, Nameless$"),
        ("number", r"own\.py:number is not a subclass of fedc2i\.Method"),
        ("small", r"own\.py:small is not a subclass of fedc2i\.Method"),
        ("Nameless", r"own\.py:Nameless needs its own class attributes name and title"),
        ("Mine:power=2", "no option 'power', allowed are strength, anchor, average"),
    ],
)
def test_names_in_a_file_that_are_no_method(federation: Federation, plugin: Path, name: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        plan(f"{plugin}:{name}", federation)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("bare", r"own\.py:bare must return fedc2i\.split\(module, head=\.\.\.\), got Linear"),
        ("one_argument", r"own\.py:one_argument\(classes, shape\): TypeError: "),
        ("fails", r"own\.py:fails\(classes, shape\): KeyError: 'weights'"),
        ("number", r"own\.py:number\(classes, shape\): TypeError: .*not callable"),
        ("wide", "has 5 outputs, but the data has 4 classes"),
        ("other_size", r"model 'tall' cannot read images 16x16"),
        ("smal", r"defines no 'smal' \(did .* 'small'\?\), only bare, fails, one_argument, other_size, small, wide$"),
    ],
)
def test_functions_in_a_file_that_make_no_model(federation: Federation, plugin: Path, name: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        plan("local", federation, f"{plugin}:{name}")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("def broken(:", r"own\.py:1: SyntaxError"),
        ("import no_such_package", r"own\.py:1: ModuleNotFoundError: No module named 'no_such_package'"),
        ("1 / 0", r"own\.py:1: ZeroDivisionError: division by zero"),
        ("import sys; sys.exit('usage: own.py FILE')", r"own\.py:1: SystemExit: usage"),
        (None, r"own\.py: no such file"),
    ],
)
def test_broken_files(federation: Federation, tmp_path: Path, content: str | None, words: str) -> None:
    file = tmp_path / "own.py"
    if content is not None:
        file.write_text(content)
    for attempt in (lambda: plan(f"{file}:Mine", federation), lambda: plan("local", federation, f"{file}:small")):
        with pytest.raises(UserError, match=words):
            attempt()
