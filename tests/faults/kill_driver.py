"""Kills runs at many moments and goes on with each: one process that imports everything once and forks for every run.

``python kill_driver.py FOLDER COUNT SEED AGAIN`` prints one JSON line for each kill: where it was, how often the run
was cut off in all, and what is not as in an uninterrupted run (nothing). AGAIN: the chance to kill a resumed run.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

import conftest
import fedc2i
from fedc2i.core.errors import UserError
from fedc2i.core.files import write_atomically
from fedc2i.engine import checkpoint
from fedc2i.engine.client import LocalClient
from fedc2i.engine.exchange import Mailbox, Server
from fedc2i.report import figures
from fedc2i.runs import writer
from fedc2i.runs.driver import execute
from fedc2i.runs.folder import RunFolder
from fedc2i.runs.plan import prepare
from fedc2i.runs.writer import RunWriter

FEDERATION = conftest._federation((11, 9, 7), validation=4)
MODEL = conftest._model()
SETTINGS: dict[str, Any] = {
    **{"rounds": 4, "epochs": 1, "batch_size": 6, "lr": 0.02, "seeds": (2, 0), "clients_per_round": 2, "patience": 2},
    **{"executor": "looped", "device": "cpu", "checkpoint_seconds": 0},
}


def named(*ends: str) -> Callable[..., bool]:
    """Of a path's operations, those on files whose name ends so, or did before ``.PID.part`` was added."""
    return lambda path, *rest: path.name.removesuffix(f".{os.getpid()}.part").endswith(ends)


def anything(*given: Any) -> bool:
    return True


class Moment(NamedTuple):
    """When a process is killed: at some call of a function that is ``about`` something.

    ``before`` or ``after`` the call, or in the ``middle``: half of what is to be written is.
    """

    label: str
    owner: Any
    name: str
    when: str = "before"
    about: Callable[..., bool] = anything


MOMENTS = [
    Moment("in local training", LocalClient, "train"),
    Moment("behind local training", LocalClient, "train", "after"),
    Moment("at an upload", LocalClient, "upload"),
    Moment("at the mailbox", Mailbox, "receive"),
    Moment("before combining", Server, "combine"),
    Moment("behind combining", Server, "combine", "after"),
    Moment("in personalising", LocalClient, "personalise"),
    Moment("in evaluation", LocalClient, "scored"),
    Moment("before a report is kept", writer, "write_report"),
    Moment("half a report written", Path, "write_bytes", "middle", named(".npz")),
    Moment("behind a report", writer, "write_report", "after"),
    Moment("before metrics are appended", RunFolder, "record"),
    Moment("half the metrics appended", RunFolder, "record", "middle"),
    Moment("behind metrics", RunFolder, "record", "after"),
    Moment("before a report is handed over", RunWriter, "record"),
    Moment("before a state is copied", writer, "snapshot"),
    Moment("a state copied, not written", writer, "snapshot", "after"),
    Moment("between metrics and a checkpoint", RunWriter, "_write_checkpoint"),
    Moment("behind a checkpoint", RunWriter, "_write_checkpoint", "after"),
    Moment("before tensors are written", checkpoint, "pieces"),
    Moment("half the tensors written", checkpoint, "pieces", "middle"),
    Moment("tensors written, not renamed", Path, "replace", "before", named(".safetensors")),
    Moment("tensors renamed", Path, "replace", "after", named(".safetensors")),
    Moment("half the JSON written", Path, "write_bytes", "middle", named(".json")),
    Moment("JSON written, not renamed", Path, "replace", "before", named(".json")),
    Moment("JSON renamed", Path, "replace", "after", named(".json")),
    Moment("waiting for the disk", os, "fsync"),
    Moment("removing an old checkpoint", Path, "unlink", "after", named(".json", ".safetensors")),
    Moment("writing settings and the first metrics", Path, "replace", "before", named(".toml", ".jsonl")),
    Moment("drawing figures", figures, "draw_run"),
    Moment("before the models are written", RunFolder, "finish"),
    Moment("between models and summary", Path, "replace", "after", named("influence.npz")),
    Moment("behind the summary", RunFolder, "finish", "after"),
    Moment("while tidying up", shutil, "rmtree", "after"),
    Moment("behind the run", writer, "remove", "after"),
]


def instrument(moment: Moment, at: int, act: Callable[[], None]) -> None:
    """``act`` is called at the ``at``-th such call in this process; 0: at every one."""
    real, calls = getattr(moment.owner, moment.name), [0]

    def call(*given: Any, **more: Any) -> Any:
        if not moment.about(*given):
            return real(*given, **more)
        calls[0] += 1
        now = at in (0, calls[0])
        if now and moment.when == "before":
            act()
        if now and moment.when == "middle" and at:
            if moment.name == "write_bytes":
                real(given[0], given[1][: len(given[1]) // 2])
            elif moment.name == "pieces":
                return half(list(real(*given)), act)
            else:
                folder, report = given
                lines = folder._lines(report)
                with (folder.path / "metrics.jsonl").open("a") as file:
                    file.write(lines[: len(lines) // 2 - 3])
            act()
        result = real(*given, **more)
        if now and (moment.when == "after" or (moment.when == "middle" and not at)):
            act()
        return result

    setattr(moment.owner, moment.name, call)


def half(pieces: list[Any], act: Callable[[], None]) -> Iterator[Any]:
    yield from pieces[: len(pieces) // 2]
    act()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def begin(folder: Path) -> None:
    execute(prepare(["fedc2i"], SETTINGS, FEDERATION, MODEL)[0], folder, draw=figures.draw_run)


def go_on(folder: Path) -> None:
    """As a user would: one that had not started is begun."""
    try:
        fedc2i.resume(folder, FEDERATION, MODEL)
    except UserError as error:
        if "had not started" not in str(error) and "no such folder" not in str(error):
            raise
        shutil.rmtree(folder, ignore_errors=True)
        begin(folder)


def in_child(work: Callable[[], None], kill_after: float | None = None) -> int:
    """The signal that ended the process, 0 for none."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        raise RuntimeError("a run failed")
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def content(folder: Path) -> dict[str, Any]:
    """Every file of a finished run, without times; influence by its arrays, as an archive knows when it was made."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_dir():
            found[name] = "a folder"
        elif name == "summary.json":
            summary = json.loads(path.read_text())
            found[name] = {part: own for part, own in summary.items() if not part.startswith("seconds")}
        elif name == "influence.npz":
            with np.load(path) as archive:
                found[name] = {part: archive[part].tobytes() for part in archive.files}
        else:
            found[name] = path.read_bytes()
    return found


def count(folder: Path) -> tuple[list[int], float]:
    """How often each moment comes in a whole run, and how long that takes."""
    found = []
    read, write = os.pipe()

    def counted() -> None:
        tallies = [0] * len(MOMENTS)

        def tally(k: int) -> None:
            tallies[k] += 1

        for k, moment in enumerate(MOMENTS):
            instrument(moment, 0, lambda k=k: tally(k))
        begin(folder)
        os.write(write, json.dumps(tallies).encode())

    assert in_child(counted) == 0
    found = json.loads(os.read(read, 65536))
    began = time.perf_counter()
    assert in_child(lambda: begin(folder.with_name("timed"))) == 0
    return found, time.perf_counter() - began


def draw(result: Any, folder: Path) -> None:
    """In place of figures, which take longer than all the rest."""
    write_atomically(folder / "accuracy.png", b"a figure")


def main() -> None:
    folder, wanted, dice = Path(sys.argv[1]), int(sys.argv[2]), random.Random(int(sys.argv[3]))
    again = float(sys.argv[4])
    figures.draw_run = draw
    counts, seconds = count(folder / "counted")
    whole = content(folder / "timed")
    assert content(folder / "counted") == whole
    assert len({len(own) for own in reports_by_seed(folder / "timed").values()}) == 2, "one seed is to end early"
    missing = [moment.label for moment, times in zip(MOMENTS, counts, strict=True) if not times]
    assert not missing, f"never reached: {missing}"
    cases: list[int | None] = [*range(len(MOMENTS)), *[None] * max(wanted - len(MOMENTS), 0)]
    for number, k in enumerate(cases if wanted > len(MOMENTS) else dice.sample(cases, wanted)):
        own, cuts, where = folder / f"case{number}", 0, []
        while True:
            if cuts and dice.random() >= again:  # it is not cut off any more
                assert in_child(lambda own=own: go_on(own)) == 0
                break
            work = begin if cuts == 0 else go_on
            if k is None:
                late = dice.uniform(0, seconds)
                where.append(f"after {late:.2f} s")
                ended = in_child(lambda work=work, own=own: work(own), late)
            else:
                at = dice.randint(1, counts[k])
                where.append(f"{MOMENTS[k].label}, {at} of {counts[k]}")

                def killed(k: int = k, at: int = at, work: Callable[[Path], None] = work, own: Path = own) -> None:
                    instrument(MOMENTS[k], at, die)
                    work(own)

                ended = in_child(killed)
                assert cuts or ended == signal.SIGKILL, "it was never reached"
            cuts += ended == signal.SIGKILL
            if ended == 0:  # it was finished before
                break
        got = content(own)
        differs = sorted(name for name in {**got, **whole} if got.get(name) != whole.get(name))
        print(json.dumps({"where": where, "cuts": cuts, "differs": differs}), flush=True)
        shutil.rmtree(own)


def reports_by_seed(folder: Path) -> dict[int, set[int]]:
    found: dict[int, set[int]] = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        entry = json.loads(line)
        found.setdefault(entry["seed"], set()).add(entry["round"])
    return found


if __name__ == "__main__":
    main()
