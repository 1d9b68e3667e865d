"""Clients that receive from their neighbours only: who those are, and files that are refused."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import fedc2i
from fedc2i.core.errors import UserError
from fedc2i.core.settings import EngineSettings
from fedc2i.data.federation import Federation
from fedc2i.engine.exchange import receiver_groups
from fedc2i.engine.topology import MOST_BYTES, parse

RING = [(0, 1, 4), (0, 1, 2), (1, 2, 3), (2, 3, 4), (0, 3, 4)]
NAMES = ("a", "b", "c", "d")


# Who receives from whom.


def groups(topology: str, names: Sequence[str]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return receiver_groups(0, EngineSettings(topology=topology), names)


def test_full_is_one_circle_of_all() -> None:
    assert parse("full", NAMES, 0) == [(0, 1, 2, 3)] * 4
    assert groups("full", NAMES) == [((0, 1, 2, 3), (0, 1, 2, 3))]


def test_ring_by_hand() -> None:
    assert parse("ring", "abcde", 0) == RING
    assert groups("ring", "abcde") == [((m,), own) for m, own in enumerate(RING)]


@pytest.mark.parametrize("clients", [1, 2, 3])
def test_a_ring_of_few_is_full(clients: int) -> None:
    assert parse("ring", NAMES[:clients], 0) == parse("full", NAMES[:clients], 0)


@pytest.mark.parametrize(("clients", "k"), [(2, 1), (5, 1), (5, 3), (20, 7), (20, 19)])
def test_random_has_exactly_k_others(clients: int, k: int) -> None:
    names = [str(m) for m in range(clients)]
    topology = parse(f"random:{k}", names, 3)
    for m, own in enumerate(topology):
        assert m in own
        assert len(set(own)) == len(own) == k + 1
        assert list(own) == sorted(own)
        assert set(own) <= set(range(clients))
    assert parse(f"random:{k}", names, 3) == topology
    if k < clients - 1:
        assert len({tuple(parse(f"random:{k}", names, seed)) for seed in range(5)}) > 1
    else:
        assert topology == parse("full", names, 0)


def test_random_draws_every_other_client_equally_often() -> None:
    counts = np.zeros((5, 5))
    for seed in range(400):
        for m, own in enumerate(parse("random:2", "abcde", seed)):
            counts[m, list(own)] += 1
    assert (counts.diagonal() == 400).all()
    assert abs(counts[~np.eye(5, dtype=bool)] - 200).max() < 50  # five standard deviations


def write(folder: Path, text: str | bytes) -> str:
    path = folder / "who.txt"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return str(path)


def test_a_file_of_neighbours(tmp_path: Path) -> None:
    text = "# who: from whom\n\na: b, c\n  b :a\nc:\n d: d,a , b,b\n"
    want = [(0, 1, 2), (0, 1), (2,), (0, 1, 3)]
    assert parse(write(tmp_path, text), NAMES, 0) == want
    assert parse(write(tmp_path, "\ufeff" + text.replace("\n", "\r\n")), NAMES, 0) == want


def test_names_that_need_quotes_in_a_file(tmp_path: Path) -> None:
    names = ("Scans/1", "site #2, north", "x:y", "two words")
    text = 'Scans/1: "site #2, north", two words\n"site #2, north":\n"x:y": "Scans/1"\n"two words": "x:y"\n'
    assert parse(write(tmp_path, text), names, 0) == [(0, 1, 3), (1,), (0, 2), (2, 3)]


@pytest.mark.parametrize("text", ["full", "ring", "random:2"])
def test_a_file_says_what_a_word_says(text: str, tmp_path: Path) -> None:
    topology = parse(text, NAMES, 5)
    lines = [f"{name}: {', '.join(NAMES[m] for m in own)}" for name, own in zip(NAMES, topology, strict=True)]
    assert parse(write(tmp_path, "\n".join(reversed(lines))), NAMES, 0) == topology


def test_clients_with_the_same_sources_share_a_circle(tmp_path: Path) -> None:
    found = groups(write(tmp_path, "a: c\nb: d\nc: a\nd: b, c"), NAMES)
    assert found == [((0, 2), (0, 2)), ((1,), (1, 3)), ((3,), (1, 2, 3))]


GOOD = "b:\nc:\nd:\n"
BAD_FILES = [
    (GOOD, r"who.txt: no line for a; every client needs one, 'client: neighbour, neighbour' or just 'client:'"),
    ("", r"no line for a, b, c, d; every client needs one"),
    ("a\n" + GOOD, r"line 1 must be 'client: neighbour, neighbour', with names of clients, got 'a'"),
    (GOOD + "a: b c", r"line 4: no client 'b c', allowed are a, b, c, d"),
    (GOOD + "a: b,", r"line 4 must be"),
    (GOOD + "a: ,b", r"line 4 must be"),
    (GOOD + "a: b: c", r"line 4 must be"),
    (GOOD + "a, b", r"line 4 must be"),
    (GOOD + ": b", r"line 4 must be"),
    (GOOD + 'a: "b', r"line 4 must be"),
    (GOOD + 'a: b "c"', r"line 4 must be"),
    (GOOD + 'a: ""', r"line 4: no client ''"),
    (GOOD + "A: b", r"line 4: no client 'A', allowed are a, b, c, d"),
    (GOOD + "a: e", r"line 4: no client 'e', allowed are a, b, c, d"),
    (GOOD + "a: b\na: c", r"line 5: a second line for client 'a', allowed is one for each"),
    (GOOD + "a: \x1b[31m" + "e" * 500, r"line 4: no client '\[31me{196}', allowed"),
    (GOOD + "a: " + " " * 100_000 + "e", r"line 4: no client 'e'"),
    (GOOD + "a: " + "b," * 500_000, r"line 4 must be"),
    (GOOD + 'a: "' * 200_000, r"line 4 must be"),
    (b"\xff\xfe\x00", r"who.txt: not a text file, expected lines 'client: neighbour, neighbour' in UTF-8"),
    (b"#" * (MOST_BYTES + 1), r"who.txt: too large, allowed are 4,194,304 bytes"),
]


@pytest.mark.parametrize(("text", "words"), BAD_FILES, ids=lambda value: repr(value)[:24])
def test_files_that_are_refused(text: str | bytes, words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words) as caught:
        parse(write(tmp_path, text), NAMES, 0)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


BAD_WORDS = [
    ("rnig", r"topology must be full, ring, random:K or a FILE, got 'rnig' \(no such file\)"),
    ("", r"topology must be full, ring, random:K or a FILE, got '' \(not a file\)"),
    ("/dev/null", r"got '/dev/null' \(not a file\)"),
    ("a\0b", r"topology must be full, ring, random:K or a FILE, got 'a b'"),
    ("x" * 5000, r"topology must be full, ring, random:K or a FILE, got 'x{200,300}'"),
    ("\udcff\n", r"topology must be full, ring, random:K or a FILE, got"),
    ("random:0", r"topology=random:K: K must be 1\.\.3 for 4 clients, got '0'"),
    ("random:4", r"K must be 1\.\.3 for 4 clients, got '4'"),
    ("random:", r"K must be 1\.\.3 for 4 clients, got ''"),
    ("random:-1", r"K must be"),
    ("random:1.5", r"K must be"),
    ("random:" + "9" * 5000, r"K must be"),
]


@pytest.mark.parametrize(("text", "words"), BAD_WORDS, ids=lambda value: repr(value)[:24])
def test_words_that_are_refused(text: str, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        parse(text, NAMES, 0)
    assert "\n" not in str(caught.value)


def test_random_needs_others() -> None:
    with pytest.raises(UserError, match="topology=random:1 needs at least 2 clients, here is one; use full"):
        parse("random:1", ["a"], 0)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match=r"\(not a file\)"):
        parse(str(tmp_path / "pipe"), NAMES, 0)


def test_a_topology_that_does_not_fit_is_refused_before_the_run(federation: Federation, tmp_path: Path) -> None:
    for text in ("random:3", "star", write(tmp_path, "a: b")):
        with pytest.raises(UserError):
            fedc2i.run("fedavg", federation, model="lenet5", rounds=1, topology=text, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
