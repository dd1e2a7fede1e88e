"""Plain torch: the CPU path and the definition of every op.

A request must give the same bits alone, in company and on any boot. Two rules bring that about:

- every matrix product runs in blocks of exactly BLOCK rows, the last one padded with zeros: with a fixed row count, a row's
  bits depend neither on its place nor on its neighbours (a library picks its kernel, hence its summing order, by shape);
- a function of the exp/sin family runs over a multiple of LANES elements: torch's vector loop leaves a tail to scalar code
  whose last bit can differ, and where that tail falls depends on how many rows came along. It runs over PIECE elements at
  most, which torch does not share out among threads, since each thread's share has a tail of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
PAIRS_ALONE = 16


def _pointwise(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    count = x.numel()
    if count % LANES == 0 and count <= PIECE:
        return function(x.contiguous())
    flat = F.pad(x.reshape(-1), (0, -count % LANES))
    if count > PIECE:
        return torch.cat([function(piece) for piece in torch.split(flat, PIECE)])[:count].view(x.shape)
    return function(flat)[:count].view(x.shape)


def _blocks(x: Tensor) -> Tensor:
    """Pad `x` [n, K] with zero rows and view it as [ceil(n/BLOCK), BLOCK, K]."""
    n, width = x.shape
    short = -n % BLOCK
    padded = F.pad(x, (0, 0, 0, short)) if short else x.contiguous()
    return padded.view(-1, BLOCK, width)


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
        rows = table.index_select(0, torch.where(wide < 0, slots[(-1 - wide).clamp(0, len(slots) - 1)], wide))
        return rows if media is None else torch.where((wide == MEDIA)[:, None], media.to(rows.dtype), rows)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Blocked product of `x` [n, K] and `weight` [M, K] transposed, plus `bias` [M]; returns [n, M]."""
        n = x.shape[0]
        padded = _blocks(x)
        out = torch.bmm(padded, weight.t().expand(padded.shape[0], -1, -1)).view(-1, weight.shape[0])[:n]
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
        scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        return (wide * scale).to(x.dtype) * weight

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
        return x * cos[:, None] + torch.cat([-right, left], dim=-1) * sin[:, None]

    def write_kv(self, cache: Tensor, rows: Tensor, where: Tensor) -> None:
        """Store `rows` [n, Hkv, d] at flat places `where` [n] of `cache` [pages, page_size, Hkv, d]."""
        cache.view(-1, *cache.shape[2:]).index_copy_(0, where, rows)

    def paged_attention(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: Plan) -> Tensor:
        """Causal attention of `q` [n, Hq, d] over caches [pages, page_size, Hkv, d]; returns [n, Hq * d].

        Queries go in blocks of BLOCK absolute positions against all pages up to their own, so a position's bits are those
        of the same position in any other split of its sequence into passes.
        """
        layout = plan.layout
        assert isinstance(layout, BlockLayout)
        parts = [_group_attention(q, k_cache, v_cache, group) for group in layout.groups]
        joined = parts[0] if len(parts) == 1 else torch.cat(parts)
        return joined.index_select(0, layout.places)

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
            scores = scores.masked_fill(~mask.view(shape), float("-inf"))
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
        return weights.to(logits.dtype), ids

    def add_experts(self, x: Tensor, routed: Routed, plan: Plan) -> Tensor:
        """`x` [n, H] plus its experts; returns [n, H]."""
        rows = self.rms_norm(x, routed.norm, routed.eps)
        weights, ids = self.route(self.linear(rows, routed.router), routed.top_k, routed.renormalise)
        return x + self.experts(rows, weights, ids, routed.gate_up, routed.down)

    def experts(self, x: Tensor, weights: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        """Weighted sum of SwiGLU experts over `x` [n, H]; returns [n, H]."""
        n, top_k = ids.shape
        if n * top_k <= PAIRS_ALONE:
            # A block for each pair: every place of it holds the same row. No sorting, and the bits are the same.
            experts = ids.reshape(-1)
            blocks = x[:, None, None].expand(n, top_k, BLOCK, -1).reshape(n * top_k, BLOCK, -1)
            picked = self._swiglu(blocks, experts, gate_up, down)[:, 0]
        else:
            pair_rows, experts = _expert_blocks(ids, gate_up.shape[0])
            padded = x.new_zeros(experts.shape[0] * BLOCK, x.shape[1])
            padded.index_copy_(0, pair_rows, x.repeat_interleave(top_k, dim=0))
            out = self._swiglu(padded.view(-1, BLOCK, x.shape[1]), experts, gate_up, down)
            picked = out.view(-1, x.shape[1]).index_select(0, pair_rows)
        ranked = picked.view(n, top_k, -1) * weights[:, :, None]
        first, *others = ranked.unbind(1)
        total = first.float()
        for other in others:
            total = total + other
        return total.to(x.dtype)

    def _swiglu(self, blocks: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        """Run each of `blocks` [b, BLOCK, H] through its expert of `experts` [b]; returns [b, BLOCK, H]."""
        hidden = torch.bmm(blocks, gate_up.index_select(0, experts).transpose(1, 2))
        return torch.bmm(self.silu_mul(hidden), down.index_select(0, experts).transpose(1, 2))

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


def _group_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, group: AttentionGroup) -> Tensor:
    """Attend from a group's places over its pages; returns [blocks * BLOCK, Hq * d].

    Keys and values are copied to one layout whatever the number of blocks, as a product's bits may follow its strides.
    """
    _, heads, dim = q.shape
    kv_heads = k_cache.shape[2]
    blocks, share, seen = group.blocks, heads // kv_heads, group.future.shape[-1]
    queries = q.index_select(0, group.rows).view(blocks, BLOCK, kv_heads, share, dim)
    queries = queries.permute(0, 2, 3, 1, 4).reshape(-1, share * BLOCK, dim)
    keys, values = (
        cache.index_select(0, group.pages).view(blocks, seen, kv_heads, dim).transpose(1, 2).reshape(-1, seen, dim)
        for cache in (k_cache, v_cache)
    )
    scores = torch.bmm(queries, keys.transpose(1, 2)).mul_(dim**-0.5).view(blocks, kv_heads, share, BLOCK, seen)
    weights = scores.masked_fill_(group.future, float("-inf")).softmax(-1, dtype=torch.float32).to(q.dtype)
    mixed = torch.bmm(weights.view(-1, share * BLOCK, seen), values).view(blocks, kv_heads, share, BLOCK, dim)
    return mixed.permute(0, 3, 1, 2, 4).reshape(blocks * BLOCK, heads * dim)


def _expert_blocks(ids: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Lay the pairs of `ids` [n, k] out in blocks of BLOCK rows that share an expert.

    Returns the padded row of each pair [n*k] and the expert of each block [blocks], both int64.
    """
    flat = ids.reshape(-1)
    counts = torch.bincount(flat, minlength=experts)
    block_counts = (counts + BLOCK - 1) // BLOCK
    first_row = (block_counts.cumsum(0) - block_counts) * BLOCK
    order = flat.argsort(stable=True)
    before = counts.cumsum(0) - counts
    rank = torch.empty_like(flat)
    rank[order] = torch.arange(flat.numel())
    rows = first_row[flat] + rank - before[flat]
    return rows, torch.arange(experts).repeat_interleave(block_counts)
