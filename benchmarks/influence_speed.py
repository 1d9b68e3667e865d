"""The influence step of one client on one CPU thread: ours against the naive form, and how it grows."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from benchmarks import naive
from benchmarks.effort import Effort
from benchmarks.loop import LeNet5
from benchmarks.report import clock, show
from benchmarks.rounds import threads
from fedc2i.core.params import Params, Stacked, row, select, stack
from fedc2i.data.federation import InputSpec
from fedc2i.methods.base import Site
from fedc2i.methods.fedc2i import FedC2I
from fedc2i.methods.math.first_order import first_order_losses
from fedc2i.methods.math.influence import class_losses, client_losses, sharp_cross_entropy
from fedc2i.methods.messages import relay
from fedc2i.models.model import Model, scale
from fedc2i.models.networks import build
from fedc2i.training.local import Batch

TOLERANCE = 1e-4  # relative, between our losses and the naive ones
SPREAD = 2.0  # initial weights times this: losses then differ enough between clients for agreement to mean something


class DisagreementError(Exception):
    """Our numbers are not the naive ones: then their speed is of no interest."""


@dataclass(frozen=True)
class Case:
    """A client with its batch of 32 and the models of all clients, its own first."""

    model: Model
    peers: Stacked
    batch: Batch

    @classmethod
    def make(cls, clients: int, classes: int) -> Case:
        """Random models and images."""
        model = build("lenet5", classes, InputSpec((3, 28, 28)))
        models = [{name: SPREAD * t for name, t in model.init(0, m).items()} for m in range(clients)]
        generator = torch.Generator().manual_seed(0)
        x = torch.randint(0, 256, (32, 3, 28, 28), generator=generator, dtype=torch.uint8)
        y = torch.randint(0, classes, (32,), generator=generator)
        return cls(model, stack(models), Batch(x, y, torch.ones(32)))

    @property
    def own(self) -> Params:
        """The client's model."""
        return row(self.peers, 0)

    @property
    def valid(self) -> Tensor:
        """All models take part."""
        return torch.ones(len(self.peers["fc3.bias"]), dtype=torch.bool)

    def site(self) -> Site:
        """What the method is handed."""
        counts = torch.bincount(self.batch.y, minlength=self.model.classes)
        return Site(self.model, counts, torch.tensor(0), relay(self.peers))


@torch.no_grad()
def our_client_losses(case: Case, approximate: bool = False) -> Tensor:
    """l_{-i} ``(M,)`` as FedC²I computes them, exactly or to first order."""
    own, batch, site = case.own, case.batch, case.site()
    x = scale(batch.x, torch.float32)

    def loss(body: Params) -> Tensor:
        return sharp_cross_entropy(site.logits({**own, **body}, x), batch.y, batch.w)

    bodies = select(case.peers, case.model.body_names)
    if approximate:
        return first_order_losses(loss, bodies, case.valid, bodies)
    return client_losses(loss, bodies, case.valid)


@torch.no_grad()
def our_class_losses(case: Case) -> Tensor:
    """l_{-i,-c} ``(M, C)`` as FedC²I computes them, with the one pass for features and all classifiers' logits."""
    model, own, batch = case.model, case.own, case.batch
    features = model.features(own, batch.x)
    weight, bias = model.split_head(case.peers)
    return class_losses(model.head(own, features), features, weight, bias, batch.y, batch.w, case.valid)


@torch.no_grad()
def whole_step(case: Case, method: FedC2I) -> Mapping[str, Tensor]:
    """Everything from received models to the next start; returns what the method reports."""
    return method.personalise(case.own, case.batch, case.site())[1]


def naive_losses(case: Case, seconds: float) -> tuple[naive.Sampled, naive.Sampled]:
    """The naive form at both levels, as many passes as fit in ``seconds`` each."""
    clients, classes = len(case.valid), case.model.classes
    models = [row(case.peers, m) for m in range(clients)]
    x, y = scale(case.batch.x, torch.float32), case.batch.y
    net = LeNet5(classes)

    def client_pass(number: int) -> float:
        return naive.without_client(net, models[0], models, number, x, y)

    def class_pass(number: int) -> float:
        return naive.without_row(net, models[0], models, *divmod(number, classes), x, y)

    return naive.sample(client_pass, clients, seconds), naive.sample(class_pass, clients * classes, seconds)


def agreement(case: Case, client: naive.Sampled, classes: naive.Sampled) -> float:
    """The largest relative difference between naive losses and those that the method itself reports.

    Raises:
        DisagreementError: where it is above the tolerance.
    """
    report = whole_step(case, FedC2I())
    pairs = [
        (our_client_losses(case), client),
        (our_class_losses(case).flatten(), classes),
        (report["client_losses"], client),
        (report["class_losses"].flatten(), classes),
    ]
    worst = max(float((ours[theirs.which] / theirs.values - 1).abs().max()) for ours, theirs in pairs)
    if not worst < TOLERANCE:
        raise DisagreementError(f"losses differ from the naive ones by {worst:.1e}, allowed is {TOLERANCE:.0e}")
    return worst


def timed(function: Callable[[], Any], repeats: int, least: float = 0.2) -> float:
    """Median seconds of a call, after one to warm up: so many times, and for at least a fifth of a second."""
    function()
    seconds: list[float] = []
    while len(seconds) < repeats or sum(seconds) < least:
        began = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def measure_cell(clients: int, classes: int, effort: Effort) -> dict[str, Any]:
    """All forms for one number of clients and classes, on one thread."""
    with threads(1):
        case = Case.make(clients, classes)
        naive_client, naive_class = naive_losses(case, effort.naive_seconds)
        exact, approximate = FedC2I(), FedC2I(influence="first-order")
        cell: dict[str, Any] = {
            "clients": clients,
            "classes": classes,
            "difference": agreement(case, naive_client, naive_class),
            "naive_client": naive_client.seconds,
            "naive_class": naive_class.seconds,
            "naive_client_passes": str(naive_client),
            "naive_class_passes": str(naive_class),
            "exact_client": timed(lambda: our_client_losses(case), effort.repeats),
            "exact_class": timed(lambda: our_class_losses(case), effort.repeats),
            "exact_step": timed(lambda: whole_step(case, exact), effort.repeats),
            "first_order_client": timed(lambda: our_client_losses(case, approximate=True), effort.repeats),
            "first_order_step": timed(lambda: whole_step(case, approximate), effort.repeats),
        }
        near, true = (whole_step(case, method)["influence_vector"] for method in (approximate, exact))
        cell["first_order_off"] = float((near - true).abs().max() * clients)
    cell["client_speedup"] = cell["naive_client"] / cell["exact_client"]
    cell["class_speedup"] = cell["naive_class"] / cell["exact_class"]
    cell["step_speedup"] = (cell["naive_client"] + cell["naive_class"]) / cell["exact_step"]
    return cell


def measure(effort: Effort) -> dict[str, Any]:
    """Every cell, and the exponents of growth."""
    cells = [measure_cell(clients, classes, effort) for clients, classes in effort.cells]
    return {"cells": cells, "exponents": exponents(cells)}


def slope(sizes: list[int], seconds: list[float]) -> float:
    """The exponent of growth: log time against log size by least squares."""
    return float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])


FORMS = {
    "exact_client": "exact client level",
    "first_order_client": "first-order client level",
    "exact_class": "class level",
    "exact_step": "exact step",
    "first_order_step": "first-order step",
    "naive_client": "naive client level",
    "naive_class": "naive class level",
}


def exponents(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Growth in M at every C, and in C at every M, where there are two points or more."""
    found = []
    for axis, other in (("clients", "classes"), ("classes", "clients")):
        for fixed in sorted({cell[other] for cell in cells}):
            along = [cell for cell in cells if cell[other] == fixed]
            sizes = [cell[axis] for cell in along]
            if len(sizes) > 1:
                slopes = {form: slope(sizes, [cell[form] for cell in along]) for form in FORMS}
                found.append({"in": axis, "at": fixed, "points": sizes, "exponents": slopes})
    return found


def present(console: Console, result: Mapping[str, Any], effort: Effort) -> None:
    """Losses of each level, the whole step, and growth."""
    losses, steps = [], []
    for cell in result["cells"]:
        size = f"M={cell['clients']} C={cell['classes']}"
        for level in ("client", "class"):
            near = clock(cell["first_order_client"]) if level == "client" else "-"
            ours = (clock(cell[f"exact_{level}"]), f"{cell[f'{level}_speedup']:.1f}x", near)
            losses.append((size, level, clock(cell[f"naive_{level}"]), cell[f"naive_{level}_passes"], *ours))
        naively = clock(cell["naive_client"] + cell["naive_class"])
        forms = (clock(cell["exact_step"]), f"{cell['step_speedup']:.1f}x", clock(cell["first_order_step"]))
        steps.append((size, naively, *forms, f"{cell['first_order_off']:.2g}"))
    worst = max(cell["difference"] for cell in result["cells"])
    notes = [
        "One thread, batch of 32, LeNet-5. Naive times of sampled passes are extrapolated in proportion.",
        f"Our exact losses and the naive ones differ by at most {worst:.0e} (relative).",
    ]
    header = ("", "level", "naive", "passes", "ours", "speed-up", "first-order")
    show(console, "Influence of one client: losses", header, losses, notes)
    header = ("", "naive losses", "exact", "speed-up", "first-order", "off")
    notes = ["off: largest error of a weight of λ under the first-order form, in units of 1/M."]
    show(console, "Influence of one client: the whole step, mixing included", header, steps, notes)
    names = {"clients": ("M", "C"), "classes": ("C", "M")}
    growth = [
        (
            f"in {names[own['in']][0]} at {names[own['in']][1]}={own['at']}",
            ", ".join(map(str, own["points"])),
            *(f"{own['exponents'][form]:.2f}" for form in FORMS),
        )
        for own in result["exponents"]
    ]
    notes = ["time ~ size^exponent, by least squares on logarithms of the times above."]
    show(console, "Growth", ("", "points", *FORMS.values()), growth, notes)
