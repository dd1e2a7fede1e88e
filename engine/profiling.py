"""Windows of Thinker steps under a profiler: torch's, which leaves a trace, or one outside that waits for cudaProfilerStart.

Every step of a window stands in a range that names it. Without a window nothing is done. Not here: HTTP (server/profile.py).
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, BinaryIO, Protocol

import msgspec

from engine.errors import RequestError
from engine.step import Component, Step

# The front knows windows and has no torch: only the tools below import it.
if TYPE_CHECKING:
    from engine.lane import Lane

TORCH, CUDA = "torch", "cuda"
# A profiler is armed so many steps before its first one, so that what its own start costs is not in the window.
_ARMED_STEPS = 5
# Stopping and saving hold the interpreter for about twice as long as was recorded, where small operators run on a CPU.
MOST_RECORDED_S = 3.0
# Level 9 takes eight times as long for a file that is a fifth smaller (a trace of 35 MB on a CPU).
_GZIP_LEVEL = 1
_BLOCK = 1 << 20
_TAIL = 16384  # bytes at the end of a trace in which its name stands: twice the longest path, and more


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

    def stop(self) -> None:
        """Wait for the device and see nothing more."""


class _TorchTool:
    """torch.profiler: operators, and on a GPU its kernels; saved as a Chrome trace, without stacks or shapes."""

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

    def stop(self) -> None:
        self._profile.stop_trace()

    def save(self, path: str) -> None:
        """Write what was seen to `path`, not compressed: torch would do that slowly, and on this thread."""
        self._profile.export_chrome_trace(path)


class _CudaTool:
    """cudaProfilerStart and cudaProfilerStop around NVTX ranges. Who looks at them, and keeps what it saw, is outside."""

    def start(self) -> None:
        import torch

        torch.cuda.profiler.start()  # type: ignore[no-untyped-call]

    def range(self, name: str) -> AbstractContextManager[object]:
        import torch

        return torch.cuda.nvtx.range(name)

    def stop(self) -> None:
        import torch

        torch.cuda.synchronize()
        torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]


@dataclass(slots=True)
class _Open:
    """The window that is open. `launched` counts Thinker steps since it was opened, `began` is when its first one was.

    Once it is over, `outcome` says how it went; while its trace is compressed, on a thread of its own, `writing` is that work.
    """

    window: Window
    opened: float
    tool: _Tool | None = None
    launched: int = 0
    began: float | None = None
    error: Exception | None = None
    ended: bool = False
    outcome: Outcome | None = None
    writing: Future[None] | None = None

    @property
    def steps(self) -> int:
        """How many of its steps were launched."""
        return min(max(self.launched - self.window.skip, 0), self.window.steps)

    @property
    def recording(self) -> bool:
        """Whether the step that is launched now belongs to the window."""
        begun = self.began is not None and self.error is None
        return begun and self.launched <= self.window.skip + self.window.steps

    def over(self, now: float) -> bool:
        """Whether the window is to be closed, after its last step, its time, a fault or when it was told to."""
        if self.ended or self.error is not None or self.steps == self.window.steps:
            return True
        longest = self.window.kind == TORCH and self.began is not None and now - self.began > MOST_RECORDED_S
        return longest or now - self.opened > self.window.seconds


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

    def end(self) -> None:
        """Let the open window, if there is one, be over with what it has seen."""
        if self._open is not None:
            self._open.ended = True

    def close_if_over(self) -> Outcome | None:
        """Close the window if its steps or its seconds are over, and say how it went; None until then. Call it every turn.

        A trace is saved in parts, so that the engine gets on between them: the profiler stops in one turn, what it saw is
        written in the next one, and compressed on another thread meanwhile. RequestError (500) if the profiler failed or the
        trace can't be written, of which nothing is left then.
        """
        one = self._open
        assert one is not None, "no window is open"
        now = time.perf_counter()
        if one.outcome is None and not one.over(now):
            return None
        try:
            outcome = self._next_part(one, now)
        except Exception as error:
            self._open = None
            raise _failure(one, error) from error
        if outcome is not None:
            self._open = None
        return outcome

    def _next_part(self, one: _Open, now: float) -> Outcome | None:
        """Do the next part of closing a window; returns how it went after the last one."""
        if one.outcome is None:
            for lane in self.lanes:
                lane.ranges = nullcontext
            one.outcome = _stopped(one, now)
            return None if one.outcome.path is not None else one.outcome
        path, tool = one.outcome.path, one.tool
        assert path is not None and isinstance(tool, _TorchTool), "only a trace takes more than one part"
        if one.writing is None:
            tool.save(_raw(path))
            one.writing = _on_a_thread(path)
        if not one.writing.done():
            return None
        one.writing.result()
        return one.outcome

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


def _stopped(one: _Open, now: float) -> Outcome:
    """Stop the profiler of a window; the path of what it returns is that of a trace still to be saved."""
    if one.error is not None:
        if one.tool is not None:
            with suppress(Exception):  # the first fault is the one to tell
                one.tool.stop()
        raise one.error
    if one.began is None:
        if one.tool is not None:
            one.tool.start()  # an armed profiler is disarmed in no other way
            one.tool.stop()
        return Outcome(steps=0, seconds=0.0)
    assert one.tool is not None
    one.tool.stop()
    return Outcome(steps=one.steps, seconds=now - one.began, path=one.window.path)


def _raw(path: str) -> str:
    return f"{path}.raw"


def _part(path: str) -> str:
    return f"{path}.part"


def _on_a_thread(path: str) -> Future[None]:
    """Begin to compress the saved trace of `path`, which lets the engine go on: stopping and saving hold the interpreter."""
    pool = ThreadPoolExecutor(1, "trace")
    try:
        return pool.submit(_compress, path)
    finally:
        pool.shutdown(wait=False)


def _compress(path: str) -> None:
    """Make the trace at `path` of what was saved for it; it is there whole or not at all. OSError if it can't be written."""
    with open(_raw(path), "rb") as saved:
        _check_whole(saved)
        with gzip.open(_part(path), "wb", compresslevel=_GZIP_LEVEL) as packed:
            shutil.copyfileobj(saved, packed, _BLOCK)
    os.replace(_part(path), path)
    os.unlink(_raw(path))


def _check_whole(saved: BinaryIO) -> None:
    """Raise OSError unless `saved` ends as a trace does, with its name: torch says nothing of a disk that is full."""
    saved.seek(max(0, os.fstat(saved.fileno()).st_size - _TAIL))
    _, name, end = saved.read().rpartition(b'"traceName"')
    try:
        json.loads(b"{" + name + end)
    except ValueError:
        raise OSError("its end is missing; is the disk full?") from None
    saved.seek(0)


def _failure(one: _Open, error: Exception) -> RequestError:
    """The answer to a window that failed, once the pieces of its trace are removed."""
    path = one.window.path
    message = f"profiling failed: {type(error).__name__}: {error}"
    if path is not None and one.outcome is not None:
        for left in (_raw(path), f"{_raw(path)}.tmp", _part(path)):  # torch writes the second one and renames it
            with suppress(OSError):
                os.unlink(left)
        if isinstance(error, OSError):
            message = (
                f"{path} could not be written: {error.strerror or error}; make room in the folder of --profile-dir, or ask for "
                "fewer steps"
            )
    return RequestError(message, code="engine", status=500)


def range_name(step: Step, bucket: int) -> str:
    """How a step is called in a trace: its number among its component's steps, its walks, its rows, and padded rows."""
    walks = "+".join(sorted({row.walk for row in step.rows}))
    return f"walkgate.step {step.number} {walks} rows={len(step.rows)} bucket={bucket}"
