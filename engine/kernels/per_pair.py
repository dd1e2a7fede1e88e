"""Experts of few rows, one pair (row and rank) at a time: weights are read as they come, without an alignment."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.router_topk import Picked
from engine.kernels.tiles import Tile


def gate_up_tile(rows: int) -> Tile:
    """The tile of `per_pair_gate_up` where none was measured: the best on an H200 for [128, 1536, 2048] in bfloat16."""
    return {"BN": 8, "warps": 4, "stages": 1}


def down_tile(rows: int) -> Tile:
    """The tile of `per_pair_down` where none was measured: the best on an H200 for [128, 2048, 768] in bfloat16."""
    return {"BN": 4, "warps": 8, "stages": 1} if rows == 1 else {"BN": 2, "warps": 4, "stages": 1}


def per_pair_gate_up(
    x: Tensor, norm: Tensor | None, picked: Picked, gate_up: Tensor, *, tile: Tile, pdl: bool
) -> Tensor:
    """silu(gate) * up * weight of each pair's expert in `gate_up` [E, 2I, H]; returns h [n * k, I] in x's dtype.

    With `norm` [H] the rows `x` [n, H] are RMS-normalised with `picked.rstd`; without, they are normalised already. Masked
    pairs give zeros.
    """
    (n, width), (experts, both, _) = x.shape, gate_up.shape
    inter, top_k = both // 2, picked.ids.shape[1]
    assert gate_up.shape[2] == width and gate_up.dtype == x.dtype and picked.ids.shape[0] == n
    assert norm is None or (picked.rstd is not None and norm.shape == (width,))
    assert x.is_contiguous() and gate_up.is_contiguous()
    h = torch.empty(n * top_k, inter, dtype=x.dtype, device=x.device)
    padded, block = triton.next_power_of_2(width), tile["BN"]
    _gate_up_kernel[(triton.cdiv(inter, block), n * top_k)](
        *(x, norm, picked.rstd, picked.ids, picked.weights, gate_up, h),
        E=experts,
        H=width,
        HP=padded,
        INTER=inter,
        TOPK=top_k,
        BN=block,
        EVEN=padded == width and inter % block == 0,
        PDL=pdl,
        num_warps=tile["warps"],
        num_stages=tile["stages"],
        launch_pdl=pdl,
    )
    return h


def per_pair_down(h: Tensor, picked: Picked, down: Tensor, residual: Tensor, *, tile: Tile, pdl: bool) -> Tensor:
    """`residual` [n, H] plus each row's pairs of `h` [n * k, I] times their experts in `down` [E, H, I]; returns [n, H].

    Sums in float32 in a fixed order and rounds once. Masked rows are their residual. With `pdl` the kernel in front must be
    `per_pair_gate_up`: the ids are read, and weights are fetched by them, before it has ended.
    """
    (n, width), (experts, _, inter) = residual.shape, down.shape
    top_k = picked.ids.shape[1]
    assert down.shape[1] == width and down.dtype == h.dtype == residual.dtype and h.shape == (n * top_k, inter)
    assert h.is_contiguous() and down.is_contiguous() and residual.is_contiguous()
    y = torch.empty_like(residual)
    block, (parts, depth) = tile["BN"], cut(inter)
    _down_kernel[(triton.cdiv(width, block), n)](
        *(h, picked.ids, down, residual, y),
        E=experts,
        H=width,
        INTER=inter,
        TOPK=top_k,
        KP=triton.next_power_of_2(top_k),
        BN=block,
        PARTS=parts,
        BI=depth,
        EVEN=parts * depth == inter and width % block == 0 and top_k == triton.next_power_of_2(top_k),
        PDL=pdl,
        num_warps=tile["warps"],
        num_stages=tile["stages"],
        launch_pdl=pdl,
    )
    return y


def cut(width: int) -> tuple[int, int]:
    """Cut a width into 1 or 3 parts of a power of two, whichever covers it with less room to spare: (parts, part)."""
    whole, third = triton.next_power_of_2(width), triton.next_power_of_2(triton.cdiv(width, 3))
    return (3, third) if 3 * third < whole else (1, whole)


@triton.jit  # type: ignore[untyped-decorator]
def _gate_up_kernel(  # type: ignore[no-untyped-def]
    x_ptr, norm_ptr, rstd_ptr, ids_ptr, weights_ptr, w_ptr, h_ptr,
    E: tl.constexpr, H: tl.constexpr, HP: tl.constexpr, INTER: tl.constexpr, TOPK: tl.constexpr, BN: tl.constexpr,
    EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(1)
    row = pair // TOPK
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, HP)
    in_n = None if EVEN else n < INTER
    in_k = None if EVEN else k < H
    in_w = None if EVEN else (n < INTER)[:, None] & (k < H)[None, :]
    zero = None if EVEN else 0.0
    if norm_ptr is not None:
        norm = tl.load(norm_ptr + k, mask=in_k, other=zero).to(tl.float32)
    if PDL:
        # In this order, since per_pair_down reads the ids before it waits.
        gdc_wait()
        gdc_launch_dependents()
    expert = tl.load(ids_ptr + pair)
    if expert >= E:
        tl.store(h_ptr + pair * INTER + n, tl.zeros([BN], h_ptr.dtype.element_ty), mask=in_n)
        return
    gate_at = w_ptr + expert.to(tl.int64) * (2 * INTER * H) + n[:, None] * H + k[None, :]
    gate_w = tl.load(gate_at, mask=in_w, other=zero, eviction_policy="evict_first")
    up_w = tl.load(gate_at + INTER * H, mask=in_w, other=zero, eviction_policy="evict_first")
    x = tl.load(x_ptr + row * H + k, mask=in_k, other=zero).to(tl.float32)
    if norm_ptr is not None:
        x = x * norm
        scale = tl.load(rstd_ptr + row)
    gate = tl.sum(gate_w.to(tl.float32) * x[None, :], 1)
    up = tl.sum(up_w.to(tl.float32) * x[None, :], 1)
    if norm_ptr is not None:
        gate = gate * scale
        up = up * scale
    out = gate / (1.0 + tl.exp(-gate)) * up * tl.load(weights_ptr + pair)
    tl.store(h_ptr + pair * INTER + n, out.to(h_ptr.dtype.element_ty), mask=in_n)


@triton.jit  # type: ignore[untyped-decorator]
def _down_kernel(  # type: ignore[no-untyped-def]
    h_ptr, ids_ptr, w_ptr, residual_ptr, y_ptr,
    E: tl.constexpr, H: tl.constexpr, INTER: tl.constexpr, TOPK: tl.constexpr, KP: tl.constexpr, BN: tl.constexpr,
    PARTS: tl.constexpr, BI: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    i = tl.arange(0, BI)
    t = tl.arange(0, KP)
    in_n = None if EVEN else n < H
    out = tl.zeros([BN], tl.float32)
    # Past the first-level cache: the kernel that wrote the ids is known to have ended, but not waited for here.
    ids = tl.load(ids_ptr + row * TOPK + t, mask=None if KP == TOPK else t < TOPK, cache_modifier=".cg").to(tl.int64)
    if tl.load(ids_ptr + row * TOPK, cache_modifier=".cg") < E:
        w_at = w_ptr + ids[None, :, None] * (H * INTER) + n[:, None, None] * INTER + i[None, None, :]
        h_at = h_ptr + (row * TOPK + t)[:, None] * INTER + i[None, :]
        in_w = None if EVEN else (n < H)[:, None, None] & (t < TOPK)[None, :, None] & (i < INTER)[None, None, :]
        in_h = None if EVEN else (t < TOPK)[:, None] & (i < INTER)[None, :]
        zero = None if EVEN else 0.0
        # All weights are on their way before the wait: a loop would fetch a part only when the one before is used.
        w0 = tl.load(w_at, mask=in_w, other=zero, eviction_policy="evict_first")
        if PARTS == 3:
            last_w = None if EVEN else in_w & (2 * BI + i < INTER)[None, None, :]
            last_h = None if EVEN else in_h & (2 * BI + i < INTER)[None, :]
            w1 = tl.load(w_at + BI, mask=in_w, other=zero, eviction_policy="evict_first")
            w2 = tl.load(w_at + 2 * BI, mask=last_w, other=zero, eviction_policy="evict_first")
        if PDL:
            gdc_launch_dependents()
            gdc_wait()
        acc = w0.to(tl.float32) * tl.load(h_at, mask=in_h, other=zero).to(tl.float32)[None]
        if PARTS == 3:
            acc += w1.to(tl.float32) * tl.load(h_at + BI, mask=in_h, other=zero).to(tl.float32)[None]
            acc += w2.to(tl.float32) * tl.load(h_at + 2 * BI, mask=last_h, other=zero).to(tl.float32)[None]
        out = tl.sum(tl.sum(acc, 2), 1)
    elif PDL:
        gdc_launch_dependents()
        gdc_wait()
    out += tl.load(residual_ptr + row * H + n, mask=in_n, other=None if EVEN else 0.0).to(tl.float32)
    tl.store(y_ptr + row * H + n, out.to(y_ptr.dtype.element_ty), mask=in_n)
