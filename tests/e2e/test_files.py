"""Pictures and sounds over HTTP to real models: a photograph of a face, a tone, a voice; and one file for several."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import re
import shutil
import socket
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np
import pytest
import tritonclient.http as triton
from PIL import Image

from runtime.demo import signals
from runtime.demo.weights import MODELS
from tests.e2e.live import HOST, rows, serving
from tests.e2e.shelf import put
from tests.runtime.worker.preprocess.files import wav, wav24

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.e2e.live import Live, Said

pytestmark = [pytest.mark.real, pytest.mark.slow]

BY_NAME = {model.name: model for model in MODELS}
PHOTO = Path(mpl.get_data_path()) / "sample_data" / "grace_hopper.jpg"
"""A public-domain portrait of 1984 that comes with matplotlib."""
FACE = (150, 45, 370, 265)
"""Where the face is in it: left, top, right, bottom."""

FACES = {"kind": "image", "resize": "exact", "size": 48, "mean": 0.5, "std": 128 / 255}
"""MTCNN's own scaling, (x - 127.5) / 128."""
PITCH = {"kind": "audio", "rate": 16_000, "window": {"size": 1024, "hop": 320}}
SPEECH = {"kind": "audio", "rate": 16_000, "window": {"size": 576, "hop": 512, "lead": 64}}
CHOICES: dict[str, tuple[str, dict[str, Any]]] = {
    "onet": ("mtcnn-onet", FACES),
    "onet-again": ("mtcnn-onet", FACES),
    "pnet": ("mtcnn-pnet", FACES),
    "pitch": ("crepe-tiny", PITCH),
    "speech": ("silero-vad", SPEECH),
}


@pytest.fixture(scope="module")
def shelf(demo_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's models under names of their own, their first input declared to come as a file."""
    folder = tmp_path_factory.mktemp("files")
    for name, (source, preprocess) in CHOICES.items():
        shutil.copytree(demo_repository / source, folder / "models" / name)
        model = dataclasses.replace(BY_NAME[source], name=name, extra={**BY_NAME[source].extra})
        text = model.manifest()
        first = model.inputs[0][0]
        declared = f"  - name: {first}\n    preprocess: {json.dumps(preprocess)}\n"
        assert text.count(f"  - name: {first}\n") == 1
        text = text.replace(f"  - name: {first}\n", declared)
        (folder / "models" / name / "foreload.yaml").write_text(text, encoding="utf-8")
    return folder


@contextmanager
def server(shelf: Path, demo_cache: Path, **changes: Any) -> Iterator[Live]:
    """A server over those models, with room for all of them."""
    with serving(shelf, disk__path=str(demo_cache), devices__memory="256MiB", **changes) as live:
        yield live


def face(size: int = 220, kind: str = "JPEG") -> bytes:
    """The face of the photograph as a file of its own."""
    file = io.BytesIO()
    Image.open(PHOTO).crop(FACE).resize((size, size)).save(file, kind)
    return file.getvalue()


def in_json(name: str, *files: bytes, **more: Any) -> bytes:
    """A request with files as base64."""
    data = [base64.b64encode(file).decode() for file in files]
    tensor = {"name": name, "datatype": "BYTES", "shape": [len(files)], "data": data}
    return json.dumps({"inputs": [tensor, *more.pop("inputs", ())], **more}).encode()


def in_binary(name: str, *files: bytes, **more: Any) -> tuple[bytes, dict[str, str]]:
    """A request with files as they are, and its header."""
    tail = b"".join(len(file).to_bytes(4, "little") + file for file in files)
    tensor = {"name": name, "datatype": "BYTES", "shape": [len(files)], "parameters": {"binary_data_size": len(tail)}}
    head = json.dumps({"inputs": [tensor], **more}).encode()
    return head + tail, {"Inference-Header-Content-Length": str(len(head))}


def outputs(said: Said) -> dict[str, Any]:
    """Tensors of a JSON answer."""
    assert said.status == 200, said.body
    return tensors(said.json)


def tensors(answer: Any) -> dict[str, Any]:
    """Tensors of one V2 answer."""
    return {row["name"]: np.array(row["data"], np.float32).reshape(row["shape"]) for row in answer["outputs"]}


def shared(live: Live) -> dict[str, int]:
    """Hits, misses and bytes, as `/metrics` has them."""
    page = live.get("/metrics").body.decode()
    found = re.findall(r'^foreload_preprocess_(\w+)\{device="cpu:0"\} ([\d.]+)', page, re.MULTILINE)
    return {name: int(float(value)) for name, value in found}


def test_a_photograph_is_recognised_as_a_face_by_models_that_decode_it_once(shelf: Path, demo_cache: Path) -> None:
    """JPEG in JSON, in binary, raw, and from NVIDIA's client: one answer to the bit. Noise as PNG is no face."""
    with server(shelf, demo_cache) as live:
        metadata = live.get("/v2/models/onet").json
        assert metadata["inputs"] == [{"name": "image", "datatype": "BYTES", "shape": [-1]}]
        assert [row["name"] for row in metadata["outputs"]] == ["probability", "box", "landmarks"]

        found = outputs(live.infer("onet", in_json("image", face())))
        assert found["probability"][0, 1] > 0.9
        eyes, mouth = found["landmarks"][0, 5:7], found["landmarks"][0, 8:10]
        assert eyes.max() < mouth.min(), "the eyes are above the mouth"
        noise = np.random.default_rng(0).integers(0, 255, (60, 60, 3)).astype(np.uint8)
        file = io.BytesIO()
        Image.fromarray(noise).save(file, "PNG")
        assert outputs(live.infer("onet", in_json("image", file.getvalue())))["probability"][0, 1] < 0.5

        body, header = in_binary("image", face())
        again = outputs(live.infer("onet-again", body, header))
        assert all(np.array_equal(again[name], found[name]) for name in found)
        raw = live.infer("onet", face(), {"Inference-Header-Content-Length": "0"})
        assert raw.status == 200
        assert np.array_equal(
            np.frombuffer(raw.body[int(raw.headers["inference-header-content-length"]) :], np.float32)[:2],
            found["probability"][0],
        )
        told = {"hits_total": 3, "misses_total": 2, "cache_bytes": 2 * 3 * 48 * 48 * 4}
        client = triton.InferenceServerClient(f"{HOST}:{live.port}")
        asked = triton.InferInput("image", [1], "BYTES")
        asked.set_data_from_numpy(np.array([face()], dtype=object))
        answer = client.infer("onet", [asked])
        client.close()
        assert all(np.array_equal(answer.as_numpy(name), found[name]) for name in found)
        live.until(lambda: shared(live) == told, "two files decoded, for five answers")
        assert live.state()["workers"]["cpu:0"]["preprocess"] == {"hits": 3, "misses": 2, "bytes": 55_296}


def test_one_request_compares_models_on_one_file(shelf: Path, demo_cache: Path) -> None:
    """Three cold models and one that does not exist: one decoding, a row each, every lease given back."""
    with server(shelf, demo_cache) as live:
        said = live.post("/api/v1/compare", in_json("image", face(), models=["onet", "pnet@1", "nobody", "onet-again"]))
        assert said.status == 200, said.body
        found = said.json["answers"]
        assert [(row["model"], row["status"]) for row in found] == [
            ("onet", 200),
            ("pnet@1", 200),
            ("nobody", 404),
            ("onet-again", 200),
        ]
        assert {row["found"] for row in found if row["status"] == 200} <= {"disk", "host", "device"}
        one, other = tensors(found[0]["answer"]), tensors(found[3]["answer"])
        assert one["probability"][0, 1] > 0.9
        assert all(np.array_equal(one[name], other[name]) for name in one)
        assert tensors(found[1]["answer"])["probability"].shape[:2] == (1, 2)
        told = {"hits_total": 2, "misses_total": 1, "cache_bytes": 3 * 48 * 48 * 4}
        live.until(lambda: shared(live) == told, "one file decoded, for three models")
        assert live.device()["leases"] == 0


def test_a_cold_model_costs_a_comparison_no_more_than_its_deadline(tmp_path: Path) -> None:
    """One is resident, one takes 3 s to load: with a second to wait, one row answers and the other says why not."""
    put(tmp_path / "models", "quick")
    put(tmp_path / "models", "late", factory="late", seconds=3.0)
    with serving(tmp_path) as live:
        assert live.infer("quick").status == 200
        body = json.dumps({**json.loads(rows(1, 1, 1)), "models": ["late", "quick"]}).encode()
        said = live.post("/api/v1/compare", body, {"foreload-timeout": "1s"})
        late, quick = said.json["answers"]
        assert (late["status"], late["error"]["code"]) == (504, "deadline_exceeded")
        assert quick["status"] == 200
        assert 0.9 < said.seconds < 2.5
        said = live.post("/api/v1/compare", body)
        assert [row["status"] for row in said.json["answers"]] == [200, 200]
        live.until(lambda: live.device()["leases"] == 0 and live.device()["waiting"] == 0, "every place given up")


def test_a_client_that_leaves_a_comparison_frees_every_place(tmp_path: Path) -> None:
    """Two models on their way for it alone: nobody waits, nothing is leased, and the server goes on."""
    for name in ("late", "later"):
        put(tmp_path / "models", name, factory="late", seconds=5.0)
    put(tmp_path / "models", "quick")
    with serving(tmp_path) as live:
        body = json.dumps({**json.loads(rows(1, 1, 1)), "models": ["late", "quick", "later"]}).encode()
        with socket.create_connection((HOST, live.port)) as client:
            head = f"POST /api/v1/compare HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
            client.sendall(head.encode() + body)
            live.until(lambda: live.device()["waiting"] == 2 and "quick" in live.residents(), "two wait, one answered")
        live.until(lambda: live.device()["waiting"] == 0 and live.device()["leases"] == 0, "places given up", 3.0)
        assert live.infer("quick").status == 200


def test_a_tone_at_another_rate_sounds_as_high_and_a_voice_is_a_voice(shelf: Path, demo_cache: Path) -> None:
    """WAV of 24 bits in stereo at 44.1 kHz and of 16 bits in mono: windows of the file are the model's rows."""
    with server(shelf, demo_cache) as live:
        time = np.arange(22_050) / 44_100
        tone = (0.5 * np.sin(2 * np.pi * 440 * time) * 2**23).astype(np.int32)
        found = outputs(live.infer("pitch", in_json("frames", wav24(np.stack([tone, tone], axis=1), 44_100))))
        assert found["activation"].shape == (1 + (8_000 - 1024) // 320, 360)
        assert np.median(signals.pitch(found["activation"])) == pytest.approx(440, rel=0.005)

        windows = 4
        for sound, likely in ((np.zeros(signals.RATE, np.float32), False), (signals.voiced(120, 1.0), True)):
            file = wav((sound[: windows * 512, None] * 2**15).astype("<i2"))
            state = {"name": "state", "datatype": "FP32", "shape": [windows, 2, 128], "data": [0.0] * windows * 256}
            said = live.infer("speech", in_json("audio", file, inputs=[state]))
            assert (outputs(said)["probability"].max() > 0.5) == likely


def test_hostile_files_are_refused_by_name_while_others_are_served(shelf: Path, demo_cache: Path) -> None:
    """Each is a 400 that names the input; worker and residents stay, and a good file beside them is answered."""
    bomb = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\xff\xff\0\0\xff\xff\x08\x02\0\0\0" + b"\xaa\x32\x94\x49"
    hostile = [
        b"",
        b"GIF89a" + bytes(100),
        bomb,
        face()[:2000],
        face(kind="PNG")[:2000],
        b"\xff\xd8\xff" + bytes(1000),
        wav(np.zeros((10, 1), "<i2")),
    ]
    with server(shelf, demo_cache, preprocess={"pixels": 1_000_000}) as live:
        expected = outputs(live.infer("onet", in_json("image", face())))
        worker = live.worker
        for file in hostile:
            for body, header in (in_binary("image", file), (in_json("image", file), {})):
                said = live.infer("onet", body, header)
                assert (said.status, said.json["code"]) == (400, "bad_tensor"), said.body
                assert said.json["error"].startswith("input 'image' ")
                assert said.json["model"].startswith("onet")
        said = live.infer("pitch", in_json("frames", wav(np.zeros((10, 1), "<i2"))))
        assert said.status == 400
        assert "input 'frames' has 10 samples at 16000 a second, less than a window needs" in said.json["error"]
        assert (
            live.infer("onet", b'{"inputs":[{"name":"image","datatype":"BYTES","shape":[1],"data":["?"]}]}').status
            == 400
        )
        found = outputs(live.infer("onet", in_json("image", face())))
        assert all(np.array_equal(found[name], expected[name]) for name in found)
        assert live.worker == worker
