"""The error tree: one stable word per kind, found again by it, and an object of its own for each waiter."""

from __future__ import annotations

import pytest

from actors import errors
from actors.errors import Broken, ForeloadError, Invalid, NeverFits, Refused, by_code


def tree(root: type[ForeloadError] = ForeloadError) -> list[type[ForeloadError]]:
    """A kind and everything below it."""
    return [root, *(leaf for child in root.__subclasses__() for leaf in tree(child))]


PUBLIC = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, ForeloadError)]


@pytest.mark.parametrize("kind", PUBLIC, ids=lambda kind: kind.__name__)
def test_every_kind_is_found_again_by_its_word(kind: type[ForeloadError]) -> None:
    """A word that crossed a process boundary becomes the same kind of error."""
    assert by_code(kind.code) is kind
    assert kind.code.isidentifier()
    assert kind.code.islower()


def test_words_are_unique_and_every_kind_has_its_own() -> None:
    """Two kinds with one word would be told apart nowhere."""
    words = [kind.code for kind in tree()]
    assert len(words) == len(set(words))
    assert set(PUBLIC) <= set(tree())


def test_an_unknown_word_is_something_broken() -> None:
    """A newer worker may say what this version has not heard of."""
    assert by_code("from_the_future") is Broken


@pytest.mark.parametrize("kind", PUBLIC, ids=lambda kind: kind.__name__)
def test_each_waiter_gets_an_object_of_its_own_that_says_the_same(kind: type[ForeloadError]) -> None:
    """F55: the same error for everybody, and no traceback that grows with each of them."""
    error = kind("text", model="m", detail={"bytes": 1}, retry_after=2.0)
    again = error.again()
    assert again is not error
    assert type(again) is kind
    assert (again.message, again.model, again.detail, again.retry_after) == ("text", "m", {"bytes": 1}, 2.0)
    assert again.detail is not error.detail
    assert str(again) == "text"


def test_the_tree_is_grouped_by_what_the_caller_should_do() -> None:
    """Every kind is in exactly one of the groups that the HTTP table is built on, or stands for itself."""
    groups = (Refused, Invalid, NeverFits, Broken)
    alone = {ForeloadError, errors.DeadlineExceeded, errors.ConfigError}
    for kind in PUBLIC:
        assert (sum(issubclass(kind, group) for group in groups) == 1) != (kind in alone), kind
