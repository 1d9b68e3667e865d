"""Options: listed, read from text, validated, and refused with what is allowed."""

from __future__ import annotations

from dataclasses import dataclass, make_dataclass
from typing import Any, Literal

import pytest

from fedc2i.core.errors import UserError
from fedc2i.core.options import convert, describe, option, options_of, validate

Colour = Literal["red", "green"]


class Shade(str):
    """A type that reads itself from text."""

    allowed = "dark(NUMBER)"

    @staticmethod
    def parse(value: Any) -> Shade:
        if not str(value).startswith("dark("):
            raise ValueError
        return Shade(value)


@dataclass(frozen=True)
class Paint:
    colour: Colour = option("red", "what it looks like")  # noqa: RUF009  (a field, as in every method)
    layers: int | Literal["all"] = option(3, "how many", low=1, high=9)
    gloss: float | None = option(None, "how shiny", low=0, below=1)
    drops: float = option(1.0, "how large", above=0)
    shade: float | Shade = option(0.0, "how dark", low=0)  # noqa: RUF009
    dry: bool = option(True, "whether it is dry")
    name: str = option("", "on the tin")
    plain: int = 7

    def __post_init__(self) -> None:
        validate(self)


def test_options_are_listed_with_default_choices_range_and_help() -> None:
    listed = options_of(Paint)
    assert list(listed) == ["colour", "layers", "gloss", "drops", "shade", "dry", "name", "plain"]
    assert (listed["colour"].default, listed["colour"].about) == ("red", "what it looks like")
    assert {name: one.allowed for name, one in listed.items()} == {
        "colour": "red | green",
        "layers": "a whole number of at least 1 and at most 9 | all",
        "gloss": "a finite number of at least 0 and below 1 | none",
        "drops": "a finite number above 0",
        "shade": "a finite number of at least 0 | dark(NUMBER)",
        "dry": "true | false",
        "name": "text",
        "plain": "a whole number",
    }


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
        ("dark(2)", float | Shade, Shade("dark(2)")),
        *((text, bool, True) for text in ("true", "True", "yes", "1", True)),
        *((text, bool, False) for text in ("false", "no", "0", False)),
    ],
)
def test_convert(value: Any, hint: Any, want: Any) -> None:
    got = convert(value, make_dataclass("Own", [("here", hint)]), "here")
    assert got == want
    assert type(got) is type(want)


@pytest.mark.parametrize(
    ("value", "hint", "allowed"),
    [
        ("3.5", int, "a whole number"),
        (3.5, int, "a whole number"),
        ("three", int, "a whole number"),
        ("", int, "a whole number"),
        ("inf", int, "a whole number"),
        ("nan", int, "a whole number"),
        (True, int, "a whole number"),
        (True, float, "a number"),
        ("fast", float, "a number"),
        ("blue", Colour, r"red \| green"),
        ("some", int | Literal["all"], r"a whole number \| all"),
        ("maybe", bool, r"true \| false"),
        ("x", float | None, r"a number \| none"),
        ([1], float, "a number"),
    ],
)
def test_convert_refuses_and_says_what_is_allowed(value: Any, hint: Any, allowed: str) -> None:
    with pytest.raises(UserError, match=f"^here must be {allowed}, got "):
        convert(value, make_dataclass("Own", [("here", hint)]), "here")


def test_describe_an_unknown_type_by_its_name() -> None:
    assert describe(Paint) == "Paint"


@pytest.mark.parametrize(
    ("name", "given", "stored"),
    [
        ("colour", "green", "green"),
        ("layers", 1, 1),
        ("layers", 9, 9),
        ("layers", "all", "all"),
        ("gloss", 0, 0.0),
        ("gloss", None, None),
        ("drops", 5, 5.0),
        ("drops", 1e-300, 1e-300),
        ("shade", "dark(3)", Shade("dark(3)")),
        ("shade", Shade("dark(3)"), Shade("dark(3)")),
        ("dry", False, False),
        ("plain", "anything, as it is no option", "anything, as it is no option"),
    ],
)
def test_validate_accepts(name: str, given: Any, stored: Any) -> None:
    got = getattr(Paint(**{name: given}), name)
    assert got == stored
    assert type(got) is type(stored)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("colour", "blue", r"red \| green"),
        *(("layers", value, "a whole number of at least 1 and at most 9") for value in (0, 10, 3.0, "3", True, None)),
        *(("gloss", value, "at least 0 and below 1") for value in (-1e-9, 1, 1.0, float("nan"), "0.5", True)),
        *(("drops", value, "above 0") for value in (0, -1.0, float("inf"), None)),
        *(("shade", value, "dark") for value in (-1, "light", None)),
        *(("dry", value, r"true \| false") for value in (1, "yes", None)),
        ("name", 3, "text"),
    ],
)
def test_validate_refuses_and_says_what_is_allowed(name: str, value: Any, allowed: str) -> None:
    with pytest.raises(UserError, match=f"^{name} must be .*{allowed}.*, got '{value}'"):
        Paint(**{name: value})
