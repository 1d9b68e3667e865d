"""Influence-oriented personalised federated learning: each site measures whose knowledge helps it.

`run` and `compare` run methods on a `Federation` of clients, `resume` goes on with what was cut off; `load` and
`from_arrays` make a federation. A new method is a subclass of `Method`, a new model comes from `split`. `read_run` and
`read_model` read a run folder back.
"""

import sys

from fedc2i.api import compare, run
from fedc2i.core.errors import UserError
from fedc2i.core.options import option
from fedc2i.core.version import __version__
from fedc2i.data.arrays import from_arrays
from fedc2i.data.federation import Client, Federation, Split
from fedc2i.data.sources import load
from fedc2i.methods.base import Download, Method, Phase, Probe, Site, Uploads
from fedc2i.methods.math.influence import class_losses, client_losses, influence
from fedc2i.models.model import Model, split
from fedc2i.report.comparison import comparison_table
from fedc2i.report.plots import plot_accuracy, plot_influence
from fedc2i.report.tracking import track
from fedc2i.runs.folder import read_model
from fedc2i.runs.read import read_run
from fedc2i.runs.results import Comparison, Result, Score
from fedc2i.runs.resume import resume
from fedc2i.training.local import Batch

__all__ = [
    "Batch",
    "Client",
    "Comparison",
    "Download",
    "Federation",
    "Method",
    "Model",
    "Phase",
    "Probe",
    "Result",
    "Score",
    "Site",
    "Split",
    "Uploads",
    "UserError",
    "__version__",
    "class_losses",
    "client_losses",
    "compare",
    "comparison_table",
    "from_arrays",
    "influence",
    "load",
    "option",
    "plot_accuracy",
    "plot_influence",
    "read_model",
    "read_run",
    "resume",
    "run",
    "split",
    "track",
]

if "IPython" in sys.modules:
    from fedc2i.report.notebook import register

    register()
