"""The part of a model's card that a programmer needs: its inputs by name and order, and Python that loads it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from fedc2i.core.errors import one_line
from fedc2i.data.schema import Column
from fedc2i.models import networks
from fedc2i.runs.client_model import ClientModel

MOST_INPUTS = 200  # listed in the card; the file beside it has all
_SCALES = {
    "client": " Means and deviations are of this client's training rows: another client's model needs its own.",
    "federated": " Means and deviations are of all clients' training rows.",
    "none": "",
}
_ENCODE = """\
def encode(row):  # values by column: numbers, True or False, texts ("1", not 1.0); None where one is missing
    x = []
    for column in columns:
        value, mean, sd = row[column["name"]], column["mean"], column["sd"]
        if column["kind"] == "category":
            x += [float(value is not None and str(value).strip() == name) for name in column["categories"]]
        else:
            x.append(0.0 if value is None or sd == 0 else (float(value) - mean) / sd)
        if column["missing"]:
            x.append(float(value is None))
    return x


x = torch.tensor([encode(row) for row in rows])"""


def inputs_of(own: ClientModel, file: str) -> list[str]:
    """What a row of a table becomes; nothing of other data."""
    if own.encoder is None:
        return []
    encoding, count = Path(file).with_suffix(".json").name, len(own.encoder.schema.inputs)
    lines = []
    for column, mean, sd in zip(own.encoder.schema.columns, own.encoder.mean, own.encoder.sd, strict=True):
        lines += [(_cell(name), value) for name, value in zip(column.inputs, _values(column, mean, sd), strict=True)]
    rows = [f"| {number} | {name} | {value} |" for number, (name, value) in enumerate(lines[:MOST_INPUTS])]
    more = [f"\nThe other {count - MOST_INPUTS:,} are in `{encoding}`."] if count > MOST_INPUTS else []
    return [
        "## Inputs",
        f"{count:,} numbers (float32) in this order, which `{encoding}` has as well.{_SCALES[own.result.config.scale]}",
        "\n".join(["| place | input | value |", "|---|---|---|", *rows, *more]),
    ]


def _values(column: Column, mean: float, sd: float) -> Iterator[str]:
    """How each input of a column is computed."""
    if column.kind == "category":
        yield from (f"1 if it is {_cell(category)}, else 0" for category in column.categories)
    elif sd == 0:
        yield "0: it does not vary in the training rows"
    elif column.kind == "boolean":
        yield "1 if true, 0 if false" + " or missing" * column.missing
    else:
        yield f"(value - {mean:.9g}) / {sd:.9g}; 0 if it is missing"
    if column.missing:
        yield "1 if it is missing, else 0"


def _cell(text: str) -> str:
    """In a table of Markdown."""
    return one_line(text, 80).replace("|", "\\|")


def snippet(own: ClientModel, file: str) -> str:
    """Python that loads the model and computes logits, of rows of a table from their values."""
    first = [] if own.encoder is None else ["import json", ""]
    if file.endswith(".pt2"):
        made = f'model = torch.export.load("{file}").module()'
        given = [_given(own)] if own.encoder is None else []
        return "\n".join([*first, "import torch", "", made, *_rows(own, file), *given, "logits = model(x)"])
    imported, built = _network(own)
    return "\n".join(
        [
            *first,
            "import torch",
            *imported,
            "from safetensors.torch import load_file",
            "",
            f"net = {built}",
            f'net.load_state_dict(load_file("{file}"))',
            "net.eval()",
            *_rows(own, file),
            *_reading(own),
        ]
    )


def _rows(own: ClientModel, file: str) -> list[str]:
    if own.encoder is None:
        return []
    encoding = Path(file).with_suffix(".json").name
    return [f'columns = json.load(open("{encoding}", encoding="utf-8"))["columns"]', "", "", _ENCODE]


def _given(own: ClientModel) -> str:
    """What ``x`` is, if it is not made of rows."""
    shape, scale = ", ".join(map(str, own.sample.shape)), own.result.config.scale
    if own.sample.is_image:
        return f"# x: uint8 images (N, {shape})"
    how = "as in the data" if scale == "none" else f"standardised as in the run (scale={scale})"
    return f"# x: float32 (N, {shape}), {how}"


def _network(own: ClientModel) -> tuple[list[str], str]:
    """Imports and an expression that make the network, whose weights do not matter."""
    name, classes, shape = own.result.model, own.model.classes, own.sample.shape
    if name == "efficientnet-lite0":
        imported = "from efficientnet_lite_pytorch import EfficientNet"
        return [imported], f'EfficientNet.from_name("efficientnet-lite0", num_classes={classes})'
    if name.startswith(networks.TIMM):
        return ["import timm"], f'timm.create_model("{name.removeprefix(networks.TIMM)}", num_classes={classes})'
    net = own.network
    if own.result.config.model not in ("auto", *networks.NAMES):
        return [], f"...  # the module of {name}"
    if isinstance(net, networks.LeNet):
        channels, hidden = (
            (net.conv1.out_channels, net.conv2.out_channels),
            (net.fc1.out_features, net.fc2.out_features),
        )
        normed = ", batch_norm=True" * name.endswith("-bn")
        made = f"LeNet({channels}, {hidden}, classes={classes}, image={shape}{normed})"
    elif isinstance(net, networks.CNN1d):
        made = f"CNN1d(classes={classes}, channels={shape[0]}, time={shape[1]})"
    else:
        made = f"perceptron({math.prod(shape)}, {classes}, hidden={networks.HIDDEN if name == 'mlp' else ()})"
    return [f"from fedc2i.models.networks import {made.partition('(')[0]}"], made


def _reading(own: ClientModel) -> list[str]:
    """How the network reads samples."""
    how = getattr(own.model.module_with(own.params), "preprocessing", None)
    if how is None:
        given = [] if own.encoder is not None else [_given(own)]
        return [*given, *["x = x.float() / 127.5 - 1"] * own.sample.is_image, "logits = net(x)"]
    mean, sd = ([round(value, 6) for value in values] for values in (how.mean, how.sd))
    options = f'({how.size}, {how.size}), mode="{how.interpolation}", antialias=True'
    return [
        f"x = torch.nn.functional.interpolate(x.float() / 255, {options})",
        f"mean, sd = torch.tensor({mean}).view(3, 1, 1), torch.tensor({sd}).view(3, 1, 1)",
        "logits = net((x - mean) / sd)  # x: uint8 images (N, 3, H, W)",
    ]
