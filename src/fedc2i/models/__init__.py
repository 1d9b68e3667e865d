"""Models: a body and a linear head."""
