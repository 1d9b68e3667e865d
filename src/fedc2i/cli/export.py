"""``fedc2i export``: a client's model as a file for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="The folder of a finished run.", show_default=False)],
    out: Annotated[Path, typer.Option(help="A new file: .safetensors or .pt2.", show_default=False)],
    client: Annotated[str, typer.Option(help="Whose model.", show_default=False)] = "",
    seed: Annotated[
        int | None, typer.Option(help="A seed of the run; by default its first.", show_default=False)
    ] = None,
    before: Annotated[bool, typer.Option(help="The model before a next local training.")] = False,
) -> None:
    """Write a client's model for other programs, with a card beside it.

    A .safetensors file has all tensors of the network, under the network's own names. A .pt2 file is a program from
    images or encoded rows to logits, which only torch is needed for. The card (.md) says what the model was trained
    on, what it scores, who weighs most in it, and how to load it.
    """
    from fedc2i.report.table import size
    from fedc2i.runs.export import export as write

    card = write(run, client, out, seed=seed, point="received" if before else "trained")
    print(f"{out}   ({size(out.stat().st_size)}), card: {card}")
