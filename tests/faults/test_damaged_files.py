"""Damaged files of every kind: each is read or refused in one line, soon, and reading leaves every file as it was."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import pytest
from damage import Step, damaged
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from readers import READERS, attempt, below, is_refused, sound, write_files

from fedc2i.core.errors import UserError
from fedc2i.runs.plan import prepare

FEW, MANY = 25, 3000  # examples of each reader
MOST_SECONDS = 20  # of one file; on an idle machine none needs half a second

STEPS = st.lists(st.tuples(st.integers(0, 8), st.integers(0, 2**16), st.integers(0, 2**64 - 1)), min_size=1, max_size=4)
INSIDE = st.integers(0, 255)
calm = settings(suppress_health_check=list(HealthCheck), deadline=None, database=None)


def check(name: str, steps: list[Step], inside: int) -> None:
    files = damaged(sound(name), READERS[name], steps, inside)
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        write_files(folder, files)
        began = time.process_time()
        error = attempt(READERS[name], folder)
        assert time.process_time() - began < MOST_SECONDS
        assert below(folder) == files  # nothing written, nothing left behind
    if error is not None:
        raise AssertionError(f"{type(error).__name__}: {error!s:.300}") from error


@pytest.mark.parametrize("name", READERS)
def test_sound_files_are_read(name: str, tmp_path: Path) -> None:
    READERS[name].make(tmp_path)
    before = below(tmp_path)
    READERS[name].read(tmp_path)
    assert below(tmp_path) == before


@pytest.mark.parametrize("name", READERS)
@settings(calm, max_examples=FEW)
@given(steps=STEPS, inside=INSIDE)
def test_damaged_files(name: str, steps: list[Step], inside: int) -> None:
    check(name, steps, inside)


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
@settings(calm, max_examples=MANY, derandomize=False)
@given(steps=STEPS, inside=INSIDE)
def test_many_damaged_files(name: str, steps: list[Step], inside: int) -> None:
    check(name, steps, inside)


@pytest.mark.parametrize("name", ["method", "model", "data", "partition", "clients_per_round", "device", "\x1b[31m"])
@pytest.mark.parametrize("value", ["\x1b[31mred", "two\nlines", "\ud800"])
def test_what_a_setting_holds_is_shown_without_control_characters(name: str, value: str) -> None:
    given = {"method": "fedavg", name: value}
    with pytest.raises(UserError) as caught:
        prepare([given.pop("method")], given)
    assert is_refused(caught.value)
