"""An exception of a worker process, as bytes that the other process can read."""

from __future__ import annotations

import traceback

import cloudpickle


def sent_error(error: Exception) -> bytes:
    """``("error", error)`` with the worker's traceback as a note; a `RuntimeError` for one that cannot be pickled."""
    error.add_note("In a worker process:\n" + "".join(traceback.format_exception(error)))
    try:
        content = bytes(cloudpickle.dumps(("error", error)))
        cloudpickle.loads(content)  # some exceptions can be written but not read
    except Exception:
        return bytes(cloudpickle.dumps(("error", RuntimeError(f"{type(error).__name__}: {error}"))))
    return content
