"""The card of an exported model: where it comes from, what it scores, who weighs most in it, and how to load it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fedc2i.runs.client_model import ClientModel
from fedc2i.training.metrics import TITLES, digits

MOST_NAMED = 5
_NETWORKS = {
    "efficientnet-lite0": (
        "from efficientnet_lite_pytorch import EfficientNet",
        'net = EfficientNet.from_name("efficientnet-lite0", num_classes={classes})',
    )
}


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
        "## Loading",
        f"```python\n{_snippet(own, file)}\n```",
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


def _snippet(own: ClientModel, file: str) -> str:
    if file.endswith(".pt2"):
        what = "uint8 images" if own.sample.is_image else "float32, encoded and scaled as in the run"
        shape = ", ".join(map(str, own.sample.shape))
        return (
            f'import torch\n\nmodel = torch.export.load("{file}").module()\nlogits = model(x)  # x: {what} (N, {shape})'
        )
    name, classes = own.result.model, len(own.result.federation.classes)
    if name.startswith("timm:"):
        short = name.removeprefix("timm:")
        lines = ("import timm", f'net = timm.create_model("{short}", num_classes={classes})')
    else:
        lines = _NETWORKS.get(name, ("", f"net = ...  # the module of {name}"))
    loading = 'net.load_state_dict(load_file("%s"))' % file  # noqa: UP031
    first = ["import torch", *filter(None, [lines[0]]), "from safetensors.torch import load_file"]
    return "\n".join([*first, "", lines[1].format(classes=classes), loading, "net.eval()", *_reading(own)])


def _reading(own: ClientModel) -> list[str]:
    """How the network reads images."""
    module = own.model.module_with(own.params)
    how = getattr(module, "preprocessing", None)
    if how is None:
        return ["x = x.float() / 127.5 - 1  # uint8 images"] * own.sample.is_image
    mean, sd = ([round(value, 6) for value in values] for values in (how.mean, how.sd))
    options = f'({how.size}, {how.size}), mode="{how.interpolation}", antialias=True'
    return [
        f"x = torch.nn.functional.interpolate(x.float() / 255, {options})",
        f"mean, sd = torch.tensor({mean}).view(3, 1, 1), torch.tensor({sd}).view(3, 1, 1)",
        "logits = net((x - mean) / sd)  # x: uint8 images (N, 3, H, W)",
    ]
