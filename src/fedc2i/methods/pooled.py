"""Training on pooled data: what one model could do if privacy were no concern."""

from __future__ import annotations

from dataclasses import dataclass

from fedc2i.methods.local import Local


@dataclass(frozen=True)
class Pooled(Local):
    """One model, trained on the union of all clients' training data; every client has that model.

    A round is as many epochs over the union as any client takes over its own data. Each client's test and validation
    data stay its own, so that scores compare with those of other methods.
    """

    name = "pooled"
    title = "Pooled"
    about = "one model on the union of all clients' training data; a reference, in simulation only"
    pools_data = True
