"""Coverage-guided fuzzing of the readers with atheris, for developers; the suite itself does not need it.

    pip install atheris                      # Python 3.11 to 3.13, in an environment of its own beside fedc2i
    export PYTHONPATH=tests
    python tests/faults/atheris_targets.py arrays -max_total_time=120 -rss_limit_mb=4096
    python tests/faults/atheris_targets.py all -max_total_time=60 -rss_limit_mb=4096

The first argument names a reader of ``readers.py``, several with commas, or all of them, each in its own process, one
after the other; the other arguments are libFuzzer's. An input is a list of steps that damage a sound file. Anything but
a result or one clear line, as well as 20 seconds for one input, ends the program, and libFuzzer keeps the input; given
in place of the limits, it is tried again.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["fedc2i", "PIL", "tomllib", "zipfile"]):  # parsers written in Python
    from damage import damaged
    from PIL import Image
    from readers import READERS, Reader, attempt, below, write_files

    Image.init()  # its formats are imported one by one

MOST_STEPS = 6
RANGES = (8, 2**16, 2**64 - 1)  # of a step: what to do, where, with what
STEP_BYTES = 1 + 3 + 8
USUAL = (f"-max_len={1 + MOST_STEPS * STEP_BYTES}", "-len_control=0", "-timeout=20")


def main() -> None:
    """Fuzzes the readers until libFuzzer's limits are reached; ends with 1 if one of them found something."""
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    names = list(READERS) if wanted == "all" else wanted.split(",")
    if not set(names) <= set(READERS):
        sys.exit(f"name a reader, several with commas, or all: {', '.join(READERS)}")
    if len(names) == 1:
        fuzz(READERS[names[0]], sys.argv[2:])
    failed = []
    for name in names:
        print(f"== {name}", file=sys.stderr, flush=True)
        if not (child := os.fork()):
            fuzz(READERS[name], sys.argv[2:])
        failed += [name] * (os.waitpid(child, 0)[1] != 0)
    sys.exit(f"these found something: {', '.join(failed)}" if failed else 0)


def fuzz(reader: Reader, limits: list[str]) -> None:
    """Fuzzes one reader; ends the process."""
    folder = Path(tempfile.mkdtemp())  # libFuzzer ends the process without a word, so it stays
    reader.make(folder)
    files = below(folder)

    def once(content: bytes) -> None:
        given = atheris.FuzzedDataProvider(content)
        inside = given.ConsumeIntInRange(0, 255)
        steps: list[tuple[int, int, int]] = []
        while given.remaining_bytes() and len(steps) < MOST_STEPS:
            steps.append(tuple(given.ConsumeIntInRange(0, high) for high in RANGES))
        new = damaged(files, reader, steps, inside)
        changed = [name for name in files if new[name] != files[name]]
        write_files(folder, {name: new[name] for name in changed})
        error = attempt(reader, folder)
        write_files(folder, {name: files[name] for name in changed})
        if error is not None:
            raise error

    atheris.Setup([sys.argv[0], *USUAL, *limits], once)
    atheris.Fuzz()
    sys.exit()


if __name__ == "__main__":
    main()
