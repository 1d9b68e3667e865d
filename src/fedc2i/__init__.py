"""Influence-oriented personalised federated learning: each site measures whose knowledge helps it.

`run` and `compare` run methods on a `Federation` of clients, `resume` continues an interrupted run, and
`contribution` measures which client helps which; `load`, `from_table` and `from_arrays` make a federation. A new method
is a subclass of `Method`, a new model comes from `split`. `read_run` and `read_model` read a run folder back, `predict`
applies a client's model to new rows or images, `export` writes it for other programs.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:  # what type checkers and editors see; names are imported on first use, see `__getattr__`
    from fedc2i.analysis.contribution.records import Contribution
    from fedc2i.api import compare, contribution, resume, run
    from fedc2i.core.errors import UserError
    from fedc2i.core.options import option
    from fedc2i.core.params import mix
    from fedc2i.data.arrays import from_arrays
    from fedc2i.data.federation import Client, Federation, Split
    from fedc2i.data.sources import load
    from fedc2i.data.table import from_table
    from fedc2i.methods.base import Method, Phase, Probe, Site
    from fedc2i.methods.math.influence import class_losses, client_losses, influence
    from fedc2i.methods.math.prototypes import Prototypes, average, prototypes
    from fedc2i.methods.messages import Download, Message, Uploads
    from fedc2i.models.model import Model, split
    from fedc2i.report.comparison import comparison_table
    from fedc2i.report.plots import plot_accuracy, plot_influence
    from fedc2i.report.trackers import track
    from fedc2i.runs.export import export
    from fedc2i.runs.finished_run import read_run
    from fedc2i.runs.predict import predict
    from fedc2i.runs.results import Comparison, Result, Score
    from fedc2i.runs.stored_models import read_model
    from fedc2i.training.local import Batch

__all__ = [
    "Batch",
    "Client",
    "Comparison",
    "Contribution",
    "Download",
    "Federation",
    "Message",
    "Method",
    "Model",
    "Phase",
    "Probe",
    "Prototypes",
    "Result",
    "Score",
    "Site",
    "Split",
    "Uploads",
    "UserError",
    "__version__",
    "average",
    "class_losses",
    "client_losses",
    "compare",
    "comparison_table",
    "contribution",
    "export",
    "from_arrays",
    "from_table",
    "influence",
    "load",
    "mix",
    "option",
    "plot_accuracy",
    "plot_influence",
    "predict",
    "prototypes",
    "read_model",
    "read_run",
    "resume",
    "run",
    "split",
    "track",
]

_NAMES_IN = {
    "analysis.contribution.records": ("Contribution",),
    "api": ("compare", "contribution", "resume", "run"),
    "core.errors": ("UserError",),
    "core.options": ("option",),
    "core.params": ("mix",),
    "data.arrays": ("from_arrays",),
    "data.federation": ("Client", "Federation", "Split"),
    "data.sources": ("load",),
    "data.table": ("from_table",),
    "methods.base": ("Method", "Phase", "Probe", "Site"),
    "methods.math.influence": ("class_losses", "client_losses", "influence"),
    "methods.math.prototypes": ("Prototypes", "average", "prototypes"),
    "methods.messages": ("Download", "Message", "Uploads"),
    "models.model": ("Model", "split"),
    "report.comparison": ("comparison_table",),
    "report.plots": ("plot_accuracy", "plot_influence"),
    "report.trackers": ("track",),
    "runs.export": ("export",),
    "runs.finished_run": ("read_run",),
    "runs.predict": ("predict",),
    "runs.results": ("Comparison", "Result", "Score"),
    "runs.stored_models": ("read_model",),
    "training.local": ("Batch",),
}
_MODULE_OF = {name: f"fedc2i.{module}" for module, names in _NAMES_IN.items() for name in names}


def __getattr__(name: str) -> Any:
    """Imports a public name on first use, so that ``import fedc2i`` and the command line start without torch."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'fedc2i' has no attribute '{name}'")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if "IPython" in sys.modules:
    from fedc2i.report.notebook import register

    register()
