"""Methods are found by name, and only what is asked for is imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fedc2i.core.errors import UserError
from fedc2i.methods import registry
from fedc2i.methods.base import Method

LOAD_ONE = """
import sys
from fedc2i.methods import registry
assert registry.get("fedc2i").title == "FedC²I"
assert "fedc2i.methods.fedavg" not in sys.modules
assert registry.get("fedavg-plus").title == "FedAvg + extras"  # a file of several methods
assert len(registry.names()) > 20
"""
TAKE_A_NAME = """
from fedc2i import Method, UserError
try:
    type("Impostor", (Method,), {"name": "fedrep", "title": "Impostor"})
except UserError as error:
    assert "'fedrep' is taken by fedc2i.methods.fedrep" in str(error)
else:
    raise AssertionError
"""


@pytest.mark.parametrize("script", [LOAD_ONE, TAKE_A_NAME], ids=["load one", "take a name"])
def test_in_a_fresh_process(script: str) -> None:
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("name", ["fedc2", "base", "", "math", "../fedavg", "fedc2i_top_k"])
def test_an_unknown_name_is_told_with_those_there_are(name: str) -> None:
    assert registry.find(name) is None
    with pytest.raises(UserError, match=r"unknown method .*allowed are ditto, .*trimmed-mean and FILE\.py:CLASS"):
        registry.get(name)


def test_all_names_are_listed() -> None:
    assert registry.names() == sorted(Method.registry)
