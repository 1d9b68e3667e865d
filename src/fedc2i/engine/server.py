"""The server's side of a round: keep the latest upload of every client, hand them to the method's ``combine``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedc2i.methods.base import Download, Method, Uploads
from fedc2i.params import Stacked, finite, floating, mix, replace_rows, rows, uniform


class Server:
    """Holds uploads, their ages and the method's server state; knows no client's data."""

    def __init__(self, method: Method, samples: Tensor, models: Stacked) -> None:
        """Starts with nothing received.

        Args:
            method: whose ``combine`` to call.
            samples: ``(M,)`` how many training samples each client has.
            models: the clients' initial models, stacked.
        """
        self.method = method
        self.samples = samples
        self.download = Download()
        self.state = method.opening(mix(uniform(len(samples), samples.to(torch.float32)), floating(models)))
        self._uploads: Stacked = {}
        self._sent = [0] * len(samples)  # the round of each client's latest upload, 0 for none

    def receive(self, clients: Sequence[int], uploads: Stacked, round: int) -> list[int]:
        """Takes the uploads of this round; returns the clients whose upload held nan or infinity and was refused.

        A refused client counts as absent: its earlier upload, if any, stays.
        """
        sound = finite(uploads).tolist() if uploads else [True] * len(clients)
        kept = [k for k, good in enumerate(sound) if good]
        if not self._uploads:
            self._uploads = {
                name: tensor.new_zeros((len(self._sent), *tensor.shape[1:])) for name, tensor in uploads.items()
            }
        accepted = [clients[k] for k in kept]
        if accepted:
            self._uploads = replace_rows(self._uploads, accepted, rows(uploads, kept))
        for client in accepted:
            self._sent[client] = round
        return [clients[k] for k, good in enumerate(sound) if not good]

    def combine(self, round: int) -> Download:
        """What every client receives after this round; the same as last time if nothing usable arrived."""
        oldest = 1 if self.method.keeps_uploads else round
        clients = [client for client, sent in enumerate(self._sent) if sent >= oldest]
        if clients:
            everyone = len(clients) == len(self._sent)
            uploads = Uploads(
                self._uploads if everyone else rows(self._uploads, clients),
                tuple(clients),
                self.samples[clients],
                torch.tensor([round - self._sent[client] for client in clients], device=self.samples.device),
            )
            self.download, self.state = self.method.combine(uploads, self.state)
        return self.download
