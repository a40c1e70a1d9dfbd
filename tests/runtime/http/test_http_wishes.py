"""Deadline and priority are found in a body wherever they stand, without a search through its numbers."""

from __future__ import annotations

import time

import pytest

from runtime.http.infer import wishes_of


@pytest.mark.parametrize("strings", [0, 1, 30, 31, 32, 33, 200])
@pytest.mark.parametrize(("word", "wanted"), [("timeout", (2.0, 0)), ("priority", (None, 2_000_000))])
def test_a_wish_is_found_behind_any_number_of_strings(
    strings: int, word: str, wanted: tuple[float | None, int]
) -> None:
    """Few quotes are looked at one by one, many by another search: neither misses a word, nor sees one too far."""
    texts = ",".join('"x"' for _ in range(strings))
    body = f'{{"inputs":[{texts}],"parameters":{{"{word}":2000000}}}}'.encode()
    assert wishes_of({}, body, None) == wanted
    assert wishes_of({}, body + b'"priority"', len(body)) == wanted
    assert wishes_of({}, b"{}" + body, 2) == (None, 0)


def test_a_body_of_numbers_is_passed_at_the_speed_of_memory() -> None:
    """3 MB without a wish: a search for both words took 5 ms of the loop's time, this takes far less than 1 ms."""
    body = b'{"inputs":[{"name":"x","data":[' + b"0.1234567890123456," * 150_000 + b"1]}]}"
    best = min(_seconds(body) for _ in range(5))
    assert best < 0.003


def _seconds(body: bytes) -> float:
    began = time.thread_time()
    wishes_of({}, body, None)
    return time.thread_time() - began
