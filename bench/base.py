"""What the HTTP bench compares with: one Starlette route, orjson, and the forward inline or on one executor thread.

`main` takes PORT [executor]. Same modules and bodies as the real server; no checks, so it is a lower bound.
"""

from __future__ import annotations

import asyncio
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import orjson
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from bench.models import Glance, mlp

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from numpy.typing import NDArray
    from starlette.requests import Request
    from torch import nn

    Array = NDArray[np.float32]


def forward(module: nn.Module, array: Array) -> Array:
    """The work."""
    with torch.inference_mode():
        return module(torch.from_numpy(array)).numpy()  # type: ignore[no-any-return]  # torch types results as Any


def decoded(body: bytes, header: str | None) -> tuple[dict[str, object], Array]:
    """The request and its only input."""
    if header is None:
        request = orjson.loads(body)
        (tensor,) = request["inputs"]
        return request, np.array(tensor["data"], np.float32).reshape(tensor["shape"])
    length = int(header)
    request = orjson.loads(body[:length])
    (tensor,) = request["inputs"]
    array = np.frombuffer(body, np.uint8, offset=length).copy().view(np.float32)  # torch wants it writable
    return request, array.reshape(tensor["shape"])


def encoded(name: str, result: Array, binary: bool) -> Response:  # noqa: FBT001 - two call sites, side by side
    """The answer, as JSON or with a binary tensor."""
    output: dict[str, object] = {"name": "y", "datatype": "FP32", "shape": list(result.shape)}
    answer = {"model_name": name, "model_version": "1", "outputs": [output]}
    if not binary:
        output["data"] = np.ascontiguousarray(result).reshape(-1)
        return Response(orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY), media_type="application/json")
    raw = result.tobytes()
    output["parameters"] = {"binary_data_size": len(raw)}
    head = orjson.dumps(answer)
    headers = {"inference-header-content-length": str(len(head))}
    return Response(head + raw, headers=headers, media_type="application/octet-stream")


def application(run: Callable[[nn.Module, Array], Awaitable[Array]]) -> Starlette:
    """One route for both models."""
    modules = {"mlp": mlp().eval(), "glance": Glance().eval()}

    async def infer(request: Request) -> Response:
        name = request.path_params["m"]
        header = request.headers.get("inference-header-content-length")
        _, array = decoded(await request.body(), header)
        return encoded(name, await run(modules[name], array), header is not None)

    return Starlette(routes=[Route("/v2/models/{m}/infer", infer, methods=["POST"])])


async def inline(module: nn.Module, array: Array) -> Array:
    """On the loop."""
    return forward(module, array)


def main() -> None:
    """Serve until killed."""
    torch.set_num_threads(1)
    run = inline
    if sys.argv[2:] == ["executor"]:
        thread = ThreadPoolExecutor(1)

        async def hopping(module: nn.Module, array: Array) -> Array:
            return await asyncio.get_running_loop().run_in_executor(thread, forward, module, array)

        run = hopping
    uvicorn.run(
        application(run),
        host="127.0.0.1",
        port=int(sys.argv[1]),
        log_level="warning",
        access_log=False,
        loop="uvloop",
        http="httptools",
    )
