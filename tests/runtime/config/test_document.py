"""YAML text to a plain tree with lines, whatever the text."""

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.errors import ConfigError
from runtime.config.document import MAX_BYTES, MAX_DEPTH, Document, read, read_file


def refusal(text: str) -> str:
    """The sentence that a text is refused with."""
    with pytest.raises(ConfigError) as caught:
        read(text, "f.yaml")
    return caught.value.message


def test_text_that_yaml_1_1_would_corrupt_stays_text() -> None:
    """F69: times of day, country codes, switches, dates, sexagesimals and octals are what they look like."""
    tree = read("a: 12:30\nb: NO\nc: on\nd: 2024-01-01\ne: 010\nf: yes\ng: 1_000\nh: 0b11\ni: =\n", "f").tree
    assert tree == {
        "a": "12:30", "b": "NO", "c": "on", "d": "2024-01-01", "e": 10, "f": "yes", "g": "1_000", "h": "0b11", "i": "=",
    }  # fmt: skip


def test_the_core_schema_gives_scalars_their_types() -> None:
    """Null, booleans, integers and floats, and quotes make text of all of them."""
    tree = read("a: [null, ~, true, False, -7, 0x1F, 0o17, 1.5, -.5, 1e3, .inf, 'true', \"7\"]", "f").tree
    assert tree["a"] == [None, None, True, False, -7, 31, 15, 1.5, -0.5, 1000.0, math.inf, "true", "7"]
    assert math.isnan(read("a: .nan", "f").tree["a"])
    assert read("a:\n", "f").tree == {"a": None}
    assert read("1: x\ntrue: y", "f").tree == {"1": "x", "true": "y"}


def test_every_key_and_item_knows_its_line() -> None:
    """Lines count from one, and what has none takes that of the part around it."""
    document = read("# first\na:\n  b: 1\n  c:\n    - x\n    - d: 2\n", "f.yaml")
    assert document.line(("a",)) == 2
    assert document.line(("a", "b")) == 3
    assert document.line(("a", "c", 1, "d")) == 6
    assert document.line(("a", "missing")) == 2
    assert document.line(("nowhere",)) == 1
    assert document.place(("a", "c", 0)) == "f.yaml:5"


def test_a_place_may_be_a_variable_instead_of_a_line() -> None:
    """What did not come from the file does not claim a line of it."""
    document = Document("f", {}, {("a",): 3}, {("a", "b"): "environment X"})
    assert document.place(("a", "b", "c")) == "environment X"
    assert document.place(("a",)) == "f:3"


def test_an_empty_text_is_an_empty_mapping() -> None:
    """No setting is needed to start."""
    assert [read(text, "f").tree for text in ("", "# only words\n", "---\n", "null\n", "{}")] == [{}] * 5


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("a: 1\nb: 2\na: 3\n", "f.yaml:3: a: the key is here twice (first on line 1)"),
        ("a:\n  b: {c: 1, c: 2}\n", "f.yaml:2: a.b.c: the key is here twice"),
        ("a: 1\n'a': 2\n", "f.yaml:2: a: the key is here twice"),
        ("a:\n\tb: 1\n", "f.yaml:2: a tab in the indentation"),
        ("a:\n  \tb: 1\n", "f.yaml:2: a tab in the indentation"),
        ("- a\n- b\n", "must be a mapping"),
        ("just text", "must be a mapping"),
        ("a: 1\n---\nb: 2\n", "f.yaml:2: a second document"),
        ("a: !!python/object/apply:os.system [x]\n", "f.yaml:1: tags"),
        ("a: !include other.yaml\n", "f.yaml:1: tags"),
        ("a: !!str 5\n", "f.yaml:1: tags"),
        ("%YAML 1.1\n---\na: NO\n", "only YAML 1.2"),
        ("a: {x: 1}\nb:\n  <<: {x: 1}\n", "f.yaml:3: merge keys"),
        ("? [a, b]\n: 1\n", "f.yaml:1: a key must be plain text"),
        ("? {a: b}\n: 1\n", "f.yaml:1: a key must be plain text"),
        ("a: &x 1\n*x : 2\n", "f.yaml:2: a key must be plain text"),
        ("a: *nothing\n", "f.yaml:1: *nothing refers to nothing"),
        ("a: &a [*a]\n", "f.yaml:1: *a refers to nothing before it (or to itself)"),
        ("a: 'open\n", "f.yaml:2"),
        ("a: b: c\n", "f.yaml:1"),
        ("ok: 1\na: [1, 2\n", "f.yaml:3"),
        ("a: \x00\n", "f.yaml:1"),
        ('a: "\\ud800"\n', "f.yaml:1: half of a surrogate pair"),
        ("a: \ud800\n", "f.yaml:1"),
        ("a: @x\n", "f.yaml:1"),
    ],
)
def test_hostile_or_broken_text_is_refused_with_its_line(text: str, what: str) -> None:
    """F69: one sentence that names file and line, never a traceback of the parser's."""
    message = refusal(text)
    assert what in message
    assert "\n" not in message
    assert len(message) < 300


@pytest.mark.parametrize("opening", ["[", "{a: ", "- ", "[{b: "])
def test_deep_nesting_ends_at_a_bound(opening: str) -> None:
    """Thousands of brackets cost nothing and crash nothing."""
    assert f"deeper than {MAX_DEPTH}" in refusal(opening * 8_000)


def test_an_alias_bomb_ends_at_a_bound() -> None:
    """F69: nine nines of nothing are counted as if they were written out."""
    rows = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    rows += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    assert "once aliases are written out" in refusal("\n".join(rows))


def test_nested_aliases_do_not_get_around_the_depth() -> None:
    """Each level of alias adds its own depth."""
    rows = ["a0: &a0 [x]"] + [f"a{n}: &a{n} [*a{n - 1}]" for n in range(1, 100)]
    assert "deeper than" in refusal("\n".join(rows))


def test_a_modest_alias_is_written_out() -> None:
    """Sharing a value is fine; faults in it point to the line that shares it."""
    document = read("a: &x {b: 1}\nc: *x\n", "f")
    assert document.tree == {"a": {"b": 1}, "c": {"b": 1}}
    assert document.line(("c", "b")) == 2


def test_a_huge_text_or_line_is_refused_before_it_is_parsed() -> None:
    """The cap counts bytes, not characters; a long run of one character on one line cannot stall the scanner."""
    assert "f.yaml:2: a line of over" in refusal("a: 1\n" + "!" * (MAX_BYTES - 9))
    assert "over" in refusal("#" * (MAX_BYTES + 1))
    assert "over" in refusal("#" + "\u00e9" * (MAX_BYTES // 2 + 1))


def test_a_file_must_be_there_and_be_utf_8(tmp_path: Path) -> None:
    """A byte order mark is fine; Latin-1 and UTF-16 are not guessed."""
    path = tmp_path / "c.yaml"
    path.write_bytes("\ufeffa: \u00e9\n".encode())
    assert read_file(path).tree == {"a": "\u00e9"}
    path.write_bytes(b"a: 1\nb: \xe9\n")
    with pytest.raises(ConfigError, match=r"c\.yaml:2: not UTF-8"):
        read_file(path)
    path.write_bytes("a: 1\n".encode("utf-16"))
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_file(path)
    path.write_bytes(b"#" * (2 * MAX_BYTES))
    with pytest.raises(ConfigError, match="over"):
        read_file(path)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_file(tmp_path / "nowhere.yaml")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_file(tmp_path)


@settings(max_examples=300, deadline=None)
@given(st.text("ab:-[]{},&*!|>'\"%@`#?\n\t 0.\x00\x85\ud800\u2028", max_size=40))
def test_any_text_is_read_or_refused(text: str) -> None:
    """No text whatever raises anything but `ConfigError`."""
    try:
        found = read(text, "f").tree
    except ConfigError as error:
        found = error.message
    assert isinstance(found, dict) or found.startswith("f:")
