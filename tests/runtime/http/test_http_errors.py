"""The table of statuses and the error object."""

from __future__ import annotations

import json

import pytest

from actors import errors
from runtime.http.errors import STATUS, refusal, status_of

TRACE = "ab" * 16


def subclasses(kind: type[errors.ForeloadError]) -> set[type[errors.ForeloadError]]:
    """Every class below one, as long as the product defines it."""
    found = {child for child in kind.__subclasses__() if child.__module__ == "actors.errors"}
    return found.union(*(subclasses(child) for child in found)) if found else found


def test_every_error_of_the_tree_has_a_row_of_its_own():
    """No class of the error tree reaches a client by accident of its ancestry."""
    assert subclasses(errors.ForeloadError) <= set(STATUS)


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (errors.BadRequest, 400),
        (errors.BadTensor, 400),
        (errors.Unauthorized, 401),
        (errors.NotAllowed, 403),
        (errors.UnknownModel, 404),
        (errors.NotFound, 404),
        (errors.WrongVerb, 405),
        (errors.TooSlow, 408),
        (errors.Conflict, 409),
        (errors.TooLarge, 413),
        (errors.UriTooLong, 414),
        (errors.UnsupportedEncoding, 415),
        (errors.Busy, 429),
        (errors.HeadersTooLarge, 431),
        (errors.Unsupported, 501),
        (errors.StillLoading, 503),
        (errors.Draining, 503),
        (errors.Quarantined, 503),
        (errors.NoEvictableSpace, 503),
        (errors.WorkerDied, 503),
        (errors.CorruptWeights, 503),
        (errors.DeadlineExceeded, 504),
        (errors.NeverFits, 507),
        (errors.DiskFull, 507),
    ],
)
def test_the_published_table_holds(kind: type[errors.ForeloadError], status: int):
    """Protocol, section 5: each error keeps its published status, and its body the fields promised there."""
    answer = refusal(kind("why", model="m", detail={"bytes": 5}), TRACE)
    assert answer.status == status
    body = json.loads(answer.body)
    assert body == {"error": "why", "code": kind.code, "trace_id": TRACE, "model": "m", "detail": {"bytes": 5}}


def test_a_class_of_a_later_version_takes_its_parents_row():
    """An error nobody has listed yet is still never a 500."""

    class Overheated(errors.Refused):
        code = "overheated"

    assert status_of(Overheated("hot")) == 503


@pytest.mark.parametrize(
    ("wait", "header"),
    [
        (None, b"1"),
        (0.0, b"1"),
        (0.2, b"1"),
        (1.01, b"2"),
        (59.0, b"59"),
        (float("inf"), b"1"),
        (1e12, b"86400"),
        (-3, b"1"),
    ],
)
@pytest.mark.parametrize("kind", [errors.Busy, errors.Draining, errors.LoadFailed])
def test_each_429_and_503_says_when_to_come_back(kind: type[errors.ForeloadError], wait: float | None, header: bytes):
    """Retry-After is whole seconds, at least one, whatever the load-time model says."""
    assert dict(refusal(kind("later", retry_after=wait), TRACE).headers)[b"retry-after"] == header


def test_other_refusals_do_not_ask_to_come_back():
    """A request that must change is not invited again."""
    assert refusal(errors.BadRequest("no", retry_after=5), TRACE).headers == ()


@pytest.mark.parametrize(
    "error", [RuntimeError("/secret/path"), errors.ConfigError("/etc/x"), errors.ForeloadError("/x")]
)
def test_an_internal_error_says_nothing_but_its_trace_id(error: Exception):
    """I11: the text of an exception that is not meant for a caller never leaves the process."""
    answer = refusal(error, TRACE)
    assert answer.status == 500
    assert json.loads(answer.body)["trace_id"] == TRACE
    assert b"secret" not in answer.body
    assert b"/" not in answer.body


def test_a_message_that_is_not_unicode_is_still_an_answer():
    """A lone surrogate in a message or a detail must not turn a 404 into a 500."""
    error = errors.UnknownModel("\udcff", model="\ud800", detail={"name": "a\udc80", "n": 1, "yes": True})
    answer = refusal(error, TRACE)
    assert answer.status == 404
    assert json.loads(answer.body)["detail"]["yes"] is True


def test_absent_fields_are_left_out():
    """`model` and `detail` only appear where there is something to say."""
    assert set(json.loads(refusal(errors.NotFound("no"), TRACE).body)) == {"error", "code", "trace_id"}
