"""At a site."""

from pathlib import Path

from fedc2i.deploy.client_app import app_in

app = app_in(Path(__file__).parent)
