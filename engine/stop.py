"""Which rows of a step end their track: TokenStop applied to the step's one host copy. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from engine.step import Component
from engine.walk import TokenStop

STOP, LENGTH = "stop", "length"


@dataclass(frozen=True, slots=True)
class StopRow:
    """What stopping needs to know of a row: its walk, what it had made before, its limit, and its request's wishes."""

    walk: str
    generated: int
    limit: int
    ignore_stop_ids: bool = False
    extra_stop_ids: frozenset[int] = frozenset()


def finish_reasons(
    stop: TokenStop, rows: Sequence[StopRow], tokens: npt.NDArray[np.int64], *, vectorised: bool = True
) -> list[str | None]:
    """Return for each row why it ends with its token in `tokens` [R], or None.

    A stop id wins over the limit. `vectorised` off asks row by row, with the same answer.
    """
    if not vectorised:
        return [_reason(stop, row, int(token)) for row, token in zip(rows, tokens, strict=True)]
    may_stop = np.fromiter((row.walk in stop.walks and not row.ignore_stop_ids for row in rows), bool, len(rows))
    hit = np.zeros(len(rows), dtype=bool)
    for token in stop.stop_ids:  # a handful; np.isin costs more than all of them
        hit |= tokens == token
    hit &= may_stop
    full = np.fromiter((row.generated + 1 >= row.limit for row in rows), bool, len(rows))
    reasons: list[str | None] = [None] * len(rows)
    for place in np.flatnonzero(full).tolist():
        reasons[place] = LENGTH
    for place in np.flatnonzero(hit).tolist():
        reasons[place] = STOP
    for index, row in enumerate(rows):
        if row.extra_stop_ids and int(tokens[index]) in row.extra_stop_ids:
            reasons[index] = STOP
    return reasons


def _reason(stop: TokenStop, row: StopRow, token: int) -> str | None:
    if token in row.extra_stop_ids or (not row.ignore_stop_ids and stop.stops_on(row.walk, token)):
        return STOP
    return LENGTH if row.generated + 1 >= row.limit else None


StopCheck = Callable[[Sequence[StopRow], npt.NDArray[np.int64]], list[str | None]]


class Stops:
    """The stop checks of a table, counted by the way they were made."""

    def __init__(self, stops: Iterable[TokenStop], *, vectorised: bool) -> None:
        self._stops = {stop.component: stop for stop in stops}
        self._vectorised = vectorised
        self.counters = {"vectorised": 0, "by_row": 0}

    def of(self, component: Component) -> StopCheck:
        """Return the check of one component: (rows, tokens [R]) -> why each row ends, or None."""
        return partial(self._check, self._stops[component])

    def _check(self, stop: TokenStop, rows: Sequence[StopRow], tokens: npt.NDArray[np.int64]) -> list[str | None]:
        self.counters["vectorised" if self._vectorised else "by_row"] += 1
        return finish_reasons(stop, rows, tokens, vectorised=self._vectorised)
