"""The lines of studies on several federations: means over all of them, and the client that is worst off."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from experiments.against_local import print_methods

import fedc2i

ACCURACY = {  # by method and federation: one seed, two clients; before local training 1 less
    ("local", "one"): [50, 60],
    ("local", "two"): [54, 62],
    ("fedavg", "one"): [70, 59],
    ("fedavg", "two"): [60, 60],
}


def test_every_method_has_a_line_and_local_comes_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def run(method: str, data: Any, **settings: Any) -> Any:
        asked.append((method, data, settings))
        trained = np.array([ACCURACY[method, data]], float)
        return SimpleNamespace(accuracy=lambda point: trained - (point == "received"))

    monkeypatch.setattr(fedc2i, "run", run)
    federations: Any = [("one", [10]), ("two", [11])]
    print_methods("kind ", ["fedavg", "local"], federations, "cpu", 8)
    assert capsys.readouterr().out.splitlines() == [
        "kind  local    55.50 / 56.50, worst client against Local -1.00 / +0.00",
        "kind  fedavg   61.25 / 62.25, worst client against Local -2.50 / -1.50",
    ]
    how = {"evaluate_every": 0, "device": "cpu"}
    assert asked[:2] == [("local", "one", {"seeds": [10], **how}), ("local", "two", {"seeds": [11], **how})]
    assert len(asked) == 4
