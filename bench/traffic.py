"""The load of the HTTP benches: a closed loop over keep-alive connections, in a process of its own.

`start` runs `main` there, which prints one `Outcome` as JSON. Loopback only, bounded in connections and time.
Nothing here knows a server.
"""

from __future__ import annotations

import json
import select
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from runtime.workers.turns import short_slice

LARGEST = 256
"""Connections."""
LONGEST = 60.0
"""Seconds."""
_PATIENCE = 20.0
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Job:
    """What to send (`request`: a file with the whole HTTP request), over how many connections, for how many seconds.

    `pause` seconds lie between an answer and the next request of a connection.
    """

    port: int
    request: str
    connections: int
    seconds: float
    pause: float = 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """Complete answers, how many were no 200, wall seconds, and latencies in milliseconds."""

    count: int
    failed: int
    seconds: float
    p50: float
    p99: float
    worst: float

    @property
    def rate(self) -> float:
        """Answers per second."""
        return self.count / self.seconds


class _Connection:
    """One request after another."""

    def __init__(self, port: int, request: bytes) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), _PATIENCE)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setblocking(False)
        self._request = request
        self._left = memoryview(b"")
        self._got = bytearray()
        self._size = -1
        self.began = 0

    def fileno(self) -> int:
        return self._socket.fileno()

    def begin(self) -> bool:
        """Start the next request; see `push`."""
        self.began = time.perf_counter_ns()
        self._left = memoryview(self._request)
        self._got.clear()
        self._size = -1
        return self.push()

    def push(self) -> bool:
        """Send what the socket takes; True when all is out."""
        while self._left:
            try:
                self._left = self._left[self._socket.send(self._left) :]
            except BlockingIOError:
                return False
        return True

    def pull(self) -> int:
        """Read what there is; the status once the answer is whole, else 0. Raises `ConnectionError`."""
        piece = self._socket.recv(_CHUNK)
        if not piece:
            raise ConnectionResetError("the server closed a connection")
        self._got += piece
        if self._size < 0:
            end = self._got.find(b"\r\n\r\n")
            if end < 0:
                return 0
            head = bytes(self._got[:end]).lower()
            length = head.partition(b"\r\ncontent-length: ")[2].partition(b"\r\n")[0]
            self._size = end + 4 + int(length)
        return int(self._got[9:12]) if len(self._got) >= self._size else 0

    def close(self) -> None:
        self._socket.close()


def run(job: Job) -> Outcome:
    """Send and wait until the time is over; the last answers are waited for and counted."""
    if not (1 <= job.connections <= LARGEST and 0 < job.seconds <= LONGEST):
        raise ValueError(f"at most {LARGEST} connections and {LONGEST:g} s")
    short_slice()  # the time that this process waits for a CPU is no part of a server's latency
    request = Path(job.request).read_bytes()
    connections = [_Connection(job.port, request) for _ in range(job.connections)]
    began = time.perf_counter()
    spent, failed = _looped(connections, began + job.seconds, job.pause)
    seconds = time.perf_counter() - began
    spent.sort()
    late = spent[min(len(spent) - 1, len(spent) * 99 // 100)]
    return Outcome(len(spent), failed, seconds, spent[len(spent) // 2] / 1e6, late / 1e6, spent[-1] / 1e6)


def _looped(connections: list[_Connection], until: float, pause: float) -> tuple[list[int], int]:
    """Nanoseconds of each answer, and how many were no 200."""
    poll = select.epoll()
    open_: dict[int, _Connection] = {}
    for connection in connections:
        open_[connection.fileno()] = connection
        poll.register(connection.fileno(), select.EPOLLIN | (0 if connection.begin() else select.EPOLLOUT))
    spent: list[int] = []
    failed = 0
    while open_:
        found = poll.poll(_PATIENCE)
        if not found:
            raise TimeoutError(f"no answer for {_PATIENCE:g} s")
        for number, what in found:
            connection = open_[number]
            if what & select.EPOLLOUT and connection.push():
                poll.modify(number, select.EPOLLIN)
            if not what & select.EPOLLIN or not (status := connection.pull()):
                continue
            spent.append(time.perf_counter_ns() - connection.began)
            failed += status != 200
            if not _again(connection, poll, until, pause):
                del open_[number]
    return spent, failed


def _again(connection: _Connection, poll: select.epoll, until: float, pause: float) -> bool:
    """Send the next request, unless the time is over."""
    if time.perf_counter() >= until:
        poll.unregister(connection)
        connection.close()
        return False
    if pause:
        time.sleep(pause)
    if not connection.begin():
        poll.modify(connection, select.EPOLLIN | select.EPOLLOUT)
    return True


def start(job: Job) -> subprocess.Popen[bytes]:
    """Start a load; `finished` waits for it."""
    command = [sys.executable, "-c", "from bench.traffic import main; main()", json.dumps(asdict(job))]
    return subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parent.parent)


def finished(load: subprocess.Popen[bytes]) -> Outcome:
    """Its outcome. Raises `RuntimeError` if it failed; its traceback is on standard error."""
    out, _ = load.communicate(timeout=LONGEST + 2 * _PATIENCE)
    if load.returncode:
        raise RuntimeError("the load failed")
    found: dict[str, Any] = json.loads(out)
    return Outcome(**found)


def main() -> None:
    """Run the job of the command line."""
    print(json.dumps(asdict(run(Job(**json.loads(sys.argv[1]))))))
