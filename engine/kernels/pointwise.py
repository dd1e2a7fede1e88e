"""The small kernels around the products: norm, rope tables, embedding rows, SwiGLU, and the greedy choice."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels import MEDIA
from engine.kernels.scratch import Scratch

SILU_BLOCK = 1024
ARGMAX_BLOCK = 2048


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, pdl: bool) -> Tensor:
    """RMS norm of `x` [n, H] in float32, rounded to x's dtype, times `weight` [H]; returns [n, H]."""
    rows, width = x.shape
    assert weight.shape == (width,) and x.is_contiguous(), (x.shape, weight.shape)
    out = torch.empty_like(x)
    padded = triton.next_power_of_2(width)
    _rms_norm_kernel[(rows,)](
        *(x, weight, out, eps),
        H=width,
        HP=padded,
        PDL=pdl,
        num_warps=4 if padded <= 4096 else 8,
        launch_pdl=pdl,
    )
    return out


def rope_tables(
    positions: Tensor, axes: Tensor, frequencies: Tensor, dtype: torch.dtype, *, pdl: bool
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each channel's angle, `positions[axes[c], row] * frequencies[c]`; each [n, d] in `dtype`.

    `positions` [3, n] float32; `axes` [d/2] integer, which row of `positions` a channel turns with; `frequencies` [d/2]
    float32. The second half of d repeats the first.
    """
    rows, half = positions.shape[1], frequencies.shape[0]
    assert axes.shape == (half,) and positions.is_contiguous(), (axes.shape, positions.shape)
    cos, sin = torch.empty(2, rows, 2 * half, dtype=dtype, device=positions.device)
    _rope_kernel[(rows,)](
        *(positions, axes, frequencies, cos, sin, rows),
        HALF=half,
        HALFP=triton.next_power_of_2(half),
        PDL=pdl,
        num_warps=1,
        launch_pdl=pdl,
    )
    return cos, sin


def embed_rows(table: Tensor, ids: Tensor, slots: Tensor, media: Tensor | None, *, pdl: bool) -> Tensor:
    """The embedding of each row's id; returns [n, H] in the dtype of `table` [V, H].

    `ids` [n] int32: an id >= 0 is a token; MEDIA is the row of `media` [n, H] with the same number (zeros where `media` is
    None); another id < 0 is the token in `slots` [S] int64 at -1 - id.
    """
    rows, width = ids.shape[0], table.shape[1]
    assert media is None or (media.shape == (rows, width) and media.dtype == table.dtype and media.is_contiguous())
    out = torch.empty(rows, width, dtype=table.dtype, device=table.device)
    _embed_kernel[(rows,)](
        *(table, ids, slots, media, out),
        H=width,
        HP=triton.next_power_of_2(width),
        MEDIA=MEDIA,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    return out


def silu_mul(gate_up: Tensor, *, pdl: bool) -> Tensor:
    """SiLU of the first half times the second half of `gate_up` [n, 2I], in float32, rounded once; returns [n, I]."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.is_contiguous(), gate_up.stride()
    out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    _silu_mul_kernel[(rows, triton.cdiv(width, SILU_BLOCK))](
        *(gate_up, out), INTER=width, BLOCK=SILU_BLOCK, PDL=pdl, num_warps=4, launch_pdl=pdl
    )
    return out


def argmax_slots(logits: Tensor, slots: Tensor, tokens: Tensor, *, scratch: Scratch, pdl: bool) -> Tensor:
    """The id of the largest of each row of `logits` [n, V] float32, ties to the lowest id; returns [n] int64.

    Writes it to `tokens` [S] int64 at `slots` [n] int32 too, but not for a padded row (slot -1). NaN counts as -inf, so that
    the id is always one of the vocabulary.
    """
    rows, vocab = logits.shape
    assert logits.dtype == torch.float32 and logits.is_contiguous(), (logits.dtype, logits.stride())
    chosen = torch.empty(rows, dtype=torch.int64, device=logits.device)
    blocks = triton.cdiv(vocab, ARGMAX_BLOCK)
    # Each at a whole 16 bytes whatever the rows, for which a kernel of its own would be compiled otherwise.
    best, where = scratch.floats(2 * (-(-rows * blocks // 4) * 4)).view(2, -1)
    _argmax_kernel[(rows, blocks)](
        *(logits, slots, tokens, chosen, best, where.view(torch.int32), scratch.counters(rows), vocab),
        BLOCKS=blocks,
        BLOCKSP=triton.next_power_of_2(blocks),
        BLOCK=ARGMAX_BLOCK,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    return chosen


@triton.jit  # type: ignore[untyped-decorator]
def _rms_norm_kernel(x_ptr, w_ptr, y_ptr, eps, H: tl.constexpr, HP: tl.constexpr, PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, HP)
    ok = h < H
    w = tl.load(w_ptr + h, mask=ok, other=0.0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(x_ptr + row * H + h, mask=ok, other=0.0)
    wide = x.to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / H + eps)
    # Rounded before the weight comes in, as the definition does.
    y = wide.to(x.dtype).to(tl.float32) * w.to(tl.float32)
    tl.store(y_ptr + row * H + h, y.to(x.dtype), mask=ok)


# `rows` is not specialised, so that no number of rows compiles a kernel of its own.
@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def _rope_kernel(  # type: ignore[no-untyped-def]
    positions_ptr, axes_ptr, frequencies_ptr, cos_ptr, sin_ptr, rows,
    HALF: tl.constexpr, HALFP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, HALFP)
    ok = c < HALF
    axis = tl.load(axes_ptr + c, mask=ok, other=0)
    frequency = tl.load(frequencies_ptr + c, mask=ok, other=0.0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    angle = tl.load(positions_ptr + axis * rows + row, mask=ok, other=0.0) * frequency
    at = row * 2 * HALF + c
    cos = tl.cos(angle).to(cos_ptr.dtype.element_ty)
    sin = tl.sin(angle).to(sin_ptr.dtype.element_ty)
    tl.store(cos_ptr + at, cos, mask=ok)
    tl.store(cos_ptr + at + HALF, cos, mask=ok)
    tl.store(sin_ptr + at, sin, mask=ok)
    tl.store(sin_ptr + at + HALF, sin, mask=ok)


@triton.jit  # type: ignore[untyped-decorator]
def _embed_kernel(  # type: ignore[no-untyped-def]
    table_ptr, ids_ptr, slots_ptr, media_ptr, y_ptr,
    H: tl.constexpr, HP: tl.constexpr, MEDIA: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, HP)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    given = tl.load(ids_ptr + row)
    in_slot = (given < 0) & (given > MEDIA)
    token = tl.load(slots_ptr + (-1 - given), mask=in_slot, other=0)
    token = tl.where(in_slot, token, given.to(tl.int64))
    # How much of the row the table gives: all or nothing.
    looked_up = tl.where(given > MEDIA, H, 0)
    y = tl.load(table_ptr + token * H + h, mask=h < looked_up, other=0.0)
    if media_ptr is not None:
        y = tl.where(h < looked_up, y, tl.load(media_ptr + row * H + h, mask=h < H - looked_up, other=0.0))
    tl.store(y_ptr + row * H + h, y, mask=h < H)


@triton.jit  # type: ignore[untyped-decorator]
def _silu_mul_kernel(gate_up_ptr, y_ptr, INTER: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = i < INTER
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    gate = tl.load(gate_up_ptr + row * 2 * INTER + i, mask=ok, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * INTER + INTER + i, mask=ok, other=0.0).to(tl.float32)
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(y_ptr + row * INTER + i, y.to(y_ptr.dtype.element_ty), mask=ok)


@triton.jit  # type: ignore[untyped-decorator]
def _argmax_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, slots_ptr, tokens_ptr, chosen_ptr, best_ptr, where_ptr, arrived_ptr, V,
    BLOCKS: tl.constexpr, BLOCKSP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One block of a row's vocabulary a program; the last to arrive picks the best block, the lowest among equals."""
    row = tl.program_id(0)
    block = tl.program_id(1)
    v = block * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    a = tl.load(logits_ptr + row.to(tl.int64) * V + v, mask=v < V, other=-float("inf"))
    a = tl.where(a == a, a, -float("inf"))
    largest, place = tl.max(a, 0, return_indices=True)
    tl.store(best_ptr + row * BLOCKS + block, largest)
    tl.store(where_ptr + row * BLOCKS + block, block * BLOCK + place)
    tl.debug_barrier()
    if tl.atomic_add(arrived_ptr + row, 1, sem="acq_rel") == BLOCKS - 1:
        tl.store(arrived_ptr + row, 0)
        b = tl.arange(0, BLOCKSP)
        all_best = tl.load(best_ptr + row * BLOCKS + b, mask=b < BLOCKS, other=-float("inf"), cache_modifier=".cg")
        winner = tl.argmax(all_best, 0)
        token = tl.load(where_ptr + row * BLOCKS + winner, cache_modifier=".cg").to(tl.int64)
        tl.store(chosen_ptr + row, token)
        slot = tl.load(slots_ptr + row)
        tl.store(tokens_ptr + slot, token, mask=slot >= 0)
