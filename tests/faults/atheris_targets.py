"""Coverage-guided fuzzing of the readers with atheris, for developers; the suite itself does not need it.

    pip install atheris                      # Python 3.11 to 3.13, in an environment of its own beside fedc2i
    python tests/faults/atheris_targets.py arrays -max_total_time=120 -rss_limit_mb=4096

The first argument is a target of ``corpus.py``; the others are libFuzzer's. An input is a list of steps by which a
sound file is damaged. Anything but a result or one clear line ends the program, and libFuzzer keeps the input.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["fedc2i"]):
    from corpus import TARGETS, attempt, below, damaged, lay

MOST_STEPS = 6


def main() -> None:
    """Fuzzes one target until libFuzzer's limits are reached."""
    if len(sys.argv) < 2 or sys.argv[1] not in TARGETS:
        sys.exit(f"name a target: {', '.join(TARGETS)}")
    target = TARGETS[sys.argv.pop(1)]
    with tempfile.TemporaryDirectory() as text:
        target.make(Path(text))
        files = below(Path(text))

    def once(content: bytes) -> None:
        given = atheris.FuzzedDataProvider(content)
        inside = given.ConsumeIntInRange(0, 255)
        count = given.ConsumeIntInRange(1, MOST_STEPS)
        ranges = (8, 2**16, 2**64 - 1)
        steps = [tuple(given.ConsumeIntInRange(0, high) for high in ranges) for _ in range(count)]
        with tempfile.TemporaryDirectory() as text:
            lay(Path(text), damaged(files, target.victims, steps, inside))  # type: ignore[arg-type]
            error = attempt(target, Path(text))
        if error is not None:
            raise error

    atheris.Setup(sys.argv, once)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
