"""Faults: all at once, in the order of the file, each with its line, key and hint."""

from typing import Literal, Self

import pytest
from pydantic import Field, ValidationError, model_validator

from actors.errors import ConfigError
from runtime.config.document import Document, read
from runtime.config.units import Bytes, Count, Flag, Ratio, Seconds
from runtime.config.yaml import Fault, Frozen, closest, refuse, validate


class Part(Frozen):
    """A section."""

    size: Bytes
    wait: Seconds | None = None
    kind: Literal["small", "large"] = "small"


class Renamed(Frozen):
    """A section with a key that Python cannot spell."""

    kind: Part | None = Field(default=None, alias="class")


class Whole(Frozen):
    """A tree."""

    parts: tuple[Part, ...] = ()
    part: Part | None = None
    number: Count = 1
    share: Ratio = 0.5
    on: Flag = False
    name: str = "x"

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.number == 7:
            refuse([Fault(("number",), "is unlucky", "take 8"), Fault(("parts", 0, "size"), "is too")])
        return self


def faults(text: str) -> list[str]:
    """The lines that a text is refused with."""
    with pytest.raises(ConfigError) as caught:
        validate(Whole, read(text, "f"))
    rows = caught.value.message.split("\n")
    assert caught.value.detail["faults"] == len(rows)
    return rows


def test_a_valid_document_becomes_a_frozen_value() -> None:
    """Lists become tuples, units numbers, and nothing can be changed afterwards."""
    whole = validate(Whole, read("parts: [{size: 1KiB, wait: 2m}]\nshare: 85%\n", "f"))
    assert whole == Whole(parts=(Part(size=1024, wait=120.0),), share=0.85)
    with pytest.raises(ValidationError, match="frozen"):
        whole.number = 2  # type: ignore[misc]  # the point


def test_every_fault_is_listed_with_its_line_and_hint() -> None:
    """One error carries them all; nobody fixes a file one start at a time."""
    text = """\
parts:
  - size: 1XB
  - wait: -1
    kind: smal
  - 5
part: x
number: '3'
share: 85
on: yes
name: 5
"""
    assert faults(text) == [
        "f:2: parts.0.size: unknown unit 'XB' (known are B, KB, MB, GB, TB, KiB, MiB, GiB, TiB)",
        "f:3: parts.1.size: is missing (add it)",
        "f:3: parts.1.wait: -1 is negative (write 30s, 500ms, 2m, 1h30m, 1d or a number of seconds)",
        "f:4: parts.1.kind: is not one of the choices (did you mean small?)",
        "f:5: parts.2: must be a mapping (keys: size, wait, kind)",
        "f:6: part: must be a mapping (keys: size, wait, kind)",
        "f:7: number: must be a whole number (without quotes or unit)",
        "f:8: share: 85 is not between 0 and 1 (write 0.85 or 85%)",
        "f:9: on: must be true or false (in YAML 1.2 on, off, yes and no are text)",
        "f:10: name: must be text (put it into quotes)",
    ]


def test_an_unknown_key_is_named_with_the_key_that_was_meant() -> None:
    """The hint comes from the section that the key stands in."""
    assert faults("nmae: x\nparts: [{size: 1, wiat: 1}]\nzzz: 1") == [
        "f:1: nmae: unknown key (did you mean name?)",
        "f:2: parts.0.wiat: unknown key (did you mean wait?)",
        "f:3: zzz: unknown key (known are name, number, on, part, parts, share)",
    ]


def test_hints_speak_of_keys_as_the_file_spells_them() -> None:
    """An alias is the key; the attribute's name means nothing to who writes YAML."""
    with pytest.raises(ConfigError) as caught:
        validate(Renamed, read("clas: 1\nclass: {siz: 1}\n", "f"))
    assert caught.value.message.split("\n") == [
        "f:1: clas: unknown key (did you mean class?)",
        "f:2: class.siz: unknown key (did you mean size?)",
        "f:2: class.size: is missing (add it)",
    ]


def test_a_section_may_find_several_faults_of_its_own() -> None:
    """What a validator refuses is taken apart into one line each, and a fault elsewhere is beside it."""
    rows = faults("parts:\n - size: 3\nnumber: 7\n")
    assert rows == ["f:2: parts.0.size: is too", "f:3: number: is unlucky (take 8)"]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("parts: 5", "must be a list"),
        ("parts: {a: 1}", "must be a list"),
        ("parts: null", "must be a list"),
        ("number: -1", "must be greater than or equal to 0"),
        ("number: true", "must be a whole number"),
        ("number: 1.5", "must be a whole number"),
        ("number: .nan", "must be a whole number"),
        ("on: 1", "must be true or false"),
        ("share: .nan", "not finite"),
        ("name: [a]", "must be text"),
        ("parts: [{size: [1]}]", "not a size"),
        ("parts: [{size: {a: 1}}]", "not a size"),
        ("parts: [{size: 1, kind: 5}]", "known are small, large"),
        ("parts: [{size: 1, 5: 5}]", "unknown key"),
    ],
)
def test_a_wrong_type_is_said_in_yaml_words(text: str, what: str) -> None:
    """No Python type names, no pydantic links, no coercion that merely happens to work."""
    (row,) = faults(text)
    assert what in row
    assert "pydantic" not in row
    assert "NoneType" not in row


def test_a_thousand_faults_stay_readable() -> None:
    """The list is cut with a count of the rest."""
    with pytest.raises(ConfigError) as caught:
        validate(Whole, read("\n".join(f"k{n}: 1" for n in range(1000)), "f"))
    rows = caught.value.message.split("\n")
    assert (len(rows), rows[-1], caught.value.detail["faults"]) == (201, "… and 800 more", 1000)


def test_a_fault_from_elsewhere_names_where() -> None:
    """A value laid over the file by a variable is not blamed on a line of the file."""
    document = Document("f", {"number": "x"}, {("number",): 4}, {("number",): "environment X"})
    with pytest.raises(ConfigError, match=r"^environment X: number: must be"):
        validate(Whole, document)


def test_a_hint_names_the_nearest_or_all() -> None:
    """Case does not matter, and a word of any length costs little."""
    assert closest("NAME", ["name", "other"]) == "did you mean name?"
    assert closest("q" * 100_000, ["name", "other"]) == "known are name, other"
    assert closest("x", []) == ""
