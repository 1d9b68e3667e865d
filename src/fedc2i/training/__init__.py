"""Local training and evaluation of one client."""
