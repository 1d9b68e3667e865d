"""What sites say of an exchange, as far as it can be laid out: a site that says something odd harms nobody else's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from torch import Tensor

from fedc2i.core.params import Params
from fedc2i.engine.diagnostics import Told
from fedc2i.flower.messages import MOST_REPORTS


def agreed(reports: Mapping[int, Params], received: Mapping[int, tuple[int, ...]], classes: int) -> list[Told]:
    """The diagnostics that most sites give, each in the form that most of them give it; all others are dropped.

    There are forms for one number, one of each client received, one of each class, and one of each of both.

    Args:
        reports: by client, its diagnostics by name.
        received: by client, whose models it had received.
        classes: how many the run has.
    """
    votes: dict[str, Counter[int]] = {}
    for client, report in reports.items():
        for name, values in report.items():
            votes.setdefault(name, Counter()).update(_forms(values, len(received[client]), classes))
    popular = sorted((name for name in votes if votes[name]), key=lambda name: -max(votes[name].values()))
    forms = {name: min(votes[name], key=lambda form: (-votes[name][form], form)) for name in popular[:MOST_REPORTS]}
    return [
        Told(
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
    """Which forms these values can be of; several where there are as many classes as clients."""
    shapes = [(received, classes), (received,), (classes,), ()]
    return [form for form, shape in enumerate(shapes) if tuple(values.shape) == shape]
