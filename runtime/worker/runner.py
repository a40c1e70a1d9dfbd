"""The device thread's work: decode a batch, run it, split it, encode and answer each call.

Belongs here: calls from submission to answer. Never: loading, evicting, transport.
A call's failure is that call's alone: a failed batch is run again one by one.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from actors.errors import DeadlineExceeded, ForeloadError
from runtime.worker.batcher import Batcher, Group
from runtime.worker.codec import WireTensor
from runtime.worker.faults import DeviceLost, device_lost, inference_error
from runtime.worker.preprocess.preparer import Preparer
from runtime.workers.pipelines import PreprocessLimits
from runtime.workers.port import Answer, Laid, Timings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    import torch

    from runtime.worker.codec import Codec, InferRequest
    from runtime.worker.engines.port import Runs
    from runtime.worker.preprocess.preparer import Steps
    from runtime.workers.port import LoadSpec


@dataclass(slots=True, eq=False)
class Served:
    """A resident that calls run on; `steps` are for inputs that come as files.

    `batchable` turns false when its outputs show that it has no batch dimension.
    """

    spec: LoadSpec
    engine: Runs
    codec: Codec
    resident: int
    steps: Mapping[str, Steps] = field(default_factory=dict)
    in_flight: int = 0
    batchable: bool = True
    idle: Callable[[], object] | None = None


class Submission:
    """One call. Everything it holds of its body is gone before `done` is told."""

    __slots__ = (
        "_body",
        "_done",
        "_json_length",
        "arrived",
        "decode",
        "fault",
        "left",
        "preparing",
        "request",
        "served",
        "settled",
    )

    def __init__(
        self,
        served: Served,
        body: memoryview,
        json_length: int | None,
        done: Callable[[Answer | Laid | ForeloadError], None],
        arrived: int,
    ) -> None:
        self.served = served
        self.arrived = arrived
        self.decode = 0
        self.request: InferRequest | None = None
        self.settled = False
        self.preparing = False
        self.left = False
        self.fault: Exception | None = None
        self._body: memoryview | None = body
        self._json_length = json_length
        self._done: Callable[[Answer | Laid | ForeloadError], None] | None = done
        served.in_flight += 1

    def __repr__(self) -> str:
        return f"<Submission {self.served.spec.key} {'settled' if self.settled else 'open'}>"

    def cancel(self) -> None:
        """Leave it out unless it is answered already; `done` is told with an error. Device thread only.

        While its files are decoded its body is in use, and the telling waits until they are.
        """
        self.left = True
        if self.preparing:
            return
        self.settle(DeadlineExceeded("the call was cancelled before it started", model=self.served.spec.key))

    def read(self) -> InferRequest:
        """Decode the body once. Raises `Invalid`."""
        if self.fault is not None:
            raise self.fault
        if self.request is None:
            assert self._body is not None
            self.request = self.served.codec.decode(self._body, self._json_length)
        return self.request

    def settle(self, outcome: Answer | Laid | ForeloadError) -> None:
        """Answer, once."""
        done = self._done
        if done is None:
            return
        self._done = self._body = self.request = self.fault = None
        self.settled = True
        self.served.in_flight -= 1
        done(outcome)
        if self.served.idle is not None and not self.served.in_flight:
            self.served.idle()


class Runner:
    """Takes calls and runs them batch by batch. One thread."""

    def __init__(
        self,
        device: torch.device,
        turn: AbstractContextManager[object],
        clock: Callable[[], int] = time.perf_counter_ns,
        limits: PreprocessLimits | None = None,
    ) -> None:
        """`turn` is held while a batch runs; `clock` counts nanoseconds; `limits` are for inputs that come as files."""
        self._device = device
        self._turn = turn
        self._clock = clock
        self._batcher: Batcher[Submission] = Batcher(clock, self._group)
        self.preparer = Preparer(limits or PreprocessLimits())
        self.wake: Callable[[], None] = _nobody
        self._preparing = 0
        self._prepared: deque[Submission] = deque()

    def __repr__(self) -> str:
        return f"<Runner {self._batcher!r}>"

    @property
    def pending(self) -> bool:
        """Whether any call waits."""
        return bool(self._batcher or self._preparing)

    def due(self) -> float | None:
        """Seconds until `step` has something to run; None if nothing is queued, or only what `wake` will tell of."""
        return 0 if self._prepared else self._batcher.due()

    def submit(
        self,
        served: Served,
        body: memoryview,
        json_length: int | None,
        done: Callable[[Answer | Laid | ForeloadError], None],
    ) -> Submission:
        """Queue a call; its body is read when its turn comes, or on another thread if it brings files."""
        call = Submission(served, body, json_length, done, self._clock())
        if served.steps:
            call.preparing = True
            self._preparing += 1
            self.preparer.start(partial(self._prepare, call))
        else:
            self._queue(call)
        return call

    def _queue(self, call: Submission) -> None:
        batch = call.served.spec.batch
        self._batcher.add(call.served.spec.key, call, max_size=batch.max_size, delay=batch.delay)

    def _prepare(self, call: Submission) -> None:
        """Read a call and decode its files, on a thread for that; whatever comes of it, the device thread is told."""
        began = self._clock()
        try:
            if not call.left:
                self._decode(call)
        except Exception as fault:  # noqa: BLE001  # whatever a file provokes is its caller's answer
            call.fault = fault
        call.decode += self._clock() - began
        self._prepared.append(call)
        self.wake()

    def _decode(self, call: Submission) -> None:
        """A frame of its own, so that nothing holds the body any more when the device thread is told."""
        request = call.read()
        request.inputs = self.preparer.prepare(request.inputs, call.served.steps, lambda: call.left)

    def _return(self) -> None:
        """Take back the calls whose files are decoded."""
        while self._prepared:
            call = self._prepared.popleft()
            self._preparing -= 1
            call.preparing = False
            if call.left:
                call.cancel()
            else:
                self._queue(call)

    def step(self) -> None:
        """Run one batch and answer it. Raises `DeviceLost` after answering if the device cannot go on."""
        self._return()
        if batch := self._batcher.take():
            with self._turn:
                self._run(batch)

    def _group(self, call: Submission) -> Group | None:
        """Decode a call whose turn has come, and say what it may share a forward with."""
        began = self._clock()
        try:
            request = call.read()
        except Exception as fault:  # noqa: BLE001  # whatever a body provokes is its caller's answer
            call.settle(inference_error(fault, call.served.spec.key))
            return None
        call.decode += self._clock() - began
        if not call.served.batchable or call.served.spec.batch.max_size <= 1:
            return None
        rows = 0
        shape: list[tuple[str, str, tuple[int, ...]]] = []
        for tensor in request.inputs.values():
            extents = tensor.array.shape
            if not extents or not extents[0] or (shape and extents[0] != rows):
                return None
            rows = extents[0]
            shape.append((tensor.name, tensor.datatype, extents[1:]))
        shape.sort()
        # Two versions under one key (a reload) have queued side by side: never in one forward.
        return Group((id(call.served), *shape), rows) if shape else None

    def _run(self, batch: Sequence[Submission]) -> None:
        served = batch[0].served
        began = self._clock()
        try:
            shares = self._forward(served, [call.read() for call in batch])
        except (Exception, SystemExit) as fault:  # noqa: BLE001  # a model may raise anything and must not end the loop
            shares, error, lost = None, inference_error(fault, served.spec.key), device_lost(fault)
            if lost or len(batch) == 1:
                for call in batch:
                    call.settle(error.again())
            if lost:
                raise DeviceLost("an accelerator error") from None
        if shares is None:
            for call in batch if len(batch) > 1 else ():
                self._run([call])
            return
        infer = self._clock() - began
        answers = [
            self._encoded(call, share, began, infer, len(batch)) for call, share in zip(batch, shares, strict=True)
        ]
        del shares  # it may view a body, and a body is its sender's again once `done` is told
        for call, answer in zip(batch, answers, strict=True):
            call.settle(answer)

    def _forward(self, served: Served, requests: Sequence[InferRequest]) -> list[dict[str, WireTensor]] | None:
        """Outputs of each request; None if they cannot be told apart, which marks the model as not batchable."""
        first = requests[0].inputs
        inputs = first if len(requests) == 1 else {name: _joined([r.inputs[name] for r in requests]) for name in first}
        outputs = served.engine.answer(inputs, {name for request in requests for name in request.wanted})
        if len(requests) == 1:
            return [outputs]
        rows = [next(iter(request.inputs.values())).array.shape[0] for request in requests]
        if any(tensor.array.shape[:1] != (sum(rows),) for tensor in outputs.values()):
            served.batchable = False
            return None
        return _split(outputs, rows)

    def _encoded(
        self, call: Submission, outputs: Mapping[str, WireTensor], began: int, infer: int, batch: int
    ) -> Answer | Laid | ForeloadError:
        started = self._clock()
        try:
            body, json_length = call.served.codec.encode(call.read(), outputs)
        except Exception as fault:  # noqa: BLE001  # an output without a form in the answer is that answer's error
            return inference_error(fault, call.served.spec.key)
        queue = max(0, began - call.arrived - call.decode)
        timings = Timings(queue, call.decode, infer, self._clock() - started, batch)
        if isinstance(body, tuple):
            return Laid(body, json_length, timings)
        return Answer(body, json_length, timings)


def _nobody() -> None:
    """Whoever steps until nothing is pending need not be woken."""


def _joined(tensors: Sequence[WireTensor]) -> WireTensor:
    return WireTensor(tensors[0].name, tensors[0].datatype, np.concatenate([tensor.array for tensor in tensors]))


def _split(outputs: Mapping[str, WireTensor], rows: Sequence[int]) -> list[dict[str, WireTensor]]:
    """Each call's rows as views."""
    ends = list(accumulate(rows))
    return [
        {name: WireTensor(name, tensor.datatype, tensor.array[end - count : end]) for name, tensor in outputs.items()}
        for end, count in zip(ends, rows, strict=True)
    ]
