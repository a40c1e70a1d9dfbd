"""Object stores through obstore: S3 and what speaks like it, Google Cloud Storage, Azure Blob Storage.

The one home of obstore. Its own retries are off: `pull.py` has one policy for all places, with one set of limits.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from actors.errors import ConfigError, FetchFailed
from runtime.tiers.origin import Answer, Passing, RangeIgnored, Replaced

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from runtime.tiers.sources import ObjectPlace

_IGNORED = "non-partial response"


def open_store(place: ObjectPlace, *, connect: float, stall: float, allow_http: bool) -> Any:
    """Build the client of one bucket; nothing is connected yet. Raises `ConfigError` without values."""
    try:
        from obstore.exceptions import BaseError
        from obstore.store import AzureStore, GCSStore, S3Store
    except ModuleNotFoundError:
        raise ConfigError("remote.stores needs obstore: install foreload[remote]") from None
    scheme, _, bucket = place.url.partition("://")
    client: dict[str, Any] = {
        "connect_timeout": timedelta(seconds=connect),
        "read_timeout": timedelta(seconds=stall),
        # One chunk is one request; its own limit is the watchdog's, which knows of progress.
        "timeout": timedelta(days=1),
        "allow_http": allow_http,
    }
    options: dict[str, Any] = dict(place.keys)
    if place.auth == "anonymous":
        options["skip_signature"] = True
    if place.endpoint is not None:
        options["endpoint"] = place.endpoint
    if scheme == "s3":
        options["region"] = place.region or "us-east-1"
        # Whoever names an endpoint runs a store of their own, which knows buckets as paths.
        options["virtual_hosted_style_request"] = place.endpoint is None
    kind: Any = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}[scheme]
    if scheme == "gs" and "endpoint" in options:
        raise ConfigError("remote.stores: a gs:// store has no endpoint of its own")
    try:
        return kind(bucket, client_options=client, retry_config={"max_retries": 0}, **options)
    except (BaseError, ValueError, TypeError):
        # The library's own words could hold the values.
        raise ConfigError(f"remote.stores: {place.url} cannot be reached this way; look at its keys") from None


class ObjectOrigin:
    """One object; implements `Origin`. A store is shared by all objects of its bucket."""

    def __init__(self, store: Any, path: str) -> None:
        self._store = store
        self._path = path

    @asynccontextmanager
    async def read(self, start: int, end: int | None, tag: str) -> AsyncIterator[Answer]:
        """See `Origin.read`."""
        import obstore

        options: dict[str, Any] = {}
        if end is not None:
            options["range"] = (start, end)
        if tag:
            options["if_match"] = tag
        with _translated():
            result = await obstore.get_async(self._store, self._path, options=options)  # type: ignore[arg-type]  # a TypedDict
        meta = result.meta
        found = meta["e_tag"] or ""
        if tag and found and found != tag:
            raise Replaced
        if end is not None and result.range[0] != start:
            raise Passing("the store answered with another range")
        yield Answer(_pieces(result), meta["size"], found)

    async def close(self) -> None:
        """The store is the caller's."""

    def __repr__(self) -> str:
        return "<ObjectOrigin>"


_PIECE = 1 << 20
"""Bytes per step of an answer: small enough for the watchdog to see a slow link move."""


async def _pieces(result: Any) -> AsyncIterator[memoryview]:
    with _translated():
        async for piece in result.stream(_PIECE):
            yield memoryview(piece)


class _translated:  # noqa: N801 -- reads as a verb where it is used
    """Turns the library's errors into ours: its words hold addresses, and may hold more."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        from obstore import exceptions as e

        match error:
            case e.PreconditionError() | e.NotModifiedError():
                raise Replaced from None
            case e.NotFoundError() | FileNotFoundError():
                raise FetchFailed("the store has no such object") from None
            case e.PermissionDeniedError() | e.UnauthenticatedError():
                raise FetchFailed("the store refuses these credentials") from None
            case e.GenericError() if _IGNORED in str(error):
                raise RangeIgnored from None
            case e.GenericError() | e.JoinError():
                raise Passing(_reason(str(error))) from None
            case e.BaseError() | NotImplementedError():
                raise FetchFailed(f"the store cannot be read: {type(error).__name__}") from None
            case _:
                return


def _reason(text: str) -> str:
    """A few words on a passing fault; the library's sentence has the address in it."""
    for word, said in (
        ("status code: 429", "the store asks to come back later"),
        ("status code: 5", "the store has an error of its own"),
        ("timed out", "the store does not answer in time"),
        ("TimedOut", "the store does not answer in time"),
        ("request or response body", "the connection to the store broke"),
        ("onnect", "the store cannot be connected to"),
    ):
        if word in text:
            return said
    return "the store's answer cannot be used"
