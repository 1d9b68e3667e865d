"""What clients and the server exchange, typed.

An upload or a download is a flat mapping of named tensors, so that it passes unchanged through vmap, checkpoints and
the network. The classes here are typed views of such mappings, and what holds those of many clients.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from fedc2i.core.params import Params, Stacked, finite, rows, select, unprefixed, zero_where_not
from fedc2i.methods.math.influence import equal_share
from fedc2i.models.model import Model

HEAD = "head/"
BUFFER = "buffer/"
VALID = "valid"


@dataclass(frozen=True)
class Message:
    """A dataclass of tensors that travels as one entry for each field, under ``prefix`` and the field's name.

    A field that is none is not sent.
    """

    prefix: ClassVar[str] = ""

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The entries' names."""
        return tuple(cls.prefix + field.name for field in fields(cls))

    def flat(self) -> Params:
        """The entries."""
        values = [getattr(self, field.name) for field in fields(self)]
        return {name: value for name, value in zip(self.names(), values, strict=True) if value is not None}

    @classmethod
    def read(cls, entries: Params) -> Self:
        """From a mapping that holds the entries, among others; also from stacked uploads, ``(K, ...)`` each."""
        return cls(**unprefixed(cls.prefix, select(entries, cls.names())))

    @classmethod
    def find(cls, entries: Params) -> Self | None:
        """The same, or none if the entries are not there."""
        return cls.read(entries) if cls.names()[0] in entries else None


@dataclass(frozen=True)
class Uploads:
    """What the server holds of K clients: every tensor ``(K, ...)``, in the order of ``clients``.

    Attributes:
        tensors: the stacked uploads.
        clients: their numbers in the federation.
        samples: ``(K,)`` how many training samples each has.
        ages: ``(K,)`` rounds since each was sent; 0 is this round's.
        round: the present round, from 1.
        reports: what each reported last, by the names in `Method.reads_reports`: ``(K, K, ...)`` on the CPU, row k what
            client k said of each of ``clients``, nan where it said nothing; empty if nobody has reported yet.
    """

    tensors: Stacked
    clients: tuple[int, ...]
    samples: Tensor
    ages: Tensor
    round: int = 0
    reports: Mapping[str, Tensor] = field(default_factory=dict)

    def recent(self, age: int) -> Uploads:
        """Those sent at most ``age`` rounds ago; the youngest if all are older."""
        ages = self.ages.tolist()
        kept = [k for k, own in enumerate(ages) if own <= max(age, min(ages))]
        if len(kept) == len(ages):
            return self
        return Uploads(
            rows(self.tensors, kept),
            tuple(self.clients[k] for k in kept),
            self.samples[kept],
            self.ages[kept],
            self.round,
            {name: values[kept][:, kept] for name, values in self.reports.items()},
        )


@dataclass(frozen=True)
class Download:
    """What the server sends: ``shared`` entries to every client, of ``personal`` ones each its own row.

    ``clients`` says whose rows those are, and whose models any relayed stack holds.
    """

    shared: Params = field(default_factory=dict)
    personal: Stacked = field(default_factory=dict)
    clients: tuple[int, ...] = ()

    def position(self, client: int) -> int:
        """Where the client's row is, -1 if the server has nothing of it yet."""
        return self.clients.index(client) if client in self.clients else -1

    def to(self, client: int) -> Params:
        """What this client receives; one that the server does not know yet gets the mean of all rows."""
        where = self.position(client)
        own = {
            name: rows[where] if where >= 0 else rows.to(torch.float32).mean(0).to(rows.dtype)
            for name, rows in self.personal.items()
        }
        return {**self.shared, **own}


@dataclass(frozen=True)
class Parts:
    """A model in parts, for a server that treats them differently: it knows no model and cannot tell them apart.

    Attributes:
        rest: everything that is in no other part.
        head: tensors with one row for each class.
        buffers: tensors that are not trained, e.g. BatchNorm's running statistics.
    """

    rest: Params
    head: Params
    buffers: Params

    @classmethod
    def read(cls, entries: Params, *beside: type[Message]) -> Parts:
        """From `marked` entries, which messages of the types ``beside`` may be among."""
        others = {name for message in beside for name in message.names()}
        rest = select(entries, lambda name: name not in others and not name.startswith((HEAD, BUFFER)))
        return cls(rest, unprefixed(HEAD, entries), unprefixed(BUFFER, entries))


def marked(params: Params, head: Collection[str] = (), buffers: Collection[str] = ()) -> Params:
    """A model as entries of an upload that the server can read as `Parts`; their order stays."""
    prefix = {**dict.fromkeys(head, HEAD), **dict.fromkeys(buffers, BUFFER)}
    return {prefix.get(name, "") + name: tensor for name, tensor in params.items()}


def model_name(name: str) -> str:
    """The name that the model has for an entry of an upload."""
    return name.removeprefix(HEAD).removeprefix(BUFFER)


def without_broken(models: Stacked) -> tuple[Stacked, Tensor]:
    """The models with zeros for those that hold nan or infinity, and which are valid, ``(K,)``.

    One nan would spoil every mean it is part of. The server looks once, so that no client has to.
    """
    valid = finite(models)
    return (models if bool(valid.all()) else zero_where_not(valid, models)), valid


def relay(models: Stacked) -> Params:
    """Models as a server passes them on to clients, who read them as `Peers`."""
    models, valid = without_broken(models)
    return {**models, VALID: valid}


def valid_flags(received: Params) -> Tensor | None:
    """``(K,)`` which of the relayed models are valid; none if no models were relayed."""
    return received.get(VALID)


@dataclass(frozen=True)
class Peers:
    """The models that a client received; its own may be among them.

    Attributes:
        models: K models, every tensor ``(K, ...)``; one that is not valid is zero.
        valid: ``(K,)`` which models held only finite numbers.
        position: ``()`` where the client's own model is, -1 if it is not among them.
        head_names: which tensors are the head.
    """

    models: Stacked
    valid: Tensor
    position: Tensor
    head_names: tuple[str, ...]

    @classmethod
    def read(cls, received: Params, position: Tensor, model: Model) -> Peers:
        """From what the server sent, which may hold no models."""
        models = select(received, (*model.body_names, *model.head_names))
        return cls(models, received.get(VALID, torch.zeros(0, dtype=torch.bool)), position, model.head_names)

    @property
    def bodies(self) -> Stacked:
        """θ_i."""
        return select(self.models, lambda name: name not in self.head_names)

    @property
    def heads(self) -> Stacked:
        """φ_i."""
        return select(self.models, self.head_names)

    @property
    def own(self) -> Tensor:
        """``(K,)`` which model is the client's own; none if it is not among them."""
        here = F.one_hot(self.position.clamp(min=0), len(self.valid)).to(torch.bool)
        return here & (self.position >= 0)

    def equal_weights(self, like: Tensor) -> Tensor:
        """``(K,)`` of the valid models."""
        return equal_share(self.valid, like)

    def own_weights(self, like: Tensor) -> Tensor:
        """``(K,)`` all weight on the client's own model; equal weights if that is not among the valid ones."""
        own = self.own
        return torch.where((own & self.valid).any(), own.to(like.dtype), self.equal_weights(like))
