"""Paged attention on a GPU: decode rows in one kernel, prompt chunks in two (norm, rope and store; then attend).

Keys and values lie in one layer's caches [pages, page_size, Hkv, d], contiguous in the last three dimensions. G is Hq / Hkv,
the query heads that share a kv head. With dependent launch, a kernel reads before its wait only what was complete before the
chain of dependent kernels began: page tables, positions, blocks, and the positions that earlier steps cached.

A step's own numbers (table, starts, blocks, places) lie wherever they were packed, so no kernel is compiled for how they are
aligned: nothing compiles once every shape has run.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.scratch import Scratch
from engine.kernels.tiles import Tile

# The rows of a tensor-core product come in 16s.
DOT_ROWS = 16
STORE_WARPS = 4


def default_tile(rows: int) -> Tile:
    """The tile of `decode_attention` at `rows` decode rows, bfloat16, 32 / 4 heads of 128 (no tensors).

    S is the splits of a row's positions, BT the positions of a tile. One row gives 4 programs a split, so few rows need many
    splits; at 64 rows two splits fill an H200. S as measured on an H200 at 320 positions: 8 at one row, 4 at 16, 2 at 64.
    The first tile of a split is loaded before the wait, the others in a pipelined loop: two of the stages go to looking up
    the pages, so 5 stages keep two tiles on their way where 3 and 4 keep one.
    """
    splits = 8 if rows <= 8 else 4 if rows <= 32 else 2
    return {"S": splits, "BT": 64, "warps": 4, "stages": 5}


def default_paged_tile(dtype: torch.dtype) -> Tile:
    """The tile of `paged_attention` (no tensors): BQ token rows a block, the same for each dtype; BT positions a tile.

    It is the same for any number of rows, so that a row's bits do not depend on how its prompt is cut into chunks. At 8 heads
    a kv head, 8 token rows are the 64 rows of one Hopper product, and two programs fit a processor (188 registers, 82 KB).
    float32 has no such product; its tile is the largest that spills no registers.
    """
    if dtype == torch.float32:
        return {"BQ": 8, "BT": 16, "warps": 8, "stages": 2}
    return {"BQ": 8, "BT": 64, "warps": 4, "stages": 3}


def query_blocks(starts: npt.ArrayLike, lengths: npt.ArrayLike, block: int) -> npt.NDArray[np.int32]:
    """Cut runs of token rows into the blocks of `paged_attention`, at most `block` rows each.

    Run s holds positions [starts[s], starts[s] + lengths[s]) in table row s; its token rows follow those of run s - 1.
    Returns [B, 4] int32: table row, first token row, rows, position of the first row.
    """
    begins, rows = np.asarray(starts, dtype=np.int64), np.asarray(lengths, dtype=np.int64)
    counts = -(-rows // block)
    run = np.repeat(np.arange(len(rows)), counts)
    within = (np.arange(len(run)) - (np.cumsum(counts) - counts)[run]) * block
    first = (np.cumsum(rows) - rows)[run] + within
    return np.stack([run, first, np.minimum(rows[run] - within, block), begins[run] + within], axis=1).astype(np.int32)


def decode_attention(
    qkv: Tensor,
    qk_norm: Tensor,
    eps: float,
    heads: int,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    starts: Tensor,
    *,
    scratch: Scratch,
    tile: Tile,
    pdl: bool,
) -> Tensor:
    """Norm and rotate each row's queries and key, store its key and value, and attend; returns [n, Hq * d].

    `qkv` [n, (Hq + 2 Hkv) d], `qk_norm` [Hq + Hkv, d], `heads` Hq, rope tables [n, d]. `table` [n, most] int32 holds each
    row's pages in order of position, `starts` [n] int32 its position; -1 is a padded row: it stores nothing and gives zeros.
    A row's bits depend on its own inputs and the tile, not on the other rows.
    """
    n, dim = cos.shape
    kv_heads, group = _head_counts(qk_norm, heads)
    splits = tile["S"]
    out = torch.empty(n, heads * dim, dtype=qkv.dtype, device=qkv.device)
    mixed = n * kv_heads * splits * group * dim
    floats = scratch.floats(mixed + 2 * n * kv_heads * splits * group)
    _decode_kernel[(n, kv_heads, splits)](
        qkv,
        qk_norm,
        cos,
        sin,
        k_cache,
        v_cache,
        table,
        starts,
        floats,
        floats[mixed:],
        scratch.counters(n * kv_heads),
        out,
        eps,
        _score_scale(dim),
        table.stride(0),
        _page_stride(k_cache, v_cache),
        HQ=heads,
        HK=kv_heads,
        G=group,
        GP=max(DOT_ROWS, triton.next_power_of_2(group)),
        D=dim,
        PAGE=k_cache.shape[1],
        S=splits,
        BT=tile["BT"],
        PDL=pdl,
        num_warps=tile["warps"],
        num_stages=tile["stages"],
        **_dependent(pdl),
    )
    return out


def norm_rope_write(
    qkv: Tensor,
    qk_norm: Tensor,
    eps: float,
    heads: int,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    where: Tensor,
    *,
    pdl: bool,
) -> Tensor:
    """Norm and rotate the queries and keys of `qkv` [n, (Hq + 2 Hkv) d] and store keys and values; returns q [n, Hq, d].

    `qk_norm` [Hq + Hkv, d], `heads` Hq, rope tables [n, d]. `where` [n] integers are flat places (page * page_size + offset);
    -1 is a padded row, which stores nothing.
    """
    n, dim = cos.shape
    kv_heads, group = _head_counts(qk_norm, heads)
    q = torch.empty(n, heads, dim, dtype=qkv.dtype, device=qkv.device)
    _store_kernel[(n, kv_heads)](
        qkv,
        qk_norm,
        cos,
        sin,
        k_cache,
        v_cache,
        where,
        q,
        eps,
        _page_stride(k_cache, v_cache),
        HQ=heads,
        HK=kv_heads,
        G=group,
        GP=triton.next_power_of_2(group),
        D=dim,
        PAGE=k_cache.shape[1],
        PDL=pdl,
        num_warps=STORE_WARPS,
        **_dependent(pdl),
    )
    return q


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, blocks: Tensor, *, tile: Tile, pdl: bool
) -> Tensor:
    """Causal attention of runs of token rows `q` [n, Hq, d], whose keys and values are stored already; [n, Hq * d].

    `table` [runs, most] int32 holds each run's pages in order of position; `blocks` [B, 4] int32 is made by `query_blocks`
    with the tile's BQ, and a block of 0 rows is padding. Token rows in no block come out as zeros. d is a power of two, at
    least 16. A row's bits depend neither on how its prompt is cut into chunks nor on the other blocks.
    """
    n, heads, dim = q.shape
    kv_heads = k_cache.shape[2]
    group = heads // kv_heads
    out = torch.zeros(n, heads * dim, dtype=q.dtype, device=q.device)
    _paged_kernel[(blocks.shape[0], kv_heads)](
        q,
        k_cache,
        v_cache,
        table,
        blocks,
        out,
        _score_scale(dim),
        table.stride(0),
        _page_stride(k_cache, v_cache),
        HQ=heads,
        HK=kv_heads,
        G=group,
        GP=max(DOT_ROWS // tile["BQ"], triton.next_power_of_2(group)),
        D=dim,
        PAGE=k_cache.shape[1],
        BQ=tile["BQ"],
        BT=tile["BT"],
        PDL=pdl,
        num_warps=tile["warps"],
        num_stages=tile["stages"],
        **_dependent(pdl),
    )
    return out


def _head_counts(qk_norm: Tensor, heads: int) -> tuple[int, int]:
    kv_heads = qk_norm.shape[0] - heads
    return kv_heads, heads // kv_heads


def _score_scale(dim: int) -> float:
    """d**-0.5 for scores that go to a power of two instead of e."""
    return math.log2(math.e) / math.sqrt(dim)


def _page_stride(k_cache: Tensor, v_cache: Tensor) -> int:
    kv_heads, dim = k_cache.shape[2:]
    assert k_cache.stride() == v_cache.stride()
    assert k_cache.stride()[1:] == (kv_heads * dim, dim, 1)
    return k_cache.stride(0)


def _dependent(pdl: bool) -> dict[str, bool]:
    return {"launch_pdl": True} if pdl else {}


@triton.jit  # type: ignore[untyped-decorator]
def _load_heads(row_ptr, norm_ptr, cos_ptr, sin_ptr, heads, live, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """What `_turn` takes, six times [H, D], of the `live` ones of `heads` [H] of one row."""
    d = tl.arange(0, D)
    partner = tl.where(d < D // 2, d + D // 2, d - D // 2)
    at = heads[:, None] * D + d[None, :]
    at_partner = heads[:, None] * D + partner[None, :]
    # A load for each head again: one line of the first-level cache costs less than an exchange between threads.
    at_channel = heads[:, None] * 0 + d[None, :]
    mask = live[:, None]
    weight = tl.load(norm_ptr + at, mask=mask, other=0.0)
    weight_partner = tl.load(norm_ptr + at_partner, mask=mask, other=0.0)
    x = tl.load(row_ptr + at, mask=mask, other=0.0)
    y = tl.load(row_ptr + at_partner, mask=mask, other=0.0)
    return x, y, weight, weight_partner, tl.load(cos_ptr + at_channel), tl.load(sin_ptr + at_channel)


@triton.jit  # type: ignore[untyped-decorator]
def _turn(loaded, eps, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """RMS norm of heads and their rotation by halves; returns [H, D] float32."""
    x, y = loaded[0].to(tl.float32), loaded[1].to(tl.float32)
    cos, sin = loaded[4].to(tl.float32), loaded[5].to(tl.float32)
    sin = tl.where((tl.arange(0, D) < D // 2)[None, :], -sin, sin)
    scale = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
    return x * scale * loaded[2].to(tl.float32) * cos + y * scale * loaded[3].to(tl.float32) * sin


@triton.jit  # type: ignore[untyped-decorator]
def _places(table_ptr, t, known, page_stride, PAGE: tl.constexpr, HK: tl.constexpr, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where the first kv head of positions `t` [T] lies in a cache; returns [T] int64 (page 0's where not `known`)."""
    page = tl.load(table_ptr + t // PAGE, mask=known, other=0).to(tl.int64)
    return page * page_stride + (t % PAGE) * (HK * D)


@triton.jit
def _hold(x):  # type: ignore[no-untyped-def]
    """`x` [T, D], not used before this point: else the compiler moves it to shared memory, and so awaits it, at its load."""
    return tl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=32 // x.dtype.primitive_bitwidth
    )


@triton.jit
def _attend(q, k, v, visible, scale, best, total, mixed):  # type: ignore[no-untyped-def]
    """Take a tile of positions into the running softmax: `q` [M, D], `k` and `v` [T, D], `visible` [M or 1, T].

    `best` [M] is the largest score in powers of two so far, `total` [M] the sum of weights, `mixed` [M, D] the weighted sum
    of values. Each row has seen a visible position by the end of its first tile, else its weights are not numbers.
    """
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    scores = tl.where(visible, scores, -float("inf"))
    top = tl.maximum(best, tl.max(scores, 1))
    weights = tl.exp2(scores - top[:, None])
    shrink = tl.exp2(best - top)
    total = total * shrink + tl.sum(weights, 1)
    mixed = tl.dot(weights.to(v.dtype), v, mixed * shrink[:, None], input_precision="ieee")
    return top, total, mixed


@triton.jit(do_not_specialize=["table_ptr", "starts_ptr", "table_stride"])  # type: ignore[untyped-decorator]
def _decode_kernel(  # type: ignore[no-untyped-def]
    qkv_ptr,
    norm_ptr,
    cos_ptr,
    sin_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    starts_ptr,
    mixed_ptr,
    sums_ptr,
    arrived_ptr,
    out_ptr,
    eps,
    scale,
    table_stride,
    page_stride,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    S: tl.constexpr,
    BT: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row, one kv head, one split of the cached positions; the last split takes the row's own position too."""
    row = tl.program_id(0)
    hk = tl.program_id(1)
    split = tl.program_id(2)
    d = tl.arange(0, D)
    g = tl.arange(0, GP)
    only = tl.arange(0, 1)
    at_head = (g < G)[:, None]

    position = tl.load(starts_ptr + row)
    cached = tl.maximum(position, 0)
    share = tl.maximum(tl.cdiv(tl.cdiv(cached, S), BT), 1) * BT
    splits = tl.maximum(tl.cdiv(cached, share), 1)
    low = split * share
    high = tl.minimum(low + share, cached)

    # Earlier steps wrote these positions, so the first tile comes while the kernel before this one still runs.
    table_ptr += row * table_stride
    at = hk * D + d[None, :]
    own = _places(table_ptr, cached + only, position + only >= 0, page_stride, PAGE, HK, D)[:, None] + at
    t = low + tl.arange(0, BT)
    place = _places(table_ptr, t, t < high, page_stride, PAGE, HK, D)[:, None] + at
    k = tl.load(k_ptr + place, mask=(t < high)[:, None], other=0.0)
    v = tl.load(v_ptr + place, mask=(t < high)[:, None], other=0.0)
    if PDL:
        # The weights of the kernel after this one come while this one works, and not before what this one waits for.
        gdc_wait()
        gdc_launch_dependents()

    out_at = out_ptr + row * (HQ * D) + (hk * G + g)[:, None] * D + d[None, :]
    # A program returns after its wait, never before: the kernel after this one takes its end for that of all before.
    if split >= splits:
        return
    if position < 0:
        tl.store(out_at, tl.zeros([GP, D], out_ptr.dtype.element_ty), mask=at_head)
        return

    row_ptr = qkv_ptr + row * ((HQ + 2 * HK) * D)
    cos_ptr += row * D
    sin_ptr += row * D
    # All loads before the first use of any: what is loaded after a sum is not on its way during it.
    q = _load_heads(row_ptr, norm_ptr, cos_ptr, sin_ptr, hk * G + g, g < G, D)
    own_k = _load_heads(row_ptr, norm_ptr, cos_ptr, sin_ptr, HQ + hk + only, only == 0, D)
    own_v = tl.load(row_ptr + (HQ + HK + hk) * D + d[None, :])
    q = _turn(q, eps, D).to(k.dtype)
    own_k = _turn(own_k, eps, D).to(k.dtype)
    last = split == splits - 1
    if last:
        tl.store(k_ptr + own, own_k)
        tl.store(v_ptr + own, own_v)

    own_score = tl.sum(q.to(tl.float32) * own_k.to(tl.float32), 1) * scale
    best = tl.where(last, own_score, -float("inf"))
    total = tl.where(last, tl.full([GP], 1.0, tl.float32), 0.0)
    mixed = tl.where(last, tl.broadcast_to(own_v.to(tl.float32), [GP, D]), 0.0)
    if PDL:
        k = _hold(k)
        v = _hold(v)
    best, total, mixed = _attend(q, k, v, (t < high)[None, :], scale, best, total, mixed)
    for t0 in range(low + BT, high, BT):
        t = t0 + tl.arange(0, BT)
        place = _places(table_ptr, t, t < high, page_stride, PAGE, HK, D)[:, None] + at
        k = tl.load(k_ptr + place, mask=(t < high)[:, None], other=0.0)
        v = tl.load(v_ptr + place, mask=(t < high)[:, None], other=0.0)
        best, total, mixed = _attend(q, k, v, (t < high)[None, :], scale, best, total, mixed)

    if splits == 1:
        tl.store(out_at, (mixed / total[:, None]).to(out_ptr.dtype.element_ty), mask=at_head)
        return
    base = (row * HK + hk) * S
    mixed_at = mixed_ptr + (base * G + g)[:, None] * D + d[None, :]
    sums_at = sums_ptr + base * (2 * G) + g
    tl.store(mixed_at + split * (G * D), mixed, mask=at_head)
    tl.store(sums_at + split * (2 * G), best, mask=g < G)
    tl.store(sums_at + split * (2 * G) + G, total, mask=g < G)
    # All threads have stored before one of them counts this program as arrived.
    tl.debug_barrier()
    before = tl.atomic_add(arrived_ptr + row * HK + hk, 1, sem="acq_rel")
    if before == splits - 1:
        tl.store(arrived_ptr + row * HK + hk, 0)
        j = tl.arange(0, S)
        there = (j < splits)[:, None] & (g < G)[None, :]
        # .cg: other processors wrote these, and a first-level cache may hold what lay there before.
        bests = tl.load(sums_at[None, :] + j[:, None] * (2 * G), mask=there, other=-float("inf"), cache_modifier=".cg")
        totals = tl.load(sums_at[None, :] + j[:, None] * (2 * G) + G, mask=there, other=0.0, cache_modifier=".cg")
        # The heads that only pad GP have no score at all: 0 for their best keeps them numbers.
        top = tl.where(g < G, tl.max(bests, 0), 0.0)
        shares = tl.exp2(bests - top[None, :])
        total = tl.where(g < G, tl.sum(shares * totals, 0), 1.0)
        mixed = tl.zeros([GP, D], tl.float32)
        for s in tl.static_range(S):
            share_of_split = tl.sum(tl.where((j == s)[:, None], shares, 0.0), 0)
            written = g[:, None] < tl.where(splits > s, G, 0)
            part = tl.load(mixed_at + s * (G * D), mask=written, other=0.0, cache_modifier=".cg")
            mixed += share_of_split[:, None] * part
        tl.store(out_at, (mixed / total[:, None]).to(out_ptr.dtype.element_ty), mask=at_head)


@triton.jit(do_not_specialize=["where_ptr"])  # type: ignore[untyped-decorator]
def _store_kernel(  # type: ignore[no-untyped-def]
    qkv_ptr,
    norm_ptr,
    cos_ptr,
    sin_ptr,
    k_ptr,
    v_ptr,
    where_ptr,
    q_ptr,
    eps,
    page_stride,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row, one kv head and the query heads that share it."""
    row = tl.program_id(0)
    hk = tl.program_id(1)
    d = tl.arange(0, D)
    g = tl.arange(0, GP)
    only = tl.arange(0, 1)
    where = tl.load(where_ptr + row).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row_ptr = qkv_ptr + row.to(tl.int64) * ((HQ + 2 * HK) * D)
    cos_ptr += row * D
    sin_ptr += row * D
    dtype = q_ptr.dtype.element_ty
    q = _load_heads(row_ptr, norm_ptr, cos_ptr, sin_ptr, hk * G + g, g < G, D)
    k = _load_heads(row_ptr, norm_ptr, cos_ptr, sin_ptr, HQ + hk + only, only == 0, D)
    v = tl.load(row_ptr + (HQ + HK + hk) * D + d[None, :])
    q_at = q_ptr + row.to(tl.int64) * (HQ * D) + (hk * G + g)[:, None] * D + d[None, :]
    tl.store(q_at, _turn(q, eps, D).to(dtype), mask=(g < G)[:, None])
    at = (where // PAGE) * page_stride + (where % PAGE) * (HK * D) + hk * D + d[None, :]
    # A padded row's place is no address at all; its stores are masked.
    stored = only[:, None] < tl.where(where >= 0, 1, 0)
    tl.store(k_ptr + at, _turn(k, eps, D).to(dtype), mask=stored)
    tl.store(v_ptr + at, v, mask=stored)


@triton.jit(do_not_specialize=["table_ptr", "blocks_ptr", "table_stride"])  # type: ignore[untyped-decorator]
def _paged_kernel(  # type: ignore[no-untyped-def]
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    blocks_ptr,
    out_ptr,
    scale,
    table_stride,
    page_stride,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BQ: tl.constexpr,
    BT: tl.constexpr,
    PDL: tl.constexpr,
):
    """One block of token rows and one kv head: the BQ rows times the GP heads are the rows of the products.

    Tiles start at position 0 whatever the block, and a tile that a row may not see leaves its sums as they are, bit for bit.
    """
    # A prompt's last blocks see the most, so they start first.
    block_ptr = blocks_ptr + (tl.num_programs(0) - 1 - tl.program_id(0)) * 4
    hk = tl.program_id(1)
    table_ptr += tl.load(block_ptr) * table_stride
    first = tl.load(block_ptr + 1)
    count = tl.load(block_ptr + 2)
    position = tl.load(block_ptr + 3)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    # A padding block returns after its wait too: the kernel after this one takes its end for that of all before.
    if count == 0:
        return
    d = tl.arange(0, D)
    m = tl.arange(0, BQ * GP)
    token = m // GP
    head = m % GP
    live = ((token < count) & (head < G))[:, None]
    at = (first + token).to(tl.int64)[:, None] * (HQ * D) + (hk * G + head)[:, None] * D + d[None, :]
    q = tl.load(q_ptr + at, mask=live, other=0.0)
    end = position + count
    best = tl.full([BQ * GP], -float("inf"), tl.float32)
    total = tl.zeros([BQ * GP], tl.float32)
    mixed = tl.zeros([BQ * GP, D], tl.float32)
    for t0 in range(0, end, BT):
        t = t0 + tl.arange(0, BT)
        place = _places(table_ptr, t, t < end, page_stride, PAGE, HK, D)[:, None] + hk * D + d[None, :]
        k = tl.load(k_ptr + place, mask=(t < end)[:, None], other=0.0)
        v = tl.load(v_ptr + place, mask=(t < end)[:, None], other=0.0)
        visible = t[None, :] <= (position + token)[:, None]
        best, total, mixed = _attend(q, k, v, visible, scale, best, total, mixed)
    tl.store(out_ptr + at, (mixed / total[:, None]).to(out_ptr.dtype.element_ty), mask=live)
