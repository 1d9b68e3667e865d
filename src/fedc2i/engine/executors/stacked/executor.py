"""All clients of all seeds at once: the method's functions lifted with ``torch.func.vmap``, over clients, then seeds.

What does not depend on the client (a relayed stack of models, their sum, their leave-one-out means) is computed once a
seed, because vmap leaves it without a client axis. Where memory runs out, fewer clients are computed at a time.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_leaves

from fedc2i.core import seeding
from fedc2i.core.errors import UserError
from fedc2i.core.params import Params, row, select, stack
from fedc2i.core.params import Stacked as StackedParams
from fedc2i.engine.attacks import Attackers
from fedc2i.engine.client import ClientData, LocalClient, RunContext
from fedc2i.engine.executors.base import ClientBatch, Received, Trained
from fedc2i.engine.executors.stacked.chunks import Piece, in_parts
from fedc2i.engine.executors.stacked.cuda_graph import Recorded
from fedc2i.engine.executors.stacked.memory_estimate import clients_that_fit
from fedc2i.engine.executors.stacked.padded_data import Stacks
from fedc2i.engine.executors.stacked.steps import Stepper
from fedc2i.engine.executors.stacked.vmap_rules import Lifted
from fedc2i.engine.records import Metrics
from fedc2i.methods.base import Phase, Site
from fedc2i.training.local import Batch

_NARROW = 128  # numbers in a patch: at so few, cuDNN's convolutions are slower than a product
_Made = TypeVar("_Made")
_Kind = tuple[Any, ...]  # a piece of a round's work
_Context = dict[str, Any]  # the tensors a Site is made of, each with or without an axis for clients


class _Kept(NamedTuple):
    """Something recorded, the round it is for, 0 for any, and the one it was last used in."""

    work: Any
    round: int
    used: int


class Stacked:
    """`Executor` that serves all clients together."""

    def __init__(
        self, data: Sequence[ClientData], clients_at_once: int = 0, attackers: Sequence[Attackers] = ()
    ) -> None:
        self._data = data
        self._device = data[0].counts.device
        self._stacks = Stacks(data, attackers)
        self._at_once = clients_at_once  # 0: not known yet
        self._made: dict[Any, _Kept] = {}  # what was recorded
        self._reads_round: set[_Kind] = set()

    def train(self, turns: Sequence[ClientBatch], evaluate: bool) -> list[Trained]:
        """Local runs, uploads, and scores of the trained models if asked for."""
        return self._in_parts(turns, lambda part: self._train(part, evaluate))

    def personalise(self, turns: Sequence[ClientBatch], evaluate: bool) -> list[Received]:
        """Starts of the next round, diagnostics, and scores of the starts if asked for."""
        return self._in_parts(turns, lambda part: self._personalise(part, evaluate))

    def evaluate(self, turns: Sequence[ClientBatch]) -> list[Metrics]:
        """Metrics of one client after the other: a test set is work enough for a whole GPU."""
        found = [own for turn in turns for own in self._scores(turn)]
        values = iter(torch.stack([value for own in found for value in own.values()]).tolist() if found else ())
        scored = iter([{name: next(values) for name in own} for own in found])
        return [[next(scored) for _ in turn.clients] for turn in turns]

    def _scores(self, turn: ClientBatch) -> list[dict[str, Tensor]]:
        """What `evaluate` reports, still on the device."""
        kind: _Kind = ("evaluate", *turn.clients)
        clients = [_Scored(turn.recipe, self._data[m], lambda: self._reads_round.add(kind)) for m in turn.clients]

        def scores(models: StackedParams, context: _Context) -> list[dict[str, Tensor]]:
            found = []
            for k, client in enumerate(clients):
                own = {name: rows[k] for name, rows in context["personal"].items()}
                mail = {**context["received"], **own}, context["position"][k]
                with Lifted(widest=_NARROW):
                    sums = [client.score(piece, row(models, k), *mail, turn.round) for piece in client.pieces()]
                found.append(client.metrics(sums))
            return found

        position = torch.tensor([turn.download.position(m) for m in turn.clients], device=self._device)
        context = {"received": turn.download.shared, "personal": _own_rows(turn), "position": position}
        if len(turn.clients) < len(self._data):  # others in the next round: not worth a recording
            return scores(turn.params, context)
        recorded: Recorded = self._made_once(turn, kind, context, lambda: Recorded(scores, self._device))
        result: list[dict[str, Tensor]] = recorded(turn.params, context)
        return result

    def close(self) -> None:
        """Gives back what was recorded, and the memory it holds."""
        self._made.clear()

    def _score(self, part: Sequence[ClientBatch], models: Sequence[StackedParams], wanted: bool) -> list[Metrics]:
        pairs = zip(part, models, strict=True)
        return self.evaluate([replace(turn, params=own) for turn, own in pairs]) if wanted else [[] for _ in part]

    def _in_parts(
        self, turns: Sequence[ClientBatch], compute: Callable[[list[ClientBatch]], list[Piece]]
    ) -> list[Piece]:
        """Results in the order of ``turns``, in as many parts as memory asks for."""
        self._at_once = self._at_once or self._fitting(turns[0].recipe)
        while True:
            try:
                return in_parts(turns, self._at_once, compute)
            except torch.OutOfMemoryError:
                largest = min(self._at_once, sum(len(turn.clients) for turn in turns))
                if largest == 1:
                    raise UserError("a single client does not fit into the device's memory; use device=cpu") from None
            self._at_once = largest // 2
            self._made.clear()
            gc.collect()  # a user's method may hold tensors of its own in circles
            if self._device.type == "cuda":
                torch.cuda.empty_cache()

    def _fitting(self, recipe: RunContext) -> int:
        """How many clients are tried together at first: on a GPU all, for it tells when its memory is out."""
        if self._device.type != "cpu":
            return 10**9
        samples = min(self._stacks.train.y.shape[1], recipe.training.batch_size)
        return clients_that_fit(recipe.model, self._stacks.train.x.shape[2:], samples)

    # What vmap needs: stacks with an axis for seeds, one for clients, and the axes of whatever is shared.

    def _context(self, part: Sequence[ClientBatch]) -> tuple[_Context, _Context]:
        """What the clients know, stacked, and for each tensor the axis of its clients, if it has one."""
        shared = stack([turn.download.shared for turn in part])
        personal = stack([_own_rows(turn) for turn in part])
        position = torch.tensor([[turn.download.position(m) for m in turn.clients] for turn in part])
        context: _Context = {
            "counts": self._stacks.counts(part),
            "position": position.to(self._device),
            "received": {**shared, **personal},
        }
        received = {name: 0 if name in personal else None for name in context["received"]}
        return context, {"counts": 0, "position": 0, "received": received}

    def _site(self, turn: ClientBatch, own: _Context, kind: _Kind, training: bool = False) -> Site:
        """A client's site; it notes if the round's number matters, for then a recording serves that round only."""
        rounds: dict[str, Any] = {"round": turn.round, "rounds": turn.recipe.rounds}
        told: dict[str, Any] = {"training": training, "on_round": lambda: self._reads_round.add(kind)}
        return _Watched(turn.recipe.model, **own, **rounds, **told)

    # The steps of a round.

    def _train(self, part: list[ClientBatch], evaluate: bool) -> list[Trained]:
        first, recipe, whose = part[0], part[0].recipe, self._stacks.whose(part)
        starts = params = stack([turn.params for turn in part])
        context, dims = self._context(part)
        context, dims = {**context, "start": starts}, {**dims, "start": 0}
        for number, (phase, steps) in enumerate(self._stacks.steps(part)):
            stepper = self._stepper(first, phase, number, context, dims)
            with seeding.isolated(self._device, recipe.seed, first.clients[0], first.round, phase.train):
                params = stepper.run(params, whose, steps, context)

        def upload(params: Params, data: Batch, own: _Context) -> Params:
            return recipe.method.upload(params, data, self._site(first, own, ("upload",)))

        lifted = self._recorded(first, ("upload",), context, _over_both(upload, (0, 0, dims)))
        with torch.no_grad():
            uploads = lifted(params, self._stacks.training_sets(part), context)
        if self._device.type == "cuda":  # while the GPU is busy
            self._stacks.draw_ahead(part)
        trained = _unstack(params, len(part))
        scores = self._score(part, trained, evaluate)
        return [Trained(*own) for own in zip(trained, _unstack(uploads, len(part)), scores, strict=True)]

    def _stepper(self, turn: ClientBatch, phase: Phase, number: int, context: _Context, dims: _Context) -> Stepper:
        """For tensors of these shapes; it lives as long as this executor, for on a GPU it holds a recorded step."""
        recipe, kind = turn.recipe, ("train", number)
        names = recipe.trainable(phase, turn.params)

        def loss(params: Params, batch: Batch, own: _Context) -> Tensor:
            with Lifted(batch.w):
                return recipe.loss(params, batch, self._site(turn, own, kind, phase.train != "head"), names)

        def make() -> Stepper:
            return Stepper(loss, names, self._stacks.train, recipe.training, dims, recipe.method.average)

        return self._made_once(turn, kind, context, make)

    def _recorded(
        self, turn: ClientBatch, kind: _Kind, context: _Context, function: Callable[..., Any]
    ) -> Callable[..., Any]:
        """The function, on a GPU recorded for tensors of these shapes."""
        return self._made_once(turn, kind, context, lambda: Recorded(function, self._device))

    def _made_once(self, turn: ClientBatch, kind: _Kind, context: _Context, make: Callable[[], _Made]) -> _Made:
        """What was made for this kind of work and these shapes before; made anew where the round's number matters.

        What was not used in this round or the last is given up when something new is made: every recording keeps the
        memory it needs to itself.
        """
        shapes = tuple(tuple(leaf.shape) for leaf in tree_leaves(context))
        number = turn.round if kind in self._reads_round else 0
        key = (kind, *context["received"], shapes)
        before = self._made.get(key)
        if before is None:  # a server that comes to know more clients sends other shapes every round
            self._made = {key: kept for key, kept in self._made.items() if kept.used >= turn.round - 1}
        made: _Made = make() if before is None or before.round != number else before.work
        self._made[key] = _Kept(made, number, turn.round)
        return made

    def _personalise(self, part: list[ClientBatch], evaluate: bool) -> list[Received]:
        first = part[0]
        context, dims = self._context(part)
        batch = self._stacks.probes(part)
        kind = ("personalise", 0 if batch is None else batch.y.shape[2])

        def one(params: Params, batch: Batch | None, own: _Context) -> tuple[Params, dict[str, Tensor]]:
            start, report = first.recipe.method.personalise(params, batch, self._site(first, own, kind))
            return start, dict(report)

        lifted = self._recorded(first, kind, context, _over_both(one, (0, None if batch is None else 0, dims)))
        with torch.no_grad():
            starts, reports = lifted(stack([turn.params for turn in part]), batch, context)
        received = _unstack(starts, len(part))
        scores = self._score(part, received, evaluate)
        return [Received(*own) for own in zip(received, _unstack(reports, len(part)), scores, strict=True)]


class _Scored(LocalClient):
    """A client that tells when its predictions depend on the round."""

    def __init__(self, recipe: RunContext, data: ClientData, on_round: Callable[[], None]) -> None:
        super().__init__(recipe, data)
        self._on_round = on_round

    def _site(self, received: Params, position: int | Tensor, round: int) -> Site:
        return _Watched(**vars(super()._site(received, position, round)), on_round=self._on_round)


@dataclass(frozen=True)
class _Watched(Site):
    """A `Site` that tells when somebody asks it for the round."""

    on_round: Callable[[], None] = lambda: None

    def __getattribute__(self, name: str) -> Any:
        if name == "round":
            object.__getattribute__(self, "on_round")()
        return super().__getattribute__(name)


def _own_rows(turn: ClientBatch) -> StackedParams:
    """What each client received for itself alone, stacked."""
    download = turn.download
    if not download.personal:
        return {}
    if download.clients == turn.clients:
        return dict(download.personal)
    return stack([select(download.to(m), download.personal) for m in turn.clients])


def _over_both(function: Callable[..., Any], dims: tuple[Any, ...]) -> Callable[..., Any]:
    """Lifted over clients, with ``dims`` telling what has an axis for them, then over seeds, which everything has."""
    outer = tuple(None if dim is None else 0 for dim in dims)
    return vmap(vmap(function, in_dims=dims, randomness="different"), in_dims=outer, randomness="different")


def _unstack(stacked: StackedParams, seeds: int) -> list[StackedParams]:
    """The seeds of a stack, as views."""
    return [{name: tensor[s] for name, tensor in stacked.items()} for s in range(seeds)]
