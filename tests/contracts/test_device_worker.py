"""The contract of `runtime.workers.port.DeviceWorker`, over every implementation, with a core without torch."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import anyio
import pytest

from actors.errors import (
    BadTensor,
    CorruptWeights,
    InferenceFailed,
    LoadFailed,
    NotReady,
    OutOfMemory,
    TooLarge,
    UnknownModel,
)
from actors.ports import EvictReport, Held
from actors.residency.model import ModelKey, Tier
from runtime.workers.port import Call, Timings
from tests.runtime.workers.worker_kit import KINDS, SLOT_BYTES, eventually

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path
    from typing import Protocol

    from tests.runtime.workers.worker_kit import Rig

    class Start(Protocol):
        def __call__(self, **changes: object) -> AbstractAsyncContextManager[Rig]: ...


@pytest.fixture(params=sorted(KINDS))
def start(request: pytest.FixtureRequest) -> Start:
    """One implementation's starter."""
    return KINDS[request.param]


async def test_a_load_reports_what_it_took_and_is_listed_until_evicted(start: Start) -> None:
    """Load, inventory, evict, inventory: the worker's books and its reports agree to the byte."""
    async with start() as rig:
        model = rig.model("a", size=4096)
        report = await rig.worker.load(model)
        assert (report.resident, report.source, report.steps) == (4096, Tier.HOST, (("bind", 0.25),))
        assert await rig.worker.inventory() == (Held(model, 4096, 0),)
        assert await rig.worker.evict(model.key) == EvictReport(4095, 1)
        assert await rig.worker.inventory() == ()


async def test_evicting_what_is_not_held_returns_zero_bytes(start: Start) -> None:
    """Eviction is idempotent."""
    async with start() as rig:
        assert await rig.worker.evict(ModelKey("nobody@1")) == EvictReport(0, 0)


async def test_an_inference_brings_body_json_length_and_timings_back(start: Start) -> None:
    """Nothing of a call or an answer is lost on the way."""
    async with start() as rig:
        await rig.worker.load(rig.model("a"))
        for body, json_length in ((b'{"x":1}', None), (b"\x00\xff" * 500, 0), (b"{}rest", 2), (b"", None)):
            answer = await rig.worker.infer(Call("a@1", body, json_length))
            assert (answer.body, answer.json_length) == (body, json_length)
            assert answer.timings == Timings(queue=1, infer=2, encode=3, decode=4)


async def test_bodies_up_to_the_limit_pass_and_one_byte_more_is_refused_with_numbers(start: Start) -> None:
    """F-size: the limit is exact, and the refusal names both numbers and the model."""
    async with start() as rig:
        await rig.worker.load(rig.model("a"))
        body = bytes(range(256)) * (SLOT_BYTES // 256)
        assert (await rig.worker.infer(Call("a@1", body))).body == body
        with pytest.raises(TooLarge, match=f"body has {SLOT_BYTES + 1} bytes") as caught:
            await rig.worker.infer(Call("a@1", body + b"!"))
        assert caught.value.detail == {"bytes": SLOT_BYTES + 1, "limit": SLOT_BYTES}


async def test_an_answer_over_the_limit_becomes_an_error_with_numbers(start: Start) -> None:
    """An oversized answer harms nobody: its caller is told, the next call works."""
    async with start() as rig:
        await rig.worker.load(rig.model("a"))
        with pytest.raises(TooLarge, match=f"answer has {SLOT_BYTES + 1} bytes"):
            await rig.worker.infer(Call("a@1", b"!big %d" % (SLOT_BYTES + 1)))
        assert len((await rig.worker.infer(Call("a@1", b"!big %d" % SLOT_BYTES))).body) == SLOT_BYTES


async def test_errors_cross_with_class_message_model_detail_and_retry(start: Start) -> None:
    """The error tree is the same on both sides."""
    async with start() as rig:
        await rig.worker.load(rig.model("a"))
        with pytest.raises(BadTensor) as caught:
            await rig.worker.infer(Call("a@1", b"!error"))
        error = caught.value
        assert (error.message, error.model, error.detail, error.retry_after) == ("shape", "a@1", {"got": 3}, 1.5)
        with pytest.raises(BadTensor, match="refused at the door"):
            await rig.worker.infer(Call("a@1", b"!refuse"))
        with pytest.raises(UnknownModel):
            await rig.worker.infer(Call("b@1", b"x"))
        with pytest.raises(InferenceFailed, match="could not take"):
            await rig.worker.infer(Call("a@1", b"!stumble"))


async def test_a_failed_load_leaves_nothing_and_says_why(start: Start) -> None:
    """The named error comes back; an unnamed one says no path; neither leaves a resident."""
    async with start() as rig:
        with pytest.raises(CorruptWeights, match="the header lies") as caught:
            await rig.worker.load(rig.model("bad", "fail"))
        assert (caught.value.detail, caught.value.retry_after) == ({"at": 8}, 3.0)
        with pytest.raises(LoadFailed, match="unexpected ValueError") as odd:
            await rig.worker.load(rig.model("odd", "surprise"))
        assert "/secret" not in odd.value.message
        with pytest.raises(OutOfMemory):
            await rig.worker.load(rig.model("fat", "starve"))
        assert await rig.worker.inventory() == ()


async def test_loads_of_different_models_run_side_by_side(start: Start, tmp_path: Path) -> None:
    """Two loads that wait for each other's start both finish."""
    async with start() as rig, anyio.create_task_group() as tasks:
        for name in ("a", "b"):
            tasks.start_soon(rig.worker.load, rig.model(name, "gate", gate=tmp_path / name))
        await eventually(lambda: (tmp_path / "a.started").exists() and (tmp_path / "b.started").exists())
        (tmp_path / "a").touch()
        (tmp_path / "b").touch()
    assert not rig.lost


async def test_inference_goes_on_while_a_load_is_stuck(start: Start, tmp_path: Path) -> None:
    """A cold model costs a warm one nothing but CPU."""
    async with start() as rig:
        await rig.worker.load(rig.model("warm"))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(rig.worker.load, rig.model("cold", "gate", gate=tmp_path / "g"))
            await eventually((tmp_path / "g.started").exists)
            assert (await rig.worker.infer(Call("warm@1", b"hi"))).body == b"hi"
            (tmp_path / "g").touch()


async def test_many_more_calls_than_slots_all_get_their_own_answer(start: Start) -> None:
    """300 calls at once: none lost, none mixed up."""
    async with start() as rig:
        await rig.worker.load(rig.model("a"))
        bodies = [b"%d " % n * (n + 1) for n in range(300)]
        answers = await asyncio.gather(*(rig.worker.infer(Call("a@1", body)) for body in bodies))
        assert [answer.body for answer in answers] == bodies


async def test_a_core_may_answer_from_another_thread(start: Start) -> None:
    """An answer given off the device thread is delivered at once, not at the next call."""
    async with start() as rig:
        await rig.worker.load(rig.model("a"))
        with anyio.fail_after(5):
            assert (await rig.worker.infer(Call("a@1", b"!thread"))).body == b"elsewhere"


@pytest.mark.parametrize("target", ["gate", "deaf"])
async def test_a_cancelled_load_is_undone_before_the_cancellation_goes_through(
    start: Start, tmp_path: Path, target: str
) -> None:
    """Whether the core obeys or finishes anyway, nothing is held when the caller gets its cancellation."""
    async with start() as rig:
        gate = tmp_path / "g"
        task = asyncio.create_task(rig.worker.load(rig.model("a", target, gate=gate)))
        await eventually(gate.with_suffix(".started").exists)
        task.cancel()
        if target == "deaf":
            await asyncio.wait((task,), timeout=0.05)
            assert not task.done()
            task.cancel()  # an impatient caller changes nothing
            gate.touch()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await rig.worker.inventory() == ()
        await rig.worker.load(rig.model("a"))


async def test_a_cancelled_call_that_has_not_started_is_left_out(start: Start, tmp_path: Path) -> None:
    """Its slot comes back only when the worker says so; the one under way is waited for."""
    async with start() as rig:
        await rig.worker.load(rig.model("a"))
        gate = tmp_path / "g"
        running = asyncio.create_task(rig.worker.infer(Call("a@1", f"!gate {gate}".encode())))
        await eventually(gate.with_suffix(".started").exists)
        queued = asyncio.create_task(rig.worker.infer(Call("a@1", b"!exit 3")))  # would end the worker if it ran
        await asyncio.sleep(0)
        queued.cancel()
        running.cancel()
        await asyncio.wait((running, queued), timeout=0.05)
        assert not running.done()
        running.cancel()
        gate.touch()
        for task in (running, queued):
            with pytest.raises(asyncio.CancelledError):
                await task
        assert (await rig.worker.infer(Call("a@1", b"next"))).body == b"next"


async def test_a_cancelled_eviction_finishes_first(start: Start) -> None:
    """Cancelling an eviction in its first turn does not leave the model half gone."""
    async with start() as rig:
        model = rig.model("a")
        await rig.worker.load(model)
        task = asyncio.create_task(rig.worker.evict(model.key))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await rig.worker.inventory() == ()


async def test_release_host_comes_before_later_orders_and_disturbs_none(
    start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    """Weights that left the host tier are dropped by fingerprint; what goes wrong then is in the worker's log."""
    async with start() as rig:
        await rig.worker.load(rig.model("a"))
        rig.worker.release_host("f-other")
        rig.worker.release_host("f-a")
        await rig.worker.load(rig.model("b"))
        assert len(await rig.worker.inventory()) == 2
        await eventually(lambda: "still bound" in (heard := capfd.readouterr().err) and "f-a" in heard)
        assert (await rig.worker.infer(Call("a@1", b"x"))).body == b"x"


async def test_a_core_that_can_not_go_on_is_reported_once_and_fails_its_calls(start: Start) -> None:
    """A fatal step ends the worker: the call under way fails as WorkerDied, `on_lost` hears it once."""
    async with start() as rig:
        await rig.worker.load(rig.model("a"))
        with pytest.raises(Exception, match="ended") as caught:
            await rig.worker.infer(Call("a@1", b"!fatal"))
        assert caught.value.code == "worker_died"
        await eventually(lambda: rig.lost)
        assert len(rig.lost) == 1


async def test_one_failing_step_does_not_end_the_worker(start: Start) -> None:
    """An unexpected exception in a step is logged; the next call works."""
    async with start() as rig:
        await rig.worker.load(rig.model("a"))
        with pytest.raises(BadTensor):
            await rig.worker.infer(Call("a@1", b"!once"))
        assert (await rig.worker.infer(Call("a@1", b"on"))).body == b"on"
        assert not rig.lost


async def test_a_core_that_only_fails_is_ended(start: Start) -> None:
    """Three failing steps in a row end it, rather than spin for ever."""
    async with start() as rig:
        await rig.worker.load(rig.model("a"))
        with pytest.raises(Exception, match="ended"):
            await rig.worker.infer(Call("a@1", b"!crash"))


async def test_after_stop_everything_is_refused(start: Start) -> None:
    """A stopped worker says so, and says it again after the second stop."""
    async with start() as rig:
        model = rig.model("a")
        await rig.worker.stop()
        await rig.worker.stop()
        with pytest.raises(NotReady, match="stopped"):
            await rig.worker.load(model)
        with pytest.raises(NotReady, match="stopped"):
            await rig.worker.infer(Call("a@1", b"x"))
        assert not rig.lost
