"""Sources on this machine: folders that are allowed, and the hub's cache, which is read without asking anybody."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from actors import events as e
from actors.errors import CorruptWeights, DiskFull, FetchFailed, NotReady
from actors.residency.model import Tier
from runtime.catalog.describe import write_manifest
from runtime.catalog.manifest import parse_manifest
from runtime.catalog.record import record_of
from runtime.catalog.specs import SpecifiedHost
from runtime.tiers.disk import DiskStore
from runtime.tiers.sources import HubPlace, Permits
from tests.runtime.catalog.directories import SETTINGS
from tests.runtime.tiers.places import CHUNK, LOCAL, elsewhere, model_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from runtime.catalog.record import ModelRecord
    from tests.runtime.tiers.places import Place
    from tests.runtime.tiers.web import Exchange, Web

    Make = Callable[..., Place]

ROOT = Path(__file__).resolve().parents[3]
COMMIT = "0123456789abcdef0123456789abcdef01234567"


async def test_a_file_source_is_copied_from_an_allowed_folder(tmp_path: Path, make: Make) -> None:
    """As from anywhere else it is verified, and afterwards its folder is not needed."""
    store = tmp_path / "mount"
    record, content = elsewhere(tmp_path / "m", f"file://{store}")
    store.mkdir()
    (store / "model.safetensors").write_bytes(content)
    place = make(record, permits=Permits(folders=(store,)))
    assert (await place.host.load(model_of(record))).source is Tier.REMOTE
    await place.host.evict(record.key)
    shutil.rmtree(store)
    assert (await place.host.load(model_of(record))).source is Tier.DISK
    assert place.host.path_of(model_of(record)).read_bytes() == content


async def test_a_link_out_of_an_allowed_folder_is_refused(tmp_path: Path, make: Make) -> None:
    """F18: links are followed, and where they end decides; a loop and nothing at all are refused as well."""
    store = tmp_path / "mount"
    record, content = elsewhere(tmp_path / "m", f"file://{store}")
    store.mkdir()
    (tmp_path / "outside").write_bytes(content)
    link = store / "model.safetensors"
    place = make(record, permits=Permits(folders=(store,)))
    for target, says in ((tmp_path / "outside", "link out of"), (link, "not there"), (store / "nothing", "not there")):
        link.symlink_to(target)
        with pytest.raises(FetchFailed, match=says) as caught:
            await place.host.load(model_of(record))
        assert str(tmp_path) not in str(caught.value)
        link.unlink()
    assert not place.blobs


def cached(folder: Path, content: bytes) -> Path:
    """A hub cache as huggingface_hub lays it out, with one file; gives its blob."""
    home = folder / "models--org--name"
    blob = home / "blobs" / "ab12"
    snapshot = home / "snapshots" / COMMIT
    blob.parent.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    blob.write_bytes(content)
    (snapshot / "model.safetensors").symlink_to(Path("../../blobs/ab12"))
    return blob


async def test_the_hubs_cache_is_read_without_asking_anybody(tmp_path: Path, make: Make) -> None:
    """A snapshot of links to blobs; no host is allowed, and none is needed."""
    record, content = elsewhere(tmp_path / "m", f"hf://org/name@{COMMIT}")
    cached(tmp_path / "hub", content)
    place = make(record, permits=Permits(hub=HubPlace(tmp_path / "hub")))
    assert place.remote._web is None
    await place.host.load(model_of(record))
    assert place.host.path_of(model_of(record)).read_bytes() == content


async def test_an_incomplete_snapshot_is_no_snapshot(tmp_path: Path, make: Make) -> None:
    """R38: its blob is gone; offline that is an error that says so, and no answer from half a model."""
    record, content = elsewhere(tmp_path / "m", f"hf://org/name@{COMMIT}")
    cached(tmp_path / "hub", content).unlink()
    place = make(record, permits=Permits(hub=HubPlace(tmp_path / "hub")))
    with pytest.raises(FetchFailed, match="not in the hub's local cache"):
        await place.host.load(model_of(record))


async def test_wrong_bytes_in_the_hubs_cache_are_found(tmp_path: Path, make: Make) -> None:
    """R39: right size, wrong bytes."""
    record, content = elsewhere(tmp_path / "m", f"hf://org/name@{COMMIT}")
    cached(tmp_path / "hub", bytes(len(content)))
    place = make(record, permits=Permits(hub=HubPlace(tmp_path / "hub")))
    with pytest.raises(CorruptWeights, match="sha256"):
        await place.host.load(model_of(record))
    assert not place.blobs


async def test_the_hub_is_asked_only_if_it_has_an_address(tmp_path: Path, web: Web, make: Make) -> None:
    """For exactly that commit, with the token; the cache of the library is not written to."""
    record, content = elsewhere(tmp_path / "m", f"hf://org/name@{COMMIT}")
    web.files[f"/org/name/resolve/{COMMIT}/model.safetensors"] = content
    hub = HubPlace(tmp_path / "hub", web.url, "hf_s3cret")
    place = make(record, permits=replace(LOCAL, hub=hub))
    await place.host.load(model_of(record))
    assert {each.headers["authorization"] for each in web.asked} == {"Bearer hf_s3cret"}
    assert not (tmp_path / "hub").exists()
    assert "s3cret" not in repr((hub, place.remote, place.facts))


# -- other files than weights ------------------------------------------------------------------------


async def test_a_builders_configuration_comes_from_elsewhere_too(tmp_path: Path, web: Web, make: Make) -> None:
    """A folder that holds nothing but a manifest is a model."""
    directory = tmp_path / "m"
    _, content = elsewhere(directory, f"{web.url}/m")
    (directory / "model.safetensors").write_bytes(content)
    (directory / "config.json").write_text('{"model_type": "bert"}')
    builder = {"kind": "transformers", "config": "config.json"}
    write_manifest(directory, {**SETTINGS, "builder": builder, "source": f"{web.url}/m"})
    for name in ("config.json", "model.safetensors"):
        web.files[f"/m/{name}"] = (directory / name).read_bytes()
        (directory / name).unlink()
    record = record_of(directory, parse_manifest((directory / "foreload.yaml").read_text()))
    place = make(record)
    specified = SpecifiedHost(place.host, lambda _: record, place.threads, json_depth=64)
    await specified.load(model_of(record))
    assert specified.resolve(model_of(record)).builder.config == {"model_type": "bert"}
    await specified.evict(record.key)
    assert place.idle()


def pickled(directory: Path, source: str) -> tuple[ModelRecord, bytes]:
    """A model whose weights are a .pth somewhere else."""
    directory.mkdir(parents=True)
    torch.save({"w": torch.arange(65_536, dtype=torch.float32)}, directory / "model.pth")
    content = (directory / "model.pth").read_bytes()
    write_manifest(directory, {**SETTINGS, "allow_pickle": "weights_only", "source": source})
    (directory / "model.pth").unlink()
    return record_of(directory, parse_manifest((directory / "foreload.yaml").read_text())), content


@pytest.mark.slow
async def test_a_pickle_from_elsewhere_is_converted_once_and_not_kept_in_use(
    tmp_path: Path, web: Web, make: Make
) -> None:
    """Verified, converted in the jail, then served as safetensors; later loads need neither network nor converter."""
    record, content = pickled(tmp_path / "m", f"{web.url}/m")
    web.files["/m/model.pth"] = content
    place = make(record)
    assert place.remote.far(record)
    assert (await place.host.load(model_of(record))).source is Tier.REMOTE
    assert place.host.path_of(model_of(record)).read_bytes()[8:9] == b"{"
    assert place.disk.snapshot().held == 1
    await place.host.evict(record.key)
    asked = len(web.asked)
    again = make(record)
    assert not again.remote.far(record)
    assert (await again.host.load(model_of(record))).source is Tier.DISK
    assert len(web.asked) == asked


async def test_without_a_remote_tier_such_a_model_is_not_ready(tmp_path: Path, make: Make) -> None:
    """A program that embeds the host tier alone gets an answer, and no crash."""
    record, _ = elsewhere(tmp_path / "m", "https://models.example.org/m")
    place = make(record)
    place.host._remote = None
    with pytest.raises(NotReady):
        await place.host.load(model_of(record))


# -- crashes and full disks --------------------------------------------------------------------------

PULL = """
import asyncio, sys
from pathlib import Path
from runtime.catalog.manifest import parse_manifest
from runtime.catalog.record import record_of
from tests.runtime.tiers.places import Place, model_of

async def main():
    directory = Path(sys.argv[1])
    record = record_of(directory, parse_manifest((directory / "foreload.yaml").read_text()))
    await Place(Path(sys.argv[2]), record).host.load(model_of(record))

asyncio.run(main())
"""


async def test_a_killed_puller_is_taken_over_where_it_was(tmp_path: Path, web: Web, make: Make) -> None:
    """F24: SIGKILL in the middle: no claim to wait for, nothing promoted, and only the rest is fetched."""
    record, content = elsewhere(tmp_path / "m", f"{web.url}/m")
    web.files["/m/model.safetensors"] = content
    from threading import Event

    reached, dead = Event(), Event()

    def behave(exchange: Exchange) -> bool:
        if exchange.start >= 8 * CHUNK:
            reached.set()
            dead.wait(30)
            return True
        return False

    web.behave = behave
    with subprocess.Popen(  # noqa: ASYNC220 -- the loop has nothing else to do
        [sys.executable, "-c", PULL, str(record.directory), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.DEVNULL,
    ) as child:
        # Requests are made as chunks are written, so the ninth one says that the first ones lie on disk.
        assert reached.wait(60)
        child.send_signal(signal.SIGKILL)
        child.wait()
    dead.set()
    web.behave = lambda _: False
    web.asked.clear()
    place = make(record)
    assert len(place.partials) == 1
    assert not place.blobs
    await place.host.load(model_of(record))
    assert place.host.path_of(model_of(record)).read_bytes() == content
    assert min(start for start, _ in web.ranges) >= 4 * CHUNK
    assert not place.partials
    finished = place.told(e.FetchFinished)[0]
    assert 0 < finished.fetched <= len(content) - 4 * CHUNK


async def test_halves_that_nobody_continues_leave_first_when_room_is_needed(
    tmp_path: Path, web: Web, make: Make
) -> None:
    """The quota counts them, and takes them before anything that is whole."""
    left, content = elsewhere(tmp_path / "left", f"{web.url}/left", name="left")
    whole, other = elsewhere(tmp_path / "whole", f"{web.url}/whole", name="whole", seed=1)
    last, more = elsewhere(tmp_path / "last", f"{web.url}/last", name="last", seed=2)
    for name, held in (("left", content), ("whole", other), ("last", more)):
        web.files[f"/{name}/model.safetensors"] = held
    web.behave = lambda exchange: (
        exchange.path.startswith("/left") and exchange.start > 0 and exchange.status(404) is None
    )
    place = make(left, whole, last, quota=2 * len(content) + 10)
    with pytest.raises(FetchFailed):
        await place.host.load(model_of(left))
    await place.host.load(model_of(whole))
    await place.host.evict(whole.key)
    assert len(place.partials) == 1
    await place.host.load(model_of(last))
    assert not place.partials
    assert not list((place.folder / "partial").iterdir())
    assert len(place.blobs) == 2
    assert place.disk.snapshot().used == 2 * len(content)


def test_halves_that_are_too_old_are_reclaimed_at_the_start(tmp_path: Path) -> None:
    """A week later nobody comes back for them; a journal without its file goes at once."""
    DiskStore(tmp_path / "cache", 1 << 30)
    folder = tmp_path / "cache" / "partial"
    for name in ("old", "old.journal", "fresh", "fresh.journal", "orphan.journal"):
        (folder / name).write_bytes(b"x")
    os.utime(folder / "old", (1, 1))
    DiskStore(tmp_path / "cache", 1 << 30)
    assert sorted(path.name for path in folder.iterdir()) == ["fresh", "fresh.journal"]


def mounted(folder: Path) -> bool:
    """Put a file system of 5 MB there, if we may."""
    command = ["mount", "-t", "tmpfs", "-o", "size=5m", "tmpfs", str(folder)]
    return os.geteuid() == 0 and bool(shutil.which("mount")) and not subprocess.run(command, check=False).returncode


def unmount(folder: Path) -> None:
    """Take it away, whatever is still open in it."""
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.real
async def test_a_full_disk_is_told_and_leaves_the_others_alone(tmp_path: Path, web: Web, make: Make) -> None:
    """F22: on a real 5 MB file system: 507, nothing promoted, and what was there is served."""
    (tmp_path / "cache").mkdir()
    if not mounted(tmp_path / "cache"):
        pytest.skip("mounting a tmpfs needs root")
    try:
        small, content = elsewhere(tmp_path / "small", f"{web.url}/small", name="small")
        large, more = elsewhere(tmp_path / "large", f"{web.url}/large", name="large", count=2 << 20)
        web.files = {"/small/model.safetensors": content, "/large/model.safetensors": more}
        place = make(small, large)
        await place.host.load(model_of(small))
        asked = len(web.asked)
        with pytest.raises(DiskFull, match="no room"):
            await place.host.load(model_of(large))
        assert len(web.asked) == asked
        assert len(place.blobs) == 1
        assert place.host.path_of(model_of(small)).read_bytes() == content
        await place.host.evict(small.key)
        assert place.idle()
    finally:
        unmount(tmp_path / "cache")
