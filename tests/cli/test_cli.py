"""The command line: what it prints and where, how it ends, and that a mistake is one line and leaves nothing behind."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pytest
import typer
from PIL import Image
from typer.testing import CliRunner

from fedc2i import Federation, __version__
from fedc2i.cli.main import main
from fedc2i.cli.shared import setting_flags, watched
from fedc2i.core.options import flags
from fedc2i.methods.base import Method
from fedc2i.runs.settings import RunSettings
from support.helpers import QUICK, call, files_below, write_arrays

PROGRAM = (sys.executable, "-c", "from fedc2i.cli.main import main; main()")
PLAIN = {name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR", "TTY_COMPATIBLE", "COLUMNS")}


def process(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """``fedc2i ARGUMENTS`` as a program of its own."""
    return subprocess.run([*PROGRAM, *arguments], capture_output=True, text=True, env=PLAIN, **options)


@pytest.fixture(autouse=True)
def own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDC2I_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FEDC2I_DATA", raising=False)


@pytest.fixture
def data(make_federation: Callable[..., Federation]) -> str:
    write_arrays(Path("data"), make_federation((12, 20, 7)))
    return "arrays:data"


# As a program of its own.


def test_mistake_is_one_line_and_exit_code_2() -> None:
    done = process("run", "--round", "3")  # found without torch
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("fedc2i: error: No such option")
    assert files_below(Path()) == {".": None}


def test_reader_that_goes_away_is_no_error() -> None:
    with subprocess.Popen([*PROGRAM, "methods"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdout.close()
        assert running.stderr.read() == b""


def test_terminal_shows_a_bar_with_rounds_and_accuracies(data: str) -> None:
    ours, theirs = pty.openpty()
    command = [*PROGRAM, "run", "fedc2i", "--data", data, *QUICK, "--rounds", "2", "--out", "out"]
    environment = {**PLAIN, "TERM": "xterm-256color", "COLUMNS": "140"}
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as running:
        os.close(theirs)
        shown = read_to_end(ours).decode()
    assert running.returncode == 0
    for words in (
        "\x1b[",
        "━",
        "[1/1] FedC²I, seed 0",
        "2/2",
        "client 3/3",
        "before local training",
        "Run folder: out",
    ):
        assert words in shown


def read_to_end(terminal: int) -> bytes:
    """All that arrives until the other side has gone, which Linux reports as an error."""
    parts = []
    try:
        while part := os.read(terminal, 4096):
            parts.append(part)
    except OSError:
        pass
    finally:
        os.close(terminal)
    return b"".join(parts)


# In this process.


def test_run_with_json_keeps_stdout_for_one_object(data: str) -> None:
    done = call("run", "fedc2i", "--data", data, *QUICK, "--seeds", "0,1", "--out", "out", "--json")
    assert done.code == 0
    found = json.loads(done.out)
    assert found["folder"] == "out"
    assert found["results"]["fedc2i"] == json.loads(Path("out/summary.json").read_text())
    lines = done.err.splitlines()
    assert lines[0].startswith(
        "arrays:data: 3 clients, 4 classes, images 16x16; train/validation/test: a 12/0/8, b 20/"
    )
    assert lines[1:3] == [
        "warning: neither training nor test samples of classes that others have: a (3)",
        "Writing to out",
    ]
    assert [line.split(":")[0] for line in lines[3:]] == ["[1/1] FedC²I, seeds 0, 1"]
    assert all(" 1 round in " in line and "% before local training" in line and "% after" in line for line in lines[3:])
    assert "\x1b" not in done.out + done.err


def test_compare_prints_plain_tables_where_there_is_no_terminal(data: str) -> None:
    shown = call("compare", "local", "fedc2i:gamma=2", "--data", data, *QUICK)
    assert shown.code == 0
    assert "\x1b" not in shown.out + shown.err
    for words in (
        "Test accuracy (%) on arrays:data",
        "FedC²I (gamma=2.0)",
        "after *",
        "Whose model weighs most",
        "Avg",
    ):
        assert words in shown.out
    assert shown.out.rstrip().splitlines()[-1].startswith("Run folder: runs/compare-data-001")
    assert {path.name for path in Path("runs/compare-data-001").iterdir()} >= {"local", "comparison.md"}


def test_terminal_that_cannot_show_greek(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
    monkeypatch.setattr("sys.stdout", shown)
    monkeypatch.setattr("sys.argv", ["fedc2i", "methods", "--json"])
    with pytest.raises(SystemExit, match="0"):
        main()
    found = json.loads(shown.buffer.getvalue().decode("ascii"))  # type: ignore[attr-defined]
    assert "γ" in found["methods"]["fedc2i"]["options"]["gamma"]["about"]


def test_version_and_help() -> None:
    assert call("--version") == (0, f"{__version__}\n", "")
    listed = call("--help").out
    places = [listed.index(f" {word} ") for word in ("Run", "run", "compare", "Look", "Deploy", "Reference", "privacy")]
    assert places == sorted(places)
    for command in ((), ("run",), ("compare",), ("methods",), ("data",), ("data", "ls")):
        shown = call(*command, "--help")
        assert shown.code == 0
        assert shown.out.strip().startswith("Usage: ")
    assert "--set" in call("run", "--help").out
    assert "ablation" in call("paper", "--help").out  # help of an argument


@pytest.mark.parametrize("arguments", [(), ("data",)])
def test_nothing_asked_for_shows_the_help(arguments: Sequence[str]) -> None:
    shown = call(*arguments)
    assert shown.code == 2
    assert (shown.out + shown.err).strip().startswith("Usage: fedc2i")
    assert len((shown.out + shown.err).splitlines()) > 5


def test_methods_lists_methods_or_the_options_of_one() -> None:
    listed = call("methods")
    assert listed.code == 0
    lines = listed.out.splitlines()
    assert [line.split()[0] for line in lines[: len(Method.registry)]] == sorted(Method.registry)
    assert len(lines) == len(Method.registry) + 1
    shown = call("methods", "fedc2i").out
    for word in ("fedc2i: ", "gamma", "5.0", "clients_per_round", "100%"):
        assert word in shown
    assert "reconstruct" in call("methods", "fedcalm").out.lower()
    assert "unknown method 'fedsgd'" in call("methods", "fedsgd").err
    found = json.loads(call("methods", "--json").out)
    assert set(found["methods"]) == set(Method.registry)
    assert found["methods"]["fedc2i"]["options"]["gamma"]["default"] == 5.0
    assert {**found["settings"]["lr"], "allowed": ""} == {"default": 1e-3, "allowed": "", "about": "learning rate"}
    assert "number" in found["settings"]["lr"]["allowed"]


def test_table_tells_what_the_folder_holds(data: str) -> None:
    shown = call("run", "fedavg", "--data", data, *QUICK, "--out", "out")
    average = json.loads(Path("out/summary.json").read_text())["points"]["received"]["accuracy"]["Avg"]["mean"]
    assert f"{average:.2f}" in shown.out
    assert "Whose model weighs most" not in shown.out


@pytest.mark.parametrize("sizes", [(12,), (12, 9)], ids=["one client", "two clients"])
@pytest.mark.parametrize("method", ["fedavg", "fedc2i"])
def test_few_clients(make_federation: Callable[..., Federation], sizes: tuple[int, ...], method: str) -> None:
    data = write_arrays(Path("data"), make_federation(sizes))
    assert call("run", method, "--data", data, *QUICK, "--out", "out").code == 0
    if method == "fedc2i":
        with np.load("out/influence.npz") as arrays:
            np.testing.assert_allclose(arrays["seed0_influence_vector"].sum(2), 1, atol=1e-6)
            assert arrays["seed0_influence_vector"].shape == (1, len(sizes), len(sizes))


def test_names_and_folders_with_brackets(make_federation: Callable[..., Federation]) -> None:
    data = write_arrays(Path("my[old]data"), make_federation((8, 9)))
    shown = call("run", "fedc2i", "--data", data, *QUICK, "--out", "out[/b]")
    assert shown.code == 0
    assert "Writing to out[/b]" in shown.err
    assert "Run folder: out[/b]" in shown.out
    assert "my[old]data" in shown.out


def test_partition_from_the_command_line(make_federation: Callable[..., Federation]) -> None:
    data = write_arrays(Path("data"), make_federation((20, 20)))
    shown = call("run", "local", "--data", data, "--partition", "iid:2", *QUICK, "--out", "out", "--json")
    assert json.loads(shown.out)["results"]["local"]["clients"] == ["a/1", "a/2", "b/1", "b/2"]


# Flags that derive from the settings.


@pytest.mark.parametrize("command", ["run", "flower-local", "coordinator"])
def test_flags_reach_the_command_as_text_by_name(command: str) -> None:
    seen: list[tuple[str, Path | None, dict[str, str]]] = []
    app = typer.Typer()

    @app.command()
    @setting_flags(command)  # type: ignore[arg-type]
    def some(
        method: Annotated[str, typer.Argument()],
        settings: dict[str, str],
        out: Annotated[Path | None, typer.Option()] = None,
    ) -> None:
        """Helps."""
        seen.append((method, out, settings))

    done = CliRunner().invoke(app, ["fedavg", "--rounds", "3", "--model", "lenet5", "--out", "x"])
    assert done.exit_code == 0, done.output
    assert seen == [("fedavg", Path("x"), {"rounds": "3", "model": "lenet5"})]
    text = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"}).output
    assert "Helps." in text
    assert all(flag.flag in text and flag.help[:20] in text for flag in flags(RunSettings, command))  # type: ignore[arg-type]
    assert CliRunner().invoke(app, ["fedavg", "--lr", "1"]).exit_code == 2


# Mistakes.


def picture(path: str) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (16, 16)).save(path)


def images() -> None:
    for number in range(4):
        picture(f"images/north/cat/{number}.png")
        picture(f"images/north/dog/{number}.png")


def empty_class() -> None:
    images()
    Path("images/north/owl").mkdir()


def corrupt_image() -> None:
    images()
    Path("images/north/cat/2.png").write_bytes(Path("images/north/cat/1.png").read_bytes()[:40])


def wrong_layout() -> None:
    images()
    picture("images/south/train/cat/1.png")


def with_file(name: str) -> Callable[[], None]:
    """Images, and beside them a text file."""

    def arrange() -> None:
        images()
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text("def broken(:")

    return arrange


def client_arrays(name: str, side: int = 16, label: int = 1) -> None:
    Path("sets").mkdir(exist_ok=True)
    x, y = np.zeros((6, side, side), np.uint8), np.array([0, 1, 2, 0, 1, label])
    np.savez(f"sets/{name}.npz", x_train=x, y_train=y, x_test=x, y_test=y, classes=np.array(["r", "s", "t"]))


def two_clients(**second: int) -> Callable[[], None]:
    def arrange() -> None:
        client_arrays("a")
        client_arrays("b", **second)

    return arrange


MISTAKES: dict[str, tuple[Callable[[], None], str, Sequence[str]]] = {
    "unknown method": (images, "run fedsgd", ["unknown method 'fedsgd'", "allowed are", "fedc2i"]),
    "unknown method to compare": (images, "compare local fedsgd", ["unknown method 'fedsgd'"]),
    "unknown option": (images, "run fedc2i --set gama=1", ["unknown setting 'gama'", "gamma", "rounds"]),
    "option of another method": (images, "run fedavg --set gamma=1", ["unknown setting 'gamma'", "weighting"]),
    "option in the spec": (images, "run fedc2i:gama=1", ["no option 'gama'", "gamma"]),
    "no value": (images, "run fedc2i --set gamma", ["--set takes KEY=VALUE, got 'gamma'"]),
    "options is no table": (images, "run fedc2i --set options=3 --set gamma=1", ["'options' must be a table"]),
    "unknown data": (images, "run fedc2i --data mnist", ["'mnist' is unknown", "digits, digit5, office10"]),
    "missing folder": (images, "run local --data folder:nowhere", ["nowhere"]),
    "unknown home": (images, "run local --data folder:~nobody-at-all/x", ["~nobody-at-all"]),
    "missing data": (images, "run local --data digit5 --data-dir images", ["MNIST"]),
    "client layout": (wrong_layout, "run local --data folder:images", ["mixed layouts", "DIR/<client>/<class>"]),
    "stray file": (with_file("images/notes.txt"), "run local --data folder:images", ["notes.txt", "folder per client"]),
    "empty class folder": (empty_class, "run local --data folder:images", ["owl", "empty class folder"]),
    "corrupt image": (corrupt_image, "run local --data folder:images", ["2.png", "cannot be read as an image"]),
    "other image size": (two_clients(side=20), "run local --data arrays:sets", ["client 'b'", "20x20", "16x16"]),
    "label out of range": (two_clients(label=3), "run local --data arrays:sets", ["label 3 is out of range", "0..2"]),
    "images too small": (images, "run local --data folder:images --set image_size=8", ["at least 16x16, got 8x8"]),
    "gamma below zero": (
        images,
        "run fedc2i --data folder:images --set gamma=-1",
        ["gamma", "at least 0", "got", "-1"],
    ),
    "unknown model": (images, "run local --data folder:images --model resnet", ["unknown model 'resnet'", "lenet5"]),
    "file without class": (with_file("own.py"), "run own.py", ["own.py: add :CLASS"]),
    "broken file": (with_file("own.py"), "run own.py:Mine", ["own.py:1: SyntaxError"]),
    "no validation data": (
        lambda: client_arrays("a"),
        "run fedc2i --data arrays:sets --set influence_split=validation --out out",
        ["client 'a' has no validation data"],
    ),
    "partition": (images, "run local --data folder:images --partition dirichlet", ["partition 'dirichlet'"]),
    "too many parts": (images, "run local --data folder:images --partition iid:9", ["at least", "smaller K"]),
    "rounds": (
        images,
        "run local --data folder:images --rounds five",
        ["rounds must be a whole number of at"],
    ),
    "no rounds": (images, "run local --data folder:images --rounds 0", ["rounds must be"]),
    "seeds": (images, "run local --data folder:images --seeds 1,1", ["seeds must be different"]),
    "device": (images, "run local --data folder:images --device tpu", ["device", "auto", "cpu", "cuda", "tpu"]),
    "config file": (images, "run --config nowhere.toml", ["nowhere.toml: cannot be read"]),
    "run folder exists": (
        with_file("out/summary.json"),
        "run local --data folder:images --out out",
        ["out: exists already", "--out"],
    ),
    "file in the way": (with_file("out"), "run local --data folder:images --out out", ["out: exists already"]),
    "cannot write": (with_file("out"), "run local --data folder:images --out out/run", ["out/run: cannot be written"]),
    "unknown command": (images, "train", ["No such command 'train'"]),
    "unknown flag": (images, "run --mu 3", ["No such option '--mu'", "are given as --set NAME=VALUE"]),
    "setting without a flag": (images, "run --data-seed 3", ["option '--data-seed', write --set data_seed=VALUE"]),
    "flag of a command without settings": (images, "report --ou x", ["option '--ou' (did you mean '--out'?)"]),
    "no method": (images, "compare", ["Missing argument 'METHOD...'. E.g. local fedavg"]),
    "no file to export to": (images, "export run", ["Missing option '--out'. A new file: .safetensors or .pt2."]),
    "same method twice": (images, "compare local local --data folder:images", ["Local is named 2 times"]),
    "unknown domain": (images, "data check kaggle", ["kaggle"]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_says_what_is_wrong_and_leaves_nothing_behind(mistake: str) -> None:
    arrange, command, words = MISTAKES[mistake]
    arrange()
    before = files_below(Path())
    answer = call(*command.split())
    assert answer.code == 2
    assert answer.out == ""
    (line,) = answer.err.splitlines()
    assert line.startswith("fedc2i: error: ")
    for word in words:
        assert word in line
    assert files_below(Path()) == before


@pytest.mark.parametrize("content", ["options = 3", "method = 3", "gama = 1\n[options]\ngamma = 1", "[data]\nname = 1"])
def test_mistakes_in_a_file(content: str) -> None:
    Path("mine.toml").write_text(content)
    answer = call("run", "--config", "mine.toml", "--set", "lr=0.1")
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.startswith("fedc2i: error: ")
    assert answer.err.endswith("(with the settings of mine.toml)\n")
    assert set(files_below(Path())) == {".", "mine.toml"}


def test_what_was_meant_is_asked_once() -> None:
    assert call("rum").err.count("Did you mean") == 1
    assert call("run", "--round", "3").err.count("(did you mean '--rounds'?)") == 1
    assert call("run", "--learning-rate", "3").err.endswith("No such option '--learning-rate', write --set lr=VALUE\n")
    assert call("run", "--num-rounds", "3").err.count("(did you mean '--rounds'?)") == 1


def test_run_takes_one_method() -> None:
    for typed in ("local fedavg", "local fedavg fedc2i:gamma=2"):
        answer = call("run", *typed.split())
        assert answer.code == 2
        assert answer.err == f"fedc2i: error: run takes one method; use `fedc2i compare {typed}` for several\n"
    assert "compare" not in call("resume", "a", "b").err


def test_an_engine_that_cannot_go_on_does_not_offer_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt), watched(Path("run"), 1, nullcontext(), "flower-sim"):
        raise KeyboardInterrupt
    assert capsys.readouterr().err == ""


def test_interrupt_is_no_traceback(data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fedc2i.runs.driver.simulate", interrupt)
    answer = call("run", "local", "--data", data, *QUICK, "--out", "my run")
    assert answer.code == 130
    assert answer.err.splitlines()[-2:] == [
        "To resume: fedc2i resume 'my run'",
        "fedc2i: interrupted",
    ]
    assert not Path("my run/summary.json").exists()
    monkeypatch.setattr("fedc2i.runs.driver.advance", interrupt)  # before anything is written
    answer = call("run", "local", "--data", data, *QUICK, "--out", "new")
    assert answer.err.splitlines()[-1] == "fedc2i: interrupted"
    assert "To resume" not in answer.err
    assert not Path("new").exists()
    Path("mine").mkdir()
    answer = call("run", "local", "--data", data, *QUICK, "--out", "mine")
    assert (answer.code, answer.err.splitlines()[-1]) == (130, "fedc2i: interrupted")
    assert "To resume" not in answer.err
    assert Path("mine").is_dir()  # the user made it
    monkeypatch.setattr("fedc2i.runs.plan.load_data", interrupt)
    assert call("run", "local", "--data", data).err == "fedc2i: interrupted\n"
    monkeypatch.setattr("fedc2i.runs.cache.RunCache.__init__", interrupt)
    answer = call("paper", "table1", "--rounds", "1")
    assert answer.err.splitlines()[-1] == "fedc2i: interrupted; finished work is kept; the same command resumes"
