"""One request, several models: each row is that model's own answer or error, and none of them holds up the others."""

from __future__ import annotations

import asyncio
import gzip
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from actors.errors import DeadlineExceeded, StillLoading
from runtime.http.auth import Key, new_token
from runtime.http.limits import Limits
from tests.runtime.http.fake import HOST, Client, FakeBackend, front, get, post, tensor

if TYPE_CHECKING:
    from runtime.http.incident import Incident
    from runtime.http.port import Served
    from tests.runtime.http.fake import Reply

PATH = "/api/v1/compare"
PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@dataclass
class Several(FakeBackend):
    """Some of its models fail, and some wait until they are let go, or given up."""

    fails: dict[str, BaseException] = field(default_factory=dict)
    waits: dict[str, asyncio.Event] = field(default_factory=dict)
    given_up: list[str] = field(default_factory=list)
    begun: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.loaded.update(dict.fromkeys((*self.fails, *self.waits, "other", "third"), "READY"))

    async def infer(self, name: str, version: str | None, body: bytes, json_length: int | None, **rest: Any) -> Served:
        self.begun.append(name)
        if name in self.fails:
            raise self.fails[name]
        if name in self.waits:
            try:
                async with asyncio.timeout(rest["timeout"]):
                    await self.waits[name].wait()
            except asyncio.CancelledError:
                self.given_up.append(name)
                raise
            except TimeoutError:
                raise DeadlineExceeded("the request's own deadline passed", model=name) from None
        return await super().infer(name, version, body, json_length, **rest)


def question(*models: str, values: tuple[float, ...] = (1, 2), **parameters: object) -> bytes:
    """A V2 request with the models it is for."""
    return json.dumps({**json.loads(tensor(*values, **parameters)), "models": list(models)}).encode()


async def compared(backend: FakeBackend, *models: str, **rest: Any) -> list[Any]:
    """The rows of an answer."""
    reply = await post(front(backend), PATH, question(*models, **rest))
    assert reply.status == 200, reply.body
    assert reply.headers["content-type"] == "application/json"
    rows: list[Any] = reply.json()["answers"]
    return rows


async def test_every_model_answers_in_a_row_of_its_own() -> None:
    """In the order of the request, with the V2 answer each of them gives alone; the body reaches each as it came."""
    backend = Several()
    reply = await post(
        front(backend),
        PATH,
        question("other", "echo@1", "echo", priority=3),
        x_request_id="job-7",
        traceparent=PARENT,
        foreload_timeout="2s",
    )
    rows = reply.json()["answers"]
    assert [(row["model"], row["status"]) for row in rows] == [("other", 200), ("echo@1", 200), ("echo", 200)]
    assert [row["answer"]["model_version"] for row in rows] == ["2", "1", "2"]
    assert all(row["answer"]["outputs"][0]["data"] == [1, 2] for row in rows)
    assert [(row["found"], row["waited_ms"]) for row in rows] == [("device", 250.0)] * 3
    assert {(asked.body, asked.json_length) for asked in backend.asked} == {
        (question("other", "echo@1", "echo", priority=3), None)
    }
    assert {(asked.timeout, asked.priority) for asked in backend.asked} == {(2.0, 3)}
    assert {(asked.request_id, asked.traceparent) for asked in backend.asked} == {("job-7", PARENT)}
    assert reply.headers["x-request-id"] == "job-7"


async def test_one_models_error_is_its_row_alone() -> None:
    """Unknown, still loading, broken: the others answer, and the log learns of the one that is ours."""
    incidents: list[Incident] = []
    backend = Several(fails={"cold": StillLoading("soon", model="cold", retry_after=2.5), "bad": ValueError("secret")})
    reply = await post(
        front(backend, notify=incidents.append), PATH, question("nobody", "echo", "cold", "bad"), x_request_id="r"
    )
    nobody, echo, cold, bad = reply.json()["answers"]
    assert (nobody["status"], nobody["error"]["code"], nobody["error"]["model"]) == (404, "unknown_model", "nobody")
    assert (echo["status"], echo["answer"]["outputs"][0]["data"]) == (200, [1, 2])
    assert (cold["status"], cold["error"]["code"], cold["retry_after"]) == (503, "still_loading", 2.5)
    assert (bad["status"], bad["error"]["code"]) == (500, "internal")
    assert b"secret" not in reply.body
    assert [type(incident.cause) for incident in incidents] == [ValueError]


async def test_a_slow_model_keeps_the_others_no_longer_than_the_deadline() -> None:
    """All start at once; when the deadline passes the slow one's row says so."""
    backend = Several(waits={"slow": asyncio.Event()})
    slow, echo, other = await compared(backend, "slow", "echo", "other", timeout=30_000)
    assert (slow["status"], slow["error"]["code"]) == (504, "deadline_exceeded")
    assert (echo["status"], other["status"]) == (200, 200)


async def test_models_do_not_wait_for_one_another() -> None:
    """The first of the list is let go only once the last has answered."""
    go = asyncio.Event()

    @dataclass
    class Chained(Several):
        async def infer(self, name: str, *rest: Any, **more: Any) -> Served:
            found = await super().infer(name, *rest, **more)
            if name == "third":
                go.set()
            return found

    backend = Chained(waits={"slow": go})
    rows = await compared(backend, "slow", "echo", "third")
    assert [row["status"] for row in rows] == [200, 200, 200]


async def test_a_client_that_leaves_gives_up_all_its_places() -> None:
    """Every inference is cancelled; nothing is sent."""
    backend = Several(waits={"a": asyncio.Event(), "b": asyncio.Event()})
    incidents: list[Incident] = []
    client = Client(front(backend, notify=incidents.append), [question("a", "echo", "b")])
    asyncio.get_running_loop().call_soon(client.leaves.set)
    assert await client.ask("POST", PATH, [HOST]) is None
    assert sorted(backend.given_up) == ["a", "b"]
    assert [incident.status for incident in incidents] == [499]


async def test_binary_tensors_follow_the_rows_in_their_order() -> None:
    """The binary extension, over all rows: one length header, and each row's bytes behind the JSON."""
    raw = np.arange(3, dtype="<f4").tobytes()
    given = {"name": "x", "datatype": "FP32", "shape": [3], "parameters": {"binary_data_size": len(raw)}}
    head = json.dumps(
        {"inputs": [given], "models": ["echo", "nobody", "other"], "parameters": {"binary_data_output": True}}
    ).encode()
    reply = await post(front(Several()), PATH, head + raw, inference_header_content_length=str(len(head)))
    assert (reply.status, reply.headers["content-type"]) == (200, "application/octet-stream")
    end = int(reply.headers["inference-header-content-length"])
    rows = json.loads(reply.body[:end])["answers"]
    assert [row["status"] for row in rows] == [200, 404, 200]
    sizes = [row["answer"]["outputs"][0]["parameters"]["binary_data_size"] for row in rows if row["status"] == 200]
    assert sizes == [12, 12]
    assert reply.body[end:] == raw + raw


async def test_bodies_may_be_compressed_both_ways() -> None:
    """As for a single inference."""
    reply = await post(
        front(Several()),
        PATH,
        gzip.compress(question("echo", "other", values=tuple(range(500)))),
        content_encoding="gzip",
        accept_encoding="gzip",
    )
    assert reply.headers["content-encoding"] == "gzip"
    rows = json.loads(gzip.decompress(reply.body))["answers"]
    assert [len(row["answer"]["outputs"][0]["data"]) for row in rows] == [500, 500]


INPUTS = json.loads(tensor(1))["inputs"]
WRONG: dict[str, tuple[bytes, str]] = {
    "no models": (tensor(1), "models"),
    "an empty list": (question(), "models"),
    "a word": (json.dumps({"inputs": INPUTS, "models": "echo"}).encode(), "models"),
    "a number in it": (json.dumps({"inputs": INPUTS, "models": ["echo", 7]}).encode(), "models"),
    "one twice": (question("echo", "other", "echo"), "models: one is listed twice"),
    "too many": (question(*(f"m{number}" for number in range(17))), "models: 17, at most 16 are allowed"),
    "a long name": (question("m" * 257), "models"),
    "no JSON": (b"{", "JSON"),
    "nothing": (b"", "JSON"),
    "a list": (b"[]", "JSON"),
    "deep": (b'{"models":["echo"],"inputs":' + b"[" * 200_000, "JSON"),
    "half a letter": (b'{"models":["\\ud800"]}', ""),
    "a bad deadline": (question("echo", timeout=-1), "timeout"),
}


@pytest.mark.parametrize("name", WRONG)
async def test_what_is_wrong_with_the_request_is_no_row(name: str) -> None:
    """400 for the whole, and no model is asked."""
    body, words = WRONG[name]
    backend = Several()
    reply = await post(front(backend), PATH, body)
    assert reply.status in {400, 404}
    assert words in reply.json()["error"]
    assert backend.begun == []


@pytest.mark.parametrize("name", ["../etc", "a/b", "a@", "@1", "a@1@2", "", "é"])
async def test_a_name_that_no_model_can_have_is_refused(name: str) -> None:
    """The strict pattern, before anybody looks for it."""
    backend = Several()
    assert (await post(front(backend), PATH, question("echo", name))).status == 404
    assert backend.begun == []


async def test_the_body_has_the_limit_of_an_inference() -> None:
    """413 by the declared length; answers that together exceed it become errors of their own rows."""
    limits = Limits(body=400)
    app = front(Several(), limits)
    assert (await post(app, PATH, question("echo", values=tuple(range(500))), content_length="9999")).status == 413
    reply = await post(app, PATH, question("echo", "other", "third", "echo@1"))
    rows = reply.json()["answers"]
    assert [row["status"] for row in rows] == [200, 200, 200, 413]
    assert rows[3]["error"]["code"] == "too_large"


async def test_the_number_of_models_is_a_setting() -> None:
    """One more than allowed is refused with both numbers."""
    app = front(Several(), Limits(compared=2))
    assert (await post(app, PATH, question("echo", "other"))).status == 200
    refused = await post(app, PATH, question("echo", "other", "third"))
    assert refused.json()["error"] == "models: 3, at most 2 are allowed"


def ring(*scopes: str) -> tuple[Key, dict[str, str]]:
    """A key and the header that shows it."""
    token, hashed = new_token()
    return Key("tester", hashed, scopes), {"authorization": f"Bearer {token}"}


@pytest.mark.parametrize(
    ("scopes", "status"),
    [
        (("infer",), 200),
        (("infer:echo", "infer:oth*"), 200),
        (("infer:echo",), 403),
        (("read", "admin"), 403),
        ((), 403),
    ],
)
async def test_a_key_must_cover_every_model_of_the_list(scopes: tuple[str, ...], status: int) -> None:
    """S2: one that it does not cover refuses the whole, and no model is asked."""
    key, shown = ring(*scopes)
    backend = Several()
    reply = await post(front(backend, keys=(key,)), PATH, question("echo", "other"), **shown)
    assert reply.status == status
    assert bool(backend.begun) == (status == 200)


async def test_a_key_without_the_scope_is_refused_before_its_body_is_read() -> None:
    """64 MiB of a caller who may not ask are not taken in."""
    key, shown = ring("read")
    client = Client(front(Several(), keys=(key,)), [question("echo")])
    lines = [HOST, *((name.encode(), value.encode()) for name, value in shown.items())]
    reply: Reply | None = await client.ask("POST", PATH, lines)
    assert reply is not None
    assert (reply.status, client.read) == (403, 0)


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
async def test_other_verbs_are_told_the_right_one(method: str) -> None:
    """405 with `Allow`."""
    reply = await get(front(Several()), PATH, method=method)
    assert (reply.status, reply.headers["allow"]) == (405, "POST")


async def test_a_long_body_is_looked_through_away_from_the_loop() -> None:
    """A megabyte of numbers in front of the list is found all the same."""
    body = json.dumps({**json.loads(tensor(*range(200_000))), "models": ["echo", "other"]}).encode()
    rows = (await post(front(Several()), PATH, body)).json()["answers"]
    assert [len(row["answer"]["outputs"][0]["data"]) for row in rows] == [200_000] * 2
