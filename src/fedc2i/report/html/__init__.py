"""A run, or several side by side, as one self-contained HTML page that asks no server for anything."""
