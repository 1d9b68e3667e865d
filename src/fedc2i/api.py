"""Running methods from Python: `run` for one, `compare` for several on equal terms."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedc2i.core.files import locked
from fedc2i.data.federation import Federation
from fedc2i.methods.base import Method
from fedc2i.models.model import Model
from fedc2i.report import figures
from fedc2i.runs.folder import new_folder, slug
from fedc2i.runs.plan import Observer, Plan, prepare
from fedc2i.runs.results import Comparison, Result
from fedc2i.runs.resume import finish_comparison, write_plan


def run(
    method: str | Method = "fedc2i",
    data: str | Federation = "embedded",
    *,
    model: str | Model | None = None,
    out: Path | str | None = None,
    observer: Observer | None = None,
    **settings: Any,
) -> Result:
    """Runs one method and returns its result.

    Args:
        method: a name such as ``"fedc2i"``, ``"FILE.py:CLASS"``, or a `Method`.
        data: a data set such as ``"embedded"`` or ``"folder:DIR"``, or a `Federation`.
        model: a name such as ``"lenet5"`` or a `Model` from `split`; the data's preset by default.
        out: a new folder to write the run into; nothing is written without it. A run that is cut off is gone on with
            by `resume`.
        observer: watches the run.
        **settings: run settings (``rounds=20, seeds=(0, 1, 2), lr=1e-3``) and method options (``gamma=5.0``).

    Raises:
        UserError: for settings that do not fit, before anything is computed.
    """
    (plan,) = prepare([method], settings, data, model)
    folder = None if out is None else new_folder(Path(out))
    return execute(plan, folder, observer)


def compare(
    wanted: Sequence[str | Method],
    data: str | Federation = "embedded",
    *,
    model: str | Model | None = None,
    out: Path | str | None = None,
    observer: Observer | None = None,
    **settings: Any,
) -> Comparison:
    """Runs several methods on the same data, model, seeds and settings; arguments as for `run`.

    A method option given as a keyword goes to every method that has it. With ``out``, every method has its own run
    folder inside, beside the comparison.
    """
    plans = prepare(wanted, settings, data, model)
    folder = None if out is None else new_folder(Path(out))
    return Comparison(execute_all(plans, folder, observer))


def execute(plan: Plan, folder: Path | None, observer: Observer | None = None) -> Result:
    """Runs a plan and draws its figures into the folder."""
    if folder is None:
        return plan.execute(None, observer)
    with locked(folder):
        return plan.execute(folder, observer, figures.draw_run)


def execute_all(plans: Sequence[Plan], folder: Path | None, observer: Observer | None = None) -> list[Result]:
    """Runs plans in order; with a folder, each in a folder of its own inside, and the comparison beside them."""
    if folder is None:
        return [execute(plan, None, observer) for plan in plans]
    with locked(folder):
        write_plan(plans, folder)
        results = [execute(plan, new_folder(folder / slug(plan.key)), observer) for plan in plans]
        finish_comparison(results, folder)
    return results
