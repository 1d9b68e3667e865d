"""Our own studies, on one grid runner: ``python -m experiments.plus``, ``.many`` and ``.robustness``."""
