"""A V2 client in the standard library: the tour's requests, spelled out so that a reader can copy them.

JSON for small tensors, the binary tensor extension for the rest.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Mapping

Array: TypeAlias = NDArray[Any]

_LENGTH = "Inference-Header-Content-Length"
_TYPES: dict[str, np.dtype[Any]] = {"FP32": np.dtype("<f4"), "INT64": np.dtype("<i8")}
_NAMES = {dtype: name for name, dtype in _TYPES.items()}
_TIMING = re.compile(r"([\w.-]+)((?:\s*;[^,]*)?)")
_DURATION = re.compile(r";\s*dur=([\d.]+)")


class Declined(Exception):  # what the server did, in a word
    """The server did not answer 200; the text is its own sentence, or what the connection said."""


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer: tensors by name, headers in lower case, and seconds from sending to the last byte."""

    outputs: Mapping[str, Array]
    headers: Mapping[str, str]
    seconds: float


class Client:
    """Talks to one server, one connection a request: a tour is not a benchmark."""

    def __init__(self, host: str, port: int, *, timeout: float = 120.0) -> None:
        self._host, self._port, self._timeout = host, port, timeout

    def status(self, path: str) -> int:
        """Give the status of a GET, 0 while nobody answers."""
        try:
            return self._send("GET", path, b"", {})[0].status
        except (OSError, HTTPException):
            return 0

    def read(self, path: str) -> Any:
        """Give the parsed JSON of a GET. Raises `Declined`."""
        _, body = self._answered("GET", path, b"", {})
        try:
            return json.loads(body)
        except ValueError as error:
            msg = f"{path} did not answer JSON"
            raise Declined(msg) from error

    def infer(self, model: str, inputs: Mapping[str, Array], *, binary: bool) -> Reply:
        """Run one inference. Raises `Declined` for anything but a 200 with readable tensors."""
        tensors, tail = [], b""
        for name, array in inputs.items():
            tensor: dict[str, Any] = {"name": name, "shape": list(array.shape), "datatype": _NAMES[array.dtype]}
            if binary:
                tail += array.tobytes()
                tensor["parameters"] = {"binary_data_size": array.nbytes}
            else:
                tensor["data"] = array.ravel().tolist()
            tensors.append(tensor)
        head = json.dumps({"inputs": tensors, "parameters": {"binary_data_output": binary}}).encode()
        headers = {_LENGTH: str(len(head))} if binary else {"Content-Type": "application/json"}
        started = time.perf_counter()
        response, body = self._answered("POST", f"/v2/models/{model}/infer", head + tail, headers)
        seconds = time.perf_counter() - started
        found = {name.lower(): value for name, value in response.getheaders()}
        return Reply(_tensors(body, found.get(_LENGTH.lower())), found, seconds)

    def _answered(self, verb: str, path: str, body: bytes, headers: Mapping[str, str]) -> tuple[HTTPResponse, bytes]:
        try:
            response, answer = self._send(verb, path, body, headers)
        except (OSError, HTTPException) as error:
            msg = f"no answer from the server: {error or type(error).__name__}"
            raise Declined(msg) from error
        if response.status != 200:  # noqa: PLR2004  # the one good status
            msg = f"{response.status}: {_sentence(answer)}"
            raise Declined(msg)
        return response, answer

    def _send(self, verb: str, path: str, body: bytes, headers: Mapping[str, str]) -> tuple[HTTPResponse, bytes]:
        connection = HTTPConnection(self._host, self._port, timeout=self._timeout)
        try:
            connection.request(verb, path, body, dict(headers))
            response = connection.getresponse()
            return response, response.read()
        finally:
            connection.close()


def _sentence(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode("utf-8", "replace")


def _tensors(body: bytes, json_length: str | None) -> dict[str, Array]:
    """Take a V2 response apart. Raises `Declined` when it is not one."""
    try:
        cut = len(body) if json_length is None else int(json_length)
        found: dict[str, Array] = {}
        for output in json.loads(body[:cut])["outputs"]:
            dtype, shape = _TYPES[output["datatype"]], output["shape"]
            size = output.get("parameters", {}).get("binary_data_size")
            if size is None:
                found[output["name"]] = np.array(output["data"], dtype=dtype).reshape(shape)
            else:
                found[output["name"]] = np.frombuffer(body[cut : cut + size], dtype).reshape(shape)
                cut += size
    except (KeyError, ValueError, TypeError) as error:
        msg = f"the answer is not a V2 response ({type(error).__name__}: {error})"
        raise Declined(msg) from error
    return found


def timings(header: str) -> dict[str, float]:
    """Read a `Server-Timing` header: milliseconds by phase; entries without a duration are left out."""
    phases = {}
    for name, rest in _TIMING.findall(header):
        if duration := _DURATION.search(rest):
            phases[name] = float(duration.group(1))
    return phases
