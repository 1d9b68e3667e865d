"""Sites that notice whether somebody reads the round's number: a CUDA graph would repeat that of its capture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fedc2i.core.params import Params
from fedc2i.engine.client import ClientData, LocalClient, RunContext
from fedc2i.methods.base import Site


class WatchedClient(LocalClient):
    """A client that notes when its predictions depend on the round."""

    def __init__(self, context: RunContext, data: ClientData, on_round: Callable[[], None]) -> None:
        super().__init__(context, data)
        self._on_round = on_round

    def _site(self, received: Params, position: int | Tensor, round: int) -> Site:
        return WatchedSite(**vars(super()._site(received, position, round)), on_round=self._on_round)


@dataclass(frozen=True)
class WatchedSite(Site):
    """A `Site` that notes when somebody reads the round."""

    on_round: Callable[[], None] = lambda: None

    def __getattribute__(self, name: str) -> Any:
        if name == "round":
            object.__getattribute__(self, "on_round")()
        return super().__getattribute__(name)
