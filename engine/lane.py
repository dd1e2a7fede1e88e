"""A component's place to run: its runner and the steps in flight. A step that fails is run again row by row, so that only the
request at fault fails.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import msgspec

from engine.runner import Launched, Made, Runner
from engine.step import Component, Row, Step

log = logging.getLogger("walkgate.engine")


class Lane:
    """Launches steps of one component, at most `depth` of them in flight, and finishes them in order.

    With a depth of 2 the next step is launched before the one in flight is read: launch-ahead. Each launch stands in a context
    of `ranges`, which profiling.py sets while a window is open.
    """

    def __init__(self, runner: Runner, depth: int = 1) -> None:
        self.runner = runner
        self.depth = depth
        self._in_flight: deque[tuple[Step, list[Launched], list[Made]]] = deque()
        self.counters = {
            "steps": 0,
            "rows": 0,
            "steps_launched_ahead": 0,
            "steps_mixed": 0,
            "steps_split_after_error": 0,
        }
        self.walk_rows: Counter[str] = Counter()
        self.ranges: Callable[[Step], AbstractContextManager[object]] = nullcontext

    @property
    def component(self) -> Component:
        """The component whose steps run here."""
        return self.runner.component

    @property
    def has_room(self) -> bool:
        """Whether another step may be launched."""
        return len(self._in_flight) < self.depth

    @property
    def busy(self) -> bool:
        """Whether a step is in flight."""
        return bool(self._in_flight)

    def launch(self, step: Step) -> None:
        """Run `step`; a failing one is run again row by row, and a row that fails alone becomes an error."""
        self._count(step)
        with self.ranges(step):
            self._launch(step)

    def _launch(self, step: Step) -> None:
        try:
            self._in_flight.append((step, [self.runner.launch(step)], []))
        except Exception as error:
            self._in_flight.append(self._launch_row_by_row(step, error))

    def _count(self, step: Step) -> None:
        walks = Counter(row.walk for row in step.rows)
        self.counters["steps"] += 1
        self.counters["rows"] += len(step.rows)
        self.counters["steps_launched_ahead"] += self.busy
        self.counters["steps_mixed"] += len(walks) > 1
        self.walk_rows.update(walks)

    def _launch_row_by_row(self, step: Step, error: Exception) -> tuple[Step, list[Launched], list[Made]]:
        if len(step.rows) == 1:
            return step, [], [_failed(step.rows[0], error)]
        self.counters["steps_split_after_error"] += 1
        launched, failed = [], []
        for row in step.rows:
            try:
                launched.append(self.runner.launch(msgspec.structs.replace(step, rows=(row,))))
            except Exception as alone:
                failed.append(_failed(row, alone))
        return step, launched, failed

    def finish(self) -> tuple[Step, list[Made]]:
        """Wait for the oldest step in flight; returns it and what its rows made. What can't be read fails its own rows only."""
        step, launched, made = self._in_flight.popleft()
        for one in launched:
            try:
                made += self.runner.finish(one)
            except Exception as error:
                made += [_failed(row, error) for row in one.step.rows]
        return step, made


def _failed(row: Row, error: Exception) -> Made:
    log.error("request %s failed in %s", row.request_id, row.walk, exc_info=error)
    return Made(row.request_id, row.walk, error=f"{type(error).__name__}: {error}")
