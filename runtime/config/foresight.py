"""The settings of what is learned: rates and probabilities, how often, and how much of the machine they may use.

Values only. What somebody declares is in `preload.py`.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from runtime.config.units import Flag, Ratio, Seconds
from runtime.config.yaml import Frozen

SomeSeconds: TypeAlias = Annotated[Seconds, Field(gt=0)]


class Forecast(Frozen):
    """Learned rates: what models are loaded ahead for without anybody declaring it."""

    learned: Flag = True
    """Whether models are loaded ahead by learned rates; scheduled peaks work either way."""
    source: Literal["auto", "blend", "occurrence", "rate"] = "auto"
    """Where value rates come from: `auto` is blend or occurrence, whichever loads at less cost in a fit's backtest."""
    tick: Annotated[Seconds, Field(ge=0.1, le=600)] = 10.0
    """Time between two looks at what should be loaded."""
    refit: SomeSeconds = 3_600.0
    """Time between two rounds of fitting."""
    fit_deadline: SomeSeconds = 120.0
    """How long one round of fitting may take."""
    control: Annotated[Ratio, Field(lt=1)] = 0.02
    """Share of model hours without learned loads, by which savings are measured."""
    channel_share: Annotated[Ratio, Field(gt=0)] = 0.5
    """Share of the load channel's time that learned loads may take."""
    keep: Flag = True
    """Whether counts are kept on disk, beside the cache, over a restart."""
