"""Typed views of what travels: flat entries and back, parts of a model, relayed models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedc2i.methods.messages import Message, Parts, Peers, marked, model_name, relay, valid_flags
from fedc2i.models.model import Model

ONE, TWO, THREE = torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([3.0])


@dataclass(frozen=True)
class Note(Message):
    """One tensor that is always sent, one that may be."""

    prefix: ClassVar[str] = "note/"

    first: Tensor
    second: Tensor | None = None


def test_a_message_is_entries_under_its_prefix() -> None:
    assert Note(ONE).flat() == {"note/first": ONE}
    entries = {"first": TWO, **Note(ONE, TWO).flat(), "note/third": THREE}
    assert list(entries) == ["first", "note/first", "note/second", "note/third"]
    assert Note.read(entries) == Note.find(entries) == Note(ONE, TWO)
    assert Note.read(Note(ONE).flat()) == Note(ONE)
    assert Note.find({"first": ONE}) is None


def test_parts_of_a_marked_model() -> None:
    sent = {**marked({"a": ONE, "b": TWO, "c": THREE}, head=["c"], buffers=["a"]), **Note(ONE).flat()}
    assert list(sent) == ["buffer/a", "b", "head/c", "note/first"]  # in the model's order
    assert Parts.read(sent, Note) == Parts(rest={"b": TWO}, head={"c": THREE}, buffers={"a": ONE})
    assert [model_name(name) for name in sent] == ["a", "b", "c", "note/first"]


def test_relayed_models_are_read_as_peers(model: Model) -> None:
    models = {name: torch.stack([tensor, torch.nan * tensor]) for name, tensor in model.init(0).items()}
    received = relay(models)
    assert valid_flags(received).tolist() == [True, False]
    peers = Peers.read({**received, "more": ONE}, torch.tensor(1), model)
    assert all(torch.equal(peers.models[name][0], rows[0]) for name, rows in models.items())
    assert all((rows[1] == 0).all() for rows in peers.models.values())  # one nan would spoil every sum
    assert (peers.bodies.keys(), peers.heads.keys()) == (set(model.body_names), set(model.head_names))
    assert peers.own.tolist() == [False, True]
    assert peers.equal_weights(ONE).tolist() == peers.own_weights(ONE).tolist() == [1.0, 0.0]  # its own is not valid
    assert Peers.read(received, torch.tensor(0), model).own_weights(ONE).tolist() == [1.0, 0.0]
    stranger = Peers.read(received, torch.tensor(-1), model)
    assert stranger.own.tolist() == [False, False]
    assert not Peers.read({}, torch.tensor(-1), model).models
