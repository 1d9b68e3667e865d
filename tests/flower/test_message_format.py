"""What coordinator and site say to each other: it arrives as it was meant, and nothing else is taken for it."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("flwr.app")
from fakes import identity, sent  # noqa: F401
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict

from fedc2i.core.errors import UserError
from fedc2i.data.federation import InputSpec
from fedc2i.flower import wire
from fedc2i.flower.message_format import (
    MOST_CLASS_LETTERS,
    MOST_CLASSES,
    MOST_INTRODUCTION,
    MOST_METRICS,
    MOST_REASON,
    Answer,
    Introduction,
    Task,
    failure,
)

TASK = Task("run-seed3", 4, 3, -1, True, False, True, False, '{"λ": 1}')
WHO = Introduction("Süd 1", {"train": 5, "validation": 0, "test": 2}, ("no", "yes"), InputSpec((3, 28, 30)))
ANSWER = Answer(
    {"w": torch.tensor([1 / 3, -0.0]), "n": torch.tensor(3)},
    {"influence_vector": torch.tensor([1 / 3, 2 / 3])},
    {"received": {"accuracy": 50.0, "loss": 0.1}, "trained": {"validation_loss/top-5": float("inf")}},
)


def arrived(content: RecordDict) -> RecordDict:
    return sent(Message(content, 1, "train")).content


def refusal(kind: Any, content: RecordDict) -> str:
    """What is said of such a content; empty if it is taken."""
    try:
        kind.from_record(content)
    except UserError as error:
        assert str(error)  # noqa: PT017
        return str(error)
    return ""


# There and back.


@pytest.mark.parametrize("train", [True, False])
def test_a_task_arrives_with_what_all_and_one_receive(train: bool) -> None:
    shared, personal = {"w": torch.arange(3.0)}, {"own": torch.tensor([7])}
    task = replace(TASK, train=train, half=not train)
    got, received = Task.from_record(arrived(task.to_record(wire.pack(shared), wire.pack(personal))))
    assert got == task
    assert [type(value) for value in asdict(got).values()] == [type(value) for value in asdict(task).values()]
    assert {name: own.tolist() for name, own in received.items()} == {"w": [0, 1, 2], "own": [7]}


@pytest.mark.parametrize("half", [False, True])
def test_an_answer_arrives_and_says_how_much_travelled(half: bool) -> None:
    """Its diagnostics are never rounded."""
    record = ANSWER.to_record(half)
    got = Answer.from_record(arrived(record))
    assert torch.equal(got.upload["w"], ANSWER.upload["w"].half().float() if half else ANSWER.upload["w"])
    assert got.upload["n"] == 3
    assert torch.equal(got.report["influence_vector"], ANSWER.report["influence_vector"])
    assert got.metrics == ANSWER.metrics
    assert got.bytes == sum(len(array.data) for part in ("upload", "report") for array in record[part].values())


def test_an_empty_answer_and_an_introduction_arrive() -> None:
    got = Answer.from_record(arrived(Answer().to_record(half=False)))
    assert (got.upload, got.report, got.metrics) == ({}, {}, {})
    assert Introduction.from_record(arrived(WHO.to_record())) == WHO


@pytest.mark.parametrize("name", ["", "Evil", "a b", "x" * 41, "a/b", "\ud800", "nul\0"])
def test_diagnostics_of_odd_names_are_refused(name: str) -> None:
    assert refusal(Answer, Answer(report={name: torch.ones(2)}).to_record(half=False))


@pytest.mark.parametrize(
    "answer",
    [
        Answer(metrics={"trained": {f"loss/{k}": 1.0 for k in range(MOST_METRICS + 1)}}),
        Answer(upload={f"w{k}": torch.zeros(0) for k in range(wire.MOST_TENSORS + 1)}),
        Answer(report={f"r{k}": torch.zeros(0) for k in range(wire.MOST_TENSORS + 1)}),
    ],
    ids=["metrics", "tensors", "diagnostics"],
)
def test_an_answer_of_too_many_parts_is_refused(answer: Answer) -> None:
    assert "allowed are" in refusal(Answer, answer.to_record(half=False))


@pytest.mark.parametrize(
    ("classes", "is_taken"),
    [
        (("x" * MOST_CLASS_LETTERS, "y"), True),
        (("x" * (MOST_CLASS_LETTERS + 1), "y"), False),
        (tuple(f"c{k}" for k in range(MOST_CLASSES + 1)), False),
        (tuple("x" * 199 + chr(k) for k in range(0x4E00, 0x4E00 + 2**14)), True),
        (("x" * MOST_INTRODUCTION,), False),
    ],
    ids=["long", "too long", "too many", "many", "too large"],
)
def test_names_of_classes_are_bounded(classes: tuple[str, ...], is_taken: bool) -> None:
    said = refusal(Introduction, replace(WHO, classes=classes).to_record())
    assert bool(said) != is_taken
    assert len(said) < 500


# A site that failed.


def test_a_failure_reaches_the_coordinator_as_one_short_line() -> None:
    content = arrived(failure("no\n such\tfile \x1b[2J" + " and so on" * 500))
    for kind in (Answer, Introduction):
        said = refusal(kind, content)
        assert said.startswith("no such file [2J and so on")
        assert said.isprintable()
        assert len(said) == MOST_REASON


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"reason": "two\nlines\x07" + "!" * 9999}, "two lines " + "!" * (MOST_REASON - 10)),
        ({}, "no reason given"),
        ({"reason": 3}, "3"),
        ({"reason": "\n"}, "no reason given"),
    ],
    ids=str,
)
def test_any_failure_is_shortened_on_arrival(content: dict[str, Any], said: str) -> None:
    assert refusal(Answer, RecordDict({"failure": ConfigRecord(content)})) == said
    assert refusal(Answer, RecordDict({"failure": wire.pack({"w": torch.zeros(1)})})) == "no reason given"


# Garbage.

VALUES = (
    st.booleans()
    | st.integers(-(2**62), 2**62)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5)
    | st.lists(st.integers(-3, 3), max_size=2)
)
PACKED = wire.pack({"w": torch.zeros(2)})


@settings(max_examples=60)
@given(st.sampled_from([part.name for part in fields(Task)]), VALUES)
def test_a_task_with_a_value_of_another_type_is_refused(name: str, value: Any) -> None:
    record = TASK.to_record(PACKED, PACKED)
    right = type(getattr(TASK, name))
    record["task"][name] = value
    said = refusal(Task, record)
    assert said.isprintable()
    assert (said == "") == (type(value) is right)


WHOLE = {Task: TASK.to_record(PACKED, PACKED), Answer: ANSWER.to_record(False), Introduction: WHO.to_record()}
OTHERS = {"config": ConfigRecord({"a": 1}), "metrics": MetricRecord({"b": 2.0}), "arrays": PACKED, "missing": None}


@pytest.mark.parametrize(
    ("kind", "part", "how"),
    [
        (kind, part, how)
        for kind, content in WHOLE.items()
        for part in content
        for how in OTHERS
        if how != "arrays" or part in ("task", "metrics", "introduction")
    ],
)
def test_a_content_with_a_part_missing_or_of_another_kind_is_refused(kind: Any, part: str, how: str) -> None:
    content = RecordDict({**WHOLE[kind], part: OTHERS[how] or PACKED})
    if how == "missing":
        del content[part]
    said = refusal(kind, content)
    assert said.startswith(
        ("not a task", "its answer is not valid", "its introduction is not valid", "not a record of tensors")
    )
    assert said.isprintable()
    assert refusal(kind, WHOLE[kind]) == ""


@pytest.mark.parametrize(
    "metrics",
    [
        *({"trained.accuracy": score} for score in (float("nan"), -0.1, 100.1, float("inf"))),
        {"accuracy": 1.0},
        {"received.accuracy": [1.0, 2.0]},
        {"elsewhere.accuracy": 1.0},
        {"received.": 1.0},
        {"received.speed": 1.0},
        {"received.accuracy\n": 1.0},
        {"received.\x1b[2Jline\nbreak": 1.0},
        {"received.accuracy/" + "x" * 41: 1.0},
        {"received.accuracy/../../x": 1.0},
        {"received." + "x" * 10**5: 1.0},
        {"received.loss": 10**400},
    ],
    ids=lambda own: str(own)[:30],
)
def test_other_metrics_than_ours_are_refused(metrics: dict[str, Any]) -> None:
    content = ANSWER.to_record(False)
    content["metrics"] = MetricRecord(metrics)
    said = refusal(Answer, content)
    assert said.startswith("its answer is not valid (")
    assert said.isprintable()
    assert len(said) < 300


WRONG: dict[str, Any] = {
    "name": ["", "x" * 101, "two\nlines", "\x1b[2J", 3, None, ["a"]],
    "samples": [
        None,
        {},
        {"train": 3},
        *({"train": 3, "validation": 0, "test": 1, **own} for own in ({"train": 0}, {"train": -1}, {"train": 2**41})),
        {"train": 3, "validation": -1, "test": 1},
        {"train": 3.5, "validation": 0, "test": 1},
        {"train": "3", "validation": 0, "test": 1},
        {"train": float("inf"), "validation": 0, "test": 1},
        {"train": float("nan"), "validation": 0, "test": 1},
        {"train": True, "validation": 0, "test": 1},
    ],
    "classes": [None, [], [1, 2], ["a", "a"], ["a", ""], ["a\nb"], [["a"]], [str(n) for n in range(2**16 + 1)], 5],
    "input": [
        *(
            None,
            [],
            "abc",
            3,
            {"shape": [3, 28, 28]},
            {"shape": [4], "dtype": "float64"},
            {"shape": 4, "dtype": "float32"},
        ),
        *({"shape": shape, "dtype": "float32"} for shape in ([], [0], [-1], [1.5], [2] * 5, [10**9])),
        *({"shape": shape, "dtype": "uint8"} for shape in ([3, 28], [1, 28, 28], [3, 0, 28], [3, 10**9, 10**9])),
    ],
}


TEXTS = [
    json.dumps({**asdict(WHO), "input": WHO.input.to_json(), name: value})
    for name, own in WRONG.items()
    for value in own
]
TEXTS += ["", "[]", "3", "null", "[" * 10**5, '{"name": ' * 10**4, "{", "\x00"]


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: text[:40])
def test_an_introduction_with_wrong_values_is_rejected(text: str) -> None:
    said = refusal(Introduction, RecordDict({"introduction": ConfigRecord({"json": text})}))
    assert said.startswith("its introduction is not valid (")
    assert said.isprintable()
    assert len(said) < 300
