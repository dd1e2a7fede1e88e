"""FlashInfer's paged attention for prompts and mixed steps: planned once a step on the host, run in every layer."""

from __future__ import annotations

import functools
import importlib.util

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

WORKSPACE_BYTES = 128 << 20
HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.bfloat16, torch.float16)


@functools.cache
def available(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why FlashInfer can't be used here, or None when it can (no tensors)."""
    if device.type != "cuda":
        return f"FlashInfer runs on a CUDA device, not on {device.type!r}"
    if dtype not in DTYPES:
        return f"FlashInfer attends in bfloat16 or float16, not in {dtype}"
    if head_dim not in HEAD_DIMS:
        return f"FlashInfer takes heads of 64, 128 or 256, not of {head_dim}"
    if importlib.util.find_spec("flashinfer") is None:
        return "flashinfer-python is not installed: pip install 'walkgate[cuda]'"
    return None


def page_lists(
    starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], pages: npt.NDArray[np.int64], page_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A step as FlashInfer wants it, for runs of positions [starts[s], starts[s] + lengths[s]) on `pages` [runs, most].

    Returns, all int32: where each run's token rows begin and the last ends [runs + 1], the same for its pages [runs + 1],
    the pages of all runs one after another [pages in use], and the positions on each run's last page [runs].
    """
    ends = starts + lengths
    counts = -(-ends // page_size)
    used = pages[np.arange(pages.shape[1]) < counts[:, None]]
    return _bounds(lengths), _bounds(counts), _int32(used), _int32(ends - (counts - 1) * page_size)


class FlashPrefill:
    """Causal attention of runs of token rows over paged caches [pages, page_size, Hkv, d], as `paged_attention` does it.

    A plan is copied to the device from pinned memory while the stream may still be a step behind, so two wrappers take
    turns, and one is planned again only when the copy of its last plan is over.
    """

    def __init__(self, device: torch.device) -> None:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrappers = [BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2") for _ in range(2)]
        self._copied = [torch.cuda.Event() for _ in self._wrappers]  # type: ignore[no-untyped-call]
        self._turn = 0
        self._rows = 0

    def plan(
        self,
        starts: npt.NDArray[np.int64],
        lengths: npt.NDArray[np.int64],
        pages: npt.NDArray[np.int64],
        page_size: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
    ) -> None:
        """Plan a step whose run s holds positions [starts[s], starts[s] + lengths[s]) on `pages` [runs, most], in order.

        `starts` and `lengths` [runs]; lengths are at least 1. Its token rows follow those of run s - 1.
        """
        self._turn = 1 - self._turn
        self._copied[self._turn].synchronize()
        self._wrappers[self._turn].plan(
            *page_lists(starts, lengths, pages, page_size),
            heads,
            kv_heads,
            head_dim,
            page_size,
            causal=True,
            q_data_type=dtype,
        )
        self._copied[self._turn].record()
        self._rows = int(lengths.sum())

    def run(self, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """Attend from `q` [n, Hq, d] over one layer's caches as planned; returns [n, Hq * d].

        Rows after those of the plan come out as zeros.
        """
        out = torch.empty_like(q) if q.shape[0] == self._rows else torch.zeros_like(q)
        self._wrappers[self._turn].run(q[: self._rows], (k_cache, v_cache), out=out[: self._rows])
        return out.flatten(1)


def _int32(values: npt.NDArray[np.int64]) -> Tensor:
    return torch.from_numpy(values.astype(np.int32))


def _bounds(counts: npt.NDArray[np.int64]) -> Tensor:
    """Where each of `counts` [runs] begins and ends; returns [runs + 1] int32."""
    return _int32(np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)]))
