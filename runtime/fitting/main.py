"""The fitting process: one round, then the end. Nice, on one thread, with a limit on memory, gone with its parent.

Belongs here: limits, the way in and out. Never: fitting itself, or anything that outlives the round.
"""

from __future__ import annotations

import ctypes
import io
import os
import resource
import signal
import sys
from typing import NoReturn

from runtime.fitting.order import Order

_PR_SET_PDEATHSIG = 1
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")


def confine(order: Order) -> None:
    """Before numpy is imported: it reads the number of threads once."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the parent decides
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != order.parent:
        sys.exit(0)
    for name in _THREADS:
        os.environ[name] = "1"
    os.nice(order.nice)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (order.memory, order.memory))


def run(order: Order) -> None:
    """Read the counts, fit, and write what was found."""
    from forecasting.fit import fit
    from runtime.fitting.parcel import read_arrays, unpacked, write_arrays

    with os.fdopen(order.source, "rb") as file:
        file.seek(0)
        snapshot = unpacked(read_arrays(file.read()))
    fitted = fit(snapshot, now=snapshot.at, deadline=order.budget, top=order.top, specialists=order.specialists)
    content = io.BytesIO()
    write_arrays(content, fitted.served().to_arrays().items())
    with os.fdopen(order.answer, "wb") as pipe:
        pipe.write(content.getbuffer())


def main() -> NoReturn:
    """Entry of `python -m runtime.fitting.main '<Order as JSON>'`."""
    order = Order.read(sys.argv[1])
    confine(order)
    run(order)
    sys.stderr.flush()
    os._exit(0)  # nothing of ours is left to tear down, and tearing down takes time


if __name__ == "__main__":
    main()
