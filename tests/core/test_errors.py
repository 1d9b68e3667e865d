"""What is said to the person at the keyboard."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from fedc2i import UserError
from fedc2i.core.errors import flaw, how_to_install, nearest
from fedc2i.data import sources
from fedc2i.data.federation import InputSpec
from fedc2i.engine import attacks
from fedc2i.methods.base import get_method
from fedc2i.methods.fedc2i import FedC2I
from fedc2i.models import networks
from fedc2i.runs import settings
from fedc2i.runs.plan import parse_method, prepare
from fedc2i.runs.settings import RunSettings
from support.helpers import blank_federation, made_up

MISTYPED: dict[str, tuple[Callable[[], object], str]] = {
    "method": (lambda: get_method("fedc2"), "fedc2i"),
    "option": (lambda: parse_method("fedc2i:gama=2"), "gamma"),
    "setting": (lambda: prepare(["fedc2i"], {"round": 3}, "digits"), "rounds"),
    "setting of a file": (lambda: settings.make(FedC2I, {"lr_": 3}), "lr"),
    "choice": (lambda: prepare(["fedc2i"], {"scale": "clients"}, "digits"), "client"),
    "choice of Python": (lambda: RunSettings(executor=cast(Any, "worker")), "workers"),
    "choice of an option": (lambda: parse_method("fedproto:weighting=count"), "counts"),
    "metric": (lambda: prepare(["fedc2i"], {"metric": "auc"}, "digits"), "auroc"),
    "metric of a result": (lambda: made_up(blank_federation("ab"), {0: [[1, 2]]}).showing("auc"), "auroc"),
    "other word": (lambda: settings.make(FedC2I, {"learning_rate": 1}), "lr"),
    "other word, of several": (lambda: prepare(["fedc2i"], {"batch": 3}, "digits"), "batch_size"),
    "attack": (lambda: attacks.parse("sign-flp@a", "abc", 0), "sign-flip"),
    "attacker": (lambda: attacks.parse("sign-flip@nroth", ["north", "south"], 0), "north"),
    "model": (lambda: networks.build("lenet-wyde", 10, InputSpec((3, 32, 32))), "lenet-wide"),
    "data": (lambda: sources.load("digit", data_dir=None, image_size=None), "digits"),
}


@pytest.mark.parametrize(("ask", "meant"), MISTYPED.values(), ids=MISTYPED)
def test_a_mistyped_name_is_recognised(ask: Callable[[], object], meant: str) -> None:
    with pytest.raises(UserError) as caught:
        ask()
    assert f" (did you mean '{meant}'?)" in str(caught.value)


@pytest.mark.parametrize("name", ["", "xyzzy", "gamma", "\x1b[2Jgamma" * 50, 7, None])
def test_nothing_is_made_up(name: object) -> None:
    assert nearest(name, ("gamma", "rounds")) == ""


def test_case_does_not_matter_and_the_true_spelling_is_shown() -> None:
    assert nearest("hospitl", ("AGE", "HOSPITAL")) == nearest("HOSPITL", ("Age", "HOSPITAL"))
    assert nearest("hospitl", ("AGE", "HOSPITAL")) == " (did you mean 'HOSPITAL'?)"


def test_another_word_is_recognised_as_a_flag_and_only_where_it_fits() -> None:
    assert nearest("--learning-rate", ("--lr", "--rounds")) == " (did you mean '--lr'?)"
    assert nearest("--local_epochs", ("--epochs",)) == " (did you mean '--epochs'?)"
    assert nearest("batch", ("--batch-size",)) == " (did you mean '--batch-size'?)"
    assert nearest("learning_rate", ("gamma", "rounds")) == ""


def test_swapped_letters_are_the_nearest() -> None:
    """By likeness, esat is as near to west as to east."""
    for allowed in (("east", "west"), ("west", "test", "rest", "best", "east")):
        assert nearest("esat", allowed) == " (did you mean 'east'?)"


def test_an_extra_is_installed_with_and_without_a_clone() -> None:
    root = Path(__file__).parents[2]
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {
        found
        for file in (root / "src").rglob("*.py")
        for found in re.findall(r"how_to_install\([\"']([\w-]+)[\"']\)", file.read_text())
    }
    assert {"flower", "report", "table"} <= named <= extras.keys()
    assert (root / "constraints.txt").is_file()
    assert how_to_install("flower") == (
        "pip install 'fedc2i[flower]', or in a clone pip install -c constraints.txt -e '.[flower]'"
    )


def test_a_flaw_is_told_in_words_about_the_file() -> None:
    found = [
        (lambda: {}["data"], "no entry 'data'"),
        (lambda: len(cast(Any, 3)), "an entry is of another type"),
        (lambda: int("x"), "invalid literal for int() with base 10: 'x'"),
        (lambda: [][0], "list index out of range"),
    ]
    for fail, said in found:
        with pytest.raises(Exception) as caught:  # noqa: PT011
            fail()
        assert flaw(caught.value) == said
    assert flaw(ValueError()) == "ValueError"
