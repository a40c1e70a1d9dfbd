"""The life of a resident as a table. A move that is not in it raises and changes nothing.

States are facts about bytes, never about intentions: a wish that waits for room is not here.
"""

from __future__ import annotations

from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


class State(StrEnum):
    """What a model's bytes on a tier are doing."""

    ABSENT = "absent"
    LOADING = "loading"
    RESIDENT = "resident"
    DRAINING = "draining"
    UNLOADING = "unloading"


class Move(StrEnum):
    """What can happen to them."""

    RESERVE = "reserve"
    COMMIT = "commit"
    ABORT = "abort"
    ADOPT = "adopt"
    DRAIN = "drain"
    RESUME = "resume"
    RETIRE = "retire"
    FORGET = "forget"


MOVES: Mapping[tuple[State, Move], State] = MappingProxyType(
    {
        (State.ABSENT, Move.RESERVE): State.LOADING,
        (State.ABSENT, Move.ADOPT): State.RESIDENT,
        (State.LOADING, Move.COMMIT): State.RESIDENT,
        # An aborted load still occupies its bytes until they are observed free.
        (State.LOADING, Move.ABORT): State.UNLOADING,
        (State.RESIDENT, Move.DRAIN): State.DRAINING,
        (State.RESIDENT, Move.RETIRE): State.UNLOADING,
        (State.DRAINING, Move.RESUME): State.RESIDENT,
        (State.DRAINING, Move.RETIRE): State.UNLOADING,
        (State.UNLOADING, Move.FORGET): State.ABSENT,
    }
)


class IllegalMove(RuntimeError):
    """A bug of ours: the ledger was asked for a transition that does not exist."""


def after(state: State, move: Move) -> State:
    """The state that a move leads to. Raises `IllegalMove`."""
    try:
        return MOVES[state, move]
    except KeyError:
        raise IllegalMove(f"cannot {move} what is {state}") from None
