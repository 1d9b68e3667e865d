"""The version of fedc2i."""

__version__ = "0.1.0"
