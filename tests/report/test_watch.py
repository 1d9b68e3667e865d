"""Watching a run: from files that are still being written, by a process that is still writing them."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from fedc2i.core.errors import UserError
from fedc2i.core.files import is_locked, locked
from fedc2i.data.federation import Federation
from fedc2i.models.model import Model
from fedc2i.report import watch_view
from fedc2i.report.watch_state import RunWatcher
from fedc2i.report.watch_view import BARS, sparkline, view, watch
from fedc2i.runs.driver import compute
from fedc2i.runs.fingerprint import Fingerprint
from fedc2i.runs.folder import RunFolder, write_report
from fedc2i.runs.plan import prepare
from fedc2i.runs.results import Result
from fedc2i.runs.writer import begin as note_start
from support.helpers import call, write_arrays


@pytest.fixture(scope="module")
def finished(make_federation: Callable[..., Federation], make_model: Callable[..., Model]) -> Result:
    settings = {"rounds": 4, "seeds": (0, 1), "epochs": 1, "device": "cpu"}
    (plan,) = prepare(["fedc2i"], settings, make_federation((12, 10, 8)), make_model())
    return compute(plan)


def begun(folder: Path, result: Result, rounds: int) -> RunFolder:
    """A folder as a run leaves it after some rounds."""
    files = RunFolder(folder, result.federation.names)
    files.begin(result.config)
    for number in range(1, rounds + 1):
        write_round(folder, files, result, number)
    return files


def write_round(folder: Path, files: RunFolder, result: Result, number: int) -> None:
    for report in result.rounds:
        if report.round == number:
            files.record(report)
            write_report(folder / "rounds" / f"seed{report.seed}", report)


def shown(state: object, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(view(state, width))  # type: ignore[arg-type]
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_reads_a_run_that_grows(tmp_path: Path, finished: Result) -> None:
    files = begun(tmp_path, finished, 2)
    follower = RunWatcher(tmp_path)
    state = follower.read()
    assert (state.round, state.rounds, state.finished) == (2, 4, False)
    assert state.clients == ["a", "b", "c"]
    rounds, curve = finished.curve("received")
    assert state.curve("received", "b") == pytest.approx(curve[:2, 1], abs=1e-5)
    assert state.curve("trained") == pytest.approx(finished.curve("trained")[1][:2].mean(1), abs=1e-5)
    influence = np.mean([finished.influence(seed=seed)[1] for seed in (0, 1)], axis=0)
    assert state.influence is not None
    assert state.influence[0] == 2
    np.testing.assert_allclose(state.influence[1], influence, rtol=1e-6)
    write_round(tmp_path, files, finished, 3)
    state = follower.read()
    assert state.round == 3
    assert len(state.curve("received")) == 3
    write_round(tmp_path, files, finished, 4)
    files.finish(finished)
    state = follower.read()
    assert state.finished
    assert state.curve("received", "b") == pytest.approx(curve[:, 1], abs=1e-5)
    assert len(rounds) == 4


def test_influence_is_the_mean_of_seeds_that_were_written_between_two_looks(tmp_path: Path, finished: Result) -> None:
    """Seeds write one after the other; the second's report must not push the first's out."""
    files = begun(tmp_path, finished, 1)
    follower = RunWatcher(tmp_path)
    vectors = []
    for report in (report for report in finished.rounds if report.round == 2):
        files.record(report)
        write_report(tmp_path / "rounds" / f"seed{report.seed}", report)
        vectors.append(report.influence["influence_vector"])
        number, found = follower.read().influence or (0, np.zeros(0))
        assert number == 2
        np.testing.assert_allclose(found, np.mean(vectors, axis=0), rtol=1e-6)
    assert len(vectors) == 2


def test_what_one_seed_did_not_measure_is_the_others(tmp_path: Path, finished: Result) -> None:
    reports = [replace(report, influence=dict(report.influence)) for report in finished.rounds if report.round == 1]
    blank = reports[0].influence["influence_vector"].copy()
    blank[1] = np.nan
    reports[0].influence["influence_vector"] = blank
    partly = replace(finished, rounds=reports)
    begun(tmp_path, partly, 1)
    _, found = RunWatcher(tmp_path).read().influence or (0, np.zeros(0))
    np.testing.assert_allclose(found[1], reports[1].influence["influence_vector"][1], rtol=1e-6)


def test_a_torn_line_is_read_when_it_is_whole(tmp_path: Path, finished: Result) -> None:
    begun(tmp_path, finished, 2)
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes()
    cut = whole.rindex(b"\n", 0, len(whole) - 1) + 12
    path.write_bytes(whole[:cut])
    inode = path.stat().st_ino
    follower = RunWatcher(tmp_path)
    before = follower.read().scores["trained"][2]
    with path.open("ab") as file:
        file.write(whole[cut:])
    assert path.stat().st_ino == inode
    after = follower.read()
    assert after.curve("received") == RunWatcher(tmp_path).read().curve("received")
    assert len(after.scores["trained"][2]) == 3 >= len(before)


def test_lines_of_others_are_passed_over(tmp_path: Path, finished: Result) -> None:
    begun(tmp_path, finished, 1)
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'not json\n{"seed": 0}\n[]\n\xff\n')
    assert RunWatcher(tmp_path).read().round == 1


def test_a_run_that_goes_on_begins_its_metrics_anew(tmp_path: Path, finished: Result) -> None:
    files = begun(tmp_path, finished, 3)
    follower = RunWatcher(tmp_path)
    assert len(follower.read().curve("trained")) == 3
    files.restart([report for report in finished.rounds if report.round == 1])
    assert len(follower.read().curve("trained")) == 1


def test_time_left_comes_from_the_times_of_files(tmp_path: Path, finished: Result) -> None:
    files = begun(tmp_path, finished, 2)
    for seed in (0, 1):
        for number, written in ((1, 1000.0), (2, 1030.0)):
            os.utime(tmp_path / "rounds" / f"seed{seed}" / f"round{number:06d}.npz", (written, written))
    for name in ("metrics.jsonl", "config.toml"):
        os.utime(tmp_path / name, (1030.0, 1030.0))
    state = RunWatcher(tmp_path, clock=lambda: 1040.0).read()
    assert (state.seconds_left, state.silent_for) == (2 * 30 - 10, 10)
    assert "50 s left" in shown(state)
    late = RunWatcher(tmp_path, clock=lambda: 1500.0).read()
    assert late.seconds_left == 0
    assert "nothing new for 7 min 50 s" in shown(late)
    files.finish(finished)
    assert "finished" in shown(RunWatcher(tmp_path).read())


def test_without_reports_time_is_counted_from_the_beginning(tmp_path: Path, finished: Result) -> None:
    files = RunFolder(tmp_path, finished.federation.names)
    files.begin(finished.config)
    state = RunWatcher(tmp_path).read()
    assert (state.round, state.seconds_left) == (0, None)
    assert "no round has been scored yet" in shown(state)
    for report in finished.rounds:
        if report.round == 1:
            files.record(report)
    os.utime(tmp_path / "config.toml", (1000.0, 1000.0))
    os.utime(tmp_path / "metrics.jsonl", (1020.0, 1020.0))
    state = RunWatcher(tmp_path, clock=lambda: 1020.0).read()
    assert state.seconds_left == 60
    assert state.influence is None


def test_refused_clients_are_named(tmp_path: Path, finished: Result) -> None:
    files = begun(tmp_path, finished, 0)
    for report in finished.rounds[:2]:
        refusing = replace(report, refused=("b",))
        files.record(refusing)
        write_report(tmp_path / "rounds" / "seed0", refusing)
    follower = RunWatcher(tmp_path)
    assert "rejected uploads: b 2" in shown(follower.read())
    assert "rejected uploads: b 2" in shown(follower.read())  # not counted again


def test_picture_has_curves_values_and_influence(tmp_path: Path, finished: Result) -> None:
    begun(tmp_path, finished, 3)
    state = RunWatcher(tmp_path).read()
    text = shown(state)
    assert "FedC²I on toy, seeds 0, 1: round 3 of 4" in text
    for name in ("a", "b", "c"):
        line = next(line for line in text.splitlines() if line.split()[:1] == [name])
        assert sum(letter in BARS for letter in line) == 6  # three rounds, two points
    assert f"{state.curve('received', 'a')[-1]:.2f}" in text
    assert state.influence is not None
    assert f"{state.influence[1][0, 2]:.3f}" in text
    narrow = shown(state, 24)
    assert max(len(line.rstrip()) for line in narrow.splitlines()) <= 24


def test_sparkline() -> None:
    assert sparkline([0, 40, 100], 0, 100) == "▁▄█"
    assert sparkline([0, float("nan"), 100], 0, 100) == "▁ █"
    assert sparkline([7, 7], 7, 7) == "▁▁"
    assert sparkline(range(8), 0, 7) == BARS


def test_of_many_rounds_some_are_drawn_the_last_always(tmp_path: Path) -> None:
    lines(tmp_path, [(number, "a", float(number)) for number in range(1, 1001)])
    state = RunWatcher(tmp_path).read()
    assert len(state.curve("trained")) == 1000
    assert state.curve("trained", "a", most=4) == [1, 334, 667, 1000]
    assert state.curve("trained", most=1001) == state.curve("trained")
    text = shown(state)
    assert "1000.00" in text
    assert f" {BARS[0]}" in text
    assert BARS[-1] in text


def test_a_name_cannot_speak_to_the_terminal(tmp_path: Path) -> None:
    """Nor a method, nor data: all of it comes from a folder of somebody else's."""
    lines(tmp_path, [(1, "Sc\x1b]0;title\x07\x1b[31mans", 50.0)])
    (tmp_path / "config.toml").write_text('method = "x\\u001b[31m"\ndata = "d\\u001b[2J"\nrounds = 3\nseeds = [0]\n')
    text = shown(RunWatcher(tmp_path).read())
    assert "ans" in text
    assert "\x1b" not in text


def lines(folder: Path, values: list[tuple[int, str, float]]) -> None:
    """A run folder with these rounds, clients and accuracies, at both points."""
    (folder / "config.toml").write_text('method = "x"\nrounds = 3\nseeds = [0]\n')
    entries = [
        {"seed": 0, "round": number, "client": client, "point": point, "metric": "accuracy", "value": value}
        for number, client, value in values
        for point in ("received", "trained")
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))


def test_many_clients_are_cut_and_said(tmp_path: Path) -> None:
    lines(tmp_path, [(1, f"client {k}", float(k)) for k in range(50)])
    text = shown(RunWatcher(tmp_path).read())
    assert "client 19" in text
    assert "client 20" not in text
    assert "30 more clients are in the average" in text
    assert "24.50" in text


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no config\.toml"):
        watch(tmp_path, Console(file=io.StringIO()))
    answer = call("watch", str(tmp_path), "--every", "0")
    assert (answer.code, "above 0" in answer.err) == (2, True)


def test_a_finished_run_is_printed_once(tmp_path: Path, finished: Result) -> None:
    begun(tmp_path, finished, 4).finish(finished)
    answer = call("watch", str(tmp_path))
    assert answer.code == 0
    assert answer.out.count("round 4 of 4, finished") == 1


WRITER = """
import sys
import fedc2i
data, out, rounds, *wanted = sys.argv[1:]
settings = {"rounds": int(rounds), "epochs": 1, "device": "cpu", "model": "lenet5", "executor": "looped"}
if len(wanted) > 1:
    fedc2i.compare(wanted, data, out=out, **settings)
else:
    fedc2i.run(wanted[0], data, out=out, **settings)
"""


def test_two_processes(tmp_path: Path, make_federation: Callable[..., Federation]) -> None:
    """One computes, the other watches through a pipe from before the first round to the end."""
    data = write_arrays(tmp_path / "data", make_federation((40, 40, 40)))
    writer = subprocess.Popen([sys.executable, "-c", WRITER, data, str(tmp_path / "run"), "6", "fedc2i"])
    try:
        while not (tmp_path / "run" / "config.toml").is_file():
            assert writer.poll() is None
            time.sleep(0.01)
        console = Console(file=io.StringIO(), width=120)
        watch(tmp_path / "run", console, every=0.1)
    finally:
        assert writer.wait(120) == 0
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    told = [line for line in lines if "round" in line and "FedC²I on arrays" in line]
    assert told, lines
    assert not any("fedc2i on arrays" in line or "nobody" in line for line in lines)
    assert "round 6 of 6, finished" in "\n".join(lines)
    assert any("whose model weighs most" in line for line in lines)


def test_in_a_terminal_the_picture_is_drawn_again(tmp_path: Path, finished: Result) -> None:
    files = begun(tmp_path, finished, 1)

    def go_on() -> None:
        for number in (2, 3, 4):
            time.sleep(0.1)
            write_round(tmp_path, files, finished, number)
        files.finish(finished)

    writing = threading.Thread(target=go_on)
    writing.start()
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system="truecolor")
    watch(tmp_path, console, every=0.02)
    writing.join()
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "round 1 of 4" in text
    assert "round 4 of 4, finished" in text
    assert "\x1b[?25h" in text  # the cursor is back
    assert "48;2;" in text  # shaded
    assert text.count("whose model weighs most") > 2


def test_a_comparison_is_watched_run_after_run(tmp_path: Path, finished: Result) -> None:
    plan = {"runs": [{"folder": "fedc2i"}, {"folder": "other"}, {"folder": "not-begun"}]}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    for name in ("fedc2i", "other"):
        begun(tmp_path / name, finished, 4).finish(finished)
    assert call("watch", str(tmp_path), "--once").out.count("round 4 of 4, finished") == 2


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_ctrl_c_ends_watching_and_nothing_else(tmp_path: Path, finished: Result) -> None:
    begun(tmp_path, finished, 1)
    watching = subprocess.Popen(
        [sys.executable, "-u", "-m", "fedc2i", "watch", str(tmp_path), "--every", "0.05"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job's is ignored
    )
    assert watching.stdout is not None
    assert "round 1 of 4" in watching.stdout.readline()
    watching.send_signal(signal.SIGINT)
    out, err = watching.communicate(timeout=60)
    assert "Traceback" not in err
    assert "the run continues" in out
    assert watching.returncode == 0


def cut_off(folder: Path, data: str, *wanted: str, after: str) -> None:
    """A run of many rounds that is killed when a certain file is there."""
    writer = subprocess.Popen([sys.executable, "-c", WRITER, data, str(folder), "5000", *wanted])
    try:
        while not (folder / after).is_file():
            assert writer.poll() is None
            time.sleep(0.01)
        assert is_locked(folder)
        assert not RunWatcher((folder / after).parents[2], comparison=folder).read().interrupted
    finally:
        writer.kill()
        writer.wait(60)


@pytest.mark.skipif(os.name != "posix", reason="locks")
def test_a_run_that_was_killed_is_not_waited_for(
    tmp_path: Path, make_federation: Callable[..., Federation], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_view, "GRACE", 0.5)
    folder = tmp_path / "a run"
    cut_off(
        folder, write_arrays(tmp_path / "data", make_federation((8, 8))), "fedc2i", after="rounds/seed0/round000001.npz"
    )
    assert not is_locked(folder)
    answer = call("watch", str(folder), "--once")
    assert answer.code == 0
    assert f"`fedc2i resume '{folder}'` resumes it" in answer.out
    assert " left" not in answer.out
    for terminal in (False, True):
        console = Console(file=io.StringIO(), width=100, force_terminal=terminal)
        watch(folder, console, every=0.05)
        assert console.file.getvalue().count("resumes it") == 1  # type: ignore[attr-defined]


@pytest.mark.skipif(os.name != "posix", reason="locks")
def test_a_comparison_that_was_killed_is_not_waited_for(
    tmp_path: Path, make_federation: Callable[..., Federation], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_view, "GRACE", 0.5)
    folder, data = tmp_path / "both", write_arrays(tmp_path / "data", make_federation((8, 8)))
    cut_off(folder, data, "local", "fedc2i", after="local/rounds/seed0/round000001.npz")
    for once in (False, True):
        console = Console(file=io.StringIO(), width=100)
        watch(folder, console, every=0.05, once=once)
        text = console.file.getvalue()  # type: ignore[attr-defined]
        assert text.count(f"`fedc2i resume {folder}` resumes it") == 1
    with locked(folder):  # somebody goes on with the whole, and has not come to this run yet
        assert not RunWatcher(folder / "local", comparison=folder).read().interrupted


@pytest.mark.skipif(os.name != "posix", reason="locks")
def test_only_a_run_in_one_process_is_judged(tmp_path: Path, finished: Result) -> None:
    """One over real sites has no lock; one that is begun here has, and one that goes on has it again."""
    begun(tmp_path, finished, 2)
    assert not RunWatcher(tmp_path).read().interrupted  # nothing says that it was begun in one process
    note_start(tmp_path, Fingerprint("", {}, {}, "cpu"), 0, 0, print)
    follower = RunWatcher(tmp_path)
    assert follower.read().interrupted
    assert "round 2 of 4, interrupted" in shown(follower.read())
    with locked(tmp_path):
        assert not follower.read().interrupted
    RunFolder(tmp_path, finished.federation.names).begin(replace(finished.config, engine="flower"))
    assert not RunWatcher(tmp_path).read().interrupted


def test_somebody_who_starts_in_the_grace_is_waited_for(
    tmp_path: Path, finished: Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_view, "GRACE", 0.5)
    files = begun(tmp_path, finished, 2)
    note_start(tmp_path, Fingerprint("", {}, {}, "cpu"), 0, 0, print)
    for path in tmp_path.rglob("*"):
        os.utime(path, (1000.0, 1000.0))

    def go_on() -> None:
        time.sleep(0.1)
        with locked(tmp_path):
            time.sleep(0.8)
            files.finish(finished)

    working = threading.Thread(target=go_on)
    working.start()
    console = Console(file=io.StringIO(), width=100)
    watch(tmp_path, console, every=0.02)
    working.join()
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "finished" in text
    assert "resumes it" not in text


@pytest.mark.skipif(os.name != "posix", reason="locks")
def test_asking_for_the_lock_keeps_nobody_from_it(tmp_path: Path) -> None:
    """Who asks holds it for a moment; one that is held longer is somebody's at work."""
    import fcntl

    descriptor = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    asked = threading.Timer(0.02, os.close, [descriptor])
    asked.start()
    with locked(tmp_path):
        assert is_locked(tmp_path)
        with pytest.raises(UserError, match="another process is at work"), locked(tmp_path):
            pass
    asked.join()
    assert not is_locked(tmp_path)
    assert is_locked(tmp_path / "not there")  # nobody can know


def test_a_run_keeps_the_name_it_was_shown_by(tmp_path: Path, finished: Result) -> None:
    files = begun(tmp_path, finished, 2)
    RunFolder(tmp_path, finished.federation.names).begin(
        replace(finished.config, options={**finished.config.options, "gamma": 2.0, "influence": "first-order"})
    )
    follower = RunWatcher(tmp_path)
    assert follower.read().title == "FedC²I (gamma=2.0, influence=first-order) on toy"
    files.begin(finished.config)
    files.finish(finished)
    assert follower.read().title == "FedC²I (gamma=2.0, influence=first-order) on toy"
    assert RunWatcher(tmp_path).read().title == "FedC²I on toy"
