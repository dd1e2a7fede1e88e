"""Where the engine thread's time goes: wall and CPU seconds by phase of a step. Off, it costs nothing. No torch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

# In the order of a step. `wait` is the device's: until it has made what `read` then looks at.
PHASES = ("schedule", "plan", "launch", "wait", "read", "emit")


class Phases:
    """Adds up seconds by phase. A phase inside another interrupts it, so the phases of a step never overlap.

    For one thread: `clocks` are its wall and CPU time, both in seconds.
    """

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self.wall = dict.fromkeys(PHASES, 0.0)
        self.cpu = dict.fromkeys(PHASES, 0.0)
        self._open: list[str] = []
        self._since = (0.0, 0.0)

    def __call__(self, phase: str) -> AbstractContextManager[None]:
        """Return a context whose time counts for `phase`."""
        return self._timed(phase) if self.enabled else nullcontext()

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        self._charge()
        self._open.append(phase)
        try:
            yield
        finally:
            self._charge()
            self._open.pop()

    def _charge(self) -> None:
        """Give the time since the last change to the phase that is innermost now."""
        now = (time.perf_counter(), time.thread_time())
        if self._open:
            self.wall[self._open[-1]] += now[0] - self._since[0]
            self.cpu[self._open[-1]] += now[1] - self._since[1]
        self._since = now

    def counters(self, steps: int) -> dict[str, float]:
        """Return seconds by phase, and milliseconds a step over `steps` steps; nothing when disabled."""
        if not self.enabled:
            return {}
        found: dict[str, float] = {}
        for kind, seconds in (("wall", self.wall), ("cpu", self.cpu)):
            found |= {f"phase_{phase}_{kind}_seconds_total": value for phase, value in seconds.items()}
            found |= {
                f"phase_{phase}_{kind}_ms_per_step": 1e3 * value / max(steps, 1) for phase, value in seconds.items()
            }
        return found
