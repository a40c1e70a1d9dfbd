"""Fitter side: the `Activity` after a whole past at once, which rolling through it finds window by window.

Every memory is a decayed sum, so its end is one product with the weights of all windows. Belongs here: that, and
nothing that needs the states between. A past that is not regular (see `settled`) has to be rolled through.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from forecasting.activity import GAP_HALF_LIFE, HALF_LIVES, SLOT_HALF_LIFE, Activity

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from forecasting.interarrival import Gaps

    Floats = NDArray[np.float64]
    Singles = NDArray[np.float32]
    Bools = NDArray[np.bool_]
    Ints = NDArray[np.int64]


def settled(counts: Floats, known: Bools, phase: Ints, window: float, spans: Sequence[int]) -> Activity | None:
    """The state after windows `counts[n, T]`, `known` alike, with week slots `phase[T]`, all hazards refreshed.

    None if it takes more than products: a week's slots that do not follow each other (the hour of a clock change),
    or models with gaps of their own after they were first seen.
    """
    state = Activity(len(counts), window, spans)
    common: Bools = np.asarray(known.any(axis=0), np.bool_)
    first: Ints = np.asarray(np.where(known.any(axis=1), known.argmax(axis=1), known.shape[1]), np.int64)
    place = np.arange(known.shape[1], dtype=np.int64)
    if not ((np.diff(phase) - 1) % state.week == 0).all() or not common.any():
        return None
    if not np.array_equal(known, common & (place >= first[:, None])):
        return None
    act = (counts > 0) & known
    _Past(state, act, common, first, phase).fill(np.where(known, np.log1p(counts), 0.0))
    return state


class _Past:
    """`act[n, T]` and `before`, the last known window before each; `seen[T]` by models from their `first` on."""

    def __init__(self, state: Activity, act: Bools, seen: Bools, first: Ints, phase: Ints) -> None:
        self.state, self.act, self.seen, self.first, self.phase = state, act, seen, first, phase
        self.length = len(seen)
        self.before = np.zeros_like(act)
        windows = np.flatnonzero(seen)
        self.before[:, windows[1:]] = act[:, windows[:-1]]

    def fill(self, volume: Floats) -> None:
        """Write everything into the state; `volume[n, T]` is log1p of requests, 0 where unknown."""
        self._memories(volume)
        self._latest()
        self._slots()
        for span in self.state.profiles:
            self._longer(span)
        self._gaps()

    def _memories(self, volume: Floats) -> None:
        state, decay = self.state, 2.0 ** (-self.state.window / np.array(HALF_LIVES))
        fade = np.where(self.seen, decay[:, None] ** _after(self.seen), 0.0)
        since = np.append(np.cumsum(fade[:, ::-1], axis=1)[:, ::-1], np.zeros((3, 1)), axis=1)
        state.weight = since[:, self.first]
        acted = self.act.astype(np.float64)
        state.active = (acted @ fade.T).T.copy()
        state.volume = volume @ fade[0]
        busy, stayed = self.before @ fade[2], (self.before & self.act) @ fade[2]
        state.moves = np.array((state.weight[2] - busy, state.active[2] - stayed, busy, stayed))

    def _latest(self) -> None:
        state, length = self.state, self.length
        state.ever = np.asarray(self.act.any(axis=1), np.bool_)
        latest = np.where(state.ever, length - 1 - self.act[:, ::-1].argmax(axis=1), -1)
        state.since = (length - 1 - latest).astype(np.int32)
        state.last = self.act[:, np.flatnonzero(self.seen)[-1]].copy()
        state.age = np.full(len(latest), length, np.int32)
        unseen = np.append(0, np.cumsum(~self.seen))
        state.blind = np.where(state.ever, unseen[-1] > unseen[latest + 1], (unseen[-1] > 0) | (self.first > 0))
        late = np.arange(max(length - state.week, 0), length)
        there = self.seen[late] & (late >= self.first[:, None])
        state.ring[self.phase[late]] = np.where(there, self.act[:, late], -1).T

    def _slots(self) -> None:
        """Where each window is its own slot's, by day: `[n, days, day]` sums with the weights of later passes."""
        weight = self._passes(self.seen, self.phase)
        seen = self._summed(np.broadcast_to(self.seen, self.act.shape), weight, self.phase, self.first)
        active, busy, stayed = (
            self._summed(each, weight, self.phase) for each in (self.act, self.before, self.before & self.act)
        )
        for place, sums in enumerate((seen - busy, active - stayed, busy, stayed)):
            self.state.slots[place] = sums

    def _longer(self, span: int) -> None:
        state = self.state
        whole, some = self.seen.copy(), self.act.copy()
        for back in range(1, span):
            whole[back:] &= self.seen[:-back]
            some[:, back:] |= self.act[:, :-back]
        whole[: span - 1] = False
        some &= whole & (np.arange(self.length) >= (self.first + span - 1)[:, None])
        start = (self.phase - span + 1) % state.day
        weight = self._passes(whole, start)
        everyone = np.broadcast_to(whole, some.shape)
        state.profiles[span][0] = self._summed(everyone, weight, start, self.first + span - 1)
        state.profiles[span][1] = self._summed(some, weight, start)
        fade = np.where(whole, 2.0 ** (-state.window / HALF_LIVES[2] * _after(whole)), 0.0)
        active: Floats = np.asarray(some.astype(np.float64) @ fade, np.float64)
        since = np.append(np.cumsum(fade[::-1])[::-1], 0.0)
        since = since[np.minimum(self.first + span - 1, self.length)]
        state.overall[span] = np.array((since, active))

    def _passes(self, seen: Bools, slots: Ints) -> Singles:
        """What each window weighs in its slot of the day, `[T]`: halved with every so many later passes."""
        day = slots % self.state.day
        weight = np.zeros(self.length, np.float32)
        for slot in range(self.state.day):
            mine = np.flatnonzero((day == slot) & seen)
            weight[mine] = 2.0 ** (-np.arange(len(mine) - 1, -1, -1) / SLOT_HALF_LIFE)
        return weight

    def _summed(self, values: Bools, weight: Singles, slots: Ints, first: Ints | None = None) -> Singles:
        """Weighted sums by slot of the day, `[day, n]`; those of a model before its `first` window do not count."""
        day = self.state.day
        found = np.zeros((day, len(values)), np.float32)
        begin = int(-slots[0] % day)
        for start in range(begin - day if begin else 0, self.length, day):
            here = slice(max(start, 0), min(start + day, self.length))
            part = values[:, here].T * weight[here, None]
            if first is not None:
                part *= np.arange(here.start, here.stop)[:, None] >= first
            low = int(slots[here.start] % day)
            found[low : low + len(part)] += part
        return found

    def _gaps(self) -> None:
        state, models = self.state, len(self.act)
        gaps: Gaps = state.gaps
        rows, at = np.nonzero(self.act)
        again = np.flatnonzero(rows[1:] == rows[:-1]) + 1
        rows, at, earlier = rows[again], at[again], at[again - 1]
        unseen = np.cumsum(~self.seen)
        whole = unseen[at] == unseen[earlier]  # a gap in what is known would make the length meaningless
        rows, at, earlier = rows[whole], at[whole], earlier[whole]
        # Each model's gaps fade once a day, at a window of its own.
        turn = (np.arange(models) - self.phase[-1] % state.day) % state.day
        latest = np.where(turn == 0, self.length - 1, self.length - 1 - state.day + turn)
        fades = np.maximum((latest[rows] - at) // state.day + 1, 0)
        place = rows * (gaps.limit + 1) + np.minimum(at - earlier, gaps.limit + 1) - 1
        counted = np.bincount(place, 2.0 ** (-fades / GAP_HALF_LIFE), minlength=models * (gaps.limit + 1))
        gaps.counts[...] = counted.reshape(models, gaps.limit + 1)
        gaps.refresh(np.arange(models, dtype=np.int64), state.share(2))


def _after(seen: Bools) -> Ints:
    """How many of these windows come after each."""
    return np.asarray(seen.sum() - np.cumsum(seen), np.int64)
