"""Our own studies, on one grid runner: ``python -m experiments.plus``, ``.benchmarks``, ``.many`` and so on."""
