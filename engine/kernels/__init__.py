"""Ops: the table of device operations that the model is written in, and the Plan that attention reads.

`ops_for(device)` returns the table of one device. `reference.py` is the CPU path and the definition of every op.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

BLOCK = 4


@dataclass(frozen=True, slots=True)
class Segment:
    """One row's run of positions in a step: token rows [offset, offset+length) hold positions [start, start+length)."""

    offset: int
    length: int
    start: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Blocks of BLOCK positions, of any segments, that see the same number of pages.

    `rows` [blocks * BLOCK] int64, the token row at each place (row 0 where a block reaches beyond its segment); `pages`
    [blocks * seen] int64; `future` [blocks, 1, 1, BLOCK, seen * page_size] bool, true where a place must not look.
    """

    blocks: int
    rows: Tensor
    pages: Tensor
    future: Tensor


@dataclass(frozen=True, slots=True)
class Plan:
    """Pages and positions of one step over n token rows and R segments; laid out by `make_plan`.

    `positions` [3, n] float32 (axes t, h, w); `write` [n] int64, the flat cache place (page * page_size + offset) of each
    row; `last` [R] int64, the token row that ends each segment; `page_size` in positions; `places` [n] int64, the place of
    each token row among the rows of all `groups` one after the other.
    """

    positions: Tensor
    write: Tensor
    last: Tensor
    page_size: int
    groups: tuple[AttentionGroup, ...]
    places: Tensor


def make_plan(segments: Sequence[Segment], positions: Tensor, page_size: int, device: str | torch.device) -> Plan:
    """Lay out one step over `segments`, whose token rows follow one another, with `positions` [3, n] float32.

    `page_size` is a multiple of BLOCK. Every tensor of the Plan lies on `device`. Raises ValueError when a segment has too
    few pages or the offsets leave a gap.
    """
    if page_size % BLOCK:
        raise ValueError(f"page_size must be a multiple of {BLOCK}, is {page_size}")
    write: list[int] = []
    for segment in segments:
        if segment.offset != len(write):
            raise ValueError(f"a segment starts at row {segment.offset}, must start at {len(write)}")
        if (segment.start + segment.length - 1) // page_size >= len(segment.pages):
            raise ValueError(
                f"{len(segment.pages)} pages of {page_size} can't hold {segment.start + segment.length} rows"
            )
        positions_of = range(segment.start, segment.start + segment.length)
        write.extend(segment.pages[at // page_size] * page_size + at % page_size for at in positions_of)
    groups, places = _attention_groups(segments, page_size, len(write), torch.device(device))
    return Plan(
        positions=positions.to(device),
        write=torch.tensor(write, dtype=torch.int64, device=device),
        last=torch.tensor([s.offset + s.length - 1 for s in segments], dtype=torch.int64, device=device),
        page_size=page_size,
        groups=groups,
        places=torch.tensor(places, dtype=torch.int64, device=device),
    )


def _attention_groups(
    segments: Sequence[Segment], page_size: int, rows: int, device: torch.device
) -> tuple[tuple[AttentionGroup, ...], list[int]]:
    """Group all blocks by the pages they see; returns the groups and the place of each of `rows` token rows."""
    by_seen: dict[int, list[tuple[Segment, int]]] = {}
    for segment in segments:
        for low in range(segment.start // BLOCK * BLOCK, segment.start + segment.length, BLOCK):
            by_seen.setdefault(low // page_size + 1, []).append((segment, low))
    groups, places = [], [0] * rows
    before = 0
    for seen, blocks in by_seen.items():
        picked: list[int] = []
        pages: list[int] = []
        for segment, low in blocks:
            pages += segment.pages[:seen]
            for at in range(low - segment.start, low - segment.start + BLOCK):
                inside = 0 <= at < segment.length
                picked.append(segment.offset + at if inside else 0)
                if inside:
                    places[segment.offset + at] = before + len(picked) - 1
        before += len(picked)
        starts = torch.tensor([low for _, low in blocks], device=device)
        ends = starts[:, None, None, None, None] + torch.arange(BLOCK, device=device)[:, None]
        groups.append(
            AttentionGroup(
                blocks=len(blocks),
                rows=torch.tensor(picked, dtype=torch.int64, device=device),
                pages=torch.tensor(pages, dtype=torch.int64, device=device),
                future=torch.arange(seen * page_size, device=device) > ends,
            )
        )
    return tuple(groups), places


class Ops(Protocol):
    """The device operations. All tensors lie on `device`; n counts token rows. Nothing here draws random numbers."""

    device: torch.device

    def embedding(self, table: Tensor, ids: Tensor) -> Tensor:
        """Look up `ids` [n] int64 in `table` [V, H]; returns [n, H]."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply `x` [n, K] by `weight` [M, K] transposed and add `bias` [M]; returns [n, M]."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Normalise `x` [..., H] over H in float32, round to x's dtype, then multiply by `weight`; returns [..., H].

        `weight` is [H], or [heads, H] when `x` is [n, heads, H].
        """

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """Layer norm of `x` [..., H] with `weight` [H] and `bias` [H]; returns [..., H]."""

    def silu(self, x: Tensor) -> Tensor:
        """SiLU of `x`, any shape; returns the same shape."""

    def gelu(self, x: Tensor) -> Tensor:
        """Exact (erf) GELU of `x`, any shape; returns the same shape."""

    def sigmoid(self, x: Tensor) -> Tensor:
        """Logistic function of `x`, any shape; returns the same shape."""

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """SiLU of the first half times the second half of `gate_up` [n, 2I]; returns [n, I]."""

    def rope_tables(self, angles: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine of `angles` [n, d/2] float32, duplicated to [n, d] and rounded to `dtype`."""

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate `x` [n, heads, d] by halves with tables [n, d]; returns [n, heads, d]."""

    def write_kv(self, cache: Tensor, rows: Tensor, where: Tensor) -> None:
        """Store `rows` [n, Hkv, d] at flat places `where` [n] int64 of `cache` [pages, page_size, Hkv, d]."""

    def paged_attention(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: Plan) -> Tensor:
        """Causal attention of `q` [n, Hq, d] over caches [pages, page_size, Hkv, d], each row within its segment.

        Scale d**-0.5. The rows' own keys and values are already in the cache. Returns [n, Hq * d].
        """

    def attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Attention of `q` [B, T, Hq, d] over `k`, `v` [B, L, Hkv, d], scale d**-0.5; returns [B, T, Hq * d].

        `mask` is [T, L] or [B, T, L] bool, true where visible; None is everything.
        """

    def route(self, logits: Tensor, top_k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
        """Softmax over `logits` [n, E] in float32 and the `top_k` largest, ties to the lowest expert.

        Returns weights [n, top_k] in the logits' dtype (summing to 1 when `renormalise`) and ids [n, top_k] int64.
        """

    def experts(self, x: Tensor, weights: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        """Weighted sum of SwiGLU experts: `x` [n, H], `weights` and `ids` [n, k], `gate_up` [E, 2I, H], `down` [E, H, I].

        The sum over the k ranks is in float32 with one rounding; returns [n, H].
        """

    def conv1d(self, x: Tensor, weight: Tensor, bias: Tensor, dilation: int = 1, groups: int = 1) -> Tensor:
        """Valid (unpadded) convolution of `x` [1, C, L] with `weight` [D, C/groups, k]; returns [1, D, L-(k-1)*dilation]."""

    def conv_transpose1d(self, x: Tensor, weight: Tensor, bias: Tensor, stride: int) -> Tensor:
        """Uncropped transposed convolution of `x` [1, C, L] with `weight` [C, D, k]; returns [1, D, (L-1)*stride+k]."""

    def conv2d(self, x: Tensor, weight: Tensor, bias: Tensor, stride: int, padding: int) -> Tensor:
        """Convolution of one image `x` [1, C, A, B] with `weight` [D, C, k, k]; returns [1, D, A', B']."""

    def snake(self, x: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
        """SnakeBeta of `x` [1, C, L] with per-channel log-parameters `alpha`, `beta` [C]; returns [1, C, L]."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum `x`, any shape, over the ranks that share a layer; itself when there is one rank."""


def ops_for(device: str | torch.device) -> Ops:
    """Return the Ops of a device (no tensors involved). Raises ValueError for a device without one."""
    from engine.kernels.reference import ReferenceOps

    kind = torch.device(device)
    if kind.type == "cpu":
        return ReferenceOps(kind)
    raise ValueError(f"no operations for device {kind.type!r}: use --device cpu")
