"""The router's choice and its alignment in one kernel: the last row to arrive lays all pairs out."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.align import Alignment, empty_alignment
from engine.kernels.router_topk import WARPS, Picked, empty_picked, route_row, row_constants
from engine.kernels.scratch import Scratch
from engine.routing import Scoring

MAX_PAIRS = 1024


def route_align(
    logits: Tensor,
    top_k: int,
    *,
    renormalise: bool,
    scoring: Scoring = "softmax",
    x: Tensor | None = None,
    eps: float = 0.0,
    live: Tensor | None = None,
    scratch: Scratch,
    pdl: bool,
) -> tuple[Picked, Alignment]:
    """`router_topk` of `logits` [n, E] and `align` of its ids [n, top_k], bit for bit, in one kernel.

    Any `top_k`, either scoring, masked rows (from `live` [1] int32 on) and rows `x` [n, H] as in `router_topk`. Raises
    ValueError as it does, and for more than MAX_PAIRS pairs.
    """
    n, experts = logits.shape
    pairs = n * top_k
    if pairs > MAX_PAIRS:
        raise ValueError(f"route_align takes up to {MAX_PAIRS} pairs, not {pairs}: use router_topk and align")
    constants = row_constants(logits, top_k, renormalise=renormalise, scoring=scoring, x=x)
    picked, alignment = empty_picked(logits, top_k, x), empty_alignment(pairs, experts, logits.device)
    _route_align_kernel[(n,)](
        *(logits, x, live, picked.weights, picked.ids, picked.rstd),
        *(alignment.experts, alignment.offsets, alignment.counts, alignment.pairs, alignment.runs),
        *(scratch.counters(1), eps, pairs),
        **constants,
        BINS=triton.next_power_of_2(experts + 1),
        PP=max(16, triton.next_power_of_2(pairs)),
        PDL=pdl,
        num_warps=WARPS,
        launch_pdl=pdl,
    )
    return picked, alignment


@triton.jit(do_not_specialize=["pairs"])  # type: ignore[untyped-decorator]
def _route_align_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, x_ptr, live_ptr, weights_ptr, ids_ptr, rstd_ptr,
    experts_ptr, offsets_ptr, counts_ptr, pairs_ptr, runs_ptr, arrived_ptr, eps, pairs,
    E: tl.constexpr, EP: tl.constexpr, EBITS: tl.constexpr, TOPK: tl.constexpr, H: tl.constexpr, HP: tl.constexpr,
    SIGMOID: tl.constexpr, SUMMED: tl.constexpr, BINS: tl.constexpr, PP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Route one row; the last one aligns. BINS > E, since masked ids are E; PP is a power of two, at least `pairs`."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    route_row(
        tl.program_id(0), logits_ptr, x_ptr, live_ptr, weights_ptr, ids_ptr, rstd_ptr, eps,
        E, EP, EBITS, TOPK, H, HP, SIGMOID, SUMMED, "",
    )  # fmt: skip
    # The barrier brings the stores of all threads before the one thread's release.
    tl.debug_barrier()
    if tl.atomic_add(arrived_ptr, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        tl.store(arrived_ptr, 0)
        pair = tl.arange(0, PP)
        # Past the first-level cache, which may hold what other programs have overwritten since.
        ids = tl.load(ids_ptr + pair, mask=pair < pairs, other=E, cache_modifier=".cg")
        bins = tl.arange(0, BINS)
        counts = tl.where(bins < E, tl.histogram(ids, BINS, mask=pair < pairs), 0)
        busy = counts > 0
        run = tl.cumsum(busy.to(tl.int32), 0) - 1
        tl.store(experts_ptr + run, bins, mask=busy)
        tl.store(offsets_ptr + run, tl.cumsum(counts, 0) - counts, mask=busy)
        tl.store(counts_ptr + run, counts, mask=busy)
        tl.store(runs_ptr, tl.sum(busy.to(tl.int32), 0))
        # Keys are unique, so pairs of an expert stay in order.
        key = tl.sort(ids * PP + pair)
        tl.store(pairs_ptr + pair, key & (PP - 1), mask=pair < pairs)
