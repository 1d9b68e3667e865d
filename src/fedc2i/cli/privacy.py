"""``fedc2i privacy``: what a noise costs, or which noise a budget asks for."""

from __future__ import annotations

import math
from typing import Annotated

import typer

from fedc2i.cli.shared import Json
from fedc2i.core.errors import UserError
from fedc2i.core.files import to_json

app = typer.Typer(add_completion=False)

Noise = Annotated[float | None, typer.Option(help="Noise multiplier σ, as in --set noise=...")]
Uploads = Annotated[int, typer.Option("--rounds", help="Rounds in which a client takes part.")]
Delta = Annotated[float, typer.Option(help="δ, above 0 and below 1.")]
Target = Annotated[float | None, typer.Option("--target-epsilon", help="Find the noise for this ε instead.")]


@app.command()
def privacy(
    rounds: Uploads, noise: Noise = None, delta: Delta = 1e-5, target: Target = None, json: Json = False
) -> None:
    """Print the ε of a noise, or the noise for an ε.

    ε is that of all uploads of one client, for any change of its whole data set; docs/privacy.md says what it covers.
    """
    from fedc2i.engine import accountant

    if (noise is None) == (target is None):
        raise UserError("fedc2i privacy needs one of --noise and --target-epsilon")
    if rounds < 1:
        raise UserError(f"--rounds must be at least 1, got {rounds}")
    sigma = noise if noise is not None else accountant.noise_for(float(target or 0), rounds, delta)
    found = accountant.epsilon(sigma, rounds, delta)
    if json:
        print(to_json({"noise": sigma, "rounds": rounds, "delta": delta, "epsilon": found}), end="")
    elif math.isinf(found):
        print("without noise there is no guarantee: ε is infinite")
    else:
        print(f"noise {_up(sigma)}, {rounds} uploads of a client, δ = {delta:g}: ε = {found:.4g}")


def _up(sigma: float) -> str:
    """With six digits, rounded up: typed again, it keeps to the ε that was asked for."""
    digits = 10.0 ** (5 - math.floor(math.log10(sigma)))
    shown = f"{sigma:.6g}"
    return shown if float(shown) >= sigma else f"{math.ceil(sigma * digits) / digits:.6g}"
