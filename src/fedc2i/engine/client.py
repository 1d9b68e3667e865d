"""One client: the method's client-side functions on that client's data, random draws and device.

This is the plain form. The simulator calls it for one client after the other; a real site runs it for itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, autocast

from fedc2i.core import seeding
from fedc2i.core.params import Params, Stacked, stack
from fedc2i.core.settings import EngineSettings, TrainingSettings
from fedc2i.data.federation import Client, Federation
from fedc2i.engine.records import Scored
from fedc2i.methods.base import Method, Phase, Site
from fedc2i.models.model import Model
from fedc2i.training.local import Batch, draw_epochs, train
from fedc2i.training.metrics import AT_ONCE, AT_ONCE_ON_GPU, all_scores, defined, means, score

if TYPE_CHECKING:
    from fedc2i.engine.attacks import Attackers

LEAST_HELD_OUT, MOST_HELD_OUT = 16, 128  # samples that a guard measures on
PART_HELD_OUT = 8  # of training data, at most an eighth
Piece = tuple[str, int, int]  # a split, the first image in it and the one after the last


@dataclass(frozen=True)
class ClientData:
    """A client's data on the device: images stay uint8."""

    name: str
    train: Batch
    validation: Batch
    test: Batch
    counts: Tensor  # (C,) training samples of each class

    @classmethod
    def place(cls, client: Client, classes: int, device: torch.device) -> ClientData:
        """Moves a client's data to the device."""
        splits: list[Batch] = []
        for split in (client.train, client.validation, client.test):
            images = split.x.reshape(len(split), *client.train.x.shape[1:])  # an empty split may come without a shape
            splits.append(Batch(images.to(device), split.y.to(device), torch.ones(len(split), device=device)))
        train, validation, test = splits
        counts = torch.bincount(client.train.y, minlength=classes).to(device)
        return cls(client.name, train, validation, test, counts)

    @classmethod
    def place_all(cls, federation: Federation, method: Method, device: torch.device) -> list[ClientData]:
        """Moves every client's data to the device; the first trains on the union if the method pools data."""
        data = [cls.place(client, len(federation.classes), device) for client in federation.clients]
        if method.pools_data:
            union = Batch(*(torch.cat(parts) for parts in zip(*(own.train for own in data), strict=True)))
            counts = torch.stack([own.counts for own in data]).sum(0)
            data[0] = replace(data[0], train=union, counts=counts)
        return data

    @property
    def samples(self) -> int:
        """How many training samples the client has."""
        return len(self.train.y)

    def with_flipped_labels(self) -> ClientData:
        """With training labels C − 1 − c in place of c; validation and test data stay."""
        flipped = self.train._replace(y=len(self.counts) - 1 - self.train.y)
        return replace(self, train=flipped, counts=self.counts.flip(0))


class HeldOut(NamedTuple):
    """Samples that a client does not train on: their split and rows in it, and whether it has not done so yet."""

    split: Literal["train", "validation"]
    rows: Tensor
    unseen: bool


@dataclass(frozen=True)
class RunContext:
    """What all clients of a run have in common."""

    method: Method
    model: Model
    training: TrainingSettings
    rounds: int
    seed: int
    attacks: Attackers = field(default_factory=dict, hash=False)

    @classmethod
    def of_seed(
        cls, method: Method, model: Model, settings: EngineSettings, names: Sequence[str], seed: int
    ) -> RunContext:
        """What the clients ``names`` have in common in a run with this seed.

        Raises:
            UserError: for attackers that do not fit the clients.
        """
        if not settings.attack:
            return cls(method, model, settings, settings.rounds, seed)
        from fedc2i.engine import attacks

        attackers = attacks.parse(settings.attack, names, seed)
        return cls(method, model, settings, settings.rounds, seed, attackers)

    def flips_labels(self, name: str) -> bool:
        """Whether a client trains on flipped labels; flipping twice is not flipping."""
        return sum(attack.kind == "label-flip" for attack in self.attacks.get(name, ())) % 2 == 1

    def first_model(self, client: str, init: Literal["common", "independent"]) -> Params:
        """The initial model of a client: one common draw, or one for each client."""
        key = (client, "init") if init == "independent" else ("init",)
        params = self.model.init(self.seed, *key)
        with seeding.isolated(torch.device("cpu"), self.seed, *key, "setup"):
            return self.method.setup(params, self.model)

    def first_models(
        self, clients: Sequence[str], init: Literal["common", "independent"], copies: bool = True
    ) -> Stacked:
        """The initial models of all clients, stacked; a common one is drawn once, without ``copies`` stored once."""
        if init == "common" and not copies:
            one = self.first_model(clients[0], init)
            return {name: tensor.expand(len(clients), *tensor.shape) for name, tensor in one.items()}
        drawn = {name: self.first_model(name, init) for name in (clients if init == "independent" else clients[:1])}
        return stack([drawn.get(name, drawn[clients[0]]) for name in clients])

    def trainable(self, phase: Phase, params: Params) -> list[str]:
        """The names that a phase trains: the model's parameters, and private parts that the method added."""
        model = self.model
        frozen = ({*model.body_names, *model.head_names} - set(model.trainable)) | self.method.untrained(model)
        part = {"all": params.keys(), "body": model.body_names, "head": params.keys() - set(model.body_names)}
        return [name for name in params if name in part[phase.train] and name not in frozen]

    def loss(self, params: Params, batch: Batch, site: Site, names: Sequence[str]) -> Tensor:
        """What a local step that trains ``names`` minimises: the method's loss, and the anchor if there is one."""
        with autocast(batch.y.device.type, torch.bfloat16, enabled=self.training.precision == "bf16"):
            loss = self.method.loss(params, batch, site)
        if self.method.anchor:
            for name in names:
                loss = loss + self.method.anchor / 2 * (params[name] - site.start[name]).square().sum()
        return loss

    def epochs(self, data: ClientData, round: int) -> list[list[Tensor]]:
        """The batches of a client's local run, by epoch; the same for every method that holds out nothing."""
        held, generator = self.draw_held_out(data, round), seeding.generator(self.seed, data.name, round, "batches")
        if held is None or held.split != "train" or not held.unseen:
            return draw_epochs(data.samples, self.training, generator)
        rows = torch.arange(data.samples)
        rows = rows[~torch.isin(rows, held.rows)]
        return [[rows[index] for index in epoch] for epoch in draw_epochs(len(rows), self.training, generator)]

    def draw_held_out(self, data: ClientData, round: int) -> HeldOut | None:
        """The samples for `Site.held_out`: validation data, else some of the training data, the same every round.

        A client that can spare none has one that it trains on.
        """
        share = self.method.holds_out
        if not share:
            return None
        generator = seeding.generator(self.seed, data.name, "held-out")
        if size := len(data.validation.y):
            return HeldOut("validation", torch.randperm(size, generator=generator)[:MOST_HELD_OUT], True)
        wanted = min(max(int(share * data.samples), LEAST_HELD_OUT), MOST_HELD_OUT)
        count = min(wanted, max(1, data.samples // PART_HELD_OUT), data.samples - 1)
        if (data.samples - count) % self.training.batch_size == 1:  # BatchNorm cannot train on a batch of one
            count -= 1
        rows = torch.randperm(data.samples, generator=generator)[: max(1, count)]  # some modules cannot read no samples
        return HeldOut("train", rows, count > 0 and 2 * round <= self.rounds)

    def draw_probe(self, data: ClientData, round: int) -> tuple[Literal["train", "validation"], Tensor] | None:
        """The split and the indices of what `Method.personalise` sees, newly drawn every round."""
        probe = self.method.probe
        if probe is None:
            return None
        held_out = probe.split == "validation" or (probe.split == "held-out" and len(data.validation.y) > 0)
        size = len(data.validation.y if held_out else data.train.y)
        wanted = size if probe.samples == "all" else min(probe.samples, size)
        order = torch.randperm(size, generator=seeding.generator(self.seed, data.name, round, "influence"))
        return "validation" if held_out else "train", order[:wanted]

    def run_phases(self, epochs: Sequence[Any]) -> list[tuple[Phase, list[Any]]]:
        """Each phase with its share of the epochs, in order."""
        shares, first = [], 0
        for phase in self.method.phases(len(epochs)):
            shares.append((phase, list(epochs[first : first + phase.epochs])))
            first += phase.epochs
        return shares


class LocalClient:
    """Runs the method's client-side functions for one client."""

    def __init__(self, context: RunContext, data: ClientData) -> None:
        self.context = context
        self.data = data.with_flipped_labels() if context.flips_labels(data.name) else data
        self._device = data.counts.device

    def _site(self, received: Params, position: int | Tensor, round: int) -> Site:
        where = torch.as_tensor(position, device=self._device)
        return Site(self.context.model, self.data.counts, where, received, round=round, rounds=self.context.rounds)

    def personalise(
        self, own: Params, received: Params, position: int, round: int
    ) -> tuple[Params, Mapping[str, Tensor]]:
        """The start of the round after ``round``, from what the exchange of ``round`` brought."""
        probe = None
        if (drawn := self.context.draw_probe(self.data, round)) is not None:
            split: Batch = getattr(self.data, drawn[0])
            probe = split.take(drawn[1].to(self._device))
        with torch.no_grad():
            return self.context.method.personalise(own, probe, self.exchange_site(received, position, round))

    def exchange_site(self, received: Params, position: int, round: int) -> Site:
        """What the client knows while the method personalises what the exchange of ``round`` brought."""
        site, held = self._site(received, position, round), self.context.draw_held_out(self.data, round)
        if held is None:
            return site
        split: Batch = getattr(self.data, held.split)
        samples = split.take(held.rows.to(self._device))
        return replace(site, held_out=samples._replace(w=samples.w * held.unseen))

    def train(self, start: Params, received: Params, position: int, round: int) -> Params:
        """The local training of ``round``."""
        context, params = self.context, start
        site = replace(self._site(received, position, round), start=start)
        for phase, epochs in context.run_phases(context.epochs(self.data, round)):
            names = context.trainable(phase, params)
            loss = partial(context.loss, site=replace(site, training=phase.train != "head"), names=names)
            batches = [index for epoch in epochs for index in epoch]
            with seeding.isolated(self._device, context.seed, self.data.name, round, phase.train):
                params = train(loss, params, names, self.data.train, batches, context.training, context.method.average)
        return params

    def upload(self, params: Params, start: Params, received: Params, position: int, round: int) -> Params:
        """What leaves the client after its local training from ``start``."""
        with torch.no_grad():
            site = replace(self._site(received, position, round), start=start)
            return self.context.method.upload(params, self.data.train, site)

    def evaluate(self, params: Params, received: Params, position: int, round: int) -> dict[str, float]:
        """Accuracy and loss on the client's own test and, if it has one, validation data: all that leaves a site."""
        return dict(self.scored(params, received, position, round))

    def scored(self, params: Params, received: Params, position: int, round: int) -> Scored:
        """The same, with the logits of the test samples."""
        sums = [self.score(piece, params, received, position, round) for piece in self.pieces()]
        scores = self.metrics(sums)
        found = dict(zip(scores, torch.stack(list(scores.values())).tolist(), strict=True))
        return Scored(defined(found), torch.cat(self.test_logits(sums)))

    def test_logits(self, sums: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        """The logits of the test samples in pieces, from the sums over all pieces."""
        return [own["logits"] for (split, _, _), own in zip(self.pieces(), sums, strict=True) if split == "test"]

    def pieces(self) -> list[Piece]:
        """What is scored, a few images at a time."""
        size = AT_ONCE if self._device.type == "cpu" else AT_ONCE_ON_GPU
        splits = {"test": len(self.data.test.y), "validation": len(self.data.validation.y)}
        return [(split, low, low + size) for split, end in splits.items() for low in range(0, end, size)]

    def score(
        self, piece: Piece, params: Params, received: Params, position: int | Tensor, round: int
    ) -> dict[str, Tensor]:
        """Sums over one piece."""
        split, low, high = piece
        site = self._site(received, position, round)
        images = Batch(*(part[low:high] for part in getattr(self.data, split)))
        return score(lambda x: predict_all(self.context.method, params, x, site), images)

    def metrics(self, sums: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Means, from the sums over all pieces in their order."""
        by_split: dict[str, list[Mapping[str, Tensor]]] = {"test": [], "validation": []}
        for (split, _, _), own in zip(self.pieces(), sums, strict=True):
            by_split[split].append(own)
        checked = means(by_split["validation"], len(self.data.validation.y))
        return all_scores(by_split["test"], self.data.test.y) | {f"validation_{n}": v for n, v in checked.items()}


def predict_all(method: Method, params: Params, x: Tensor, site: Site) -> dict[str, Tensor]:
    """The method's main prediction under ``""``, its others under ``"/name"``."""
    others = method.other_predictions(params, x, site)
    return {"": method.predict(params, x, site), **{f"/{name}": logits for name, logits in others.items()}}
