"""What is known of each model's active and idle windows up to now: the state behind occurrence forecasts.

Rolled forward one window at a time, in training as in serving, so that no feature can see its own future.
Batched over models, slot axis first inside (one slot of all models is contiguous). Reads no clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from forecasting.interarrival import Gaps

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Bools = NDArray[np.bool_]
    Rows = NDArray[np.int64]

DAY = 86_400.0
HALF_LIVES = (10_800.0, DAY, 4 * DAY)
"""Seconds of the three memories: 3 h, 1 day, 4 days."""
SLOT_HALF_LIFE = 4.0
"""Days after which a slot of the day weighs half."""
GAP_HALF_LIFE = 28.0
"""Days after which a gap weighs half."""
GAP_DAYS = 2
_BY_MODEL = ("last", "since", "age", "ever", "blind", "weight", "active", "volume", "moves", "slots", "ring")


@dataclass(frozen=True, slots=True)
class Horizon:
    """What is asked: any request in `span` windows, the first of which starts `lead` windows from now?"""

    lead: int = 0
    span: int = 1

    def __post_init__(self) -> None:
        if self.lead < 0 or self.span < 1:
            msg = f"a horizon starts now or later and spans at least one window, not {self!r}"
            raise ValueError(msg)


class Activity:
    """Histories of `models` models in windows of `window` seconds, which divide a day.

    `spans` are the window counts for which a profile of "any request" is kept; 1 is always among them.
    """

    def __init__(self, models: int, window: float = 600.0, spans: Sequence[int] = (1, 6)) -> None:
        if window <= 0 or DAY % window:
            msg = f"window must divide a day, not {window!r} s"
            raise ValueError(msg)
        self.window = window
        self.day = round(DAY / window)
        self.week = 7 * self.day
        self.spans = tuple(sorted({1, *spans}))
        if self.spans[0] < 1 or self.spans[-1] >= self.day:
            msg = f"spans must lie between one window and a day, not {self.spans}"
            raise ValueError(msg)
        self._decay = 2.0 ** (-window / np.array(HALF_LIVES))
        self._slot_decay = np.float32(2.0 ** (-1 / SLOT_HALF_LIFE))
        self.last = np.zeros(models, np.bool_)
        """Was the last known window active?"""
        self.since = np.zeros(models, np.int32)
        """Idle windows since the last active one (or since the model appeared)."""
        self.age = np.zeros(models, np.int32)
        """Windows since the model appeared."""
        self.ever = np.zeros(models, np.bool_)
        self.blind = np.zeros(models, np.bool_)
        """Was there a gap in what is known since the last active window? Then its length means nothing."""
        self.weight = np.zeros((3, models))
        self.active = np.zeros((3, models))
        self.volume = np.zeros(models)
        """Decayed sum of log1p(requests), 3 h."""
        self.moves = np.zeros((4, models))
        """Decayed sums over 4 days: idle before, started, active before, stayed."""
        self.slots = np.zeros((4, self.day, models), np.float32)
        """The same four per slot of the day."""
        self.profiles = {span: np.zeros((2, self.day, models), np.float32) for span in self.spans if span > 1}
        """Windows seen and active ones of longer spans, by the slot of their first window."""
        self.overall = {span: np.zeros((2, models)) for span in self.profiles}
        self.ring = np.full((self.week, models), -1, np.int8)
        """The last week by slot of the week: 1 active, 0 idle, -1 unknown."""
        self.gaps = Gaps(models, GAP_DAYS * self.day)

    def __len__(self) -> int:
        return len(self.last)

    def __repr__(self) -> str:
        return f"<Activity {len(self)} models, window {self.window:g} s, {int(self.last.sum())} active>"

    def share(self, memory: int) -> Floats:
        """Decayed share of active windows; `memory` indexes `HALF_LIVES`."""
        return np.asarray(self.active[memory] / np.maximum(self.weight[memory], 1e-9), np.float64)

    def roll(self, slot: int, counts: Floats, known: Bools | None = None) -> None:
        """Close one window: `slot` of the local week, requests per model, and which counts are true (False = gap).

        A gap changes nothing but the time that has passed. Raises `ValueError` on counts that are no counts.
        """
        if not 0 <= slot < self.week:
            msg = f"slot must lie in 0..{self.week - 1}, not {slot}"
            raise ValueError(msg)
        if counts.shape != self.last.shape or not np.all(counts >= 0) or not np.all(np.isfinite(counts)):
            msg = f"counts must be {len(self)} finite numbers, none negative"
            raise ValueError(msg)
        seen = np.ones(len(self), np.bool_) if known is None else known
        act = (counts > 0) & seen
        self._transitions(slot % self.day, act, seen)
        self._memories(act, counts, seen)
        self.ring[slot] = np.where(seen, act, -1)
        self._longer(slot)
        rows = np.flatnonzero(act & self.ever & ~self.blind)
        self.gaps.observe(rows, self.since[rows] + 1)
        self.since = np.where(act, 0, self.since + 1).astype(np.int32)
        self.last = np.where(seen, act, self.last)
        self.ever |= act
        self.blind = (self.blind | ~seen) & ~act
        self.age += 1
        # A part of the models each window, so that all have a fresh hazard once a day without a peak of work.
        turn = np.arange(slot % self.day, len(self), self.day)
        self.gaps.refresh(turn, self.share(2)[turn], 2.0 ** (-1 / GAP_HALF_LIFE))

    def take(self, rows: Rows) -> Activity:
        """The same for some models, in this order; -1 asks for one that was just registered."""
        other = Activity(len(rows), self.window, self.spans)
        known = rows >= 0
        mine, theirs = self._by_model(), other._by_model()
        for name, array in theirs.items():
            array[..., known] = mine[name][..., rows[known]]
        other.gaps = self.gaps.take(rows)
        return other

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Plain arrays to persist: `restore` on a state of as many models, windows and spans takes them back."""
        return {**self._by_model(), "gaps": self.gaps.counts}

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Take a persisted state. Raises `ValueError`, and changes nothing, if an array is missing or absurd."""
        mine = self.arrays()
        for name, array in mine.items():
            found = arrays.get(name)
            floor = -1 if name == "ring" else 0
            if found is None or found.shape != array.shape or not np.all((found >= floor) & (found < np.inf)):
                msg = f"{name} of a persisted state must be {array.shape} finite numbers"
                raise ValueError(msg)
        for name, array in mine.items():
            array[...] = arrays[name]
        self.gaps.refresh(np.arange(len(self), dtype=np.int64), self.share(2))

    def _by_model(self) -> dict[str, NDArray[Any]]:
        """Every array whose last axis is that of models."""
        found: dict[str, NDArray[Any]] = {name: getattr(self, name) for name in _BY_MODEL}
        for span in self.profiles:
            found[f"profile/{span}"] = self.profiles[span]
            found[f"overall/{span}"] = self.overall[span]
        return found

    def _transitions(self, slot: int, act: Bools, seen: Bools) -> None:
        before = self.last
        now = np.array((~before & seen, ~before & act, before & seen, before & act))
        self.moves = np.where(seen, self.moves * self._decay[2], self.moves) + now
        here = self.slots[:, slot]
        self.slots[:, slot] = np.where(seen, here * self._slot_decay, here) + now

    def _memories(self, act: Bools, counts: Floats, seen: Bools) -> None:
        decay = self._decay[:, None]
        self.weight = np.where(seen, self.weight * decay + 1, self.weight)
        self.active = np.where(seen, self.active * decay + act, self.active)
        self.volume = np.where(seen, self.volume * self._decay[0] + np.log1p(counts), self.volume)

    def _longer(self, slot: int) -> None:
        """The span that ends with this window began `span - 1` windows ago; now its outcome is known."""
        for span, sums in self.profiles.items():
            window = self.ring[(slot - np.arange(span)) % self.week]
            seen = np.all(window >= 0, axis=0)
            now = np.array((seen, seen & np.any(window == 1, axis=0)))
            first = (slot - span + 1) % self.day
            sums[:, first] = np.where(seen, sums[:, first] * self._slot_decay, sums[:, first]) + now
            total = self.overall[span]
            self.overall[span] = np.where(seen, total * self._decay[2], total) + now
