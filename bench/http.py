"""What a hit costs over HTTP: CPU microseconds per request of the whole process tree, against bare Starlette.

Base, X, base, Y … interleaved, medians over rounds; the same modules, bodies and client for all. Targets are those of
the hot path (H3, H6, H7, H8); a missed one is shown as missed. Rates say little on a machine without spare cores.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import orjson

from bench.models import IMAGE, WIDTH, Glance, mlp
from bench.report import Row, arguments, finish
from bench.traffic import Job, Outcome, finished, start
from bench.world import Server, configuration, http_request, memory_mb, spent_between, write_model

if TYPE_CHECKING:
    from collections.abc import Sequence

_MODELS = {"mlp": (WIDTH,), "glance": IMAGE}


class Case(NamedTuple):
    """A workload at one number of connections. `limit` is the most it may cost, in costs of the base."""

    workload: str
    connections: int
    quick: bool
    target: str = ""
    limit: float | None = None


CASES = (
    Case("small JSON", 1, True, "H3", 2.2),
    Case("small JSON", 8, False),
    Case("small JSON", 64, True, "H3", 1.6),
    Case("small binary", 1, False),
    Case("small binary", 8, False),
    Case("small binary", 64, True),
    Case("image binary", 1, False, "H6", 1.3),
    Case("image binary", 8, True, "H6", 1.3),
    Case("image binary", 64, False, "H6", 1.3),
    Case("image JSON", 1, True, "H7", 1.1),
    Case("image JSON", 8, False, "H7", 1.1),
)
H3_THREAD = 1.15
H6_QUIET_US = 300.0
H8_MB = 60.0
H8_READY = 2.0


@dataclass(frozen=True, slots=True)
class Length:
    """Rounds (after one that warms up) and seconds of each run."""

    rounds: int
    base: float
    other: float


FULL = Length(5, 1.0, 2.0)
QUICK = Length(2, 0.4, 0.6)


def body_of(shape: Sequence[int], *, binary: bool) -> tuple[bytes, int | None]:
    """One request of seeded float32 noise; length of the JSON part if a binary tensor follows it."""
    array = np.random.default_rng(7).standard_normal((1, *shape)).astype(np.float32)
    tensor: dict[str, object] = {"name": "x", "datatype": "FP32", "shape": list(array.shape)}
    if not binary:
        tensor["data"] = array.ravel().tolist()
        return orjson.dumps({"inputs": [tensor]}), None
    tensor["parameters"] = {"binary_data_size": array.nbytes}
    head = orjson.dumps({"parameters": {"binary_data_output": True}, "inputs": [tensor]})
    return head + array.tobytes(), len(head)


def write_requests(folder: Path) -> dict[str, Path]:
    """Each workload's request in a file of its own."""
    found: dict[str, Path] = {}
    for model, size in (("mlp", "small"), ("glance", "image")):
        for form in ("JSON", "binary"):
            path = found[f"{size} {form}"] = folder / f"{size}-{form}"
            path.write_bytes(http_request(model, *body_of(_MODELS[model], binary=form == "binary")))
    return found


class Run(NamedTuple):
    """One run: CPU microseconds per request of the tree, and what the client saw."""

    cpu: float
    seen: Outcome


def run(server: Server, request: Path, connections: int, seconds: float) -> Run:
    """Load one server for a while. Raises `RuntimeError` if an answer was no 200."""
    before = server.cpu()
    seen = finished(start(Job(server.port, str(request), connections, seconds)))
    spent = spent_between(before, server.cpu())
    if seen.failed:
        raise RuntimeError(f"{server.name}: {seen.failed} of {seen.count} answers were no 200")
    return Run(spent / seen.count * 1e6, seen)


class Servers(NamedTuple):
    """Everybody who is compared."""

    base: Server
    thread: Server
    foreload: Server


def compared(servers: Servers, case: Case, request: Path, length: Length) -> list[Row]:
    """The rows of one case."""
    base: list[Run] = []
    thread: list[Run] = []
    ours: list[Run] = []
    for turn in range(length.rounds + 1):
        found = [
            run(server, request, case.connections, length.base if server is servers.base else length.other)
            for server in (servers.base, servers.foreload, servers.base, servers.thread)
        ]
        if turn:  # the first one warms up
            base += (found[0], found[2])
            ours.append(found[1])
            thread.append(found[3])
    mine, bare, hopping = (median(one.cpu for one in runs) for runs in (ours, base, thread))
    name = f"{case.workload}, c={case.connections}"
    ratio = mine / bare
    target = f"{case.target} <= {case.limit}x" if case.limit is not None else ""
    rows = [Row(f"{name}: base", bare, "us CPU", None, None)]
    met = None if case.limit is None else ratio <= case.limit
    rows.append(
        Row(f"{name}: foreload, n={sum(one.seen.count for one in ours):,}", mine, "us CPU", bare, ratio, target, met)
    )
    small = case.workload.startswith("small")
    against = mine / hopping
    rows.append(
        Row(
            f"{name}: foreload against one executor thread",
            mine,
            "us CPU",
            hopping,
            against,
            f"H3 <= {H3_THREAD}x" if small else "",
            against <= H3_THREAD if small else None,
        )
    )
    late = median(one.seen.p99 for one in ours)
    quiet = median(one.seen.p99 for one in base)
    rows.append(Row(f"{name}: p99 (p50 {median(one.seen.p50 for one in ours):.2f})", late, "ms", quiet, late / quiet))
    if case.workload == "image binary" and case.connections == 1:
        rows.append(Row(f"{name}: absolute", mine, "us CPU", target=f"H6 <= {H6_QUIET_US:g}", met=mine <= H6_QUIET_US))
    return rows


def batching(server: Server, rows: list[Row]) -> None:
    """How full the batches of the small model were over the whole run."""
    stats = server.get("/v2/models/mlp/stats")["model_stats"][0]
    calls, forwards = stats["inference_count"], stats["execution_count"]
    largest = max(row["batch_size"] for row in stats["batch_stats"])
    rows.append(Row(f"small: calls per forward, largest batch {largest}", calls / max(forwards, 1), "calls"))


def beside_json(servers: Servers, requests: dict[str, Path], parse_ms: float, seconds: float) -> Row:
    """A hit on another model while JSON images come one after another (H7)."""
    images = start(Job(servers.foreload.port, str(requests["image JSON"]), 1, seconds + 0.5))
    seen = finished(start(Job(servers.foreload.port, str(requests["small JSON"]), 1, seconds)))
    finished(images)
    name = f"small JSON, c=1, beside image JSON: p99 (p50 {seen.p50:.2f})"
    ratio = seen.p99 / parse_ms
    return Row(name, seen.p99, "ms", parse_ms, ratio, "H7 <= one parse", seen.p99 <= parse_ms)


def idle(server: Server) -> list[Row]:
    """Memory before any request, and how long the start took (H8)."""
    rss, pss = memory_mb(server.pid)
    workers = [pid for pid in server.tree() if pid != server.pid]
    rows = [
        Row(f"front, idle: RSS (PSS {pss:.1f})", rss, "MB", target=f"H8 <= {H8_MB:g}", met=rss <= H8_MB),
        Row("front: listens after", server.listening_after, "s"),
        Row(
            "ready with two warm models after",
            server.ready_after,
            "s",
            target=f"H8 <= {H8_READY:g}",
            met=server.ready_after <= H8_READY,
        ),
    ]
    rows += [Row(f"worker, idle: RSS (PSS {memory_mb(pid)[1]:.1f})", memory_mb(pid)[0], "MB") for pid in workers]
    return rows


def main() -> int:
    """Run all cases and report."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--only", default="", help="cases whose name begins so, as 'small JSON'")
    args = parser.parse_args()
    length = QUICK if args.quick else FULL
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        requests = write_requests(folder)
        write_model(folder / "models", "mlp", mlp(), _MODELS["mlp"], batch=64)
        write_model(folder / "models", "glance", Glance(), _MODELS["glance"], batch=8)
        path = configuration(folder, {"warm": list(_MODELS)})
        with Server.foreload(path) as ours, Server.base("base") as base, Server.base("thread", "executor") as thread:
            rows += idle(ours)
            servers = Servers(base, thread, ours)
            for case in CASES:
                named = f"{case.workload}, c={case.connections}".startswith(args.only)
                if named and (case.quick or not args.quick or args.only):
                    rows += compared(servers, case, requests[case.workload], length)
            batching(ours, rows)
            parse = run(base, requests["image JSON"], 1, length.base).cpu / 1e3
            rows.append(beside_json(servers, requests, parse, length.other))
    return finish("http", rows, args)


if __name__ == "__main__":
    raise SystemExit(main())
