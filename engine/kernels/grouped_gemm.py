"""Experts of many rows: one product for each run of pairs that share an expert, on the tensor cores.

Weights are the left operand and pairs the right one, [BN, BK] x [BK, BM], since a run may have fewer pairs than a tensor
core takes rows. A run's programs follow one another, so its weights are read from memory once and then from the cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.align import Alignment
from engine.kernels.router_topk import Picked
from engine.kernels.tiles import Tile

# A run of more blocks of BM pairs than this has programs that take several.
MOST_BLOCKS = 4
REDUCE_BLOCK = 256
# Float32 has no exact tensor cores: both operands lie in registers, so their tile is small.
FLOAT32_TILE: Tile = {"BM": 16, "BN": 64, "BK": 32, "warps": 4, "stages": 2}


def gate_up_tile(rows: int, dtype: torch.dtype = torch.bfloat16) -> Tile:
    """The tile of `grouped_gate_up` of `rows` n where none was measured, for 128 experts of 768 and top-8 (no tensors in).

    Up to 128 rows (8 pairs an expert) the best of a handful measured on an H200 in bfloat16. Beyond, BM is near the pairs
    of an expert up to 64, where a run's last block is not mostly empty.
    """
    if dtype == torch.float32:
        return FLOAT32_TILE
    if rows <= 128:
        return {"BM": 16, "BN": 64, "BK": 64, "warps": 4, "stages": 5}
    if rows <= 384:
        return {"BM": 32, "BN": 64, "BK": 64, "warps": 4, "stages": 4}
    return {"BM": 64 if rows <= 3072 else 128, "BN": 128, "BK": 64, "warps": 8, "stages": 3}


def down_tile(rows: int, dtype: torch.dtype = torch.bfloat16) -> Tile:
    """The tile of `grouped_down` of `rows` n where none was measured, as `gate_up_tile` (no tensors in)."""
    if dtype == torch.float32:
        return FLOAT32_TILE
    if rows <= 128:
        return {"BM": 16, "BN": 128, "BK": 128, "warps": 8, "stages": 3}
    if rows <= 384:
        return {"BM": 32, "BN": 128, "BK": 64, "warps": 8, "stages": 4}
    return {"BM": 64 if rows <= 3072 else 128, "BN": 128, "BK": 64, "warps": 8, "stages": 4}


def grouped_gate_up(
    x: Tensor, norm: Tensor | None, picked: Picked, alignment: Alignment, gate_up: Tensor, *, tile: Tile, pdl: bool
) -> Tensor:
    """silu(gate) * up * weight of each pair's expert in `gate_up` [E, 2I, H]; returns h [n * k, I] in x's dtype.

    With `norm` [H] the rows `x` [n, H] are RMS-normalised with `picked.rstd`; without, they are normalised already. What
    masked pairs hold has no meaning.
    """
    (n, width), (experts, both, _) = x.shape, gate_up.shape
    inter, top_k = both // 2, picked.ids.shape[1]
    assert gate_up.shape[2] == width and gate_up.dtype == x.dtype and picked.ids.shape[0] == n
    assert norm is None or (picked.rstd is not None and norm.shape == (width,))
    assert x.is_contiguous() and gate_up.is_contiguous()
    h = torch.empty(n * top_k, inter, dtype=x.dtype, device=x.device)
    block, depth = tile["BN"], tile["BK"]
    _gate_up_kernel[(triton.cdiv(inter, block), *_runs_grid(n, top_k, experts, tile))](
        *(x, norm, picked.rstd, picked.weights, *_runs(alignment), gate_up, h),
        H=width,
        INTER=inter,
        TOPK=top_k,
        BM=tile["BM"],
        BN=block,
        BK=depth,
        EVEN=width % depth == 0 and inter % block == 0,
        PDL=pdl,
        num_warps=tile["warps"],
        num_stages=tile["stages"],
        launch_pdl=pdl,
    )
    return h


def grouped_down(
    h: Tensor, picked: Picked, alignment: Alignment, down: Tensor, residual: Tensor, *, tile: Tile, pdl: bool
) -> Tensor:
    """`residual` [n, H] plus each row's pairs of `h` [n * k, I] times their experts in `down` [E, H, I]; returns [n, H].

    Two kernels: products in float32, then their sum in rank order, rounded once. Masked rows are their residual. With `pdl`
    the kernel in front must be `grouped_gate_up`: the alignment is read before it has ended.
    """
    (n, width), (experts, _, inter) = residual.shape, down.shape
    top_k = picked.ids.shape[1]
    assert down.shape[1] == width and down.dtype == h.dtype == residual.dtype and h.shape == (n * top_k, inter)
    assert h.is_contiguous() and down.is_contiguous() and residual.is_contiguous()
    products = torch.empty(n * top_k, width, dtype=torch.float32, device=h.device)
    block, depth = tile["BN"], tile["BK"]
    _down_kernel[(triton.cdiv(width, block), *_runs_grid(n, top_k, experts, tile))](
        *(h, *_runs(alignment), down, products),
        H=width,
        INTER=inter,
        BM=tile["BM"],
        BN=block,
        BK=depth,
        EVEN=inter % depth == 0 and width % block == 0,
        PDL=pdl,
        num_warps=tile["warps"],
        num_stages=tile["stages"],
        launch_pdl=pdl,
    )
    y = torch.empty_like(residual)
    _reduce_kernel[(triton.cdiv(width, REDUCE_BLOCK), n)](
        *(products, picked.ids, residual, y),
        E=experts,
        H=width,
        TOPK=top_k,
        BN=REDUCE_BLOCK,
        EVEN=width % REDUCE_BLOCK == 0,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    return y


def _runs_grid(rows: int, top_k: int, experts: int, tile: Tile) -> tuple[int, int]:
    """Programs along a run's blocks, and along runs: a run has no more pairs than there are rows."""
    return min(triton.cdiv(rows, tile["BM"]), MOST_BLOCKS) if rows > 128 else 1, min(experts, rows * top_k)


def _runs(alignment: Alignment) -> tuple[Tensor, ...]:
    return alignment.experts, alignment.offsets, alignment.counts, alignment.pairs, alignment.runs


@triton.jit  # type: ignore[untyped-decorator]
def _gate_up_kernel(  # type: ignore[no-untyped-def]
    x_ptr, norm_ptr, rstd_ptr, weights_ptr, experts_ptr, offsets_ptr, counts_ptr, pairs_ptr, runs_ptr, w_ptr, h_ptr,
    H: tl.constexpr, INTER: tl.constexpr, TOPK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    run = tl.program_id(2)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.arange(0, BM)
    k = tl.arange(0, BK)
    in_n = n < INTER
    zero = None if EVEN else 0.0
    if PDL:
        # In this order, since grouped_down reads the alignment before it waits.
        gdc_wait()
        gdc_launch_dependents()
    if run < tl.load(runs_ptr):
        expert = tl.load(experts_ptr + run).to(tl.int64)
        offset = tl.load(offsets_ptr + run)
        count = tl.load(counts_ptr + run)
        w_at = w_ptr + expert * (2 * INTER * H) + n[:, None] * H + k[None, :]
        for first in range(tl.program_id(1) * BM, count, tl.num_programs(1) * BM):
            in_m = first + m < count
            pair = tl.load(pairs_ptr + offset + first + m, mask=in_m, other=0)
            row = pair // TOPK
            x_at = x_ptr + row[:, None] * H + k[None, :]
            gate = tl.zeros([BN, BM], tl.float32)
            up = tl.zeros([BN, BM], tl.float32)
            for k0 in range(0, H, BK):
                in_k = k0 + k < H
                in_w = None if EVEN else in_n[:, None] & in_k[None, :]
                x = tl.load(x_at + k0, mask=None if EVEN else in_k[None, :], other=zero)
                if norm_ptr is not None:
                    norm = tl.load(norm_ptr + k0 + k, mask=None if EVEN else in_k, other=zero).to(tl.float32)
                    x = (x.to(tl.float32) * norm[None, :]).to(x.dtype)
                x = tl.trans(x)
                gate = tl.dot(tl.load(w_at + k0, mask=in_w, other=zero), x, gate, input_precision="ieee")
                up = tl.dot(tl.load(w_at + INTER * H + k0, mask=in_w, other=zero), x, up, input_precision="ieee")
            if norm_ptr is not None:
                scale = tl.load(rstd_ptr + row)[None, :]
                gate = gate * scale
                up = up * scale
            out = gate / (1.0 + tl.exp(-gate)) * up * tl.load(weights_ptr + pair)[None, :]
            h_at = h_ptr + pair[None, :] * INTER + n[:, None]
            tl.store(
                h_at, out.to(h_ptr.dtype.element_ty), mask=in_m[None, :] if EVEN else in_m[None, :] & in_n[:, None]
            )


@triton.jit  # type: ignore[untyped-decorator]
def _down_kernel(  # type: ignore[no-untyped-def]
    h_ptr, experts_ptr, offsets_ptr, counts_ptr, pairs_ptr, runs_ptr, w_ptr, products_ptr,
    H: tl.constexpr, INTER: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    run = tl.program_id(2)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.arange(0, BM)
    k = tl.arange(0, BK)
    in_n = n < H
    zero = None if EVEN else 0.0
    # Past the first-level cache: the kernel that wrote the runs is known to have ended, but not waited for here.
    busy = run < tl.load(runs_ptr, cache_modifier=".cg")
    expert = tl.load(experts_ptr + run, mask=busy, other=0, cache_modifier=".cg").to(tl.int64)
    offset = tl.load(offsets_ptr + run, mask=busy, other=0, cache_modifier=".cg")
    count = tl.load(counts_ptr + run, mask=busy, other=0, cache_modifier=".cg")
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    w_at = w_ptr + expert * (H * INTER) + n[:, None] * INTER + k[None, :]
    for first in range(tl.program_id(1) * BM, count, tl.num_programs(1) * BM):
        in_m = first + m < count
        pair = tl.load(pairs_ptr + offset + first + m, mask=in_m, other=0)
        h_at = h_ptr + pair[:, None] * INTER + k[None, :]
        acc = tl.zeros([BN, BM], tl.float32)
        for k0 in range(0, INTER, BK):
            in_k = k0 + k < INTER
            in_w = None if EVEN else in_n[:, None] & in_k[None, :]
            h = tl.load(h_at + k0, mask=None if EVEN else in_k[None, :], other=zero)
            acc = tl.dot(tl.load(w_at + k0, mask=in_w, other=zero), tl.trans(h), acc, input_precision="ieee")
        to = products_ptr + pair[None, :] * H + n[:, None]
        tl.store(to, acc, mask=in_m[None, :] if EVEN else in_m[None, :] & in_n[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def _reduce_kernel(  # type: ignore[no-untyped-def]
    products_ptr, ids_ptr, residual_ptr, y_ptr,
    E: tl.constexpr, H: tl.constexpr, TOPK: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    in_n = None if EVEN else n < H
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    out = tl.zeros([BN], tl.float32)
    for rank in tl.static_range(TOPK):
        pair = row * TOPK + rank
        # A masked pair has no products: what lies there was never written.
        live = tl.zeros([BN], tl.int32) + tl.load(ids_ptr + pair) < E
        out += tl.load(products_ptr + pair * H + n, mask=live if EVEN else live & (n < H), other=0.0)
    out += tl.load(residual_ptr + row * H + n, mask=in_n, other=None if EVEN else 0.0).to(tl.float32)
    tl.store(y_ptr + row * H + n, out.to(y_ptr.dtype.element_ty), mask=in_n)
