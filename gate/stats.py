"""Statistics over sessions: differences of mean logarithms, their intervals, Holm's adjustment, what more sessions would give.

All values are logarithms of ratios; `percent` turns one into the printed change. The session is the sample. A plain t
interval is used: no store of base-versus-base sessions lends its spread, so everything is learnt from this run alone.

Neighbouring slots hold one session of each arm, so the k-th sessions of the arms are a block. From BLOCKS_FROM complete blocks
on, the spread is that of the differences within blocks: a machine that gets slower over the run then counts for
nothing. With fewer, that would leave too few degrees of freedom, and the spread within arms is pooled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec
from scipy import stats as scipy_stats

BLOCKS_FROM = 4
LEAST_DF = 2  # with one degree of freedom the t interval says nothing (−99.8 … +40,000 %)
MOST_SESSIONS = 100  # more per arm is no plan, and the search for a number ends there


class Contrast(msgspec.Struct, frozen=True):
    """head against base on the log scale: estimate, 95 % and 90 % intervals, spread of a session, degrees of freedom, p.

    Intervals and p are None below LEAST_DF degrees of freedom: fewer than two sessions an arm.
    """

    estimate: float
    low: float | None
    high: float | None
    low90: float | None
    high90: float | None
    s: float
    df: int
    p: float | None
    n_base: int
    n_head: int
    blocked: bool = False


def percent(log_ratio: float) -> float:
    """A log ratio as a change in percent."""
    return 100.0 * math.expm1(log_ratio)


def pooled_spread(base: Sequence[float], head: Sequence[float]) -> float:
    """Standard deviation of log values within arms, pooled; 0.0 with one value an arm."""
    df = len(base) + len(head) - 2
    return math.sqrt((_squares(base) + _squares(head)) / df) if df > 0 else 0.0


def block_spread(base: Sequence[float], head: Sequence[float]) -> float:
    """Standard deviation of one session's log value, drift between blocks taken out; two blocks at least."""
    differences = [math.log(there / here) for here, there in zip(base, head, strict=True)]
    mean = sum(differences) / len(differences)
    # A difference of two sessions has twice the variance of one.
    return math.sqrt(sum((one - mean) ** 2 for one in differences) / (len(differences) - 1) / 2)


def _squares(values: Sequence[float]) -> float:
    logs = [math.log(value) for value in values]
    mean = sum(logs) / len(logs)
    return sum((log - mean) ** 2 for log in logs)


def contrast(base: Sequence[float], head: Sequence[float], s_min: float, alpha: float = 0.05) -> Contrast | None:
    """Compare session values of two arms, by slot; None where an arm has none or a value has no logarithm."""
    if not base or not head or min(*base, *head) <= 0:
        return None
    estimate = _mean_log(head) - _mean_log(base)
    blocked = len(base) == len(head) >= BLOCKS_FROM
    df = len(base) - 1 if blocked else len(base) + len(head) - 2
    s = max(block_spread(base, head) if blocked else pooled_spread(base, head), s_min)
    if df < LEAST_DF:
        return Contrast(estimate, None, None, None, None, s, df, None, len(base), len(head))
    error = s * math.sqrt(1 / len(base) + 1 / len(head))
    wide, narrow = _t(1 - alpha / 2, df) * error, _t(0.95, df) * error
    p = float(2 * scipy_stats.t.sf(abs(estimate) / error, df))
    bounds = (estimate - wide, estimate + wide, estimate - narrow, estimate + narrow)
    return Contrast(estimate, *bounds, s, df, p, len(base), len(head), blocked)


def _mean_log(values: Sequence[float]) -> float:
    return sum(math.log(value) for value in values) / len(values)


def _t(quantile: float, df: int) -> float:
    return float(scipy_stats.t.ppf(quantile, df))


def holm(p_values: Mapping[str, float], planned: int) -> dict[str, float]:
    """Holm-adjusted p values by the same keys, of `planned` tests: one without a p value counts as the least sure of them."""
    adjusted: dict[str, float] = {}
    running = 0.0
    for rank, (name, p) in enumerate(sorted(p_values.items(), key=lambda pair: (pair[1], pair[0]))):
        running = max(running, min(1.0, p * (planned - rank)))
        adjusted[name] = running
    return adjusted


def is_equivalent(found: Contrast, floor: float) -> bool:
    """Whether the 90 % interval lies inside ±floor (two one-sided tests at 5 %)."""
    if found.low90 is None or found.high90 is None:
        return False
    return math.expm1(found.low90) > -floor and math.expm1(found.high90) < floor


def sessions_to_settle(found: Contrast, floor: float, alpha: float = 0.05) -> int | None:
    """Sessions per arm that would give a verdict if change and spread stayed as seen; None beyond MOST_SESSIONS.

    Approximate: both are estimates from few sessions. `alpha` may carry the correction for several cells.
    """
    change = abs(math.expm1(found.estimate))
    for n in range(max(2, min(found.n_base, found.n_head)), MOST_SESSIONS + 1):
        error, df = found.s * math.sqrt(2 / n), n - 1 if n >= BLOCKS_FROM else 2 * n - 2
        apart = change >= floor and abs(found.estimate) > _t(1 - alpha / 2, df) * error
        alike = math.expm1(abs(found.estimate) + _t(0.95, df) * error) < floor
        if apart or alike:
            return n
    return None


def smallest_detectable(found: Contrast, floor: float, alpha: float = 0.05, power: float = 0.8) -> float | None:
    """The smallest true change (a ratio) that this many sessions with this spread would find with `power`."""
    if found.df < LEAST_DF:
        return None
    error = found.s * math.sqrt(1 / found.n_base + 1 / found.n_head)
    return max(floor, math.expm1((_t(1 - alpha / 2, found.df) + _t(power, found.df)) * error))
