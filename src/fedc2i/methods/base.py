"""What a federated method is: a few pure functions, written once, for one client.

`Method` itself is FedAvg; every other method is a subclass that overrides what differs. It never sees other clients'
data, the round loop or a device: that is the business of the engines. One round, as they run it:

    client   params = train on ``loss`` from its start          (``phases`` says what is trained, and how long)
    client   upload(params, data, site)                         all that leaves the client
    server   combine(uploads, state)                            what each client receives
    client   personalise(own, batch, site)                      the start of its next round, and diagnostics

Client-side functions may be lifted over clients with ``torch.func.vmap``: they must not branch on tensors' values.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from fedc2i import methods
from fedc2i.core.errors import UserError, nearest, one_line
from fedc2i.core.options import option, validate
from fedc2i.core.params import Params, floating, mix, select, uniform
from fedc2i.methods.math.influence import progress
from fedc2i.methods.messages import Download, Peers, Uploads
from fedc2i.models.model import Model
from fedc2i.training.local import Batch


@dataclass(frozen=True)
class Phase:
    """A stretch of local training with its own fresh optimiser: which part of the model, for how many epochs."""

    epochs: int
    train: Literal["all", "body", "head"] = "all"


@dataclass(frozen=True)
class Probe:
    """How many samples `Method.personalise` is given, from which split; ``"all"`` is the whole split.

    ``held-out`` is the validation data of a client that has some, the training data of one that has none.
    ``gradient`` says that it takes gradients on them: passes that differ with the samples' weights, which need memory.
    """

    samples: int | Literal["all"]
    split: Literal["train", "validation", "held-out"] = "train"
    gradient: bool = False


@dataclass(frozen=True)
class Site:
    """What a client knows while one of a method's functions runs on it.

    Attributes:
        model: the model's pure functions.
        counts: ``(C,)`` training samples of each class.
        position: where this client's own upload stands among those received, -1 if it is not among them.
        received: what the server sent: the entries of `Download`, the client's own row of personal ones.
        held_out: samples that the client did not train on, while `Method.personalise` runs and `Method.holds_out` asks
            for them; their weights are 0 once it has.
        start: the model the local run started from; empty while `Method.personalise` makes it, and at evaluation.
        round: the round that is being trained, from 1.
        rounds: how many rounds there will be.
        training: whether layers like BatchNorm run in training mode.
    """

    model: Model
    counts: Tensor
    position: Tensor
    received: Params
    held_out: Batch | None = None
    start: Params = field(default_factory=dict)
    round: int = 1
    rounds: int = 1
    training: bool = False

    def progress(self) -> float:
        """How much of the run is done: 0 in round 1, 1 in the last; who reads the round has a new CUDA graph each."""
        return progress(self.round, self.rounds)

    @property
    def peers(self) -> Peers:
        """The models that the server relayed; none before the first."""
        return Peers.read(self.received, self.position, self.model)

    def features(self, params: Params, x: Tensor) -> Tensor:
        """h(x) ``(B, d)``."""
        return self.model.features(params, x, self.training)

    def logits(self, params: Params, x: Tensor) -> Tensor:
        """Head of features, ``(B, C)``."""
        return self.model.head(params, self.features(params, x))


LIKENESS = 0.85  # of a function's name to a hook's that is surely meant

_registry: dict[str, type[Method]] = {}


@dataclass(frozen=True, kw_only=True)
class Method:
    """A federated method; by default FedAvg with equal weights.

    Its two options act in the local training of every method, so that any baseline can be given the same extras as a
    control. In each phase the anchor holds what the phase trains, and the mean is over the phase's steps.

    Attributes:
        name: what the user types.
        title: what tables print.
        about: one line for ``fedc2i methods``.
        headline: the evaluation point that the method's authors report.
        reconstruction: for a method whose paper gives no code or full text: one sentence on what ours is built from.
        influence_note: for a method that measures influence: a sentence that belongs to intervals around it, if any.
        keeps_uploads: whether `combine` sees every client's latest upload, or only this round's.
        pools_data: whether one model is trained on the training data of all clients, which only a simulation can do.
        needs_only_mean: whether the server needs no more of the uploads than their mean, by weights that depend on
            sample counts alone; then a sum under masks will do. A subclass with its own `combine` or `weights` does
            not have it unless it says so.
        anchor: μ of a term μ/2·‖w − w_start‖² in the local loss, w_start the model the round started from; 0 is none.
        average: whether a client keeps and uploads the mean of its iterates over the second half of its local steps,
            of n those after steps ⌊n/2⌋ + 1 to n; statistics such as BatchNorm's keep their last value.
    """

    name: ClassVar[str] = ""
    title: ClassVar[str] = ""
    about: ClassVar[str] = ""
    headline: ClassVar[Literal["received", "trained"]] = "trained"
    reconstruction: ClassVar[str] = ""
    influence_note: ClassVar[str] = ""
    keeps_uploads: ClassVar[bool] = False
    pools_data: ClassVar[bool] = False
    needs_only_mean: ClassVar[bool] = True

    registry = _registry  # without a type, or it would be sent along with every user's method, as a dataclass's field

    anchor: float = option(0.0, "strength μ of a pull towards the model the local run started from", low=0)
    average: bool = option(False, "keep and send the mean of the models over the second half of the local steps")

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name, own in vars(cls).items():
            if not inspect.isfunction(own) or name.startswith("_"):
                continue
            if inspect.isfunction(hook := vars(Method).get(name)):
                _require_arguments(own, hook)
            elif not hasattr(super(cls, cls), name) and (hint := nearest(name, vars(Method), LIKENESS)):
                raise UserError(f"{cls.__qualname__}.{name} is never called{hint}; a helper's name starts with _")
        if {"combine", "weights"} & vars(cls).keys() and "needs_only_mean" not in vars(cls):
            cls.needs_only_mean = False
        if "name" in cls.__dict__ and cls.name:
            if not cls.__module__.startswith(f"{methods.__name__}."):
                import_modules()  # a user's method may not take the name of one of these
            other = Method.registry.get(cls.name, cls)
            if (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
                raise UserError(f"{cls.__qualname__}: the name '{cls.name}' is taken by {other.__module__}")
            Method.registry[cls.name] = cls
        if "__post_init__" in cls.__dict__:  # it may forget its super()
            cls.__post_init__ = _checked(cls.__dict__["__post_init__"])  # type: ignore[assignment]

    def __post_init__(self) -> None:
        validate(self)

    # What a client does, in the order of a round.

    def setup(self, params: Params, model: Model) -> Params:
        """The client's first model; a method adds its private parts here, e.g. another network by ``model.draw()``."""
        return params

    def untrained(self, model: Model) -> frozenset[str]:
        """Names of the private parts that local training leaves alone: buffers, and what the method itself changes."""
        return frozenset()

    def phases(self, epochs: int) -> Sequence[Phase]:
        """What local training trains, and for how many of the ``epochs``."""
        return (Phase(epochs),)

    def loss(self, params: Params, batch: Batch, site: Site) -> Tensor:
        """What a local step minimises."""
        return batch.mean(F.cross_entropy(site.logits(params, batch.x), batch.y, reduction="none"))

    def upload(self, params: Params, data: Batch, site: Site) -> Params:
        """All that leaves the client: by default its model, without integer counters."""
        return floating(select(params, (*site.model.body_names, *site.model.head_names)))

    @property
    def probe(self) -> Probe | None:
        """The samples that `personalise` needs, if any."""
        return None

    @property
    def holds_out(self) -> float:
        """The share of its training data that a client without validation data does not train on in the first half of
        the rounds, for `Site.held_out`; 0: nothing is held out."""
        return 0.0

    def personalise(self, own: Params, batch: Batch | None, site: Site) -> tuple[Params, Mapping[str, Tensor]]:
        """The model a client starts its next round from, and diagnostics: by default what it received, else its own."""
        return {name: site.received.get(name, tensor) for name, tensor in own.items()}, {}

    def predict(self, params: Params, x: Tensor, site: Site) -> Tensor:
        """Logits ``(B, C)`` at evaluation."""
        return site.logits(params, x)

    def other_predictions(self, params: Params, x: Tensor, site: Site) -> Mapping[str, Tensor]:
        """Further ways to predict, by name: logits that are scored as ``accuracy/<name>`` beside the main ones."""
        return {}

    # What the server does.

    @property
    def reads_reports(self) -> tuple[str, ...]:
        """The diagnostics of `personalise`, one value for each client received, that clients send to `combine`."""
        return ()

    def opening(self, params: Params) -> Params:
        """The server's first state, from the initial model (the mean of them if clients start apart)."""
        return {}

    def combine(self, uploads: Uploads, state: Params) -> tuple[Download, Params]:
        """Uploads to what each client receives, with the server's state in and out."""
        return Download(shared=mix(self.weights(uploads), uploads.tensors), clients=uploads.clients), state

    def weights(self, uploads: Uploads) -> Tensor:
        """``(K,)`` weights of the mean, summing to one: equal."""
        return uniform(len(uploads.clients), uploads.samples.to(torch.float32))


def _require_arguments(own: Callable[..., object], hook: Callable[..., object]) -> None:
    """Refuses a function that cannot be called as the hook is: by position, so its arguments may have other names."""
    takes, needs = inspect.signature(own), inspect.signature(hook)
    try:
        takes.bind(*needs.parameters)
    except TypeError:
        what, wanted = (f"({', '.join(one.parameters)})" for one in (takes, needs))
        raise UserError(f"{own.__qualname__} takes {what}, it needs {wanted}") from None


def _checked(post_init: Callable[[Method], None]) -> Callable[[Method], None]:
    """A subclass's own checks, after those of what all methods have."""

    @wraps(post_init)
    def both(method: Method) -> None:
        Method.__post_init__(method)
        post_init(method)

    return both


def import_modules(only: str = "") -> None:
    """Imports the modules of this package, or the one of that name, so that their methods are registered."""
    for module in pkgutil.iter_modules(methods.__path__):
        if not module.ispkg and only in ("", module.name):
            importlib.import_module(f"{methods.__name__}.{module.name}")


def find_method(name: str) -> type[Method] | None:
    """The method of that name, if there is one; its own module is imported, all of them if it has none."""
    if name not in Method.registry:
        import_modules(name.replace("-", "_"))
    if name not in Method.registry:
        import_modules()
    return Method.registry.get(name)


def get_method(name: str) -> type[Method]:
    """The method of that name or title, in any case; a `UserError` that lists those there are if there is none."""
    if (found := find_method(name)) is not None:
        return found
    allowed = method_names()
    named = {_typed(one.title): one for one in reversed(Method.registry.values()) if one.title}  # the first has it
    named |= Method.registry
    if (typed := _typed(name)) not in named:
        hint = nearest(typed, named)
        raise UserError(f"unknown method '{one_line(name)}'{hint}, allowed are {', '.join(allowed)} and FILE.py:CLASS")
    return named[typed]


def _typed(title: str) -> str:
    """A name or title as a keyboard has it: ``fedc2i+`` for FedC²I⁺."""
    return unicodedata.normalize("NFKC", title).lower()


def method_names() -> list[str]:
    """Every method there is, in alphabetical order."""
    import_modules()
    return sorted(Method.registry)
