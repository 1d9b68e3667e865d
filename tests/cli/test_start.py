"""How quickly the program starts and ends: what it imports, and the processor time it takes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fedc2i

PROGRAM = (sys.executable, "-c", "from fedc2i.cli.main import main; main()")
HEAVY = ("torch", "numpy", "matplotlib", "flwr")
MOST = 2.5  # times the processor time of its libraries, for a command that computes nothing
IMPORT_SECONDS = 0.3  # of processor time for `import fedc2i` beyond torch
NAMES_SECONDS = 0.7  # for all public names, beyond torch
TRIES = 8  # one must succeed: other programs take caches away
MODULES, EXECUTED = 44, 41  # that `fedc2i run` imports, and in which it runs a function

LIST_MODULES = """
import atexit, json, sys
atexit.register(lambda: print(json.dumps(list(sys.modules)), file=sys.stderr))
from fedc2i.cli.main import main
main()
"""
MEASURE_IMPORT = """
import json, sys, time
import torch
began = time.process_time()
import fedc2i
imported = time.process_time() - began
for name in fedc2i.__all__:
    getattr(fedc2i, name)
print(json.dumps({"imported": imported, "named": time.process_time() - began, "modules": list(sys.modules)}))
"""


MEASURE_END = """
import atexit, sys, time, torch
atexit.register(lambda: print(time.process_time()))  # the first to be registered runs last
from fedc2i.cli.main import main
"""


def processor_seconds(*command: str) -> float:
    """Of a program of its own."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as running:
        _, status, used = os.wait4(running.pid, 0)
        running.returncode = os.waitstatus_to_exitcode(status)
    assert running.returncode == 0
    return used.ru_utime + used.ru_stime


LIGHT = [("--version",), ("--help",), ("site", "--help"), ("run", "--help")]


@pytest.mark.parametrize("arguments", LIGHT, ids=" ".join)
def test_light_command_starts_without_heavy_packages(arguments: tuple[str, ...]) -> None:
    done = subprocess.run([sys.executable, "-c", LIST_MODULES, *arguments], capture_output=True, text=True, check=True)
    assert not {*HEAVY} & {*json.loads(done.stderr.splitlines()[-1])}
    libraries = (sys.executable, "-c", "import typer, typer.rich_utils, rich.table, rich.panel, rich.markdown")
    assert any(processor_seconds(*PROGRAM, *arguments) < MOST * processor_seconds(*libraries) for _ in range(TRIES))


def test_the_end_of_a_command_takes_little_time_with_torch() -> None:
    def seconds_at_the_end(code: str) -> float:
        command = [sys.executable, "-c", MEASURE_END + code, "--version"]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as running:
            assert running.stdout is not None
            before = float(running.stdout.read().split()[-1])
            _, _, used = os.wait4(running.pid, 0)
            running.returncode = 0
        return used.ru_utime + used.ru_stime - before

    assert any(seconds_at_the_end("main()") < 0.6 * seconds_at_the_end("") for _ in range(TRIES))


def test_public_names_are_quick_to_import_and_load_nothing_optional() -> None:
    def is_quick() -> bool:
        done = subprocess.run([sys.executable, "-c", MEASURE_IMPORT], capture_output=True, check=True)
        found = json.loads(done.stdout)
        assert not {"matplotlib.pyplot", "flwr", "h5py", "pandas", "opacus"} & {*found["modules"]}
        return bool(found["imported"] < IMPORT_SECONDS and found["named"] < NAMES_SECONDS)

    assert any(is_quick() for _ in range(TRIES))


def test_public_names_are_those_listed() -> None:
    assert {*fedc2i.__all__} == {*fedc2i._MODULE_OF, "__version__"}
    assert {*fedc2i.__all__} <= {*dir(fedc2i)}
    for name, module in fedc2i._MODULE_OF.items():
        assert getattr(fedc2i, name) is getattr(sys.modules[module], name)
    with pytest.raises(AttributeError, match="no attribute 'fedrate'"):
        fedc2i.fedrate  # noqa: B018


def test_completion_names_commands_and_options() -> None:
    for words, expected in (("fedc2i r", {"run", "resume", "report"}), ("fedc2i run --rou", {"--rounds"})):
        environment = {
            **os.environ,
            "_FEDC2I_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": str(words.count(" ")),
        }
        done = subprocess.run(PROGRAM, capture_output=True, text=True, env=environment)
        assert {*done.stdout.split()} >= expected


@pytest.mark.parametrize("data", ["heart", pytest.param("digits:scans,ink", marks=pytest.mark.slow)])
def test_a_run_touches_few_modules(data: str, tmp_path: Path) -> None:
    script = Path(__file__).parents[1] / "count_modules.py"
    command = [sys.executable, str(script), "run", "fedc2i", "--data", data, "--rounds", "1", "--set", "steps=1"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True)
    counts = re.search(r"^(\d+) modules imported, (\d+) with a function that ran$", done.stdout, re.MULTILINE)
    assert counts
    assert int(counts[1]) <= MODULES
    assert int(counts[2]) <= EXECUTED


ALL_METHODS = """
import sys
import fedc2i
from fedc2i.methods.base import method_names
from fedc2i.core.errors import UserError
for name in method_names():
    try:
        fedc2i.run(name, data="heart", rounds=2, steps=1, executor="looped")
    except UserError as error:
        assert name == "fedbn", error  # needs another model
    assert "torch._dynamo" not in sys.modules, name
"""


def test_no_method_imports_the_compiler_of_torch() -> None:
    """It takes seconds, for every task of a real site, and wants to write where its sandbox allows nothing."""
    subprocess.run([sys.executable, "-c", ALL_METHODS], check=True)
