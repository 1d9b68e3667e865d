"""How clients train and how a federation is run, whatever the method; the defaults are the paper's. Without torch."""

from __future__ import annotations

import math
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from fedc2i.core.errors import UserError
from fedc2i.core.options import setting, validate

MOST_THREADS = 1024  # torch crashes when asked for very many
_RUNS = ("run", "flower-local", "coordinator")
_WITH_PAPER = ("run", "paper", "flower-local", "coordinator")
_HERE: dict[str, Any] = {"scope": "machine", "engine": "inprocess"}


class Trained(str):
    """What of a model trains: ``head``, ``last:2``, ``all``, ``lora:8``, or ``auto``."""

    allowed: ClassVar[str] = "auto | head | last:N | all | lora:R (N and R whole numbers from 1)"

    @classmethod
    def parse(cls, value: Any) -> Trained:
        """From text; raises ValueError for anything else."""
        if not re.fullmatch(r"auto|head|all|(last|lora):[1-9][0-9]{0,5}", str(value)):
            raise ValueError(value)
        return cls(value)


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """How every client trains."""

    epochs: int = setting(2, "local epochs a round", low=1)
    steps: int = setting(0, "steps of an epoch; 0: as many as go once through the client's data", low=0)
    batch_size: int = setting(32, "samples a step", low=1)
    optimizer: Literal["adam", "sgd"] = setting("adam", "local optimiser, fresh every round")
    lr: float = setting(1e-3, "learning rate", above=0)
    weight_decay: float = setting(0.0, "L2 penalty", low=0)
    momentum: float = setting(0.0, "momentum of sgd", low=0, below=1)
    precision: Literal["ieee", "tf32", "bf16"] = setting(
        "ieee",
        "of products and convolutions: ieee, single precision, the same on every device; tf32, faster on a GPU; bf16, "
        "local training in bfloat16 with weights and optimiser in single precision, the rest as tf32",
    )
    drop_last: bool = setting(False, "skip an epoch's last batch if it is not full, unless it is the only one")

    def __post_init__(self) -> None:
        validate(self)
        if self.momentum and self.optimizer != "sgd":
            raise UserError(f"momentum={self.momentum} is for optimizer=sgd, not {self.optimizer}")

    def batches(self, samples: int) -> int:
        """How many steps an epoch over ``samples`` takes."""
        return self.steps or self.batches_once(samples)

    def batches_once(self, samples: int) -> int:
        """How many steps go once through ``samples``."""
        full, rest = divmod(samples, self.batch_size)
        return full + (rest > 0 and not (self.drop_last and full > 0))


@dataclass(frozen=True, kw_only=True)
class EngineSettings(TrainingSettings):
    """How a federation is run; `fedc2i.engine.topology` and `fedc2i.engine.attacks` read the texts of their names."""

    rounds: int = setting(
        20,
        "communication rounds; by default the data set's preset",
        low=1,
        preset=True,
        flags=_WITH_PAPER,
        flag_help="Communication rounds.",
    )
    seeds: tuple[int, ...] = setting(
        (0,),
        "one run for each; three seeds are 0,1,2 or 0-2, and 3 is the one seed 3",
        numbers=False,
        flags=_WITH_PAPER,
        flag_help="Each seed, not their number: 0,1,2 or 0-9.",
    )
    clients_per_round: int | str = setting("100%", "a number of clients, or a share such as 20%")
    evaluate_every: int = setting(1, "rounds between evaluations; 0: only after the last round", low=0)
    patience: int = setting(0, "stop after this many evaluations without a better validation accuracy; 0: never", low=0)
    init: Literal["common", "independent"] = setting("common", "one initial model for all clients, or one for each")
    topology: str = setting(
        "full", "whose models a client receives: full, ring, random:K or a FILE of neighbours", flags=_RUNS
    )
    attack: str = setting(
        "",
        "dishonest clients, KIND[:STRENGTH]@CLIENT[,CLIENT...], several joined by ;",
        flags=("run",),
        flag_help="Dishonest clients: KIND[:STRENGTH]@CLIENT[,CLIENT...], e.g. sign-flip@20%; several joined by ;",
    )
    norm_bound: float = setting(
        100.0, "reject uploads of more than this many times the median norm, above 1; 0: no bound", low=0
    )
    clip: float = setting(
        0.0, "the largest norm of an upload's difference from what the server knows; 0: not clipped", low=0
    )
    noise: float = setting(
        0.0, "Gaussian noise on uploads: its standard deviation in units of clip; 0: no noise", low=0
    )
    delta: float = setting(1e-5, "δ at which a run with noise states its ε", above=0, below=1)
    executor: Literal["auto", "looped", "workers", "stacked"] = setting(
        "auto", "clients one by one, over processes on a CPU, or all at once; auto: the fastest", **_HERE
    )
    workers: int = setting(
        0,
        "processes: for clients on a CPU, for runs of a study on a GPU; 0: one per core, on a GPU up to 4",
        low=0,
        high=MOST_THREADS,
        numbers=False,
        resume="free",
        flags=("paper",),
        flag_help="Processes; on a GPU, runs computed at the same time (1: one after the other).",
        **_HERE,
    )
    clients_at_once: int = setting(
        0, "the most clients of all seeds that are stacked together; 0: as many as fit", low=0, **_HERE
    )
    threads: int = setting(
        1, "CPU threads inside one operation; more than one pays for large models only", low=1, high=MOST_THREADS
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.patience and not self.evaluate_every:
            raise UserError(f"patience={self.patience} needs evaluations: evaluate_every must be at least 1")
        if 0 < self.norm_bound <= 1:
            raise UserError(f"norm_bound must be above 1, or 0 for no bound, got {self.norm_bound}")
        if self.noise and not self.clip:
            raise UserError(f"noise={self.noise:g} is in units of clip, which must be above 0 then, got clip=0")
        if not self.seeds or len(set(self.seeds)) != len(self.seeds):
            raise UserError(f"seeds must be different whole numbers, at least one, got {list(self.seeds)}")

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


def cores() -> int:
    """How many cores this process may use: of its affinity, and of its container's quota."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        count = min(count, max(1, math.floor(int(quota) / int(period))))  # "max" is no number: no quota
    return count
