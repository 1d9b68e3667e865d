"""At the coordinator."""

from fedc2i.engine.flower.server_app import app

__all__ = ["app"]
