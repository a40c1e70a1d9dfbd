"""The breaker per fingerprint: doubling, one probe, a fresh start, and a bound on what it remembers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from actors.residency.quarantine import Quarantine, Verdict


def fail(quarantine: Quarantine, now: float, fingerprint: str = "f") -> float:
    """One failed load."""
    return quarantine.failed(fingerprint, code="corrupt_weights", cause="bit flip", now=now)


def test_the_back_off_doubles_up_to_its_limit() -> None:
    """F55: 1 s, 2 s, 4 s … at most the limit, however long it goes on."""
    quarantine = Quarantine(first=1.0, limit=300.0)
    pauses = [fail(quarantine, 0.0) for _ in range(2000)]
    assert pauses[:10] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300]
    assert set(pauses[10:]) == {300.0}


def test_the_verdict_names_cause_and_remaining_time_until_it_lifts() -> None:
    """T6: the second request is told the reason of the first one's failure."""
    quarantine = Quarantine()
    assert quarantine.verdict("f", 0.0) is None
    fail(quarantine, 10.0)
    assert quarantine.verdict("f", 10.25) == Verdict("corrupt_weights", "bit flip", 0.75, 1)
    assert quarantine.last("f") == ("corrupt_weights", "bit flip")
    assert quarantine.verdict("f", 11.0) is None
    assert quarantine.verdict("other", 10.25) is None


def test_only_one_probe_at_a_time() -> None:
    """F55: half-open; while the probe runs everybody else is still refused."""
    quarantine = Quarantine()
    fail(quarantine, 0.0)
    assert quarantine.verdict("f", 1.0) is None
    quarantine.trying("f")
    assert quarantine.verdict("f", 1.0) == Verdict("corrupt_weights", "bit flip", 0.0, 1)
    assert fail(quarantine, 1.5) == 2.0
    assert quarantine.verdict("f", 3.0) == Verdict("corrupt_weights", "bit flip", 0.5, 2)


def test_a_probe_that_was_cancelled_leaves_the_place_to_the_next() -> None:
    """A client that leaves during the probe does not close the door for good."""
    quarantine = Quarantine()
    fail(quarantine, 0.0)
    quarantine.trying("f")
    quarantine.gave_up("f")
    assert quarantine.verdict("f", 1.0) is None


def test_success_and_an_operator_start_afresh() -> None:
    """F55: after `clear` the next failure costs the first pause again."""
    quarantine = Quarantine()
    fail(quarantine, 0.0)
    fail(quarantine, 0.0)
    quarantine.clear("f")
    assert quarantine.verdict("f", 0.0) is None
    assert quarantine.last("f") is None
    assert fail(quarantine, 0.0) == 1.0


def test_what_never_failed_is_not_remembered() -> None:
    """Trying, giving up and clearing an unknown fingerprint leave nothing behind."""
    quarantine = Quarantine()
    quarantine.trying("f")
    quarantine.gave_up("f")
    quarantine.clear("f")
    assert quarantine.verdict("f", 0.0) is None
    assert repr(quarantine) == "<Quarantine 0 artefacts>"


def test_it_remembers_a_bounded_number_the_oldest_failure_forgotten_first() -> None:
    """F40: endless new fingerprints do not grow the memory, and a repeated failure counts as new."""
    quarantine = Quarantine(size=3)
    for name in "abc":
        fail(quarantine, 0.0, name)
    fail(quarantine, 0.0, "a")
    fail(quarantine, 0.0, "d")
    assert repr(quarantine) == "<Quarantine 3 artefacts>"
    assert [quarantine.last(name) is not None for name in "abcd"] == [True, False, True, True]


@given(st.lists(st.tuples(st.sampled_from(["fail", "try", "give up", "clear"]), st.floats(0, 50)), max_size=60))
def test_nothing_is_refused_for_longer_than_the_limit(steps: list[tuple[str, float]]) -> None:
    """F55: at any time, a fingerprint that nobody probes may be tried again after at most `limit` seconds."""
    quarantine, now, probing = Quarantine(first=1.0, limit=8.0), 0.0, False
    for step, passed in steps:
        now += passed
        match step:
            case "fail":
                assert 1.0 <= fail(quarantine, now) <= 8.0
                probing = False
            case "try":
                quarantine.trying("f")
                probing = quarantine.last("f") is not None
            case "give up":
                quarantine.gave_up("f")
                probing = False
            case _:
                quarantine.clear("f")
                probing = False
        verdict = quarantine.verdict("f", now + 8.0)
        assert (verdict is not None) is probing
