"""Commands whose flags derive from the settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from fedc2i.cli.setting_flags import setting_flags
from fedc2i.core.options import flags
from fedc2i.runs.settings import RunSettings


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
