"""The inference endpoint over ASGI: lengths, wishes, codings, pace, lost clients, answers."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from typing import TYPE_CHECKING, Any

import pytest

from actors.errors import Busy, Draining, StillLoading
from runtime.http.body import preferred
from runtime.http.limits import Limits
from tests.runtime.http.fake import HOST, Client, FakeBackend, front, post, tensor

if TYPE_CHECKING:
    from runtime.http.incident import Incident

PATH = "/v2/models/echo/infer"
PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


async def test_a_hit_is_answered_with_the_backends_bytes():
    """The body goes in and out as it is; a hit carries no cold-start headers."""
    backend = FakeBackend()
    reply = await post(front(backend), PATH, tensor(1, 2), x_request_id="job-7", traceparent=PARENT, tracestate="v=1")
    assert reply.status == 200
    assert reply.json()["outputs"][0]["data"] == [1, 2]
    assert reply.headers["content-type"] == "application/json"
    assert reply.headers["content-length"] == str(len(reply.body))
    assert reply.headers["x-request-id"] == "job-7"
    assert reply.headers["foreload-trace-id"] == PARENT[3:35]
    assert not {"server-timing", "foreload-cold-start", "connection", "content-encoding"} & set(reply.headers)
    (asked,) = backend.asked
    assert (asked.name, asked.version, asked.body) == ("echo", None, tensor(1, 2))
    assert (asked.json_length, asked.timeout, asked.priority) == (None, None, 0)
    assert (asked.request_id, asked.traceparent, asked.tracestate) == ("job-7", PARENT, "v=1")


async def test_without_identifiers_the_request_id_is_the_trace_id():
    """A request without `traceparent` starts its own trace, and both sides derive the same id."""
    backend = FakeBackend()
    reply = await post(front(backend), PATH, tensor(1), tracestate="v=1")
    assert backend.asked[0].traceparent == ""
    assert backend.asked[0].tracestate == ""
    assert reply.headers["x-request-id"] == backend.asked[0].request_id == reply.headers["foreload-trace-id"]


async def test_a_hit_starts_no_task():
    """Hot path rule 10: watching for a lost client costs a hit nothing but a timer."""
    started: list[object] = []
    loop = asyncio.get_running_loop()

    def count(owner: asyncio.AbstractEventLoop, work: Any, **rest: Any) -> asyncio.Task[Any]:
        started.append(work)
        return asyncio.Task(work, loop=owner, **rest)

    loop.set_task_factory(count)
    try:
        await post(front(FakeBackend()), PATH, tensor(1))
    finally:
        loop.set_task_factory(None)
    assert started == []


async def test_a_version_in_the_path_is_passed_on():
    """Protocol, section 1: versioned paths are served."""
    backend = FakeBackend()
    reply = await post(front(backend), "/v2/models/echo/versions/1/infer", tensor(1))
    assert reply.json()["model_version"] == "1"
    assert backend.asked[0].version == "1"


async def test_a_body_in_parts_is_joined_once():
    """Chunks arrive in order and complete."""
    body = tensor(1, 2, 3)
    reply = await post(front(FakeBackend()), PATH, [body[:5], b"", body[5:9], body[9:]])
    assert reply.json()["outputs"][0]["data"] == [1, 2, 3]


@pytest.mark.parametrize("coding", ["gzip", "x-gzip", "GZIP", "deflate", "identity", ""])
async def test_compressed_requests_work(coding: str):
    """P7: gzip and deflate (zlib framing) are understood, the backend sees plain bytes."""
    body = tensor(*range(20))
    wire = gzip.compress(body) if "gzip" in coding.lower() else zlib.compress(body) if coding == "deflate" else body
    backend = FakeBackend()
    reply = await post(front(backend), PATH, wire, content_encoding=coding)
    assert reply.status == 200
    assert backend.asked[0].body == body


@pytest.mark.parametrize("coding", ["zstd", "br", "gzip, deflate", "gzip,gzip", "chunked", "é"])
async def test_other_codings_are_refused(coding: str):
    """F27: any other content encoding is 415."""
    reply = await post(front(FakeBackend()), PATH, b"x", content_encoding=coding)
    assert reply.status == 415


@pytest.mark.parametrize(
    "wire",
    [
        b"",
        b"junk",
        gzip.compress(b"{}")[:-3],
        gzip.compress(b"{}") + b"x",
        gzip.compress(b"{}") * 2,
        zlib.compress(b"{}"),
    ],
)
async def test_bytes_that_are_not_gzip_are_refused(wire: bytes):
    """Truncated, trailing and foreign bytes are 400, never 500."""
    reply = await post(front(FakeBackend()), PATH, wire, content_encoding="gzip")
    assert reply.status == 400
    assert reply.json()["code"] == "bad_request"


@pytest.mark.parametrize("zeros", [1 << 20, 1 << 26])
async def test_a_bomb_stops_at_the_limit(zeros: int):
    """F27: what a request grows to is bounded like what it is; the answer is 413."""
    backend = FakeBackend()
    app = front(backend, Limits(body=1 << 19))
    reply = await post(app, PATH, gzip.compress(bytes(zeros)), content_encoding="gzip")
    assert reply.status == 413
    assert reply.json()["detail"] == {"limit": 1 << 19}
    assert backend.asked == []


async def test_a_large_compressed_body_passes_through_a_thread():
    """Bodies that are too large to inflate inline arrive the same."""
    body = tensor(1) + b" " * (1 << 20)
    backend = FakeBackend()
    assert (await post(front(backend), PATH, gzip.compress(body), content_encoding="gzip")).status == 200
    assert backend.asked[0].body == body


async def test_a_declared_length_over_the_limit_is_refused_unread():
    """F25: Content-Length decides before a byte is read."""
    client = Client(front(FakeBackend(), Limits(body=10)), [b"never"])
    reply = await client.ask("POST", PATH, [HOST, (b"content-length", b"11")])
    assert reply is not None
    assert (reply.status, client.read) == (413, 0)


@pytest.mark.parametrize("length", ["-1", "1e3", "", "0x10", "1 2"])
async def test_a_length_that_is_no_number_is_refused(length: str):
    """A server that lets such a header through must not cause a 500 here."""
    assert (await post(front(FakeBackend()), PATH, b"", content_length=length)).status == 400


async def test_an_undeclared_body_over_the_limit_is_refused_as_it_comes():
    """F25: a chunked body is cut off at the limit, the rest is never read."""
    client = Client(front(FakeBackend(), Limits(body=10)), [b"12345"] * 100)
    reply = await client.ask("POST", PATH, [HOST])
    assert reply is not None
    assert (reply.status, client.read) == (413, 3)


async def test_too_many_parts_are_refused():
    """F26: many tiny parts end at the chunk cap."""
    client = Client(front(FakeBackend(), Limits(chunks=5)), [b"1"] * 100)
    reply = await client.ask("POST", PATH, [HOST])
    assert reply is not None
    assert (reply.status, client.read) == (413, 6)


async def test_a_body_that_stands_still_is_refused():
    """F32: 408 once nothing came for `body_idle`."""
    client = Client(front(FakeBackend(), Limits(body_idle=0.01)), [b"{"], stalls=True)
    reply = await client.ask("POST", PATH, [HOST])
    assert reply is not None
    assert (reply.status, reply.json()["code"]) == (408, "too_slow")


async def test_an_unread_body_behind_100_continue_closes_the_connection():
    """The client may send the body or not, so nothing sound can follow on that connection."""
    client = Client(front(FakeBackend(), Limits(body=10)), [b""])
    reply = await client.ask("POST", PATH, [HOST, (b"content-length", b"11"), (b"expect", b"100-continue")])
    assert reply is not None
    assert reply.headers["connection"] == "close"


@pytest.mark.parametrize("value", ["-1", "x", "", "1.0", "+1", "0x1", "99999", "9" * 5000, "1 ", "\u0661"])
async def test_a_header_length_that_cannot_be_is_refused(value: str):
    """F30: negative, no number, more than the body: 400 naming the header."""
    header = value.encode("utf-8").decode("latin-1")
    reply = await post(front(FakeBackend()), PATH, tensor(1), inference_header_content_length=header)
    assert reply.status == 400
    assert "inference-header-content-length" in reply.json()["error"]


async def test_binary_requests_and_answers_carry_the_length_of_their_json():
    """Protocol, section 4: header in, header out, octet-stream."""
    given = {"name": "x", "datatype": "FP32", "shape": [2], "parameters": {"binary_data_size": 8}}
    head = json.dumps({"inputs": [given], "parameters": {"binary_data_output": True}}).encode()
    backend = FakeBackend()
    reply = await post(front(backend), PATH, head + bytes(8), inference_header_content_length=str(len(head)))
    assert backend.asked[0].json_length == len(head)
    assert reply.headers["content-type"] == "application/octet-stream"
    length = int(reply.headers["inference-header-content-length"])
    assert json.loads(reply.body[:length])["outputs"][0]["parameters"] == {"binary_data_size": 8}
    assert reply.body[length:] == bytes(8)


async def test_a_raw_binary_request_has_a_json_part_of_nothing():
    """Protocol, section 4: length 0 means that the body is one tensor, and no word in it is read as a wish."""
    backend = FakeBackend()
    await post(front(backend), PATH, b'"timeout"', inference_header_content_length="0")
    assert (backend.asked[0].json_length, backend.asked[0].timeout) == (0, None)


@pytest.mark.parametrize(
    ("headers", "parameters", "seconds", "priority"),
    [
        ({}, {"timeout": 1_500_000, "priority": 3}, 1.5, 3),
        ({}, {"timeout": 0, "priority": 0}, None, 0),
        ({"foreload_timeout": "2s"}, {}, 2.0, 0),
        ({"foreload_timeout": "500ms", "foreload_priority": "7"}, {}, 0.5, 7),
        ({"foreload_timeout": "1.5"}, {}, 1.5, 0),
        ({"foreload_timeout": "2m"}, {}, 120.0, 0),
        ({"foreload_timeout": "2s"}, {"timeout": 1_000_000}, 1.0, 0),
        ({"foreload_timeout": "1s"}, {"timeout": 2_000_000}, 1.0, 0),
        ({"foreload_priority": "7"}, {"priority": 2}, 0.0, 2),
    ],
)
async def test_deadline_and_priority_come_from_parameters_and_headers(
    headers: dict[str, str], parameters: dict[str, object], seconds: float | None, priority: int
):
    """Microseconds in the V2 parameter, a duration in the header; the tighter deadline counts."""
    backend = FakeBackend()
    assert (await post(front(backend), PATH, tensor(1, **parameters), **headers)).status == 200
    assert backend.asked[0].timeout == (seconds or None)
    assert backend.asked[0].priority == priority


async def test_a_tensor_may_be_called_timeout():
    """Only request-level parameters are wishes."""
    body = json.dumps({"inputs": [{"name": "timeout", "datatype": "FP32", "shape": [1], "data": [1]}]}).encode()
    backend = FakeBackend()
    assert (await post(front(backend), PATH, body)).status == 200
    assert backend.asked[0].timeout is None


@pytest.mark.parametrize(
    "body",
    [
        b'{"parameters":{"timeout":"5"}}',
        b'{"parameters":{"timeout":true}}',
        b'{"parameters":{"timeout":-1}}',
        b'{"parameters":{"timeout":1.5}}',
        b'{"parameters":{"timeout":null}}',
        b'{"parameters":{"timeout":NaN}}',
        b'{"parameters":{"timeout":1e999}}',
        b'{"parameters":{"timeout":' + b"9" * 5000 + b"}}",
        b'{"parameters":{"priority":-1}}',
        b'{"parameters":{"priority":[1]}}',
        b'{"parameters":["timeout"]}',
        b'["timeout"]',
        b'{"timeout"',
        b'{"priority":1, "x":' + b"[" * 100_000,
        b'{"\xff":"timeout", "timeout"',
    ],
)
async def test_a_wish_of_the_wrong_type_is_refused(body: bytes):
    """F28: 400, never 500 or RecursionError."""
    backend = FakeBackend()
    reply = await post(front(backend), PATH, body)
    assert (reply.status, backend.asked) == (400, [])


@pytest.mark.parametrize("value", ["", "0", "-1s", "1d", "s", "1e9", "9" * 40, "1 s", "nan", "inf"])
async def test_a_deadline_header_that_is_no_time_is_refused(value: str):
    """400, and the message names the header."""
    reply = await post(front(FakeBackend()), PATH, tensor(1), foreload_timeout=value)
    assert reply.status == 400
    assert "foreload-timeout" in reply.json()["error"]


@pytest.mark.parametrize("value", ["", "-1", "high", "1.5", "9" * 40, "4294967296"])
async def test_a_priority_header_that_is_no_priority_is_refused(value: str):
    """400, and the message names the header."""
    reply = await post(front(FakeBackend()), PATH, tensor(1), foreload_priority=value)
    assert reply.status == 400
    assert "foreload-priority" in reply.json()["error"]


async def test_a_cold_answer_says_what_it_waited_for():
    """Design, section 8: tier, wait and phases of an answer that was no hit."""
    reply = await post(front(FakeBackend(result="miss")), "/v2/models/cold/infer", tensor(1))
    assert reply.headers["foreload-cold-start"] == "disk;wait=250"
    assert reply.headers["server-timing"].startswith("load;dur=250.000, queue;dur=0.001, decode;dur=0.002")


@pytest.mark.parametrize("result", ["hit", "prefetch_hit"])
async def test_a_prefetched_answer_is_not_cold(result: str):
    """A prefetch that was used is the product at work, not a cold start."""
    reply = await post(front(FakeBackend(result=result)), PATH, tensor(1))
    assert "foreload-cold-start" not in reply.headers


@pytest.mark.parametrize(
    ("accept", "coding"),
    [
        (b"gzip", b"gzip"),
        (b"deflate", b"deflate"),
        (b"deflate, gzip", b"gzip"),
        (b"deflate, gzip;q=0.5", b"deflate"),
        (b"gzip;q=0, deflate", b"deflate"),
        (b"gzip;q=0", None),
        (b"GZIP ; q=1.0", b"gzip"),
        (b"gzip;q=x", None),
        (b"br, zstd", None),
        (b"*", None),
        (b"", None),
        (b"identity", None),
    ],
)
def test_the_answers_coding_follows_the_weights(accept: bytes, coding: bytes | None):
    """Only what the client names, never what it forbids."""
    assert preferred(accept) == coding


async def test_a_large_answer_is_compressed_when_the_client_asks():
    """Above 1 KiB and only then; the body decodes to what it would have been."""
    app = front(FakeBackend())
    plain = await post(app, PATH, tensor(*range(2000)))
    small = await post(app, PATH, tensor(*range(2000)), accept_encoding="gzip")
    assert small.headers["content-encoding"] == "gzip"
    assert small.headers["vary"] == "accept-encoding"
    assert gzip.decompress(small.body) == plain.body
    assert "content-encoding" not in (await post(app, PATH, tensor(1), accept_encoding="gzip")).headers


async def test_a_client_that_leaves_gives_its_place_up():
    """F35, F37: the backend's call is cancelled, nothing is sent, the log learns of a 499."""
    backend = FakeBackend(hold=asyncio.Event())
    incidents: list[Incident] = []
    client = Client(front(backend, notify=incidents.append), [tensor(1)])
    asyncio.get_running_loop().call_soon(client.leaves.set)
    assert await client.ask("POST", PATH, [HOST]) is None
    assert backend.cancelled == 1
    assert [(incident.status, incident.cause) for incident in incidents] == [(499, None)]


async def test_a_client_that_leaves_amid_its_body_is_forgotten():
    """F35: half a body and gone is a 499 too."""
    backend = FakeBackend()
    incidents: list[Incident] = []
    client = Client(front(backend, notify=incidents.append), [b"{"], stalls=True)
    client.leaves.set()
    assert await client.ask("POST", PATH, [HOST]) is None
    assert ([incident.status for incident in incidents], backend.asked) == ([499], [])


async def test_a_backend_that_turns_the_cancellation_into_an_error_changes_nothing():
    """A client that left is a 499 whatever the cancelled call raises."""

    class Stubborn(FakeBackend):
        async def load(self, name: str, parameters: Any) -> None:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                raise Busy("cancelled") from None

    incidents: list[Incident] = []
    client = Client(front(Stubborn(), notify=incidents.append), [b""])
    client.leaves.set()
    assert await client.ask("POST", "/v2/repository/models/echo/load", [HOST]) is None
    assert [incident.status for incident in incidents] == [499]


async def test_no_watcher_outlives_its_request():
    """I9: a wait that ends well leaves no task behind."""
    backend = FakeBackend(hold=asyncio.Event())
    client = Client(front(backend), [tensor(1)])
    asyncio.get_running_loop().call_later(0.08, backend.hold.set)
    reply = await client.ask("POST", PATH, [HOST])
    assert reply is not None
    assert reply.status == 200
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_server_that_gives_up_says_so():
    """Faults, section 4: a request cancelled at the end of the drain gets a 503, which is an end like any other."""
    backend = FakeBackend(hold=asyncio.Event(), draining=True)
    client = Client(front(backend), [tensor(1)])
    task = asyncio.ensure_future(client.ask("POST", PATH, [HOST]))
    await backend.entered.wait()
    task.cancel()
    await task
    assert client.sent[0]["status"] == 503
    assert (b"connection", b"close") in client.sent[0]["headers"]


async def test_while_draining_every_answer_closes_its_connection():
    """P15, F43: answers and refusals alike carry `Connection: close`."""
    app = front(FakeBackend(draining=True))
    assert (await post(app, PATH, tensor(1))).headers["connection"] == "close"
    assert (await post(app, "/v2/models/none/infer", tensor(1))).headers["connection"] == "close"


@pytest.mark.parametrize(
    ("error", "status", "wait"),
    [(Busy("q", retry_after=3.2), 429, "4"), (StillLoading("l"), 503, "1"), (Draining("d", retry_after=30), 503, "30")],
)
async def test_a_refusal_carries_when_to_come_back(error: Exception, status: int, wait: str):
    """F42: the status is decided before the first byte, with Retry-After."""
    reply = await post(front(FakeBackend(raises=error)), PATH, tensor(1), x_request_id="r", traceparent=PARENT)
    assert (reply.status, reply.headers["retry-after"]) == (status, wait)
    assert (reply.headers["x-request-id"], reply.json()["trace_id"]) == ("r", PARENT[3:35])
    assert isinstance(reply.json()["error"], str)


async def test_our_own_bug_is_logged_and_not_told():
    """I11: 500 with a trace id that the log has too, without the exception's text."""
    incidents: list[Incident] = []
    bug = RuntimeError("/secret")
    reply = await post(front(FakeBackend(raises=bug), notify=incidents.append), PATH, tensor(1))
    assert reply.status == 500
    assert b"secret" not in reply.body
    assert [(incident.cause, incident.trace_id) for incident in incidents] == [(bug, reply.json()["trace_id"])]


async def test_the_log_learns_no_secret(caplog: pytest.LogCaptureFixture):
    """S10: neither query string, header, body nor a key reaches the log when something breaks."""
    client = Client(front(FakeBackend(raises=RuntimeError("broken"))), [b'{"marker-body":1}'])
    headers = [HOST, (b"authorization", b"Bearer marker-key"), (b"x-other", b"marker-header")]
    with caplog.at_level(0):
        await client.ask("POST", PATH, headers, b"token=marker-query")
    (record,) = caplog.records
    assert "marker" not in caplog.text
    assert (record.levelname, "broken" in caplog.text) == ("ERROR", True)


async def test_a_client_that_left_is_no_error_in_the_log(caplog: pytest.LogCaptureFixture):
    """499 is a debug line, and a hostile path in it is cut and escaped."""
    client = Client(front(FakeBackend()), [], stalls=True)
    client.leaves.set()
    with caplog.at_level(0):
        await client.ask("POST", PATH, [HOST])
    assert [record.levelname for record in caplog.records] == ["DEBUG"]


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE", "PATCH", "OPTIONS", "BREW"])
async def test_infer_takes_post_only(method: str):
    """Protocol, section 5: 405 with the allowed verb."""
    reply = await Client(front(FakeBackend()), [b""]).ask(method, PATH, [HOST])
    assert reply is not None
    assert (reply.status, reply.headers["allow"]) == (405, "POST")


async def test_many_unknown_models_leave_nothing_behind():
    """F40: names that do not exist cost an answer and no memory."""
    app = front(FakeBackend())
    for n in range(2000):
        backend_reply = await post(app, f"/v2/models/m{n}/infer", b"")
        assert backend_reply.status == 404
    assert len(app._hosts._known) == 1
