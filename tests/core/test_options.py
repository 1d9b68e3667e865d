"""Options: listed, read from text, and refused with what is allowed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import pytest

from fedc2i.core.errors import UserError
from fedc2i.core.options import check_at_least, check_choice, convert, describe, option, options_of

Colour = Literal["red", "green"]


@dataclass(frozen=True)
class Paint:
    colour: Colour = option("red", "what it looks like")  # noqa: RUF009  (a field, as in every method)
    layers: int | Literal["all"] = option(3, "how many")
    gloss: float | None = option(None, "how shiny")
    dry: bool = option(True, "whether it is dry")
    plain: int = 7


def test_options_are_listed_with_default_choices_and_help() -> None:
    listed = options_of(Paint)
    assert list(listed) == ["colour", "layers", "gloss", "dry", "plain"]
    assert (listed["colour"].default, listed["colour"].allowed) == ("red", "red | green")
    assert listed["colour"].about == "what it looks like"
    assert listed["layers"].allowed == "integer | all"
    assert listed["gloss"].allowed == "number | none"
    assert listed["dry"].allowed == "true | false"
    assert listed["plain"].about == ""


@pytest.mark.parametrize(
    ("value", "hint", "want"),
    [
        ("3", int, 3),
        (3, int, 3),
        (3.0, int, 3),
        ("1e3", int, 1000),
        ("0.5", float, 0.5),
        (2, float, 2.0),
        ("text", str, "text"),
        ("red", Colour, "red"),
        ("all", int | Literal["all"], "all"),
        ("12", int | Literal["all"], 12),
        ("none", float | None, None),
        (None, float | None, None),
        ("2", float | None, 2.0),
        *((text, bool, True) for text in ("true", "True", "yes", "1", True)),
        *((text, bool, False) for text in ("false", "no", "0", False)),
    ],
)
def test_convert(value: Any, hint: Any, want: Any) -> None:
    got = convert(value, hint, "here")
    assert got == want
    assert type(got) is type(want)


@pytest.mark.parametrize(
    ("value", "hint", "allowed"),
    [
        ("3.5", int, "integer"),
        (3.5, int, "integer"),
        ("three", int, "integer"),
        ("", int, "integer"),
        ("inf", int, "integer"),
        ("nan", int, "integer"),
        (True, int, "integer"),
        (True, float, "number"),
        ("fast", float, "number"),
        ("blue", Colour, r"red \| green"),
        ("some", int | Literal["all"], r"integer \| all"),
        ("maybe", bool, r"true \| false"),
        ("x", float | None, r"number \| none"),
        ([1], float, "number"),
    ],
)
def test_convert_refuses_and_says_what_is_allowed(value: Any, hint: Any, allowed: str) -> None:
    with pytest.raises(UserError, match=f"^here must be {allowed}, got "):
        convert(value, hint, "here")


def test_describe_an_unknown_type_by_its_name() -> None:
    assert describe(Paint) == "Paint"


def test_check_choice() -> None:
    check_choice(Paint(colour="green"), "colour")
    with pytest.raises(UserError, match=r"colour must be red \| green, got 'blue'"):
        check_choice(Paint(colour="blue"), "colour")


@pytest.mark.parametrize("value", [0, 0.0, 5, 1e300])
def test_check_at_least_accepts(value: float) -> None:
    check_at_least(Paint(gloss=value), 0, "gloss")


@pytest.mark.parametrize("value", [-1e-9, float("nan"), float("inf"), "5", None])
def test_check_at_least_refuses(value: Any) -> None:
    with pytest.raises(UserError, match="gloss must be a finite number of at least 0, got"):
        check_at_least(Paint(gloss=value), 0, "gloss")
