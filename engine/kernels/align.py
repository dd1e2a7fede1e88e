"""Alignment: the pairs of a step in the order of their experts, for the grouped products."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Pairs that a program looks at in one go. Each is a kernel of its own to compile.
BLOCKS = (64, 1024, 4096)


@dataclass(frozen=True, slots=True)
class Alignment:
    """Runs of pairs that share an expert. A pair is row * k + rank, and there are P of them.

    `experts`, `offsets` and `counts` [E] int32 hold a run each, by ascending expert, in their first `runs` [1] int32
    places; an idle expert has none. `pairs[offset : offset + count]` of `pairs` [P] int32 are a run's pairs, ascending.
    Masked pairs (id E) are in no run, and whatever lies beyond the runs has no meaning.
    """

    experts: Tensor
    offsets: Tensor
    counts: Tensor
    pairs: Tensor
    runs: Tensor


def empty_alignment(pairs: int, experts: int, device: torch.device) -> Alignment:
    """Room for the runs of P `pairs` over E `experts` (no tensors in)."""
    room = [torch.empty(size, dtype=torch.int32, device=device) for size in (experts, experts, experts, pairs, 1)]
    return Alignment(*room)


def align(ids: Tensor, experts: int, *, pdl: bool) -> Alignment:
    """Lay the pairs of `ids` [n, k] int32 out by expert, of `experts` in all; pairs with id `experts` are left out."""
    assert ids.dtype == torch.int32 and ids.is_contiguous()
    pairs = ids.numel()
    alignment = empty_alignment(pairs, experts, ids.device)
    block = next((block for block in BLOCKS if pairs <= block), BLOCKS[-1])
    _align_kernel[(experts,)](
        *(ids, alignment.experts, alignment.offsets, alignment.counts, alignment.pairs, alignment.runs, pairs),
        E=experts,
        BINS=triton.next_power_of_2(experts + 1),
        BLOCK=block,
        PDL=pdl,
        num_warps=8 if block > 1024 else 4,
        launch_pdl=pdl,
    )
    return alignment


@triton.jit(do_not_specialize=["pairs"])  # type: ignore[untyped-decorator]
def _align_kernel(  # type: ignore[no-untyped-def]
    ids_ptr, experts_ptr, offsets_ptr, counts_ptr, pairs_ptr, runs_ptr, pairs,
    E: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One expert's run: count all ids to know where it lies, then place its pairs. BINS > E, since masked ids are E."""
    expert = tl.program_id(0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    at = tl.arange(0, BLOCK)
    bins = tl.arange(0, BINS)
    counts = tl.zeros([BINS], tl.int32)
    for low in range(0, pairs, BLOCK):
        inside = low + at < pairs
        counts += tl.histogram(tl.load(ids_ptr + low + at, mask=inside, other=E), BINS, mask=inside)
    counts = tl.where(bins < E, counts, 0)
    before = bins < expert
    count = tl.sum(tl.where(bins == expert, counts, 0), 0)
    offset = tl.sum(tl.where(before, counts, 0), 0)
    run = tl.sum((before & (counts > 0)).to(tl.int32), 0)
    if expert == 0:
        tl.store(runs_ptr, tl.sum((counts > 0).to(tl.int32), 0))
    if count > 0:
        tl.store(experts_ptr + run, expert)
        tl.store(offsets_ptr + run, offset)
        tl.store(counts_ptr + run, count)
        place = offset
        for low in range(0, pairs, BLOCK):
            mine = tl.load(ids_ptr + low + at, mask=low + at < pairs, other=E) == expert
            ahead = tl.cumsum(mine.to(tl.int32), 0)
            tl.store(pairs_ptr + place + ahead - 1, low + at, mask=mine)
            place += tl.sum(mine.to(tl.int32), 0)
