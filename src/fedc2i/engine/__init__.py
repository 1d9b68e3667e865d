"""Who runs a round. `inprocess` holds the round loop for one machine."""

from fedc2i.engine.inprocess import Outcome, Round, Settings, federate

__all__ = ["Outcome", "Round", "Settings", "federate"]
