"""FedC²I⁺: influence by descent, shared class prototypes, and a guard from harm. It is ours, not the paper's.

Client m trains two networks on the same batches. They share no parameter, so one optimiser takes the steps of two:

    v_m    its own: never mixed, never sent
    w_m    shared: a mixture of all w_i by influence at the start of every round; only this is sent

Their initial weights are two draws, since networks predict better together the less they agree in their errors; weights
that were loaded are the same in both.

The influence of the others, λ for bodies and Λ for rows of the head, comes from two steps of exponentiated gradient
descent on the client's loss, beginning with equal weights (`math.exponentiated_gradient`). Each step is on other
training samples, drawn in every round. To first order, FedC²I's influence is one small step of it.

With w_m a client sends the mean feature of each of its classes; the server returns their mean P_c, in which none counts
as longer than the median of its class, and both networks are pulled towards it as in FedProto:

    loss = Σ_{f = v, w} CE(f) + ld · ‖h_f(x) − P_y‖²/d, mean over the batch

A third network u_m is a copy: of all v_m, w_m and mixtures so far it is the one with the least held-out loss. The three
predict together, with shares β by their held-out predictions (`math.guard`), each at its best temperature:

    p(y|x) = Σ_f β_f p_f(y|x)

So a client to which the others are of no use predicts by v. It still takes part in the mixture, which serves the others
only if everybody does.

Held-out samples are the client's validation data. A client without such data holds out a part of its training data in
the first half of the rounds; then it trains on all of them, and keeps β and the temperatures. From then on

- u stays what it is if an earlier network was best in the last comparison; if v, w or the mixture was, training still
  paid, and u is the trained w_m of each round: v_m and the mixture predict anyway;
- the mixture loses its share if it predicts even training samples worse than v predicted those held out.

β is a moving mean over rounds, first of v alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from fedc2i.core.options import option
from fedc2i.core.params import Params, prefixed, select, unprefixed
from fedc2i.methods.base import Method, Probe, Site
from fedc2i.methods.fedproto import ClassFeatures, prototype_loss
from fedc2i.methods.math.exponentiated_gradient import descend, mixed
from fedc2i.methods.math.guard import WORST, best_logs, distrusted, mean_log, posterior
from fedc2i.methods.math.prototypes import average, bounded, prototypes, spread
from fedc2i.methods.messages import Download, Uploads, relay
from fedc2i.models.model import Model
from fedc2i.training.local import Batch

STEPS = 2  # of descent in an exchange, each on samples of its own
MEMORY = 0.5  # weight of earlier rounds in moving means
PROTOTYPE_SAMPLES = 128  # that a client's prototypes are means of, at most
OWN, KEPT = "own.", "kept."  # private: v and u
SHARES, DEGREES = "guard.shares", "guard.temperatures"  # private: β, and a temperature for each network
MEASURED = "guard.measured"  # private: β by held-out samples, before the mixture may lose its share
FOLLOWS = "guard.follows"  # private: whether u is the trained w once nothing is held out
EVIDENCE = "guard.evidence"  # private: ℓ_v, of how many held-out samples, and the moving mean of ℓ_w − ℓ_v since then
GUARD = (SHARES, DEGREES, MEASURED, FOLLOWS, EVIDENCE)
REPORTED = ("guard_own", "guard_shared", "guard_kept")  # β; three in one tensor would look like those of three clients
TRAINED = 2  # place of w among u, v, w and the mixture


@dataclass(frozen=True)
class FedC2IPlus(Method):
    """Influence, prototypes and a guard; with the guard, twice FedAvg's local computation."""

    name = "fedc2i-plus"
    title = "FedC²I⁺"
    about = "fedc2i with influence by descent, class prototypes, and a private network as a guard; not the paper's"
    influence_note = "A client's own model is not measured: it weighs as much as the best other one."
    keeps_uploads = True

    rate: float = option(20.0, "rate η of the descent that finds the influence of others; 0: a plain mean", low=0)
    influence_samples: int = option(32, "training samples for each of the two steps of that descent", low=1)
    ld: float = option(1.0, "weight of the distance to the shared prototypes; 0: none are sent", low=0)
    guard: bool = option(True, "train a private network, too, keep the best so far, and predict with all three")
    held_out: float = option(
        0.1, "share of its training data that a client without validation data holds out", above=0, below=1
    )

    @property
    def probe(self) -> Probe:
        """Samples for all steps of the descent."""
        return Probe(STEPS * self.influence_samples, gradient=True)

    @property
    def holds_out(self) -> float:
        """The share of samples that the guard needs."""
        return self.held_out if self.guard else 0.0

    def setup(self, params: Params, model: Model) -> Params:
        """Adds the own network (another draw), the kept one (at first a copy) and the guard's numbers."""
        if not self.guard:
            return params
        kept = {name: tensor.clone() for name, tensor in params.items()}
        alone = torch.tensor([1.0, 0.0, 0.0])
        guard = {SHARES: alone, MEASURED: alone.clone(), DEGREES: torch.ones(3), FOLLOWS: torch.zeros(())}
        networks = {**prefixed(OWN, model.draw()), **prefixed(KEPT, kept)}
        return {**params, **networks, **guard, EVIDENCE: torch.zeros(3)}

    def untrained(self, model: Model) -> frozenset[str]:
        """The own network's buffers, and what only `personalise` changes."""
        names = (*model.body_names, *model.head_names)
        buffers = (OWN + name for name in names if name not in model.trainable)
        return super().untrained(model) | {*GUARD, *buffers, *(KEPT + name for name in names)}

    def loss(self, params: Params, batch: Batch, site: Site) -> Tensor:
        """CE plus the distance of every feature to its class's prototype, of both networks."""
        shared = prototype_loss(params, batch, site, self.ld)
        return shared + prototype_loss(unprefixed(OWN, params), batch, site, self.ld) if self.guard else shared

    def upload(self, params: Params, data: Batch, site: Site) -> Params:
        """The shared network, and class prototypes with the classes they are of."""
        model = super().upload(params, data, site)
        if not self.ld:
            return model
        some = spread(data, site.counts.sum(), PROTOTYPE_SAMPLES)
        means, counts = prototypes(lambda x: site.features(params, x), some, site.model.classes)
        return {**model, **ClassFeatures(means, counts > 0).flat()}

    def combine(self, uploads: Uploads, state: Params) -> tuple[Download, Params]:
        """Relays every model to everyone, with the mean prototype of every class."""
        models = select(uploads.tensors, lambda name: name not in ClassFeatures.names())
        shared = relay(models)
        if self.ld:
            sent = ClassFeatures.read(uploads.tensors)
            assert sent.class_present is not None
            present = sent.class_present
            shared |= average(bounded(sent.prototypes, present), present.to(torch.float32)).flat()
        return Download(shared=shared, clients=uploads.clients), state

    def personalise(self, own: Params, batch: Batch | None, site: Site) -> tuple[Params, Mapping[str, Tensor]]:
        """The mixture by influence; then the network that is kept, and the networks' shares of the prediction."""
        assert batch is not None
        mixture, measured = self._mixture(own, batch, site)
        if not self.guard or not measured:
            return mixture, measured
        assert site.held_out is not None
        samples, names = site.held_out, (*site.model.body_names, *site.model.head_names)
        is_known = samples.w.sum() > 0
        trained, shared = select(own, names), select(mixture, names)
        networks = (unprefixed(KEPT, own), unprefixed(OWN, own), trained, shared)
        logs, degrees = best_logs(torch.stack([site.logits(network, samples.x) for network in networks]), samples)
        follows = own[FOLLOWS] > 0
        best = torch.where(is_known, (logs * samples.w).sum(1).argmax(), torch.where(follows, TRAINED, 0))

        # By held-out samples: β, temperatures and ℓ_v, of v, the mixture and the new u.
        shares, (own_log, count, gap) = own[MEASURED], own[EVIDENCE].unbind()
        of_three = torch.stack([logs[1], logs[3], _chosen(best, logs.unbind())])
        hot = torch.stack([degrees[1], degrees[3], _chosen(best, degrees.unbind())])
        mean = MEMORY * shares + (1 - MEMORY) * posterior(of_three, samples.w).to(shares.dtype)
        fresh = torch.stack([mean_log(logs[1], samples.w), samples.w.sum(), torch.zeros_like(gap)])

        # Without any: whether the mixture still predicts training samples, those of the first step of descent.
        batch = _part(batch, 0)
        seen, _ = best_logs(site.logits(shared, batch.x)[None], batch)
        gap = MEMORY * gap + (1 - MEMORY) * (mean_log(seen[0], batch.w) - own_log)
        less = distrusted(shares, (count * gap.clamp(max=0)).exp(), follows)

        guard = {
            SHARES: torch.where(is_known, mean, less),
            MEASURED: torch.where(is_known, mean, shares),
            DEGREES: torch.where(is_known, hot.to(shares.dtype), own[DEGREES]),
            FOLLOWS: (best > 0).to(shares.dtype),
            EVIDENCE: torch.where(is_known, fresh, torch.stack([own_log, count, gap])).to(shares.dtype),
        }
        said = dict(zip(REPORTED, guard[SHARES].unbind(), strict=True))
        return {**mixture, **prefixed(KEPT, _choice(best, networks)), **guard}, {**measured, **said}

    def _mixture(self, own: Params, batch: Batch, site: Site) -> tuple[Params, dict[str, Tensor]]:
        """The client's next w from what it received, and λ and Λ."""
        peers, model = site.peers, site.model
        if not peers.models:  # no upload was usable yet
            return own, {}
        batch = batch._replace(x=model.scaled(own, batch.x))  # once, not for every step
        parts = [_part(batch, step) for step in range(STEPS)]
        vector, matrix = descend(
            lambda params, x: site.logits({**own, **params}, x), peers, parts, self.rate, model.trainable, model.classes
        )
        usable, mixture = peers.valid.any(), mixed(peers, vector, matrix)
        start = {**own, **{name: torch.where(usable, tensor, own[name]) for name, tensor in mixture.items()}}
        if not peers.bodies:  # λ has nothing to mix: reports show Λ's mean
            vector = matrix.mean(1)
        return start, {"left_out": ~peers.valid, "influence_vector": vector, "influence_matrix": matrix}

    def predict(self, params: Params, x: Tensor, site: Site) -> Tensor:
        """log Σ_f β_f p_f."""
        if not self.guard:
            return site.logits(params, x)
        networks = (unprefixed(OWN, params), params, unprefixed(KEPT, params))
        logs = [
            F.log_softmax(site.logits(network, x) / degree, 1).nan_to_num(nan=WORST) + share.log()
            for network, degree, share in zip(networks, params[DEGREES], params[SHARES], strict=True)
        ]
        return torch.stack(logs).logsumexp(0)

    def other_predictions(self, params: Params, x: Tensor, site: Site) -> Mapping[str, Tensor]:
        """By the own network alone."""
        return {"own": site.logits(unprefixed(OWN, params), x)} if self.guard else {}


def _part(batch: Batch, step: int) -> Batch:
    """The samples of one step of descent; padding, which comes last, is in all parts alike.

    Where there are too few, they come without weight: some modules cannot read no samples.
    """
    if len(batch.y) <= step:
        return batch._replace(w=torch.zeros_like(batch.w))
    return Batch(*(tensor[step::STEPS] for tensor in batch))


def _chosen(best: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    """The tensor at the place ``best`` ``()``; those that are not numbers spoil nothing."""
    chosen = tensors[0]
    for place, tensor in enumerate(tensors[1:], 1):
        chosen = torch.where(best == place, tensor, chosen)
    return chosen


def _choice(best: Tensor, networks: Sequence[Params]) -> Params:
    """The network at the place ``best``."""
    return {name: _chosen(best, [network[name] for network in networks]) for name in networks[0]}
