"""What several commands share: their options, flags for settings, run folders that users name, and what is printed."""

from __future__ import annotations

import functools
import gc
import inspect
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from json import loads
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from fedc2i.core.errors import UserError, printable
from fedc2i.core.files import to_json
from fedc2i.core.options import Command, flags
from fedc2i.runs.settings import RunSettings, read_toml

if TYPE_CHECKING:  # a command imports torch, which takes a second, only when it computes
    from fedc2i.report.progress import Observers
    from fedc2i.runs.plan import Observer, Plan
    from fedc2i.runs.results import Result

DataDir = Annotated[
    Path | None, typer.Option(help="The folder of the data; or the variable FEDC2I_DATA.", show_default=False)
]
Device = Annotated[str | None, typer.Option(help="auto, cpu or cuda.")]
Set = Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE: any setting or option of the method.")]
Out = Annotated[Path | None, typer.Option(help="A new folder for the run; by default one under runs/.")]
Track = Annotated[
    list[str] | None,
    typer.Option("--track", help="tensorboard[:DIR], mlflow[:DIR or URI] or wandb[:PROJECT] (offline); repeatable."),
]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="A TOML file with the same keys.")]
Trust = Annotated[bool, typer.Option("--trust", help="Execute the Python files that the run folder names.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, everything else on stderr.")]


def setting_flags(command: Command) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorates a typer command: its parameter ``settings`` becomes the flags that ``command`` has for settings.

    The function is given ``settings``, the values by name as text, of the flags that were used.
    """
    offered = flags(RunSettings, command)

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        parameters: list[inspect.Parameter] = []
        for own in inspect.signature(function, eval_str=True).parameters.values():
            if own.name != "settings":
                parameters.append(own.replace(kind=inspect.Parameter.KEYWORD_ONLY))
                continue
            for flag in offered:
                about = typer.Option(flag.flag, help=flag.help, show_default=False)
                kind: Any = Annotated[bool | None, about] if flag.is_switch else Annotated[str | None, about]
                parameters.append(
                    inspect.Parameter(flag.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
                )

        @functools.wraps(function)
        def with_flags(**given: Any) -> None:
            used = {flag.name: given.pop(flag.name) for flag in offered}
            texts = {name: "true" if value is True else value for name, value in used.items() if value is not None}
            function(settings=texts, **given)

        with_flags.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        with_flags.__annotations__ = {own.name: own.annotation for own in parameters}
        return with_flags

    return decorate


def values_of(flags: Mapping[str, str], pairs: list[str] | None, file: Path | None = None) -> dict[str, Any]:
    """All settings by name: the file's, then ``--set``, then flags."""
    values = {} if file is None else read_toml(file)
    for pair in pairs or []:
        name, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or not name:
            raise UserError(f"--set takes KEY=VALUE, got '{pair}'")
        if name == "method":
            raise UserError("--set method=...: name the method as the command's argument")
        if isinstance(values.get("options"), dict):
            values["options"].pop(name, None)
        values[name] = value
    return {**values, **flags}


def plans_of(methods: Sequence[str], values: Mapping[str, Any], file: Path | None) -> list[Plan]:
    """The runs that settings describe; an error about settings names the file that some of them come from."""
    from fedc2i.runs.plan import prepare

    try:
        plans = prepare(methods, {name: value for name, value in values.items() if name != "method"})
        plans[0].require_engine()
    except UserError as error:
        if file is None:
            raise
        raise UserError(f"{error} (with the settings of {file})") from error
    return plans


def short_name(data: str) -> str:
    """The data as part of a folder's name: of a file or folder only its own name, e.g. ``pacs``."""
    from fedc2i.runs.folder import slug

    _, _, argument = data.partition(":")
    path = Path(argument).expanduser()
    if not argument or not path.exists():
        return slug(data)
    return slug(path.resolve().name if path.is_dir() else path.resolve().stem)


def trackers_of(wanted: Sequence[str] | None) -> AbstractContextManager[Observer | None]:
    """The trackers that ``--track`` names; without any, their code is not loaded."""
    if not wanted:
        return nullcontext()
    from fedc2i.report.trackers import track

    return track(*wanted)


def runs_below(folder: Path) -> list[Path]:
    """The folder itself if it holds a run, or those inside in the order in which `fedc2i compare` ran them.

    Raises:
        UserError: if there is no finished run.
    """
    from fedc2i.runs.folder import SUMMARY, slug

    if (folder / SUMMARY).is_file():
        return [folder]
    found = sorted(path.parent for path in folder.glob(f"*/{SUMMARY}"))
    if not found:
        if not folder.exists():
            raise UserError(f"{folder}: no such folder")
        from fedc2i.runs.interrupted_run import is_comparison

        if is_comparison(folder) or (folder / "config.toml").is_file():
            raise UserError(f"{folder}: not finished; {how_to_resume(folder)}")
        raise UserError(f"{folder}: no finished run here; a run folder has a summary.json, a comparison such folders")
    try:
        order = [slug(key) for key in loads((folder / "comparison.json").read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return found
    return sorted(found, key=lambda run: order.index(run.name) if run.name in order else len(order))


def how_to_resume(folder: Path) -> str:
    """The command for a run that may have been interrupted."""
    return f"if it was interrupted, `fedc2i resume {shlex.quote(str(folder))}` resumes it"


def console_for(least: int = 120) -> Console:
    """Standard output; a file or a pipe has no width, so lines there have at least this many characters."""
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, least)
    return console


def say(line: str) -> None:
    """One line of a log, on stderr."""
    Console(stderr=True).print(printable(line), highlight=False, markup=False, soft_wrap=True)


@contextmanager
def watched(
    folder: Path,
    runs: int,
    trackers: AbstractContextManager[Observer | None],
    engine: str = "inprocess",
    *,
    is_new: bool = False,
) -> Iterator[Observers]:
    """Shows the progress of runs in the terminal and in trackers; after an interruption says how to resume."""
    with _interruptible_run(folder, engine, is_new):
        from fedc2i.report.progress import Observers, ProgressView

        if not gc.get_freeze_count():
            gc.freeze()  # what was imported stays: looking for cycles of garbage in it takes 0.1 s each time
        with ProgressView(Console(stderr=True), runs) as view, trackers as tracking:
            yield Observers(view, tracking)


def _interruptible_run(folder: Path, engine: str, is_new: bool) -> AbstractContextManager[None]:
    from fedc2i.runs.folder import is_taken

    kept = f"To resume: fedc2i resume {shlex.quote(str(folder))}" if engine == "inprocess" else ""
    has_work = lambda: folder.is_dir() and (any(folder.iterdir()) or is_taken(folder))  # noqa: E731
    return interruptible(folder, has_work, kept, is_new=is_new)


@contextmanager
def interruptible(
    folder: Path, has_work: Callable[[], bool], kept: str, *, is_new: bool, unfinished: Path | None = None
) -> Iterator[None]:
    """Ended before there is any work, removes what the command made; interrupted later, says what is kept.

    Args:
        folder: of the command's work; it is removed only if it is empty.
        has_work: whether anything in it is worth keeping.
        kept: the line about it, if any.
        is_new: whether the command made the folder; one that the user made stays.
        unfinished: a folder inside, removed with all that is in it.
    """
    try:
        yield
    except BaseException as error:
        if not has_work():
            if unfinished is not None:
                shutil.rmtree(unfinished, ignore_errors=True)
            if is_new:
                with suppress(OSError):
                    folder.rmdir()
        elif kept and isinstance(error, KeyboardInterrupt):
            print(kept, file=sys.stderr, flush=True)
        raise


def announce(plan: Plan, folder: Path, *, is_new: bool) -> None:
    """Says what is about to run."""
    with _interruptible_run(folder, plan.config.engine, is_new):
        for line in plan.federation.describe():
            say(line)
        if plan.config.clip:
            from fedc2i.engine import accountant

            say(f"Privacy: {accountant.cost(plan.config, len(plan.federation.names))}")
        say(f"Writing to {folder}")


def is_free(out: Path | None) -> bool:
    """Whether the command makes its folder: the one that ``--out`` names, or the next below ``runs``."""
    return out is None or not out.exists()


def show(results: Sequence[Result], folder: Path, json: bool) -> None:
    """Prints the table of results, or all of them as JSON."""
    if json:
        from fedc2i.runs.results import summary

        print(to_json({"folder": str(folder), "results": {one.key: summary(one) for one in results}}), end="")
        return
    from fedc2i.report.comparison import comparison_table, influence_table

    console = console_for(160)
    console.print()
    console.print(comparison_table(results).to_rich(console.width, console.is_terminal))
    for one in results:
        matrix = influence_table(one, console.width)
        if matrix is not None:
            console.print(matrix)
    seconds = sum(one.seconds for one in results)
    last = f"Run folder: {folder}   (rounds: {seconds:.0f} s, without starting and writing)"
    console.print(last, highlight=False, markup=False, soft_wrap=True)
