"""How a `ForeloadError` crosses a process boundary: MessagePack of its plain fields, rebuilt by its stable word.

Both sides of the ring use it. Never pickle, never a traceback, never a path.
"""

from __future__ import annotations

import msgspec

from actors.errors import ForeloadError, by_code


class Fault(msgspec.Struct, frozen=True):
    """A `ForeloadError` as plain values; `retry_after` in seconds."""

    code: str
    message: str
    model: str | None = None
    detail: dict[str, int | float | str | bool] = {}
    retry_after: float | None = None

    @classmethod
    def of(cls, error: ForeloadError) -> Fault:
        """Copy what a caller may know of an error."""
        return cls(error.code, error.message, error.model, dict(error.detail), error.retry_after)

    def rebuild(self) -> ForeloadError:
        """Make the exception again; an unknown word becomes `Broken`."""
        return by_code(self.code)(self.message, model=self.model, detail=self.detail, retry_after=self.retry_after)


_decoder = msgspec.msgpack.Decoder(Fault)


def pack(error: ForeloadError) -> bytes:
    """Encode an error as MessagePack."""
    return msgspec.msgpack.encode(Fault.of(error))


def unpack(raw: bytes) -> ForeloadError:
    """Decode an error. Raises `msgspec.DecodeError` (`ValidationError` among them) for anything else."""
    return _decoder.decode(raw).rebuild()
