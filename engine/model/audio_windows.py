"""How clips are cut into the attention windows of the audio encoder, and windows into batches: arithmetic, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


def rows_of(frames: int) -> int:
    """Rows that a chunk of `frames` mel frames becomes: three convolutions of stride 2 and padding 1."""
    for _ in range(3):
        frames = (frames + 1) // 2
    return frames


@dataclass(frozen=True, slots=True)
class WindowShape:
    """A window holds `chunks` chunks of `width` mel frames each."""

    width: int
    chunks: int

    @property
    def frames(self) -> int:
        """Mel frames of a full window."""
        return self.width * self.chunks

    @property
    def rows(self) -> int:
        """Rows of a full window."""
        return rows_of(self.width) * self.chunks


@dataclass(frozen=True, slots=True)
class Window:
    """Mel frames [start, stop) of a clip, which become the first `rows` rows of a window."""

    start: int
    stop: int
    rows: int


@dataclass(frozen=True, slots=True)
class Batch:
    """Windows [start, stop) of a list, run together in a batch of `bucket` windows."""

    start: int
    stop: int
    bucket: int


def shape_for(frames: Sequence[int], full: WindowShape) -> WindowShape:
    """The windows of a request whose clips have so many `frames`; `full` is the shape of a clip of one chunk or more.

    Chunks are as wide as the longest of the request. When that is less than a full chunk, each clip is one chunk.
    """
    longest = max(frames)
    return full if longest >= full.width else WindowShape(longest, 1)


def cut(frames: int, shape: WindowShape) -> list[Window]:
    """Cut a clip of `frames` mel frames into windows; only the last can be less than full."""
    windows = []
    for start in range(0, frames, shape.frames):
        stop = min(start + shape.frames, frames)
        whole, tail = divmod(stop - start, shape.width)
        windows.append(Window(start, stop, rows_of(shape.width) * whole + rows_of(tail)))
    return windows


def batches(windows: int, buckets: Sequence[int]) -> list[Batch]:
    """Split a number of windows into batches of the largest of `buckets` (ascending), the rest in the smallest that fits."""
    found = []
    for start in range(0, windows, buckets[-1]):
        stop = min(start + buckets[-1], windows)
        found.append(Batch(start, stop, next(bucket for bucket in buckets if bucket >= stop - start)))
    return found
