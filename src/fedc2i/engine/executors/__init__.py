"""Who computes for the clients: one after the other, over processes, or all at once."""
