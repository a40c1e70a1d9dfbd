"""A fit that comes from elsewhere is checked: names, types, shapes, ranges. Whatever is wrong is named."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from forecasting.fit import fit
from forecasting.fitted import SHAPES, Absurd, Fitted, sound
from tests.forecasting.fleets import counted, daily


@pytest.fixture
def arrays() -> dict[str, Any]:
    """Of a small, whole fit."""
    snapshot = counted(daily(3, 2)).snapshot()
    return dict(fit(snapshot, now=snapshot.at, deadline=1e6).to_arrays())


def said(arrays: dict[str, Any], **changed: object) -> dict[str, Any]:
    """The same with other words."""
    words = json.loads(arrays["said"].tobytes()) | changed
    return arrays | {"said": np.frombuffer(json.dumps(words).encode(), np.uint8)}


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_a_missing_array_is_named(arrays: dict[str, Any], name: str):
    """Half an answer is none."""
    del arrays[name]
    with pytest.raises(Absurd, match=name):
        Fitted.from_arrays(arrays)


@pytest.mark.parametrize("name", ["profile", "season", "use", "weights", "saved", "prior"])
@pytest.mark.parametrize("value", [np.nan, -1e7, -np.inf])
def test_an_impossible_number_is_named(arrays: dict[str, Any], name: str, value: float):
    """F71: one NaN or negative rate among millions refuses the whole fit."""
    arrays[name] = arrays[name].copy()
    arrays[name].flat[-1] = value
    with pytest.raises(Absurd, match=name):
        Fitted.from_arrays(arrays)


@pytest.mark.parametrize("name", ["profile", "season", "weights"])
def test_an_absurd_number_is_named(arrays: dict[str, Any], name: str):
    """F72: a rate that no server can serve."""
    arrays[name] = arrays[name].copy()
    arrays[name].flat[0] = 1e12
    with pytest.raises(Absurd, match=name):
        Fitted.from_arrays(arrays)


@pytest.mark.parametrize("shape", [(3,), (2, 672), (3, 671), (4, 672), (3, 672, 1)])
def test_a_wrong_shape_is_named(arrays: dict[str, Any], shape: tuple[int, ...]):
    """All arrays belong to the same models."""
    with pytest.raises(Absurd, match="profile"):
        Fitted.from_arrays(arrays | {"profile": np.zeros(shape, np.float32)})


@pytest.mark.parametrize("kind", ["float64", "int32", "complex64", "U5", "bool"])
def test_a_wrong_type_is_named(arrays: dict[str, Any], kind: str):
    """Numbers are what they are agreed to be."""
    with pytest.raises(Absurd, match="profile"):
        Fitted.from_arrays(arrays | {"profile": np.zeros((3, 672), kind)})


def test_unknown_arrays_are_refused(arrays: dict[str, Any]):
    """Nothing is taken on trust."""
    with pytest.raises(Absurd, match="surprise"):
        Fitted.from_arrays(arrays | {"surprise": np.zeros(1)})
    with pytest.raises(Absurd, match="table"):
        Fitted.from_arrays(arrays | {"table/surprise": np.zeros(1)})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("keys", ["a", "a", "b"]),
        ("keys", [1, 2, 3]),
        ("keys", "abc"),
        ("at", -1.0),
        ("at", "now"),
        ("at", 1e300),
        ("origin", None),
        ("slot", 672),
        ("slot", True),
        ("slot", 1.5),
        ("complete", 1),
        ("skill", "yes"),
        ("schedule", None),
        ("numbers", {"brier": "low"}),
        ("numbers", []),
    ],
)
def test_wrong_words_are_named(arrays: dict[str, Any], name: str, value: object):
    """Every word is checked."""
    with pytest.raises(Absurd, match=name):
        Fitted.from_arrays(said(arrays, **{name: value}))


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"{}", b"\xff\xfe", b'{"keys": []}', b"[" * 50_000])
def test_garbled_words_are_refused(arrays: dict[str, Any], text: bytes):
    """Not JSON, not a mapping, not ours."""
    with pytest.raises(Absurd, match="words"):
        Fitted.from_arrays(arrays | {"said": np.frombuffer(text, np.uint8)})


def test_missing_words_are_refused(arrays: dict[str, Any]):
    """Numbers without their models are nothing."""
    with pytest.raises(Absurd, match="words"):
        Fitted.from_arrays(arrays | {"said": np.zeros((2, 2))})
    del arrays["said"]
    with pytest.raises(Absurd, match="words"):
        Fitted.from_arrays(arrays)


def test_what_a_server_keeps_has_no_profiles_and_all_else(arrays: dict[str, Any]):
    """They are most of the bytes; some without the others would be a mistake."""
    kept = Fitted.from_arrays(arrays).served().to_arrays()
    assert kept["profile"].shape == (0, 672)
    assert Fitted.from_arrays(kept).keys == Fitted.from_arrays(arrays).keys
    with pytest.raises(Absurd, match="profile must be that of all 3 models or of none, not of 2"):
        Fitted.from_arrays(arrays | {"profile": arrays["profile"][:2]})


def test_nan_in_the_numbers_is_refused(arrays: dict[str, Any]):
    """JSON's own NaN is one too."""
    with pytest.raises(Absurd, match="numbers"):
        Fitted.from_arrays(said(arrays, numbers={"brier": float("nan")}))


def test_sound_numbers_pass_untouched():
    """No copy, nothing flagged."""
    array = np.array([[0.0, 1.0], [2.0, 3.0]])
    same, changed = sound(array, 5.0)
    assert same is array
    assert not changed.any()


def test_unsound_rows_are_cut_and_flagged():
    """NaN becomes 0, the rest is clipped, and only their rows are flagged."""
    cut, changed = sound(np.array([[np.nan, 1.0], [-1.0, 9.0], [0.0, 5.0], [np.inf, -np.inf]]), 5.0)
    assert cut.tolist() == [[0, 1], [0, 5], [0, 5], [5, 0]]
    assert changed.tolist() == [True, True, False, True]
