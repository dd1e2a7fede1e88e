"""Scratch: the device memory that kernels work in between their own programs. No results live here."""

from __future__ import annotations

import torch
from torch import Tensor

SMALLEST = 1 << 16


class Scratch:
    """Work space and counters for the kernels of one stream, which run one after another.

    A kernel may leave anything in the work space and must leave every counter at zero. Both grow on demand, but not while a
    CUDA graph is captured: run what is to be captured once before. Outgrown memory is kept, since graphs captured earlier
    go on using it; as sizes double, it never exceeds what is in use.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._floats = torch.empty(0, dtype=torch.float32, device=device)
        self._counters = torch.zeros(0, dtype=torch.int32, device=device)
        self._outgrown: list[Tensor] = []

    def floats(self, count: int) -> Tensor:
        """Work space [count] float32 with arbitrary contents; every call gives the same memory from its start.

        RuntimeError when it would have to grow inside a capture.
        """
        if count > self._floats.numel():
            size = self._grown_size(self._floats, count)
            self._floats = torch.empty(size, dtype=torch.float32, device=self.device)
        return self._floats[:count]

    def counters(self, count: int) -> Tensor:
        """Counters [count] int32, all zero; every call gives the same memory from its start.

        RuntimeError when there would have to be more inside a capture.
        """
        if count > self._counters.numel():
            size = self._grown_size(self._counters, count)
            self._counters = torch.zeros(size, dtype=torch.int32, device=self.device)
        return self._counters[:count]

    def _grown_size(self, held: Tensor, count: int) -> int:
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"scratch holds {held.numel()} {held.dtype} and can't grow to {count} inside a capture: "
                "run the same kernels at the same sizes once before capturing"
            )
        self._outgrown.append(held)
        return max(SMALLEST, 1 << (count - 1).bit_length())
