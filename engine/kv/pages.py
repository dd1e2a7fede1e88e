"""Reference-counted pages of KV memory, and the tensors behind them. The pool is bookkeeping only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


class PagePool:
    """Hands out page numbers and takes them back; a page is free again when its last holder lets go."""

    def __init__(self, pages: int) -> None:
        self.total = pages
        self._free = list(range(pages - 1, -1, -1))
        self._holders = [0] * pages

    @property
    def free(self) -> int:
        """How many pages nobody holds."""
        return len(self._free)

    def take(self, count: int) -> tuple[int, ...]:
        """Hand out `count` free pages, each with one holder. The caller has checked `free`."""
        assert count <= len(self._free), f"{count} pages asked for, {len(self._free)} free"
        pages = tuple(self._free.pop() for _ in range(count))
        for page in pages:
            self._holders[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add a holder to each of `pages`, which must be held already."""
        for page in pages:
            assert self._holders[page] > 0, f"page {page} is free and can't be shared"
            self._holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Take one holder off each of `pages`; those without any are free again."""
        for page in pages:
            assert self._holders[page] > 0, f"page {page} was released too often"
            self._holders[page] -= 1
            if self._holders[page] == 0:
                self._free.append(page)


def pages_for(positions: int, page_size: int) -> int:
    """Return the pages that `positions` positions take."""
    return -(-positions // page_size)


@dataclass(frozen=True, slots=True)
class KVCache:
    """Keys and values of every layer, each [layers, pages, page_size, kv_heads, head_dim]."""

    keys: Tensor
    values: Tensor

    @staticmethod
    def allocate(
        layers: int,
        pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> KVCache:
        """Make a cache of zeros, [layers, pages, page_size, kv_heads, head_dim] twice; zeros keep unwritten places finite."""
        shape = (layers, pages, page_size, kv_heads, head_dim)
        return KVCache(torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))
