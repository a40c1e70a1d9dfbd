"""The codec against hostile bodies, against tritonclient, and against itself."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from actors.errors import BadRequest, BadTensor, Invalid, Unsupported
from runtime.worker.codec import Codec, InferRequest, WireTensor
from runtime.worker.datatypes import DATATYPES
from runtime.workers.port import TensorSpec

X = TensorSpec("x", "FP32", (-1, 2))
CODEC = Codec("m@1", [X], [TensorSpec("y", "FP32", (-1, 2)), TensorSpec("z", "INT64", (-1,))])


def codec_for(datatype: str, shape: tuple[int, ...], *, reject_nonfinite: bool = False) -> Codec:
    """One input and one output of a datatype."""
    return Codec(
        "m@1", [TensorSpec("x", datatype, shape)], [TensorSpec("y", datatype, shape)], reject_nonfinite=reject_nonfinite
    )


def x_json(**changes: Any) -> dict[str, Any]:
    """A sound input, with changes; a None removes the member."""
    sound = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}
    return {name: value for name, value in {**sound, **changes}.items() if value is not None}


def body(*inputs: Any, **members: Any) -> bytes:
    """A JSON body."""
    return json.dumps({"inputs": list(inputs or [x_json()]), **members}).encode()


def binary(raw: bytes, *, size: Any = 8, **members: Any) -> tuple[bytes, int]:
    """A binary body and the length of its JSON part."""
    head = body(x_json(data=None, parameters={"binary_data_size": size}), **members)
    return head + raw, len(head)


DEEP = b"[" * 100_000

HOSTILE: list[tuple[str, bytes, int | None, str]] = [
    ("empty", b"", None, "not an inference request"),
    ("not json", b"hello", None, "not an inference request"),
    ("not an object", b"[1]", None, "not an inference request"),
    ("no inputs", b"{}", None, "inputs"),
    ("null inputs", b'{"inputs":null}', None, "inputs"),
    ("truncated", body()[:-5], None, "not an inference request"),
    ("trailing", body() + b"x", None, "not an inference request"),
    ("not utf-8", b'{"inputs":[{"name":"\xff","shape":[],"datatype":"FP32","data":[1]}]}', None, "not an inference"),
    ("lone surrogate name", b'{"inputs":[{"name":"\\ud800x","shape":[]}]}', None, "not an inference request"),
    ("lone surrogate id", b'{"id":"\\udc00","inputs":[]}', None, "not an inference request"),
    ("nan", b'{"inputs":[{"name":"x","shape":[1,2],"datatype":"FP32","data":[NaN,1]}]}', None, "malformed"),
    ("infinity", b'{"inputs":[{"name":"x","shape":[1,2],"datatype":"FP32","data":[1,-Infinity]}]}', None, "malformed"),
    ("1e999", b'{"inputs":[{"name":"x","shape":[1,2],"datatype":"FP32","data":[1e999,1]}]}', None, "'x'"),
    ("1e39 as FP32", body(x_json(data=[1e39, 1])), None, "'x': 'data' is not FP32: Expected `float` <= 3.4"),
    (
        "5000 digits",
        b'{"inputs":[{"name":"x","shape":[1,2],"datatype":"FP32","data":[' + b"9" * 5000 + b",1]}]}",
        None,
        "'x'",
    ),
    (
        "5000 digits of shape",
        b'{"inputs":[{"name":"x","shape":[' + b"9" * 5000 + b'],"datatype":"FP32"}]}',
        None,
        "shape",
    ),
    ("30 digits of shape", body(x_json(shape=[10**30, 2])), None, "'x': its shape has more than"),
    ("overflowing shape", body(x_json(shape=[2**40, 2**40])), None, "'x': its shape has more than"),
    ("hidden by a zero", body(x_json(shape=[0, 2**62], data=[])), None, "'x': its shape has more than"),
    ("negative", body(x_json(shape=[-1, 2])), None, "'x': a dimension is negative"),
    ("fraction in shape", body(x_json(shape=[1.5, 2])), None, "shape"),
    ("40 dimensions", body(x_json(shape=[1] * 40)), None, "'x': 40 dimensions"),
    ("wrong rank", body(x_json(shape=[2])), None, "'x': shape [2] where the model takes [-1, 2]"),
    ("wrong extent", body(x_json(shape=[1, 3], data=[1, 2, 3])), None, "'x': shape [1, 3]"),
    ("too few", body(x_json(data=[1])), None, "'x': 1 elements where its shape needs 2"),
    ("too many", body(x_json(data=[1, 2, 3])), None, "'x': 3 elements"),
    ("ragged", body(x_json(shape=[2, 2], data=[[1, 2, 3], [4]])), None, "'x': 'data' is nested unlike"),
    ("transposed", body(x_json(shape=[1, 2], data=[[1], [2]])), None, "'x': 'data' is nested unlike"),
    ("mixed nesting", body(x_json(data=[1, [2]])), None, "'x': 'data' is not FP32"),
    ("string for a number", body(x_json(data=["1", "2"])), None, "'x': 'data' is not FP32"),
    ("bool for a number", body(x_json(data=[True, False])), None, "'x': 'data' is not FP32"),
    ("null element", body(x_json(data=[None, 1])), None, "'x': 'data' is not FP32"),
    ("data no list", body(x_json(data=1)), None, "'x': 'data' must be a list"),
    ("data an object", body(x_json(data={"a": 1})), None, "'x': 'data' must be a list"),
    ("no datatype", body(x_json(datatype=None)), None, "datatype"),
    ("unknown datatype", body(x_json(datatype="FLOAT")), None, "'x': unknown datatype 'FLOAT'"),
    ("other datatype", body(x_json(datatype="INT64")), None, "'x': datatype INT64 where the model takes FP32"),
    ("unknown input", body(x_json(name="w")), None, "'w' is unknown"),
    ("twice", body(x_json(), x_json()), None, "'x' is given twice"),
    ("missing input", b'{"inputs":[]}', None, "'x' is missing"),
    ("neither", body(x_json(data=None)), None, "'x' has neither"),
    ("both", body(x_json(parameters={"binary_data_size": 8})), None, "'x' has both"),
    ("binary without header", body(x_json(data=None, parameters={"binary_data_size": 8})), None, "'x' is binary, but"),
    ("nested parameter", body(x_json(parameters={"a": {"b": 1}})), None, "parameters"),
    ("parameter list", body(parameters={"a": [1]}), None, "parameters"),
    ("deep data", b'{"inputs":[{"name":"x","shape":[1,2],"datatype":"FP32","data":' + DEEP, None, "nested deeper"),
    ("deep unknown member", b'{"z":' + DEEP, None, "nested deeper"),
    ("deep objects", b'{"a":' * 100_000, None, "nested deeper"),
    ("65 deep", b'{"z":' + b"[" * 64 + b"]" * 64 + b',"inputs":[]}', None, "nested deeper"),
    ("output twice", body(outputs=[{"name": "y"}, {"name": "y"}]), None, "'y' is asked for twice"),
    ("unknown output", body(outputs=[{"name": "q"}]), None, "'q' is unknown"),
    ("binary_data a word", body(outputs=[{"name": "y", "parameters": {"binary_data": "yes"}}]), None, "'binary_data'"),
    ("binary_data_output a number", body(parameters={"binary_data_output": 1}), None, "'binary_data_output'"),
    ("duplicate inputs", b'{"inputs":[],' + body()[1:], None, "'inputs' twice"),
    ("duplicate id", b'{"id":"1","id":"2",' + body()[1:], None, "'id' twice"),
    ("duplicate data", body().replace(b'"data"', b'"data": [1, 2], "data"'), None, "'data' twice"),
    ("duplicate shape", body().replace(b'"shape"', b'"shape": [1, 2], "shape"'), None, "'shape' twice"),
    ("header length negative", *binary(b"\0" * 8)[:1], -1, "Inference-Header-Content-Length"),
    ("header length beyond", body(), len(body()) + 1, "Inference-Header-Content-Length"),
    ("header length cuts", *binary(b"\0" * 8)[:1], 10, "not an inference request"),
    ("leftover", *binary(b"\0" * 9), "1 bytes of the body belong to no input"),
    ("size beyond the body", *binary(b"\0" * 4), "'x': binary_data_size 8 is more"),
    ("size not the shape's", *binary(b"\0" * 4, size=4), "'x': 4 bytes where FP32 and its shape need 8"),
    ("size negative", *binary(b"\0" * 8, size=-8), "'x': binary_data_size must be"),
    ("size a fraction", *binary(b"\0" * 8, size=8.0), "'x': binary_data_size must be"),
    ("size a word", *binary(b"\0" * 8, size="8"), "'x': binary_data_size must be"),
    ("size true", *binary(b"\0" * 8, size=True), "'x': binary_data_size must be"),
    ("size 2**70", *binary(b"\0" * 8, size=2**70), ""),
    ("raw, not a row", b"\0" * 7, 0, "'x': 7 bytes are not a multiple of the 8"),
]


@pytest.mark.parametrize(("raw", "length", "words"), [row[1:] for row in HOSTILE], ids=[row[0] for row in HOSTILE])
def test_a_hostile_body_is_refused_with_the_field_named(raw: bytes, length: int | None, words: str) -> None:
    """Nothing but `Invalid` ever comes out of a bad body (F28, F29, F30)."""
    with pytest.raises((BadRequest, BadTensor)) as caught:
        CODEC.decode(raw, length)
    assert words in caught.value.message


@settings(max_examples=300, deadline=None)
@given(raw=st.binary(max_size=200), length=st.none() | st.integers(-2, 250))
def test_random_bytes_never_raise_anything_but_invalid(raw: bytes, length: int | None) -> None:
    """Fuzz: garbage in, `Invalid` or a request out."""
    for codec in (CODEC, codec_for("BYTES", (-1,)), codec_for("BOOL", (-1, -1))):
        with contextlib.suppress(Invalid):
            codec.decode(raw, length)


@settings(max_examples=300, deadline=None)
@given(at=st.integers(0, 400), byte=st.integers(0, 255), length=st.none() | st.integers(0, 200))
def test_a_sound_body_with_one_wrong_byte_never_raises_anything_but_invalid(
    at: int, byte: int, length: int | None
) -> None:
    """Fuzz near the grammar, where parsers break."""
    raw, head = binary(np.array([1, 2], np.float32).tobytes(), id="a", outputs=[{"name": "y"}])
    mutated = bytearray(raw)
    mutated[at % len(raw)] = byte
    with contextlib.suppress(Invalid):
        CODEC.decode(bytes(mutated), head if length is None else length)


def test_brackets_inside_strings_are_not_nesting() -> None:
    """Text full of brackets is data, not depth."""
    codec = codec_for("BYTES", (1,))
    text = "[" * 500 + '"' + "{" * 500
    raw = body({"name": "x", "shape": [1], "datatype": "BYTES", "data": [text]})
    assert codec.decode(raw, None).inputs["x"].array[0] == text.encode()


def test_member_names_inside_text_are_not_duplicates() -> None:
    """BYTES data may say `data` and `inputs` as often as it likes."""
    codec = codec_for("BYTES", (3,))
    raw = body({"name": "x", "shape": [3], "datatype": "BYTES", "data": ["data", "inputs", "inputs"]})
    assert list(codec.decode(raw, None).inputs["x"].array) == [b"data", b"inputs", b"inputs"]
    assert codec.decode(
        body({"name": "x", "shape": [3], "datatype": "BYTES", "data": ["", "", ""]}, a="id", id="id"), None
    )


def test_unknown_members_are_ignored() -> None:
    """As every server of the protocol does."""
    assert CODEC.decode(body(custom={"a": [1, 2]}), None).inputs["x"].array.tolist() == [[1, 2]]


@pytest.mark.parametrize("data", [[1, 2, 3, 4], [[1, 2], [3, 4]]])
def test_data_may_be_flat_or_nested(data: list[Any]) -> None:
    """Row-major either way."""
    got = CODEC.decode(body(x_json(shape=[2, 2], data=data)), None).inputs["x"].array
    np.testing.assert_array_equal(got, np.array([[1, 2], [3, 4]], np.float32))
    assert got.dtype == np.float32


@pytest.mark.parametrize("name", ["shared_memory_region", "shared_memory_byte_size"])
def test_shared_memory_is_unsupported(name: str) -> None:
    """A region is 501, for inputs and outputs alike."""
    with pytest.raises(Unsupported, match="'x'"):
        CODEC.decode(body(x_json(data=None, parameters={name: "r"})), None)
    with pytest.raises(Unsupported, match="'y'"):
        CODEC.decode(body(outputs=[{"name": "y", "parameters": {"shared_memory_region": "r"}}]), None)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"\x05\0\0\0ab", "longer than what is left"),
        (b"\x01\0\0", "cut off in its length"),
        (b"\xff\xff\xff\xffa", "longer than what is left"),
        (b"\x01\0\0\0a\x01\0\0\0b\x01\0\0\0c", "more than 2"),
        (b"\x01\0\0\0a", "1 BYTES elements where its shape needs 2"),
        (b"", "0 BYTES elements"),
    ],
)
def test_bytes_with_bad_lengths_are_refused(raw: bytes, words: str) -> None:
    """Each length is held against what is left before anything is believed (F29)."""
    head = body({"name": "x", "shape": [2], "datatype": "BYTES", "parameters": {"binary_data_size": len(raw)}})
    with pytest.raises(BadTensor, match=words):
        codec_for("BYTES", (-1,)).decode(head + raw, len(head))


def test_a_bool_byte_must_be_zero_or_one() -> None:
    """Any other byte is undefined behaviour in a tensor library."""
    head = body({"name": "x", "shape": [2], "datatype": "BOOL", "parameters": {"binary_data_size": 2}})
    codec = codec_for("BOOL", (-1,))
    assert codec.decode(head + b"\1\0", len(head)).inputs["x"].array.tolist() == [True, False]
    with pytest.raises(BadTensor, match="'x'"):
        codec.decode(head + b"\2\0", len(head))


@pytest.mark.parametrize(
    ("datatype", "value"), [("UINT8", 256), ("INT8", -129), ("UINT64", 2**64), ("INT64", 2**63), ("UINT32", -1)]
)
def test_integers_out_of_range_are_refused(datatype: str, value: int) -> None:
    """Never wrapped around."""
    with pytest.raises(BadTensor, match="'x'"):
        codec_for(datatype, (1,)).decode(body({"name": "x", "shape": [1], "datatype": datatype, "data": [value]}), None)


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_half_precision_has_no_json_form(datatype: str) -> None:
    """Neither in nor out; the message says what to do instead."""
    codec = codec_for(datatype, (1,))
    with pytest.raises(BadTensor, match="binary"):
        codec.decode(body({"name": "x", "shape": [1], "datatype": datatype, "data": [1]}), None)
    raw = codec.decode(b"\0\0", 0)
    raw.wanted = {"y": False}
    with pytest.raises(BadTensor, match="binary_data"):
        codec.encode(raw, {"y": WireTensor("y", datatype, raw.inputs["x"].array)})


NONFINITE = {
    "FP32": np.array([1, np.nan], np.float32),
    "FP64": np.array([-np.inf, 1]),
    "FP16": np.array([np.inf, 1], np.float16),
    "BF16": np.array([0x7F80, 0x3F80], np.uint16),
}


@pytest.mark.parametrize("datatype", NONFINITE)
def test_nonfinite_inputs_pass_unless_the_model_refuses_them(datatype: str) -> None:
    """Binary NaN is legal by default (F31)."""
    raw = NONFINITE[datatype].tobytes()
    assert codec_for(datatype, (-1,)).decode(raw, 0).inputs["x"].array.tobytes() == raw
    with pytest.raises(BadTensor, match="'x' holds NaN"):
        codec_for(datatype, (-1,), reject_nonfinite=True).decode(raw, 0)
    finite = NONFINITE[datatype][:1] if datatype == "FP32" else NONFINITE[datatype][1:]
    assert codec_for(datatype, (-1,), reject_nonfinite=True).decode(finite.tobytes(), 0)


def test_a_nonfinite_output_is_legal_in_binary_and_refused_in_json() -> None:
    """Never the token NaN, never null, never 500 (F31)."""
    codec = codec_for("FP32", (-1,))
    out = {"y": WireTensor("y", "FP32", NONFINITE["FP32"])}
    with pytest.raises(BadTensor, match="binary_data"):
        codec.encode(InferRequest(None, {}, {}, {"y": False}), out)
    raw, length = codec.encode(InferRequest(None, {}, {}, {"y": True}), out)
    assert raw[length:] == NONFINITE["FP32"].tobytes()


def test_misaligned_binary_is_copied_and_aligned_binary_is_not() -> None:
    """Kernels get aligned memory; otherwise not a byte is moved."""
    payload = np.array([1, 2], np.float32).tobytes()
    for pad in range(4):
        head, _ = binary(payload, id="p" * pad)
        length = len(head) - len(payload)
        buffer = np.zeros(len(head) + 64, np.uint8)
        start = -buffer.ctypes.data % 64
        view = memoryview(buffer)[start : start + len(head)]
        view[:] = head
        array = CODEC.decode(view, length).inputs["x"].array
        assert array.flags.aligned
        assert array.tolist() == [[1, 2]]
        assert np.shares_memory(array, buffer) == (length % 4 == 0)


def test_the_setting_of_an_output_wins_over_that_of_the_request() -> None:
    """`binary_data` beats `binary_data_output`, both ways."""
    wish = [{"name": "z", "parameters": {"binary_data": False}}, {"name": "y"}]
    request = CODEC.decode(body(parameters={"binary_data_output": True}, outputs=wish), None)
    assert request.wanted == {"z": False, "y": True}
    outputs = {
        "y": WireTensor("y", "FP32", np.ones((1, 2), np.float32)),
        "z": WireTensor("z", "INT64", np.array([7])),
    }
    raw, length = CODEC.encode(request, outputs)
    answer = orjson.loads(raw[:length])
    assert answer == {
        "model_name": "m",
        "model_version": "1",
        "outputs": [
            {"name": "z", "datatype": "INT64", "shape": [1], "data": [7]},
            {"name": "y", "datatype": "FP32", "shape": [1, 2], "parameters": {"binary_data_size": 8}},
        ],
    }
    assert raw[length:] == np.ones(2, np.float32).tobytes()
    plain, none = CODEC.encode(CODEC.decode(body(id=""), None), outputs, {"note": 1})
    assert none is None
    assert orjson.loads(plain)["id"] == ""
    assert orjson.loads(plain)["parameters"] == {"note": 1}


def test_raw_binary_derives_the_one_variable_dimension() -> None:
    """One input, at most one variable dimension; BYTES only as a single element; outputs come back binary."""
    request = CODEC.decode(np.arange(6, dtype=np.float32).tobytes(), 0)
    assert request.inputs["x"].array.shape == (3, 2)
    assert request.wanted == {"y": True, "z": True}
    assert codec_for("BYTES", (1,)).decode(b"\x00\xffhi", 0).inputs["x"].array[0] == b"\x00\xffhi"
    for codec in (
        codec_for("FP32", (-1, -1)),
        codec_for("BYTES", (2,)),
        Codec("m@1", [X, TensorSpec("w", "FP32", (1,))], []),
    ):
        with pytest.raises(BadRequest):
            codec.decode(b"\0" * 8, 0)
    with pytest.raises(BadTensor):
        codec_for("FP32", (2,)).decode(b"\0" * 4, 0)
    with pytest.raises(BadTensor):
        codec_for("FP32", (-1, 0)).decode(b"\0" * 4, 0)


NUMERIC = [one for one in DATATYPES.values() if one.name not in ("BYTES", "BF16")]


@st.composite
def tensors(draw: st.DrawFn) -> WireTensor:
    """Any tensor of any numeric datatype, zero extents included."""
    datatype = draw(st.sampled_from(NUMERIC))
    shape = draw(npst.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
    return WireTensor("x", datatype.name, draw(npst.arrays(datatype.dtype, shape)))


def nested(tensor: WireTensor) -> dict[str, Any]:
    """The input in JSON, nested when it has rows."""
    data = tensor.array.tolist() if tensor.array.ndim else [tensor.array.tolist()]
    return {"name": "x", "shape": list(tensor.array.shape), "datatype": tensor.datatype, "data": data}


@settings(max_examples=200, deadline=None)
@given(tensor=tensors(), offset=st.integers(0, 8))
def test_binary_round_trip_is_exact(tensor: WireTensor, offset: int) -> None:
    """Decode what was sent, encode it, decode it again: every bit is there, whatever the alignment."""
    codec = codec_for(tensor.datatype, (-1,) * tensor.array.ndim)
    raw = tensor.array.tobytes()
    head = body(
        {
            "name": "x",
            "shape": list(tensor.array.shape),
            "datatype": tensor.datatype,
            "parameters": {"binary_data_size": len(raw)},
        },
        id="i" * offset,
        parameters={"binary_data_output": True},
    )
    request = codec.decode(head + raw, len(head))
    got = request.inputs["x"].array
    assert (got.shape, got.dtype, got.tobytes()) == (tensor.array.shape, tensor.array.dtype, raw)
    answer, length = codec.encode(request, {"y": WireTensor("y", tensor.datatype, got)})
    assert answer[length:] == raw


@settings(max_examples=200, deadline=None)
@given(tensor=tensors())
def test_json_round_trip_is_exact_for_finite_values(tensor: WireTensor) -> None:
    """JSON carries every finite value of the datatypes that have a JSON form; the rest is refused."""
    codec = codec_for(tensor.datatype, (-1,) * tensor.array.ndim)
    finite = tensor.array.dtype.kind != "f" or bool(np.isfinite(tensor.array).all())
    if tensor.datatype == "FP16" or not finite or 0 in tensor.array.shape:
        return
    request = codec.decode(body(nested(tensor)), None)
    got = request.inputs["x"].array
    assert (got.shape, got.dtype, got.tobytes()) == (tensor.array.shape, tensor.array.dtype, tensor.array.tobytes())
    answer, _ = codec.encode(request, {"y": WireTensor("y", tensor.datatype, got)})
    back = np.array(orjson.loads(answer)["outputs"][0]["data"], tensor.array.dtype)
    assert back.tobytes() == tensor.array.tobytes()


@settings(max_examples=100, deadline=None)
@given(elements=st.lists(st.binary(max_size=20), max_size=6))
def test_bytes_round_trip_is_exact(elements: list[bytes]) -> None:
    """Length-prefixed elements survive, empty ones and zeros included."""
    codec = codec_for("BYTES", (-1,))
    raw = b"".join(len(one).to_bytes(4, "little") + one for one in elements)
    head = body(
        {"name": "x", "shape": [len(elements)], "datatype": "BYTES", "parameters": {"binary_data_size": len(raw)}}
    )
    request = codec.decode(head + raw, len(head))
    assert list(request.inputs["x"].array) == elements
    request.wanted = {"y": True}
    answer, length = codec.encode(request, {"y": WireTensor("y", "BYTES", request.inputs["x"].array)})
    assert answer[length:] == raw


def test_bytes_output_in_json_must_be_text() -> None:
    """UTF-8 goes out as strings; anything else asks for binary."""
    codec = codec_for("BYTES", (-1,))
    array = np.array(["ä".encode(), "b"], dtype=object)
    answer, _ = codec.encode(InferRequest(None, {}, {}, {"y": False}), {"y": WireTensor("y", "BYTES", array)})
    assert orjson.loads(answer)["outputs"][0]["data"] == ["ä", "b"]
    array[0] = b"\xff"
    with pytest.raises(BadTensor, match="UTF-8"):
        codec.encode(InferRequest(None, {}, {}, {"y": False}), {"y": WireTensor("y", "BYTES", array)})


TRITON = {
    "FP32": np.array([[1.5, -2]], np.float32),
    "INT64": np.array([[2**40, -1]], np.int64),
    "BOOL": np.array([[True, False]]),
    "BYTES": np.array([[b"a", b"\x00bc"]], object),
    "FP16": np.array([[1.5, np.inf]], np.float16),
}


@pytest.mark.parametrize("datatype", TRITON)
def test_what_tritonclient_sends_and_reads_is_what_we_read_and_send(datatype: str) -> None:
    """The best oracle there is: its request decodes, and it decodes our answer."""
    http = pytest.importorskip("tritonclient.http")
    array = TRITON[datatype]
    tensor = http.InferInput("x", list(array.shape), datatype)
    tensor.set_data_from_numpy(array, binary_data=True)
    raw, length = http.InferenceServerClient.generate_request_body([tensor], request_id="r")
    codec = codec_for(datatype, (-1, 2))
    request = codec.decode(raw, length)
    assert request.inputs["x"].array.tolist() == array.tolist()
    answer, head = codec.encode(request, {"y": WireTensor("y", datatype, request.inputs["x"].array)})
    back = http.InferenceServerClient.parse_response_body(answer, header_length=head)
    assert back.as_numpy("y").tolist() == array.tolist()
    assert back.get_response()["id"] == "r"


def test_the_depth_limit_is_a_setting():
    """`server.limits.json_depth`: what one server refuses, another reads."""
    body = b'{"parameters":{},"inputs":[{"name":"x","datatype":"FP32","shape":[1,1,1],"data":[[[1.0]]]}]}'
    spec = (TensorSpec("x", "FP32", (-1, -1, -1)),)
    Codec("m@1", spec, (), json_depth=8).decode(body, None)
    with pytest.raises(BadRequest, match="deeper than 4"):
        Codec("m@1", spec, (), json_depth=4).decode(body, None)
