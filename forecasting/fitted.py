"""What one round of fitting found: plain arrays, numbers and words, checked whenever they come from elsewhere.

Belongs here: the value, and its way through a file of plain arrays. Never: fitting (`fit.py`), predicting
(`estimate.py`), pickles.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

import numpy as np

from forecasting.calendar import WEEK
from forecasting.ladder import Confidence
from forecasting.rates import COLUMNS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from collections.abc import Set as AbstractSet

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Bools = NDArray[np.bool_]
    Ints = NDArray[np.int64]
    Single = NDArray[np.float32]

MOST_RATE: Final = 1e5
"""Requests per second of one model beyond which a number is absurd."""
MOST_SLOT: Final = MOST_RATE * 900
MOST_USE: Final = 3.7e6
"""Seconds to the next use beyond which it is as good as never: 0.7 requests at the least rate a table holds."""
BUCKET: Final = 300.0
USE_BUCKET: Final = 900.0
DAY: Final = 86_400.0
WORDS: Final = tuple(Confidence)
SOURCES: Final = ("blend", "occurrence")
BINS: Final = 20


class Absurd(ValueError):
    """A fit that says something impossible; nothing of it is to be used."""


@dataclass(frozen=True, slots=True, eq=False)
class Fitted:
    """One round. Models are in the order of `keys`, n of them; `at` is the UTC second of what it was fitted on.

    Tables over a day begin at `origin` and go on for 24 h: `season[n, 288]` is the seasonal part of λ_P in requests
    per second, `use[n, 96]` seconds to the next use (infinite: never). `profile[n, 672]` is in requests per pass of a
    week slot; empty, `[0, 672]`, in what a server keeps (`served`). `skill` is the gate: only then, and only models
    that are `skilled`, may be loaded ahead by what was learned. `schedule` says whether seasons, rather than recency,
    say when models are used.
    """

    keys: tuple[str, ...]
    at: float
    origin: float
    complete: bool
    skill: bool
    schedule: bool
    profile: Single
    prior: Single
    """Profile of a model that was not fitted, `[672]`."""
    slot: int
    """Week slot of `origin`."""
    fast: NDArray[np.int8]
    """Which of `profile.FAST` moves the level, `[n]`."""
    season: Single
    use: Single
    weights: Floats
    """The pooled blend's ten weights (`rates.COLUMNS`); all zero: not fitted."""
    saved: Single
    """Share of the Poisson loss of a constant rate that the blend saved in the backtest, `[n]`."""
    skilled: Bools
    demoted: Bools
    """Models that are to follow the last hour's rate: their forecasts have stopped being right, `[n]`."""
    earned: Bools
    """Models that may be trusted again if they were demoted before, `[n]`."""
    confidence: NDArray[np.int8]
    """Index of `WORDS`, `[n]`."""
    absurd: Bools
    """Models whose counts were impossible and were cut, `[n]`."""
    source: str = "blend"
    """Which of `SOURCES` decided loads at less cost in the backtest; `numbers` has `cost_<source>`."""
    tables: Mapping[str, NDArray[Any]] = field(default_factory=lambda: MappingProxyType({}))
    """Further arrays by name: see `TABLES`."""
    numbers: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """Judgement and cost: `brier`, `ece` and others of the held-out day, `cpu_<part>` seconds."""
    memo: dict[str, Any] = field(default_factory=dict[str, Any], repr=False)
    """What a reader derived from it; never part of the value."""

    def rows(self, keys: tuple[str, ...]) -> Ints:
        """Row of each of these keys, -1 for one that was not fitted; remembered for the same tuple."""
        if self.memo.get("keys") is not keys:
            known = {key: row for row, key in enumerate(self.keys)}
            self.memo["rows"] = np.array([known.get(key, -1) for key in keys], np.int64)
            self.memo["keys"] = keys
        found: Ints = self.memo["rows"]
        return found

    def prior_rate(self, wall: float) -> float:
        """Requests per second that a model without a fit of its own is expected to get now."""
        ahead = int((wall - self.origin) // 900) % WEEK
        return float(self.prior[(self.slot + ahead) % WEEK]) / 900

    def served(self) -> Fitted:
        """The same without the profiles: most of its bytes, and only an explanation looks at them."""
        return replace(self, profile=self.profile[:0], memo={})

    def demoting(self, keys: AbstractSet[str]) -> Fitted:
        """The same with these models, and those that this round demotes, on the simpler estimate."""
        demoted = self.demoted | np.fromiter((key in keys for key in self.keys), np.bool_, len(self.keys))
        return replace(self, demoted=demoted, skilled=self.skilled & ~demoted, memo={})

    def word(self, row: int) -> Confidence:
        """How far one model's forecast may be trusted."""
        return WORDS[int(self.confidence[row])]

    def blend(self) -> dict[str, float]:
        """Weight by column of the pooled blend."""
        return dict(zip(COLUMNS, self.weights.tolist(), strict=True))

    # -- plain arrays --------------------------------------------------------------------------------

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """For `numpy.savez` without pickles; `from_arrays` is the inverse."""
        said = {
            "keys": self.keys,
            "at": self.at,
            "origin": self.origin,
            "complete": self.complete,
            "skill": self.skill,
            "schedule": self.schedule,
            "slot": self.slot,
            "source": self.source,
            "numbers": dict(self.numbers),
        }
        text = np.frombuffer(json.dumps(said).encode(), np.uint8)
        plain = {name: getattr(self, name) for name in SHAPES}
        return {"said": text, **plain, **{f"table/{name}": table for name, table in self.tables.items()}}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> Fitted:
        """Check everything: names, types, shapes, ranges. Raises `Absurd`, which names what is wrong."""
        said = _said(arrays.get("said"))
        sizes = {"n": len(said["keys"])}
        plain = {name: _array(name, arrays.get(name), SHAPES[name], sizes) for name in SHAPES}
        if sizes["p"] not in {0, sizes["n"]}:
            raise Absurd(f"profile must be that of all {sizes['n']} models or of none, not of {sizes['p']}")
        tables: dict[str, NDArray[Any]] = {}
        for name, array in arrays.items():
            if name.startswith("table/"):
                short = name.removeprefix("table/")
                if short not in TABLES:
                    raise Absurd(f"there is no table {short[:40]!r}")
                tables[short] = _array(short, array, TABLES[short], sizes)
            elif name not in SHAPES and name != "said":
                raise Absurd(f"there is no array {name[:40]!r}")
        checked: dict[str, Any] = {**said, **plain}
        return cls(**checked, tables=MappingProxyType(tables))


Shape: TypeAlias = tuple[str, tuple[int | str, ...], float, float]
SHAPES: Final[dict[str, Shape]] = {
    "profile": ("float32", ("p", WEEK), 0.0, MOST_SLOT),
    "prior": ("float32", (WEEK,), 0.0, MOST_SLOT),
    "fast": ("int8", ("n",), 0, 2),
    "season": ("float32", ("n", round(DAY / BUCKET)), 0.0, MOST_RATE),
    "use": ("float32", ("n", round(DAY / USE_BUCKET)), 0.0, math.inf),
    "weights": ("float64", (len(COLUMNS),), 0.0, MOST_RATE),
    "saved": ("float32", ("n",), -1e6, 1.0),
    "skilled": ("bool", ("n",), 0, 1),
    "demoted": ("bool", ("n",), 0, 1),
    "earned": ("bool", ("n",), 0, 1),
    "confidence": ("int8", ("n",), 0, len(WORDS) - 1),
    "absurd": ("bool", ("n",), 0, 1),
}
"""Type, shape, least and greatest value of each array. A word in a shape is a size that all arrays share."""

TABLES: Final[dict[str, Shape]] = {
    "horizons": ("int64", ("h", 2), 0, 100_000),
    "coefficients": ("float64", ("h", 25), -1e3, 1e3),
    "chances": ("float16", ("h", "s", "k", "n"), 0.0, 1.0),
    "reliability": ("float64", ("c", 3), 0.0, 1e12),
    "ahead_rows": ("int64", ("m",), 0, 65_535),
    "ahead": ("float32", ("m", 96), 0.0, MOST_SLOT),
    "mix": ("float32", ("m", "f"), 0.0, 1.0),
}
"""As `SHAPES`, for arrays that a round may lack."""


def _said(text: NDArray[Any] | None) -> dict[str, Any]:
    """The words and single numbers, checked."""
    if text is None or text.dtype != np.uint8 or text.ndim != 1:
        raise Absurd("the words are missing")
    try:
        said: Any = json.loads(text.tobytes())
    except (ValueError, RecursionError):
        raise Absurd("the words are no JSON") from None
    if not isinstance(said, dict) or {str(name) for name in cast("dict[object, object]", said)} != WORDING.keys():
        raise Absurd(f"the words must be a mapping of {', '.join(sorted(WORDING))}")
    found = cast("dict[str, Any]", said)
    for name, (fine, wanted) in WORDING.items():
        if not fine(found[name]):
            raise Absurd(f"{name} must be {wanted}")
    return {**found, "keys": tuple(found["keys"]), "numbers": MappingProxyType(found["numbers"])}


def _names(value: object) -> bool:
    if not isinstance(value, list):
        return False
    names = cast("list[object]", value)
    return all(isinstance(name, str) for name in names) and len(set(names)) == len(names)


def _flag(value: object) -> bool:
    return isinstance(value, bool)


def _instant(value: object) -> bool:
    return _number(value) and 0 <= cast("float", value) < _LAST


def _slot(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < WEEK


def _numbers(value: object) -> bool:
    return isinstance(value, dict) and all(_number(each) for each in cast("dict[str, object]", value).values())


_LAST: Final = 7_258_118_400.0  # the year 2200
WORDING: Final[dict[str, tuple[Callable[[object], bool], str]]] = {
    "keys": (_names, "different texts"),
    "at": (_instant, "a UTC instant in seconds"),
    "origin": (_instant, "a UTC instant in seconds"),
    "slot": (_slot, f"a whole number in 0..{WEEK - 1}"),
    "complete": (_flag, "true or false"),
    "skill": (_flag, "true or false"),
    "schedule": (_flag, "true or false"),
    "source": (lambda value: value in SOURCES, f"one of {', '.join(SOURCES)}"),
    "numbers": (_numbers, "finite numbers by name"),
}


def _number(value: object) -> bool:
    return isinstance(value, float | int) and not isinstance(value, bool) and math.isfinite(value)


def _array(name: str, array: NDArray[Any] | None, wanted: Shape, sizes: dict[str, int]) -> NDArray[Any]:
    kind, shape, least, most = wanted
    if array is None:
        raise Absurd(f"{name} is missing")
    if array.dtype != np.dtype(kind) or array.ndim != len(shape):
        raise Absurd(f"{name} must be {len(shape)}-dimensional {kind}, not {array.ndim}-dimensional {array.dtype}")
    for size, word in zip(array.shape, shape, strict=True):
        expected = word if isinstance(word, int) else sizes.setdefault(word, size)
        if size != expected:
            raise Absurd(f"{name} must have shape {shape}, not {array.shape}")
    # A NaN fails both comparisons, so one pass over each end finds it.
    if array.size and not (array.min() >= least and array.max() <= most):
        raise Absurd(f"{name} must lie in {least:g}..{most:g}")
    return array


def sound(array: NDArray[Any], most: float) -> tuple[Floats, Bools]:
    """The same in 0..`most`, NaN as 0, and which rows (first axis) had to be changed."""
    values = np.asarray(array, np.float64)
    fine = (values >= 0) & (values <= most)
    if fine.all():
        return values, np.zeros(len(values), np.bool_)
    changed: Bools = np.asarray(~fine.reshape(len(values), -1).all(axis=1), np.bool_)
    return np.clip(np.nan_to_num(values, nan=0.0, posinf=most, neginf=0.0), 0.0, most), changed
