"""A run and its folder: settings, plan, checkpoints, resume, results, cache."""
