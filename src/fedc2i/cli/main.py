"""The command ``fedc2i``: finds the command's module, and turns errors into one line and an exit code."""

from __future__ import annotations

import atexit
import gc
import importlib
import io
import os
import re
import sys
from typing import Annotated, Any

import click
import typer
from typer.core import TyperGroup
from typer.main import get_command

from fedc2i import __version__
from fedc2i.core.errors import SYNONYMS, UserError, nearest

INTERRUPTED = 130  # the exit code of a program that Ctrl-C ended
PANELS = {  # the sections of `fedc2i --help`; `flower-local` is the `app` of flower_local.py
    "Run": ("run", "compare", "resume", "paper"),
    "Look": ("watch", "report", "contribution", "influence", "predict", "export"),
    "Deploy": ("coordinator", "site", "flower-local", "flower-app"),
    "Reference": ("methods", "data", "privacy"),
}
PANEL_OF = {name: panel for panel, names in PANELS.items() for name in names}


class LazyGroup(TyperGroup):
    """Imports the module of a command when the command is used."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = {name: click.Command(name) for name in PANEL_OF}  # for their names

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name, if there is one."""
        if cmd_name not in self.commands:
            return None
        command = get_command(importlib.import_module(f"fedc2i.cli.{cmd_name.replace('-', '_')}").app)
        command.name = cmd_name
        command.rich_help_panel = PANEL_OF[cmd_name]  # type: ignore[attr-defined]
        return command


app = typer.Typer(
    cls=LazyGroup,
    help="Influence-oriented personalised federated learning.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options of the program itself."""


def main() -> None:
    """The entry point: an error that a user can correct is one line and exit code 2, never a traceback."""
    atexit.register(gc.freeze)  # else the last garbage collection goes through all that torch has: 0.3 s
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # γ and λ must not stop a terminal that cannot show them
            stream.reconfigure(errors="backslashreplace")
    try:
        code = app(prog_name="fedc2i", standalone_mode=False)
        if code == INTERRUPTED:  # typer's answer to Ctrl-C
            raise KeyboardInterrupt
        sys.exit(code if isinstance(code, int) else 0)
    except UserError as error:
        _fail(str(error))
    except click.ClickException as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # by its name: click before 8.2 has no such class
            sys.exit(2)  # the help has been shown
        _fail(_usage(error))
    except (KeyboardInterrupt, click.Abort):
        kept = "; finished work is kept"
        same = f"{kept}; the same command resumes"
        hints = {"paper": same, "coordinator": same, "flower-local": f"{kept}; `fedc2i resume` resumes"}
        hint = hints.get("".join(sys.argv[1:2]), "")  # run, compare, resume and contribution say it themselves
        print(f"fedc2i: interrupted{hint}", file=sys.stderr, flush=True)
        simulation = sys.modules.get("fedc2i.flower.simulation")
        if simulation is not None and simulation.was_interrupted:  # its threads wait for processes that have ended
            os._exit(INTERRUPTED)
        sys.exit(INTERRUPTED)
    except BrokenPipeError:  # the reader of our output, such as `head`, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)


def _usage(error: click.ClickException) -> str:
    """What is wrong with a command line; of an option that is missing or does not exist also what is allowed."""
    if isinstance(error, click.MissingParameter):
        return f"{error.format_message()} {getattr(error.param, 'help', None) or ''}"
    extra = re.search(r"unexpected extra arguments? \((.*)\)", error.message)
    context = getattr(error, "ctx", None)
    if extra and context is not None and context.command.name == "run":
        several = " ".join(filter(None, (context.params.get("method"), extra[1])))
        return f"run takes one method; use `fedc2i compare {several}` for several"
    if not isinstance(error, click.NoSuchOption):
        return error.message if "Did you mean" in error.message else error.format_message()  # never asked twice
    from fedc2i.runs.settings import run_settings

    name = error.option_name.lstrip("-").replace("-", "_")
    offered = [] if error.ctx is None else [own for option in error.ctx.command.params for own in option.opts]
    message = f"No such option '{error.option_name}'"
    if "--set" not in offered:
        return message + nearest(error.option_name, offered)
    hint = nearest(error.option_name, offered)
    name = name if hint else SYNONYMS.get(name, name)
    if name in run_settings():
        return f"{message}, write --set {name}=VALUE"
    return f"{message}{hint}. Options of a method are given as --set NAME=VALUE."


def _fail(message: str) -> None:
    print(f"fedc2i: error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)
