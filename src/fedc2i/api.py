"""Running methods from Python: `run` for one, `compare` for several on equal terms, `resume` after an interruption.

`contribution` measures which client helps which.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from fedc2i.core.files import locked, writing
from fedc2i.data.federation import Federation
from fedc2i.methods.base import Method
from fedc2i.models.model import Model
from fedc2i.report import comparison, figures
from fedc2i.runs import driver, interrupted_run
from fedc2i.runs.folder import claimed, new_folder, slug, started
from fedc2i.runs.interrupted_run import Resumption, write_plan
from fedc2i.runs.plan import Observer, Plan, prepare
from fedc2i.runs.results import Comparison, Result

if TYPE_CHECKING:
    from fedc2i.analysis.contribution.records import Contribution


def run(
    method: str | Method = "fedc2i",
    data: str | Federation = "heart",
    *,
    model: str | Model | None = None,
    out: Path | str | None = None,
    observer: Observer | None = None,
    **settings: Any,
) -> Result:
    """Runs one method and returns its result.

    Args:
        method: a name such as ``"fedc2i"``, ``"FILE.py:CLASS"``, or a `Method`.
        data: a data set such as ``"heart"`` or ``"folder:DIR"``, or a `Federation`.
        model: a name such as ``"lenet5"`` or a `Model` from `split`; the data's preset by default.
        out: a new folder to write the run into; nothing is written without it. `resume` continues a run
            that was interrupted.
        observer: watches the run.
        **settings: run settings (``rounds=20, lr=1e-3``) and method options (``gamma=5.0``). ``seeds=[0, 1, 2]`` lists
            each seed; a number alone is refused, as it could mean how many.

    Raises:
        UserError: for settings that do not fit, before anything is computed.
    """
    (plan,) = prepare([method], settings, data, model)
    folder = None if out is None else new_folder(Path(out))
    with started(folder):
        return execute(plan, folder, observer)


def compare(
    wanted: Sequence[str | Method],
    data: str | Federation = "heart",
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
    with started(folder):
        return Comparison(execute_all(plans, folder, observer))


def resume(
    folder: Path | str,
    data: Federation | None = None,
    model: Model | None = None,
    method: Method | Sequence[Method] | None = None,
    *,
    device: str | None = None,
    observer: Observer | None = None,
    trust: bool = False,
) -> Result | Comparison:
    """Resumes an interrupted run, to the result it would have had: bit for bit on the same device.

    Args:
        folder: of a run, or of a comparison, which gives a list of results, read from its folders. A finished run is
            read, too.
        data: the `Federation`, if the run was started with one.
        model: the `Model`, if the run was started with one.
        method: the `Method`, if the run was started with your own; for a comparison, all that it had of them.
        device: another device to resume on; numbers are then not the same to the bit.
        observer: watches what is left to do.
        trust: execute the Python files (``FILE.py:NAME``) that the folder names as its method or model.

    Raises:
        UserError: if this is not such a folder, if another process is at work on it, if data, settings or versions
            are not those it was started with, or if it names code and is not trusted.
    """
    own = [] if method is None else [method] if isinstance(method, Method) else list(method)
    how = Resumption(observer, figures.draw_run, data, model, own, device, trust)
    found = interrupted_run.resume(Path(folder), how, finish_comparison)
    return found if isinstance(found, Result) else Comparison(found)


def contribution(
    method: str | Method = "fedc2i",
    data: str | Federation = "heart",
    *,
    model: str | Model | None = None,
    out: Path | str | None = None,
    most_runs: int = 400,
    **settings: Any,
) -> Contribution:
    """Measures what each client gives to each other client, by training among coalitions of them.

    Up to six clients all coalitions are run and Shapley values are exact; beyond, orders of givers are drawn. Each
    value has a 95 % interval over test samples and seeds; five seeds are a good start. ``to_pandas()`` of the result is
    one table of all values, ``select()`` the rows of one measure.

    Args:
        method: a name such as ``"fedc2i"``, ``"FILE.py:CLASS"``, or a `Method`.
        data: a data set such as ``"heart"`` or ``"folder:DIR"``, or a `Federation`.
        model: a name such as ``"lenet5"`` or a `Model` from `split`; the data's preset by default.
        out: a folder for the runs and the result. A call with the same folder and settings computes only what is
            missing there, also after an interruption. Nothing is kept without it.
        most_runs: coalitions to run at most, beyond six clients.
        **settings: run settings (``rounds=20, seeds=(0, 1, 2)``) and method options (``gamma=5.0``).

    Raises:
        UserError: for settings that do not fit, or that mean another protocol among fewer clients.
    """
    from fedc2i.analysis.contribution import measure

    (plan,) = prepare([method], settings, data, model)
    if out is None:
        with TemporaryDirectory() as place:
            return measure.contribution(plan, Path(place), most_runs=most_runs)
    folder = Path(out)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        return measure.contribution(plan, folder, most_runs=most_runs)


def execute(plan: Plan, folder: Path | None, observer: Observer | None = None) -> Result:
    """Runs a plan and draws its figures into the folder."""
    if folder is None:
        return driver.execute(plan, None, observer)
    with claimed(folder):
        return driver.execute(plan, folder, observer, figures.draw_run)


def execute_all(plans: Sequence[Plan], folder: Path | None, observer: Observer | None = None) -> list[Result]:
    """Runs plans in order; with a folder, each in a folder of its own inside, and the comparison beside them."""
    if folder is None:
        return [execute(plan, None, observer) for plan in plans]
    with claimed(folder):
        write_plan(plans, folder)
        results = [execute(plan, new_folder(folder / slug(plan.key)), observer) for plan in plans]
        finish_comparison(results, folder)
    return results


def finish_comparison(results: Sequence[Result], folder: Path) -> None:
    """Writes the table and the figure over all methods."""
    comparison.write_comparison(results, folder)
    figures.draw_comparison(results, folder)
