"""How every client trains, whatever the method; the defaults are the paper's. Read where torch is not imported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedc2i.core.errors import UserError
from fedc2i.core.options import setting, validate


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
