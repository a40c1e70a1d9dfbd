"""From declared windows to loads: which models are wanted when, on which device, and from when they have to move.

Holds what is declared and what was announced; decides with `forecasting.planner`. Asks nobody to do anything.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from actors.channels import device_free, disk_free
from actors.residency.plan import ceiling
from actors.residency.states import State
from actors.tier_cache import TierCache
from forecasting.outlook import Floor
from forecasting.peaks import Agenda, agenda, masks
from forecasting.planner import Job, schedule

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from actors.actor import Ref
    from actors.dispatcher import Dispatcher
    from actors.load_times import LoadTimes
    from actors.messages import Command
    from actors.residency.model import Model, ModelKey
    from forecasting.merge import Window
    from forecasting.peaks import Labels, Peak
    from forecasting.planner import Dropped

REREAD = 60.0
"""Seconds for which a reading of the agenda is used."""

SOON = 600.0
"""Seconds before a window from which on the caches are told to expect it."""

HOST_LEAD = 300.0
"""Seconds by which what only gets a place on the host is brought there earlier: it is in nobody's way."""

PRIORITY = 1e6
"""What one step of priority is worth, in seconds of waiting saved: more than any value."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """One window's model. Epoch seconds; `due` if it has to be asked for now.

    `trouble` says why it will not be ready on the device, `remedy` what would help, `tier_below` that the host is the
    best that can be had.
    """

    model: Model
    device: str
    cause: str
    begin: float
    ready_by: float
    start: float
    release: float
    require: bool
    due: bool = False
    trouble: str = ""
    remedy: str = ""
    tier_below: bool = False


_Stand: TypeAlias = "tuple[Agenda | None, float, TierCache | None, list[tuple[Ref[Command] | None, TierCache, int]]]"
"""What a plan was made of: the agenda, when, the host, and the moves that the books of each cache had seen."""


class PeakPlan:
    """`horizon` seconds are looked ahead; after a window a model is kept for `cooldown` seconds more."""

    def __init__(
        self,
        peaks: Sequence[Peak],
        labels: Callable[[], Labels],
        *,
        times: LoadTimes,
        horizon: float,
        cooldown: float,
        fraction: float,
    ) -> None:
        self._peaks = tuple(peaks)
        self._labels = labels
        self._times = times
        self._horizon = horizon
        self._cooldown = cooldown
        self._fraction = fraction
        self._agenda = Agenda()
        self._known: Sequence[Model] = ()
        self._models: dict[str, Model] = {}
        self._read_at = float("-inf")
        self._told: set[tuple[str, float]] = set()
        self.wanted: tuple[Wanted, ...] = ()
        self._stand: _Stand = (None, float("-inf"), None, [])
        self.masks: set[tuple[float, float, str]] = set()

    def look(self, models: Sequence[Model], wall: float, *, spare: bool = True) -> bool:
        """Read the agenda, unless that was done a moment ago for the same models; without `spare` time, not again.

        Tells whether it was read.
        """
        recent = 0 <= wall - self._read_at < (REREAD if spare else 2 * REREAD)
        if models is not self._known:
            known: dict[str, Model] = {model.key: model for model in models}
            recent = recent and known.keys() == self._models.keys()
            self._known, self._models = models, known
        if recent:
            return False
        self._read_at = wall
        if self._peaks:
            self._read(wall)
        self._told = {at for at in self._told if at[1] >= wall - self._horizon}
        return True

    def _read(self, wall: float) -> None:
        keys, labels = tuple(self._models), self._labels()
        self._agenda = agenda(
            self._peaks,
            wall - self._cooldown,
            wall + self._horizon,
            keys,
            labels,
            bridge=lambda key: self._times.high(self._models[key], on_host=False) + self._cooldown,
        )
        # A promotion is no weekly pattern: its windows are told to the counts, which learn nothing from them.
        self.masks = {
            (begin, end, key)
            for key, spans in masks(self._peaks, wall, wall + self._horizon, keys, labels).items()
            for begin, end in spans
        }

    def forget(self) -> None:
        """The clock jumped: read again."""
        self._read_at = float("-inf")

    def floors(self, wall: float) -> dict[str, Floor]:
        """What declared windows promise: told to the caches shortly before and during each."""
        floors: dict[str, Floor] = {}
        for window in self._agenda.windows:
            ahead = window.start - wall
            if ahead <= SOON and wall < window.end and window.model not in floors:
                rate = window.rate(max(wall, window.start))
                floors[window.model] = Floor(window.confidence, rate, max(ahead, 0.0), source="scheduled")
        return floors

    def quiet(self, wall: float) -> set[ModelKey]:
        """Models for which nothing is to be loaded ahead now."""
        return {
            self._models[q.model].key for q in self._agenda.quiet if q.start <= wall < q.end and q.model in self._models
        }

    def decide(self, dispatcher: Dispatcher, host: TierCache | None, wall: float, now: float) -> tuple[Wanted, ...]:
        """Plan all windows in sight; what is due, and what is in trouble, is marked. `now` is in loop seconds.

        The plan stands for up to a minute, as long as nothing is read anew, nothing moves and no start is reached.
        """
        if not self._stands(host, wall):
            self._stand = self._agenda, wall, host, [] if host is None else [(None, host, host.ledger.moves)]
            self.wanted = self._decided(dispatcher, host, wall, now)
        return self.wanted

    def _stands(self, host: TierCache | None, wall: float) -> bool:
        agenda_, planned, beneath, seen = self._stand
        starts = (each.begin for each in self.wanted if not each.due)
        return (
            agenda_ is self._agenda
            and beneath is host
            and planned <= wall < min(planned + REREAD, *starts, float("inf"))
            and all(cache.ledger.moves == moves and (ref is None or ref.owner is cache) for ref, cache, moves in seen)
        )

    def _decided(self, dispatcher: Dispatcher, host: TierCache | None, wall: float, now: float) -> tuple[Wanted, ...]:
        jobs: dict[str, tuple[Window, Model, TierCache]] = {}
        held: list[Wanted] = []
        for window in self._agenda.windows:
            model = self._models.get(window.model)
            if model is None or window.end <= wall or window.model in jobs:
                continue
            ref = dispatcher.place(model)
            cache = ref.owner
            if not isinstance(cache, TierCache):
                continue
            if not any(known is cache for _, known, _ in self._stand[3]):
                self._stand[3].append((ref, cache, cache.ledger.moves))
            if cache.state_of(model.key) in {State.RESIDENT, State.LOADING}:
                # Begins when it is to be held: an earlier instant would hide the next load's from who waits for it.
                held.append(self._wanted(window, model, cache, window.ready_by, due=wall >= window.ready_by))
            else:
                jobs[window.model] = window, model, cache
        planned = self._schedule(jobs, host, wall, now)
        return tuple(sorted((*held, *planned), key=lambda each: (each.start, each.model.key)))

    def _schedule(
        self, jobs: Mapping[str, tuple[Window, Model, TierCache]], host: TierCache | None, wall: float, now: float
    ) -> list[Wanted]:
        if not jobs:
            return []
        lowest = min(window.priority for window, _, _ in jobs.values())
        caches = {cache.where: cache for _, _, cache in jobs.values()}
        late: list[Wanted] = []
        loads: list[Job] = []
        for window, model, cache in jobs.values():
            on_host = host is not None and host.state_of(model.key) is State.RESIDENT
            seconds = self._times.high(model, on_host=on_host)
            if window.ready_by - wall < seconds:
                late.append(self._late(window, model, cache, seconds, wall))
                continue
            disk = 0.0 if on_host else max(seconds - self._times.high(model, on_host=True), 0.0)
            worth = window.confidence * seconds * max(window.rps * seconds, 1.0)
            loads.append(
                Job(
                    model.key,
                    cache.where,
                    seconds,
                    window.ready_by,
                    max(window.end + self._cooldown, window.ready_by),
                    min(worth, PRIORITY / 2) + PRIORITY * (window.priority - lowest),
                    model.footprint.device,
                    self._times.variance(model, on_host=on_host),
                    disk,
                    window.require,
                )
            )
        plan = schedule(
            loads,
            now=wall,
            capacity={where: int(self._fraction * ceiling(cache.ledger)) for where, cache in caches.items()},
            occupied={where: _taken(cache, now) for where, cache in caches.items()},
            busy_until={where: wall + device_free(cache, host, self._times, now) for where, cache in caches.items()},
            disk_busy_until=wall + disk_free(host, self._times, now),
        )
        soon = [self._wanted(*jobs[placed.job.key], placed.start, due=wall >= placed.start) for placed in plan.placed]
        return [*late, *soon, *(self._cold(each, *jobs[each.job.key], wall) for each in plan.dropped)]

    def _wanted(self, window: Window, model: Model, cache: TierCache, begin: float, *, due: bool) -> Wanted:
        return Wanted(
            model,
            cache.where,
            ", ".join(window.cause),
            begin,
            window.ready_by,
            window.start,
            window.end + self._cooldown,
            window.require,
            due,
        )

    def _late(self, window: Window, model: Model, cache: TierCache, seconds: float, wall: float) -> Wanted:
        """It cannot be ready by then any more; while the window lasts, late is better than never."""
        wanted = self._wanted(window, model, cache, wall, due=True)
        if wall >= window.start or window.start - wall >= seconds:
            return wanted
        return replace(wanted, trouble="late", remedy=f"a load takes {seconds:.1f} s: give a longer lead")

    def _cold(self, dropped: Dropped, window: Window, model: Model, cache: TierCache, wall: float) -> Wanted:
        """No place on the device: at least on the host, so that the first request does not wait for the disk."""
        begin = window.ready_by - dropped.job.seconds - HOST_LEAD
        wanted = self._wanted(window, model, cache, begin, due=wall >= begin)
        return replace(wanted, trouble=dropped.reason, remedy=dropped.remedy, tier_below=True)

    def announced(self, wanted: Wanted) -> bool:
        """Was this window's trouble told already? Remembers that it was; how it goes on is no news."""
        at = wanted.model.key, wanted.start
        known = at in self._told
        self._told.add(at)
        return known

    def __repr__(self) -> str:
        return f"<PeakPlan {len(self._peaks)} peaks, {len(self.wanted)} windows in sight>"


def _taken(cache: TierCache, now: float) -> int:
    """Bytes that no further window can have: pinned, and held for required windows that are on."""
    return sum(row.size for row in cache.ledger.rows() if row.pinned or (row.firm and row.held(now)))
