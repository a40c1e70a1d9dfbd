"""The core end to end on the CPU: what it computes is what plain PyTorch computes, and nothing is left behind."""

from __future__ import annotations

import itertools
import threading
import weakref
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import orjson
import pytest
import torch
from safetensors.torch import load_file, save_file

from actors.errors import (
    BadTensor,
    Broken,
    Conflict,
    CorruptWeights,
    DeadlineExceeded,
    FetchFailed,
    ForeloadError,
    InferenceFailed,
    LoadFailed,
)
from runtime.worker.core import Cancelled, Core
from runtime.workers.port import Answer, TensorSpec
from tests.runtime.worker import modules
from tests.runtime.worker.modules import ALLOW, randomised, saved, spec_for

if TYPE_CHECKING:
    from pathlib import Path

    from runtime.workers.port import LoadSpec


def never() -> bool:
    """Nobody cancels."""
    return False


def new_core() -> Core:
    """A core on the CPU that may build the test modules."""
    return Core("cpu:0", ALLOW)


def binary_body(array: np.ndarray[Any, Any], name: str = "x", datatype: str = "FP32") -> tuple[memoryview, int]:
    """A request in binary, asking for binary."""
    head = orjson.dumps(
        {
            "inputs": [
                {
                    "name": name,
                    "shape": list(array.shape),
                    "datatype": datatype,
                    "parameters": {"binary_data_size": array.nbytes},
                }
            ],
            "parameters": {"binary_data_output": True},
        }
    )
    head += b" " * (-len(head) % 8)  # so that tensors view the body instead of copying out of it
    return memoryview(bytearray(head + array.tobytes())), len(head)


def outputs_of(answer: Answer | ForeloadError) -> dict[str, np.ndarray[Any, Any]]:
    """The FP32 tensors of a binary answer."""
    if isinstance(answer, ForeloadError):
        raise answer
    assert answer.json_length is not None
    at, found = answer.json_length, {}
    for row in orjson.loads(answer.body[:at])["outputs"]:
        size = row["parameters"]["binary_data_size"]
        found[row["name"]] = np.frombuffer(answer.body[at : at + size], np.float32).reshape(row["shape"])
        at += size
    return found


def ask(core: Core, key: str, array: np.ndarray[Any, Any], **how: str) -> dict[str, np.ndarray[Any, Any]]:
    """One call from submission to answer."""
    told: list[Answer | ForeloadError] = []
    body, length = binary_body(array, **how)
    core.submit(key, body, length, told.append)
    while core.pending:
        core.step()
    assert len(told) == 1
    return outputs_of(told[0])


F32 = np.float32
SHAPES: dict[str, tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...], np.ndarray[Any, Any]]] = {
    "Linear": (modules.X4, modules.Y, np.arange(8, dtype=F32).reshape(2, 4)),
    "Tied": ((TensorSpec("ids", "INT64", (-1, -1)),), modules.Y, np.array([[1, 2, 10]], dtype=np.int64)),
    "Normed": (
        (TensorSpec("x", "FP32", (-1, 3, 6, 6)),),
        modules.Y,
        np.arange(108, dtype=F32).reshape(1, 3, 6, 6),
    ),
    "Rotary": (modules.X4, modules.Y, np.ones((2, 4), F32)),
    "Cyclic": (modules.X4, modules.Y, np.ones((2, 4), F32)),
    "Recurrent": (
        (TensorSpec("x", "FP32", (-1, -1, 4)),),
        (TensorSpec("y", "FP32", (-1, -1, 10)),),
        np.arange(12, dtype=F32).reshape(1, 3, 4),
    ),
    "Attention": (
        (TensorSpec("x", "FP32", (-1, -1, 8)),),
        (TensorSpec("y", "FP32", (-1, -1, 8)),),
        np.arange(24, dtype=F32).reshape(1, 3, 8),
    ),
    "Halves": (
        modules.X4,
        (TensorSpec("y", "FP32", (-1, 4)), TensorSpec("z", "FP32", (-1, 4))),
        np.ones((2, 4), F32),
    ),
    "Listed": (modules.X4, modules.Y, np.ones((2, 4), F32)),
    "Stubborn": (modules.X4, modules.Y, np.ones((2, 4), F32)),
}


def golden(name: str, plain: torch.nn.Module) -> list[torch.Tensor]:
    """What plain PyTorch computes."""
    with torch.inference_mode():
        result = plain(torch.from_numpy(SHAPES[name][2].copy()))
    return list(result.values()) if isinstance(result, dict) else [result]


def loadable(name: str, tmp_path: Path, **how: Any) -> tuple[LoadSpec, list[torch.Tensor]]:
    """A module's weights on disk, and its golden outputs."""
    plain = randomised(getattr(modules, name))
    weights = saved(tmp_path / f"{name}.safetensors", plain)
    inputs, outputs, _ = SHAPES[name]
    return spec_for(weights, name, inputs=inputs, outputs=outputs, **how), golden(name, plain)


def assert_golden(core: Core, name: str, key: str, expected: list[torch.Tensor]) -> None:
    """Every output equals plain PyTorch's to the bit."""
    inputs, _, array = SHAPES[name]
    found = ask(core, key, array, name=inputs[0].name, datatype=inputs[0].datatype)
    for got, wanted in zip(found.values(), expected, strict=True):
        assert got.tobytes() == wanted.numpy().tobytes()


@pytest.mark.parametrize("name", SHAPES)
def test_outputs_equal_plain_pytorch_to_the_bit_before_and_after_fifty_switches(name: str, tmp_path: Path) -> None:
    """Tied weights, statistics, non-persistent buffers, LSTM lists: every residency computes the same (U22, T14)."""
    core = new_core()
    spec, expected = loadable(name, tmp_path)
    first = core.load(spec, never)
    assert not first.reused
    assert [step for step, _ in first.steps] == ["map", "skeleton", "bind", "activate", "warm_up"]
    assert_golden(core, name, spec.key, expected)
    for _ in range(50):
        assert core.evict(spec.key).leaked == 0
        again = core.load(spec, never)
        assert again.reused
        assert [step for step, _ in again.steps] == ["activate"]
    assert_golden(core, name, spec.key, expected)


def test_a_loaded_model_is_not_loaded_again(tmp_path: Path) -> None:
    """The second load of one key and fingerprint returns at once."""
    core = new_core()
    spec, _ = loadable("Linear", tmp_path)
    first = core.load(spec, never)
    second = core.load(spec, never)
    assert second.reused
    assert second.steps == ()
    assert second.resident == first.resident > 0


def test_resident_bytes_are_the_bytes_of_the_weights(tmp_path: Path) -> None:
    """Tied weights count once; buffers count too."""
    core = new_core()
    spec, _ = loadable("Tied", tmp_path)
    assert core.load(spec, never).resident == 11 * 6 * 4
    normed, _ = loadable("Normed", tmp_path, key="n@1", fingerprint="f2")
    assert core.load(normed, never).resident == sum(t.nbytes for t in load_file(normed.weights).values())


def test_eviction_returns_all_bytes_and_the_model_is_then_unknown(tmp_path: Path) -> None:
    """What was reported as resident comes back; a call afterwards is refused; evicting again returns nothing."""
    core = new_core()
    spec, _ = loadable("Linear", tmp_path)
    loaded = core.load(spec, never)
    assert core.evict(spec.key).returned == loaded.resident
    assert core.evict(spec.key).returned == 0
    assert core.inventory() == []
    with pytest.raises(Broken):
        core.submit(spec.key, memoryview(b"{}"), None, print)


def test_an_evicted_module_refuses_to_run_on_nothing(tmp_path: Path) -> None:
    """Placeholders are back after an eviction, so nothing stale can be computed."""
    core = new_core()
    spec, _ = loadable("Linear", tmp_path)
    core.load(spec, never)
    module = core._mounts["f1"].module
    core.evict(spec.key)
    assert all(parameter.is_meta for parameter in module.parameters())


def test_two_versions_and_two_keys_of_one_fingerprint_coexist(tmp_path: Path) -> None:
    """Versions have their own weights; keys of one fingerprint share a module, and the last one out evicts it."""
    core = new_core()
    one, expected = loadable("Linear", tmp_path)
    plain = randomised(modules.Linear, seed=9)
    other = spec_for(saved(tmp_path / "v2.safetensors", plain), "Linear", key="m@2", fingerprint="f2")
    same = spec_for(tmp_path / "Linear.safetensors", "Linear", key="alias@1", fingerprint="f1")
    for spec in (one, other, same):
        core.load(spec, never)
    assert_golden(core, "Linear", "m@1", expected)
    assert_golden(core, "Linear", "m@2", golden("Linear", plain))
    assert core.evict("m@1").returned == 0, "the alias still runs on these bytes"
    assert_golden(core, "Linear", "alias@1", expected)
    assert core.evict("alias@1").returned > 0


def test_a_new_fingerprint_under_one_key_replaces_the_old(tmp_path: Path) -> None:
    """Reload is load-then-replace: calls already queued finish on the old weights, later ones use the new."""
    core = new_core()
    old, expected = loadable("Linear", tmp_path, batch=8)
    core.load(old, never)
    told: list[Answer | ForeloadError] = []
    body, length = binary_body(SHAPES["Linear"][2])
    core.submit("m@1", body, length, told.append)
    plain = randomised(modules.Linear, seed=9)
    core.load(spec_for(saved(tmp_path / "new.safetensors", plain), "Linear", fingerprint="f2", batch=8), never)
    core.submit("m@1", body, length, told.append)
    while core.pending:
        core.step()
    assert outputs_of(told[0])["y"].tobytes() == expected[0].numpy().tobytes()
    assert outputs_of(told[1])["y"].tobytes() == golden("Linear", plain)[0].numpy().tobytes()
    assert [row.fingerprint for row in core.inventory()] == ["f2"]
    assert core._mounts["f1"].users == 0


def test_releasing_the_host_tier_unmaps_even_a_module_with_a_reference_cycle(tmp_path: Path) -> None:
    """After `release_host` no mapping of the file is left, and the next load maps it anew."""
    core = new_core()
    spec, expected = loadable("Cyclic", tmp_path)
    core.load(spec, never)
    core.release_host("f1")
    assert_golden(core, "Cyclic", spec.key, expected)  # still in use: it goes with the eviction
    mapping = weakref.ref(core._mounts["f1"]._mapping._map)
    core.evict(spec.key)
    core.release_host("f1")
    core.release_host("never heard of")
    assert core._mounts == {}
    assert mapping() is None
    again = core.load(spec, never)
    assert again.reused
    assert [name for name, _ in again.steps] == ["map", "bind", "activate"], "nothing is built or warmed up again"
    assert_golden(core, "Cyclic", spec.key, expected)


def test_a_module_that_kept_tensors_of_its_own_is_built_again(tmp_path: Path) -> None:
    """What a forward left in a module must not stay in memory once its weights have left the host."""
    core = new_core()
    inputs = (TensorSpec("x", "FP32", (-1, 40)),)
    spec = spec_for(saved(tmp_path / "k.safetensors", randomised(modules.Keeper)), "Keeper", inputs=inputs)
    core.load(spec, never)
    ask(core, spec.key, np.ones((1, 40), F32))
    core.evict(spec.key)
    core.release_host(spec.fingerprint)
    assert len(core._shelf) == 0
    again = core.load(spec, never)
    assert not again.reused
    assert "skeleton" in dict(again.steps)


def test_a_load_that_failed_leaves_no_skeleton_behind(tmp_path: Path) -> None:
    """A module that raised in its warm-up may be in any state."""
    core = new_core()
    spec, _ = loadable("Linear", tmp_path)
    short = msgspec.structs.replace(spec, inputs=(TensorSpec("x", "FP32", (-1, 5)),))
    with pytest.raises(LoadFailed):
        core.load(short, never)
    assert len(core._shelf) == 0
    assert not core.load(spec, never).reused


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_cancelled_load_puts_its_skeleton_back(at: int, tmp_path: Path) -> None:
    """Nobody spoilt it, and the next load should not pay for somebody's impatience."""
    core = new_core()
    spec, expected = loadable("Linear", tmp_path)
    core.load(spec, never)
    core.evict(spec.key)
    core.release_host(spec.fingerprint)
    asked = itertools.count(1)
    with pytest.raises(Cancelled):
        core.load(spec, lambda: next(asked) >= at)
    assert core._mounts == {}
    assert core.load(spec, never).reused
    assert_golden(core, "Linear", spec.key, expected)


def test_a_kept_view_of_weights_is_reported_as_leaked(tmp_path: Path) -> None:
    """A view in a reference cycle is collected; one that is really held counts as leaked bytes (U6)."""
    core = new_core()
    inputs = (TensorSpec("x", "FP32", (-1, 40)),)
    weights = saved(tmp_path / "h.safetensors", randomised(modules.Hoarder))
    core.load(spec_for(weights, "Hoarder", inputs=inputs), never)
    ask(core, "m@1", np.ones((1, 40), F32))
    assert core.evict("m@1").leaked == 0
    loaded = core.load(
        spec_for(weights, "Hoarder", key="h@1", fingerprint="f2", inputs=inputs, config={"forever": True}), never
    )
    ask(core, "h@1", np.ones((1, 40), F32))
    gone = core.evict("h@1")
    modules.Hoarder.kept.clear()
    assert gone.leaked == 40 * 40 * 4
    assert gone.returned == loaded.resident - gone.leaked


@pytest.mark.parametrize("off_host", [True, False])
@pytest.mark.parametrize("warm_up", [True, False])
def test_a_model_that_writes_its_weights_neither_crashes_nor_keeps_state(
    tmp_path: Path, *, warm_up: bool, off_host: bool
) -> None:
    """Each residency starts from the file, whatever the one before wrote, and the file itself never changes."""
    core = new_core()
    path = saved(tmp_path / "w.safetensors", randomised(modules.Writer))
    before = path.read_bytes()
    spec = spec_for(path, "Writer", warm_up=warm_up)
    fresh = randomised(modules.Writer)
    expected = [fresh(torch.ones(1, 4)).numpy().tobytes() for _ in range(2)]
    for _ in range(3):
        core.load(spec, never)
        got = [ask(core, "m@1", np.ones((1, 4), F32))["y"].tobytes() for _ in range(2)]
        assert got == expected
        core.evict("m@1")
        if off_host:
            core.release_host("f1")
    assert path.read_bytes() == before


def test_a_model_that_counts_its_calls_starts_anew_and_keeps_its_pages_shared(tmp_path: Path) -> None:
    """A small buffer is a private copy: no page of the weights is copied, and each residency counts from the file."""
    core = new_core()
    weights = saved(tmp_path / "w.safetensors", randomised(modules.Counting))
    seen = set()
    for _ in range(3):
        core.load(spec_for(weights, "Counting"), never)
        ask(core, "m@1", np.ones((1, 4), F32))
        seen.add(ask(core, "m@1", np.ones((1, 4), F32))["y"].tobytes())
        assert core._mounts["f1"]._mapping.written() == 0
        core.evict("m@1")
    assert len(seen) == 1


def test_a_model_that_spoils_what_no_file_holds_is_built_again(tmp_path: Path) -> None:
    """A large non-persistent buffer that was written cannot be restored, so the next load builds it anew."""
    core = new_core()
    weights = saved(tmp_path / "w.safetensors", randomised(modules.Counting))
    spec = spec_for(weights, "Counting", config={"wide": True}, warm_up=False)
    seen = set()
    for _ in range(2):
        assert not core.load(spec, never).reused
        seen.add(ask(core, "m@1", np.ones((1, 4), F32))["y"].tobytes())
        core.evict("m@1")
    assert len(seen) == 1


@pytest.mark.parametrize("at", range(5))
def test_a_load_cancelled_at_any_step_leaves_nothing(at: int, tmp_path: Path) -> None:
    """Whichever step sees the cancellation, the mapping is gone and the next load maps anew."""
    core = new_core()
    spec, expected = loadable("Linear", tmp_path)
    asked = iter(range(100))
    with pytest.raises(Cancelled):
        core.load(spec, lambda: next(asked) >= at)
    assert core._mounts == {}
    assert core.inventory() == []
    assert "map" in dict(core.load(spec, never).steps)
    assert_golden(core, "Linear", spec.key, expected)


def test_a_cancelled_return_keeps_the_host_tier(tmp_path: Path) -> None:
    """Cancelling a load that only activates leaves the mapping where it was, without a user."""
    core = new_core()
    spec, _ = loadable("Linear", tmp_path)
    core.load(spec, never)
    core.evict(spec.key)
    with pytest.raises(Cancelled):
        core.load(spec, lambda: True)
    assert core._mounts["f1"].users == 0
    assert core.load(spec, never).reused


def broken(tmp_path: Path, edit: str) -> LoadSpec:
    """A load that must fail."""
    state = {name: t.clone() for name, t in randomised(modules.Linear).state_dict().items()}
    path = tmp_path / "w.safetensors"
    match edit:
        case "drop":
            del state["b.bias"]
        case "prefix":
            state = {f"model.{name}": tensor for name, tensor in state.items()}
        case "extra":
            state["c.weight"] = torch.zeros(1)
        case "shape":
            state["a.weight"] = torch.zeros(7, 4)
        case "dtype":
            state["a.weight"] = state["a.weight"].half()
    save_file(state, path)
    return spec_for(path, "Linear")


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        ("drop", "1 missing: b.bias"),
        ("prefix", "4 missing: a.weight, a.bias, b.weight, b.bias; 4 unexpected: model.a.bias"),
        ("extra", "1 unexpected: c.weight"),
        ("shape", r"a.weight \[7, 4\] where \[8, 4\] is needed"),
        ("dtype", "a.weight float16 where float32 is needed"),
    ],
)
def test_weights_that_do_not_match_fail_with_their_keys(edit: str, words: str, tmp_path: Path) -> None:
    """Never random values: missing, unexpected and unlike tensors are listed (F9, F10, R40, R41)."""
    core = new_core()
    with pytest.raises(LoadFailed, match=words):
        core.load(broken(tmp_path, edit), never)
    assert core._mounts == {}


def test_at_most_twenty_keys_are_listed(tmp_path: Path) -> None:
    """A wrong prefix on a large model must not flood a log (F9)."""
    path = tmp_path / "w.safetensors"
    save_file({f"k{n:02}": torch.zeros(1) for n in range(30)}, path)
    with pytest.raises(LoadFailed, match="k19 and 10 more") as caught:
        new_core().load(spec_for(path, "Linear"), never)
    assert "k20" not in caught.value.message


def test_cast_converts_weights_of_another_dtype(tmp_path: Path) -> None:
    """With `cast`, half-precision files fill a float module by conversion (F10)."""
    plain = randomised(modules.Linear).half()
    path = saved(tmp_path / "w.safetensors", plain)
    core = new_core()
    core.load(spec_for(path, "Linear", cast=True), never)
    assert_golden(core, "Linear", "m@1", golden("Linear", plain.float()))


def test_a_file_with_both_names_of_a_tied_weight_counts_the_last_like_load_state_dict(tmp_path: Path) -> None:
    """Same outcome as plain `load_state_dict`, even when the two copies differ."""
    plain = randomised(modules.Tied)
    state = {"embed.weight": torch.rand(11, 6), "head.weight": torch.rand(11, 6)}
    plain.load_state_dict(state)
    save_file(state, tmp_path / "w.safetensors")
    inputs, outputs, _ = SHAPES["Tied"]
    core = new_core()
    core.load(spec_for(tmp_path / "w.safetensors", "Tied", inputs=inputs, outputs=outputs), never)
    assert_golden(core, "Tied", "m@1", golden("Tied", plain))


def test_batch_counters_may_be_missing(tmp_path: Path) -> None:
    """Files older than torch 0.4.1 lack them, and plain PyTorch fills them with zero as well."""
    plain = randomised(modules.Normed)
    path = saved(tmp_path / "w.safetensors", plain, drop=("norm.num_batches_tracked",))
    inputs, outputs, _ = SHAPES["Normed"]
    core = new_core()
    core.load(spec_for(path, "Normed", inputs=inputs, outputs=outputs), never)
    assert_golden(core, "Normed", "m@1", golden("Normed", plain))


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("os:getcwd", "not on the allow-list"),
        ("tests.runtime.worker.modules:save_file", "not a factory of an allow-listed module"),
        ("tests.runtime.worker.modules:Missing", "cannot be imported"),
        ("tests.runtime.worker.absent:Missing", "cannot be imported"),
        ("tests.runtime.worker.modules", "must read"),
        ("tests.runtime.worker.modules:X4", "not a factory"),
        ("tests.runtime.worker.modules:not_a_module", "int instead of a module"),
        ("tests.runtime.worker.modules:failing", "OSError: no such file: <path> on <address>"),
    ],
)
def test_only_factories_of_allow_listed_modules_are_called(target: str, words: str, tmp_path: Path) -> None:
    """A spec cannot name foreign code, and what a factory raises is told without paths or addresses."""
    _, _ = loadable("Linear", tmp_path)
    spec = spec_for(tmp_path / "Linear.safetensors", "Linear")
    builder = type(spec.builder)("python", target)
    with pytest.raises(LoadFailed) as caught:
        new_core().load(
            type(spec)(**{**{f: getattr(spec, f) for f in spec.__struct_fields__}, "builder": builder}), never
        )
    assert words in caught.value.message
    assert "/" not in caught.value.message
    assert caught.value.__context__ is None, "a kept traceback would keep weights alive"


def test_missing_and_truncated_files_fail_clearly(tmp_path: Path) -> None:
    """No path in the message, no signal, nothing kept."""
    core = new_core()
    with pytest.raises(FetchFailed) as missing:
        core.load(spec_for(tmp_path / "none.safetensors", "Linear"), never)
    assert str(tmp_path) not in missing.value.message
    path = saved(tmp_path / "cut.safetensors", randomised(modules.Linear))
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CorruptWeights):
        core.load(spec_for(path, "Linear"), never)
    assert core._mounts == {}


def test_a_failing_warm_up_fails_the_load(tmp_path: Path) -> None:
    """A model that cannot run once is never announced as loaded."""
    core = new_core()
    weights = saved(tmp_path / "w.safetensors", randomised(modules.Linear))
    inputs = (TensorSpec("x", "FP32", (-1, 5)),)
    with pytest.raises(LoadFailed, match="RuntimeError"):
        core.load(spec_for(weights, "Linear", inputs=inputs), never)
    assert core._mounts == {}


def test_concurrent_loads_of_one_model_build_it_once(tmp_path: Path) -> None:
    """Single flight per fingerprint: one load does the work, all others find it done."""
    core = new_core()
    spec, expected = loadable("Linear", tmp_path)
    found: list[bool] = []
    threads = [threading.Thread(target=lambda: found.append(core.load(spec, never).reused)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [False, True, True, True, True, True]
    assert core._mounts["f1"].users == 1
    assert_golden(core, "Linear", spec.key, expected)


def test_different_models_load_from_several_threads_at_once(tmp_path: Path) -> None:
    """Builds in parallel do not see each other's parameters."""
    core = new_core()
    loads = [loadable(name, tmp_path, key=f"{name}@1", fingerprint=name) for name in SHAPES]
    failed: list[BaseException] = []

    def load(spec: LoadSpec) -> None:
        try:
            core.load(spec, never)
        except BaseException as fault:  # noqa: BLE001  # shown by the assertion below
            failed.append(fault)

    threads = [threading.Thread(target=load, args=(spec,)) for spec, _ in loads]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    for spec, expected in loads:
        assert_golden(core, spec.key.partition("@")[0], spec.key, expected)


# -- running ------------------------------------------------------------------------------------------


def several(core: Core, rows: list[np.ndarray[Any, Any]]) -> list[Answer | ForeloadError]:
    """Submit calls together, then run them; answers in order of submission."""
    told: dict[int, Answer | ForeloadError] = {}
    bodies = [binary_body(row) for row in rows]
    for at, (body, length) in enumerate(bodies):
        core.submit("m@1", body, length, lambda outcome, at=at: told.__setitem__(at, outcome))  # type: ignore[misc]
    while core.pending:
        core.step()
    return [told[at] for at in range(len(rows))]


def test_queued_calls_share_a_forward_and_get_their_own_rows(tmp_path: Path) -> None:
    """Natural batching: all that queued up run together, split in order."""
    core = new_core()
    spec, _ = loadable("Linear", tmp_path, batch=8)
    core.load(spec, never)
    rows = [np.full((1 + n % 2, 4), n, F32) for n in range(4)]
    answers = several(core, rows)
    assert [answer.timings.batch for answer in answers if isinstance(answer, Answer)] == [4] * 4
    for row, answer in zip(rows, answers, strict=True):
        np.testing.assert_allclose(outputs_of(answer)["y"], ask(core, "m@1", row)["y"], rtol=1e-5)


@pytest.mark.parametrize("bad", [-1.0, 99.0])
def test_one_bad_call_does_not_spoil_its_batch(bad: float, tmp_path: Path) -> None:
    """A failed batch runs again one by one; only the culprit fails, whatever the model raises, without its paths."""
    core = new_core()
    weights = saved(tmp_path / "w.safetensors", randomised(modules.Moody))
    core.load(spec_for(weights, "Moody", batch=8), never)
    answers = several(core, [np.full((1, 4), value, F32) for value in (1.0, bad, 2.0)])
    assert isinstance(answers[0], Answer)
    assert isinstance(answers[2], Answer)
    assert isinstance(answers[1], InferenceFailed)
    assert "secret" not in answers[1].message
    assert answers[1].model == "m@1"


def test_a_model_without_a_batch_dimension_heals_itself(tmp_path: Path) -> None:
    """Outputs that cannot be split are computed again singly, and the model is not batched from then on."""
    core = new_core()
    weights = saved(tmp_path / "w.safetensors", randomised(modules.Summed))
    core.load(spec_for(weights, "Summed", batch=8, outputs=(TensorSpec("y", "FP32", (-1,)),)), never)
    rows = [np.full((2, 4), n, F32) for n in range(3)]
    for _ in range(2):
        answers = several(core, rows)
        assert [answer.timings.batch for answer in answers if isinstance(answer, Answer)] == [1, 1, 1]
    np.testing.assert_array_equal(outputs_of(answers[1])["y"], ask(core, "m@1", rows[1])["y"])


def test_a_malformed_body_is_answered_and_its_neighbours_run(tmp_path: Path) -> None:
    """The caller's mistake costs the caller only (F28)."""
    core = new_core()
    spec, _ = loadable("Linear", tmp_path, batch=8)
    core.load(spec, never)
    told: list[Answer | ForeloadError] = []
    good, length = binary_body(np.ones((1, 4), F32))
    core.submit(
        "m@1",
        memoryview(b'{"inputs":[{"name":"x","shape":[1,3],"datatype":"FP32","data":[1,2,3]}]}'),
        None,
        told.append,
    )
    core.submit("m@1", good, length, told.append)
    core.step()
    assert isinstance(told[0], BadTensor)
    assert isinstance(told[1], Answer)
    assert core.inventory()[0].in_flight == 0


def test_a_cancelled_call_is_left_out_and_told_so(tmp_path: Path) -> None:
    """Cancelling before the start answers with an error and frees the place; afterwards it does nothing."""
    core = new_core()
    spec, _ = loadable("Linear", tmp_path)
    core.load(spec, never)
    told: list[Answer | ForeloadError] = []
    body, length = binary_body(np.ones((1, 4), F32))
    submission = core.submit("m@1", body, length, told.append)
    assert core.inventory()[0].in_flight == 1
    with pytest.raises(Conflict):
        core.evict("m@1")
    submission.cancel()
    submission.cancel()
    assert core.inventory()[0].in_flight == 0
    while core.pending:
        core.step()
    assert [type(outcome) for outcome in told] == [DeadlineExceeded]


def test_nothing_views_a_body_once_its_answer_is_told(tmp_path: Path) -> None:
    """The ring reuses a slot the moment `done` is called, so even a model that returns its input must have let go."""
    core = new_core()
    weights = saved(tmp_path / "w.safetensors", randomised(modules.Identity))
    core.load(spec_for(weights, "Identity"), never)
    array = np.arange(4, dtype=F32).reshape(1, 4)
    body, length = binary_body(array)
    memory = body.obj
    told: list[Answer | ForeloadError] = []

    def done(outcome: Answer | ForeloadError) -> None:
        body.release()
        memory.append(0)  # raises BufferError while anything views it
        told.append(outcome)

    core.submit("m@1", body, length, done)
    core.step()
    assert outputs_of(told[0])["y"].tobytes() == array.tobytes()


def test_a_writable_aligned_body_reaches_the_module_without_a_copy(tmp_path: Path) -> None:
    """From the ring slot to the forward not one byte of a tensor is moved."""
    core = new_core()
    weights = saved(tmp_path / "w.safetensors", randomised(modules.Identity))
    core.load(spec_for(weights, "Identity"), never)
    body, length = binary_body(np.ones((1, 4), F32))
    core.submit("m@1", body, length, lambda _: None)
    core.step()
    assert core._mounts["f1"].module.address == np.frombuffer(body, np.uint8).ctypes.data + length


def test_the_answer_names_model_and_version_from_the_key(tmp_path: Path) -> None:
    """The key is split at its last `@`."""
    core = new_core()
    spec, _ = loadable("Linear", tmp_path, key="team@blue@2")
    core.load(spec, never)
    told: list[Any] = []
    body = b'{"id":"7","inputs":[{"name":"x","shape":[1,4],"datatype":"FP32","data":[1,2,3,4]}]}'
    core.submit("team@blue@2", memoryview(body), None, told.append)
    core.step()
    answer = orjson.loads(told[0].body)
    assert (answer["model_name"], answer["model_version"], answer["id"]) == ("team@blue", "2", "7")
    assert answer["outputs"][0]["shape"] == [1, 3]
    assert told[0].timings.infer > 0
