"""Whether loads are felt: p99 of a resident model while others come and go without pause, against its quiet p99.

Quiet and busy rounds in turn, over HTTP; each busy one is compared with the quiet ones before and after it, and the
ratio is the median of those. Busy: clients go round models of which only some fit, so every request of theirs evicts
and loads, some from the disk tier, some from the host. Their first visits, which copy, check and lay weights, are a
round of their own before. Then a herd: 32 at once to one cold model.
"""

from __future__ import annotations

import concurrent.futures
import http.client
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple, Self

from bench.http import body_of
from bench.models import WIDTH, Bulky, mlp
from bench.report import Row, arguments, finish
from bench.traffic import Job, Outcome, finished, start
from bench.world import Server, configuration, http_request, write_model

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

BALLAST = 32_000_000
"""Bytes of each model that comes and goes."""
OTHERS = 6
FIT_DEVICE = 2
FIT_HOST = 4
HERD = 32
LIMIT = 1.5
_PATH = "/v2/models/{}/infer"


class Length(NamedTuple):
    """How many pairs of rounds, and seconds of each."""

    rounds: int
    seconds: float


FULL = Length(11, 2.0)
QUICK = Length(7, 2.0)
SETTLES = 30.0
"""Seconds within which every slab is laid."""


class Churn:
    """One client that asks one model after another, none of which stays; a context manager."""

    def __init__(self, port: int, body: bytes) -> None:
        self._port = port
        self._body = body
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.count = 0
        self.failed = 0
        self.waits: list[float] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=20)
        while not self._stop.is_set():
            name = f"other{self.count % OTHERS}"
            began = time.perf_counter()
            self.failed += post(connection, name, self._body) != 200
            self.waits.append(time.perf_counter() - began)
            self.count += 1
        connection.close()


def post(connection: http.client.HTTPConnection, name: str, body: bytes) -> int:
    """One inference; the status."""
    connection.request("POST", _PATH.format(name), body, {"content-type": "application/json"})
    answer = connection.getresponse()
    answer.read()
    return answer.status


def hot(server: Server, request: Path, seconds: float) -> Outcome:
    """The resident model, asked again a moment after each answer, so that a queue of our own is no part of it."""
    seen = finished(start(Job(server.port, str(request), 1, seconds, pause=0.001)))
    if seen.failed:
        raise RuntimeError(f"{seen.failed} of {seen.count} answers were no 200")
    return seen


def beside(server: Server, request: Path, body: bytes, length: Length) -> list[Row]:
    """The first visits, then quiet and busy rounds in turn."""
    hot(server, request, length.seconds)
    with Churn(server.port, body) as first:
        visits = hot(server, request, length.seconds)
        settle(server)
    waits: list[float] = []
    busy: list[Outcome] = []
    quiet = [hot(server, request, length.seconds)]
    count, failed = 0, first.failed
    for _ in range(length.rounds):
        with Churn(server.port, body) as churn:
            busy.append(hot(server, request, length.seconds))
        quiet.append(hot(server, request, length.seconds))
        waits += churn.waits
        count += churn.count
        failed += churn.failed
    calls = sum(one.count for one in busy)
    worst = max(one.worst for one in busy)
    per_second = count / (length.rounds * length.seconds)
    bare, ratio = compared(busy, quiet, lambda one: one.p99)
    still, half = compared(busy, quiet, lambda one: one.p50)
    return [
        Row(f"hot p99 beside loads, n={calls:,}", bare * ratio, "ms", bare, ratio, f"<= {LIMIT}x", ratio <= LIMIT),
        Row(f"hot p50 beside loads (worst {worst:.1f} ms)", still * half, "ms", still, half),
        Row("hot p99 beside first visits", visits.p99, "ms", bare, visits.p99 / bare),
        Row(f"cold requests, {BALLAST / 1e6:.0f} MB each: p50", median(waits) * 1e3, "ms"),
        Row("cold requests per second", per_second, "1/s"),
        Row("cold requests that failed", failed, "calls", target="0", met=failed == 0),
    ]


def compared(
    busy: Sequence[Outcome], quiet: Sequence[Outcome], figure: Callable[[Outcome], float]
) -> tuple[float, float]:
    """The median of the quiet rounds, and that of each busy one's ratio to its two neighbours: machines drift."""
    ratios = [
        2 * figure(loud) / (figure(before) + figure(after))
        for loud, (before, after) in zip(busy, pairwise(quiet), strict=True)
    ]
    return median(map(figure, quiet)), median(ratios)


def settle(server: Server) -> None:
    """Wait until the background has laid the slab of every model that was visited. Raises `TimeoutError`."""
    end = time.monotonic() + SETTLES
    while 'foreload_slabs_total{outcome="laid"} ' + f"{OTHERS + 1}.0" not in server.text("/metrics"):
        if time.monotonic() > end:
            raise TimeoutError("the slabs were not laid in time")
        time.sleep(0.1)


def loads(server: Server) -> dict[str, int]:
    """Loads onto the device so far, by model."""
    found: dict[str, int] = {}
    for line in server.text("/metrics").splitlines():
        if line.startswith("foreload_load_duration_seconds_count") and 'to="device"' in line:
            name = line.partition('model="')[2].partition('"')[0]
            found[name] = found.get(name, 0) + int(float(line.rpartition(" ")[2]))
    return found


def herd(server: Server, body: bytes) -> list[Row]:
    """32 clients ask for one cold model in the same moment."""
    before = sum(loads(server).values())
    gate = threading.Barrier(HERD)

    def one(_: int) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
        connection.connect()
        gate.wait()
        status = post(connection, "fresh", body)
        connection.close()
        return status

    began = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(HERD) as pool:
        statuses = list(pool.map(one, range(HERD)))
    spent = time.perf_counter() - began
    done = sum(loads(server).values()) - before
    good = statuses.count(200)
    return [
        Row(f"herd of {HERD}: loads", done, "loads", target="S1: 1", met=done == 1),
        Row(f"herd of {HERD}: answered in {spent * 1e3:.0f} ms", good, "calls", target=f"{HERD}", met=good == HERD),
    ]


def main() -> int:
    """Run and report."""
    args = arguments(__doc__ or "").parse_args()
    length = QUICK if args.quick else FULL
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "models", "hot", mlp(), (WIDTH,), batch=16)
        for other in (*(f"other{number}" for number in range(OTHERS)), "fresh"):
            write_model(folder / "models", other, Bulky(BALLAST), (WIDTH,), ballast=BALLAST)
        settings = {
            "warm": ["hot"],
            "device": {"memory": f"{int((FIT_DEVICE + 0.5) * BALLAST)}B"},
            "host": {"memory": f"{int((FIT_HOST + 0.5) * BALLAST)}B"},
        }
        body, _ = body_of((WIDTH,), binary=False)
        request = folder / "request"
        request.write_bytes(http_request("hot", body))
        with Server.foreload(configuration(folder, settings)) as server:
            rows = [*beside(server, request, body, length), *herd(server, body)]
    return finish("interference", rows, args)


if __name__ == "__main__":
    raise SystemExit(main())
