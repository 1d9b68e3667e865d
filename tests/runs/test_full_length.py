"""A full-length run: what `make demo` promises."""

from __future__ import annotations

import time

import pytest

import fedc2i


@pytest.mark.slow
def test_demo_is_learned_and_in_time() -> None:
    began = time.perf_counter()
    results = fedc2i.compare(["local", "fedavg", "fedc2i"], data="digits", seeds=[0])
    assert time.perf_counter() - began < 180 / 3 + 30  # the demo has three seeds and three minutes; a busy machine
    for result in results:
        assert result.scores("trained")["Avg"].mean > 75
        assert min(result.scores("trained")[name].mean for name in result.federation.names) > 50
    vectors = results[2].influence("influence_vector")[-1]
    assert vectors.diagonal().min() > 1 / len(
        vectors
    )  # after 20 rounds everyone trusts itself more than an equal share
