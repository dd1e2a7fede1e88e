"""The operations of a CUDA GPU: our Triton kernels where launches and reads count, torch's libraries elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from engine import routing
from engine.kernels import Attend, HostCopy, Ints, KernelOptions, Plan, Routed, Segment, grouped_gemm, per_pair, rows
from engine.kernels.align import align
from engine.kernels.attention import (
    decode_attention,
    default_paged_tile,
    default_tile,
    norm_rope_write,
    paged_attention,
    query_blocks,
)
from engine.kernels.flash import FlashPrefill, available
from engine.kernels.gemv import gemv, gemv_tile, split_gemm, split_tile
from engine.kernels.grouped_gemm import grouped_down, grouped_gate_up
from engine.kernels.per_pair import per_pair_down, per_pair_gate_up
from engine.kernels.pointwise import argmax_slots, embed_rows, rms_norm, rope_tables, silu_mul
from engine.kernels.reference import ReferenceOps
from engine.kernels.route_align import MAX_PAIRS, route_align
from engine.kernels.router_topk import Picked, route_one, router_topk
from engine.kernels.rows import DeviceLayout, RunLayout, Shape
from engine.kernels.scratch import Scratch
from engine.kernels.tiles import Registry, Tile

# Rows up to which a product is one of our kernels: a GEMV that reads each weight once, then tensor cores over slices of K.
GEMV_ROWS = 1
SPLIT_ROWS = 32
# The row count whose tile serves every row count when bits may not depend on the company.
INVARIANT_ROWS = 64
# Token rows from which FlashInfer attends over prompts; below, its plan on the host costs more than it gains.
FLASH_ROWS = 256
# Rows that the plain way takes through all experts at once.
DENSE_ROWS = 128


@dataclass(frozen=True, slots=True)
class _Arriving:
    """A copy in page-locked memory that is complete once its event has happened."""

    values: Tensor
    event: torch.cuda.Event

    def wait(self) -> npt.NDArray[Any]:
        """Return the values, in the shape they had on the device."""
        self.event.synchronize()
        found: npt.NDArray[Any] = self.values.numpy()
        return found


class CudaOps(ReferenceOps):
    """The Ops of a GPU. What is not defined here is plain torch, as on a CPU. `counters` count the ways that were taken.

    One stream: kernels share their work space. Under a capture a method runs once, and its counts are the capture's to add.
    """

    def __init__(self, device: torch.device, options: KernelOptions) -> None:
        super().__init__(device)
        self.options = options
        # Before Hopper no kernel can start while the one before it still runs.
        self.pdl = options.on("dependent_launch") and (
            device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
        )
        self.scratch = Scratch(device)
        self.counters = Counter()
        self._tiles: dict[tuple[object, ...], Tile] = {}
        self.registry = None
        if options.on("tuned_tiles") and device.type == "cuda":
            self.registry = Registry(torch.cuda.get_device_name(device), options.tables)
        self._limits: dict[tuple[int, ...], routing.Limits] = {}
        self._flash: FlashPrefill | None = None
        self._planned: object | None = None
        # The slots of an argmax that leaves its choice in none.
        self._nowhere: Tensor | None = None
        self._unread = torch.zeros(1, dtype=torch.int64, device=device)

    # Between host and device.

    def put(self, values: npt.NDArray[Any]) -> Tensor:
        """`values`, any shape, on the device; the copy starts from page-locked memory and nobody waits for it."""
        if self.device.type != "cuda":  # where Triton interprets
            return super().put(values)
        return torch.from_numpy(np.ascontiguousarray(values)).pin_memory().to(self.device, non_blocking=True)

    def fetch(self, values: Tensor) -> HostCopy:
        """`values`, any shape, on their way to page-locked memory."""
        room = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        room.copy_(values, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return _Arriving(room, event)

    def upload(self, plan: Plan, *, prompts: bool = False) -> Plan:
        """The plan on the device, by one copy for what changes from step to step and one for the pages."""
        runs = plan.layout
        assert isinstance(runs, RunLayout)
        decode = runs.decode and not prompts and self.options.on("decode_kernel")
        blocks = None if decode else self.query_blocks(runs)
        n = plan.positions.shape[1]
        shape = Shape(n, 0 if blocks is None else len(blocks), blocks is None)
        words = np.empty(shape.words, dtype=np.int32)
        rows.fill(words, shape, np.zeros(n, dtype=np.int32), plan, blocks)
        _, there = rows.views(self.put(words), shape, self.put(runs.table), plan.page_size, padded=False)
        last = self.put(plan.last.numpy())
        if n >= FLASH_ROWS and self.options.on("flashinfer") and not self.options.batch_invariant:
            there = replace(there, layout=replace(_layout(there), flash=runs))
        return replace(there, last=last)

    def query_blocks(self, runs: RunLayout) -> rows.Words:
        """The query blocks [B, 4] of a step's segments."""
        return query_blocks(runs.starts, runs.lengths, default_paged_tile(self.options.dtype)["BQ"])

    def lay_out(self, segments: Sequence[Segment], page_size: int) -> Any:
        """Pages, starts and lengths of the segments (no tensors in)."""
        return rows.lay_out(segments)

    def move_on(self, layout: object, pages: Ints, before: Ints, starts: Ints, page_size: int) -> Any:
        """The layout of decode rows at `starts` [R]: nothing else has changed."""
        assert isinstance(layout, RunLayout)
        return replace(layout, starts=starts)

    # Products.

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """`x` [n, K] times `weight` [M, K] transposed, plus `bias` [M]; returns [n, M]."""
        if bias is None and self._way(x) != "library":
            return self._product(x, weight, out_dtype=x.dtype)
        return F.linear(x, weight, bias)

    def linear_float(self, x: Tensor, weight: Tensor) -> Tensor:
        """`x` [n, K] times `weight` [M, K] transposed, as float32 [n, M], never rounded in between."""
        if self._way(x) != "library":
            return self._product(x, weight, out_dtype=torch.float32)
        self.counters["linear_library"] += 1
        if x.dtype == torch.float32:
            return F.linear(x, weight)
        return torch.mm(x, weight.t(), out_dtype=torch.float32)

    def linear_add(self, x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
        """`residual` [n, M] plus `x` [n, K] times `weight` [M, K] transposed, rounded once; returns [n, M]."""
        if self._way(x) != "library":
            return self._product(x, weight, residual=residual, out_dtype=x.dtype)
        self.counters["linear_library"] += 1
        return torch.addmm(residual, x, weight.t())

    def norm_linear(self, x: Tensor, norm: Tensor, eps: float, weight: Tensor) -> Tensor:
        """The normalised rows of `x` [n, K] times `weight` [M, K] transposed; returns [n, M]."""
        if self._way(x) != "library":
            return self._product(x, weight, norm=norm, eps=eps, out_dtype=x.dtype)
        self.counters["linear_library"] += 1
        return F.linear(self.rms_norm(x, norm, eps), weight)

    def _way(self, x: Tensor) -> str:
        """Which kernel multiplies the rows of `x` [n, K]."""
        if self.options.batch_invariant:
            return "split"
        if not self.options.on("gemv") or x.dim() != 2:
            return "library"
        return "gemv" if len(x) <= GEMV_ROWS else "split" if len(x) <= SPLIT_ROWS else "library"

    def _product(
        self,
        x: Tensor,
        weight: Tensor,
        *,
        norm: Tensor | None = None,
        eps: float = 0.0,
        residual: Tensor | None = None,
        out_dtype: torch.dtype,
        way: str | None = None,
    ) -> Tensor:
        way = way or self._way(x)
        (outputs, width), n = weight.shape, self._tile_rows(len(x))
        self.counters[f"linear_{way}"] += 1
        sizes = {"K": width, "N": outputs}
        if way == "gemv":
            tile = self._tile("gemv", sizes, x.dtype, n, lambda: gemv_tile(outputs, width, x.dtype))
            return gemv(x, weight, norm=norm, eps=eps, residual=residual, out_dtype=out_dtype, tile=tile, pdl=self.pdl)
        tile = self._tile("split_gemm", sizes, x.dtype, n, lambda: split_tile(n, outputs, width, x.dtype))
        return split_gemm(
            x.contiguous(),
            weight,
            norm=norm,
            eps=eps,
            residual=residual,
            out_dtype=out_dtype,
            scratch=self.scratch,
            tile=tile,
            pdl=self.pdl,
        )

    def _tile_rows(self, n: int) -> int:
        """The row count whose tile serves n rows."""
        return INVARIANT_ROWS if self.options.batch_invariant else n

    def _tile(self, op: str, sizes: dict[str, int], dtype: torch.dtype, n: int, default: Callable[[], Tile]) -> Tile:
        """The tuned tile of an op for n rows over the default one, looked up once."""
        key = (op, *sizes.values(), dtype, n)
        found = self._tiles.get(key)
        if found is None:
            name = str(dtype).removeprefix("torch.")
            tuned = self.registry.find(op, sizes, name, n) if self.registry is not None else None
            found = self._tiles[key] = {**default(), **(tuned or {})}
        return found

    # Rows by themselves.

    def embed_rows(self, table: Tensor, ids: Tensor, slots: Tensor, media: Tensor | None) -> Tensor:
        """Rows [n, H] of `ids` [n] int32: of `table` [V, H], through `slots` [S], or of `media` [n, H]."""
        return embed_rows(table, ids, slots, media, pdl=self.pdl)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMS norm of `x` [..., H] with `weight` [H] or [heads, H]; returns [..., H]."""
        if x.dim() == 2 and weight.dim() == 1 and len(x):
            return rms_norm(x.contiguous(), weight, eps, pdl=self.pdl)
        return super().rms_norm(x, weight, eps)

    def silu(self, x: Tensor) -> Tensor:
        """SiLU of `x`, any shape."""
        return F.silu(x)

    def gelu(self, x: Tensor) -> Tensor:
        """Exact GELU of `x`, any shape."""
        return F.gelu(x)

    def sigmoid(self, x: Tensor) -> Tensor:
        """Logistic function of `x`, any shape."""
        return torch.sigmoid(x)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """SiLU of the first half times the second half of `gate_up` [n, 2I] or [..., n, 2I]; returns the half as wide."""
        if gate_up.dim() == 2 and len(gate_up):
            return silu_mul(gate_up.contiguous(), pdl=self.pdl)
        return super().silu_mul(gate_up)

    def snake(self, x: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
        """SnakeBeta of `x` [1, C, L] with `alpha`, `beta` [C]; returns [1, C, L]."""
        wave = torch.sin(x * alpha.exp()[None, :, None])
        return x + wave.square() / (beta.exp()[None, :, None] + 1e-9)

    def rope_tables(self, angles: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine of `angles` [n, d/2], duplicated to [n, d] in `dtype`."""
        twice = torch.cat([angles, angles], dim=-1)
        return twice.cos().to(dtype), twice.sin().to(dtype)

    def axis_tables(
        self, positions: Tensor, axes: Tensor, frequencies: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Tables [n, d] of `positions` [3, n] whose channels turn by `axes` [d/2] at `frequencies` [d/2]."""
        return rope_tables(positions, axes, frequencies, dtype, pdl=self.pdl)

    def argmax(self, logits: Tensor) -> Tensor:
        """The first largest place of each row of `logits` [n, V] float32; returns [n]."""
        n = len(logits)
        if self._nowhere is None or len(self._nowhere) < n:
            self._nowhere = torch.full((n,), -1, dtype=torch.int32, device=self.device)
        return argmax_slots(logits.contiguous(), self._nowhere[:n], self._unread, scratch=self.scratch, pdl=self.pdl)

    # Attention.

    def self_attention(self, qkv: Tensor, at: Attend, k_cache: Tensor, v_cache: Tensor, plan: Plan) -> Tensor:
        """Norm, rotate, store and attend over `qkv` [n, (Hq + 2 Hkv) d]; returns [n, Hq * d]."""
        layout = _layout(plan)
        if layout.decode:
            self.counters["attention_decode"] += 1
            assert layout.starts is not None
            return decode_attention(
                *(qkv, at.qk_norm, at.eps, at.heads, at.cos, at.sin, k_cache, v_cache, layout.table, layout.starts),
                scratch=self.scratch,
                tile=self._decode_tile(qkv, at, k_cache),
                pdl=self.pdl,
            )
        q = norm_rope_write(
            qkv, at.qk_norm, at.eps, at.heads, at.cos, at.sin, k_cache, v_cache, plan.write, pdl=self.pdl
        )
        if layout.flash is not None and available(self.device, q.dtype, q.shape[2]) is None:
            return self._flash_attention(q, k_cache, v_cache, layout.flash)
        return self.paged_attention(q, k_cache, v_cache, plan)

    def _flash_attention(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, runs: RunLayout) -> Tensor:
        """FlashInfer's attention, planned in the first layer of a step."""
        self.counters["attention_flash"] += 1
        self._flash = self._flash or FlashPrefill(self.device)
        if self._planned is not runs:
            _, page, kv_heads, dim = k_cache.shape
            pages = runs.table.astype(np.int64)
            self._flash.plan(runs.starts, runs.lengths, pages, page, q.shape[1], kv_heads, dim, q.dtype)
            self._planned = runs
        return self._flash.run(q, k_cache, v_cache)

    def paged_attention(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: Plan) -> Tensor:
        """Causal attention of `q` [n, Hq, d] over caches [pages, page_size, Hkv, d]; returns [n, Hq * d]."""
        layout = _layout(plan)
        assert layout.blocks is not None
        self.counters["attention_paged"] += 1
        tile = default_paged_tile(q.dtype)
        return paged_attention(q, k_cache, v_cache, layout.table, layout.blocks, tile=tile, pdl=self.pdl)

    def _decode_tile(self, qkv: Tensor, at: Attend, k_cache: Tensor) -> Tile:
        n = self._tile_rows(len(qkv))
        _, page, kv_heads, dim = k_cache.shape
        sizes = {"Hq": at.heads, "Hkv": kv_heads, "d": dim, "page": page}
        return self._tile("decode_attention", sizes, qkv.dtype, n, lambda: default_tile(n))

    # Experts.

    def add_experts(self, x: Tensor, routed: Routed, plan: Plan) -> Tensor:
        """`x` [n, H] plus what its experts make of its normalised rows; returns [n, H]."""
        live = _layout(plan).live
        route = self.route_of(len(x), routed)
        self.counters[f"experts_{route}"] += 1
        if route is routing.Route.PER_PAIR:
            picked = self._picked_per_pair(x, routed, live)
            tile = self._expert_tile("per_pair_gate_up", x, routed, per_pair.gate_up_tile)
            h = per_pair_gate_up(x, routed.norm, picked, routed.gate_up, tile=tile, pdl=self.pdl)
            tile = self._expert_tile("per_pair_down", x, routed, per_pair.down_tile)
            return per_pair_down(h, picked, routed.down, x, tile=tile, pdl=self.pdl)
        logits = self._router_logits(x, routed)
        if route is routing.Route.ROUTE_ALIGN:
            picked, alignment = route_align(
                logits,
                routed.top_k,
                renormalise=routed.renormalise,
                x=x,
                eps=routed.eps,
                live=live,
                scratch=self.scratch,
                pdl=self.pdl,
            )
            return self._grouped(x, routed, picked, alignment)
        unfused = route is routing.Route.UNFUSED
        picked = self._unfused(logits, x, routed, live) if unfused else self._picked(logits, x, routed, live)
        return self._grouped(x, routed, picked, None)

    def route_of(self, n: int, routed: Routed) -> routing.Route:
        """How n rows reach their experts; router and experts both ask this. No tensors are read."""
        experts, hidden, inter = routed.down.shape
        key = (experts, hidden, inter, routed.top_k)
        if key not in self._limits:
            limits = routing.Limits()
            if self.registry is not None:
                dtype = str(routed.down.dtype).removeprefix("torch.")
                limits = self.registry.limits(dict(zip("EHIk", key, strict=True)), dtype)
            slots = min(limits.route_align_slots, MAX_PAIRS)
            self._limits[key] = routing.Limits(limits.per_pair_rows, slots)
        options = self.options
        router = routing.Router(routed.top_k, routed.renormalise, routed.fused and options.on("fused_routing"))
        fixed = options.batch_invariant
        return routing.choose(
            n,
            router,
            self._limits[key],
            per_pair=options.on("per_pair") and not fixed,
            route_align=options.on("route_align") and not fixed,
        )

    def _router_logits(self, x: Tensor, routed: Routed) -> Tensor:
        way = self._way(x)
        return self._product(
            x,
            routed.router,
            norm=routed.norm,
            eps=routed.eps,
            out_dtype=torch.float32,
            way="split" if way == "library" else way,
        )

    def _picked_per_pair(self, x: Tensor, routed: Routed, live: Tensor | None) -> Picked:
        """The choice of few rows; that of a single one comes from the kernel that multiplies it by the router."""
        if len(x) > 1 or self._way(x) != "gemv":
            return self._picked(self._router_logits(x, routed), x, routed, live)
        self.counters["linear_gemv"] += 1
        experts, width = routed.router.shape
        sizes = {"K": width, "N": experts}
        return route_one(
            *(x, routed.norm, routed.eps, routed.router, routed.top_k),
            renormalise=routed.renormalise,
            live=live,
            scratch=self.scratch,
            tile=self._tile("gemv", sizes, x.dtype, 1, lambda: gemv_tile(experts, width, x.dtype)),
            pdl=self.pdl,
        )

    def _picked(self, logits: Tensor, x: Tensor, routed: Routed, live: Tensor | None) -> Picked:
        return router_topk(
            logits,
            routed.top_k,
            renormalise=routed.renormalise,
            x=x,
            eps=routed.eps,
            live=live,
            pdl=self.pdl,
        )

    def _unfused(self, logits: Tensor, x: Tensor, routed: Routed, live: Tensor | None) -> Picked:
        """The choice as torch makes it, kernel by kernel."""
        weights, ids = self.route(logits, routed.top_k, routed.renormalise)
        if live is not None:
            masked = torch.arange(len(x), device=x.device)[:, None] >= live
            weights, ids = weights.masked_fill(masked, 0.0), ids.masked_fill(masked, logits.shape[1])
        rstd = x.float().square().mean(-1).add(routed.eps).rsqrt()
        return Picked(weights.contiguous(), ids.int().contiguous(), rstd)

    def _grouped(self, x: Tensor, routed: Routed, picked: Picked, alignment: Any) -> Tensor:
        if not self.options.on("grouped_gemm"):
            return self._dense(x, routed, picked)
        if alignment is None:
            alignment = align(picked.ids, len(routed.down), pdl=self.pdl)
        folded = len(x) <= SPLIT_ROWS * 2 or self.options.batch_invariant
        source, norm = (x, routed.norm) if folded else (self.rms_norm(x, routed.norm, routed.eps), None)
        tile = self._expert_tile("grouped_gate_up", x, routed, partial(grouped_gemm.gate_up_tile, dtype=x.dtype))
        h = grouped_gate_up(source, norm, picked, alignment, routed.gate_up, tile=tile, pdl=self.pdl)
        tile = self._expert_tile("grouped_down", x, routed, partial(grouped_gemm.down_tile, dtype=x.dtype))
        return grouped_down(h, picked, alignment, routed.down, x, tile=tile, pdl=self.pdl)

    def _dense(self, x: Tensor, routed: Routed, picked: Picked) -> Tensor:
        """The plain way: every row through every expert, then weighted; what the grouped products are switched off for."""
        self.counters["experts_dense"] += 1
        parts = []
        for low in range(0, len(x), DENSE_ROWS):
            part = self.rms_norm(x[low : low + DENSE_ROWS], routed.norm, routed.eps)
            hidden = self.silu_mul(torch.matmul(part, routed.gate_up.transpose(1, 2)))
            out = torch.bmm(hidden, routed.down.transpose(1, 2)).float()
            share = torch.zeros(len(part), len(out) + 1, device=x.device)
            share.scatter_(1, picked.ids[low : low + DENSE_ROWS].long(), picked.weights[low : low + DENSE_ROWS])
            parts.append(torch.einsum("ne,enh->nh", share[:, :-1], out))
        return (x.float() + torch.cat(parts)).to(x.dtype)

    def _expert_tile(self, op: str, x: Tensor, routed: Routed, default: Callable[[int], Tile]) -> Tile:
        n = self._tile_rows(len(x))
        experts, hidden, inter = routed.down.shape
        sizes = {"E": experts, "H": hidden, "I": inter, "k": routed.top_k}
        return self._tile(op, sizes, x.dtype, n, lambda: default(n))

    def experts(self, x: Tensor, weights: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        """Weighted sum of experts over normalised rows `x` [n, H], `weights` and `ids` [n, k]; returns [n, H]."""
        picked = Picked(weights.float().contiguous(), ids.int().contiguous(), None)
        alignment = align(picked.ids, len(down), pdl=self.pdl)
        tile = grouped_gemm.gate_up_tile(len(x), x.dtype)
        h = grouped_gate_up(x, None, picked, alignment, gate_up, tile=tile, pdl=self.pdl)
        tile = grouped_gemm.down_tile(len(x), x.dtype)
        return grouped_down(h, picked, alignment, down, torch.zeros_like(x), tile=tile, pdl=self.pdl)


def _layout(plan: Plan) -> DeviceLayout:
    assert isinstance(plan.layout, DeviceLayout)
    return plan.layout
