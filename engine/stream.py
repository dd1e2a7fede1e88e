"""Device queues between components, and the rule that cuts frames into chunks."""

from __future__ import annotations

import torch
from torch import Tensor


class DeviceQueue:
    """Values streamed from one component to the next, [slots, capacity, width] int64, in order of their index."""

    def __init__(self, slots: int, capacity: int, width: int, device: torch.device) -> None:
        self._values = torch.zeros((slots, capacity, width), dtype=torch.int64, device=device)

    def push(self, slots: Tensor, index: Tensor, values: Tensor) -> None:
        """Store `values` [R, width] as number `index` [R] of `slots` [R]."""
        self._values[slots, index] = values

    def at(self, slots: Tensor, index: Tensor) -> Tensor:
        """Return value number `index` [R] of each of `slots` [R], as [R, width]."""
        return self._values[slots, index]

    def span(self, slot: int, start: int, count: int) -> Tensor:
        """Return values start … start+count-1 of one slot, as [count, width]."""
        return self._values[slot, start : start + count]


def chunk_length(done: int, arrived: int, ended: bool, chunk_frames: int) -> int:
    """Return how many frames to turn into sound next, 0 for none yet.

    Chunks end at multiples of `chunk_frames` and at the last frame: a function of the frame's index, never of time, so that
    the same frames give the same bytes however they trickle in.
    """
    waiting = arrived - done
    if waiting >= chunk_frames:
        return chunk_frames
    return waiting if ended else 0
