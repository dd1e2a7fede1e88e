"""Slots on the device: what one pass of a track leaves for its next one (a token id, a codec row)."""

from __future__ import annotations

import torch
from torch import Tensor


class Slots:
    """One value per slot, `values` [slots, *shape]. The sampler writes it, the next step of the same track reads it."""

    def __init__(self, slots: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.values = torch.zeros((slots, *shape), dtype=dtype, device=device)

    def write(self, slots: Tensor, values: Tensor) -> None:
        """Leave `values` [R, *shape] in `slots` [R] int64."""
        self.values.index_copy_(0, slots, values)

    def read(self, slots: Tensor) -> Tensor:
        """Return what lies in `slots` [R] int64, as [R, *shape]."""
        return self.values.index_select(0, slots)


class SlotPool:
    """Which slots are taken. A slot is one request's place in every component."""

    def __init__(self, slots: int) -> None:
        self.total = slots
        self._free = list(range(slots - 1, -1, -1))

    @property
    def free(self) -> int:
        """How many slots nobody holds."""
        return len(self._free)

    def take(self) -> int:
        """Hand out a free slot. The caller has checked `free`."""
        return self._free.pop()

    def release(self, slot: int) -> None:
        """Take `slot` back."""
        assert slot not in self._free, f"slot {slot} was released twice"
        self._free.append(slot)
