"""Influence-oriented personalised federated learning."""
