"""Notices an engine that holds requests but finishes no step, and when it goes on. Not here: what /health says (front.py)."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass

from engine.client import EngineClient

_LOOK_S = 0.25
_ANSWER_S = 1.0


@dataclass(slots=True)
class WedgeWatch:
    """Watches the engine process `pid` through its client; `wedged` once it was silent for more than `limit_s` seconds."""

    client: EngineClient
    pid: int
    limit_s: float
    wedged: bool = False

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_S)
            if self.client.silent_seconds > self.limit_s:
                await self._wedge()

    async def _wedge(self) -> None:
        silent, held, progress_at = self.client.silent_seconds, self.client.open_requests, self.client.progress_at
        self.wedged = True
        _say(f"the engine has finished no step for {silent:.1f} s and holds {held} requests; its stacks:")
        # The engine process writes the stacks of its threads at this signal, stuck or not.
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)
        while not await self._goes_on(progress_at):
            await asyncio.sleep(_LOOK_S)
        self.wedged = False
        _say("the engine goes on")

    async def _goes_on(self, progress_at: float) -> bool:
        """Whether a step was finished after `progress_at`, or the engine answers that it has nothing left to do."""
        if self.client.progress_at > progress_at:
            return True
        if self.client.open_requests:
            return False
        found = await self.client.counters(_ANSWER_S)
        return found is not None and found["requests_waiting"] == found["requests_running"] == 0


def _say(message: str) -> None:
    print(f"omni: {message}", file=sys.stderr, flush=True)
