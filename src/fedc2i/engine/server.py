"""The mailbox with every client's latest upload, and the server that gives them to the method's ``combine``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

import torch
from torch import Tensor

from fedc2i.core.params import (
    Params,
    Stacked,
    finite,
    floating,
    mix,
    norms,
    prefixed,
    replace_rows,
    rows,
    uniform,
    unprefixed,
)
from fedc2i.methods.base import Method
from fedc2i.methods.messages import Download, Uploads

NOT_FINITE = "not finite"
REPORTS = "reports/"  # of a server's tensors: on the CPU, wherever the models are
FEWEST = 3  # uploads for a meaningful median


class Mailbox:
    """The latest upload of every client."""

    def __init__(self, clients: int, norm_bound: float = 0.0) -> None:
        self._norm_bound = norm_bound
        self.uploads: Stacked = {}
        self.sent = [0] * clients  # the round of each client's latest upload, 0 for none

    def receive(self, clients: Sequence[int], uploads: Stacked, round: int) -> dict[int, str]:
        """Takes the uploads of a round; returns the clients whose upload was rejected, and what was wrong with it.

        A rejected client counts as absent: its earlier upload, if any, stays.
        """
        wrong = self._wrong(clients, uploads) if uploads else {}
        kept = [k for k in range(len(clients)) if k not in wrong]
        if not self.uploads:
            count = len(self.sent)
            self.uploads = {name: own.new_zeros((count, *own.shape[1:])) for name, own in uploads.items()}
        accepted = [clients[k] for k in kept]
        if accepted:
            self.uploads = replace_rows(self.uploads, accepted, rows(uploads, kept))
        for client in accepted:
            self.sent[client] = round
        return {clients[k]: why for k, why in wrong.items()}

    def _wrong(self, clients: Sequence[int], uploads: Stacked) -> dict[int, str]:
        """Which uploads are not usable: nan or infinity in them, or a norm far above the median of all.

        If fewer than three have arrived, other clients' latest uploads are part of the median. With fewer than three
        in all, it is unclear which one is wrong.
        """
        sound = finite(uploads)
        if not self._norm_bound:
            return {k: NOT_FINITE for k, good in enumerate(sound.tolist()) if not good}
        others = [m for m, round in enumerate(self.sent) if round and m not in clients] if len(clients) < FEWEST else []
        measured = [norms(uploads), *([norms(self.of(others))] if others else [])]
        read = torch.cat([sound.to(torch.float64), *measured]).tolist()  # at once: a GPU waits for it
        flags, sizes = read[: len(clients)], read[len(clients) :]
        wrong = {k: NOT_FINITE for k, good in enumerate(flags) if not good}
        usual = [size for k, size in enumerate(sizes) if k not in wrong]
        bound = self._norm_bound * median(usual) if len(usual) >= FEWEST else 0.0
        large = {k for k, size in enumerate(sizes[: len(clients)]) if size > bound > 0 and k not in wrong}
        wrong |= {k: f"{sizes[k] / median(usual):.3g} times the usual size" for k in large}
        return dict(sorted(wrong.items()))

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

        ``samples`` ``(M,)`` counts the clients' training samples, ``models`` are their initial models, stacked. It sees
        the models of ``sources`` only, initial and uploaded, by default of all. Several servers may read one mailbox.
        """
        self.method, self.samples = method, samples
        self.mailbox = Mailbox(len(samples)) if mailbox is None else mailbox
        self.download = Download()
        self._sources = tuple(range(len(samples)) if sources is None else sources)
        known = floating(rows(models, self._sources))
        self.state = method.opening(mix(uniform(len(self._sources), samples.to(torch.float32)), known))
        self._place = {client: k for k, client in enumerate(self._sources)}
        self.reports: dict[str, Tensor] = {}  # by sources: (S, S, ...), nan where nothing was reported

    def take_reports(self, clients: Sequence[int], received: Sequence[int], reports: Mapping[str, Tensor]) -> None:
        """Takes what clients report of the models they ``received``, in place of their earlier reports.

        ``reports`` by name are ``(len(clients), len(received), ...)``.
        """
        count = len(self._sources)
        where = torch.tensor([self._place[m] for m in clients], dtype=torch.int64)
        columns = torch.tensor([self._place[m] for m in received], dtype=torch.int64)
        for name, values in reports.items():
            nothing = torch.full((count, count, *values.shape[2:]), torch.nan)
            full = self.reports.get(name, nothing).clone()  # a checkpoint may hold the earlier tensor
            full[where] = torch.nan
            full[where[:, None], columns] = values.to("cpu", torch.float32)
            self.reports[name] = full

    def combine(self, round: int) -> Download:
        """What its clients receive after this round; the same as last time if nothing usable arrived."""
        oldest, sent = 1 if self.method.keeps_uploads else round, self.mailbox.sent
        clients = [client for client in self._sources if sent[client] >= oldest]
        if clients:
            ages = torch.tensor([round - sent[client] for client in clients], device=self.samples.device)
            where = [self._place[client] for client in clients]
            reports = {name: full[where][:, where] for name, full in self.reports.items()}
            latest, samples = self.mailbox.of(clients), self.samples[clients]
            uploads = Uploads(latest, tuple(clients), samples, ages, round, reports)
            self.download, self.state = self.method.combine(uploads, self.state)
        return self.download

    def tensors(self) -> Params:
        """All that it keeps from round to round except the uploads."""
        received = prefixed("shared/", self.download.shared) | prefixed("personal/", self.download.personal)
        return prefixed("state/", self.state) | received | prefixed(REPORTS, self.reports)

    def restore(self, tensors: Params, clients: Sequence[int]) -> None:
        """Takes back what `tensors` returned; ``clients`` are those of the download."""
        self.state, self.reports = unprefixed("state/", tensors), unprefixed(REPORTS, tensors)
        self.download = Download(unprefixed("shared/", tensors), unprefixed("personal/", tensors), tuple(clients))
