"""The simulator: rounds, clients, server, uploads and their protection."""
