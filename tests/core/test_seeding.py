"""Random draws depend on their key and on nothing else."""

from __future__ import annotations

import itertools

import pytest
import torch

from fedc2i.core import seeding

CPU = torch.device("cpu")


def test_key_is_stable_across_machines_and_versions() -> None:
    # sha256("0\x1fmnist\x1f1\x1fbatches"), first 8 bytes, one bit dropped: results of past runs hang on this number.
    assert seeding.key(0, "mnist", 1, "batches") == 3868324242549320265


def test_every_part_of_a_key_counts() -> None:
    one_changed = [(0, "a", 1, "x"), (1, "a", 1, "x"), (0, "b", 1, "x"), (0, "a", 2, "x"), (0, "a", 1, "y")]
    cut_elsewhere = [(0,), (0, "a"), (0, "a1", "x"), (0, "", "a", 1, "x"), (0, "a", 11)]
    keys = [seeding.key(*parts) for parts in one_changed + cut_elsewhere]
    assert len(set(keys)) == len(keys)
    assert all(0 <= key < 2**63 for key in keys)


def test_generators_do_not_disturb_each_other_or_the_global_one() -> None:
    before = torch.get_rng_state()
    alone = torch.rand(4, generator=seeding.generator(0, "a"))
    first, second = seeding.generator(0, "a"), seeding.generator(0, "b")
    woven = [(torch.rand(1, generator=first), torch.rand(1, generator=second)) for _ in range(4)]
    assert torch.equal(torch.cat([own for own, _ in woven]), alone)
    assert torch.equal(torch.get_rng_state(), before)


def test_isolated_draws_under_its_key_and_restores_the_global_state() -> None:
    before = torch.get_rng_state()
    draws = []
    for part in ("a", "a", "b"):
        torch.rand(len(draws))  # where the global generator stands does not matter
        here = torch.get_rng_state()
        with seeding.isolated(CPU, 0, part):
            draws.append(torch.rand(3))
        assert torch.equal(torch.get_rng_state(), here)
    torch.set_rng_state(before)
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


def test_isolated_restores_after_an_error() -> None:
    before = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError), seeding.isolated(CPU, 0):
        _ = int(torch.rand(())) / 0
    assert torch.equal(torch.get_rng_state(), before)


def test_keys_look_independent() -> None:
    keys = [seeding.key(seed, client, number) for seed, client, number in itertools.product(range(3), "abc", range(30))]
    assert len(set(keys)) == len(keys)
    ones = sum(key.bit_count() for key in keys) / (63 * len(keys))
    assert ones == pytest.approx(0.5, abs=0.02)
