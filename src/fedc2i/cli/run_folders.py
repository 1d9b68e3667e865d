"""Run folders that people name: of one run, or of a comparison."""

from __future__ import annotations

import json
from pathlib import Path

from fedc2i.core.errors import UserError


def runs_below(folder: Path) -> list[Path]:
    """The folder itself if it holds a run, or those inside in the order in which `fedc2i compare` ran them.

    Raises:
        UserError: if there is no finished run.
    """
    from fedc2i.runs.folder import slug

    if (folder / "summary.json").is_file():
        return [folder]
    found = sorted(path.parent for path in folder.glob("*/summary.json"))
    if not found:
        raise UserError(f"{folder}: no finished run here; a run folder has a summary.json, a comparison such folders")
    try:
        order = [slug(key) for key in json.loads((folder / "comparison.json").read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return found
    return sorted(found, key=lambda run: order.index(run.name) if run.name in order else len(order))


def run_with_influence(folder: Path) -> Path:
    """The folder itself if it holds a run, or the only run of a comparison that measures influence.

    Raises:
        UserError: if none or several do; the message names them.
    """
    from fedc2i.runs.finished_run import read_run

    found = runs_below(folder)
    if found == [folder]:
        return folder
    found = [run for run in found if read_run(run).influence("influence_vector").size]
    if len(found) == 1:
        return found[0]
    if not found:
        raise UserError(f"{folder}: no run of this comparison measures influence")
    raise UserError(f"{folder}: a comparison; name one of its runs: {', '.join(map(str, found))}")
