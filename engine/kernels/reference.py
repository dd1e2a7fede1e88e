"""Plain torch: the CPU path and the definition of every op.

A request must give the same bits alone, in company and on any boot. Two rules bring that about:

- every matrix product has the bits of products of exactly BLOCK rows, the last ones padded with zeros: with a fixed row count,
  a row's bits depend neither on its place nor on its neighbours (a library picks its kernel, hence its summing order, by
  shape). More float32 rows go into one product where a trial has shown that they get the same bits. Widths are multiples of
  4, as the architecture's are: a library may treat other rows by where they lie in memory;
- a function of the exp/sin family runs over a multiple of LANES elements: torch's vector loop leaves a tail to scalar code
  whose last bit can differ, and where that tail falls depends on how many rows came along. Where torch has several threads,
  it runs over PIECE elements at most, which are not shared out among them, since each thread's share has a tail of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels import BLOCK, MEDIA, Attend, HostCopy, Ints, Plan, Routed, Segment, blocks
from engine.kernels.blocks import AttentionGroup, BlockLayout

LANES = 64
PIECE = 16384
# The most rows that one product takes.
MOST_ROWS = 64

Runs = Sequence[tuple[int, int]]
"""Rows that follow one another: an expert and how many of them, padding included, are its own."""


@cache
def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros of `shape`, the same tensor on every call: to join them to others takes less time than torch's own padding."""
    with torch.inference_mode(False):
        return torch.zeros(shape, dtype=dtype, device=device)


def _pointwise(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    count = x.numel()
    alone = count <= PIECE or torch.get_num_threads() == 1
    if count % LANES == 0 and alone:
        return function(x.contiguous())
    flat = torch.cat((x.reshape(-1), _zeros((-count % LANES,), x.dtype, x.device)))
    if not alone:
        return torch.cat([function(piece) for piece in torch.split(flat, PIECE)])[:count].view(x.shape)
    return function(flat)[:count].view(x.shape)


def _padded(x: Tensor) -> Tensor:
    """`x` [n, K] with zero rows behind it, up to a multiple of BLOCK: [n or more, K]."""
    short = -x.shape[0] % BLOCK
    return torch.cat((x, _zeros((short, x.shape[1]), x.dtype, x.device))) if short else x.contiguous()


@cache
def _exact(rows: int, shape: tuple[int, int], strides: tuple[int, int], threads: int) -> bool:
    """Whether a float32 product of so many rows gives each the bits of a product of BLOCK rows, as tried on random numbers.

    `shape` and `strides` are the weight's; `threads` is what torch has, as a library shares a product out among them.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, shape[1], generator=generator)
    weight = torch.empty_strided(shape, strides).copy_(torch.randn(shape, generator=generator))
    return torch.equal(F.linear(x, weight), _by_block(x, weight))


def _by_block(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply `x` [n, K], n a multiple of BLOCK, by `weight` [M, K] transposed, BLOCK rows at a time; returns [n, M]."""
    return torch.cat([F.linear(block, weight) for block in torch.split(x, BLOCK)])


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """What `_by_block` gives, bit for bit, in as few products as that allows: of `x` [n, K] and `weight` [M, K]; [n, M]."""
    rows = x.shape[0]
    if rows == BLOCK:
        return F.linear(x, weight)
    if rows > MOST_ROWS:
        return torch.cat([_product(part, weight) for part in torch.split(x, MOST_ROWS)])
    # Rounded to bfloat16, nearly all outputs of another summing order look alike, and a trial proves nothing.
    if x.dtype == torch.float32 and _exact(rows, weight.shape, weight.stride(), torch.get_num_threads()):
        return F.linear(x, weight)
    return _by_block(x, weight)


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in `dtype`, any shape. Of what is left as it is, torch makes nothing new, but takes as long as for a sum."""
    return x if x.dtype == dtype else x.to(dtype)


@cache
def _number(value: float) -> Tensor:
    """`value` as a float32 tensor without dimensions, the same one on every call: else torch makes one for each call."""
    with torch.inference_mode(False):
        return torch.tensor(value, dtype=torch.float32)


@dataclass(frozen=True, slots=True)
class _Here:
    """Values that are on the host already."""

    values: npt.NDArray[Any]

    def wait(self) -> npt.NDArray[Any]:
        """Return them, in the shape they came in."""
        return self.values


class ReferenceOps:
    """The Ops of a CPU. Every method is as declared in `engine.kernels.Ops`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.counters: dict[str, int] = {}
        self._experts: dict[tuple[int, torch.Size, tuple[int, ...]], tuple[Tensor, ...]] = {}

    def put(self, values: npt.NDArray[Any]) -> Tensor:
        """`values`, any shape, as a tensor of their own."""
        return torch.from_numpy(np.array(values))

    def fetch(self, values: Tensor) -> HostCopy:
        """`values`, any shape, as an array of their own."""
        return _Here(values.numpy().copy())

    def upload(self, plan: Plan, *, prompts: bool = False) -> Plan:
        """The plan as it is: every tensor keeps its shape."""
        return plan

    def lay_out(self, segments: Sequence[Segment], page_size: int) -> BlockLayout:
        """Blocks of absolute positions, grouped by the pages that they see (no tensors in)."""
        return blocks.lay_out(segments, page_size, self.device)

    def move_on(self, layout: object, pages: Ints, before: Ints, starts: Ints, page_size: int) -> BlockLayout:
        """The layout of decode rows, from `before` [R] to `starts` [R] on `pages` [R, most]."""
        assert isinstance(layout, BlockLayout)
        return blocks.move_on(layout, pages, before, starts, page_size, self.device)

    def embedding(self, table: Tensor, ids: Tensor) -> Tensor:
        """Look up `ids` [n] in `table` [V, H]; returns [n, H]."""
        return table.index_select(0, ids)

    def embed_rows(self, table: Tensor, ids: Tensor, slots: Tensor, media: Tensor | None) -> Tensor:
        """Rows [n, H] of `ids` [n]: of `table` [V, H], through `slots` [S], or of `media` [n, H]."""
        wide = ids.long()
        left = slots.index_select(0, (-1 - wide).clamp_(0, slots.shape[0] - 1))
        rows = table.index_select(0, torch.where(wide < 0, left, wide))
        return rows if media is None else torch.where((wide == MEDIA)[:, None], media.to(rows.dtype), rows)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Blocked product of `x` [n, K] and `weight` [M, K] transposed, plus `bias` [M]; returns [n, M]."""
        out = _product(_padded(x), weight)[: x.shape[0]]
        return out if bias is None else out + bias

    def linear_float(self, x: Tensor, weight: Tensor) -> Tensor:
        """Blocked product of `x` [n, K] and `weight` [M, K] transposed, as float32 [n, M]."""
        return self.linear(x, weight).float()

    def linear_add(self, x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
        """`residual` [n, M] plus the blocked product of `x` [n, K] and `weight` [M, K] transposed; returns [n, M]."""
        return residual + self.linear(x, weight)

    def norm_linear(self, x: Tensor, norm: Tensor, eps: float, weight: Tensor) -> Tensor:
        """Blocked product of the normalised rows of `x` [n, K] and `weight` [M, K] transposed; returns [n, M]."""
        return self.linear(self.rms_norm(x, norm, eps), weight)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMS norm of `x` [..., H] with `weight` [H] or [heads, H]; returns [..., H]."""
        wide = x.float()
        if x.is_cpu:
            # The mean of the squares plus eps, with the bits and in half the time of torch's `mean` and `add`.
            total = (wide * wide).sum(-1, keepdim=True)
            scale = torch.addcdiv(_number(eps), total, _number(x.shape[-1])).rsqrt_()
        else:
            scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        return _cast(wide * scale, x.dtype) * weight

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """Layer norm of `x` [..., H]; returns [..., H]."""
        return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)

    def silu(self, x: Tensor) -> Tensor:
        """SiLU of `x`, any shape; returns the same shape."""
        return _pointwise(F.silu, x)

    def gelu(self, x: Tensor) -> Tensor:
        """Exact GELU of `x`, any shape; returns the same shape."""
        return _pointwise(F.gelu, x)

    def sigmoid(self, x: Tensor) -> Tensor:
        """Logistic function of `x`, any shape; returns the same shape."""
        return _pointwise(torch.sigmoid, x)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """SiLU of the first half times the second half of `gate_up` [n, 2I]; returns [n, I]."""
        half = gate_up.shape[-1] // 2
        if gate_up.is_cpu and gate_up.numel() <= PIECE:
            # A few values too many take less time than a copy of the half that is wanted.
            return self.silu(gate_up)[..., :half] * gate_up[..., half:]
        gate, up = gate_up.chunk(2, dim=-1)
        return self.silu(gate) * up

    def rope_tables(self, angles: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine of `angles` [n, d/2] float32, duplicated to [n, d] in `dtype`."""
        twice = torch.cat([angles, angles], dim=-1)
        return _pointwise(torch.cos, twice).to(dtype), _pointwise(torch.sin, twice).to(dtype)

    def axis_tables(
        self, positions: Tensor, axes: Tensor, frequencies: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Tables [n, d] of `positions` [3, n] whose channels turn by `axes` [d/2] at `frequencies` [d/2]."""
        return self.rope_tables(positions.index_select(0, axes).t() * frequencies, dtype)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate `x` [n, heads, d] by halves with tables [n, d]; returns [n, heads, d]."""
        left, right = x.chunk(2, dim=-1)
        return x * cos.unsqueeze(1) + torch.cat([-right, left], dim=-1) * sin.unsqueeze(1)

    def write_kv(self, cache: Tensor, rows: Tensor, where: Tensor) -> None:
        """Store `rows` [n, Hkv, d] at flat places `where` [n] of `cache` [pages, page_size, Hkv, d]."""
        cache.flatten(0, 1).index_copy_(0, where, rows)

    def paged_attention(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: Plan) -> Tensor:
        """Causal attention of `q` [n, Hq, d] over caches [pages, page_size, Hkv, d]; returns [n, Hq * d].

        Queries go in blocks of BLOCK absolute positions against all pages up to their own, so a position's bits are those
        of the same position in any other split of its sequence into passes.
        """
        layout = plan.layout
        assert isinstance(layout, BlockLayout)
        parts = [self._group_attention(q, k_cache, v_cache, group) for group in layout.groups]
        joined = parts[0] if len(parts) == 1 else torch.cat(parts)
        return joined.index_select(0, layout.places)

    def _group_attention(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, group: AttentionGroup) -> Tensor:
        """Attend from a group's places over its pages; returns [blocks * BLOCK, Hq * d]."""
        kv_heads, dim = k_cache.shape[2:]
        queries = q.index_select(0, group.rows).view(group.blocks, BLOCK, -1, dim)
        keys, values = (
            cache.index_select(0, group.pages).view(group.blocks, -1, kv_heads, dim) for cache in (k_cache, v_cache)
        )
        return self.attention(queries, keys, values, group.mask).flatten(0, 1)

    def self_attention(self, qkv: Tensor, at: Attend, k_cache: Tensor, v_cache: Tensor, plan: Plan) -> Tensor:
        """Norm, rotate, store and attend over `qkv` [n, (Hq + 2 Hkv) d]; returns [n, Hq * d]."""
        turned, dim = at.qk_norm.shape
        rows = qkv.view(qkv.shape[0], -1, dim)
        qk = self.rotate(self.rms_norm(rows[:, :turned], at.qk_norm, at.eps), at.cos, at.sin)
        self.write_kv(k_cache, qk[:, at.heads :], plan.write)
        self.write_kv(v_cache, rows[:, turned:], plan.write)
        return self.paged_attention(qk[:, : at.heads], k_cache, v_cache, plan)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Attention of `q` [B, T, Hq, d] over `k`, `v` [B, L, Hkv, d]; returns [B, T, Hq * d]."""
        if q.is_cpu and q.dtype == torch.float32:
            return _fused_attention(q, k, v, mask)
        batch, count, heads, dim = q.shape
        length, groups = k.shape[1], k.shape[2]
        share = heads // groups
        queries = q.view(batch, count, groups, share, dim).permute(0, 2, 3, 1, 4).reshape(-1, share * count, dim)
        # One layout whatever the batch (a reshape copies for some and not for others): a product's bits may follow strides.
        queries = queries.contiguous()
        keys = k.permute(0, 2, 3, 1).contiguous().view(-1, dim, length)
        values = v.permute(0, 2, 1, 3).contiguous().view(-1, length, dim)
        scores = (torch.bmm(queries, keys) * dim**-0.5).view(batch, groups, share, count, length)
        if mask is not None:
            shape = (1, 1, 1, count, length) if mask.dim() == 2 else (batch, 1, 1, count, length)
            scores = scores + mask.view(shape)
        weights = scores.float().softmax(-1).to(q.dtype).view(-1, share * count, length)
        mixed = torch.bmm(weights, values).view(batch, groups, share, count, dim)
        return mixed.permute(0, 3, 1, 2, 4).reshape(batch, count, heads * dim)

    def route(self, logits: Tensor, top_k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
        """Softmax and `top_k` largest of `logits` [n, E]; returns weights [n, top_k] and ids [n, top_k]."""
        # A stable descending sort, since torch.topk leaves the order of equal values open.
        weights, ids = logits.float().softmax(-1).sort(dim=-1, descending=True, stable=True)
        weights, ids = weights[:, :top_k], ids[:, :top_k]
        if renormalise:
            weights = weights / weights.sum(-1, keepdim=True)
        return _cast(weights, logits.dtype), ids

    def add_experts(self, x: Tensor, routed: Routed, plan: Plan) -> Tensor:
        """`x` [n, H] plus its experts; returns [n, H]."""
        rows = self.rms_norm(x, routed.norm, routed.eps)
        weights, ids = self.route(self.linear(rows, routed.router), routed.top_k, routed.renormalise)
        return x + self.experts(rows, weights, ids, routed.gate_up, routed.down)

    def experts(self, x: Tensor, weights: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        """Weighted sum of SwiGLU experts over `x` [n, H]; returns [n, H]."""
        n, top_k = ids.shape
        picked = self._few(x, ids, gate_up, down) if n <= BLOCK else self._many(x, ids, gate_up, down)
        ranked = picked.view(n, top_k, -1) * weights.unsqueeze(-1)
        return _cast(_cast(ranked, torch.float32).sum(1), x.dtype)

    def _few(self, x: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        """What the experts `ids` [n, k] make of their rows `x` [n, H] of one block; returns [n * k, H].

        Each expert that a row has chosen runs over all of them, which sorts nothing and moves no bit.
        """
        block, pairs = _padded(x), ids.tolist()
        chosen = list(dict.fromkeys(chain.from_iterable(pairs)))
        wide, narrow = self._each(gate_up), self._each(down)
        hidden = self.silu_mul(torch.cat([torch.mm(block, wide[expert]) for expert in chosen]))
        parts = zip(hidden.view(-1, BLOCK, down.shape[2]).unbind(), chosen, strict=True)
        made = torch.cat([torch.mm(part, narrow[expert]) for part, expert in parts])
        if len(pairs) == 1:
            return made[::BLOCK]
        places = [chosen.index(expert) * BLOCK + row for row, experts in enumerate(pairs) for expert in experts]
        return made.index_select(0, torch.tensor(places))

    def _each(self, weights: Tensor) -> tuple[Tensor, ...]:
        """The matrices of `weights` [E, M, K], each [K, M]. They are kept, so that no other tensor can come to lie there."""
        key = weights.data_ptr(), weights.shape, weights.stride()
        if key not in self._experts:
            self._experts[key] = weights.transpose(1, 2).unbind()
        return self._experts[key]

    def _many(self, x: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        """What the experts `ids` [n, k] make of their rows `x` [n, H], in blocks of an expert's rows; returns [n * k, H]."""
        rows, places, runs = _by_expert(ids, gate_up.shape[0])
        hidden = self.silu_mul(_expert_products(x.index_select(0, rows), runs, gate_up))
        return _expert_products(hidden, runs, down).index_select(0, places)

    def conv1d(self, x: Tensor, weight: Tensor, bias: Tensor, dilation: int = 1, groups: int = 1) -> Tensor:
        """Valid convolution of `x` [1, C, L]; returns [1, D, L-(k-1)*dilation]."""
        if dilation == 1 or groups > 1:
            return F.conv1d(x, weight, bias, dilation=dilation, groups=groups)
        # torch's dilated convolution takes three to four times as long as this product (measured, 2 to 16 channels).
        (_, channels, length), (outputs, _, width) = x.shape, weight.shape
        length -= (width - 1) * dilation
        x = x.contiguous()
        taps = x.as_strided((channels, width, length), (x.stride(1), dilation, 1)).reshape(channels * width, length)
        return torch.addmm(bias[:, None], weight.view(outputs, -1), taps)[None]

    def conv_transpose1d(self, x: Tensor, weight: Tensor, bias: Tensor, stride: int) -> Tensor:
        """Uncropped transposed convolution of `x` [1, C, L]; returns [1, D, (L-1)*stride+k]."""
        return F.conv_transpose1d(x, weight, bias, stride=stride)

    def conv2d(self, x: Tensor, weight: Tensor, bias: Tensor, stride: int, padding: int) -> Tensor:
        """Convolution of one image `x` [1, C, A, B]; returns [1, D, A', B']."""
        return F.conv2d(x, weight, bias, stride=stride, padding=padding)

    def snake(self, x: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
        """SnakeBeta of `x` [1, C, L] with `alpha`, `beta` [C]; returns [1, C, L]."""
        wave = _pointwise(torch.sin, x * alpha.exp()[None, :, None])
        return x + wave.square() / (beta.exp()[None, :, None] + 1e-9)

    def argmax(self, logits: Tensor) -> Tensor:
        """The first largest place of each row of `logits` [n, V]; returns [n]."""
        return logits.argmax(-1)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return `x`, any shape, unchanged: a CPU engine has one rank."""
        return x


def _fused_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attention of `q` [B, T, Hq, d] over `k`, `v` [B, L, Hkv, d], `mask` [T, L] or [B, T, L], as one call of torch's.

    Returns [B, T, Hq * d]. torch works on each sequence and head by itself, so that their number moves no bit: with BLOCK rows
    or more. Of fewer, where each of several threads keeps its scores would depend on their number, and by that their bits.
    """
    count = q.shape[1]
    if count < BLOCK:
        q = torch.cat((q, q[:, :1].expand(-1, BLOCK - count, -1, -1)), dim=1)
        if mask is not None:
            first = mask[..., :1, :]
            mask = torch.cat((mask, first.expand(*mask.shape[:-2], BLOCK - count, -1)), dim=-2)
    if mask is not None and mask.dim() == 3:
        mask = mask.unsqueeze(1)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)
    return mixed[:, :count].flatten(2)


def _expert_products(x: Tensor, runs: Runs, weights: Tensor) -> Tensor:
    """Multiply `x` [n, K], in the order of `runs`, by `weights` [E, M, K] transposed; returns [n, M].

    The weights of an expert are read where they lie: a copy of them takes longer than the product.
    """
    parts = torch.split(x, [rows for _, rows in runs])
    return torch.cat([_product(part, weights[expert]) for part, (expert, _) in zip(parts, runs, strict=True)])


def _by_expert(ids: Tensor, experts: int) -> tuple[Tensor, Tensor, Runs]:
    """Lay the pairs of `ids` [n, k] out by expert, with places added until each expert's are a multiple of BLOCK.

    Returns the row at each place [places], row 0 where no pair lies; the place of each pair [n * k], both int64; and the
    places as runs.
    """
    flat = ids.flatten().numpy()
    counts = np.bincount(flat, minlength=experts)
    padded = -(-counts // BLOCK) * BLOCK
    # How far an expert's pairs move on for what was added before them.
    shift = padded.cumsum() - padded - (counts.cumsum() - counts)
    places = np.empty_like(flat)
    places[flat.argsort(kind="stable")] = np.arange(len(flat)) + shift.repeat(counts)
    rows = np.zeros(padded.sum(), dtype=np.int64)
    rows[places] = np.arange(len(flat)) // ids.shape[1]
    runs = [(expert, count) for expert, count in enumerate(padded.tolist()) if count]
    return torch.from_numpy(rows), torch.from_numpy(places), runs
