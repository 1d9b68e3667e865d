"""The card of an exported model: where it comes from, what it scores, who weighs most in it, and how to load it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fedc2i.runs.card_code import inputs_of, snippet
from fedc2i.runs.client_model import ClientModel
from fedc2i.training.metrics import TITLES, digits

MOST_NAMED = 5


def write_card(own: ClientModel, file: str) -> str:
    """The card as Markdown."""
    result, config = own.result, own.result.config
    samples = result.federation.samples()[own.client]
    when = "after the last" if own.point == "trained" else "after the last exchange, before a next"
    source = "This site" if own.is_of_site else config.data
    parts = [
        f"# {own.client}: {result.model} by {result.label}",
        f"The model of client **{own.client}** {when} local training, seed {own.seed}, exported as `{file}`.",
        "## Data",
        f"{source}: {_counts(samples)}{own.sample}. Classes, in the order of the outputs: "
        f"{', '.join(result.federation.classes)}.",
        f"SHA-256 of this client's data: `{result.federation.checksums.get(own.client, 'not known here')}`.",
        "## Scores on this client's own test data",
        _scores(own),
        *_weights(own),
        "## Settings",
        f"Method {result.key}, train={config.train}, {config.rounds} rounds of {config.epochs} epochs, "
        f"{config.optimizer}, lr {config.lr:g}, batches of {config.batch_size}. All others:",
        f"```toml\n{config.to_toml().strip()}\n```",
        *inputs_of(own, file),
        "## Loading",
        f"```python\n{snippet(own, file)}\n```",
        "## Limits",
        "The scores are of one client's test data and hold for data of the same kind. The model was trained by a "
        "federation: other clients' data shaped it, and are not in it as such. No guarantee of privacy follows from "
        "that alone.",
    ]
    return "\n\n".join(parts) + "\n"


def _counts(samples: Mapping[str, int]) -> str:
    """How many samples the client has, if that is known."""
    if not samples:
        return ""
    train, validation, test = (samples.get(part, 0) for part in ("train", "validation", "test"))
    return f"{train:,} training, {validation:,} validation and {test:,} test samples of this client; "


def _scores(own: ClientModel) -> str:
    if own.is_of_site:
        return "Not known here: the run's scores are in the coordinator's run folder."
    last = own.result.last(own.seed).metrics[own.point][own.result.federation.names.index(own.client)]
    rows = [f"| {TITLES[name]} | {last[name]:.{digits(name)}f} |" for name in TITLES if name in last]
    return "\n".join(["| score | value |", "|---|---|", *rows])


def _weights(own: ClientModel) -> list[str]:
    """Whose models weighed most in this client's last start."""
    only_head = not own.model.body_names  # then λ has nothing to mix
    found = own.result.influence("influence_matrix" if only_head else "influence_vector", own.seed)
    if not found.size:
        return []
    names = own.result.federation.names
    row = found[-1, names.index(own.client)]
    row = row.mean(1) if only_head else row
    order = [k for k in np.argsort(-np.nan_to_num(row, nan=-1)) if np.isfinite(row[k])][:MOST_NAMED]
    listed = ", ".join(f"{names[k]} {100 * row[k]:.1f} %" for k in order)
    return [
        "## Who weighs most",
        f"Weights {'Λ (means over classes)' if only_head else 'λ'} of the clients' models in this client's last start: "
        f"{listed}.",
    ]
