"""Checks the diagnostics that sites send, so that a site with other names or shapes does not spoil the rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from torch import Tensor

from fedc2i.core.params import Params
from fedc2i.engine.diagnostics import Diagnostics
from fedc2i.flower.messages import MOST_REPORTS


def agreed(reports: Mapping[int, Params], received: Mapping[int, tuple[int, ...]], classes: int) -> list[Diagnostics]:
    """The diagnostics that most sites send, each in the most common form; all others are dropped.

    The forms are one number, one per received client, one per class, and one per received client and class.

    Args:
        reports: diagnostics by name, for each client.
        received: the clients whose models a client received.
        classes: number of classes.
    """
    votes: dict[str, Counter[int]] = {}
    for client, report in reports.items():
        for name, values in report.items():
            votes.setdefault(name, Counter()).update(_forms(values, len(received[client]), classes))
    popular = sorted((name for name in votes if votes[name]), key=lambda name: -max(votes[name].values()))
    forms = {name: min(votes[name], key=lambda form: (-votes[name][form], form)) for name in popular[:MOST_REPORTS]}
    return [
        Diagnostics(
            {
                name: values[None]
                for name, values in report.items()
                if name in forms and forms[name] in _forms(values, len(received[client]), classes)
            },
            (client,),
            received[client],
        )
        for client, report in reports.items()
    ]


def _forms(values: Tensor, received: int, classes: int) -> list[int]:
    """The forms that fit the values' shape; several if there are as many classes as clients."""
    shapes = [(received, classes), (received,), (classes,), ()]
    return [form for form, shape in enumerate(shapes) if tuple(values.shape) == shape]
