"""Clients over worker processes, one for each core."""
