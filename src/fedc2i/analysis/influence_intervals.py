"""Intervals for the influence of a finished run, from its saved models and its data.

The last exchange of the run is made once more: every client receives every last model and measures influence on its
own samples, as its method does, but on more of them. The first of the samples are those that the run's last round
measured on, so with as many the estimate is the run's own.

Another draw of as many samples would have given somewhat other losses, and so other weights. The bootstrap draws the
same number of samples with replacement, again and again, which is nothing but another weight for each sample: 0, 1,
2, ... times. A method's own `personalise` reads these weights. Lifted over draws with ``vmap``, what does not depend on
the weights, the losses of single samples, is computed once; gradients depend on them, and each draw has its own. The
intervals speak of the samples alone: that another seed would have trained other models is no part of them.

``influence-intervals.json`` in a run folder holds what `InfluenceIntervals.to_json` gives:

    version        1
    seed, level, draws
    clients        names, in table order; rows and columns of everything below
    classes        names
    split          {client: the split its samples are from}
    samples        {client: how many}
    share          [M] the equal share: one over the number of models the client received
    vector         {estimate, low, high, differs}, each [M][M]: row m is what client m measured of every client
    matrix         the same, [M][M][C]; null where the method has no class-level influence, or with more than
                   100,000 entries, some hundred clients
    notes          sentences for a reader

Numbers are null where nothing was measured. ``differs`` is true where the interval leaves the equal share out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from fedc2i.analysis.weights import CEILING, at_ceiling
from fedc2i.core import seeding
from fedc2i.core.errors import UserError
from fedc2i.core.files import refuse_links, to_json, write_atomically
from fedc2i.core.params import Params, Stacked, row, stack
from fedc2i.core.seeding import repeatable
from fedc2i.data.federation import Federation
from fedc2i.engine.client import ClientData, LocalClient, RunContext
from fedc2i.engine.exchange import Mailbox, Server, receiver_groups
from fedc2i.methods.base import Method, Site
from fedc2i.methods.messages import valid_flags
from fedc2i.models.model import Model
from fedc2i.runs.finished_run import read_run, reopen
from fedc2i.runs.plan import Plan
from fedc2i.runs.stored_models import read_models
from fedc2i.training.local import Batch

FILE = "influence-intervals.json"
VERSION = 1
NAMES = {"vector": "influence_vector", "matrix": "influence_matrix"}
AT_ONCE = 2**26  # numbers of mixed models in memory
FEW_AT_ONCE = 16  # draws, where each has passes of its own
FEWEST_DRAWS = 20
MOST_ENTRIES = 100_000  # in a file that a page or a person still reads
MEASURING = "methods like fedc2i, fedc2i-plus and fedfomo do"
_ENDS = ("estimate", "low", "high")
NEGLIGIBLE = 1e-3  # of the equal share: a smaller difference is rounding, or matters to nobody


@dataclass(frozen=True)
class Interval:
    """Weights with the ends of their intervals, tensors of one shape; nan where nothing was measured."""

    estimate: Tensor
    low: Tensor
    high: Tensor

    def differs(self, share: float | Tensor) -> Tensor:
        """Booleans: the whole interval is above, or below, the equal share, by more than a thousandth of it."""
        return (self.low > share * (1 + NEGLIGIBLE)) | (self.high < share * (1 - NEGLIGIBLE))


@dataclass(frozen=True)
class InfluenceIntervals:
    """Influence of one seed's last models with intervals; tensors ``(M, M)`` and ``(M, M, C)``."""

    seed: int
    level: float
    draws: int
    clients: tuple[str, ...]
    classes: tuple[str, ...]
    split: dict[str, str]
    samples: dict[str, int]
    share: Tensor
    vector: Interval | None
    matrix: Interval | None
    notes: tuple[str, ...]

    def differs(self, name: str = "vector") -> Tensor:
        """Where the interval leaves the equal share out."""
        own: Interval = getattr(self, name)
        return own.differs(self.share.reshape(-1, *[1] * (own.estimate.ndim - 1)))

    def fixed(self) -> Tensor:
        """Where λ is the equal share whatever the samples, as a client's own is with ``own_weight=equal``."""
        if self.vector is None:
            return torch.zeros(len(self.clients), len(self.clients), dtype=torch.bool)
        share = self.share[:, None].expand_as(self.vector.estimate)
        ends = [getattr(self.vector, end) for end in _ENDS]
        return torch.stack([torch.isclose(end, share, rtol=1e-6, atol=0) for end in ends]).all(0)

    def to_json(self) -> dict[str, Any]:
        """As the module's beginning says."""
        plain: dict[str, Any] = {"version": VERSION, **vars(self), "share": self.share.tolist()}
        for name in NAMES:
            own = getattr(self, name)
            plain[name] = None
            if own is not None and own.estimate.numel() <= MOST_ENTRIES:
                ends = {end: getattr(own, end).double().round(decimals=6).tolist() for end in _ENDS}
                plain[name] = {**ends, "differs": self.differs(name).tolist()}
        return plain


def intervals(
    folder: Path | str,
    *,
    seed: int | None = None,
    samples: int = 256,
    draws: int = 200,
    level: float = 0.95,
    data: Federation | None = None,
    model: Model | None = None,
    method: Method | None = None,
    data_dir: Path | None = None,
    trust: bool = False,
) -> InfluenceIntervals:
    """Measures the influence of a finished run once more, with intervals, and writes it into the run's folder.

    Of the run's first seed by default, with ``samples`` of every client or as many as it has. Data, model and method
    are those that the run was started with, if they were objects of Python; ``data_dir`` is for data that was moved.
    Python files that the folder names are executed only with ``trust``.

    Raises:
        UserError: for a method that measures no influence, or a run whose data or models are not there.
    """
    folder = Path(folder)
    if samples < 2:
        raise UserError(f"samples must be at least 2, got {samples}")
    if draws < FEWEST_DRAWS:
        raise UserError(f"draws must be at least {FEWEST_DRAWS}, got {draws}")
    if not 0 < level < 1:
        raise UserError(f"level must be above 0 and below 1, got {level}")
    result = read_run(folder)
    if result.method.probe is None:
        raise UserError(f"{folder}: {result.label} measures no influence on samples; {MEASURING}")
    if seed is not None and seed not in result.config.seeds:
        raise UserError(f"seed {seed} is not part of the run, allowed are {', '.join(map(str, result.config.seeds))}")
    seed = result.config.seeds[0] if seed is None else seed
    refuse_links(folder)
    plan = reopen(folder, data, model, method, data_dir, trust).on_features()
    models = read_models(folder, plan.federation.names, seed)
    found = measure(plan, models, seed, result.last(seed).round, samples, draws, level)
    write_atomically(folder / FILE, to_json(found.to_json()).encode())
    return found


def measure(
    plan: Plan, models: Stacked, seed: int, number: int, samples: int, draws: int, level: float
) -> InfluenceIntervals:
    """The exchange after round ``number``, with intervals; arguments as for `intervals`."""
    federation, settings = plan.federation, plan.config
    device, names = plan.config.torch_device(), federation.names
    data = [ClientData.place(client, len(federation.classes), device) for client in federation.clients]
    recipe = RunContext.of_seed(plan.method, plan.model, settings, names, seed)
    clients = [LocalClient(recipe, own) for own in data]
    models = {name: tensor.to(device) for name, tensor in models.items()}
    counts, found = torch.tensor([own.samples for own in data], device=device), _Found(len(names))
    mailbox, everyone = Mailbox(len(names), settings.norm_bound), range(len(names))
    with repeatable(settings):
        uploads = stack([clients[m].upload(row(models, m), row(models, m), {}, m, number) for m in everyone])
        mailbox.receive(everyone, uploads, number)
        for members, sources in receiver_groups(seed, settings, names):
            download = Server(plan.method, counts, models, sources, mailbox).combine(number)
            for m in members:
                seen, received = clients[m].data, download.to(m)
                site = clients[m].exchange_site(received, download.position(m), number)
                batch, split = _batch(recipe, seen, number, samples)
                generator = seeding.generator(seed, names[m], number, "bootstrap")
                weights = draw_weights(len(batch.y), draws, generator).to(device)
                measured = _bootstrap(plan, row(models, m), batch, site, weights, level)
                valid = valid_flags(received)
                share = 1 / (len(download.clients) if valid is None else max(1, int(valid.sum())))
                found.add(m, download.clients, measured, share)
                found.samples[names[m]], found.split[names[m]] = len(batch.y), split
    if not found.whole:
        raise UserError(f"{plan.label} reports no influence to put intervals around; {MEASURING}")
    of_whom = names, federation.classes, found.split, found.samples, torch.tensor(found.share)
    return InfluenceIntervals(
        seed, level, draws, *of_whom, found.whole.get("vector"), found.whole.get("matrix"), _notes(plan, found.whole)
    )


class _Found:
    """What the clients measured, row after row."""

    def __init__(self, clients: int) -> None:
        self._clients = clients
        self.share = [torch.nan] * clients
        self.samples: dict[str, int] = {}
        self.split: dict[str, str] = {}
        self.whole: dict[str, Interval] = {}

    def add(self, m: int, received: tuple[int, ...], measured: dict[str, Interval], share: float) -> None:
        """Puts in what client ``m`` says of the clients it received."""
        self.share[m] = share
        for name, own in measured.items():
            shape = (self._clients, self._clients, *own.estimate.shape[1:])
            whole = self.whole.setdefault(name, Interval(*(torch.full(shape, torch.nan) for _ in _ENDS)))
            for end in _ENDS:
                getattr(whole, end)[m, list(received)] = getattr(own, end).to("cpu", torch.float32)


def _bootstrap(plan: Plan, own: Params, batch: Batch, site: Site, weights: Tensor, level: float) -> dict[str, Interval]:
    """λ and Λ of one client, by the names of `NAMES`."""

    def measured(w: Tensor) -> dict[str, Tensor]:
        report = plan.method.personalise(own, batch._replace(w=w), site)[1]
        return {name: report[where] for name, where in NAMES.items() if where in report}

    numbers = sum(tensor.numel() for tensor in own.values())
    at_once = max(1, AT_ONCE // max(1, numbers))
    if plan.method.probe is not None and plan.method.probe.gradient:
        at_once = min(at_once, FEW_AT_ONCE)
    with torch.no_grad():
        estimates = measured(batch.w)
    drawn = resample(measured, weights, at_once) if estimates else {}
    return {name: interval(estimates[name], drawn[name], level) for name in estimates}


def draw_weights(samples: int, draws: int, generator: torch.Generator) -> Tensor:
    """``(draws, samples)``: how often each sample is in each draw of ``samples`` with replacement."""
    index = torch.randint(samples, (draws, samples), generator=generator)
    return torch.zeros(draws, samples).scatter_add_(1, index, torch.ones(draws, samples))


def resample(
    measure: Callable[[Tensor], Mapping[str, Tensor]], weights: Tensor, at_once: int | None = None
) -> dict[str, Tensor]:
    """What ``measure`` gives, by name, for weights ``(draws, samples)``: each entry with a leading axis of draws.

    ``measure`` takes weights ``(samples,)`` and is lifted over draws, ``at_once`` of them together; all by default.
    """
    with torch.no_grad():
        return dict(vmap(lambda own: dict(measure(own)), chunk_size=at_once)(weights))


def interval(estimate: Tensor, drawn: Tensor, level: float = 0.95) -> Interval:
    """The percentile interval of each entry from those of every draw, ``(draws, ...)``."""
    ends = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=drawn.dtype, device=drawn.device)
    low, high = torch.nanquantile(drawn, ends, dim=0)
    return Interval(estimate, low, high)


def _batch(recipe: RunContext, data: ClientData, number: int, samples: int) -> tuple[Batch, str]:
    """Samples from where the method takes them, those of the run's own batch first, and their split's name."""
    drawn = recipe.draw_probe(data, number)
    assert drawn is not None
    split: Batch = getattr(data, drawn[0])
    order = torch.randperm(len(split.y), generator=seeding.generator(recipe.seed, data.name, number, "influence"))
    return split.take(order[:samples].to(split.y.device)), drawn[0]


def _notes(plan: Plan, whole: Mapping[str, Interval]) -> tuple[str, ...]:
    config, notes = plan.config, ["The intervals are over samples only; another seed trains other models."]
    if config.attack or config.clip or config.noise:
        notes.append("In the run uploads were changed on their way (attack, clip, noise); here models are as trained.")
    if plan.method.influence_note:
        notes.append(plan.method.influence_note)
        own = whole.get("vector")
        if own is not None and any(at_ceiling(own.estimate.numpy(), m) for m in range(len(own.estimate))):
            notes.append(f"So {CEILING} is the largest possible weight: no third model then weighs anything.")
    if plan.config.options.get("max_age") is not None:
        notes.append("The run ignored old models (max_age); here every client's last model counts.")
    return tuple(notes)
