"""The settings of what is loaded ahead: defaults, calendars of dates, scheduled peaks. Values only.

What contradicts itself is in `preload_checks.py`; `preload_peaks.py` turns entries into what `forecasting` knows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ModelWrapValidatorHandler,
    Strict,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from runtime.config import checks, preload_checks
from runtime.config.moments import Bound, Date, DayNames, Moment, Times, Zone
from runtime.config.units import Flag, Ratio, Seconds
from runtime.config.yaml import Frozen

if TYPE_CHECKING:
    from typing import Self

Name: TypeAlias = Annotated[str, AfterValidator(checks.name)]
Pattern: TypeAlias = Annotated[str, AfterValidator(preload_checks.pattern)]
SomeSeconds: TypeAlias = Annotated[Seconds, Field(gt=0)]
Rate: TypeAlias = Annotated[float, Field(ge=0, le=1e9)]
Label: TypeAlias = Annotated[str, Field(min_length=1, max_length=256)]


class PeakDefaults(Frozen):
    """What entries say that do not say otherwise."""

    timezone: Zone | None = None
    """Time zone of all times without an offset, as `Europe/Berlin`; entries may have their own."""
    lead: Seconds = 120.0
    """How long before its start a window's models are to be ready; load times come on top by themselves."""
    confidence: Ratio = 0.98
    """How likely the declared traffic is to come."""
    max_gpu_fraction: Annotated[Ratio, Field(gt=0)] = 0.8
    """Share of a device's memory that models loaded ahead may take."""
    mode: Literal["observe", "act"] = "act"
    """`observe` plans and reports without loading anything ahead: the way to begin."""


class DaySet(Frozen):
    """Local dates: listed ones, and those of a country or a market."""

    country: str | None = None
    """ISO code of a country, as `CN`."""
    subdivision: str | None = None
    """Its state or province, where holidays differ."""
    market: str | None = None
    """Code of a market, as `NYSE`."""
    kind: Literal["holidays", "working_days"] = "holidays"
    """Which days of the country or market; working days include make-up working weekends."""
    dates: tuple[Date, ...] = ()
    """Further dates."""

    @model_validator(mode="wrap")
    @classmethod
    def _check(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        return preload_checks.all_at_once(value, handler, preload_checks.day_set)


class Days(DaySet):
    """Dates of a calendar, or written out here."""

    calendar: str | None = None
    """Name of a calendar of `preload.calendars`; its name alone may stand for the mapping."""


DaysItem: TypeAlias = Annotated[Days, BeforeValidator(preload_checks.days_item, json_schema_input_type=str | Days)]


class Selector(Frozen):
    """Models by what they are labelled with."""

    labels: Annotated[dict[Label, Label], Field(min_length=1, max_length=64)]
    """Labels of the manifest; all of them must fit."""


class When(Frozen):
    """When a window starts: exactly one of at, cron, rrule and once."""

    days: DayNames | None = None
    """With `at`: `daily`, `weekdays`, `weekends`, a day or a list of them; daily if it is left out."""
    at: Times | None = None
    """Time of day, or a list of them."""
    cron: Annotated[str, AfterValidator(preload_checks.cron)] | None = None
    """Minute, hour, day, month, weekday; `L` is the last day of the month."""
    rrule: Annotated[str, AfterValidator(preload_checks.rrule)] | None = None
    """Recurrence rule (RFC 5545); needs `start`."""
    start: Moment | None = None
    """With `rrule`: its first start, which also sets the time of day."""
    once: Moment | None = None
    """A single date with a time; with an offset it is an instant."""
    timezone: Zone | None = None
    """Time zone of these times; overrides `preload.defaults.timezone`."""

    @model_validator(mode="wrap")
    @classmethod
    def _check(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        return preload_checks.all_at_once(value, handler, preload_checks.when)


class PeakEntry(Frozen):
    """A window in which models are wanted, and that may recur."""

    name: Name
    """What plans, events and reports call it."""
    models: tuple[Pattern, ...] = ()
    """Names, `name@version`, or patterns with `*`."""
    selector: Selector | None = None
    """Models by label, in addition to `models`."""
    when: When
    """When a window starts."""
    duration: SomeSeconds
    """How long a window lasts, in elapsed time: a change of the clocks does not change it."""
    lead: Seconds | None = None
    """Overrides `preload.defaults.lead`."""
    expected_rps: Rate | None = None
    """Requests per second that are expected in the window."""
    ramp: Seconds = 0.0
    """Time from the start until `expected_rps` is reached, linearly."""
    combine: Literal["max", "sum"] = "max"
    """Where windows of a model overlap, the highest rate counts; `sum` adds this one's on top."""
    priority: Annotated[int, Strict(), Field(ge=-1000, le=1000)] = 0
    """Of two models that do not both fit, the one with the higher number is loaded."""
    confidence: Ratio | None = None
    """Overrides `preload.defaults.confidence`."""
    require: Flag = False
    """Goes before every other window, is not suppressed, and raises an alarm if the plan cannot keep it."""
    action: Literal["preload", "suppress"] = "preload"
    """`suppress` turns loading ahead off in the window; requests still load."""
    only_on: DaysItem | None = None
    """Dates on which alone a window starts."""
    except_on: DaysItem | None = None
    """Dates on which no window starts."""
    valid_from: Bound | None = None
    """First date, or first instant, at which a window may start."""
    valid_until: Bound | None = None
    """Last date on which a window may start, or the instant before which it must."""
    enabled: Flag = True
    """Switches the entry off without removing it."""
    allow_missing: Flag = False
    """Whether models that do not exist are a warning and no error."""

    @model_validator(mode="wrap")
    @classmethod
    def _check(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        return preload_checks.all_at_once(value, handler, preload_checks.entry)


class Preload(Frozen):
    """What is loaded ahead of requests."""

    defaults: PeakDefaults = PeakDefaults()
    """What entries say that do not say otherwise."""
    calendars: Annotated[dict[Name, DaySet], Field(max_length=1000)] = Field(default_factory=dict)
    """Named sets of dates, for `only_on` and `except_on`."""
    peaks: tuple[PeakEntry, ...] = ()
    """Windows in which models are wanted."""

    @model_validator(mode="wrap")
    @classmethod
    def _check(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        return preload_checks.preload(value, handler, tuple(PeakDefaults.model_fields))


def _known(value: Any, handler: ValidatorFunctionWrapHandler, context: ValidationInfo) -> Any:
    given = context.data
    return preload_checks.all_at_once(
        value, handler, lambda raw: preload_checks.models(raw, given.get("models"), given.get("repository"))
    )


PreloadItem: TypeAlias = Annotated[Preload, WrapValidator(_known)]
"""The section inside a `Config`: entries may only name models that are listed, if no repository is searched."""
