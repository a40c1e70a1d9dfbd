"""What is wrong with a file, without the name of the input that brought it; and refusing results of absurd size."""

from __future__ import annotations


class Undecodable(Exception):  # a fact, named like the rest of the tree
    """A file is not what it should be. The text is a clause for the caller, and holds nothing of the file."""


def within(count: int, most: int, what: str) -> None:
    """Raise `Undecodable` where `count` exceeds `most`, before anything of that size is made."""
    if count > most:
        raise Undecodable(f"{what}: {count}, at most {most} are allowed")
