"""Influence-oriented personalised federated learning: each site measures whose knowledge helps it.

`run` and `compare` run methods on a `Federation` of clients, `resume` goes on with what was cut off; `load` and
`from_arrays` make a federation. A new method is a subclass of `Method`, a new model comes from `split`. `read_run` and
`read_model` read a run folder back.
"""

from fedc2i.api import compare, run
from fedc2i.data import Client, Federation, Split, from_arrays, load
from fedc2i.errors import UserError
from fedc2i.influence import class_losses, client_losses, influence
from fedc2i.methods import Download, Method, Phase, Probe, Site, Uploads
from fedc2i.models import Model, split
from fedc2i.options import option
from fedc2i.readback import read_run
from fedc2i.results import Result, Score
from fedc2i.resuming import resume
from fedc2i.runs import read_model
from fedc2i.trackers import track
from fedc2i.training import Batch
from fedc2i.version import __version__
from fedc2i.views import Comparison

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
    "from_arrays",
    "influence",
    "load",
    "option",
    "read_model",
    "read_run",
    "resume",
    "run",
    "split",
    "track",
]
