"""Broken model directories beside good ones in a running server (F1, F9, F11-F16, F46, R22, R35, R40)."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import time
import zipfile
from typing import TYPE_CHECKING

import numpy as np
import pytest
from safetensors.numpy import save_file

from runtime.catalog.describe import write_manifest
from tests.e2e import shelf
from tests.e2e.live import answer, rows, serving

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.e2e.live import Live


class Evil:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[object, tuple[str, ...]]:
        return os.mkdir, (self.path,)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server with one good model. Shared, for a start takes seconds: each test brings models of names of its own."""
    folder = tmp_path_factory.mktemp("artefacts")
    shelf.put(folder / "models", "good", seed=100)
    with serving(folder, policy__backoff={"first": "200ms", "limit": "1s"}) as running:
        running.infer("good")
        yield running


@pytest.fixture
def models(live: Live) -> Path:
    """The server's repository."""
    return live.log.parent / "models"


def directory(models: Path, name: str) -> Path:
    """An empty model directory."""
    path = models / name
    path.mkdir()
    return path


def flipped(path: Path) -> None:
    """Right size, right manifest, one bit of the weights wrong."""
    shelf.mend(path, seed=101)
    weights = path / shelf.WEIGHTS
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)


def cut_but_described(path: Path) -> None:
    """A safetensors file that ends early, with a manifest that was made of it."""
    shelf.mend(path, seed=102)
    weights = path / shelf.WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-4])
    (path / "foreload.yaml").unlink()
    write_manifest(path, shelf.settings(path.name))


def html(path: Path) -> None:
    """An error page in place of weights."""
    (path / shelf.WEIGHTS).write_bytes(b"<!DOCTYPE html><html><body>404 Not Found</body></html>\n" * 4)
    write_manifest(path, shelf.settings(path.name))


def html_pickle(path: Path) -> None:
    """An error page in place of a checkpoint."""
    (path / "model.pth").write_bytes(b"<!DOCTYPE html><html><body>404 Not Found</body></html>\n" * 4)
    write_manifest(path, {**shelf.settings(path.name), "allow_pickle": "weights_only"})


def missing_key(path: Path) -> None:
    """One tensor less than the module has."""
    held = shelf.tensors()
    del held["shift"]
    save_file(held, path / shelf.WEIGHTS)
    write_manifest(path, shelf.settings(path.name))


def unexpected_key(path: Path) -> None:
    """One tensor more than the module has."""
    save_file({**shelf.tensors(), "more": np.zeros(2, np.float32)}, path / shelf.WEIGHTS)
    write_manifest(path, shelf.settings(path.name))


def wrong_shape(path: Path) -> None:
    """Tensors of another size than the module's."""
    save_file(shelf.tensors(width=5), path / shelf.WEIGHTS)
    write_manifest(path, shelf.settings(path.name))


def no_builder(path: Path) -> None:
    """A function that is not there."""
    save_file(shelf.tensors(), path / shelf.WEIGHTS)
    settings = shelf.settings(path.name)
    write_manifest(path, {**settings, "builder": {"kind": "python", "target": "tests.e2e.modules:nothing"}})


def forbidden_builder(path: Path) -> None:
    """A function of a module that the operator did not allow."""
    save_file(shelf.tensors(), path / shelf.WEIGHTS)
    settings = shelf.settings(path.name)
    write_manifest(path, {**settings, "builder": {"kind": "python", "target": "os:getcwd"}})


BROKEN: tuple[tuple[Callable[[Path], None], set[str], str], ...] = (
    (flipped, {"corrupt_weights"}, "sha256"),
    (cut_but_described, {"corrupt_weights"}, ""),
    (html, {"corrupt_weights"}, "html"),
    (html_pickle, {"corrupt_weights"}, "html"),
    (missing_key, {"load_failed", "corrupt_weights"}, "shift"),
    (unexpected_key, {"load_failed", "corrupt_weights"}, "more"),
    (wrong_shape, {"load_failed", "corrupt_weights"}, "scale"),
    (no_builder, {"load_failed"}, "nothing"),
    (forbidden_builder, {"load_failed"}, "os"),
)


def served_again(live: Live, name: str) -> None:
    """Wait until a model answers."""
    live.until(lambda: live.infer(name).status == 200, f"{name} served", 15)


def test_broken_models_are_refused_with_a_reason_and_good_ones_serve_on(live: Live, models: Path) -> None:
    """F1, F9, F11, F14, F16, R40, R41: 503 with code and reason, the same in the index; files mended, it is served.

    One server holds all of them at once, so each is also proof that the others do not suffer from it.
    """
    for spoil, _, _ in BROKEN:
        spoil(directory(models, spoil.__name__))
    for spoil, codes, says in BROKEN:
        name = spoil.__name__
        said = live.infer(name)
        assert said.status == 503, (name, said.body)
        assert said.json["code"] in codes, (name, said.body)
        assert says in said.json["error"].lower(), (name, said.json["error"])
        assert said.json["trace_id"]
        assert "retry-after" in said.headers
        assert str(models.parent) not in said.body.decode()
        row = live.index()[name]
        assert row["state"] == "UNAVAILABLE", row
        assert said.json["code"] in row["reason"], row
        again = live.infer(name)
        assert again.status == 503
        assert live.infer("good").status == 200
        assert live.status(f"/v2/models/{name}/ready") == 503
    device = live.device()
    assert (device["loading"], device["unloading"], device["waiting"], device["leases"]) == (0, 0, 0, 0)
    assert not live.residents() & {spoil.__name__ for spoil, _, _ in BROKEN}
    assert live.worker, "no broken artefact ended the worker"
    assert not live.said("worker lost")

    for number, (spoil, _, _) in enumerate(BROKEN):
        shelf.mend(models / spoil.__name__, seed=number)
    for number, (spoil, _, _) in enumerate(BROKEN):
        name = spoil.__name__
        served_again(live, name)
        wanted = shelf.expected(np.array([[1, 2, 3]], np.float32), seed=number)
        np.testing.assert_array_equal(answer(live.infer(name, rows(1, 2, 3))), wanted)
        assert live.status(f"/v2/models/{name}/ready") == 200
    index = live.index()
    assert all(index[spoil.__name__]["state"] == "READY" for spoil, _, _ in BROKEN)


def test_a_pickle_that_runs_code_runs_none(live: Live, models: Path) -> None:
    """F11: refused by default; with `allow_pickle` still refused, and its side effect is not there."""
    trap = models.parent / "trap"
    for name, extra in (("plain", {}), ("allowed", {"allow_pickle": "weights_only"})):
        path = directory(models, name)
        content = io.BytesIO()
        with zipfile.ZipFile(content, "w") as archive:
            archive.writestr("model/data.pkl", pickle.dumps(Evil(trap)))
            archive.writestr("model/version", "3\n")
        (path / "model.pth").write_bytes(content.getvalue())
        # A manifest that forgets `allow_pickle` cannot be written by our own means.
        write_manifest(path, {**shelf.settings(name), "allow_pickle": "weights_only"})
        if not extra:
            manifest = path / "foreload.yaml"
            kept = [line for line in manifest.read_text().splitlines() if not line.startswith("allow_pickle")]
            manifest.write_text("\n".join(kept) + "\n")
    allowed = live.infer("allowed")
    assert (allowed.status, allowed.json["code"]) == (503, "corrupt_weights"), allowed.body
    plain = live.infer("plain")
    assert plain.status in {404, 503}, plain.body
    row = live.index()["plain"]
    assert row["state"] == "UNAVAILABLE"
    assert "pickle" in row["reason"]
    assert not trap.exists()
    assert live.infer("good").status == 200


def test_a_bomb_is_refused_before_it_grows(live: Live, models: Path) -> None:
    """F12: a .pth whose contents are a thousand times its size is refused; nobody's memory sees it."""
    path = directory(models, "bomb")
    with zipfile.ZipFile(path / "model.pth", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("model/data.pkl", pickle.dumps({}))
        archive.writestr("model/data/0", bytes(300 << 20))
        archive.writestr("model/version", "3\n")
    assert (path / "model.pth").stat().st_size < 1 << 20
    write_manifest(path, {**shelf.settings("bomb"), "allow_pickle": "weights_only"})
    said = live.infer("bomb")
    assert said.status == 503, said.body
    assert said.json["code"] in {"corrupt_weights", "load_failed"}
    assert live.infer("good").status == 200


def test_a_directory_that_is_still_being_copied_waits_and_is_served_when_whole(live: Live, models: Path) -> None:
    """F15, R35: manifest first, weights byte by byte: no 500 and no load of half a file; once whole, it is served."""
    source = shelf.put(models.parent / "elsewhere", "slow", seed=5)
    path = directory(models, "slow")
    shutil.copy(source / "foreload.yaml", path)
    whole = (source / shelf.WEIGHTS).read_bytes()
    seen = set()
    for end in range(0, len(whole), max(1, len(whole) // 6)):
        (path / shelf.WEIGHTS).write_bytes(whole[:end])
        said = live.infer("slow")
        seen.add((said.status, said.json["code"]))
        time.sleep(0.05)
    assert seen <= {(404, "unknown_model"), (503, "not_ready")}, seen
    live.until(lambda: "slow" in live.index(), "listed as pending")
    row = live.index()["slow"]
    assert row["state"] == "UNAVAILABLE"
    assert "incomplete" in row["reason"]
    (path / shelf.WEIGHTS).write_bytes(whole)
    live.until(lambda: live.infer("slow").status == 200, "served once whole", 10)
    assert not [line for line in live.said("load failed") if line["model"] == "slow@1"]


def test_a_bad_manifest_hides_no_other_model(live: Live, models: Path) -> None:
    """R22: an empty manifest, nonsense, and one with an impossible size: three reported, the rest served."""
    for name, text in (("empty", ""), ("nonsense", "]["), ("negative", "name: negative\nversion: '1'\nfiles: []\n")):
        (directory(models, name) / "foreload.yaml").write_text(text)
    live.until(lambda: {"empty", "nonsense", "negative"} <= live.index().keys(), "listed")
    index = live.index()
    for name in ("empty", "nonsense", "negative"):
        assert index[name]["state"] == "UNAVAILABLE"
        assert index[name]["reason"]
        assert str(models.parent) not in index[name]["reason"]
        assert live.infer(name).status in {404, 503}
    assert live.infer("good").status == 200


def test_a_model_larger_than_the_device_is_refused_at_once_with_numbers(live: Live, models: Path) -> None:
    """F46, T5, P4: 507 for infer and load, numbers in `detail`, model-ready says why, and nobody was evicted for it."""
    before, evicted = live.residents(), len(live.said("evicted"))
    width = (80 << 20) // 8
    shelf.put(models, "huge", width=width)
    said = live.infer("huge", rows(1, 1, 1))
    assert (said.status, said.json["code"], said.json["model"]) == (507, "never_fits", "huge")
    assert said.json["detail"]["bytes_needed"] > said.json["detail"]["bytes_available"] == 64 << 20
    assert said.seconds < 5
    again = live.infer("huge", rows(1, 1, 1))
    assert (again.status, again.seconds < 0.5) == (507, True)
    assert live.post("/v2/repository/models/huge/load").status == 507
    ready = live.get("/v2/models/huge/ready")
    assert ready.status == 503
    assert "never_fits" in ready.json["error"]
    assert live.residents() == before
    assert len(live.said("evicted")) == evicted


def test_a_removed_directory_takes_its_model_out_of_service(live: Live, models: Path) -> None:
    """What is taken away is answered 404 within a few seconds, leaves the device, and can come back."""
    path = shelf.put(models, "passing")
    assert live.infer("passing").status == 200
    shutil.rmtree(path)
    live.until(lambda: live.infer("passing").status == 404, "gone", 10)
    live.until(lambda: "passing" not in live.residents(), "its memory is back")
    shelf.put(models, "passing", seed=3)
    live.until(lambda: live.infer("passing").status == 200, "back", 10)


def test_new_weights_replace_old_ones_without_a_wrong_answer(live: Live, models: Path) -> None:
    """I5: after a replacement answers are the new weights'; before it the old ones'; never a mixture or an error."""
    shelf.put(models, "moving", seed=1)
    x = np.array([[1, 2, 3]], np.float32)
    old, new = shelf.expected(x, seed=1), shelf.expected(x, seed=2)
    np.testing.assert_array_equal(answer(live.infer("moving", rows(1, 2, 3))), old)
    staging = shelf.put(models.parent / "staging", "moving", seed=2)
    target = models / "moving"
    os.replace(staging / shelf.WEIGHTS, target / shelf.WEIGHTS)  # noqa: PTH105
    os.replace(staging / "foreload.yaml", target / "foreload.yaml")  # noqa: PTH105
    seen: list[shelf.Floats] = []
    deadline = time.monotonic() + 10
    while not seen or not np.array_equal(seen[-1], new):
        seen.append(answer(live.infer("moving", rows(1, 2, 3))))
        assert time.monotonic() < deadline
        assert np.array_equal(seen[-1], old) or np.array_equal(seen[-1], new)


def test_the_right_bytes_put_back_are_served_after_the_back_off(live: Live, models: Path) -> None:
    """F16, F55: the manifest was right and the weights were not; once they are, the same fingerprint is tried again."""
    path = directory(models, "healed")
    shelf.mend(path, seed=9)
    whole = (path / shelf.WEIGHTS).read_bytes()
    (path / shelf.WEIGHTS).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert live.infer("healed").json["code"] == "corrupt_weights"
    refused = live.infer("healed")
    assert refused.json["code"] == "quarantined", "no retry storm: the second one is refused without a look"
    (path / shelf.WEIGHTS).write_bytes(whole)
    live.until(lambda: live.infer("healed").status == 200, "served", 10)


def test_a_spoiled_copy_does_not_take_its_good_twin_along(live: Live, models: Path) -> None:
    """F16: two directories promise the same bytes and one of them lies; the honest one is served."""
    shelf.put(models, "honest", seed=55)
    path = directory(models, "lying")
    shelf.mend(path, seed=55)
    weights = path / shelf.WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    assert live.infer("lying").status == 503
    assert live.infer("honest").status == 200
