"""A real federation: the folders and keys of its sites and of its coordinator, and the processes that run there."""
