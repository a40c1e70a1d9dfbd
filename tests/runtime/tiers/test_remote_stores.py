"""Promises of the remote tier over object stores: a real S3 server, and one that answers wrongly."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from actors import events as e
from actors.errors import ConfigError, CorruptWeights, FetchFailed
from actors.residency.model import Tier
from runtime.tiers.origin_object import open_store
from runtime.tiers.sources import ObjectPlace, Permits
from tests.runtime.tiers.places import CHUNK, elsewhere, model_of
from tests.runtime.tiers.s3 import BUCKET, SECRET, Store

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.runtime.tiers.places import Place
    from tests.runtime.tiers.web import Exchange, Web

    Make = Callable[..., Place]

ANONYMOUS = {"auth": "anonymous", "keys": {}}


def allowed(*stores: ObjectPlace) -> Permits:
    return Permits(stores=stores, allow_http=True)


async def refused(place: Place, record: Any, kind: type[Exception], match: str) -> None:
    with pytest.raises(kind, match=match) as caught:
        await place.host.load(model_of(record))
    assert "127.0.0.1" not in str(caught.value)
    assert SECRET not in str(caught.value)
    assert place.idle()
    assert not place.blobs


# -- a real server -----------------------------------------------------------------------------------


@pytest.mark.real
async def test_a_model_comes_from_s3_in_ranges_and_is_right(tmp_path: Path, s3: Store, make: Make) -> None:
    """16 MiB and a bit, many ranges at a time, byte for byte; afterwards it is on disk."""
    record, content = elsewhere(tmp_path / "m", f"s3://{BUCKET}/whole", count=(4 << 20) + 5)
    s3.put("whole/model.safetensors", content)
    place = make(record, permits=allowed(s3.place()), chunk=1 << 20, parallel=8)
    report = await place.host.load(model_of(record))
    assert report.source is Tier.REMOTE
    assert place.host.path_of(model_of(record)).read_bytes() == content
    assert [each.outcome for each in place.told(e.FetchFinished)] == ["ok"]
    assert SECRET not in repr((place.facts, place.remote, place.remote._permits))
    await place.host.evict(record.key)
    assert (await place.host.load(model_of(record))).source is Tier.DISK


@pytest.mark.real
async def test_wrong_keys_and_missing_objects_are_told_apart(tmp_path: Path, s3: Store, make: Make) -> None:
    """Neither is tried again, and neither message holds an address or a key."""
    record, content = elsewhere(tmp_path / "m", f"s3://{BUCKET}/guarded")
    await refused(make(record, permits=allowed(s3.place())), record, FetchFailed, "no such object")
    s3.put("guarded/model.safetensors", content)
    wrong = s3.place(keys={"access_key_id": "somebody", "secret_access_key": SECRET})
    await refused(make(record, permits=allowed(wrong)), record, FetchFailed, "refuses these credentials")
    nobody = s3.place(**ANONYMOUS)
    await refused(make(record, permits=allowed(nobody)), record, FetchFailed, "refuses these credentials")


@pytest.mark.real
async def test_an_object_replaced_in_the_middle_is_fetched_anew(tmp_path: Path, s3: Store, make: Make) -> None:
    """What was kept is of the old version; the store's tag says so before a byte of the two is mixed."""
    record, content = elsewhere(tmp_path / "m", f"s3://{BUCKET}/moving")
    s3.put("moving/model.safetensors", bytes(len(content)))
    place = make(record, permits=allowed(s3.place()))
    written = 0

    async def breaking(work: Any, /, *args: Any, **kwargs: Any) -> Any:
        nonlocal written
        if getattr(work, "__name__", "") == "write":
            written += 1
            if written == 6:
                raise FetchFailed("the network is gone")
        return await place.threads(work, *args, **kwargs)

    place.remote._offload = breaking
    with pytest.raises(FetchFailed, match="gone"):
        await place.host.load(model_of(record))
    place.remote._offload = place.threads
    assert place.partials
    s3.put("moving/model.safetensors", content)
    await place.host.load(model_of(record))
    assert place.host.path_of(model_of(record)).read_bytes() == content


@pytest.mark.real
async def test_a_spoiled_object_is_refused(tmp_path: Path, s3: Store, make: Make) -> None:
    """F16: one bit at the source."""
    record, content = elsewhere(tmp_path / "m", f"s3://{BUCKET}/spoiled")
    s3.put("spoiled/model.safetensors", content[:-1] + bytes([content[-1] ^ 1]))
    await refused(make(record, permits=allowed(s3.place())), record, CorruptWeights, "sha256")


# -- one that answers wrongly ------------------------------------------------------------------------


def shop(folder: Path, web: Web) -> tuple[Any, bytes, Permits]:
    record, content = elsewhere(folder / "m", "s3://shop/m")
    web.files["/shop/m/model.safetensors"] = content
    return record, content, allowed(ObjectPlace("s3://shop", web.url, auth="anonymous"))


async def test_a_store_that_ignores_ranges_is_read_whole(tmp_path: Path, web: Web, make: Make) -> None:
    """F23, in obstore's words."""
    record, content, permits = shop(tmp_path, web)

    def behave(exchange: Exchange) -> bool:
        exchange.ranged = False
        return False

    web.behave = behave
    place = make(record, permits=permits)
    await place.host.load(model_of(record))
    assert place.host.path_of(model_of(record)).read_bytes() == content


async def test_a_store_that_breaks_off_is_asked_again(tmp_path: Path, web: Web, make: Make) -> None:
    """Truncated bodies, errors of its own, and requests to slow down."""
    record, content, permits = shop(tmp_path, web)

    def behave(exchange: Exchange) -> bool:
        match exchange.number % 5:
            case 1:
                exchange.part(content, sent=exchange.start % 7 + 100)
            case 3:
                exchange.status(503)
            case 4:
                exchange.status(429)
            case _:
                return False
        return True

    web.behave = behave
    place = make(record, permits=permits, attempts=20)
    await place.host.load(model_of(record))
    assert place.host.path_of(model_of(record)).read_bytes() == content


async def test_a_store_that_replaces_the_object_is_noticed(tmp_path: Path, web: Web, make: Make) -> None:
    """412 on the condition that each request carries."""
    record, content, permits = shop(tmp_path, web)
    old = bytes(len(content))

    def behave(exchange: Exchange) -> bool:
        if exchange.number < 4:
            exchange.part(old)
            return True
        return False

    web.behave = behave
    place = make(record, permits=permits)
    await place.host.load(model_of(record))
    assert place.host.path_of(model_of(record)).read_bytes() == content
    assert any("if-match" in each.headers for each in web.asked)


@pytest.mark.parametrize(
    ("status", "says"), [(404, "no such object"), (403, "credentials"), (401, "credentials"), (503, "given up after 2")]
)
async def test_what_a_store_refuses_is_told(tmp_path: Path, web: Web, make: Make, status: int, says: str) -> None:
    """In our words, without its address."""
    record, _, permits = shop(tmp_path, web)
    web.behave = lambda exchange: exchange.status(status) is None
    await refused(make(record, permits=permits, attempts=2), record, FetchFailed, says)


async def test_a_silent_store_is_given_up(tmp_path: Path, web: Web, make: Make) -> None:
    """The watchdog counts bytes, whoever holds the connection."""
    record, content, permits = shop(tmp_path, web)

    def behave(exchange: Exchange) -> bool:
        if exchange.number:
            exchange.handler.send_response(206)
            exchange.handler.send_header("Content-Length", str(exchange.end - exchange.start))
            exchange.handler.send_header("Last-Modified", "Mon, 30 Nov 2026 04:00:00 GMT")
            exchange.handler.send_header("Content-Range", f"bytes {exchange.start}-{exchange.end - 1}/{len(content)}")
            exchange.handler.end_headers()
            web.done.wait(20)
        return bool(exchange.number)

    web.behave = behave
    await refused(make(record, permits=permits, stall=0.3, attempts=2), record, FetchFailed, "given up after 2")


async def test_a_store_that_is_not_there_is_told(tmp_path: Path, make: Make) -> None:
    """Nobody listens: so many tries within the connect limit."""
    record, _ = elsewhere(tmp_path / "m", "s3://shop/m")
    permits = allowed(ObjectPlace("s3://shop", "http://127.0.0.1:9", auth="anonymous"))
    await refused(make(record, permits=permits, attempts=2), record, FetchFailed, "cannot be connected")


async def test_a_bucket_that_is_not_listed_is_not_asked(tmp_path: Path, web: Web, make: Make) -> None:
    """Nor one whose name begins like a listed one."""
    record, _ = elsewhere(tmp_path / "m", "s3://shop2/m")
    permits = allowed(ObjectPlace("s3://shop", web.url, auth="anonymous"))
    await refused(make(record, permits=permits), record, FetchFailed, "not allowed")
    assert not web.asked


@pytest.mark.parametrize(
    "place",
    [
        ObjectPlace("gs://bucket", keys={"service_account_key": "s3cret nonsense"}),
        ObjectPlace("az://container", keys={"account_key": "s3cret nonsense"}),
        ObjectPlace("s3://bucket", keys={"no_such_option": "s3cret"}),
    ],
    ids=["gs", "az", "s3"],
)
def test_keys_that_cannot_work_are_told_at_the_start(place: ObjectPlace) -> None:
    """With the bucket's name, and without the value."""
    with pytest.raises(ConfigError, match=place.url) as caught:
        open_store(place, connect=1, stall=1, allow_http=False)
    assert "s3cret" not in str(caught.value)
    assert "s3cret" not in repr(place)


def azure(web: Web) -> ObjectPlace:
    """A container behind the test's server."""
    return ObjectPlace("az://shop", web.url, keys={"account_name": "somebody", "account_key": "c2VjcmV0"})


def google(web: Web) -> ObjectPlace:
    """A bucket behind it; the key file is where Google's own emulators say their address."""
    key = {"gcs_base_url": web.url, "disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""}
    return ObjectPlace("gs://shop", keys={"service_account_key": json.dumps(key)})


@pytest.mark.parametrize("kind", [azure, google], ids=["az", "gs"])
async def test_the_other_stores_are_read_like_the_first(
    tmp_path: Path, web: Web, make: Make, kind: Callable[[Web], ObjectPlace]
) -> None:
    """Their own protocols over the same ranges, conditions and faults."""
    place = kind(web)
    record, content = elsewhere(tmp_path / "m", f"{place.url}/m")
    web.files["/shop/m/model.safetensors"] = content

    def behave(exchange: Exchange) -> bool:
        if exchange.number % 5 == 2:
            exchange.part(content, sent=500)
            return True
        return False

    web.behave = behave
    held = make(record, permits=allowed(place))
    assert (await held.host.load(model_of(record))).source is Tier.REMOTE
    assert held.host.path_of(model_of(record)).read_bytes() == content
    assert len(web.ranges) > len(content) // CHUNK
    assert "c2VjcmV0" not in repr(held.remote)


def test_every_kind_of_store_can_be_opened() -> None:
    """With keys of the right form nothing is asked of anybody until something is read."""
    account = {"account_name": "somebody", "account_key": "c2VjcmV0"}
    for place in (
        ObjectPlace("gs://bucket", auth="anonymous"),
        ObjectPlace("az://container", keys=account),
        ObjectPlace("s3://bucket", region="eu-central-1", keys={"access_key_id": "a", "secret_access_key": "b"}),
    ):
        open_store(place, connect=1, stall=1, allow_http=False)
