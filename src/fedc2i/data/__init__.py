"""Data sources, one file each; `fedc2i.data.sources.load` finds them by name."""
