"""Settings: who has the last word, what is refused, and a run that repeats from its own config.toml."""

from __future__ import annotations

import ast
import contextlib
import string
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import fedc2i
from fedc2i import UserError, run
from fedc2i.core.options import flags, names, options_of
from fedc2i.data.federation import Federation
from fedc2i.methods.base import Method, get_method
from fedc2i.methods.fedavg import FedAvg
from fedc2i.methods.fedc2i import FedC2I
from fedc2i.runs import plan as plans
from fedc2i.runs.plan import Plan, prepare
from fedc2i.runs.settings import MOST_SEEDS, RunSettings, make, parse_seeds, read_toml, run_settings
from support.helpers import QUICK, call, write_arrays

FEDC2I_OPTIONS = tuple(options_of(FedC2I))


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch, federation: Federation) -> Callable[..., Plan]:
    """What ``fedc2i run ARGUMENTS`` would run, on the toy federation with a preset of its own."""
    from fedc2i.cli import main

    preset = {"model": "lenet5-bn", "rounds": 7}
    monkeypatch.setattr(plans.sources, "load", lambda *_, **__: replace(federation, preset=preset))
    found: list[Plan] = []

    def stop(*arguments: Any) -> list[Plan]:
        found[:] = prepare(*arguments)
        raise UserError("planned")

    monkeypatch.setattr(plans, "prepare", stop)

    def plan(*arguments: str) -> Plan:
        monkeypatch.setattr("sys.argv", ["fedc2i", "run", *arguments])
        with pytest.raises(SystemExit):
            main.main()
        return found[0]

    return plan


TOML = """
method = "fedc2i"
rounds = 5
lr = 0.5
data = "folder:x"
seeds = [4, 5]
[options]
gamma = 3.0
influence = "first-order"
"""


def test_each_source_of_settings_outranks_the_one_before(planned: Callable[..., Plan], tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(TOML)
    layers = [
        ((), {"rounds": 7, "model": "lenet5-bn", "lr": 1e-3, "seeds": (0,), "gamma": 5.0, "influence": "exact"}),
        (("--config", str(file)), {"rounds": 5, "lr": 0.5, "seeds": (4, 5), "gamma": 3.0, "influence": "first-order"}),
        (("--set", "rounds=4", "--set", "gamma=2", "--set", "seeds=1,2"), {"rounds": 4, "gamma": 2.0, "seeds": (1, 2)}),
        (("--rounds", "3", "--seeds", "7", "--model", "lenet5"), {"rounds": 3, "seeds": (7,), "model": "lenet5"}),
    ]
    arguments: tuple[str, ...] = ()
    expected: dict[str, Any] = {}
    for more, changed in layers:
        arguments, expected = (*arguments, *more), {**expected, **changed}
        config = planned(*arguments).config
        got = {name: config.options.get(name, getattr(config, name, None)) for name in expected}
        assert got == expected


def test_what_gives_way_and_what_is_ignored(planned: Callable[..., Plan], tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('method = "fedavg"\n')
    assert planned("--config", str(file)).method.name == "fedavg"
    assert planned("local", "--config", str(file)).method.name == "local"
    config = planned("--set", "model=none", "--set", "rounds=none", "--set", "data_dir=none").config
    assert (config.model, config.rounds, config.data_dir) == ("lenet5-bn", 7, None)  # none asks for the preset
    assert planned("--set", "lr = 0.25").config.lr == 0.25


def test_run_repeats_from_its_own_config_bit_for_bit(
    make_federation: Callable[..., Federation], tmp_path: Path
) -> None:
    data = write_arrays(tmp_path / "data", make_federation((12, 9)))
    first, second = tmp_path / "first", tmp_path / "second"
    odd = ("--seeds", "3,1", "--set", "lr=0.0012345678901234567", "--set", "gamma=0.1", "--set", "gamma_class=7")
    assert call("run", "fedc2i", "--data", data, *QUICK, *odd, "--out", str(first)).code == 0
    assert call("run", "--config", str(first / "config.toml"), "--out", str(second)).code == 0
    same = ("config.toml", "metrics.jsonl", *(f"models/seed{seed}-trained.safetensors" for seed in (1, 3)))
    for name in same:
        assert (first / name).read_bytes() == (second / name).read_bytes()
    assert read_toml(first / "config.toml")["lr"] == 0.0012345678901234567


numbers = st.floats(min_value=0, allow_infinity=False)


@given(
    lr=numbers.filter(bool), weight_decay=numbers, gamma=numbers, seeds=st.sets(st.integers(0, 10**18 - 1), min_size=1)
)
@settings(max_examples=100, deadline=None)
def test_toml_round_trip_of_any_numbers(lr: float, weight_decay: float, gamma: float, seeds: set[int]) -> None:
    values = {"lr": lr, "weight_decay": weight_decay, "seeds": list(seeds), "drop_last": True}
    config = make(FedC2I, {**values, "options": {"gamma": gamma, "influence_samples": "all"}})
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.toml"
        file.write_text(config.to_toml(), encoding="utf-8")
        assert make(FedC2I, read_toml(file)) == config


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"rounds = ", "not a TOML file"),
        (b"rounds = 1\nrounds = 2", "not a TOML file"),
        (b"\xff\xfe", "not a TOML file"),
        (None, "cannot be read"),
    ],
)
def test_files_that_are_not_toml(tmp_path: Path, content: bytes | None, words: str) -> None:
    file = tmp_path / "mine.toml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UserError, match=rf"mine\.toml: {words}"):
        read_toml(file)


@pytest.mark.parametrize(
    ("value", "seeds"),
    [
        ("0,1,2", (0, 1, 2)),
        ("0-9", tuple(range(10))),
        (" 4 , 2 ", (4, 2)),
        ("0-2,7", (0, 1, 2, 7)),
        ("5-5", (5,)),
        ("3", (3,)),
        ([3], (3,)),
        ([1, 2], (1, 2)),
        ((1, 2), (1, 2)),
        (["1", "4-5"], (1, 4, 5)),
        (range(3), (0, 1, 2)),
        ("9" * 18, (10**18 - 1,)),
    ],
)
def test_seeds(value: Any, seeds: tuple[int, ...]) -> None:
    assert parse_seeds(value) == seeds
    assert make(FedC2I, {"seeds": value}).seeds == seeds


NO_NUMBERS = ["", "-1", "a", "1,,2", "1.5", 1.5, True, None, "3-", "0-1-2", "²", "1e3", [[1]], {}, "9" * 5000, -1, [-1]]
BAD_SEEDS: list[tuple[Any, str]] = [
    *((value, "seeds must be whole numbers such as 0,1,2 or 0-9, got") for value in NO_NUMBERS),
    *((value, "seeds must be different whole numbers, at least one, got") for value in ("1,1", "0-3,2", [2, 2], [])),
    *((value, f"more than {MOST_SEEDS}") for value in (f"0-{'9' * 18}", f"0-{MOST_SEEDS}", f"0-{MOST_SEEDS - 1},5000")),
    (3, r"seeds lists each seed, not their number, got 3: write \[3\] for seed 3 or '0-2' for 3 seeds"),
    (0, r"got 0: write \[0\] for seed 0$"),
    ("5-4", "seeds: '5-4' counts down; write the smaller one first"),
]


@pytest.mark.parametrize(("value", "words"), BAD_SEEDS, ids=lambda value: str(value)[:24])
def test_seeds_that_are_refused(value: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        make(FedC2I, {"seeds": value})


def test_unknown_keys_are_refused_with_everything_that_is_allowed(federation: Federation) -> None:
    for attempt in (
        lambda: make(FedC2I, {"gama": 1}),
        lambda: make(FedC2I, {"options": {"gama": 1}}),
        lambda: prepare(["fedc2i"], {"gama": 1}, federation),
        lambda: prepare(["fedc2i"], {"options": {"gama": 1}}, federation),
        lambda: run("fedc2i", federation, gama=1),
    ):
        with pytest.raises(UserError, match="unknown setting 'gama'") as caught:
            attempt()
        assert all(name in str(caught.value) for name in (*FEDC2I_OPTIONS, *run_settings()))


@pytest.mark.parametrize("options", ["gamma=1", 3, None, [1]])
def test_options_must_be_a_table(federation: Federation, options: Any) -> None:
    with pytest.raises(UserError, match="'options' must be a table of the method's options, got"):
        prepare(["fedc2i"], {"options": options}, federation)
    with pytest.raises(UserError, match="'options' must be a table of the method's options, got"):
        make(FedC2I, {"options": options})


BAD = [
    ("rounds", "0", "rounds must be .* at least 1"),
    ("rounds", "two", "^rounds must be a whole number of at least 1, got 'two'"),
    ("rounds", 2.5, "^rounds must be a whole number of at least 1, got '2.5'"),
    ("rounds", True, "^rounds must be a whole number of at least 1, got 'True'"),
    ("epochs", -1, "epochs must be a whole number of at least 1, got '-1'"),
    ("epochs", 0, "epochs must be .*at least 1"),
    ("batch_size", 0, "batch_size must be .*at least 1"),
    ("lr", 0, "lr must be .*above 0"),
    ("lr", "-0.1", "lr must be .*above 0"),
    ("lr", "nan", "lr must be .*above 0"),
    ("lr", "1e999", "lr must be .*above 0"),
    ("lr", "fast", "^lr must be a finite number above 0, got 'fast'"),
    ("lr", [1], "^lr must be a finite number above 0"),
    ("momentum", 1, "momentum must be .*below 1, got '1.0'"),
    ("momentum", -0.1, "momentum must be .*at least 0"),
    ("weight_decay", -1, "weight_decay must be .*at least 0"),
    ("optimizer", "lion", r"^optimizer must be adam \| sgd, got 'lion'"),
    ("drop_last", "maybe", r"^drop_last must be true \| false"),
    ("clients_per_round", "0%", r"clients_per_round must be 1\.\.3 or a share such as 20%, got '0%'"),
    ("clients_per_round", "101%", "clients_per_round must be"),
    ("clients_per_round", 4, "clients_per_round must be"),
    ("clients_per_round", 0, "clients_per_round must be"),
    ("clients_per_round", "nan%", "clients_per_round must be"),
    ("clients_per_round", "many", "clients_per_round must be"),
    ("clients_per_round", "9" * 400, "clients_per_round must be"),
    ("evaluate_every", -1, "evaluate_every must be"),
    ("patience", -1, "patience must be"),
    ("patience", 1, "no client of 'toy' has validation data"),
    ("init", "same", r"^init must be common \| independent"),
    ("executor", "fast", r"^executor must be auto \| looped \| workers \| stacked"),
    ("threads", 0, "threads must be"),
    ("threads", 10**6, "threads must be .*at most 1024"),
    ("device", "tpu", r"^device must be auto \| cpu \| cuda, got 'tpu'"),
    ("model", "resnet", "unknown model 'resnet', allowed are auto, logistic"),
    ("gamma", -1, "gamma must be a finite number of at least 0 .*, got '-1"),
    ("gamma", "nan", "gamma must be a finite number"),
    ("gamma", "much", "^gamma must be a finite number"),
    ("gamma_class", -1, "gamma_class must be"),
    ("influence_samples", 0, r"influence_samples must be a whole number of at least 1 \| all"),
    ("influence_samples", "some", r"^influence_samples must be a whole number of at least 1 \| all"),
    ("influence_split", "validation", "client 'a' has no validation data"),
    ("influence_split", "test", r"^influence_split must be train \| validation"),
    ("partition", "iid:2", "partition=iid:2 is for data loaded by name"),
    ("image_size", 32, "image_size=32 is for data loaded by name"),
]


@pytest.mark.parametrize(("name", "value", "words"), BAD, ids=lambda value: str(value)[:24])
def test_values_that_do_not_fit(federation: Federation, name: str, value: Any, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        prepare(["fedc2i"], {"model": "lenet5", name: value}, federation)
    assert "\n" not in str(caught.value)


def test_where_to_compute(federation: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="device=cuda: torch sees no CUDA device here; use cpu or auto"):
        prepare(["local"], {"device": "cuda"}, federation)
    assert RunSettings(device="auto").torch_device() == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for device, found in (("auto", "cuda"), ("cuda", "cuda"), ("cpu", "cpu")):
        assert RunSettings(device=device).torch_device() == torch.device(found)
    assert RunSettings(executor="workers").torch_device() == torch.device("cpu")
    with pytest.raises(UserError, match="executor=workers computes on a CPU; use device=cpu, or executor=stacked or"):
        RunSettings(device="cuda", executor="workers")


keys = st.sampled_from([*run_settings(), *FEDC2I_OPTIONS, "options", "method"])
values = st.one_of(
    st.text(),
    st.text(string.digits + "-+.,%eE_ inf", max_size=12),
    st.integers(),
    st.floats(),
    st.booleans(),
    st.none(),
    st.lists(st.integers() | st.text(), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


@given(st.dictionaries(keys | st.text(max_size=5), values, max_size=3))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_is_asked_for_is_planned_or_refused(federation: Federation, asked: dict[str, Any]) -> None:
    with contextlib.suppress(UserError):
        (plan,) = prepare(["fedc2i"], asked, federation)
        assert plan.config.rounds >= 1
        assert plan.config.to_toml()


sources = st.sampled_from(["folder", "arrays", "digit5", "office10", "digits:x", "", "other"])
odd_text = st.text(st.characters(exclude_characters="/.", exclude_categories=()), min_size=1, max_size=12)


def is_method(name: str) -> bool:
    """Whether it is a method's name or title, in any case."""
    try:
        get_method(name)
    except UserError:
        return False
    return True


@given(source=sources, argument=odd_text, data_dir=odd_text, method=odd_text)
@settings(max_examples=50, deadline=None)
def test_no_name_or_path_raises_anything_else(source: str, argument: str, data_dir: str, method: str) -> None:
    assume(not is_method(method))  # hypothesis takes words from the source as well
    for wanted, asked in (
        (["local"], {"data": f"{source}:{argument}", "data_dir": data_dir}),
        (["local"], {"data": f"{source}:~{argument}", "data_dir": f"~{data_dir}"}),
        ([method], {}),
        ([f"fedc2i:{method}"], {}),
        ([f"{method}.py:{argument}"], {}),
    ):
        with pytest.raises(UserError):
            prepare(wanted, asked)


# What derives from the declarations.


def test_every_setting_is_declared_once_with_help() -> None:
    layers = [vars(layer).get("__annotations__", {}) for layer in RunSettings.__mro__]
    declared = [name for layer in layers for name in layer]
    assert len(declared) == len(set(declared))
    assert set(names(RunSettings)) == {own.name for own in fields(RunSettings)} - {"options"}
    assert all(option.about for option in options_of(RunSettings).values())


@pytest.mark.parametrize(
    ("effect", "want"),
    [
        ({"numbers": False}, {"checkpoint_seconds", "data_dir", "device", "metric", "ray_address", "seeds", "workers"}),
        ({"resume": "free"}, {"checkpoint_seconds", "data_dir", "device", "metric", "workers"}),
        (
            {"scope": "data"},
            {"clients", "data", "data_dir", "data_seed", "drop", "image_size", "partition", "scale", "split", "target"},
        ),
        ({"engine": "inprocess"}, {"checkpoint_seconds", "clients_at_once", "executor", "workers"}),
        ({"engine": "flower"}, {"deadline", "min_sites", "ray_address", "secure_aggregation", "secure_range", "wire"}),
        ({"preset": True}, {"metric", "model", "rounds"}),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_what_settings_affect(effect: dict[str, Any], want: set[str]) -> None:
    assert set(names(RunSettings, **effect)) == want


def test_settings_that_stay_on_one_machine_are_not_sent_to_sites() -> None:
    sent = set(names(RunSettings, scope="run"))
    assert sent.isdisjoint({"data", "data_dir", "device", "executor", "workers"})
    assert {"method", "model", "rounds", "lr", "clip", "noise", "threads"} <= sent


def test_flags_of_a_command() -> None:
    found = {flag.name: flag for flag in flags(RunSettings, "run")}
    assert found["data_dir"].flag == "--data-dir"
    assert found["data_dir"].help == "The folder of the data; or the variable FEDC2I_DATA."
    assert {"data", "rounds", "seeds", "engine", "device"} <= set(found)
    assert {flag.name for flag in flags(RunSettings, "coordinator")}.isdisjoint(names(RunSettings, scope="data"))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"executor": "looped", "engine": "flower"}, "executor=looped is for engine=inprocess"),
        ({"checkpoint_seconds": 0, "engine": "flower-sim"}, "checkpoint_seconds=0.0 is for engine=inprocess"),
        ({"wire": "float16"}, "wire=float16 is for engine=flower-sim and real sites"),
        ({"deadline": 5}, "deadline=5.0 is for engine=flower"),
    ],
)
def test_settings_of_another_engine(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        make(FedC2I, changed)


@pytest.mark.parametrize(
    ("method", "changed", "words"),
    [
        (
            FedC2I,
            {},
            "fedc2i: its server needs each site's upload, and secure aggregation shows only the mean of all; allowed "
            "are ditto, fedala, fedavg, fedbn, fedprox, fedrep, fedrod$",
        ),
        (FedAvg, {"engine": "inprocess"}, "secure_aggregation=True is for engine="),
        (FedAvg, {"engine": "flower-sim"}, "secure_aggregation is for real sites"),
        (FedAvg, {"topology": "ring"}, "topology=ring: with secure aggregation only full is allowed"),
        (FedAvg, {"wire": "float16"}, "wire=float16: with secure aggregation only float32 is allowed"),
        (FedAvg, {"norm_bound": 5.0}, "norm_bound=5 cannot be checked under secure aggregation; use 0"),
        (FedAvg, {"secure_range": 0.0}, "secure_range must be"),
    ],
)
def test_what_secure_aggregation_excludes(method: type[Method], changed: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        make(method, {"engine": "flower", "secure_aggregation": True, **changed})
    assert make(FedAvg, {"engine": "flower", "secure_aggregation": "true"}).secure_aggregation


def test_no_list_of_setting_names_is_kept_by_hand() -> None:
    """Outside the declarations, no tuple, list or set of code names three settings or more."""
    known = set(names(RunSettings)) - {"clients", "split"}  # everyday words of other modules, too
    paths = sorted(Path(fedc2i.__file__).parent.rglob("*.py"))
    for path in (path for path in paths if path.name not in ("common.py", "fingerprint.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Tuple | ast.List | ast.Set):
                texts = {own.value for own in node.elts if isinstance(own, ast.Constant) and isinstance(own.value, str)}
                assert len(texts & known) < 3, f"{path}, line {node.lineno}: {sorted(texts & known)}"


def test_settings_import_without_torch() -> None:
    """The command line lists its flags before torch is imported."""
    package = Path(fedc2i.__file__).parent
    code = (
        "import sys, types\n"
        f"package = types.ModuleType('fedc2i'); package.__path__ = [{str(package)!r}]\n"
        "sys.modules['fedc2i'] = package\n"
        "import fedc2i.runs.settings\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
