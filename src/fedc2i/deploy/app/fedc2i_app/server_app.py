"""At the coordinator."""

from fedc2i.deploy.server_app import app

__all__ = ["app"]
