"""Ops: the table of device operations that the model is written in, and the Plan that attention reads.

`ops_for(device)` returns the table of one device. `reference.py` is the CPU path and the definition of every op.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

BLOCK = 4
# An id that stands for a row of the media states.
MEDIA = -(1 << 31)

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Segment:
    """One row's run of positions in a step: token rows [offset, offset+length) hold positions [start, start+length)."""

    offset: int
    length: int
    start: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """Pages and positions of one step over n token rows and R segments; laid out by `make_plan` or `host_plan`.

    `positions` [3, n] float32 (axes t, h, w); `write` [n] int64, the flat cache place (page * page_size + offset) of each
    row; `last` [R] int64, the token row that ends each segment; `page_size` in positions; `layout` is what the device's
    attention reads beside them, made by its `Ops.lay_out`.
    """

    positions: Tensor
    write: Tensor
    last: Tensor
    page_size: int
    layout: object


def make_plan(segments: Sequence[Segment], positions: Tensor, page_size: int, device: str | torch.device) -> Plan:
    """Lay out one step over `segments`, whose token rows follow one another, with `positions` [3, n] float32, on `device`.

    `page_size` is a multiple of BLOCK. Raises ValueError when a segment has too few pages or the offsets leave a gap.
    """
    ops = ops_for(device)
    return ops.upload(host_plan(segments, positions, page_size, ops))


def host_plan(segments: Sequence[Segment], positions: Tensor, page_size: int, ops: Ops) -> Plan:
    """What `make_plan` does with `positions` [3, n], left on the host: `Ops.upload` or a captured step takes it on."""
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
    return Plan(
        positions=positions,
        write=torch.tensor(write, dtype=torch.int64),
        last=torch.tensor([s.offset + s.length - 1 for s in segments], dtype=torch.int64),
        page_size=page_size,
        layout=ops.lay_out(segments, page_size),
    )


@dataclass(frozen=True, slots=True)
class Attend:
    """What a layer's attention is made with: `qk_norm` [Hq + Hkv, d] of queries, then keys; rope tables [n, d]."""

    qk_norm: Tensor
    eps: float
    heads: int
    cos: Tensor
    sin: Tensor


@dataclass(frozen=True, slots=True)
class Routed:
    """A layer's routed experts: `norm` [H] before them, its `eps`, `router` [E, H], `gate_up` [E, 2I, H], `down` [E, H, I].

    `fused` says that the router's choice may be made inside a kernel: softmax, then the `top_k` largest, `renormalise`d or not.
    """

    norm: Tensor
    eps: float
    router: Tensor
    gate_up: Tensor
    down: Tensor
    top_k: int
    renormalise: bool
    fused: bool = True


@dataclass(frozen=True, slots=True)
class KernelOptions:
    """Which ways a GPU's operations may take; `off` names switches (of engine.config.SWITCHES) that are off.

    `batch_invariant` gives a row the same bits in any company: one kernel and one tile for every row count. `tables` is a
    folder with tile tables that go before the packaged ones. `dtype` is what the model computes in.
    """

    off: frozenset[str] = frozenset()
    batch_invariant: bool = False
    tables: Path | None = None
    dtype: torch.dtype = torch.bfloat16

    def on(self, switch: str) -> bool:
        """Whether `switch` is on. No tensors."""
        return switch not in self.off


class HostCopy(Protocol):
    """Values on their way from the device to the host."""

    def wait(self) -> npt.NDArray[Any]:
        """Return them, any shape, once they have arrived; shape and dtype as on the device."""


class Ops(Protocol):
    """The device operations. All tensors lie on `device`; n counts token rows. Nothing here draws random numbers."""

    device: torch.device
    counters: dict[str, int]

    def put(self, values: npt.NDArray[Any]) -> Tensor:
        """Bring a host array, any shape, to the device without waiting for it; the caller may reuse the array at once."""

    def fetch(self, values: Tensor) -> HostCopy:
        """Start to copy `values`, any shape, to the host; the copy holds what the work queued so far makes of them."""

    def upload(self, plan: Plan, *, prompts: bool = False) -> Plan:
        """Bring a plan that lies on the host to the device, without waiting.

        With `prompts` its rows attend as those of prompts do, though each be a single position.
        """

    def lay_out(self, segments: Sequence[Segment], page_size: int) -> object:
        """What this device's attention needs to know of a step (no tensors in); the `layout` of a Plan."""

    def move_on(self, layout: object, pages: Ints, before: Ints, starts: Ints, page_size: int) -> object:
        """The layout of decode rows that stood at `before` [R] and now stand at `starts` [R], on `pages` [R, most].

        Equals what `lay_out` gives for them. `layout` stays as it is: a step in flight may read it.
        """

    def embedding(self, table: Tensor, ids: Tensor) -> Tensor:
        """Look up `ids` [n] int64 in `table` [V, H]; returns [n, H]."""

    def embed_rows(self, table: Tensor, ids: Tensor, slots: Tensor, media: Tensor | None) -> Tensor:
        """Rows [n, H] of a step's `ids` [n] int32: `table` [V, H] at an id, or at what a slot of `slots` [S] int64 holds for
        -1 - slot; where the id is MEDIA, the row of `media` [n, H].
        """

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply `x` [n, K] by `weight` [M, K] transposed and add `bias` [M]; returns [n, M]."""

    def linear_float(self, x: Tensor, weight: Tensor) -> Tensor:
        """`x` [n, K] times `weight` [M, K] transposed, as float32 [n, M]."""

    def linear_add(self, x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
        """`residual` [n, M] plus `x` [n, K] times `weight` [M, K] transposed; returns [n, M]."""

    def norm_linear(self, x: Tensor, norm: Tensor, eps: float, weight: Tensor) -> Tensor:
        """`rms_norm` of `x` [n, K] with `norm` [K], times `weight` [M, K] transposed; returns [n, M]."""

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

    def axis_tables(
        self, positions: Tensor, axes: Tensor, frequencies: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """`rope_tables` of `positions` [3, n] float32, channel c turned by axis `axes` [d/2] at `frequencies` [d/2]."""

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate `x` [n, heads, d] by halves with tables [n, d]; returns [n, heads, d]."""

    def write_kv(self, cache: Tensor, rows: Tensor, where: Tensor) -> None:
        """Store `rows` [n, Hkv, d] at flat places `where` [n] int64 of `cache` [pages, page_size, Hkv, d]."""

    def paged_attention(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: Plan) -> Tensor:
        """Causal attention of `q` [n, Hq, d] over caches [pages, page_size, Hkv, d], each row within its segment.

        Scale d**-0.5. The rows' own keys and values are already in the cache. Returns [n, Hq * d].
        """

    def self_attention(self, qkv: Tensor, at: Attend, k_cache: Tensor, v_cache: Tensor, plan: Plan) -> Tensor:
        """Norm and rotate the queries and keys of `qkv` [n, (Hq + 2 Hkv) d], store keys and values, and attend.

        Caches [pages, page_size, Hkv, d]; returns [n, Hq * d].
        """

    def attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Attention of `q` [B, T, Hq, d] over `k`, `v` [B, L, Hkv, d], scale d**-0.5; returns [B, T, Hq * d].

        `mask` [T, L] or [B, T, L] float32 is added to the scores: 0 where visible, else -inf. None makes everything visible.
        """

    def route(self, logits: Tensor, top_k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
        """Softmax over `logits` [n, E] in float32 and the `top_k` largest, ties to the lowest expert.

        Returns weights [n, top_k] in the logits' dtype (summing to 1 when `renormalise`) and ids [n, top_k] int64.
        """

    def add_experts(self, x: Tensor, routed: Routed, plan: Plan) -> Tensor:
        """`x` [n, H] plus what its experts make of its normalised rows; returns [n, H]. Padded rows of `plan` reach none."""

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

    def argmax(self, logits: Tensor) -> Tensor:
        """The place of the largest of each row of `logits` [n, V] float32, the first of equals; returns [n] int64."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum `x`, any shape, over the ranks that share a layer; itself when there is one rank."""


def ops_for(device: str | torch.device, options: KernelOptions = KernelOptions()) -> Ops:
    """Return the Ops of a device (no tensors involved). Raises ValueError for a device without one."""
    kind = torch.device(device)
    if kind.type == "cpu":
        from engine.kernels.reference import ReferenceOps

        return ReferenceOps(kind)
    if kind.type == "cuda":
        from engine.kernels.cuda import CudaOps

        return CudaOps(kind, options)
    raise ValueError(f"no operations for device {kind.type!r}: use --device cpu or --device cuda")
