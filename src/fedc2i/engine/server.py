"""The server's side of a round: keep the latest upload of every client, hand them to the method's ``combine``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedc2i.methods.base import Download, Method, Uploads
from fedc2i.params import Stacked, finite, floating, mix, replace_rows, rows, uniform


class Mailbox:
    """The latest upload of every client."""

    def __init__(self, clients: int) -> None:
        self.uploads: Stacked = {}
        self.sent = [0] * clients  # the round of each client's latest upload, 0 for none

    def receive(self, clients: Sequence[int], uploads: Stacked, round: int) -> list[int]:
        """Takes the uploads of this round; returns the clients whose upload held nan or infinity and was refused.

        A refused client counts as absent: its earlier upload, if any, stays.
        """
        sound = finite(uploads).tolist() if uploads else [True] * len(clients)
        kept = [k for k, good in enumerate(sound) if good]
        if not self.uploads:
            self.uploads = {
                name: tensor.new_zeros((len(self.sent), *tensor.shape[1:])) for name, tensor in uploads.items()
            }
        accepted = [clients[k] for k in kept]
        if accepted:
            self.uploads = replace_rows(self.uploads, accepted, rows(uploads, kept))
        for client in accepted:
            self.sent[client] = round
        return [clients[k] for k, good in enumerate(sound) if not good]

    def restore(self, uploads: Stacked, sent: Sequence[int]) -> None:
        """Puts back what a checkpoint kept."""
        self.uploads, self.sent = dict(uploads), list(sent)

    def of(self, clients: Sequence[int]) -> Stacked:
        """The uploads of these clients, stacked."""
        return rows(self.uploads, clients)


class Server:
    """The method's server state and download for clients that receive from the same clients; knows no client's data."""

    def __init__(
        self,
        method: Method,
        samples: Tensor,
        models: Stacked,
        sources: Sequence[int] | None = None,
        mailbox: Mailbox | None = None,
    ) -> None:
        """Starts with nothing received.

        Args:
            method: whose ``combine`` to call.
            samples: ``(M,)`` how many training samples each client has.
            models: the clients' initial models, stacked.
            sources: the clients whose models, initial and uploaded, it may see, in table order; all by default.
            mailbox: where uploads lie, if other servers read there too.
        """
        self.method = method
        self.samples = samples
        self.mailbox = Mailbox(len(samples)) if mailbox is None else mailbox
        self.download = Download()
        self._sources = tuple(range(len(samples)) if sources is None else sources)
        known = floating(rows(models, self._sources))
        self.state = method.opening(mix(uniform(len(self._sources), samples.to(torch.float32)), known))
        self._place = {client: k for k, client in enumerate(self._sources)}
        self.reports: dict[str, Tensor] = {}  # by sources: (S, S, ...), nan where nothing was said

    def receive(self, clients: Sequence[int], uploads: Stacked, round: int) -> list[int]:
        """Takes the uploads of this round; see `Mailbox.receive`."""
        return self.mailbox.receive(clients, uploads, round)

    def hear(self, clients: Sequence[int], received: Sequence[int], reports: Mapping[str, Tensor]) -> None:
        """Takes what clients say of the models they received; what they said before is forgotten.

        Args:
            clients: who reports.
            received: whose models these clients received, `Download.clients`.
            reports: by name ``(len(clients), len(received), ...)``.
        """
        count = len(self._sources)
        where = torch.tensor([self._place[m] for m in clients], dtype=torch.int64)
        columns = torch.tensor([self._place[m] for m in received], dtype=torch.int64)
        for name, values in reports.items():
            nothing = torch.full((count, count, *values.shape[2:]), torch.nan)
            full = self.reports.setdefault(name, nothing)
            full[where] = torch.nan
            full[where[:, None], columns] = values.to("cpu", torch.float32)

    def combine(self, round: int) -> Download:
        """What its clients receive after this round; the same as last time if nothing usable arrived."""
        oldest, sent = 1 if self.method.keeps_uploads else round, self.mailbox.sent
        clients = [client for client in self._sources if sent[client] >= oldest]
        if clients:
            uploads = Uploads(
                self.mailbox.of(clients),
                tuple(clients),
                self.samples[clients],
                torch.tensor([round - sent[client] for client in clients], device=self.samples.device),
                round,
                self._reports_of(clients),
            )
            self.download, self.state = self.method.combine(uploads, self.state)
        return self.download

    def _reports_of(self, clients: Sequence[int]) -> dict[str, Tensor]:
        """What these clients said of each other."""
        where = [self._place[client] for client in clients]
        return {name: full[where][:, where] for name, full in self.reports.items()}
