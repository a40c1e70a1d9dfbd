"""Sizes, durations and shares as people write them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.config.units import (
    Amount,
    parse_bytes,
    parse_ratio,
    parse_seconds,
    print_bytes,
    print_ratio,
    print_seconds,
    round_bytes,
)


@pytest.mark.parametrize(
    ("written", "count"),
    [
        (0, 0),
        (17, 17),
        ("17", 17),
        ("17B", 17),
        ("512KiB", 512 * 1024),
        ("120MB", 120_000_000),
        ("1KB", 1000),
        ("40GiB", 40 * 2**30),
        ("40 GiB", 40 * 2**30),
        ("1.5GiB", 3 * 2**29),
        ("1.1GB", 1_100_000_000),
        ("2TB", 2 * 10**12),
        ("2TiB", 2**41),
        (".5MiB", 2**19),
        ("0.1B", 0),
        (2**63 - 1, 2**63 - 1),
    ],
)
def test_a_size_is_read_exactly(written: object, count: int) -> None:
    """Decimal and binary units differ, and no float rounds in between."""
    assert parse_bytes(written) == count


@pytest.mark.parametrize(
    ("written", "hint"),
    [
        (-1, "negative"),
        ("-1GB", "negative"),
        (True, "not a size"),
        (1.5, "not a size"),
        (math.nan, "not a size"),
        (math.inf, "not a size"),
        (None, "not a size"),
        ([], "not a size"),
        ("", "not a size"),
        ("lots", "not a size"),
        ("1e9", "not a size"),
        ("0x10", "not a size"),
        ("1.5", "no unit"),
        ("40gib", "did you mean GiB?"),
        ("40Gi", "did you mean GiB?"),
        ("40G", "did you mean GB?"),
        ("5apples", "known are B"),
        ("5GB 3MB", "not a size"),
        ("none", "null"),
        ("\u0663GB", "not a size"),
        ("9" * 1000, "not a size"),
        (10**30, "more than"),
        ("9" * 30 + "TB", "more than"),
    ],
)
def test_a_wrong_size_is_refused_with_what_would_be_right(written: object, hint: str) -> None:
    """Nothing that merely resembles a size gets through, and the sentence is short whatever was written."""
    with pytest.raises(ValueError, match=hint.replace("?", r"\?")) as caught:
        parse_bytes(written)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        (3, 3.0),
        (0.25, 0.25),
        ("30", 30.0),
        ("30s", 30.0),
        ("500ms", 0.5),
        ("10us", 0.00001),
        ("2m", 120.0),
        ("1h", 3600.0),
        ("1d", 86400.0),
        ("1h30m", 5400.0),
        ("1h 30m", 5400.0),
        ("1.5h", 5400.0),
        ("1d2h3m4s5ms", 93784.005),
        ("0s", 0.0),
    ],
)
def test_a_duration_is_read_exactly(written: object, seconds: float) -> None:
    """One unit, or several with the longer ones first."""
    assert parse_seconds(written) == seconds


@pytest.mark.parametrize(
    ("written", "hint"),
    [
        (-1, "negative"),
        ("-1s", "negative"),
        (False, "not a duration"),
        (None, "not a duration"),
        (math.nan, "not finite"),
        (math.inf, "not finite"),
        ("", "not a duration"),
        ("soon", "not a duration"),
        ("12:30", "not a duration"),
        ("30m1h", "longer units first"),
        ("1h1h", "each once"),
        ("1h30", "not a duration"),
        ("5min", "did you mean m?"),
        ("10sec", "did you mean s?"),
        ("3weeks", "known are"),
        ("never", "null"),
        (1e300, "hundred years"),
        pytest.param(10**400, "hundred years", id="four hundred digits"),
        pytest.param(10**5000, "too long", id="five thousand digits"),
        ("9" * 39 + "d", "hundred years"),
    ],
)
def test_a_wrong_duration_is_refused_with_what_would_be_right(written: object, hint: str) -> None:
    """F69: a time of day is not a duration, whatever a YAML 1.1 parser thinks of it."""
    with pytest.raises(ValueError, match=hint.replace("?", r"\?")) as caught:
        parse_seconds(written)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(("written", "ratio"), [(0, 0.0), (1, 1.0), (0.85, 0.85), ("85%", 0.85), ("0.3", 0.3)])
def test_a_share_is_a_number_or_a_percentage(written: object, ratio: float) -> None:
    """0.85 and 85% are the same."""
    assert parse_ratio(written) == ratio


@pytest.mark.parametrize("written", [85, "101%", -0.1, "-1%", True, None, math.nan, "most", "8 5%", ""])
def test_a_wrong_share_is_refused(written: object) -> None:
    """A share lies within 0..1; 85 without the sign is most likely a percentage, and is not guessed."""
    with pytest.raises(ValueError, match="85%"):
        parse_ratio(written)


@given(st.integers(0, 2**63 - 1))
def test_a_printed_size_reads_back_as_the_same_number(count: int) -> None:
    """Printing is exact."""
    assert parse_bytes(print_bytes(count)) == count


@given(st.decimals(0, 10**8, places=6).map(float))
def test_a_printed_duration_reads_back_as_the_same_number(seconds: float) -> None:
    """Printing is exact to the microsecond."""
    assert parse_seconds(print_seconds(seconds)) == seconds


@given(st.floats(0, 1).map(lambda share: round(share, 6)))
def test_a_printed_share_reads_back_as_the_same_number(share: float) -> None:
    """Printing is exact to a ten-thousandth of a percent."""
    assert parse_ratio(print_ratio(share)) == share


def test_printing_prefers_the_unit_that_people_would_use() -> None:
    """Whole numbers of the largest exact unit."""
    assert [print_bytes(n) for n in (0, 17, 2**30, 120_000_000, 3 * 2**29)] == ["0B", "17B", "1GiB", "120MB", "1536MiB"]
    assert [print_seconds(s) for s in (0, 0.5, 90, 5400)] == ["0s", "500ms", "1m30s", "1h30m"]
    assert [round_bytes(n) for n in (12, 1536, 5 * 2**29)] == ["12 B", "1.5 KiB", "2.5 GiB"]


def test_an_amount_is_a_size_or_a_share_of_a_whole() -> None:
    """A share becomes bytes only once the whole is known."""
    assert Amount.parse("2GiB").of(17) == 2**31
    assert Amount.parse("90%").of(1000) == 900
    assert Amount.parse(0.5).of(1000) == 500
    assert [str(Amount.parse("90%")), str(Amount.parse(2**30))] == ["90%", "1GiB"]


@pytest.mark.parametrize("written", [0, 0.0, "0%", "0B", "101%", 1.5, -1, True, None, "much"])
def test_a_wrong_amount_is_refused(written: object) -> None:
    """No memory at all is not an amount either."""
    with pytest.raises(ValueError, match=r"memory|size|share|between|negative"):
        Amount.parse(written)
