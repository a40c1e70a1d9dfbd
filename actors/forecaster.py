"""Loads before the request: from scheduled peaks, and from what was learned. The actor that owns the outlook.

Each tick it counts, estimates, tells the caches what to expect, and asks them for what should be resident. It never
stands in a request's way: if it fails or is stale, schedules, recency and serving go on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, assert_never

import anyio
import numpy as np

from actors import events as facts
from actors.actor import Actor, Ref, Urgent
from actors.dispatcher import Dispatcher
from actors.fleet import Fleet
from actors.messages import Command, Ensure, Outlooked
from actors.peak_plan import PeakPlan, Wanted
from actors.residency.model import Trigger
from actors.supervisor import one_line
from actors.tier_cache import TierCache
from forecasting.estimate import allowed as gate
from forecasting.estimate import estimate
from forecasting.fitted import SOURCES
from forecasting.hindsight import Hindsight
from forecasting.outlook import UNKNOWN, Outlook
from forecasting.refill import Guards, Tokens, refill
from forecasting.snapshot import ClockJumped

if TYPE_CHECKING:
    from collections.abc import Callable

    from actors.clock import Clock
    from actors.dispatcher import Order
    from actors.foresight import Foresight
    from actors.load_times import LoadTimes
    from actors.ports import Emit, Fitting, Journal
    from actors.residency.model import Model, ModelKey
    from forecasting.calibration import Reliability
    from forecasting.counts import Counts
    from forecasting.fitted import Fitted
    from forecasting.peaks import Labels, Peak
    from forecasting.sources import Estimate
    from forecasting.standing import Standing

DAY = 86_400.0
MINUTE = 60.0
NAMED = 20
"""Models that one event of demotion names."""
MOMENT = 1e-3
"""Seconds after a planned start at which it is looked for: then it is due for certain."""


@dataclass(frozen=True, slots=True)
class ForecastSettings:
    """Durations in seconds. `act` false plans and reports only.

    `source` is auto (what the fit chose), blend, occurrence or rate; `fraction` of a device's memory may hold what was
    loaded ahead; `share` of the load channel may be used for guesses; a fit older than `stale` counts as none.
    """

    act: bool = True
    learned: bool = True
    source: Literal["auto", "blend", "occurrence", "rate"] = "auto"
    tick: float = 10.0
    refit: float = 3_600.0
    first_fit: float = 120.0
    checkpoint: float = 300.0
    stale: float = 3 * 86_400.0
    horizon: float = 6 * 3_600.0
    cooldown: float = 60.0
    fraction: float = 0.8
    share: float = 0.5
    guards: Guards = field(default_factory=Guards)


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time for a look."""


@dataclass(frozen=True, slots=True)
class Nudged(Urgent):
    """Something happened that may change the plan: a miss, a load that ended or failed."""


@dataclass(frozen=True, slots=True)
class FitCame:
    """What a round of fitting learned."""

    fitted: Fitted


@dataclass(frozen=True, slots=True)
class FitBroke:
    """A round of fitting failed."""

    error: Exception


@dataclass(frozen=True, slots=True)
class Written:
    """The journal has taken what it was given; an error if it could not."""

    error: Exception | None = None


ForecastMessage: TypeAlias = Ticked | Nudged | FitCame | FitBroke | Written


@dataclass(frozen=True, slots=True)
class ForecastView:
    """A frozen view; times in seconds. `brier` and `ece` are of the last fit, `judged` is of what was stated since."""

    acting: bool
    fitted_ago: float | None
    brier: float | None
    ece: float | None
    skilled: int
    failures: int
    judged: Reliability
    source: str
    """Where rates come from now."""
    costs: dict[str, float]
    """Of deciding loads by each source on the last fit's held-out day, relative to the better of always and never."""
    demoted: tuple[str, ...]
    """Models whose forecast has stopped being right, on the last hour's rate until it is again."""
    windows: tuple[Wanted, ...]
    tokens: float


class Forecaster(Actor[ForecastMessage]):
    """`counts`, `times`, `foresight` and `standing` are given by whoever builds incarnations: facts outlive a crash."""

    def __init__(
        self,
        settings: ForecastSettings,
        *,
        counts: Counts,
        times: LoadTimes,
        foresight: Foresight,
        standing: Standing,
        peaks: tuple[Peak, ...],
        labels: Callable[[], Labels],
        dispatcher: Ref[Order],
        devices: tuple[Ref[Command], ...],
        host: Ref[Command],
        fitting: Fitting | None,
        journal: Journal | None,
        clock: Clock,
        emit: Emit,
    ) -> None:
        super().__init__()
        self._settings = settings
        self._counts = counts
        self._times = times
        self._foresight = foresight
        self._standing = standing
        self._dispatcher = dispatcher
        self._devices = devices
        self._host = host
        self._fitting = fitting
        self._journal = journal
        self._clock = clock
        self._emit = emit
        self._plan = PeakPlan(
            peaks, labels, times=times, horizon=settings.horizon, cooldown=settings.cooldown, fraction=settings.fraction
        )
        self._tokens = Tokens(share=settings.share, tick=settings.tick)
        self._fleet = Fleet((), times)
        self._hindsight = Hindsight()
        self._models: tuple[Model, ...] = ()
        self._fitted: Fitted | None = None
        self._fitted_at = -np.inf
        self._fit_due = np.inf
        self._fit_running = False
        self._minute = 0
        self._written = 0
        self._writing = False
        self._checkpoint_due = 0.0
        self._reported = 0
        self._looked = 0.0
        self._failures = 0
        self._withheld: dict[tuple[str, str], float] = {}
        self._masked: set[tuple[float, float, str]] = set()

    # -- messages ------------------------------------------------------------------------------------

    def started(self) -> None:
        """Look once a tick."""
        now = self._clock.now()
        self._fit_due = now + self._settings.first_fit
        self._checkpoint_due = now + self._settings.checkpoint
        self._looked = now
        self._reported = int(self._wall() // DAY)
        self._sleep(0.0)

    def receive(self, message: ForecastMessage) -> object:
        """Handle one message."""
        match message:
            case Ticked():
                self._sleep(self._settings.tick)
                self._look()
            case Nudged():
                self._look()
            case FitCame(fitted):
                self._fit_came(fitted)
            case FitBroke(error):
                self._fit_running = False
                self._fell("fitting", error)
            case Written(error):
                self._writing = False
                if error is not None:
                    self._fell("journal", error)
            case _:
                assert_never(message)
        return None

    def _sleep(self, seconds: float) -> None:
        async def sleep() -> ForecastMessage:
            await anyio.sleep(seconds)
            return Ticked()

        self.spawn(sleep, failed=lambda _: Ticked())

    # -- one look ------------------------------------------------------------------------------------

    def _look(self) -> None:
        now, wall = self._clock.now(), self._wall()
        rolled = self._roll(now, wall)
        outlook, guess = self._estimate(now, wall)
        # A look that closes a minute or reads the agenda has enough to do: what can wait for the next one does.
        seldom = self._settings.tick > MINUTE / 2
        spare = seldom or not rolled
        if spare:
            self._judge(guess, now, wall)
        models = self._known()
        read = self._plan.look(models, wall, spare=spare)
        for begin, end, key in self._plan.masks - self._masked:
            self._counts.mask(begin, end, (key,))
        self._masked = self._plan.masks
        self._tell(outlook.raised(self._plan.floors(wall)))
        self._keep_peaks(now, wall)
        self._tokens.refill(now - self._looked, float(self._fleet.disk_cost.max(initial=0.0)))
        self._looked = now
        if guess is not None and (seldom or not (rolled or read)):
            self._refill(guess, now, wall)
        self._report(wall, now)
        self._fit(now)

    def _known(self) -> tuple[Model, ...]:
        owner = self._dispatcher.owner
        models = owner.models() if isinstance(owner, Dispatcher) else self._models
        if models is not self._models and models != self._models:
            for gone in {each.key for each in self._models} - {each.key for each in models}:
                self._counts.forget(gone)
                self._times.forget(gone)
                self._standing.forget(gone)
            self._models = models
            self._fleet = Fleet(models, self._times)
        for key in self._times.news():
            self._fleet.relearn(key, self._times)
        return models

    def _roll(self, now: float, wall: float) -> bool:
        """Close the minute, and give the journal what it does not have yet; whether there was one to close."""
        minute = int(wall // MINUTE)
        if minute == self._minute:
            return False
        self._minute = minute
        for fact in self._counts.roll(wall, now):
            if isinstance(fact, ClockJumped):
                self._plan.forget()
                self._emit(facts.ForecastFell(now, "clock", repr(fact)))
        if self._journal is None or self._writing:
            return True
        self._writing = True
        journal, snapshot = self._journal, self._counts.snapshot()
        minutes = self._counts.closed(self._written)
        self._written = minutes[-1][0] if minutes else self._written
        full = now >= self._checkpoint_due
        self._checkpoint_due = now + self._settings.checkpoint if full else self._checkpoint_due

        async def write() -> ForecastMessage:
            await journal.append(snapshot, minutes)
            if full:
                await journal.checkpoint(snapshot)
            return Written()

        self.spawn(write, failed=Written)
        return True

    def _estimate(self, now: float, wall: float) -> tuple[Outlook, Estimate | None]:
        """What is expected. A forecast that raises is worth nothing, and costs nothing."""
        fresh = self._fitted if now - self._fitted_at <= self._settings.stale else None
        try:
            guess = estimate(self._counts, fresh, wall=wall, monotonic=now, mode=self._settings.source)
            return guess.outlook(self._counts.keys, now, 6 * self._settings.tick, self._counts.places), guess
        except Exception as error:  # noqa: BLE001 - the forecast must never hurt serving
            self._fell("estimate", error)
            return UNKNOWN, None

    def _judge(self, guess: Estimate | None, now: float, wall: float) -> None:
        """Hold what was stated against what came, once its time is over."""
        if self._hindsight.look(self._counts, guess, wall):
            record = self._hindsight.record
            self._emit(facts.ForecastJudged(now, int(record.n), record.brier, record.ece, record.climatology))

    def _tell(self, outlook: Outlook) -> None:
        for ref in (*self._devices, self._host):
            ref.tell(Outlooked(outlook))

    # -- scheduled -----------------------------------------------------------------------------------

    def _keep_peaks(self, now: float, wall: float) -> None:
        """Ask for what declared windows want by now, and say early what they will not get."""
        owner = self._dispatcher.owner
        if not isinstance(owner, Dispatcher):
            return
        host = self._host.owner if isinstance(self._host.owner, TierCache) else None
        windows = self._plan.decide(owner, host, wall, now)
        self._wake_for(min((each.begin for each in windows if not each.due), default=np.inf) - wall)
        for wanted in windows:
            hold_until = now + max(wanted.release - wall, 0.0)
            if wanted.trouble:
                self._announce(wanted, now, wall)
            if not wanted.due:
                continue
            if not self._settings.act:
                self._withhold(wanted.device, wanted.model.key, "observe", now)
                continue
            place = self._host if wanted.tier_below else owner.place(wanted.model)
            if isinstance(place.owner, TierCache) and place.owner.wishes.of(wanted.model.key) is not None:
                continue  # on its way; the hold follows when it is there
            place.tell(
                Ensure(
                    wanted.model,
                    Trigger.PREFETCH,
                    expires=hold_until,
                    request=f"peak {wanted.cause}",
                    hold_until=hold_until,
                    firm=wanted.require,
                )
            )

    def _wake_for(self, seconds: float) -> None:
        """Look again exactly when the next load has to start, if that is before the next tick."""
        if not 0 < seconds < self._settings.tick:
            return

        async def sleep() -> ForecastMessage:
            await anyio.sleep(seconds + MOMENT)
            return Nudged()

        self.spawn(sleep, failed=lambda _: Nudged())

    def _announce(self, wanted: Wanted, now: float, wall: float) -> None:
        if self._plan.announced(wanted):
            return
        self._emit(
            facts.PeakInfeasible(
                now,
                wanted.device,
                wanted.model.key,
                wanted.cause,
                wanted.start - wall,
                wanted.require,
                wanted.trouble,
                wanted.remedy,
            )
        )

    # -- learned -------------------------------------------------------------------------------------

    def _refill(self, guess: Estimate, now: float, wall: float) -> None:
        """While nothing is loading: bring what is likely to be asked for, if it beats what would leave."""
        host = self._host.owner
        if (
            not self._settings.learned
            or self._fitted is None
            or not self._models
            or not isinstance(host, TierCache)
            or host.wishes.all()
        ):
            return
        allowed = self._allowed(wall)
        for index, ref in enumerate(self._devices):
            device = ref.owner
            if not isinstance(device, TierCache) or not device.up or device.wishes.all():
                continue
            mine = allowed & self._share_of(index)
            scene = self._fleet.scene(device, host, keys=self._counts.keys, estimate=guess, allowed=mine, now=now)
            free = device.ledger.free - (1 - self._settings.fraction) * device.ledger.budget
            for move in refill(scene, free=free, tokens=self._tokens, guards=self._settings.guards):
                self._bring(ref, self._models[move.index], frozenset(self._fleet.keys[v] for v in move.victims), now)

    def _share_of(self, device: int) -> Any:
        """Which rows this device looks after, of those that are on none; all of them if it is the only one."""
        if len(self._devices) == 1:
            return np.ones(len(self._models), dtype=np.bool_)
        rows = np.arange(len(self._models)) % len(self._devices) == device
        for other, ref in enumerate(self._devices):
            if other != device and isinstance(ref.owner, TierCache):
                for row in ref.owner.ledger.rows():
                    if row.key in self._fleet.rows:
                        rows[self._fleet.rows[row.key]] = False
        return rows

    def _allowed(self, wall: float) -> Any:
        """Rows with skill, that are neither suppressed nor in the control group."""
        assert self._fitted is not None
        # The gate: what did not beat its baseline in the backtest earns no load.
        gated = self._fleet.aligned(self._counts.keys, gate(self._counts, self._fitted, wall=wall))
        allowed = gated & ~self._foresight.controls(self._fleet.keys, wall)
        for key in self._plan.quiet(wall):
            if key in self._fleet.rows:
                allowed[self._fleet.rows[key]] = False
        return allowed

    def _bring(self, ref: Ref[Command], model: Model, victims: frozenset[ModelKey], now: float) -> None:
        if not self._settings.act:
            self._withhold(ref.name, model.key, "observe", now)
            return
        expires = now + self._settings.tick
        ref.tell(Ensure(model, Trigger.PREFETCH, expires=expires, request="learned", victims=victims))

    def _withhold(self, device: str, key: ModelKey, reason: str, now: float) -> None:
        """State it once per model and quarter of an hour: a plan in observe mode is looked at every tick."""
        if now - self._withheld.get((key, reason), -np.inf) >= 15 * MINUTE:
            self._withheld[key, reason] = now
            self._emit(facts.PrefetchWithheld(now, device, key, reason))

    # -- learning ------------------------------------------------------------------------------------

    def _fit(self, now: float) -> None:
        if self._fitting is None or not self._settings.learned or self._fit_running or now < self._fit_due:
            return
        self._fit_running = True
        self._fit_due = now + self._settings.refit
        fitting, snapshot = self._fitting, self._counts.snapshot()

        async def fit() -> ForecastMessage:
            return FitCame(await fitting.fit(snapshot))

        self.spawn(fit, failed=FitBroke)

    def _fit_came(self, fitted: Fitted) -> None:
        now = self._clock.now()
        self._fit_running = False
        fitted, change = self._standing.after(fitted)
        self._fitted, self._fitted_at = fitted, now
        for demoted, models in ((True, change.fell), (False, change.rose)):
            if models:
                total = len(self._standing.demoted)
                self._emit(facts.ForecastDemoted(now, demoted, models[:NAMED], len(models), total))
        numbers = fitted.numbers
        self._emit(
            facts.ForecastFitted(
                now,
                len(fitted.keys),
                _skilled(fitted),
                sum(seconds for name, seconds in numbers.items() if name.startswith("cpu_")),
                numbers.get("brier", 0.0),
                numbers.get("ece", 0.0),
                self._source,
                numbers.get("cost_blend"),
                numbers.get("cost_occurrence"),
            )
        )

    def _fell(self, part: str, error: Exception) -> None:
        self._failures += 1
        self._emit(facts.ForecastFell(self._clock.now(), part, one_line(error)))

    def _report(self, wall: float, now: float) -> None:
        day = int(wall // DAY)
        if day != self._reported:
            self._reported = day
            self._emit(self._foresight.report(now))

    def _wall(self) -> float:
        return self._clock.wall().timestamp()

    @property
    def _source(self) -> str:
        """Where rates come from: as set, or as the last fit chose."""
        if self._fitted is None:
            return "rate"
        return self._fitted.source if self._settings.source == "auto" else self._settings.source

    # -- outside -------------------------------------------------------------------------------------

    def snapshot(self) -> ForecastView:
        """A frozen view."""
        fitted = self._fitted
        return ForecastView(
            self._settings.act,
            None if fitted is None else self._clock.now() - self._fitted_at,
            None if fitted is None else fitted.numbers.get("brier"),
            None if fitted is None else fitted.numbers.get("ece"),
            0 if fitted is None else _skilled(fitted),
            self._failures,
            self._hindsight.record,
            self._source,
            _costs(fitted),
            tuple(sorted(self._standing.demoted)),
            self._plan.wanted,
            self._tokens.left,
        )

    def __repr__(self) -> str:
        return f"<Forecaster {len(self._models)} models, {len(self._plan.wanted)} windows, {self._tokens!r}>"


def _costs(fitted: Fitted | None) -> dict[str, float]:
    """What deciding by each source cost in the backtest."""
    if fitted is None:
        return {}
    return {each: fitted.numbers[f"cost_{each}"] for each in SOURCES if f"cost_{each}" in fitted.numbers}


def _skilled(fitted: Fitted) -> int:
    """How many models the gate lets through."""
    return int(np.count_nonzero(fitted.skilled)) if fitted.skill else 0
