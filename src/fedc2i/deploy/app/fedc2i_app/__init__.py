"""fedc2i as a Flower App."""
