"""What a worker's exception is on the other side: itself if it can travel, and its text if it cannot."""

from __future__ import annotations

import threading
from typing import Any

import cloudpickle
import pytest

from fedc2i.core.errors import UserError
from fedc2i.engine.executors.workers.sent_error import sent_error


class UnwritableError(Exception):
    """Holds what no pickle can."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class UnreadableError(Exception):
    """Is pickled with one argument, and needs two."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first + second)


def arrived(error: Exception) -> Any:
    def fail() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        fail()
    kind, found = cloudpickle.loads(sent_error(caught.value))
    assert kind == "error"
    return found


def test_an_exception_arrives_with_the_workers_traceback() -> None:
    found = arrived(UserError("wrong"))
    assert (type(found), str(found)) == (UserError, "wrong")
    assert "In a worker process" in found.__notes__[0]
    assert "in fail" in found.__notes__[0]


@pytest.mark.parametrize("error", [UnwritableError("both"), UnreadableError("bo", "th")], ids=lambda own: type(own))
def test_one_that_cannot_travel_arrives_as_its_text(error: Exception) -> None:
    found = arrived(error)
    assert (type(found), str(found)) == (RuntimeError, f"{type(error).__name__}: both")
