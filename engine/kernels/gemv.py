"""Products of few rows with a weight matrix: `gemv` on the CUDA cores, `split_gemm` on the tensor cores.

Both fold the RMS norm of the rows in front (x * norm goes into the product, 1/rms comes out of it as a factor) and a residual
behind, accumulate in float32 and round once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.scratch import Scratch
from engine.kernels.tiles import Tile

MOST_ROWS = 8
# The weight tile of a gemv program lies in registers: 64 of them a thread at four warps.
GEMV_TILE_BYTES = 32768
# Programs that keep the 132 multiprocessors of an H200 busy: about four each.
PROGRAMS = 512


def gemv_tile(outputs: int, width: int, dtype: torch.dtype) -> Tile:
    """The tile of a `gemv` with `outputs` N and `width` K where none was measured (no tensors in).

    The best of a handful measured on an H200 in bfloat16: BN 8 for [5120, 2048], 4 for [2048, 4096], 2 for [128, 2048].
    """
    fits = GEMV_TILE_BYTES // (dtype.itemsize * triton.next_power_of_2(width))
    spread = outputs // 64
    return {"BN": _power_below(min(fits, spread, 64)), "warps": 4, "stages": 1}


def split_tile(rows: int, outputs: int, width: int, dtype: torch.dtype) -> Tile:
    """The tile of a `split_gemm` of `rows` n, `outputs` N and `width` K where none was measured (no tensors in).

    As many slices of K as keep an H200 busy. In float32, which has no exact tensor cores, the tile is small: it lies in
    registers. For the same bits at any number of rows, use the tile of one number of rows for all.
    """
    row_tile, large = 16 if rows <= 16 else 64, outputs >= 1024
    if dtype == torch.float32:
        block, depth = 32 if large else 16, 32
    else:
        block, depth = 64 if large else 16, 256
    programs = triton.cdiv(outputs, block) * triton.cdiv(rows, row_tile)
    slices = min(triton.next_power_of_2(triton.cdiv(PROGRAMS, programs)), max(1, width // depth), 16)
    if slices * depth < width:
        depth = min(depth, 128)
    return {"RP": row_tile, "BN": block, "BK": depth, "SK": slices, "warps": 4, "stages": 3}


def gemv(
    x: Tensor,
    weight: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    out_dtype: torch.dtype,
    tile: Tile,
    pdl: bool,
) -> Tensor:
    """`x` [n, K], n up to 8, times `weight` [N, K] transposed; returns [n, N] in `out_dtype`.

    With `norm` [K] the rows are RMS-normalised first (`eps`); `residual` [n, N] is added. Each program holds BN rows of the
    weight over the whole K, loaded before it waits for the kernel in front. ValueError for more rows.
    """
    (rows, width), outputs = x.shape, weight.shape[0]
    if rows > MOST_ROWS:
        raise ValueError(f"gemv takes up to {MOST_ROWS} rows, got {rows}: use split_gemm")
    _check(x, weight, norm, residual)
    out = torch.empty(rows, outputs, dtype=out_dtype, device=x.device)
    padded, block = triton.next_power_of_2(width), tile["BN"]
    _gemv_kernel[(triton.cdiv(outputs, block),)](
        *(x, norm, weight, residual, out, eps, outputs),
        K=width,
        KP=padded,
        R=rows,
        BN=block,
        MASKED=padded != width or outputs % block != 0,
        PDL=pdl,
        num_warps=tile["warps"],
        num_stages=tile["stages"],
        launch_pdl=pdl,
    )
    return out


def split_gemm(
    x: Tensor,
    weight: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    out_dtype: torch.dtype,
    scratch: Scratch,
    tile: Tile,
    pdl: bool,
) -> Tensor:
    """`x` [n, K], any n, times `weight` [N, K] transposed; returns [n, N] in `out_dtype`.

    With `norm` [K] the rows are RMS-normalised first (`eps`); `residual` [n, N] is added. K is cut into SK slices, and the
    slice that ends last adds them up in order. With one tile, a row's bits depend neither on n nor on the other rows.
    """
    (rows, width), outputs = x.shape, weight.shape[0]
    _check(x, weight, norm, residual)
    out = torch.empty(rows, outputs, dtype=out_dtype, device=x.device)
    row_tile, block, depth = tile["RP"], tile["BN"], tile["BK"]
    length = triton.cdiv(triton.cdiv(width, tile["SK"]), depth) * depth
    slices = triton.cdiv(width, length)
    blocks, row_tiles = triton.cdiv(outputs, block), triton.cdiv(rows, row_tile)
    parts = squares = arrived = None
    if slices > 1:
        arrived = scratch.counters(blocks * row_tiles)
        rows_of_parts = blocks * row_tiles * slices * row_tile
        floats = scratch.floats(rows_of_parts * (block + 1))
        parts, squares = floats[: rows_of_parts * block], floats[rows_of_parts * block :]
    _split_kernel[(blocks, slices, row_tiles)](
        *(x, norm, weight, residual, out, parts, squares, arrived, eps, rows, outputs),
        K=width,
        KS=length,
        SK=slices,
        RP=row_tile,
        BN=block,
        BK=depth,
        MASKED=slices * length != width or outputs % block != 0,
        PDL=pdl,
        num_warps=tile["warps"],
        num_stages=tile["stages"],
        launch_pdl=pdl,
    )
    return out


def _power_below(value: int) -> int:
    """The largest power of two up to `value`, at least 1."""
    return 1 << (max(1, value).bit_length() - 1)


def _check(x: Tensor, weight: Tensor, norm: Tensor | None, residual: Tensor | None) -> None:
    (rows, width), outputs = x.shape, weight.shape[0]
    assert weight.shape[1] == width and weight.dtype == x.dtype, (x.shape, weight.shape, x.dtype, weight.dtype)
    assert norm is None or norm.shape == (width,), norm.shape
    assert residual is None or residual.shape == (rows, outputs), residual.shape
    assert all(t.is_contiguous() for t in (x, weight, norm, residual) if t is not None)


@triton.jit  # type: ignore[untyped-decorator]
def _gemv_kernel(  # type: ignore[no-untyped-def]
    x_ptr, norm_ptr, w_ptr, residual_ptr, y_ptr, eps, N,
    K: tl.constexpr, KP: tl.constexpr, R: tl.constexpr, BN: tl.constexpr, MASKED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, KP)
    in_n = n < N if MASKED else None
    in_k = k < K if MASKED else None
    in_w = (n < N)[:, None] & (k < K)[None, :] if MASKED else None
    zero = 0.0 if MASKED else None
    w_at = w_ptr + n[:, None].to(tl.int64) * K + k[None, :]
    # Read once: what is read again may stay in the cache.
    w = tl.load(w_at, mask=in_w, other=zero, eviction_policy="evict_first")
    if norm_ptr is not None:
        norm = tl.load(norm_ptr + k, mask=in_k, other=zero).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    for r in tl.static_range(R):
        x = tl.load(x_ptr + r * K + k, mask=in_k, other=zero).to(tl.float32)
        if norm_ptr is not None:
            scale = tl.rsqrt(tl.sum(x * x, 0) / K + eps)
            out = tl.sum(w.to(tl.float32) * (x * norm)[None, :], 1) * scale
        else:
            out = tl.sum(w.to(tl.float32) * x[None, :], 1)
        if residual_ptr is not None:
            out += tl.load(residual_ptr + r * N + n, mask=in_n, other=zero).to(tl.float32)
        tl.store(y_ptr + r * N + n, out.to(y_ptr.dtype.element_ty), mask=in_n)


@triton.jit  # type: ignore[untyped-decorator]
def _add_product(acc, square, w, x_ptr, norm_ptr, r, k, rows, K: tl.constexpr, MASKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add weight tile `w` [BN, BK] times rows `r` at places `k` to `acc` [BN, RP], and the rows' squares to `square` [RP]."""
    ok = (r < rows)[:, None] & (k < K)[None, :] if MASKED else (r < rows)[:, None]
    x = tl.load(x_ptr + r[:, None] * K + k[None, :], mask=ok, other=0.0)
    if norm_ptr is not None:
        wide = x.to(tl.float32)
        square += tl.sum(wide * wide, 1)
        norm = tl.load(norm_ptr + k, mask=k < K if MASKED else None, other=0.0 if MASKED else None)
        x = (wide * norm.to(tl.float32)[None, :]).to(w.dtype)
    return tl.dot(w, tl.trans(x), acc, input_precision="ieee"), square


@triton.jit  # type: ignore[untyped-decorator]
def _finish(acc, square, norm_ptr, residual_ptr, y_ptr, eps, r, n, rows, N, K: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scale the sums `acc` [BN, RP], add the residual and store them as rows `r`, columns `n`."""
    if norm_ptr is not None:
        acc = acc * tl.rsqrt(square / K + eps)[None, :]
    at = r[None, :] * N + n[:, None]
    ok = (r < rows)[None, :] & (n < N)[:, None]
    if residual_ptr is not None:
        acc += tl.load(residual_ptr + at, mask=ok, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, acc.to(y_ptr.dtype.element_ty), mask=ok)


# `rows` is not specialised: a kernel of its own for 1 or for 16 rows could sum in another order.
@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def _split_kernel(  # type: ignore[no-untyped-def]
    x_ptr, norm_ptr, w_ptr, residual_ptr, y_ptr, part_ptr, square_ptr, arrived_ptr, eps, rows, N,
    K: tl.constexpr, KS: tl.constexpr, SK: tl.constexpr, RP: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    MASKED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    piece = tl.program_id(1)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    r = tl.program_id(2) * RP + tl.arange(0, RP)
    k = piece * KS + tl.arange(0, BK)
    w_at = w_ptr + n[:, None].to(tl.int64) * K + k[None, :]
    zero = 0.0 if MASKED else None
    w = tl.load(w_at, mask=(n < N)[:, None] & (k < K)[None, :] if MASKED else None, other=zero)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    acc = tl.zeros([BN, RP], tl.float32)
    square = tl.zeros([RP], tl.float32)
    acc, square = _add_product(acc, square, w, x_ptr, norm_ptr, r, k, rows, K, MASKED)
    for start in range(BK, KS, BK):
        ok = (n < N)[:, None] & (start + k < K)[None, :] if MASKED else None
        w = tl.load(w_at + start, mask=ok, other=zero)
        acc, square = _add_product(acc, square, w, x_ptr, norm_ptr, r, start + k, rows, K, MASKED)
    if SK == 1:
        _finish(acc, square, norm_ptr, residual_ptr, y_ptr, eps, r, n, rows, N, K)
    else:
        tile = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
        lane = tl.arange(0, RP)
        part_at = part_ptr + (tile * SK * RP + lane)[None, :] * BN + tl.arange(0, BN)[:, None]
        square_at = square_ptr + tile * SK * RP + lane
        tl.store(part_at + piece * RP * BN, acc)
        if norm_ptr is not None:
            tl.store(square_at + piece * RP, square)
        # All threads' parts are written before the one thread that counts says so.
        tl.debug_barrier()
        if tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel") == SK - 1:
            tl.store(arrived_ptr + tile, 0)
            acc = tl.zeros([BN, RP], tl.float32)
            square = tl.zeros([RP], tl.float32)
            for j in tl.static_range(SK):
                acc += tl.load(part_at + j * RP * BN, cache_modifier=".cg")
                if norm_ptr is not None:
                    square += tl.load(square_at + j * RP, cache_modifier=".cg")
            _finish(acc, square, norm_ptr, residual_ptr, y_ptr, eps, r, n, rows, N, K)
