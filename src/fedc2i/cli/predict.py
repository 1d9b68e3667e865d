"""``fedc2i predict``: a client's model on new rows of a table, or on new images."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedc2i.cli.shared import Trust, say
from fedc2i.core.errors import UserError, printable

if TYPE_CHECKING:
    from fedc2i.engine.records import Point

app = typer.Typer(add_completion=False)


@app.command()
def predict(
    run: Annotated[Path, typer.Argument(help="The folder of a finished run on a table or images.", show_default=False)],
    rows: Annotated[
        Path,
        typer.Argument(help="A CSV or Parquet file of new rows, an image, or a folder of images.", show_default=False),
    ],
    client: Annotated[str, typer.Option(help="Whose model and encoding are used.", show_default=False)] = "",
    out: Annotated[
        Path | None, typer.Option(help="Where to write the CSV; by default it is printed.", show_default=False)
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="A seed of the run; by default its first.", show_default=False)
    ] = None,
    before: Annotated[bool, typer.Option(help="Use the model before a next local training.")] = False,
    trust: Trust = False,
) -> None:
    """Predict new rows of a table, or new images, with a client's model.

    Writes one line a row: the predicted class, and the probability of each class. Rows are encoded as the client's
    training rows were. Columns that are no inputs are ignored; an unknown category counts as none of the known ones,
    with a warning. Numbers far from those of the training rows are predicted with a warning, too. Images are brought
    to the size that the run has read.
    """
    from fedc2i.core.files import write_atomically
    from fedc2i.runs.predict import predict as compute

    if out is not None and out.exists():
        raise UserError(f"{out}: exists already; choose another --out or remove it")
    point: Point = "received" if before else "trained"
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always", UserWarning)
        found = compute(run, client, rows, seed=seed, point=point, trust=trust)
    for note in notes:
        say(f"warning: {note.message}")
    text = found.to_csv(index=False, float_format="%.6g")
    if out is None:
        for line in text.splitlines():
            print(printable(line))
    else:
        write_atomically(out, text.encode())
        count = len(found)
        print(f"{out}   ({count} prediction{'s' * (count != 1)} with the model of {printable(client)})")
