"""What a reader should know of the data behind a contribution."""

from __future__ import annotations

from fedc2i.analysis.contribution.coalitions import Game
from fedc2i.analysis.contribution.uncertainty import FEWEST_OF_CLASS
from fedc2i.core.errors import listed


def scarce_classes(runs: Game) -> list[str]:
    """A note of receivers with too few test samples of a class for intervals of means over classes."""
    federation, found = runs.plan.federation, []
    for receiver, name in enumerate(federation.names):
        few = {k: own for k, own in enumerate(runs.class_sizes(receiver)) if 0 < own < FEWEST_OF_CLASS}
        if few:
            label, size = min(few.items(), key=lambda item: item[1])
            found.append(f"{name} ({size} of class {federation.classes[label]})")
    if not found:
        return []
    return [
        f"Fewer than {FEWEST_OF_CLASS} test samples of a class: {listed(found)}. Balanced "
        "accuracy, AUROC and F1 have no intervals and no verdicts there."
    ]
