"""``fedc2i flower-app``: where the Flower App lies."""

from __future__ import annotations

import typer

from fedc2i.cli.site_runs import require_flower

app = typer.Typer(add_completion=False)


@app.command()
def flower_app() -> None:
    """Print the folder of the Flower App, for `flwr run` on your own Flower federation."""
    require_flower()
    from fedc2i.deploy.superlink import APP

    print(APP)
