"""What `forecast explain` and `backtest` print for people, line by line. Programs get the rows as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from runtime.commands.show import clean
from runtime.config.units import print_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from runtime.commands.foresight import Backtest, Explanation

_HOURS: Final = 24
_BAR: Final = 40
_SHOWN: Final = 20
_LEAST_WEIGHT: Final = 0.005


def explanation(said: Explanation) -> Iterator[str]:
    """What is expected of a model, and why."""
    rows = said.rows
    yield f"{clean(rows['model'])}, {rows['at']} ({rows['zone']}), confidence {rows['confidence']}"
    yield (
        f"known: {rows['history_days']:g} days, {rows['requests_known']:,.0f} requests,"
        f" {rows['requests_last_day']:,.0f} in the last 24 h"
    )
    use = rows["next_use_seconds"]
    yield f"next use: {'not expected' if use is None else f'in {print_seconds(round(use))}'}"
    for name, chance in rows["chances"].items():
        other = "" if chance["occurrence"] is None else f", {chance['occurrence']:.0%} from occurrence"
        yield f"chance within {name}: {chance['blend']:.0%} from rates{other}"
    yield f"worth keeping {_rate(rows['evict_rate'])}, worth bringing {_rate(rows['prefetch_rate'])}"
    yield f"blend: {_weights(rows['blend'])}"
    if rows["mix"]:
        yield f"mixed from: {_weights(rows['mix'])}"
    for each in rows["why"]:
        yield f"- {each}"
    for peak in rows["peaks"]:
        yield f"- scheduled {peak['start']} to {peak['end']}: {clean(peak['cause'])}"
    yield "expected requests per hour:"
    yield from _hours(said)


def _hours(said: Explanation) -> Iterator[str]:
    per = len(said.expected) // _HOURS
    hourly = said.expected.reshape(_HOURS, per).sum(axis=1)
    scale = max(float(hourly.max()), 1e-9)
    for place, value in enumerate(hourly.tolist()):
        stamp = said.rows["curve"][place * per]["time"][11:16]
        yield f"  {stamp}  {value:10.1f}  {'#' * round(_BAR * value / scale)}"


def _rate(rate: float) -> str:
    hourly = rate * 3600
    return f"{rate:.3g}/s" if rate >= 1 else f"{hourly:.3g}/h"


def _weights(shares: Mapping[str, float]) -> str:
    kept = {name: share for name, share in shares.items() if share >= _LEAST_WEIGHT}
    ordered = sorted(kept.items(), key=lambda one: -one[1])
    return ", ".join(f"{name} {share:.2f}" for name, share in ordered) or "nothing was fitted"


def report(found: Backtest) -> Iterator[str]:
    """What the forecasts were worth on days that they had not seen."""
    rows = found.rows
    yield (
        f"{rows['requests']:,} requests for {rows['models']} models, {rows['from']} to {rows['to']}"
        f" ({rows['days']:g} days); {rows['bad_lines']} bad lines of {rows['lines']:,}"
    )
    for problem in rows["problems"]:
        yield f"- {clean(problem)}"
    if not rows["complete"]:
        yield "- the time limit was reached before all models were fitted"
    if rows["gate"] == "open":
        yield f"the gate is open: {rows['skilled']} of {rows['models']} models may be loaded ahead by what was learned"
    else:
        yield "the gate is shut: nothing beat a constant rate, so nothing would be loaded ahead by what was learned"
    yield f"what to keep would follow {rows['keep_by']}; blend: {_weights(rows['blend'])}"
    for name, value in rows["relative_mae"].items():
        yield f"error {name} ahead: {value:.2f} of repeating yesterday's"
    if rows["blend_10m"]:
        yield f"next 10m from rates: {_scores(rows['blend_10m'])}"
    for name, scores in rows["occurrence"].items():
        yield f"{name} from occurrence: {_scores(scores)}"
    models: list[dict[str, Any]] = rows["by_model"]
    for each in models[:_SHOWN]:
        may = "allowed" if each["allowed"] else "no"
        yield (
            f"  {clean(each['model']):<40} {each['requests']:>12,}  saved {each['saved']:>7.1%}"
            f"  {each['confidence']:<6}  {may}"
        )
    if len(models) > _SHOWN:
        yield f"  and {len(models) - _SHOWN} models more"


def _scores(scores: Mapping[str, float]) -> str:
    skill = 1 - scores["brier"] / scores["climatology"] if scores["climatology"] > 0 else float("nan")
    better = f", {skill:.0%} better than the mean" if np.isfinite(skill) else ""
    return f"Brier {scores['brier']:.4f}{better}, ECE {scores['ece']:.2%}"
