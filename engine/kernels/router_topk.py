"""The router's choice: the top-k experts of each row and their weights, one program a row; for a single row with the router."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.scratch import Scratch
from engine.kernels.tiles import Tile
from engine.routing import Scoring

# Reductions add in an order that follows the number of warps: router_topk and route_align must agree to the bit.
WARPS = 4


@dataclass(frozen=True, slots=True)
class Picked:
    """The experts of n rows by rank: `weights` [n, k] float32, `ids` [n, k] int32, and `rstd` [n] float32 or None.

    `rstd` is 1 / RMS of the rows that the experts read, for a norm that is folded into them. A masked row has ids E
    (the number of experts) and weights 0.
    """

    weights: Tensor
    ids: Tensor
    rstd: Tensor | None


def empty_picked(logits: Tensor, top_k: int, x: Tensor | None) -> Picked:
    """Room for the choice of the rows of `logits` [n, E], with rstd [n] where the rows `x` [n, H] are given."""
    n = logits.shape[0]
    return Picked(
        weights=torch.empty(n, top_k, dtype=torch.float32, device=logits.device),
        ids=torch.empty(n, top_k, dtype=torch.int32, device=logits.device),
        rstd=None if x is None else torch.empty(n, dtype=torch.float32, device=logits.device),
    )


def row_constants(
    logits: Tensor, top_k: int, *, renormalise: bool, scoring: Scoring, x: Tensor | None
) -> dict[str, int | bool]:
    """The constants of `route_row` for `logits` [n, E] float32 and `x` [n, H].

    Raises ValueError for an unknown scoring and for more ranks than experts.
    """
    experts = logits.shape[1]
    if scoring not in ("softmax", "sigmoid"):
        raise ValueError(f"scoring must be softmax or sigmoid, is {scoring!r}")
    if not 0 < top_k <= experts:
        raise ValueError(f"top_k must be 1 to {experts}, is {top_k}")
    assert logits.dtype == torch.float32 and logits.is_contiguous()
    assert x is None or (x.is_contiguous() and x.shape[0] == logits.shape[0])
    padded, width = triton.next_power_of_2(experts), 1 if x is None else x.shape[1]
    all_scores = experts if scoring == "softmax" else 0
    return {
        "E": experts,
        "EP": padded,
        "EBITS": padded.bit_length() - 1,
        "TOPK": top_k,
        "H": width,
        "HP": triton.next_power_of_2(width),
        "SIGMOID": scoring == "sigmoid",
        "SUMMED": top_k if renormalise else all_scores,
    }


def router_topk(
    logits: Tensor,
    top_k: int,
    *,
    renormalise: bool,
    scoring: Scoring = "softmax",
    x: Tensor | None = None,
    eps: float = 0.0,
    live: Tensor | None = None,
    pdl: bool,
) -> Picked:
    """The `top_k` largest of `logits` [n, E] float32 by row, ties to the lowest expert, and their weights.

    Softmax weights sum to 1 over all experts, or over the picked ones when `renormalise`; sigmoid weights are the
    logistic function of each logit, divided by their sum when `renormalise`. With `x` [n, H] the result has the rstd of
    its rows (`eps`). Rows from `live` [1] int32 on are masked. ValueError for an unknown scoring or a top_k above E.
    """
    constants = row_constants(logits, top_k, renormalise=renormalise, scoring=scoring, x=x)
    picked = empty_picked(logits, top_k, x)
    _router_topk_kernel[(logits.shape[0],)](
        *(logits, x, live, picked.weights, picked.ids, picked.rstd, eps),
        **constants,
        PDL=pdl,
        num_warps=WARPS,
        launch_pdl=pdl,
    )
    return picked


def route_one(
    x: Tensor,
    norm: Tensor,
    eps: float,
    router: Tensor,
    top_k: int,
    *,
    renormalise: bool,
    scoring: Scoring = "softmax",
    live: Tensor | None = None,
    scratch: Scratch,
    tile: Tile,
    pdl: bool,
) -> Picked:
    """What `router_topk` gives for the logits of a single row `x` [1, H], normed by `norm` [H], over `router` [E, H].

    One kernel: a GEMV, as `gemv` with the same tile, whose last program to arrive chooses. `live` [1] int32 is 0 for padding.
    """
    experts, width = router.shape
    assert x.shape == (1, width) and x.is_contiguous() and router.is_contiguous() and router.dtype == x.dtype
    logits = scratch.floats(experts)[None]
    constants = row_constants(logits, top_k, renormalise=renormalise, scoring=scoring, x=x)
    picked = empty_picked(logits, top_k, x)
    block = tile["BN"]
    _route_one_kernel[(triton.cdiv(experts, block),)](
        *(x, norm, router, logits, live, picked.weights, picked.ids, picked.rstd, scratch.counters(1), eps),
        **constants,
        BN=block,
        MASKED=experts % block != 0 or triton.next_power_of_2(width) != width,
        PDL=pdl,
        num_warps=tile["warps"],
        launch_pdl=pdl,
    )
    return picked


@triton.jit  # type: ignore[untyped-decorator]
def route_row(  # type: ignore[no-untyped-def]
    row, logits_ptr, x_ptr, live_ptr, weights_ptr, ids_ptr, rstd_ptr, eps,
    E: tl.constexpr, EP: tl.constexpr, EBITS: tl.constexpr, TOPK: tl.constexpr, H: tl.constexpr, HP: tl.constexpr,
    SIGMOID: tl.constexpr, SUMMED: tl.constexpr, CACHE: tl.constexpr,
):  # fmt: skip
    """Store one row's ids, weights and rstd. EP = 2**EBITS >= E; weights sum to 1 over the SUMMED best, 0 is no sum.

    CACHE is how logits are read: ".cg" where other programs of the same kernel have written them.
    """
    e = tl.arange(0, EP)
    logits = tl.load(logits_ptr + row * E + e, mask=e < E, other=-float("inf"), cache_modifier=CACHE)
    if x_ptr is not None:
        h = tl.arange(0, HP)
        x = tl.load(x_ptr + row * H + h, mask=h < H if HP != H else None, other=0.0 if HP != H else None)
        x = x.to(tl.float32)
        tl.store(rstd_ptr + row, tl.rsqrt(tl.sum(x * x, 0) / H + eps))
    # An integer key that orders as (logit, lowest expert) does, and from which both can be read. -0.0 is a tie with 0.0.
    bits = tl.where(logits == 0.0, 0.0, logits).to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    key = tl.sort(bits.to(tl.int64) * EP + (EP - 1 - e), descending=True)
    ids = EP - 1 - (key & (EP - 1)).to(tl.int32)
    bits = (key >> EBITS).to(tl.int32)
    ranked = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)
    if SIGMOID:
        weights = 1.0 / (1.0 + tl.exp(-ranked))
    else:
        weights = tl.exp(ranked - tl.max(tl.where(e == 0, ranked, -float("inf")), 0))
    if SUMMED > 0:
        weights = weights / tl.sum(tl.where(e < SUMMED, weights, 0.0), 0)
    if live_ptr is not None:
        alive = row < tl.load(live_ptr)
        ids = tl.where(alive, ids, E)
        weights = tl.where(alive, weights, 0.0)
    tl.store(ids_ptr + row * TOPK + e, ids, mask=e < TOPK)
    tl.store(weights_ptr + row * TOPK + e, weights, mask=e < TOPK)


@triton.jit  # type: ignore[untyped-decorator]
def _route_one_kernel(  # type: ignore[no-untyped-def]
    x_ptr, norm_ptr, w_ptr, logits_ptr, live_ptr, weights_ptr, ids_ptr, rstd_ptr, arrived_ptr, eps,
    E: tl.constexpr, EP: tl.constexpr, EBITS: tl.constexpr, TOPK: tl.constexpr, H: tl.constexpr, HP: tl.constexpr,
    SIGMOID: tl.constexpr, SUMMED: tl.constexpr, BN: tl.constexpr, MASKED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, HP)
    in_k = k < H if MASKED else None
    in_w = (n < E)[:, None] & (k < H)[None, :] if MASKED else None
    zero = 0.0 if MASKED else None
    w = tl.load(w_ptr + n[:, None] * H + k[None, :], mask=in_w, other=zero, eviction_policy="evict_first")
    norm = tl.load(norm_ptr + k, mask=in_k, other=zero).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(x_ptr + k, mask=in_k, other=zero).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / H + eps)
    logits = tl.sum(w.to(tl.float32) * (x * norm)[None, :], 1) * scale
    tl.store(logits_ptr + n, logits, mask=n < E)
    # The barrier brings the stores of all threads before the one thread's release.
    tl.debug_barrier()
    if tl.atomic_add(arrived_ptr, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        tl.store(arrived_ptr, 0)
        route_row(
            0, logits_ptr, x_ptr, live_ptr, weights_ptr, ids_ptr, rstd_ptr, eps,
            E, EP, EBITS, TOPK, H, HP, SIGMOID, SUMMED, ".cg",
        )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _router_topk_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, x_ptr, live_ptr, weights_ptr, ids_ptr, rstd_ptr, eps,
    E: tl.constexpr, EP: tl.constexpr, EBITS: tl.constexpr, TOPK: tl.constexpr, H: tl.constexpr, HP: tl.constexpr,
    SIGMOID: tl.constexpr, SUMMED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        # In this order, so that the kernel after the next may read what was made before this one without waiting.
        gdc_wait()
        gdc_launch_dependents()
    route_row(
        tl.program_id(0), logits_ptr, x_ptr, live_ptr, weights_ptr, ids_ptr, rstd_ptr, eps,
        E, EP, EBITS, TOPK, H, HP, SIGMOID, SUMMED, "",
    )  # fmt: skip
