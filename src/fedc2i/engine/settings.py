"""How a federation is run, whatever the method."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from fedc2i.core.errors import UserError
from fedc2i.core.options import check_at_least, check_choice
from fedc2i.training.local import Training

MOST_THREADS = 1024  # torch crashes when asked for very many


@dataclass(frozen=True)
class Settings:
    """How a federation is run, whatever the method.

    Attributes:
        rounds: communication rounds, at least 1.
        clients_per_round: a number of clients, or a share such as ``"20%"``.
        evaluate_every: rounds between evaluations; the last round is always evaluated, with 0 no other is.
        patience: stop after this many evaluations without a better mean validation accuracy; 0 never stops early.
        init: one ``common`` initial model, or an ``independent`` one for each client.
        topology: whose models a client receives: ``full``, everyone's; ``ring``, those of its neighbours in the table;
            ``random:K``, those of K others, drawn once for a run; or a file (see `fedc2i.engine.topology`).
        attack: which clients are dishonest or broken, and how (see `fedc2i.engine.attacks`); empty: none.
        norm_bound: an upload whose norm is more than this many times the median norm of the round's uploads is left
            out; 0: no bound.
        clip: the largest L2 norm of what an upload may differ from what the server knows; 0: uploads are not clipped.
        noise: standard deviation of Gaussian noise on every number of an upload, in units of ``clip``; 0: none.
        executor: ``looped``, one client after the other; ``workers``, over processes of a CPU, with the same numbers;
            ``stacked``, all clients at once; or ``auto``: stacked on a GPU, on a CPU workers where that pays.
        workers: processes on a CPU; 0: one per core, divided by ``threads``.
        clients_at_once: the most clients, over all seeds, that a stacked executor computes together; 0: as many as fit.
        threads: CPU threads inside one operation. One is fastest for small models, above all beside other programs,
            and makes results independent of the number of cores.
        training: how every client trains.
    """

    rounds: int = 20
    clients_per_round: int | str = "100%"
    evaluate_every: int = 1
    patience: int = 0
    init: Literal["common", "independent"] = "common"
    topology: str = "full"
    attack: str = ""
    norm_bound: float = 100.0
    clip: float = 0.0
    noise: float = 0.0
    executor: Literal["auto", "looped", "workers", "stacked"] = "auto"
    workers: int = 0
    clients_at_once: int = 0
    threads: int = 1
    training: Training = field(default_factory=Training)

    def __post_init__(self) -> None:
        check_at_least(self, 1, "rounds", "threads")
        check_at_least(self, 0, "evaluate_every", "patience", "workers", "clients_at_once")
        if self.workers > MOST_THREADS:
            raise UserError(f"workers must be 0..{MOST_THREADS}, got {self.workers}")
        if self.patience and not self.evaluate_every:
            raise UserError(f"patience={self.patience} needs evaluations: evaluate_every must be at least 1")
        check_choice(self, "init", "executor")
        if not (self.norm_bound == 0 or 1 < self.norm_bound < math.inf):
            raise UserError(f"norm_bound must be above 1, or 0 for none, got {self.norm_bound}")
        check_at_least(self, 0, "clip", "noise")
        if self.noise and not self.clip:
            raise UserError(f"noise={self.noise:g} is in units of clip, which must be above 0 then, got clip=0")
        if self.threads > MOST_THREADS:
            raise UserError(f"threads must be 1..{MOST_THREADS}, got {self.threads}")

    def is_due(self, number: int) -> bool:
        """Whether clients are scored in a round."""
        return number == self.rounds or (self.evaluate_every > 0 and number % self.evaluate_every == 0)

    def participants(self, clients: int) -> int:
        """How many of ``clients`` take part in a round."""
        wanted = str(self.clients_per_round)
        try:
            share = float(wanted.removesuffix("%")) / 100 if wanted.endswith("%") else int(wanted) / clients
        except (ValueError, OverflowError):
            share = 0.0
        if not 0 < share <= 1:
            raise UserError(f"clients_per_round must be 1..{clients} or a share such as 20%, got '{wanted}'")
        return max(1, round(share * clients))
