"""What coordinator and sites share under secure aggregation: the rules, the numbers and the masks.

The protocol is Flower's SecAgg+ with every site as every other's neighbour, in four messages to a site and round:

    setup     two new public keys of the site
    share     the keys of all sites; shares of its secrets for each of the others, encrypted
    collect   the others' shares, and the round's task; the upload as whole numbers under masks
    unmask    who is in the sum and who has dropped out; shares that remove the masks of the sum, and no others

Weights and quantisation are ours, because Flower's clip silently and round at random, and so are the masks: Flower's
come from a generator with a seed of 32 bits, which a coordinator can try one by one. Ours are a stream of AES-256,
whose key also depends on all that the sites of a round must agree on. If a coordinator tells sites different things,
masks do not cancel, and it learns nothing.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from fedc2i.core.errors import UserError, one_line
from fedc2i.core.params import Params

SETUP, SHARE, COLLECT, UNMASK = STAGES = ("setup", "share", "collect", "unmask")
UPLOAD = "masked"  # the one tensor of a masked upload
LEAST = 3  # sites in a sum: with two, each could subtract its own upload
MOST = 1000  # sites in a sum
MODULUS = 2**32
MOST_LEVELS = 2**30
LARGEST_SHARE = 0.5  # of a site's weight in a mean


def threshold(sites: int) -> int:
    """How many sites together can reveal a secret of another: more than two thirds.

    A coordinator that tells sites different things about who dropped out gets one of an upload's two masks removed by
    some sites and one by others. It would need twice this number of sites.
    """
    return 2 * sites // 3 + 1


def levels(sites: int) -> int:
    """The number of steps between the smallest and the largest value, such that a sum over sites stays below 2³²."""
    return min(MOST_LEVELS, 1 << ((MODULUS - 1) // sites).bit_length() - 1)


@dataclass(frozen=True)
class SumTerms:
    """What all sites of a sum must agree on."""

    run: str
    round: int
    session: str  # drawn by the coordinator for every attempt at a round
    keys: Mapping[int, tuple[bytes, bytes]]  # public, of each site
    weights: Mapping[int, float]
    largest: float  # the largest number in an upload

    def check(self, least: int) -> None:
        """Raises a `UserError` if a sum by these terms could show one site's upload."""
        flat = [key for pair in self.keys.values() for key in pair]
        if not max(LEAST, least) <= len(self.keys) <= MOST:
            raise UserError(f"secure aggregation over {len(self.keys)} sites; at least {max(LEAST, least)} are needed")
        if len(set(flat)) != len(flat):
            raise UserError("secure aggregation with a public key that two sites have")
        if self.keys.keys() != self.weights.keys() or not all(0 < own < math.inf for own in self.weights.values()):
            raise UserError("secure aggregation with weights that are not positive")
        self.check_weights(self.keys, least)

    def check_weights(self, sites: Collection[int], least: int) -> None:
        """Raises a `UserError` if one of the sites has more than half of the weight, or a few have nearly all of it."""
        total = sum(self.weights[site] for site in sites)
        for site in sites:
            if self.weights[site] > LARGEST_SHARE * total * (1 + 1e-9):
                raise UserError(
                    f"a site has {self.weights[site] / total:.0%} of the weight in the mean, which would show its "
                    "upload; use weighting=uniform"
                )
        effective = total**2 / sum(self.weights[site] ** 2 for site in sites)
        if effective < (needed := max(LEAST, least)) * (1 - 1e-9):
            raise UserError(
                f"by their weights {len(sites)} sites count as {effective:.2f} in the mean, and at least {needed} are "
                "needed; use weighting=uniform, or more sites"
            )

    @property
    def levels(self) -> int:
        """See `levels`."""
        return levels(len(self.keys))

    def ratio(self, site: int) -> float:
        """A site's weight relative to the largest one."""
        return self.weights[site] / max(self.weights.values())

    def digest(self) -> bytes:
        """Differs with each of them."""
        keys = [[site, *(key.hex() for key in pair)] for site, pair in sorted(self.keys.items())]
        told = [self.run, self.round, self.session, keys, sorted(self.weights.items()), self.largest]
        return hashlib.sha256(json.dumps(told).encode()).digest()

    def stream(self, secret: bytes, count: int) -> NDArray[np.int64]:
        """The mask that belongs to a secret: ``count`` numbers below 2³², all equally likely."""
        key = hashlib.sha256(b"fedc2i mask" + self.digest() + secret).digest()
        encryptor = Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor()
        return np.frombuffer(encryptor.update(bytes(4 * count)), dtype="<u4").astype(np.int64)


# Uploads as numbers


def flat(upload: Params) -> NDArray[np.float64]:
    """All numbers of an upload, in the order of its tensors' names."""
    parts = [upload[name].detach().cpu().reshape(-1).to(torch.float64).numpy() for name in sorted(upload)]
    return np.concatenate(parts) if parts else np.zeros(0)


def like(values: NDArray[np.float64], shapes: Collection[tuple[str, str, tuple[int, ...]]]) -> Params:
    """The reverse; ``shapes`` are name, type and shape of each tensor."""
    found: Params = {}
    low = 0
    for name, kind, shape in sorted(shapes):
        high = low + math.prod(shape)
        dtype = getattr(torch, kind.removeprefix("torch."))
        found[name] = torch.from_numpy(values[low:high].copy()).reshape(shape).to(dtype)
        low = high
    return found


def outside(upload: Params, largest: float) -> str:
    """Which tensor has a number that is not finite or larger than this, and the number; empty if there is none."""
    for name, tensor in sorted(upload.items()):
        found = float(tensor.abs().max()) if tensor.numel() else 0.0
        if not found <= largest:
            return f"'{one_line(name, 60)}' of the upload holds {found:.4g}"
    return ""


def quantised(upload: Params, terms: SumTerms, site: int) -> NDArray[np.float64]:
    """A site's upload, whose numbers are in the range, times its weight: whole numbers from -levels/2 to levels/2."""
    scaled: NDArray[np.float64] = flat(upload) * (terms.ratio(site) * terms.levels / 2 / terms.largest)
    return np.rint(scaled)


def mean(total: NDArray[np.int64], terms: SumTerms, sites: Collection[int]) -> NDArray[np.float64]:
    """The weighted mean of the sites' uploads from the sum of what they sent, without masks.

    Raises:
        UserError: if the masks did not cancel.
    """
    total = total % MODULUS
    if int(total[0]) != len(sites) * terms.levels % MODULUS:
        raise UserError("the masks do not cancel: a site sent wrong shares, or had other terms than the rest")
    steps = (total[1:] - len(sites) * terms.levels // 2).astype(np.float64)
    scale = 2 * terms.largest / terms.levels / sum(terms.ratio(site) for site in sites)
    return np.multiply(steps, scale)


# Messages


def read(record: Mapping[str, Any], **kinds: type | list[type]) -> list[Any]:
    """The values of these names, each of its type or, for ``[type]``, a list of it.

    Raises:
        UserError: for a record without them.
    """
    found = []
    for name, kind in kinds.items():
        value = record.get(name)
        one = kind[0] if isinstance(kind, list) else kind
        values = value if isinstance(kind, list) and isinstance(value, list) else [value]
        if isinstance(kind, list) is not isinstance(value, list) or len(values) > MOST:
            raise UserError(f"not a message of secure aggregation ('{name}')")
        if any(type(entry) is not one for entry in values):
            raise UserError(f"not a message of secure aggregation ('{name}')")
        found.append(value)
    return found


def by_site(sites: list[int], *values: list[Any]) -> dict[int, Any]:
    """Values, or pairs of them, by site.

    Raises:
        UserError: if a site is named twice, or their numbers differ.
    """
    if len(set(sites)) != len(sites) or any(len(own) != len(sites) for own in values):
        raise UserError("a message of secure aggregation names a site twice, or not all values")
    return dict(zip(sites, values[0] if len(values) == 1 else zip(*values, strict=True), strict=True))
