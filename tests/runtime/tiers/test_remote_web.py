"""Promises of the remote tier over the web: whatever the server does, nothing unproven is served or published."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from actors import events as e
from actors.errors import CorruptWeights, DiskFull, FetchFailed
from actors.residency.model import Tier
from runtime.tiers.sources import Permits
from tests.runtime.tiers.places import CHUNK, elsewhere, model_of
from tests.runtime.tiers.web import Exchange, Web, etag, serving

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.runtime.tiers.places import Place

    Make = Callable[..., Place]


def shop(folder: Path, web: Web, name: str = "m", **changes: Any) -> tuple[Any, bytes]:
    """A model whose weights the server has."""
    record, content = elsewhere(folder / name, f"{web.url}/{name}", **changes)
    web.files[f"/{name}/model.safetensors"] = content
    return record, content


async def refused(place: Place, record: Any, kind: type[Exception], match: str) -> None:
    """A load that fails so, holds nothing and published nothing."""
    with pytest.raises(kind, match=match) as caught:
        await place.host.load(model_of(record))
    assert "127.0.0.1" not in str(caught.value)
    assert place.idle()
    assert not place.blobs


async def test_a_model_is_fetched_once_and_served_from_disk_after_that(tmp_path: Path, web: Web, make: Make) -> None:
    """The first load says `remote` and its fetch; after an eviction, or a restart, the second asks nobody."""
    record, content = shop(tmp_path, web)
    place = make(record)
    assert place.remote.far(record)
    report = await place.host.load(model_of(record))
    assert (report.source, report.resident) == (Tier.REMOTE, len(content))
    assert [name for name, _ in report.steps] == ["fetch", "admit", "map", "populate"]
    assert place.host.path_of(model_of(record)).read_bytes() == content
    assert not place.partials
    assert not place.remote.far(record)
    asked = len(web.asked)
    assert asked == -(-len(content) // CHUNK)
    await place.host.evict(record.key)
    assert place.idle()
    assert (await place.host.load(model_of(record))).source is Tier.DISK
    again = make(record)
    assert not again.remote.far(record)
    assert (await again.host.load(model_of(record))).source is Tier.DISK
    assert len(web.asked) == asked
    await place.host.evict(record.key)


async def test_what_is_fetched_is_stated(tmp_path: Path, web: Web, make: Make) -> None:
    """One start, one end with the bytes, no address and no secret in any fact."""
    record, content = shop(tmp_path, web)
    permits = Permits(hosts={"127.0.0.1": "s3cret-token"}, allow_http=True)
    place = make(record, permits=permits)
    await place.host.load(model_of(record))
    started, finished = place.facts
    assert isinstance(started, e.FetchStarted)
    assert (started.model, started.scheme, started.total) == (record.key, "http", len(content))
    assert isinstance(finished, e.FetchFinished)
    assert (finished.outcome, finished.fetched) == ("ok", len(content))
    assert web.asked[0].headers["authorization"] == "Bearer s3cret-token"
    assert "s3cret" not in repr((place.facts, permits, place.remote, record))
    assert str(web.port) not in repr(place.facts)


async def test_requests_overlap_and_stay_within_their_limit(tmp_path: Path, web: Web, make: Make) -> None:
    """Four at a time are under way, never more."""
    record, _ = shop(tmp_path, web)
    now, most = 0, 0
    together = asyncio.Event()
    loop = asyncio.get_running_loop()

    def behave(exchange: Exchange) -> bool:
        nonlocal now, most
        now += 1
        most = max(most, now)
        if now >= 4:
            loop.call_soon_threadsafe(together.set)
        elif exchange.number:
            asyncio.run_coroutine_threadsafe(asyncio.wait_for(together.wait(), 10), loop).result()
        now -= 1
        return False

    web.behave = behave
    place = make(record)
    await place.host.load(model_of(record))
    assert most == 4


# -- what servers do wrong ---------------------------------------------------------------------------


async def test_a_connection_that_breaks_is_made_again_where_it_broke(tmp_path: Path, web: Web, make: Make) -> None:
    """Truncated answers cost a request each; the bytes that came are not asked for twice."""
    record, content = shop(tmp_path, web)

    def behave(exchange: Exchange) -> bool:
        if exchange.number % 3 == 1:
            exchange.part(content, sent=1000)
            return True
        return False

    web.behave = behave
    place = make(record)
    await place.host.load(model_of(record))
    assert place.host.path_of(model_of(record)).read_bytes() == content
    assert any(start % CHUNK == 1000 for start, _ in web.ranges)


async def test_a_file_that_is_always_cut_off_is_given_up(tmp_path: Path, web: Web, make: Make) -> None:
    """Half-copied at the source: so many tries, then an error; nothing is published."""
    record, content = shop(tmp_path, web)
    web.behave = lambda exchange: exchange.part(content, sent=0) is None
    place = make(record, attempts=3)
    await refused(place, record, FetchFailed, "given up after 3 tries")
    assert len(web.asked) == 3
    assert [each.outcome for each in place.told(e.FetchFinished)] == ["fetch_failed"]


@pytest.mark.parametrize("status", [429, 500, 502, 503])
async def test_a_busy_server_is_asked_again(tmp_path: Path, web: Web, make: Make, status: int) -> None:
    """Faults that pass are no failures."""
    record, _ = shop(tmp_path, web)

    def behave(exchange: Exchange) -> bool:
        if exchange.number < 3:
            exchange.status(status)
            return True
        return False

    web.behave = behave
    place = make(record)
    await place.host.load(model_of(record))


@pytest.mark.parametrize(
    ("status", "says"), [(404, "no such file"), (403, "credentials"), (401, "credentials"), (418, "418")]
)
async def test_what_will_not_pass_is_not_tried_again(
    tmp_path: Path, web: Web, make: Make, status: int, says: str
) -> None:
    """One request, one answer."""
    record, _ = shop(tmp_path, web)
    web.behave = lambda exchange: exchange.status(status) is None
    await refused(make(record), record, FetchFailed, says)
    assert len(web.asked) == 1


async def test_a_flipped_bit_is_found_and_nothing_of_it_is_kept(tmp_path: Path, web: Web, make: Make) -> None:
    """F16, R39: right size, wrong bytes: refused with both hashes; mended, the next load fetches all of it anew."""
    record, content = shop(tmp_path, web)
    wrong = bytearray(content)
    wrong[len(wrong) // 2] ^= 1
    web.files["/m/model.safetensors"] = bytes(wrong)
    place = make(record)
    await refused(place, record, CorruptWeights, "sha256")
    assert not place.partials
    web.files["/m/model.safetensors"] = content
    assert (await place.host.load(model_of(record))).source is Tier.REMOTE


async def test_a_file_replaced_between_ranges_is_fetched_anew(tmp_path: Path, web: Web, make: Make) -> None:
    """No mixture of two versions: the tag changes after the fourth request, and the pull begins again."""
    record, content = shop(tmp_path, web)
    old = bytes(len(content))

    def behave(exchange: Exchange) -> bool:
        if exchange.number < 4:
            exchange.part(old)
            return True
        return False

    web.behave = behave
    place = make(record)
    await place.host.load(model_of(record))
    assert place.host.path_of(model_of(record)).read_bytes() == content


async def test_a_file_that_never_stays_the_same_is_given_up(tmp_path: Path, web: Web, make: Make) -> None:
    """Every answer of another version: an error, and no endless loop."""
    record, content = shop(tmp_path, web)
    web.behave = lambda exchange: exchange.part(content, tag=f'"{exchange.number}"') is None
    await refused(make(record), record, FetchFailed, "keeps changing")


async def test_a_server_that_ignores_ranges_is_read_from_the_first_byte(tmp_path: Path, web: Web, make: Make) -> None:
    """F23: 200 instead of 206: the whole file once, never appended to what is there."""
    record, content = shop(tmp_path, web)

    def behave(exchange: Exchange) -> bool:
        exchange.ranged = False
        return False

    web.behave = behave
    place = make(record)
    await place.host.load(model_of(record))
    assert place.host.path_of(model_of(record)).read_bytes() == content
    assert len(web.asked) == 2


async def test_a_server_that_begins_to_ignore_ranges_makes_no_mixture(tmp_path: Path, web: Web, make: Make) -> None:
    """F23, R39: the third answer is the whole file: the pull starts from 0."""
    record, content = shop(tmp_path, web)

    def behave(exchange: Exchange) -> bool:
        exchange.ranged = exchange.ranged and exchange.number < 2
        return False

    web.behave = behave
    place = make(record)
    await place.host.load(model_of(record))
    assert place.host.path_of(model_of(record)).read_bytes() == content


async def test_whole_answers_that_break_begin_anew(tmp_path: Path, web: Web, make: Make) -> None:
    """Without ranges there is no going on in the middle."""
    record, content = shop(tmp_path, web)

    def behave(exchange: Exchange) -> bool:
        exchange.ranged = False
        if exchange.number < 3:
            exchange.part(content, sent=3 * CHUNK)
            return True
        return False

    web.behave = behave
    place = make(record)
    await place.host.load(model_of(record))
    assert place.host.path_of(model_of(record)).read_bytes() == content


@pytest.mark.parametrize("more", [-4, 4])
async def test_a_file_of_another_length_is_refused(tmp_path: Path, web: Web, make: Make, more: int) -> None:
    """Longer or shorter than the manifest says: told with both numbers, after one request."""
    record, content = shop(tmp_path, web)
    web.files["/m/model.safetensors"] = content[:more] if more < 0 else content + bytes(more)
    await refused(
        make(record), record, CorruptWeights, f"{len(content) + more} bytes, the manifest says {len(content)}"
    )


async def test_a_whole_answer_that_is_too_long_stops_at_the_size(tmp_path: Path, web: Web, make: Make) -> None:
    """No Content-Length and no end: refused at the first byte too many, however much would come."""
    record, content = shop(tmp_path, web)

    def behave(exchange: Exchange) -> bool:
        exchange.handler.send_response(200)
        exchange.handler.send_header("Transfer-Encoding", "chunked")
        exchange.handler.end_headers()
        while not web.done.is_set():
            exchange.handler.wfile.write(b"10000\r\n" + bytes(0x10000) + b"\r\n")
        return True

    web.behave = behave
    await refused(make(record), record, CorruptWeights, f"more than the manifest's {len(content)}")


async def test_an_answer_of_another_range_is_never_used(tmp_path: Path, web: Web, make: Make) -> None:
    """Right length, wrong place: asked again, then given up."""
    record, content = shop(tmp_path, web)

    def behave(exchange: Exchange) -> bool:
        headers = {"Content-Range": f"bytes 5-{CHUNK + 4}/{len(content)}", "ETag": etag(content)}
        exchange.status(206, headers, content[5 : CHUNK + 5])
        return True

    web.behave = behave
    await refused(make(record, attempts=2), record, FetchFailed, "another range")


async def test_an_encoding_nobody_asked_for_is_refused(tmp_path: Path, web: Web, make: Make) -> None:
    """A gzip body would be hashed and stored as it is; and a bomb is never unpacked."""
    record, content = shop(tmp_path, web)
    headers = {"Content-Encoding": "gzip", "Content-Range": f"bytes 0-{CHUNK - 1}/{len(content)}"}
    web.behave = lambda exchange: exchange.status(206, headers, content[:CHUNK]) is None
    await refused(make(record), record, FetchFailed, "encoding")


async def test_a_silent_server_is_given_up_after_the_stall_limit(tmp_path: Path, web: Web, make: Make) -> None:
    """Headers and then nothing: each try costs the limit, and the load fails."""
    record, content = shop(tmp_path, web)

    def behave(exchange: Exchange) -> bool:
        exchange.handler.send_response(206)
        exchange.handler.send_header("Content-Length", str(exchange.end - exchange.start))
        exchange.handler.send_header("Content-Range", f"bytes {exchange.start}-{exchange.end - 1}/{len(content)}")
        exchange.handler.end_headers()
        exchange.handler.wfile.write(content[exchange.start :][:10])
        web.done.wait(20)
        return True

    web.behave = behave
    await refused(make(record, stall=0.2, attempts=2), record, FetchFailed, "nothing")
    assert len(web.asked) == 2


async def test_a_server_that_never_answers_is_given_up_too(tmp_path: Path, web: Web, make: Make) -> None:
    """Connected, asked, and no status line."""
    record, _ = shop(tmp_path, web)
    web.behave = lambda _: web.done.wait(20)
    await refused(make(record, stall=0.2, attempts=2), record, FetchFailed, r"sends nothing|did not answer")


async def test_a_page_of_html_is_no_checkpoint(tmp_path: Path, web: Web, make: Make) -> None:
    """F14: right size and hash by the manifest, and still nothing that can be served."""
    page = b"<!DOCTYPE html><html>404</html>"
    record, _ = shop(tmp_path, web)
    import hashlib

    row = record.manifest.files[0].model_copy(update={"size": len(page), "sha256": hashlib.sha256(page).hexdigest()})
    from dataclasses import replace

    record = replace(record, manifest=record.manifest.model_copy(update={"files": (row,)}), weights_bytes=len(page))
    web.files["/m/model.safetensors"] = page
    await refused(make(record), record, CorruptWeights, "html")


# -- where requests may go ---------------------------------------------------------------------------


async def test_a_redirect_to_an_allowed_host_goes_without_the_token(tmp_path: Path, web: Web, make: Make) -> None:
    """S4: the bytes come from the other host; the credential does not go there."""
    record, content = shop(tmp_path, web)
    with serving() as other:
        other.files["/blob"] = content
        web.behave = lambda exchange: exchange.status(302, {"Location": f"{other.url}/blob?signature=abc"}) is None
        place = make(record, permits=Permits(hosts={"127.0.0.1": "s3cret"}, allow_http=True))
        await place.host.load(model_of(record))
        assert all("authorization" in each.headers for each in web.asked)
        assert not any("authorization" in each.headers for each in other.asked)
        await place.host.evict(record.key)


@pytest.mark.parametrize(
    ("location", "says"),
    [
        ("http://localhost:{port}/m/model.safetensors", "not among remote.hosts"),
        ("http://169.254.169.254/latest/meta-data", "not among remote.hosts"),
        ("http://ok@127.0.0.1:{port}/m/model.safetensors", "not allowed"),
        ("file:///etc/passwd", "not allowed"),
        ("//evil.example.org/x", "not among remote.hosts"),
        ("http://[::1]:{port}/m", "not among remote.hosts"),
        ("", "more than 3 times"),
        ("http://[bad/", "cannot be read"),
    ],
)
async def test_a_redirect_off_the_list_is_refused(
    tmp_path: Path, web: Web, make: Make, location: str, says: str
) -> None:
    """F21: every hop is checked; nothing is sent to where it points."""
    record, _ = shop(tmp_path, web)
    target = location.format(port=web.port)
    web.behave = lambda exchange: exchange.status(302, {"Location": target}) is None
    await refused(make(record), record, FetchFailed, says)
    assert len(web.asked) == (4 if not location else 1)


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "10.0.0.1", "169.254.169.254", "::1", "::ffff:127.0.0.1", "fe80::1", "0.0.0.0", "224.0.0.1"],
)
async def test_a_name_that_leads_inside_is_refused(tmp_path: Path, web: Web, make: Make, address: str) -> None:
    """F21: an allowed name may not lead to addresses beyond the public internet, nor may one of several."""
    import ipaddress

    record, _ = shop(tmp_path, web)
    record, _ = elsewhere(tmp_path / "named", f"http://models.example.org:{web.port}/m")
    place = make(record, permits=Permits(hosts={"models.example.org": ""}, allow_http=True))

    async def resolve(host: str, port: int) -> list[Any]:
        return [ipaddress.ip_address("93.184.216.34"), ipaddress.ip_address(address)]

    assert place.remote._web is not None
    place.remote._web._resolve = resolve
    await refused(place, record, FetchFailed, "outside the public internet")
    assert not web.asked


async def test_the_address_that_was_checked_is_the_one_connected_to(tmp_path: Path, web: Web, make: Make) -> None:
    """F21: the name is resolved once per request; its Host header stays, and no second look-up can change the way."""
    import ipaddress

    record, content = elsewhere(tmp_path / "named", f"http://models.example.org:{web.port}/m")
    web.files["/m/model.safetensors"] = content
    networks = (ipaddress.ip_network("127.0.0.0/8"),)
    permits = Permits(hosts={"*.example.org": ""}, networks=networks, allow_http=True)
    place = make(record, permits=permits)
    asked: list[str] = []

    async def resolve(host: str, port: int) -> list[Any]:
        asked.append(host)
        return [ipaddress.ip_address("127.0.0.1")]

    assert place.remote._web is not None
    place.remote._web._resolve = resolve
    await place.host.load(model_of(record))
    assert set(asked) == {"models.example.org"}
    assert web.asked[0].headers["host"] == f"models.example.org:{web.port}"


@pytest.mark.parametrize(
    "permits",
    [
        Permits(allow_http=True),
        Permits(hosts={"models.example.org": ""}, allow_http=True),
        Permits(hosts={"127.0.0.1": ""}),
    ],
    ids=["no host", "another host", "no http"],
)
async def test_what_is_not_allowed_is_not_asked(tmp_path: Path, web: Web, make: Make, permits: Permits) -> None:
    """Deny by default, also for a record that got past the catalogue."""
    record, _ = shop(tmp_path, web)
    await refused(make(record, permits=permits), record, FetchFailed, "not allowed")
    assert not web.asked


# -- our own side ------------------------------------------------------------------------------------


async def test_a_quota_without_room_is_told_before_a_byte_is_asked_for(tmp_path: Path, web: Web, make: Make) -> None:
    """F22: 507 with numbers, and no request."""
    record, content = shop(tmp_path, web)
    place = make(record, quota=len(content) - 1)
    await refused(place, record, DiskFull, "quota")
    assert not web.asked


async def test_concurrent_pulls_of_the_same_bytes_are_one(tmp_path: Path, web: Web, make: Make) -> None:
    """Two names, two stores on one folder, the same file: fetched once, by whoever was first."""
    one, content = shop(tmp_path, web, "one")
    two, _ = elsewhere(tmp_path / "two", f"{web.url}/one", name="two")
    first, second = make(one, two), make(one, two)
    await asyncio.gather(*(place.host.load(model_of(each)) for place in (first, second) for each in (one, two)))
    assert len(web.asked) == -(-len(content) // CHUNK)
    for place in (first, second):
        for each in (one, two):
            await place.host.evict(each.key)
        assert place.idle()
    assert len(first.blobs) == 1


async def test_a_cancelled_pull_goes_on_where_it_was(tmp_path: Path, web: Web, make: Make) -> None:
    """A prefetch that makes way loses nothing: whole chunks stay, only the rest is asked for afterwards."""
    record, content = shop(tmp_path, web)
    reached = asyncio.Event()
    loop = asyncio.get_running_loop()

    def behave(exchange: Exchange) -> bool:
        if exchange.start >= 8 * CHUNK:
            loop.call_soon_threadsafe(reached.set)
            web.done.wait(20)
            return True
        return False

    web.behave = behave
    place = make(record)
    task = asyncio.create_task(place.host.load(model_of(record)))
    await reached.wait()
    assert place.partials
    assert place.remote.moved(record.key)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert place.idle()
    assert not place.blobs
    assert place.remote.moved(record.key) is None
    assert [each.outcome for each in place.told(e.FetchFinished)] == ["cancelled"]
    web.done.set()
    web.behave = lambda _: False
    web.asked.clear()
    await place.host.load(model_of(record))
    assert place.host.path_of(model_of(record)).read_bytes() == content
    assert min(start for start, _ in web.ranges) >= 4 * CHUNK


async def test_a_partial_that_rotted_is_believed_as_far_as_it_is_sound(tmp_path: Path, web: Web, make: Make) -> None:
    """A torn write in the middle of what a former life left: fetched again from there on, and the whole is right."""
    record, content = shop(tmp_path, web)
    web.behave = lambda exchange: exchange.start >= 10 * CHUNK and exchange.status(404) is None
    place = make(record)
    with pytest.raises(FetchFailed):
        await place.host.load(model_of(record))
    (partial,) = place.partials
    with partial.open("r+b") as file:
        file.seek(3 * CHUNK + 17)
        file.write(b"\xff\xfe\xfd")
    web.behave = lambda _: False
    web.asked.clear()
    await place.host.load(model_of(record))
    assert place.host.path_of(model_of(record)).read_bytes() == content
    assert min(web.ranges)[0] == 3 * CHUNK


NONSENSE = (
    b"",
    b"nonsense\n",
    b"[]\n",
    b"[" * 100_000 + b"\n",
    b'{"end": 65536',
    b'{"end": 9223372036854775807, "tag": "", "sum": ""}\n',
    b'{"end": -5, "tag": "", "sum": "x"}\n',
    b'{"end": "a", "tag": "", "sum": "x"}\n',
    b'{"end": 65536, "tag": 7, "sum": "x"}\n',
    b'{"end": true, "tag": "", "sum": null}\n',
)


@pytest.mark.parametrize("spoil", NONSENSE)
async def test_a_journal_of_nonsense_proves_nothing(tmp_path: Path, web: Web, make: Make, spoil: bytes) -> None:
    """Whatever stands in it, the file that is served has the right hash."""
    record, content = shop(tmp_path, web)
    place = make(record)
    folder = place.folder / "partial"
    sha256 = record.manifest.weights_row.sha256
    (folder / sha256).write_bytes(bytes(len(content)))
    (folder / f"{sha256}.journal").write_bytes(spoil)
    await place.host.load(model_of(record))
    assert place.host.path_of(model_of(record)).read_bytes() == content


async def test_a_source_that_changed_since_then_is_fetched_anew(tmp_path: Path, web: Web, make: Make) -> None:
    """What was kept is of a version that is gone: its tag says so."""
    record, content = shop(tmp_path, web)

    def behave(exchange: Exchange) -> bool:
        if exchange.start >= 5 * CHUNK:
            exchange.status(404)
        else:
            exchange.part(content, tag='"older"')
        return True

    web.behave = behave
    place = make(record)
    with pytest.raises(FetchFailed):
        await place.host.load(model_of(record))
    web.behave = lambda _: False
    web.asked.clear()
    await place.host.load(model_of(record))
    assert place.host.path_of(model_of(record)).read_bytes() == content
    assert (0, CHUNK) in web.ranges
