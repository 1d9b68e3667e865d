"""A few tiny images of each client, if the data of the run can be loaded again and is unchanged."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image

from fedc2i.analysis.weights import domain_of
from fedc2i.core.errors import UserError
from fedc2i.data import sources
from fedc2i.data.federation import Client, Federation
from fedc2i.data.remote import RemoteFederation
from fedc2i.runs.results import Result

MOST_CLIENTS, MOST_CLASSES, SIDE = 12, 10, 40


class Strip(NamedTuple):
    """A client's name and one image a class beside each other, as a ``data:`` address."""

    client: str
    source: str


@dataclass(frozen=True)
class SampleImages:
    """Strips of some clients with the classes that they show, or the reason why there are none."""

    strips: tuple[Strip, ...] = ()
    classes: tuple[str, ...] = ()
    reason: str = ""


def sample_images(result: Result, wanted: bool | None) -> SampleImages:
    """Images of a run's clients, if they are ``wanted``; None: only those of the public benchmarks."""
    config, federation = result.config, result.federation
    if wanted is False:
        return SampleImages(reason="Images were not wanted (--no-samples).")
    if config.engine == "flower":
        return SampleImages(reason="The images are at the sites and were never here.")
    if not federation.input.is_image:
        return SampleImages(reason=f"The samples are {federation.input}, which no image shows.")
    if wanted is None and config.data.partition(":")[0] not in sources.PUBLIC_IMAGES:
        return SampleImages(
            reason="A run folder holds no images, and images of your own data are put into a page only if you ask for "
            "them: --samples."
        )
    if isinstance(federation, RemoteFederation):
        try:
            federation = _load(result)
        except UserError as error:
            return SampleImages(reason=f"A run folder holds no images, and the data cannot be loaded here: {error}.")
    if not federation.input.is_image:  # an earlier version did not write what samples are
        return SampleImages(reason=f"The samples are {federation.input}, which no image shows.")
    clients, classes = federation.clients, federation.classes[:MOST_CLASSES]
    if len(clients) > MOST_CLIENTS:  # the first of each domain
        clients = tuple(reversed({domain_of(client.name): client for client in reversed(clients)}.values()))
    return SampleImages(
        tuple(Strip(client.name, _draw(client, len(classes))) for client in clients[:MOST_CLIENTS]), classes
    )


def _load(result: Result) -> Federation:
    """The run's data once more.

    Raises:
        UserError: if it is not here, or is not the same.
    """
    config = result.config
    place = None if config.data_dir is None else Path(config.data_dir)
    found = sources.load(
        config.data,
        data_dir=place if place is None or place.is_dir() else None,
        image_size=config.image_size,
        partition=config.partition,
        seed=config.data_seed,
    )
    if found.checksums != result.federation.checksums:
        raise UserError(f"what is here as {config.data} is not what the run was trained on")
    return found


def _draw(client: Client, classes: int) -> str:
    """The first test image of each class; a class without one stays empty."""
    row = Image.new("RGBA", (SIDE * classes, SIDE))
    for label in range(classes):
        found = torch.nonzero(client.test.y == label).flatten()
        if len(found):
            pixels = client.test.x[found[0]].permute(1, 2, 0).numpy().astype(np.uint8)
            row.paste(Image.fromarray(pixels).resize((SIDE, SIDE)), (SIDE * label, 0))
    buffer = io.BytesIO()
    row.save(buffer, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
