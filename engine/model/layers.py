"""Decoder layers of the Thinker and the Talker: attention over paged keys and values, three-axis rope, experts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.kernels import Attend, Ops, Plan
from engine.model.config import StackConfig
from engine.model.moe import ExpertLayer
from engine.model.weights import Weights

Deepstack = tuple[Tensor, Sequence[Tensor]]


def inverse_frequencies(theta: float, head_dim: int, device: torch.device) -> Tensor:
    """Rope frequencies theta ** (-2c / head_dim) of channels c, as [head_dim / 2] float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    return (1.0 / (theta**exponents)).to(device)


def rope_axes(sections: tuple[int, int, int], device: torch.device) -> Tensor:
    """The position axis (0 time, 1 height, 2 width) that turns each rope channel, as [sum(sections)] int64.

    Channels 1, 4, … below 3 * sections[1] follow the height, 2, 5, … below 3 * sections[2] the width, the rest the time.
    """
    axes = torch.zeros(sum(sections), dtype=torch.int64)
    axes[1 : 3 * sections[1] : 3] = 1
    axes[2 : 3 * sections[2] : 3] = 2
    return axes.to(device)


class Rope:
    """Angles of the three-axis rope."""

    def __init__(self, config: StackConfig, ops: Ops) -> None:
        self._ops = ops
        self._axes = rope_axes(config.mrope_section, ops.device)
        self._frequencies = inverse_frequencies(config.rope_theta, config.head_dim, ops.device)

    def tables(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine for `positions` [3, n] float32, each [n, d] in `dtype`."""
        return self._ops.axis_tables(positions, self._axes, self._frequencies, dtype)


class DecoderLayer:
    """One layer: norm, attention, norm, experts, each half added to its input."""

    def __init__(self, name: str, config: StackConfig, weights: Weights, ops: Ops) -> None:
        self._ops = ops
        self._heads = config.heads // weights.shard.world
        self._kv_heads = config.kv_heads // weights.shard.world
        self._head_dim = config.head_dim
        self._ranks = weights.shard.world
        self._eps = config.eps
        self._input_norm = weights[f"{name}.input_norm"]
        self._qkv = weights[f"{name}.qkv"]
        self._o = weights[f"{name}.o"]
        # One norm over the heads of q and k together, each with its own weight.
        q_norm, k_norm = weights[f"{name}.q_norm"], weights[f"{name}.k_norm"]
        self._qk_norm = torch.cat([q_norm.expand(self._heads, -1), k_norm.expand(self._kv_heads, -1)])
        self.experts = ExpertLayer(name, config, weights, ops)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], plan: Plan, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """Run `x` [n, H] with rope tables [n, d] and this layer's caches [pages, page_size, Hkv, d]; returns [n, H].

        The rows' keys and values are written to the caches.
        """
        return self.experts.add_to(self._add(x, self._attended(x, rope, plan, k_cache, v_cache)), plan)

    def _attended(self, x: Tensor, rope: tuple[Tensor, Tensor], plan: Plan, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        qkv = self._ops.norm_linear(x, self._input_norm, self._eps, self._qkv)
        at = Attend(self._qk_norm, self._eps, self._heads, *rope)
        return self._ops.self_attention(qkv, at, k_cache, v_cache, plan)

    def _add(self, x: Tensor, attended: Tensor) -> Tensor:
        if self._ranks == 1:
            return self._ops.linear_add(attended, self._o, x)
        return x + self._ops.all_reduce(self._ops.linear(attended, self._o))


class Stack:
    """All decoder layers of one component and the norm after them. Reads `{name}.layers.{l}.*` and `{name}.norm`."""

    def __init__(self, name: str, config: StackConfig, weights: Weights, ops: Ops) -> None:
        self._ops = ops
        self._eps = config.eps
        self._norm = weights[f"{name}.norm"]
        self.rope = Rope(config, ops).tables
        self.layers = [DecoderLayer(f"{name}.layers.{i}", config, weights, ops) for i in range(config.layers)]

    def forward(
        self,
        x: Tensor,
        plan: Plan,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        tap: int | None,
        deepstack: Deepstack | None = None,
        rope: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Run rows `x` [n, H] over caches [layers, pages, page_size, Hkv, d], with `rope` tables [n, d] if made already.

        Returns the rows after the final norm [n, H], and those after layer index `tap` - 1 [n, H] (None without a tap).
        `deepstack` is a mask [n] bool of visual rows and one tensor [rows, H] for each of the first layers, added after it.
        """
        rope = rope or self.rope(plan.positions, x.dtype)
        tapped = x if tap == 0 else None
        for index, (layer, keys, values) in enumerate(
            zip(self.layers, k_cache.unbind(), v_cache.unbind(), strict=True)
        ):
            x = layer.forward(x, rope, plan, keys, values)
            if tap == index + 1:
                tapped = x
            if deepstack is not None and index < len(deepstack[1]):
                rows, extra = deepstack[0], deepstack[1][index]
                x = x.masked_scatter(rows[:, None], x[rows] + extra)
        return self._ops.rms_norm(x, self._norm, self._eps), tapped
