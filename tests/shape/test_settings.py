"""The reference configuration and the schema say the same, key by key."""

import re
from pathlib import Path
from typing import Any, get_origin

import pytest
from pydantic import BaseModel

from runtime.config.load import load, spelled
from runtime.config.schema import Config
from runtime.config.yaml import read, section_of, validate

CONFIGS = Path(__file__).parents[2] / "configs"
REFERENCE = (CONFIGS / "reference.yaml").read_text(encoding="utf-8")
EXAMPLE = re.compile(r"^( *)#: ?", re.MULTILINE)
KEY = re.compile(r"^ *(?:- )?([a-z_]+):", re.MULTILINE)


def with_examples() -> str:
    """The reference with its example lines switched on, each under the key whose default it replaces."""
    text = re.sub(r"^( *)(\w+): (?:\[\]|\{\}|null)\n(?=\1#:)", r"\1\2:\n", REFERENCE, flags=re.MULTILINE)
    return EXAMPLE.sub(r"\1", text)


def missing(section: type[BaseModel], tree: dict[str, Any], path: str = "") -> list[str]:
    """Keys of the schema that a tree does not spell out."""
    found = [f"{path}{key}" for key in section.model_fields if key not in tree]
    for key, field in section.model_fields.items():
        inner, value = section_of(field.annotation), tree.get(key)
        if get_origin(field.annotation) is dict and inner is not None and isinstance(value, dict):
            value = [*value.values()]  # sections under names that the user chose
        for part in value if isinstance(value, list) else [value]:
            if inner is not None and isinstance(part, dict):
                found += missing(inner, part, f"{path}{key}.")
            elif inner is not None:
                found.append(f"{path}{key}.*")
    return found


def described(section: type[BaseModel]) -> dict[str, set[str]]:
    """Every description in the schema, by the key's last name."""
    found: dict[str, set[str]] = {}
    for key, field in section.model_fields.items():
        assert field.description, f"{section.__name__}.{key} has no description"
        found.setdefault(key, set()).add(field.description)
        inner = section_of(field.annotation)
        for name, texts in (described(inner) if inner else {}).items():
            found.setdefault(name, set()).update(texts)
    return found


def commented() -> list[tuple[str, str]]:
    """Each key of the reference with the comment that stands before it."""
    found, comment = [], list[str]()
    for line in with_examples().split("\n"):
        text = line.strip().removeprefix("- ")
        if text.startswith("#"):
            comment.append(text.removeprefix("#").strip())
        elif match := KEY.match(text):
            found.append((match[1], " ".join(comment)))
            comment = []
        else:
            comment = []
    return found


def test_the_reference_names_every_setting_and_no_other() -> None:
    """A setting nobody can find, and an entry nobody reads, are both defects."""
    document = read(with_examples(), "reference.yaml")
    assert missing(Config, document.tree) == []
    validate(Config, document)


def test_the_reference_changes_nothing(tmp_path: Path) -> None:
    """Every value in it is the default: it loads to what an empty file does."""
    empty, full = tmp_path / "empty.yaml", tmp_path / "full.yaml"
    empty.write_text("", encoding="utf-8")
    full.write_text(REFERENCE, encoding="utf-8")
    assert load(full, {}) == load(empty, {})


def test_the_reference_spells_values_as_people_would() -> None:
    """What it says of memory is what the schema prints: `50%`, never a number of bytes."""
    tree = read(REFERENCE, "reference.yaml").tree
    assert tree["devices"][0]["memory"] == spelled(Config().devices[0].memory) == "50%"
    assert tree["server"]["limits"]["body"] == "64MiB"


def test_every_key_of_the_reference_carries_its_own_description() -> None:
    """The comment before a key is the schema's sentence, so the two cannot drift apart."""
    texts, keys = described(Config), commented()
    said = {(key, text) for key, comment in keys for text in texts[key] if comment.endswith(text)}
    assert [key for key, comment in keys if not any(comment.endswith(text) for text in texts[key])] == []
    assert {(key, text) for key, every in texts.items() for text in every} - said == set()


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_every_configuration_we_ship_loads(path: Path) -> None:
    """An example that is refused teaches nothing."""
    assert isinstance(load(path, {}), Config)
