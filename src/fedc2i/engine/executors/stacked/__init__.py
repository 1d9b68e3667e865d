"""All clients at once, lifted with ``torch.func.vmap``."""
