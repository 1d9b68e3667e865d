"""The two points of a round at which models are evaluated, in the words that people read.

Files and Python say ``received`` and ``trained``; tables, figures and pages say before and after local training.
"""

from __future__ import annotations

from collections.abc import Mapping

from fedc2i.engine.records import Point

WHEN: Mapping[Point, str] = {"received": "before local training", "trained": "after local training"}
SHORT: Mapping[Point, str] = {"received": "before", "trained": "after"}
COLUMN = "Local training"  # the heading of a column of short names
NOTE = (
    "before: the model that a client receives in a round; after: that model after the client's local training; "
    "*: the point that the method's authors report."
)


def starred(point: Point, headline: Point) -> str:
    """The short name, with a star at the point that a method's authors report."""
    return f"{SHORT[point]} *" if point == headline else SHORT[point]
