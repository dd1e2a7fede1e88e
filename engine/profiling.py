"""Windows of Thinker steps under a profiler: torch's, which leaves a trace, or one outside that waits for cudaProfilerStart.

Every step of a window stands in a range that names it. Without a window nothing is done. Not here: HTTP (server/profile.py).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import msgspec

from engine.errors import RequestError
from engine.step import Component, Step

# The front knows windows and has no torch: only the tools below import it.
if TYPE_CHECKING:
    from engine.lane import Lane

TORCH, CUDA = "torch", "cuda"
# A profiler is armed so many steps before its first one, so that what its own start costs is not in the window.
_ARMED_STEPS = 5


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """`steps` Thinker steps after `skip` others, for which it waits `seconds` in all. `path` is the trace's, for kind TORCH."""

    kind: str
    steps: int
    skip: int
    seconds: float
    path: str | None = None


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a window ended: how many of its steps ran, in how many seconds, and where their trace lies, if there is one."""

    steps: int
    seconds: float
    path: str | None = None


class _Tool(Protocol):
    """A profiler, armed when it is made."""

    def start(self) -> None:
        """See everything from here on."""

    def range(self, name: str) -> AbstractContextManager[object]:
        """A context that shows under this name."""

    def stop(self, path: str | None) -> None:
        """Wait for the device, see nothing more, and write what was seen to `path`, if there is one."""


class _TorchTool:
    """torch.profiler: operators, and on a GPU its kernels; written as a Chrome trace, without stacks or shapes."""

    def __init__(self, *, cuda: bool) -> None:
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if cuda else [ProfilerActivity.CPU]
        self._profile = profile(activities=activities)
        self._profile.prepare_trace()

    def start(self) -> None:
        self._profile.start_trace()

    def range(self, name: str) -> AbstractContextManager[object]:
        from torch.profiler import record_function

        return record_function(name)

    def stop(self, path: str | None) -> None:
        self._profile.stop_trace()
        if path is not None:
            self._profile.export_chrome_trace(path)


class _CudaTool:
    """cudaProfilerStart and cudaProfilerStop around NVTX ranges. Who looks at them, and keeps what it saw, is outside."""

    def start(self) -> None:
        import torch

        torch.cuda.profiler.start()  # type: ignore[no-untyped-call]

    def range(self, name: str) -> AbstractContextManager[object]:
        import torch

        return torch.cuda.nvtx.range(name)

    def stop(self, path: str | None) -> None:
        import torch

        torch.cuda.synchronize()
        torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]


@dataclass(slots=True)
class _Open:
    """The window that is open. `launched` counts Thinker steps since it was opened, `began` is when its first one was."""

    window: Window
    opened: float
    tool: _Tool | None = None
    launched: int = 0
    began: float | None = None
    error: Exception | None = None

    @property
    def steps(self) -> int:
        """How many of its steps were launched."""
        return min(max(self.launched - self.window.skip, 0), self.window.steps)

    @property
    def recording(self) -> bool:
        """Whether the step that is launched now belongs to the window."""
        begun = self.began is not None and self.error is None
        return begun and self.launched <= self.window.skip + self.window.steps


@dataclass(slots=True)
class Profiler:
    """Opens one window at a time over the steps of `lanes`, and closes it between steps. For the engine's thread.

    `buckets` are the row counts at which steps of `decode_walks` are captured; `on_gpu` says whether the lanes run on a GPU.
    """

    lanes: Sequence[Lane]
    buckets: Sequence[int]
    decode_walks: frozenset[str]
    on_gpu: bool
    _open: _Open | None = field(default=None, init=False)

    def open(self, window: Window) -> None:
        """Begin to wait for the window's steps. RequestError if one is open, or there is nothing to profile in that way."""
        if window.kind == CUDA and not self.on_gpu:
            message = f"kind: {CUDA} needs a GPU and this engine runs on a CPU; ask for {TORCH}"
            raise RequestError(message, field="kind", code="invalid_value")
        if self._open is not None:
            message = "another window is open; ask again when it has ended"
            raise RequestError(message, code="profile_open", status=409)
        self._open = _Open(window, time.perf_counter())
        for lane in self.lanes:
            lane.ranges = self._range

    def close_if_over(self) -> Outcome | None:
        """Close the window if its steps or its seconds are over, and say how it went; None while it stays open.

        RequestError (500) if the profiler failed or its trace can't be written.
        """
        one = self._open
        assert one is not None, "no window is open"
        now = time.perf_counter()
        late = now - one.opened > one.window.seconds
        if not (late or one.error is not None or one.steps == one.window.steps):
            return None
        self._open = None
        for lane in self.lanes:
            lane.ranges = nullcontext
        try:
            path = self._stop(one)
        except Exception as error:
            message = f"profiling failed: {type(error).__name__}: {error}"
            raise RequestError(message, code="engine", status=500) from error
        return Outcome(steps=one.steps, seconds=now - one.began if one.began is not None else 0.0, path=path)

    @staticmethod
    def _stop(one: _Open) -> str | None:
        """Stop the profiler of a window; returns where its trace was written, if it has one."""
        if one.error is not None:
            if one.tool is not None:
                with suppress(Exception):  # the first fault is the one to tell
                    one.tool.stop(None)
            raise one.error
        if one.tool is None:
            return None
        path = one.window.path
        if one.began is None:
            one.tool.start()  # an armed profiler is disarmed in no other way
            path = None
        one.tool.stop(path)
        return path

    def _range(self, step: Step) -> AbstractContextManager[object]:
        """The range of a step that is about to be launched. A profiler's fault ends its window, never the step."""
        one = self._open
        assert one is not None
        try:
            if step.component == Component.THINKER:
                self._advance(one)
            if one.recording and one.tool is not None:
                return one.tool.range(range_name(step, self._bucket(step)))
        except Exception as error:
            one.error = error
        return nullcontext()

    def _bucket(self, step: Step) -> int:
        """In how many padded rows a step runs: the smallest captured size that holds it if it only decodes, else its own."""
        rows = len(step.rows)
        if not {row.walk for row in step.rows} <= self.decode_walks:
            return rows
        return min((size for size in self.buckets if size >= rows), default=rows)

    def _advance(self, one: _Open) -> None:
        """Count a Thinker step: arm the profiler some steps ahead of the window, and start it at its first one."""
        if one.error is not None:
            return
        if one.tool is None and one.launched >= one.window.skip - _ARMED_STEPS:
            one.tool = _TorchTool(cuda=self.on_gpu) if one.window.kind == TORCH else _CudaTool()
        one.launched += 1
        if one.tool is not None and one.launched == one.window.skip + 1:
            one.tool.start()
            one.began = time.perf_counter()


def range_name(step: Step, bucket: int) -> str:
    """How a step is called in a trace: its number among its component's steps, its walks, its rows, and padded rows."""
    walks = "+".join(sorted({row.walk for row in step.rows}))
    return f"walkgate.step {step.number} {walks} rows={len(step.rows)} bucket={bucket}"
