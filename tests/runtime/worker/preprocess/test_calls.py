"""Calls that bring files, through the core: what the model sees, what is shared, and who never has to wait."""

from __future__ import annotations

import base64
import threading
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import orjson
import pytest
import torch

from actors.errors import BadRequest, BadTensor, Conflict, DeadlineExceeded, ForeloadError
from runtime.worker.core import Core
from runtime.worker.preprocess.image import image
from runtime.worker.preprocess.sound import sound
from runtime.workers.pipelines import AudioPipeline, ImagePipeline, Prepared, PreprocessLimits
from runtime.workers.port import Answer, BatchSpec, Laid, TensorSpec
from tests.runtime.worker import modules
from tests.runtime.worker.modules import ALLOW, randomised, saved, spec_for
from tests.runtime.worker.preprocess.files import photo, riff, wav

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from runtime.workers.port import LoadSpec

    Put = Callable[..., Core]

PICTURE = ImagePipeline("FP32", (6, 6), "exact", mean=(0.5,) * 3, std=(0.25,) * 3)
OTHER = ImagePipeline("FP32", (6, 6), "letterbox")
FOUR = AudioPipeline("FP32", 16_000, length=4)
WINDOWS = AudioPipeline("FP32", 16_000, window=4, hop=4)
X = TensorSpec("x", "FP32", (-1, 3, 6, 6), PICTURE)


def never() -> bool:
    return False


@pytest.fixture
def put(tmp_path: Path) -> Put:
    """Load a module of the tests under a key, with an input that comes as a file."""

    def load(
        core: Core,
        key: str,
        *inputs: TensorSpec,
        name: str = "Normed",
        y: tuple[int, ...] = (-1, -1),
        batch: BatchSpec | None = None,
    ) -> Core:
        weights = tmp_path / f"{name}.safetensors"
        if not weights.exists():
            saved(weights, randomised(getattr(modules, name)))
        outputs = (TensorSpec("y", "FP32", y),)
        spec: LoadSpec = spec_for(weights, name, key=key, fingerprint=name, inputs=inputs or (X,), outputs=outputs)
        core.load(msgspec.structs.replace(spec, batch=batch or BatchSpec()), never)
        return core

    return load


def in_json(*files: bytes, shape: list[int] | None = None, name: str = "x", more: dict[str, Any] | None = None) -> Any:
    """A request with files as base64."""
    data = [base64.b64encode(file).decode() for file in files]
    tensor = {"name": name, "datatype": "BYTES", "shape": shape or [len(files)], "data": data}
    return memoryview(bytearray(orjson.dumps({"inputs": [tensor], **(more or {})}))), None


def in_binary(*files: bytes, name: str = "x") -> Any:
    """A request with files as they are."""
    tail = b"".join(len(file).to_bytes(4, "little") + file for file in files)
    tensor = {"name": name, "datatype": "BYTES", "shape": [len(files)], "parameters": {"binary_data_size": len(tail)}}
    head = orjson.dumps({"inputs": [tensor]})
    return memoryview(bytearray(head + tail)), len(head)


def in_the_raw(file: bytes) -> Any:
    """A request that is one file."""
    return memoryview(bytearray(file)), 0


class Asked:
    """Calls under way on a core; `step` runs until none is."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.told: dict[int, Answer | Laid | ForeloadError] = {}
        self.woken = threading.Event()
        core.attend(self.woken.set)

    def put(self, key: str, request: Any) -> Any:
        number = len(self.told)
        while number in self.told:
            number += 1
        self.told[number] = None  # type: ignore[assignment]
        return self.core.submit(key, *request, lambda outcome: self.told.__setitem__(number, outcome))

    def step(self) -> list[Any]:
        while self.core.pending:
            if self.core.due() is None:
                assert self.woken.wait(10), "nobody woke the device thread"
                self.woken.clear()
            self.core.step()
        return [_values(outcome) for outcome in self.told.values()]


def _values(outcome: Answer | Laid | ForeloadError) -> Any:
    if isinstance(outcome, ForeloadError):
        return outcome
    assert isinstance(outcome, Answer)
    if outcome.json_length is not None:
        (row,) = orjson.loads(outcome.body[: outcome.json_length])["outputs"]
        return np.frombuffer(outcome.body[outcome.json_length :], np.float32).reshape(row["shape"])
    (row,) = orjson.loads(outcome.body)["outputs"]
    return np.array(row["data"], np.float32).reshape(row["shape"])


def answered(core: Core, key: str, request: Any) -> Any:
    """One call from submission to answer; raises what it was told."""
    asked = Asked(core)
    asked.put(key, request)
    (found,) = asked.step()
    if isinstance(found, ForeloadError):
        raise found
    return found


def expected(core: Core, key: str, *files: bytes, pipeline: ImagePipeline = PICTURE) -> torch.Tensor:
    """What the core's own module gives for the same files, without any of the way there."""
    module = core._mounts[core._served[key].spec.fingerprint].module
    batch = np.stack([image(file, pipeline, PreprocessLimits()) for file in files])
    with torch.inference_mode():
        return module(torch.from_numpy(batch))


@pytest.mark.parametrize("spell", [in_json, in_binary, in_the_raw])
def test_a_file_reaches_the_model_as_its_tensor(put: Put, spell: Callable[..., Any]) -> None:
    """As base64 in JSON, as bytes in the binary extension, and as the whole body."""
    core = put(Core("cpu:0", ALLOW), "a@1")
    found = answered(core, "a@1", spell(photo()))
    assert np.array_equal(found, expected(core, "a@1", photo()).numpy())


def test_several_files_are_a_batch_in_their_order(put: Put) -> None:
    """Different sizes come out alike, and each keeps its row."""
    files = (photo(seed=1), photo(31, 17, "JPEG", seed=2), photo(9, 9, seed=3))
    core = put(Core("cpu:0", ALLOW), "a@1")
    found = answered(core, "a@1", in_binary(*files))
    assert np.array_equal(found, expected(core, "a@1", *files).numpy())


def test_two_models_with_the_same_steps_decode_once(put: Put) -> None:
    """One file, four calls of three models, two kinds of steps: two decodings."""
    core = Core("cpu:0", ALLOW)
    for key in ("a@1", "b@1"):
        put(core, key)
    put(core, "c@1", TensorSpec("x", "FP32", (-1, 3, 6, 6), OTHER))
    asked = Asked(core)
    for key in ("a@1", "b@1", "a@1", "c@1"):
        asked.put(key, in_binary(photo()))
    one, other, again, third = asked.step()
    assert core.prepared() == Prepared(hits=2, misses=2, bytes=2 * 3 * 36 * 4)
    assert np.array_equal(one, again)
    assert np.array_equal(one, expected(core, "a@1", photo()).numpy())
    assert np.array_equal(other, expected(core, "b@1", photo()).numpy())
    assert np.array_equal(third, expected(core, "c@1", photo(), pipeline=OTHER).numpy())


def test_calls_with_files_share_a_forward(put: Put) -> None:
    """Batching sees tensors, whatever they came as."""
    core = put(Core("cpu:0", ALLOW), "a@1", batch=BatchSpec(max_size=8))
    files = [photo(seed=seed) for seed in range(5)]
    asked = Asked(core)
    for file in files:
        asked.put("a@1", in_binary(file))
    while len(core._runner._prepared) < len(files):
        assert asked.woken.wait(10)
        asked.woken.clear()
    found = asked.step()
    assert {outcome.timings.batch for outcome in asked.told.values() if isinstance(outcome, Answer)} == {5}
    assert np.allclose(np.concatenate(found), expected(core, "a@1", *files).numpy(), atol=1e-6)


def test_a_sound_fills_a_row_and_its_windows_a_batch(put: Put) -> None:
    """With a batch dimension in front, one row per file; without one, the windows of one file are the rows."""
    samples = (np.arange(11, dtype="<i2") * 1000)[:, None]
    core = Core("cpu:0", ALLOW)
    put(core, "rows@1", TensorSpec("x", "FP32", (-1, 4), FOUR), name="Linear")
    put(core, "windows@1", TensorSpec("x", "FP32", (-1, 4), WINDOWS), name="Linear")
    module = core._mounts[core._served["rows@1"].spec.fingerprint].module
    row, cut = (sound(wav(samples), one, PreprocessLimits()) for one in (FOUR, WINDOWS))
    assert (row.shape, cut.shape) == ((4,), (2, 4))
    with torch.inference_mode():
        one, two = (module(torch.from_numpy(array)).numpy() for array in (np.stack([row, row]), cut.copy()))
    assert np.array_equal(answered(core, "rows@1", in_binary(wav(samples), wav(samples))), one)
    assert np.array_equal(answered(core, "windows@1", in_binary(wav(samples))), two)


def test_a_model_that_works_in_place_spoils_nothing_for_others(put: Put) -> None:
    """What is shared is copied to whoever may write."""
    core = put(Core("cpu:0", ALLOW), "a@1", name="InPlace", y=(-1, 3, 6, 6))
    first = answered(core, "a@1", in_binary(photo()))
    assert np.array_equal(answered(core, "a@1", in_binary(photo())), first)
    assert core.prepared().hits == 1


WRONG: dict[str, tuple[Any, type[ForeloadError], str]] = {
    "not base64": (
        (memoryview(b'{"inputs":[{"name":"x","datatype":"BYTES","shape":[1],"data":["%%%"]}]}'), None),
        BadTensor,
        "input 'x': element 0 is not base64",
    ),
    "half of base64": (
        (memoryview(b'{"inputs":[{"name":"x","datatype":"BYTES","shape":[1],"data":["abc"]}]}'), None),
        BadTensor,
        "input 'x': element 0 is not base64",
    ),
    "words beyond ASCII": (
        (memoryview('{"inputs":[{"name":"x","datatype":"BYTES","shape":[1],"data":["é"]}]}'.encode()), None),
        BadTensor,
        "input 'x': element 0 is not base64",
    ),
    "empty": (in_json(b""), BadTensor, "input 'x' is empty"),
    "empty and raw": (in_the_raw(b""), BadTensor, "input 'x' is empty"),
    "no file": (in_json(shape=[0]), BadTensor, "input 'x' holds no file"),
    "another format": (in_json(b"GIF89a"), BadTensor, "input 'x' is neither a JPEG nor a PNG"),
    "one of several": (in_binary(photo(), b"rubbish", photo()), BadTensor, "file 1 of input 'x' is neither"),
    "a tensor": (
        (memoryview(b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1,3,6,6],"data":[0]}]}'), None),
        BadTensor,
        "datatype FP32 where the model takes BYTES",
    ),
    "two dimensions": (in_json(photo(), photo(), shape=[1, 2]), BadTensor, "shape"),
    "another name": (in_json(photo(), name="z"), BadTensor, "input 'z' is unknown"),
    "no JSON": ((memoryview(b"{"), None), BadRequest, "JSON"),
    "cut in its length": ((memoryview(in_binary(photo())[0][:-1]), in_binary(photo())[1]), BadTensor, "input 'x'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_file_is_its_callers_fault_and_nobody_elses(put: Put, name: str) -> None:
    """The answer names the input; a good call beside it, and after it, is answered."""
    request, kind, words = WRONG[name]
    core = put(Core("cpu:0", ALLOW), "a@1", batch=BatchSpec(max_size=4, delay=0.05))
    asked = Asked(core)
    for each in (in_binary(photo()), request, in_json(photo(seed=1))):
        asked.put("a@1", each)
    one, wrong, other = asked.step()
    assert type(wrong) is kind
    assert words in wrong.message
    assert wrong.model == "a@1"
    assert isinstance(one, np.ndarray)
    assert isinstance(other, np.ndarray)
    assert core.inventory()[0].in_flight == 0


def test_files_that_come_out_in_different_shapes_are_refused(put: Put) -> None:
    """A batch has one shape."""
    loose = ImagePipeline("FP32", (6,), "shortest")
    core = put(Core("cpu:0", ALLOW), "a@1", TensorSpec("x", "FP32", (-1, 3, -1, -1), loose), name="InPlace")
    with pytest.raises(BadTensor, match=r"its files come out in shapes \[3, 6, 6\] and \[3, 6, 12\]"):
        answered(core, "a@1", in_binary(photo(10, 20), photo(10, 10)))


def test_a_great_many_small_files_cannot_become_more_than_the_limit(put: Put) -> None:
    """A file of 100 bytes may stand for a tensor a thousand times its size, and a body may hold a million of them."""
    core = put(Core("cpu:0", ALLOW, preprocess=PreprocessLimits(result=2000)), "a@1")
    with pytest.raises(BadTensor, match="input 'x' becomes more than 2000 bytes"):
        answered(core, "a@1", in_binary(*[photo(2, 2)] * 5))
    assert answered(core, "a@1", in_binary(*[photo(2, 2)] * 4)).shape[0] == 4


def occupied(core: Core) -> tuple[threading.Event, threading.Event]:
    """Keep the one thread that decodes busy until the second event is set."""
    began, go = threading.Event(), threading.Event()

    def work() -> None:
        began.set()
        assert go.wait(20)

    core._runner.preparer.start(work)
    assert began.wait(10)
    return began, go


def one_thread(put: Put) -> Core:
    """A core with one thread for decoding, a model that takes files and one that does not."""
    core = Core("cpu:0", ALLOW, preprocess=PreprocessLimits(threads=1))
    put(core, "files@1")
    return put(core, "plain@1", TensorSpec("x", "FP32", (-1, 4)), name="Linear")


PLAIN = orjson.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]})


def test_a_file_that_takes_long_keeps_no_other_model_waiting(put: Put) -> None:
    """Decoding is not done by the thread that runs models."""
    core = one_thread(put)
    _, go = occupied(core)
    asked = Asked(core)
    asked.put("files@1", in_binary(photo()))
    assert core.due() is None
    assert core.pending
    asked.put("plain@1", (memoryview(PLAIN), None))
    assert core.due() == 0
    core.step()
    assert [outcome is not None for outcome in asked.told.values()] == [False, True]
    go.set()
    found, _ = asked.step()
    assert np.array_equal(found, expected(core, "files@1", photo()).numpy())


def test_a_call_that_is_cancelled_while_its_file_is_decoded_keeps_its_body_until_then(put: Put) -> None:
    """The body lies in memory that the front uses again once the call is answered."""
    core = one_thread(put)
    _, go = occupied(core)
    asked = Asked(core)
    call = asked.put("files@1", in_binary(photo()))
    call.cancel()
    core.step()
    assert asked.told == {0: None}
    with pytest.raises(Conflict):
        core.evict("files@1")
    go.set()
    (told,) = asked.step()
    assert isinstance(told, DeadlineExceeded)
    assert core.prepared() == Prepared(), "what nobody wanted was decoded"
    assert core.evict("files@1").leaked == 0


def test_files_are_no_part_of_a_model_without_them(put: Put) -> None:
    """BYTES of other inputs and other models stay what they were."""
    core = put(Core("cpu:0", ALLOW), "plain@1", TensorSpec("x", "FP32", (-1, 4)), name="Linear")
    assert answered(core, "plain@1", (memoryview(PLAIN), None)).shape == (1, 3)
    assert core.prepared() == Prepared()
    assert core._runner.preparer._pool is None, "threads are started by the first file"


def test_a_sound_that_lies_is_named_as_well(put: Put) -> None:
    """The sentence of the reader with the input's name in front."""
    core = put(Core("cpu:0", ALLOW), "a@1", TensorSpec("sound", "FP32", (-1, 4), FOUR), name="Linear")
    with pytest.raises(BadTensor, match="input 'sound' is a truncated WAV file: a part of 99 bytes has 8"):
        answered(core, "a@1", in_binary(riff(bytes(8), size=99), name="sound"))


def test_a_sound_with_other_channels_than_the_models_is_refused(put: Put) -> None:
    """The declaration keeps what the file has; the model's shape says what it can take."""
    apart = AudioPipeline("FP32", 16_000, mono=False, length=4)
    core = put(Core("cpu:0", ALLOW), "a@1", TensorSpec("x", "FP32", (-1, 2, 4), apart), name="InPlace", y=(-1, 2, 4))
    assert answered(core, "a@1", in_binary(riff(bytes(32), channels=2))).shape == (1, 2, 4)
    with pytest.raises(BadTensor, match=r"input 'x' comes out in shape \[1, 4\] where the model takes \[2, 4\]"):
        answered(core, "a@1", in_binary(riff(bytes(32))))


def test_the_wire_says_files_where_the_signature_says_tensors() -> None:
    """One file per row of a batch, or one file where there is no batch dimension."""
    assert X.wire == TensorSpec("x", "BYTES", (-1,))
    assert TensorSpec("x", "FP32", (3, 6, 6), PICTURE).wire == TensorSpec("x", "BYTES", (1,))
    assert TensorSpec("x", "FP32", (2, 3, 6, 6), PICTURE).wire == TensorSpec("x", "BYTES", (2,))
    assert TensorSpec("x", "FP32", (-1, 4), WINDOWS).wire == TensorSpec("x", "BYTES", (1,))
    assert TensorSpec("x", "FP32", (-1, -1, 4), WINDOWS).wire == TensorSpec("x", "BYTES", (-1,))
    plain = TensorSpec("x", "BYTES", (3,))
    assert plain.wire is plain
