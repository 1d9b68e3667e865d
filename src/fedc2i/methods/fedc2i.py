"""FedC²I: every client mixes the others' models by their measured influence on it.

Tan, Long, Jiang, Zhang, "Influence-Oriented Personalized Federated Learning". The server relays all models. Client m
draws one batch, measures by leave-one-out what each model is worth to it, and starts its next round from

    θ̄_m = Σ_i λ_i θ_i         the body, mixed by the influence vector λ       (client level)
    φ̄_{m,c} = Σ_i Λ_{i,c} φ_{i,c}  each row of the head, by the influence matrix Λ (class level)

The printed equation for φ̄ has φ_{m,c} on its right-hand side, which would make it a no-op; φ_{i,c} is meant. Where the
paper leaves a choice, it is an option below, and the default is our reading.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from fedc2i.gamma import Gamma
from fedc2i.influence import (
    class_losses_of_heads,
    client_losses,
    equal_share,
    fill_empty,
    first_order_losses,
    influence,
    sharp_cross_entropy,
)
from fedc2i.methods.base import Download, Method, Probe, Site, Uploads
from fedc2i.models import scale
from fedc2i.options import check_at_least, check_choice, check_whole, convert, option
from fedc2i.params import VALID, Params, Stacked, finite, mix, mix_tensor, relay, select
from fedc2i.training import Batch


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

    def __post_init__(self) -> None:
        check_choice(self, "variant", "head", "class_features", "influence", "influence_split", "missing")
        check_choice(self, "untrained_rows", "not_finite")
        object.__setattr__(self, "gamma", convert(self.gamma, float | Gamma, "gamma"))
        object.__setattr__(self, "gamma_class", convert(self.gamma_class, float | Gamma | None, "gamma_class"))
        check_at_least(self, 0, *(n for n in ("gamma", "gamma_class") if isinstance(getattr(self, n), float)))
        check_whole(self, 1, "influence_samples", also="all")

    @property
    def probe(self) -> Probe:
        """One batch a round, shared by both levels."""
        return Probe(self.influence_samples, self.influence_split)

    def upload(self, params: Params, data: Batch, site: Site) -> Params:
        """The model, and class counts where untrained rows are to be left out."""
        model = super().upload(params, data, site)
        return {**model, "class_counts": site.counts} if self.untrained_rows == "exclude" else model

    def combine(self, uploads: Uploads, state: Params) -> tuple[Download, Params]:
        """Relays every model to everyone."""
        return Download(shared=relay(uploads.tensors), clients=uploads.clients), state

    def personalise(self, own: Params, batch: Batch | None, site: Site) -> tuple[Params, Mapping[str, Tensor]]:
        """Measures influence on one batch and mixes the received models by it."""
        assert batch is not None
        model = site.model
        peers = select(site.received, (*model.body_names, *model.head_names))
        if not peers:  # no upload was usable yet
            return own, {}
        valid = site.received[VALID]
        bodies, heads = select(peers, model.body_names), select(peers, model.head_names)
        batch = batch._replace(x=scale(batch.x, own[model.head_names[0]].dtype))  # once, not for every forward pass
        measures = _can_measure(own, site)
        report: dict[str, Tensor] = {"left_out": ~valid}

        body_weights = self._body_weights(own, bodies, valid, measures, batch, site, report)
        start = {**own, **mix(body_weights, bodies)} if self.variant != "class-local" else own
        body = own if self.class_features == "own" else start
        head_weights = self._head_weights(own, body, heads, body_weights, valid, measures, batch, site, report)
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
        weights, gamma = self._weigh(losses, self.gamma if self.gamma_class is None else self.gamma_class, usable, site)
        if gamma is not None:  # for each entry of Λ: in a report (C,) could be taken for one number per client
            used = measures & usable & (site.counts > 0 if self.missing != "formula" else True)
            report["gamma_class"] = torch.where(used, gamma, torch.nan)
        weights = fill_empty(weights, keep)
        if self.missing != "formula":
            instead = {"uniform": everyone, "own": keep}[self.missing]
            weights = torch.where(site.counts > 0, weights, instead[:, None])
        weights = torch.where(measures, weights, everyone[:, None])
        report.update(class_losses=losses, influence_matrix=weights)
        return weights

    def _weigh(self, losses: Tensor, gamma: float | Gamma, valid: Tensor, site: Site) -> tuple[Tensor, Tensor | None]:
        """Losses ``(K,)`` or ``(K, C)`` to weights, and the γ ``()`` or ``(C,)`` that an adaptive one came to."""
        if isinstance(gamma, Gamma):
            return gamma.weights(losses, valid, site, self.not_finite)
        return influence(losses, gamma, valid, self.not_finite), None


def _can_measure(own: Params, site: Site) -> Tensor:
    """Whether the client has trained before and its model is sound; one that has not starts from the plain mean."""
    return (site.position >= 0) & finite({name: tensor[None] for name, tensor in own.items()})[0]


def _own_or(everyone: Tensor, valid: Tensor, site: Site) -> Tensor:
    """All weight on the client's own model; equal weights if that is not among the valid ones."""
    mine = F.one_hot(site.position.clamp(min=0), everyone.shape[0]).to(torch.bool)
    usable = (mine & valid).any() & (site.position >= 0)
    return torch.where(usable, mine.to(everyone.dtype), everyone)
