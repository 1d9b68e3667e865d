"""The part of a model's card that a programmer needs: its inputs by name and order, and Python that loads it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from fedc2i.core.errors import one_line
from fedc2i.data.encoder import Encoder
from fedc2i.data.federation import InputSpec
from fedc2i.data.scaling import SCALING, Scaling
from fedc2i.data.schema import Column
from fedc2i.models import networks
from fedc2i.runs.client_model import ClientModel

CONSTANT = "0: it does not vary in the training data"
MOST_INPUTS = 200  # listed in the card; the file beside it has all
_SCALES = {
    "client": " Means and deviations are of this client's training data: another client's model needs its own.",
    "federated": " Means and deviations are of all clients' training data.",
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

"""
_TENSOR = "x = torch.tensor([encode(row) for row in rows])"
_STANDARDISE = """\
scaling = json.load(open("{file}", encoding="utf-8"))
mean, sd = (torch.tensor(scaling[name], dtype=torch.float64).reshape({shape}) for name in ("mean", "sd"))
x = torch.where(sd > 0, (x - mean) / sd, 0.0).float()"""


def inputs_of(own: ClientModel, file: str) -> list[str]:
    """What a sample becomes, input by input; nothing of images, and of data that was not standardised."""
    listed = _of_table(own.encoder) if own.encoder else _of_scaling(own.scaling, own.sample) if own.scaling else []
    if not listed:
        return []
    encoding, count = Path(file).with_suffix(".json").name, len(listed)
    rows = [f"| {number} | {name} | {value} |" for number, (name, value) in enumerate(listed[:MOST_INPUTS])]
    more = [f"\nThe other {count - MOST_INPUTS:,} are in `{encoding}`."] if count > MOST_INPUTS else []
    what = f"{count:,} numbers" if len(own.sample.shape) == 1 else f"{count:,} channels of {own.sample}"
    scale = own.result.config.scale if own.encoder else "federated" if own.scaling and own.scaling.shared else "client"
    return [
        "## Inputs",
        f"{what} (float32) in this order, which `{encoding}` has as well.{_SCALES[scale]}",
        "\n".join(["| place | input | value |", "|---|---|---|", *rows, *more]),
    ]


def _of_table(encoder: Encoder) -> list[tuple[str, str]]:
    """Name and value of each input of a table's rows."""
    listed = []
    for column, mean, sd in zip(encoder.schema.columns, encoder.mean, encoder.sd, strict=True):
        listed += [(_cell(name), value) for name, value in zip(column.inputs, _values(column, mean, sd), strict=True)]
    return listed


def _of_scaling(scaling: Scaling, sample: InputSpec) -> list[tuple[str, str]]:
    """Name and value of each feature or channel."""
    kind = "feature" if len(sample.shape) == 1 else "channel"
    names = scaling.inputs or tuple(f"{kind} {number}" for number in range(len(scaling.mean)))
    each = zip(names, scaling.mean.tolist(), scaling.sd.tolist(), strict=True)
    return [
        (_cell(name), f"(value - {mean:.9g}) / {sd:.9g}" if math.isfinite(sd) else CONSTANT) for name, mean, sd in each
    ]


def _values(column: Column, mean: float, sd: float) -> Iterator[str]:
    """How each input of a column is computed."""
    if column.kind == "category":
        yield from (f"1 if it is {_cell(category)}, else 0" for category in column.categories)
    elif sd == 0:
        yield CONSTANT
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
    first = ["import json", ""] if own.encoder or own.scaling else []
    if file.endswith(".pt2"):
        made = f'model = torch.export.load("{file}").module()'
        return "\n".join([*first, "import torch", "", made, *_inputs(own, file), "logits = model(x)"])
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
            *_inputs(own, file),
            *_reading(own),
        ]
    )


def _inputs(own: ClientModel, file: str) -> list[str]:
    """How ``x`` is made of rows, or what it is before and after it is standardised."""
    encoding, shape = Path(file).with_suffix(".json").name, ", ".join(map(str, own.sample.shape))
    if own.encoder:
        return [
            f'columns = json.load(open("{encoding}", encoding="utf-8"))["columns"]',
            "",
            "",
            _ENCODE,
            *_example(own.encoder),
            _TENSOR,
        ]
    if own.sample.is_image:
        return [f"# x: uint8 images (N, {shape})"]
    if own.scaling:
        by_channel = ", ".join(map(str, (-1, *(1 for _ in own.sample.shape[1:]))))
        given = f"# x: float32 (N, {shape}), as in the data"
        return [given, *_STANDARDISE.format(file=encoding, shape=by_channel).splitlines()]
    is_raw = own.result.config.scale == "none"
    how = "as in the data" if is_raw else f"standardised if the run's data was, whose folder has no {SCALING}"
    return [f"# x: float32 (N, {shape}), {how}"]


def _example(encoder: Encoder) -> list[str]:
    """One made-up row of means and first categories, for a reader to replace."""
    cells = []
    for column, mean in zip(encoder.schema.columns, encoder.mean, strict=True):
        value: object = float(f"{mean:.4g}")
        if column.kind != "number":
            value = column.categories[0] if column.kind == "category" else True
        cells.append(f"        {column.name!r}: {value!r},")
    return ["rows = [  # an example: put your own here", "    {", *cells, "    },", "]"]


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
        return [*["x = x.float() / 127.5 - 1"] * own.sample.is_image, "logits = net(x)"]
    mean, sd = ([round(value, 6) for value in values] for values in (how.mean, how.sd))
    options = f'({how.size}, {how.size}), mode="{how.interpolation}", antialias=True'
    return [
        f"x = torch.nn.functional.interpolate(x.float() / 255, {options})",
        f"mean, sd = torch.tensor({mean}).view(3, 1, 1), torch.tensor({sd}).view(3, 1, 1)",
        "logits = net((x - mean) / sd)",
    ]
