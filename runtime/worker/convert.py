"""Turns one .pth into safetensors inside a process that trusts nothing: `python -m runtime.worker.convert`.

Belongs here: unpickling with `weights_only=True`, and the limits around it. Never: a fallback to unsafe loading,
nor any use of it inside another process. Reads one JSON job from argv, prints one JSON line.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import pickle
import re
import resource
import select
import signal
import sys
import warnings
import zipfile
from typing import TYPE_CHECKING, Final

import msgspec

from actors.errors import CorruptWeights, DiskFull, ForeloadError, LoadFailed
from runtime.tiers.index import ALIASES, check_name
from runtime.tiers.sniff import looks_like

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch

_CLONE_NEWUSER: Final = 0x10000000
_CLONE_NEWNET: Final = 0x40000000
_PR_SET_NO_NEW_PRIVS: Final = 38
_DEEPEST = 16
_MOST_TENSORS = 1_000_000
_ZIP_MAGIC = b"PK\x03\x04"
_SPARE_MEMORY = 512 << 20
_SPARE_FILE = 32 << 20


class Job(msgspec.Struct, frozen=True):
    """What to convert. `limit` is the most bytes of tensors, `seconds` of CPU time; `rename` maps key prefixes."""

    source: str
    target: str
    limit: int
    seconds: int = 600
    state_dict: str = ""
    rename: dict[str, str] = {}


class Outcome(msgspec.Struct, frozen=True):
    """The one line printed: `code` is empty when the target is written, else an error code with its message."""

    code: str = ""
    message: str = ""
    tensors: int = 0
    aliases: int = 0
    size: int = 0
    network: str = ""


def main(arguments: list[str]) -> int:
    """Convert one file as the job in `arguments[0]` says; returns the exit status."""
    _die_with_parent()
    network = _cut_network()
    job = msgspec.json.decode(arguments[0], type=Job)
    try:
        check_before_loading(job)
        # The import needs more address space than the load may have, so the limits come after it.
        import torch

        torch.set_num_threads(1)
        _limit(job)
        outcome = msgspec.structs.replace(convert(job), network=network)
    except ForeloadError as error:
        outcome = Outcome(error.code, error.message, network=network)
    except MemoryError:
        outcome = Outcome(CorruptWeights.code, "the checkpoint needs more memory than its size allows", network=network)
    except Exception as error:  # noqa: BLE001 -- the parent gets words, whatever happened; a traceback would hold paths
        outcome = Outcome(
            LoadFailed.code, f"the checkpoint cannot be converted ({type(error).__name__})", network=network
        )
    os.write(1, msgspec.json.encode(outcome) + b"\n")
    return 1 if outcome.code else 0


# -- the jail ----------------------------------------------------------------------------------------


def _die_with_parent() -> None:
    """End this process in the moment its parent does, even inside C code.

    The parent holds the other end of standard input, so its death is an I/O signal here, whose default action is to
    terminate. PR_SET_PDEATHSIG would fire when the parent's *thread* ends, and threads of a pool come and go.
    """
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(0, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(0, fcntl.F_SETFL, fcntl.fcntl(0, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([0], [], [], 0)[0]:  # it was gone before the signal was armed
        os._exit(1)


def _cut_network() -> str:
    """Leave the network's namespace where the kernel permits, and say whether it did. Threads must not exist yet."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    for flags in (_CLONE_NEWNET, _CLONE_NEWUSER | _CLONE_NEWNET):
        if libc.unshare(flags) == 0:
            return "isolated"
    return "shared"


def _limit(job: Job) -> None:
    with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123 -- a pseudo file
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    size = os.stat(job.source).st_size  # noqa: PTH116 -- as above
    limits = {
        resource.RLIMIT_AS: mapped + size + 3 * job.limit + _SPARE_MEMORY,
        resource.RLIMIT_CPU: job.seconds,
        resource.RLIMIT_FSIZE: job.limit + _SPARE_FILE,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }
    for limit, value in limits.items():
        hard = resource.getrlimit(limit)[1]
        lower = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (lower, lower))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the write fails with EFBIG, which can be told


# -- before loading ----------------------------------------------------------------------------------


def check_before_loading(job: Job) -> None:
    """Refuse, by a file's first bytes and its zip directory, what must not even be opened. Raises `CorruptWeights`."""
    with open(job.source, "rb") as file:  # noqa: PTH123 -- binary read of one header
        head = file.read(64)
    if head.startswith(_ZIP_MAGIC):
        _check_zip(job)
    elif looks_like(head) != "pickle":
        kind = looks_like(head)
        raise CorruptWeights(f"not a checkpoint{f' (looks like {kind})' if kind else ''}")


def _check_zip(job: Job) -> None:
    """Read the directory only. PyTorch stores without compression, so what it declares cannot exceed the file."""
    try:
        with zipfile.ZipFile(job.source) as archive:
            rows = archive.infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError, OverflowError):
        raise CorruptWeights("not a checkpoint (a truncated or damaged zip)") from None
    names = [row.filename for row in rows]
    if any(name.startswith("/") or ".." in name.split("/") for name in names):
        raise CorruptWeights("the zip holds a path that leaves it")
    inner = {name.partition("/")[2] for name in names}
    if "constants.pkl" in inner or any(name.startswith("code/") for name in inner):
        raise CorruptWeights("a TorchScript archive is a program, not a checkpoint")
    declared = sum(row.file_size for row in rows)
    size = os.stat(job.source).st_size  # noqa: PTH116 -- one call
    if declared > size or declared > job.limit:
        raise CorruptWeights(f"zip bomb: {declared} bytes are declared in a file of {size} (limit {job.limit})")
    if any(row.compress_type != zipfile.ZIP_STORED for row in rows):
        raise CorruptWeights("the zip is compressed, which no checkpoint is")
    if "data.pkl" not in inner:
        raise CorruptWeights("not a checkpoint (a zip without data.pkl)")


# -- loading -----------------------------------------------------------------------------------------


def convert(job: Job) -> Outcome:
    """Load, pick, rename and save, in this process; only the jail above may call it on a file from elsewhere."""
    tree = _pick(_load(job.source), job.state_dict)
    named = dict(_renamed(_flatten(tree, "", 0, job.state_dict), job.rename))
    if not named:
        raise CorruptWeights("the checkpoint holds no tensors")
    kept, aliases = _without_aliases(named)
    size = sum(tensor.numel() * tensor.element_size() for tensor in kept.values())
    if size > job.limit:
        # A stride of 0 makes a few stored bytes into any number of elements.
        raise CorruptWeights(f"the tensors take {size} bytes, over the limit of {job.limit}")
    metadata = {"format": "pt"} | ({ALIASES: json.dumps(aliases, sort_keys=True)} if aliases else {})
    _save(_own_memory(kept), job.target, metadata)
    return Outcome(tensors=len(named), aliases=len(aliases), size=size)


def _save(tensors: dict[str, torch.Tensor], target: str, metadata: dict[str, str]) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, target, metadata=metadata)
    except (SafetensorError, OSError) as error:
        if "No space left" in str(error) or "quota" in str(error).casefold():
            raise DiskFull("the disk has no room for the converted weights") from None
        raise LoadFailed("the converted weights cannot be written") from None
    except KeyError as error:  # a dtype that the format does not have
        raise CorruptWeights(f"a tensor's dtype cannot be stored ({ascii(error.args)[:60]})") from None


def _load(source: str) -> object:
    import torch

    with open(source, "rb") as file:  # noqa: PTH123 -- one header
        mapped = file.read(len(_ZIP_MAGIC)) == _ZIP_MAGIC
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # Old files are a bare pickle stream, which cannot be mapped.
            return torch.load(source, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        raise CorruptWeights(_refusal(str(error))) from None
    except (RuntimeError, EOFError, ValueError, KeyError, TypeError, AttributeError, IndexError, OSError) as error:
        if "memory" in str(error).casefold():
            raise MemoryError from None
        raise CorruptWeights(f"the checkpoint is damaged ({type(error).__name__})") from None


def _refusal(text: str) -> str:
    found = re.search(r"GLOBAL ([\w.]{1,100})", text)
    what = f" ({found[1]})" if found else ""
    return f"the pickle wants to run code or build objects that are not weights{what}"


def _pick(tree: object, path: str) -> dict[object, object]:
    walked: list[str] = []
    for part in path.split(".") if path else ():
        walked.append(part)
        if not isinstance(tree, dict) or part not in tree:
            raise CorruptWeights(f"state_dict: the checkpoint has no {ascii('.'.join(walked))[:100]}{_choices(tree)}")
        tree = tree[part]
    if not isinstance(tree, dict):
        raise CorruptWeights(f"the checkpoint is a {type(tree).__name__}, not a dict of tensors")
    return tree


def _flatten(tree: Mapping[object, object], prefix: str, depth: int, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    import torch

    if depth > _DEEPEST:
        raise CorruptWeights(f"the state dict is nested deeper than {_DEEPEST} levels")
    for key, value in tree.items():
        if not isinstance(key, str):
            raise CorruptWeights(f"the state dict has a key of type {type(key).__name__}")
        name = f"{prefix}{key}"
        if isinstance(value, torch.Tensor):
            yield name, _plain(name, value)
        elif isinstance(value, dict):
            yield from _flatten(value, f"{name}.", depth + 1, path)
        else:
            hint = "" if path else f"; say where the state dict is with state_dict:{_choices(tree)}"
            raise CorruptWeights(f"{ascii(name)[:100]} is a {type(value).__name__}, not a tensor{hint}")


def _choices(tree: object) -> str:
    inner = [key for key, value in tree.items() if isinstance(value, dict)] if isinstance(tree, dict) else []
    shown = ", ".join(ascii(key)[:60] for key in inner[:10])
    return f" (candidates: {shown})" if shown else ""


def _plain(name: str, tensor: torch.Tensor) -> torch.Tensor:
    import torch

    tensor = tensor.detach()
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
        raise CorruptWeights(f"{ascii(name)[:100]} is not a plain tensor in memory")
    return tensor.resolve_conj().resolve_neg()


def _renamed(rows: Iterator[tuple[str, torch.Tensor]], rename: Mapping[str, str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Replace the longest prefix that matches, once, and refuse names that collide or cannot be."""
    prefixes = sorted(rename, key=len, reverse=True)
    seen: set[str] = set()
    for name, tensor in rows:
        prefix = next((each for each in prefixes if name.startswith(each)), "")
        changed = rename.get(prefix, "") + name.removeprefix(prefix)
        check_name(changed)
        if changed in seen:
            raise CorruptWeights(f"two tensors are called {ascii(changed)[:100]}")
        seen.add(changed)
        if len(seen) > _MOST_TENSORS:
            raise CorruptWeights(f"more than {_MOST_TENSORS} tensors")
        yield changed, tensor


def _without_aliases(named: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Keep one name of each tied tensor; the others become entries of the alias table."""
    first: dict[tuple[object, ...], str] = {}
    kept: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    for name, tensor in named.items():
        same = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        owner = first.setdefault(same, name) if tensor.numel() else name
        if owner == name:
            kept[name] = tensor
        else:
            aliases[name] = owner
    return kept, aliases


def _own_memory(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Make each tensor contiguous and the only user of its storage, as the format demands; views are copied."""
    import torch

    users: dict[int, int] = {}
    for tensor in tensors.values():
        storage = tensor.untyped_storage().data_ptr()
        users[storage] = users.get(storage, 0) + 1
    return {
        name: tensor.clone(memory_format=torch.contiguous_format)
        if users[tensor.untyped_storage().data_ptr()] > 1 and tensor.numel()
        else tensor.contiguous()
        for name, tensor in tensors.items()
    }


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main(sys.argv[1:]))
