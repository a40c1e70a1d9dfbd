"""Fitting processes that do everything wrong; the environment says how.

Only for tests of the fitting worker.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import numpy as np

from runtime.fitting.main import confine
from runtime.fitting.order import Order
from runtime.fitting.parcel import read_arrays, unpacked, write_arrays

if TYPE_CHECKING:
    from collections.abc import Callable


def honest(order: Order) -> dict[str, np.ndarray]:
    """What a good worker would answer."""
    from forecasting.fit import fit

    with os.fdopen(os.dup(order.source), "rb") as file:
        file.seek(0)
        snapshot = unpacked(read_arrays(file.read()))
    return dict(fit(snapshot, now=snapshot.at, deadline=order.budget, top=0).to_arrays())


def answer(order: Order, arrays: dict[str, np.ndarray]) -> None:
    content = io.BytesIO()
    write_arrays(content, arrays.items())
    os.write(order.answer, content.getvalue()[:60_000])
    with os.fdopen(os.dup(order.answer), "wb") as pipe:
        pipe.write(content.getvalue()[60_000:])


def spoilt(order: Order, name: str, value: float) -> None:
    arrays = honest(order)
    arrays[name] = arrays[name].copy()
    arrays[name].flat[0] = value
    answer(order, arrays)


def hang(_order: Order) -> None:
    time.sleep(600)


def late(order: Order) -> None:
    answer(order, honest(order))
    os._exit(4)


def child(order: Order) -> None:
    """Leaves the pipe open in a process of its own."""
    subprocess.Popen(["sleep", "600"], pass_fds=(order.answer,))


def pickled(order: Order) -> None:
    file = io.BytesIO()
    np.savez(file, said=np.array([{"keys": []}], object))
    os.write(order.answer, file.getvalue())


def compressed(order: Order) -> None:
    file = io.BytesIO()
    np.savez_compressed(file, profile=np.zeros(50_000_000, np.uint8))
    os.write(order.answer, file.getvalue())


def endless(order: Order, piece: bytes, pause: float) -> None:
    while True:
        os.write(order.answer, piece)
        time.sleep(pause)


def others(order: Order) -> None:
    arrays = honest(order)
    text = arrays["said"].tobytes().replace(b"daily-0@1", b"daily-9@1")
    answer(order, arrays | {"said": np.frombuffer(text, np.uint8)})


WAYS: dict[str, Callable[[Order], object]] = {
    "exit": lambda _: os._exit(3),
    "late exit": late,
    "segfault": lambda _: os.kill(os.getpid(), 11),
    "hang": hang,
    "child": child,
    "garbage": lambda order: os.write(order.answer, b"PK\x03\x04" + os.urandom(5000)),
    "pickle": pickled,
    "compressed": compressed,
    "huge": lambda order: endless(order, b"\0" * 65_536, 0.0),
    "trickle": lambda order: endless(order, b"\0", 0.05),
    "other counts": others,
    "memory": lambda _: np.ones(1 << 33, np.uint8),
}


def main() -> None:
    order = Order.read(sys.argv[1])
    confine(order)
    how = os.environ["PYTHONHOSTILE"]
    if how in WAYS:
        WAYS[how](order)
    else:
        name, value = how.split("=")
        spoilt(order, name, float(value))
    os._exit(0)


if __name__ == "__main__":
    main()
