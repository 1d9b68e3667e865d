"""A run, or several side by side, as one self-contained HTML page that asks no server for anything."""

from fedc2i.report.html.page import make, write

__all__ = ["make", "write"]
