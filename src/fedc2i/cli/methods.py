"""``fedc2i methods``: the methods, their options, and the settings of every run."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from fedc2i.cli.shared import Json, console_for

app = typer.Typer(add_completion=False)


@app.command()
def methods(
    name: Annotated[str | None, typer.Argument(help="Show this method's options.", show_default=False)] = None,
    json: Json = False,
) -> None:
    """List the methods, or show the options of one, with those of every method and the settings of every run."""
    from fedc2i.core.files import to_json
    from fedc2i.methods.base import Method, get_method, method_names
    from fedc2i.runs.settings import RunSettings

    kinds = [get_method(one) for one in ([name] if name else method_names())]
    if json:
        listed: dict[str, Any] = {
            kind.name: {"about": kind.about, "reconstruction": kind.reconstruction, "options": _options(kind)}
            for kind in kinds
        }
        print(to_json({"methods": listed, "shared": _options(Method), "settings": _options(RunSettings)}), end="")
        return
    console = console_for(160)
    if name is None:
        table = Table.grid(padding=(0, 2))
        for kind in kinds:
            table.add_row(Text(kind.name, "bold"), Text(kind.about))
        console.print(table)
        console.print("`fedc2i methods NAME` shows a method's options.", style="dim", highlight=False)
        return
    (kind,) = kinds
    console.print(f"{kind.name}: {kind.about}", style="bold", highlight=False, markup=False)
    if kind.reconstruction:
        console.print(kind.reconstruction, highlight=False, markup=False)
    for title, owner in ((f"Options of {kind.name}", kind), ("Of every method", Method), ("Of every run", RunSettings)):
        console.print(_table(title, _options(owner)))


def _options(owner: type) -> dict[str, Any]:
    """By name; of a method only those it adds, and shared ones for which it has another default."""
    from fedc2i.core.options import options_of
    from fedc2i.methods.base import Method

    shared = options_of(Method) if issubclass(owner, Method) and owner is not Method else {}
    return {
        option.name: {"default": option.default, "allowed": option.allowed, "about": option.about}
        for option in options_of(owner).values()
        if option.name not in ("method", "options") and option != shared.get(option.name)
    }


def _table(title: str, options: dict[str, Any]) -> Table | str:
    if not options:
        return f"{title}: no options\n"
    table = Table("option", "default", "allowed", "meaning", title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for name, entry in options.items():
        table.add_row(*map(Text, (name, str(entry["default"]), entry["allowed"], entry["about"])))
    return table
