"""TensorRT beneath ONNX Runtime, where that was built with it: its engines come from the artefact cache and go there.

Belongs here: where TensorRT may read and write. Never: sessions (`onnx.py`).
TensorRT builds an engine at the first run of a shape, for minutes, and may add to its folder at any time; so it works
in a copy, and what the warm-up built is kept.
"""

from __future__ import annotations

import shutil
import tempfile
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from runtime.worker.artefacts import ABOUT, Artefacts, key_of
from runtime.worker.engines.port import Kept

if TYPE_CHECKING:
    from runtime.workers.port import LoadSpec

PROVIDER: Final = "TensorrtExecutionProvider"


class TensorRtFolder:
    """The folder that one session's TensorRT works in; gone with this object."""

    def __init__(self, spec: LoadSpec, machine: tuple[str, ...], version: str) -> None:
        """`machine` names the GPU and its driver, `version` ONNX Runtime's: engines fit nothing else."""
        self._spec = spec
        self._began = time.perf_counter()
        self._key = key_of(
            "tensorrt",
            {
                "fingerprint": spec.fingerprint,
                "tensors": [(one.name, one.datatype, one.shape) for one in spec.inputs],
                "version": version,
                "machine": machine,
            },
        )
        self._scratch = tempfile.mkdtemp(prefix="foreload-tensorrt-")
        weakref.finalize(self, shutil.rmtree, self._scratch, ignore_errors=True)
        self.kept: Kept | None = None
        self._cost = 0.0
        if spec.artefacts.folder:
            with suppress(OSError), self._artefacts().taken(self._key) as entry:
                if entry is not None:
                    self._cost = entry.seconds
                    shutil.copytree(
                        entry.folder, self._scratch, dirs_exist_ok=True, ignore=shutil.ignore_patterns(ABOUT)
                    )
        self._reused = bool(self._cost)

    def __repr__(self) -> str:
        return f"<TensorRtFolder {'reused' if self._reused else 'new'}>"

    def provider(self, device: int) -> tuple[str, dict[str, Any]]:
        """The execution provider with its settings."""
        where = {"trt_engine_cache_enable": True, "trt_engine_cache_path": self._scratch}
        return PROVIDER, {"device_id": device, **where, "trt_timing_cache_enable": True}

    def built(self) -> None:
        """The first forward is over: keep what it built, unless it was kept already."""
        took = time.perf_counter() - self._began
        self.kept = Kept(self._reused, took, max(0.0, self._cost - took))
        if self._reused or not self._spec.artefacts.folder:
            return
        with suppress(OSError):
            kept = self._artefacts()
            with kept.making(self._key) as folder:
                shutil.copytree(self._scratch, folder, dirs_exist_ok=True)
                kept.publish(self._key, folder, seconds=took, facts={})

    def _artefacts(self) -> Artefacts:
        return Artefacts(Path(self._spec.artefacts.folder), self._spec.artefacts.size)
