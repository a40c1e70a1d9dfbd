"""A mount on a device with memory of its own: the GPU's path, with a device that merely copies."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from runtime.worker.builders import factory_for
from runtime.worker.cuda import Upload
from runtime.worker.mount import Mount, Steps
from tests.runtime.worker import modules
from tests.runtime.worker.modules import ALLOW, randomised, saved, spec_for

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


class Copying:
    """A device whose memory is the host's; counts what was uploaded."""

    def __init__(self) -> None:
        self.uploads = 0

    def upload(self, key: str, tensors: Sequence[torch.Tensor], order: Sequence[int]) -> Upload:
        assert key == "f1"
        assert sorted(order) == list(range(len(tensors)))
        self.uploads += 1
        return Upload([tensor.detach().clone() for tensor in tensors], None)


def mounted(tmp_path: Path, name: str) -> tuple[Mount, torch.nn.Module, Copying]:
    """A module on such a device, not active yet, and its plain twin."""
    plain = randomised(getattr(modules, name))
    spec = spec_for(saved(tmp_path / "w.safetensors", plain), name)
    device = Copying()
    return Mount(spec, factory_for(spec.builder, ALLOW), Steps(lambda: False), device), plain, device


@pytest.mark.parametrize("name", ["Linear", "Recurrent", "Listed", "Rotary"])
def test_each_residency_is_one_upload_and_nothing_of_it_stays(name: str, tmp_path: Path) -> None:
    """The same output each time, and after an eviction no tensor of the device is alive (U6, U22, T14)."""
    mount, plain, device = mounted(tmp_path, name)
    x = torch.rand(1, 2, 4, generator=torch.Generator().manual_seed(3))
    wanted = plain(x)
    for turn in range(1, 6):
        mount.activate()
        mount.activate()
        assert torch.equal(mount.module(x), wanted)
        assert mount.deactivate() == 0
        assert device.uploads == turn
    assert mount.deactivate() == 0


def test_a_kept_parameter_keeps_the_whole_upload(tmp_path: Path) -> None:
    """Even a plain reference to one parameter, which no storage counts, is seen; all bytes count as leaked."""
    mount, _, _ = mounted(tmp_path, "Linear")
    mount.activate()
    resident, kept = mount.resident, mount.module.get_parameter("a.bias")
    assert mount.deactivate() == resident
    mount.activate()
    loop: list[object] = [mount.module.get_parameter("a.bias")]
    loop.append(loop)
    del loop, kept
    assert mount.deactivate() == 0, "a cycle is collected"


def test_buffers_written_on_the_device_are_uploaded_again_after_the_warm_up(tmp_path: Path) -> None:
    """The first call counts from the file, as every later one does."""
    mount, plain, device = mounted(tmp_path, "Counting")
    mount.activate()
    mount.module(torch.ones(1, 4))
    mount.warmed()
    assert torch.equal(mount.module(torch.ones(1, 4)), plain(torch.ones(1, 4)))
    assert device.uploads == 1, "a small buffer is put back in place"
