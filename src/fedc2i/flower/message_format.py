"""The messages between coordinator and site as records, and their checks.

There is one message per site and round: the site personalises what it received from the last exchange, trains, and
answers with its upload and its scores at both evaluation points. Everything that arrives is checked, on both sides.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor

from fedc2i.core.errors import UserError, one_line
from fedc2i.core.params import Params
from fedc2i.data.federation import InputSpec
from fedc2i.data.schema import Schema
from fedc2i.engine.records import POINTS, Diagnostics, Point
from fedc2i.flower import wire
from fedc2i.training.metrics import HIGHER_IS_BETTER

GREETING, WORK = "query", "train"  # Flower's kinds of messages
METRIC = re.compile(rf"(validation_)?(accuracy|loss)(/[A-Za-z0-9_.-]{{1,40}})?|{'|'.join(HIGHER_IS_BETTER)}")
ROUNDING = 1e-6  # of a score in percent
MOST_LETTERS = 100  # of a site's name
MOST_SAMPLES = 2**40
MOST_CLASSES = 2**14
MOST_CLASS_LETTERS = 200  # of a class's name
MOST_INTRODUCTION = 2**23  # letters of JSON
MOST_METRICS = 64  # scores in an answer
MOST_REPORTS = 32  # diagnostics of a site
REPORT = re.compile(r"[a-z][a-z0-9_]{0,39}")  # the name of one
MOST_REASON = 500  # letters
MASKING = "masking"  # the record of a message under secure aggregation
_SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class Task:
    """What a site does in a round, without the tensors."""

    run: str  # under this name the site keeps its models
    round: int  # to train, from 1; after the last one there is an exchange without training
    exchange: int  # the round whose exchange the tensors come from, 0 before the first
    position: int  # of the site's own upload among those received, -1 if it is not among them
    train: bool
    score_received: bool  # whether to score the personalised model
    score_trained: bool  # whether to score the model after training, or the present one if it does not train
    half: bool  # whether uploads travel as float16
    setup: str  # method, model and settings of the run, as JSON

    def to_record(
        self, shared: ArrayRecord, personal: ArrayRecord, masking: Mapping[str, Any] | None = None
    ) -> RecordDict:
        """The message, with the tensors for all sites, those for this site alone, and a stage of secure aggregation."""
        content = RecordDict({"task": ConfigRecord(asdict(self)), "shared": shared, "personal": personal})
        return content if masking is None else _with_masking(content, masking)

    @classmethod
    def from_record(cls, content: RecordDict) -> tuple[Task, Params]:
        """The task, and the tensors that came with it."""
        try:
            values: dict[str, Any] = dict(content["task"])
            for part in fields(cls):
                if type(values[part.name]).__name__ != part.type:
                    raise TypeError(f"'{part.name}' must be {part.type}")
            task = cls(**{part.name: values[part.name] for part in fields(cls)})
            return task, {**wire.unpack(content["shared"]), **wire.unpack(content["personal"])}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(f"not a task of this version of fedc2i ({_named(error)})") from None


@dataclass(frozen=True)
class Answer:
    """A site's answer to a task."""

    upload: Params = field(default_factory=dict)  # what the method sends after training
    report: Params = field(default_factory=dict)  # diagnostics of the exchange
    metrics: Mapping[Point, Mapping[str, float]] = field(default_factory=dict)  # on the site's own data
    bytes: int = 0  # of the tensors in the message
    masking: Mapping[str, Any] = field(default_factory=dict)  # a site's part in a stage of secure aggregation

    def to_record(self, half: bool) -> RecordDict:
        """The content of a reply."""
        scores: dict[str, Any] = {
            f"{point}.{name}": value for point, own in self.metrics.items() for name, value in own.items()
        }
        tensors = {"upload": wire.pack(self.upload, half), "report": wire.pack(self.report)}
        content = RecordDict({**tensors, "metrics": MetricRecord(scores)})
        return _with_masking(content, self.masking) if self.masking else content

    @classmethod
    def from_record(cls, content: RecordDict) -> Answer:
        """Reads the content of a reply."""
        raise_failure(content)
        try:
            metrics: dict[Point, dict[str, float]] = {}
            if len(content["metrics"]) > MOST_METRICS:
                raise ValueError(f"{len(content['metrics']):,} metrics, allowed are {MOST_METRICS}")
            for key, value in content["metrics"].items():
                point, _, name = key.partition(".")
                score = float(value)  # type: ignore[arg-type]
                in_range = "loss" in name or -ROUNDING <= score <= 100 + ROUNDING
                if not METRIC.fullmatch(name) or not in_range:
                    raise ValueError(f"'{name[:60]}' = {score} is not a metric")
                metrics.setdefault(POINTS[POINTS.index(point)], {})[name] = score
            upload, report = wire.unpack(content["upload"]), wire.unpack(content["report"])
            if len(report) > MOST_REPORTS or not all(REPORT.fullmatch(name) for name in report):
                raise ValueError("names of diagnostics that are not allowed")
            size = wire.size(content["upload"]) + wire.size(content["report"])  # type: ignore[arg-type]
            masking = masking_of(content)
            return cls(upload, report, metrics, size + masking_size(masking), masking)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise UserError(f"its answer is not valid ({_named(error)})") from None


def _with_masking(content: RecordDict, masking: Mapping[str, Any]) -> RecordDict:
    content[MASKING] = ConfigRecord(dict(masking))
    return content


def masking_of(content: RecordDict) -> dict[str, Any]:
    """The stage of secure aggregation that a message belongs to; empty if it belongs to none."""
    return dict(content[MASKING]) if MASKING in content else {}


def masking_size(masking: Mapping[str, Any]) -> int:
    """The bytes in it: keys and shares, and eight for every number."""
    values = [one for value in masking.values() for one in (value if isinstance(value, list) else [value])]
    return sum(len(one) if isinstance(one, bytes | str) else 8 for one in values)


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {one_line(error)}"


def failure(reason: str) -> RecordDict:
    """The content of a reply from a site that could not do its task."""
    return RecordDict({"failure": ConfigRecord({"reason": one_line(reason, MOST_REASON)})})


def raise_failure(content: RecordDict) -> None:
    """Raises a `UserError` with the site's reason if the reply is a `failure`."""
    if "failure" in content:
        reason = dict(content["failure"]).get("reason", "")
        raise UserError(one_line(reason, MOST_REASON) or "no reason given")


@dataclass(frozen=True)
class Introduction:
    """What a site tells about itself before its first task: enough to plan a run, and no data."""

    name: str
    samples: Mapping[str, int]  # of the splits train, validation and test
    classes: tuple[str, ...]
    input: InputSpec
    schema: Schema | None = None  # of a table: names and kinds of its columns, their categories, whether values miss
    contribution: bool = False  # whether contributions may be measured with it

    def to_record(self) -> RecordDict:
        """The content of a reply."""
        schema = None if self.schema is None else self.schema.to_json()
        told = {**vars(self), "samples": dict(self.samples), "input": self.input.to_json(), "schema": schema}
        return RecordDict({"introduction": ConfigRecord({"json": json.dumps(told)})})

    @classmethod
    def from_record(cls, content: RecordDict) -> Introduction:
        """Reads the content of a reply."""
        raise_failure(content)
        try:
            text = str(content["introduction"]["json"])
            if len(text) > MOST_INTRODUCTION:
                raise ValueError(f"{len(text):,} letters, allowed are {MOST_INTRODUCTION:,}")
            values: dict[str, Any] = json.loads(text)
            name, samples = values["name"], {part: values["samples"][part] for part in _SPLITS}
            schema = None if values.get("schema") is None else Schema.from_json(values["schema"])
            agrees = values.get("contribution", False) is True
            found = cls(name, samples, tuple(values["classes"]), InputSpec.from_json(values["input"]), schema, agrees)
        except UserError as error:
            raise UserError(f"its introduction is not valid ({error})") from None
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise UserError(f"its introduction is not valid ({_named(error)})") from None
        if not found._is_valid():
            raise UserError("its introduction is not valid (it needs name, samples, classes and the shape of a sample)")
        return found

    def _is_valid(self) -> bool:
        """Whether all values are in range."""
        texts, numbers = (self.name, *self.classes), self.samples.values()
        return (
            all(isinstance(text, str) and text and text.isprintable() for text in texts)
            and all(type(number) is int for number in numbers)
            and len(self.name) <= MOST_LETTERS
            and 0 < len(set(self.classes)) == len(self.classes) <= MOST_CLASSES
            and max(map(len, self.classes)) <= MOST_CLASS_LETTERS
            and all(0 <= count <= MOST_SAMPLES for count in self.samples.values())
            and self.samples["train"] > 0
            and (self.schema is None or self.schema.input == self.input)
        )


def agreed(reports: Mapping[int, Params], received: Mapping[int, tuple[int, ...]], classes: int) -> list[Diagnostics]:
    """The diagnostics that most sites send, each in the most common form; all others are dropped.

    So a site with other names or shapes does not spoil the rest. The forms are one number, one per received client, one
    per class, and one per received client and class. ``reports`` and ``received``, the clients whose models a client
    received, are by client.
    """
    votes: dict[str, Counter[int]] = {}
    for client, report in reports.items():
        for name, values in report.items():
            votes.setdefault(name, Counter()).update(_forms(values, len(received[client]), classes))
    popular = sorted((name for name in votes if votes[name]), key=lambda name: -max(votes[name].values()))
    forms = {name: min(votes[name], key=lambda form: (-votes[name][form], form)) for name in popular[:MOST_REPORTS]}
    found = []
    for client, report in reports.items():
        fitting = {
            name: values[None]
            for name, values in report.items()
            if name in forms and forms[name] in _forms(values, len(received[client]), classes)
        }
        found.append(Diagnostics(fitting, (client,), received[client]))
    return found


def _forms(values: Tensor, received: int, classes: int) -> list[int]:
    """The forms that fit the values' shape; several if there are as many classes as clients."""
    shapes = [(received, classes), (received,), (classes,), ()]
    return [form for form, shape in enumerate(shapes) if tuple(values.shape) == shape]
