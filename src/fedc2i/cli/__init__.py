"""The command ``fedc2i``, one file for each command."""
