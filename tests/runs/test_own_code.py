"""Mistakes in a user's own method: a line that says where, and nothing half-written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fedc2i import Federation, Method, UserError, compare, run
from support.helpers import QUICK, call, write_arrays

HEADER = """from __future__ import annotations
from dataclasses import dataclass
from typing import ClassVar
from fedc2i import Method
"""
OWN = """@dataclass(frozen=True)
class Own(Method):
    name = "own"
    title = "Own"
"""
FIRST = HEADER.count("\n") + OWN.count("\n") + 1  # line of what a method adds
KEY = "    def loss(self, params, batch, site):\n        return params['proto'].sum()\n"
ARITY = "    def loss(self, params, batch):\n        return 0\n"
ONE = "    def combine(self, uploads, state):\n        return state\n"
SETUP = "    def setup(self, params, model):\n        return params['proto']\n"
CHECKED = "    def __post_init__(self):\n        self.proto\n"
LATE = """    def loss(self, params, batch, site):
        return params['proto'].sum() if site.round > 1 else super().loss(params, batch, site)
"""
SLIPS = {
    "in a hook": (KEY, rf"own\.py:{FIRST + 1}, loss: KeyError: 'proto'$"),
    "arguments": (
        ARITY,
        r"own\.py:6: Own\.loss takes \(self, params, batch\), it needs \(self, params, batch, site\)$",
    ),
    "what is returned": (ONE, r"own\.py: ValueError: not enough values to unpack .* \(at `.*method\.combine\(.*`\)$"),
    "before the run": (SETUP, rf"own\.py:{FIRST + 1}, setup: KeyError: 'proto'$"),
    "options": (CHECKED, rf"own\.py:{FIRST + 1}, __post_init__: AttributeError: 'Own' object has no attribute"),
}
SILENT = {
    "spelling of a hook": (
        OWN + "    def personalize(self, own, batch, site):\n        return own, {}\n",
        r"own\.py:6: Own\.personalize is never called \(did you mean 'personalise'\?\); a helper's name starts with _$",
    ),
    "no dataclass": (
        OWN.partition("\n")[2] + "    limit: ClassVar[int] = 3\n    mu: float = 0.3\n",
        r"own\.py:Own: mu would be no option; write @dataclass\(frozen=True\) above the class$",
    ),
    "not frozen": (
        OWN.replace("(frozen=True)", ""),
        r"own\.py:5: TypeError: cannot .*; write @dataclass\(frozen=True\)$",
    ),
    "a name that is taken": (OWN.replace('"own"', '"fedavg"'), r"own\.py:6: Own: the name 'fedavg' is taken by fedc2i"),
}


@pytest.fixture(autouse=True)
def own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(Method.registry, "own", raising=False)


@pytest.fixture
def federation(make_federation: Callable[..., Federation]) -> Federation:
    return make_federation((12, 9))


def write(added: str) -> str:
    Path("own.py").write_text(HEADER + OWN + added)
    return "own.py:Own"


@pytest.mark.parametrize("slip", SLIPS)
def test_slip_is_a_line_and_leaves_no_folder(federation: Federation, slip: str) -> None:
    added, words = SLIPS[slip]
    with pytest.raises(UserError, match=words) as caught:
        run(write(added), federation, out="out", rounds=2, epochs=1, seeds=[0])
    assert caught.value.__cause__ is not None  # Python shows the whole traceback
    assert not Path("out").exists()


def test_slip_in_a_worker_process(federation: Federation) -> None:
    with pytest.raises(UserError, match=SLIPS["in a hook"][1]):
        run(write(KEY), federation, rounds=1, epochs=1, seeds=[0], executor="workers")


@pytest.mark.parametrize("slip", SILENT)
def test_slip_that_would_be_silent(federation: Federation, slip: str) -> None:
    content, words = SILENT[slip]
    Path("own.py").write_text(HEADER + content)
    with pytest.raises(UserError, match=words):
        run("own.py:Own", federation, rounds=1)


def test_helpers_and_constants_are_no_slips(federation: Federation) -> None:
    plain = OWN.partition("\n")[2] + "    limit: ClassVar[int] = 3\n    def weigh(self):\n        return self.limit\n"
    plain += "    def loss(self, p, *rest):\n        return super().loss(p, *rest)\n"
    plain += "    def weights(self, sent, power=1):\n        return super().weights(sent) ** power\n"
    Path("own.py").write_text(HEADER + plain)
    assert run("own.py:Own", federation, rounds=1, epochs=1, seeds=[0]).label == "Own"


def test_finished_rounds_and_methods_are_kept(federation: Federation) -> None:
    settings = {"rounds": 2, "epochs": 1, "seeds": [0], "model": "lenet5"}
    own = write(LATE)
    with pytest.raises(UserError, match=r"own\.py:\d+, loss: KeyError: 'proto'"):
        run(own, federation, out="late", **settings)
    assert Path("late/metrics.jsonl").stat().st_size
    write(KEY)
    with pytest.raises(UserError, match="KeyError"):
        compare([own, "local"], federation, out="first", **settings)
    assert not Path("first").exists()
    with pytest.raises(UserError, match="KeyError"):
        compare(["local", own], federation, out="second", **settings)
    assert Path("second/local/summary.json").is_file()


def test_object_of_python_fails_as_python_does(federation: Federation) -> None:
    class Fails(Method):
        name, title = "fails", "Fails"

        def loss(self, params: object, batch: object, site: object) -> object:  # type: ignore[override]
            raise KeyError("proto")

    with pytest.raises(KeyError, match="proto"):
        run(Fails(), federation, rounds=1, out="out")
    assert not Path("out").exists()


@pytest.mark.parametrize("command", [["run"], ["compare", "local"]])
def test_command_line(federation: Federation, command: list[str]) -> None:
    write_arrays(Path("data"), federation)
    name = write(KEY)
    answer = call(command[0], name, *command[1:], "--data", "arrays:data", *QUICK, "--out", "out")
    assert answer.code == 2
    assert answer.err.splitlines()[-1] == f"fedc2i: error: own.py:{FIRST + 1}, loss: KeyError: 'proto'"
    assert "Traceback" not in answer.err
    assert not Path("out").exists()
