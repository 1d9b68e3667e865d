"""Who runs a round. `inprocess` holds the round loop for one machine."""

from fedc2i.engine.inprocess import federate
from fedc2i.engine.rounds import Outcome, Round
from fedc2i.engine.settings import Settings

__all__ = ["Outcome", "Round", "Settings", "federate"]
