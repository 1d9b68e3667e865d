"""FedC²I: every client mixes the others' models by their measured influence on it.

Tan, Long, Jiang, Zhang, "Influence-Oriented Personalized Federated Learning". The server relays all models. Client m
draws one batch, measures by leave-one-out what each model is worth to it, and starts its next round from

    θ̄_m = Σ_i λ_i θ_i         the body, mixed by the influence vector λ       (client level)
    φ̄_{m,c} = Σ_i Λ_{i,c} φ_{i,c}  each row of the head, by the influence matrix Λ (class level)

The printed equation for φ̄ has φ_{m,c} on its right-hand side, which would make it a no-op; φ_{i,c} is meant. Where the
paper leaves a choice, it is an option below, and the default is our reading.

Every client receives every model. ``top_k`` is ours and saves most of that: between rounds of full exchange a client
receives only the models it weighted most at the last exchange and one other, drawn at random, and measures influence
among those and its own. For that it tells the server its weights.

Where only some clients train in a round, the server keeps the last model of every client, and those of many rounds ago
hold the mean back. With ``max_age`` old models are left out, the client's own like any other; a client whose model is
not among those received measures with their mean in its place. ``max_age=0`` with γ = 0 is FedAvg then, too.

A client's own model has seen the samples that influence is measured on, so with few samples the client seems to help
itself more than it does; ``own_weight=equal`` gives it an equal share and measures the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from fedc2i.core.errors import UserError
from fedc2i.core.options import check_at_least, check_choice, check_whole, convert, option
from fedc2i.core.params import VALID, Params, Stacked, finite, mix, mix_tensor, relay, select
from fedc2i.methods.base import Download, Method, Probe, Site, Uploads
from fedc2i.methods.math.candidates import CANDIDATES, beside, choose, scores, spread
from fedc2i.methods.math.gamma import Clock, Gamma
from fedc2i.methods.math.influence import (
    class_losses_of_heads,
    client_losses,
    equal_share,
    fill_empty,
    first_order_losses,
    influence,
    sharp_cross_entropy,
)
from fedc2i.models.model import scale
from fedc2i.training.local import Batch

WEIGHTS = ("influence_vector", "influence_matrix")
LOSSES = ("client_losses", "class_losses", "gamma_class")


@dataclass(frozen=True)
class FedC2I(Method):
    """Influence vector for the body, influence matrix for the head; its options are the paper's open choices."""

    name = "fedc2i"
    title = "FedC²I"
    about = "bodies mixed by client-level, classifier rows by class-level influence"
    keeps_uploads = True

    gamma: float | Gamma = option(  # noqa: RUF009  (a field, of a type that ruff does not know to be immutable)
        5.0, "sensitivity γ to influence, at least 0; 0 is FedAvg; a number or an adaptive one"
    )
    gamma_class: float | Gamma | None = option(None, "γ of the influence matrix; none: the same")  # noqa: RUF009
    variant: Literal["full", "client", "class-local", "class-global"] = option(
        "full", "the paper's ablation: λ and Λ; λ only; Λ with a private body; Λ with the mean body"
    )
    head: Literal["client", "own", "uniform"] = option(
        "client", "variant=client: the head is mixed by λ too, kept private, or averaged"
    )
    class_features: Literal["own", "aggregated"] = option(
        "own", "features under the class-level losses: of the client's own body, or of its new one"
    )
    influence: Literal["exact", "first-order"] = option(
        "exact", "client-level losses: one forward pass for each model, or one gradient for all (for many clients)"
    )
    influence_samples: int | Literal["all"] = option(32, "samples that influence is measured on")
    influence_split: Literal["train", "validation"] = option("train", "where these samples come from")
    missing: Literal["formula", "uniform", "own"] = option(
        "formula",
        "a class the client has no samples of: measured all the same, averaged, or its own row kept",
    )
    untrained_rows: Literal["include", "exclude"] = option(
        "include", "classifier rows of clients that lack the class; exclude sends class counts along"
    )

    not_finite: Literal["zero", "largest"] = option(
        "zero", "a model without which the loss is not finite: no influence, or that of the largest loss"
    )
    own_weight: Literal["measured", "equal"] = option(
        "measured", "of a client's own model: by its influence like any other's, or an equal share"
    )
    top_k: int = option(0, "how many models a client receives, those it weighted most, and one at random; 0: all")
    refresh: int = option(5, "top_k: everyone receives all models in every refresh-th round, and in the first")
    max_age: int | None = option(None, "models sent more rounds ago than this count no longer; none: all count")

    def __post_init__(self) -> None:
        check_choice(self, "variant", "head", "class_features", "influence", "influence_split", "missing")
        check_choice(self, "untrained_rows", "not_finite", "own_weight")
        check_gammas(self)
        check_whole(self, 1, "influence_samples", also="all")
        check_whole(self, 0, "top_k")
        check_whole(self, 1, "refresh")
        check_whole(self, 0, *([] if self.max_age is None else ["max_age"]))
        if self.top_k and self.max_age is not None:
            raise UserError("top_k and max_age cannot be used together: a client is sent models that may be old")

    @property
    def probe(self) -> Probe:
        """One batch a round, shared by both levels."""
        return Probe(self.influence_samples, self.influence_split)

    def upload(self, params: Params, data: Batch, site: Site) -> Params:
        """The model, and class counts where untrained rows are to be left out."""
        model = super().upload(params, data, site)
        return {**model, "class_counts": site.counts} if self.untrained_rows == "exclude" else model

    @property
    def reads_reports(self) -> tuple[str, ...]:
        """The weights, where they decide who receives which models."""
        return WEIGHTS if self.top_k else ()

    def combine(self, uploads: Uploads, state: Params) -> tuple[Download, Params]:
        """Relays every model to everyone; with ``top_k`` a few to each, except in rounds of full exchange."""
        uploads = uploads if self.max_age is None else uploads.recent(self.max_age)
        models = relay(uploads.tensors)
        few = 0 < self.top_k < len(uploads.clients) - 2  # fewer than all the others
        if not few or not uploads.reports or uploads.round % self.refresh == 0:
            return Download(shared=models, clients=uploads.clients), state
        valid = models.pop(VALID)
        index = choose(scores(uploads.reports), uploads.clients, uploads.round, self.top_k).to(valid.device)
        personal = {name: rows[index] for name, rows in models.items()}  # (K, top_k + 1, ...)
        return Download({VALID: valid}, {**personal, CANDIDATES: index}, uploads.clients), state

    def personalise(self, own: Params, batch: Batch | None, site: Site) -> tuple[Params, Mapping[str, Tensor]]:
        """Measures influence on one batch and mixes the received models by it."""
        assert batch is not None
        if CANDIDATES in site.received:
            return self._personalise_by_few(own, batch, site)
        return self._personalise(own, batch, site)

    def _personalise_by_few(self, own: Params, batch: Batch, site: Site) -> tuple[Params, dict[str, Tensor]]:
        """The same by a few models and the client's own; weights of those not received are 0, their losses nan.

        A client that the server has nothing of yet receives means of what the others do, starts from the mean of these,
        and has nothing to report.
        """
        index, valid = site.received[CANDIDATES], site.received[VALID]
        takes_part = _can_measure(own, site)
        sent = {name: rows for name, rows in site.received.items() if name not in (CANDIDATES, VALID)}
        received = beside({**own, "class_counts": site.counts}, sent, takes_part)
        received[VALID] = torch.cat([takes_part[None], valid[index]])
        known = site.position >= 0
        # Not by replace(), which reads the round: a recording that does is for that round only.
        few = type(site)(**{**vars(site), "received": received, "position": known.to(torch.int64) - 1})
        start, report = self._personalise(own, batch, few)
        positions = torch.cat([site.position[None], index])
        for names, missing in ((WEIGHTS, 0.0), (LOSSES, torch.nan)):
            for name in [name for name in names if name in report]:
                report[name] = torch.where(known, spread(report[name], positions, len(valid), missing), torch.nan)
        return start, {**report, "left_out": ~valid}

    def _personalise(self, own: Params, batch: Batch, site: Site) -> tuple[Params, dict[str, Tensor]]:
        """Influence of all models in ``site.received``, and the mix."""
        model = site.model
        peers = select(site.received, (*model.body_names, *model.head_names))
        if not peers:  # no upload was usable yet
            return own, {}
        valid = site.received[VALID]
        bodies, heads = select(peers, model.body_names), select(peers, model.head_names)
        batch = batch._replace(x=scale(batch.x, own[model.head_names[0]].dtype))  # once, not for every forward pass
        present = own if self.max_age is None else _own_or_mean(own, peers, valid, site)
        measures = _can_measure(present, site) if self.max_age is None else _is_sound(present)
        report: dict[str, Tensor] = {"left_out": ~valid}

        body_weights = self._body_weights(present, bodies, valid, measures, batch, site, report)
        start = {**own, **mix(body_weights, bodies)} if self.variant != "class-local" else own
        body = present if self.class_features == "own" else start
        head_weights = self._head_weights(present, body, heads, body_weights, valid, measures, batch, site, report)
        start = {**start, **{name: mix_tensor(head_weights, rows) for name, rows in heads.items()}}

        if self.variant != "full":  # there both weights are equal already where nothing can be measured
            plain = {**own, **mix(equal_share(valid, head_weights), peers)}
            start = {name: torch.where(measures, tensor, plain[name]) for name, tensor in start.items()}
        some = valid.any()
        return {name: torch.where(some, tensor, own[name]) for name, tensor in start.items()}, report

    def _body_weights(
        self,
        own: Params,
        bodies: Stacked,
        valid: Tensor,
        measures: Tensor,
        batch: Batch,
        site: Site,
        report: dict[str, Tensor],
    ) -> Tensor:
        """λ ``(K,)``, or equal weights in the variants that do not measure it."""
        everyone = equal_share(valid, batch.w)
        if self.variant in ("class-local", "class-global"):
            return everyone

        def loss(body: Params) -> Tensor:
            return sharp_cross_entropy(site.logits({**own, **body}, batch.x), batch.y, batch.w)

        if self.influence == "exact":
            losses = client_losses(loss, bodies, valid)
        else:
            losses = first_order_losses(loss, bodies, valid, select(bodies, site.model.trainable))
        weights, gamma = self._weigh(losses, self.gamma, valid, site)
        if gamma is not None:
            report["gamma"] = torch.where(measures, gamma, torch.nan)
        weights = fill_empty(weights, _own_or(everyone, valid, site))
        weights = torch.where(measures, weights, everyone)
        report.update(client_losses=losses, influence_vector=weights)
        return weights

    def _head_weights(
        self,
        own: Params,
        body: Params,
        heads: Stacked,
        body_weights: Tensor,
        valid: Tensor,
        measures: Tensor,
        batch: Batch,
        site: Site,
        report: dict[str, Tensor],
    ) -> Tensor:
        """Λ ``(K, C)``, or ``(K,)`` in the variant that does not measure it."""
        everyone = equal_share(valid, batch.w)
        keep = _own_or(everyone, valid, site)
        if self.variant == "client":
            return {"client": body_weights, "own": keep, "uniform": everyone}[self.head]
        features = site.features({**own, **body}, batch.x)
        weight, bias = site.model.split_head(heads)  # (K, C, d), (K, C)
        usable = valid[:, None].expand(-1, weight.shape[1])
        if self.untrained_rows == "exclude":
            usable = usable & (site.received["class_counts"] > 0)
            weight = torch.where(usable[:, :, None], weight, 0.0)
            bias = None if bias is None else torch.where(usable, bias, 0.0)
        logits = site.model.head(own, features)
        losses = class_losses_of_heads(logits, features, weight, bias, batch.y, batch.w, usable)
        gamma = self.gamma if self.gamma_class is None else self.gamma_class
        weights, used_gamma = self._weigh(losses, gamma, usable, site)
        if used_gamma is not None:  # for each entry of Λ: in a report (C,) could be taken for one number per client
            used = measures & usable & (site.counts > 0 if self.missing != "formula" else True)
            report["gamma_class"] = torch.where(used, used_gamma, torch.nan)
        weights = fill_empty(weights, keep)
        if self.missing != "formula":
            instead = {"uniform": everyone, "own": keep}[self.missing]
            weights = torch.where(site.counts > 0, weights, instead[:, None])
        weights = torch.where(measures, weights, everyone[:, None])
        report.update(class_losses=losses, influence_matrix=weights)
        return weights

    def _weigh(self, losses: Tensor, gamma: float | Gamma, usable: Tensor, site: Site) -> tuple[Tensor, Tensor | None]:
        """Losses ``(K,)`` or ``(K, C)`` to weights, and the γ that an adaptive one came to."""
        if self.own_weight == "measured":
            return weigh(losses, gamma, usable, site, self.not_finite)
        mine = F.one_hot(site.position.clamp(min=0), len(losses)).to(torch.bool) & (site.position >= 0)
        mine = mine.reshape(-1, *[1] * (losses.ndim - 1)) & usable
        weights, used = weigh(losses, gamma, usable & ~mine, site, self.not_finite)
        of = torch.where(weights.sum(0) > 0, usable.sum(0), 1)  # all of it where nobody else has an influence
        share = mine.to(losses.dtype) / of.clamp(min=1)
        return share + weights * (1 - share.sum(0)), used


def check_gammas(method: Any) -> None:
    """Brings a method's ``gamma`` and ``gamma_class`` into their types, and refuses bad values."""
    for name, kind in (("gamma", float | Gamma), ("gamma_class", float | Gamma | None)):
        object.__setattr__(method, name, convert(getattr(method, name), kind, name))
        if isinstance(getattr(method, name), float):
            check_at_least(method, 0, name)


def weigh(
    losses: Tensor, gamma: float | Gamma, valid: Tensor, clock: Clock, not_finite: Literal["zero", "largest"] = "zero"
) -> tuple[Tensor, Tensor | None]:
    """Losses ``(K,)`` or ``(K, C)`` to weights, and the γ ``()`` or ``(C,)`` that an adaptive one came to."""
    if isinstance(gamma, Gamma):
        return gamma.weights(losses, valid, clock, not_finite)
    return influence(losses, gamma, valid, not_finite), None


def _can_measure(own: Params, site: Site) -> Tensor:
    """Whether the client has trained before and its model is sound; one that has not starts from the plain mean."""
    return (site.position >= 0) & _is_sound(own)


def _is_sound(model: Params) -> Tensor:
    return finite({name: tensor[None] for name, tensor in model.items()})[0]


def _own_or_mean(own: Params, peers: Stacked, valid: Tensor, site: Site) -> Params:
    """The model that a client measures with: its own, or the mean of those received if its own is not among them."""
    mean = mix(equal_share(valid, next(iter(peers.values()))), peers)
    return {**own, **{name: torch.where(site.position >= 0, own[name], tensor) for name, tensor in mean.items()}}


def _own_or(everyone: Tensor, valid: Tensor, site: Site) -> Tensor:
    """All weight on the client's own model; equal weights if that is not among the valid ones."""
    mine = F.one_hot(site.position.clamp(min=0), everyone.shape[0]).to(torch.bool)
    usable = (mine & valid).any() & (site.position >= 0)
    return torch.where(usable, mine.to(everyone.dtype), everyone)
