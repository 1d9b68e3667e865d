"""The four hospitals: FLamby's counts and inputs."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.model_selection import train_test_split

import fedc2i
from fedc2i.core.errors import UserError
from fedc2i.data import heart
from fedc2i.data.sources import load

FILES = Path(heart.__file__).parent / "heart_files"
COUNTS = {"Cleveland": (199, 104), "Hungary": (172, 89), "Switzerland": (30, 16), "Long Beach": (85, 45)}


def test_counts_are_those_of_flamby() -> None:
    federation = load("heart")
    assert {client.name: (len(client.train), len(client.test)) for client in federation.clients} == COUNTS
    assert federation.input.shape == (13,)
    assert federation.classes == ("healthy", "ill")
    assert federation.clients[2].test.y.bincount().tolist() == [1, 15]


@pytest.mark.parametrize("key", heart.HOSPITALS)
def test_split_is_that_of_flamby(key: str) -> None:
    with (FILES / f"processed.{key}.data").open() as file:
        rows = [[*row[:10], row[13]] for row in csv.reader(file) if row]
    ill = np.array([float(row[-1]) > 0 for row in rows if "?" not in row])
    strata = ill if min(ill.sum(), (~ill).sum()) > 2 else None
    train, test = train_test_split(np.arange(len(ill)), test_size=0.34, random_state=43, stratify=strata)
    split = json.loads((FILES / "split.json").read_text())[key]
    assert split == {"train": train.tolist(), "test": test.tolist()}


@pytest.mark.parametrize("number", range(4))
def test_training_part_is_standardised_and_test_part_by_the_same_numbers(number: int) -> None:
    scaled, plain = (load("heart", scale=how).clients[number] for how in ("client", "none"))
    mean, sd = plain.train.x.mean(0), plain.train.x.std(0)
    sd[sd < 1e-6] = 1.0
    torch.testing.assert_close(scaled.train.x, (plain.train.x - mean) / sd, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(scaled.test.x, (plain.test.x - mean) / sd, rtol=1e-4, atol=1e-4)


def test_rows_are_those_of_the_files() -> None:
    with (FILES / "processed.switzerland.data").open() as file:
        rows = [row for row in csv.reader(file) if row]
    whole = [row for row in rows if "?" not in [*row[:10], row[13]]]
    client = load("heart:switzerland", scale="none").clients[0]
    found = torch.cat([client.train.x, client.test.x])
    labels = torch.cat([client.train.y, client.test.y])
    read = {
        (float(r[0]), float(r[1]), *(float(r[2] == str(v)) for v in (2, 3, 4)), int(r[13] != "0"))
        for r in ([*row[:2], row[2].removesuffix(".0"), *row[3:]] for row in whole)
    }
    wanted = {(*x[[0, 1, 8, 9, 10]].tolist(), int(y)) for x, y in zip(found, labels, strict=True)}
    assert len(whole) == 46
    assert wanted == read


def test_unknown_hospital_is_refused() -> None:
    with pytest.raises(UserError, match="'boston', allowed are cleveland"):
        load("heart:boston")


def test_hospitals_by_the_names_that_tables_print() -> None:
    assert load("heart:Hungary, long beach,cleveland").names == ("Hungary", "Long Beach", "Cleveland")


def test_influence_is_measured_on_a_model_without_a_body() -> None:
    result = fedc2i.run("fedc2i", "heart", model="logistic", rounds=1, seeds=[0])
    matrix = result.influence("influence_matrix")
    assert result.influence("influence_vector") == pytest.approx(matrix.mean(-1))  # no bodies to tell apart
    assert matrix.std() > 0
