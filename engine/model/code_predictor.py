"""The code predictor: fills a frame's remaining code groups, one cached pass each, from the Talker's row and its code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels import Ops
from engine.model.config import PredictorConfig
from engine.model.weights import Weights

Choose = Callable[[Tensor, int], Tensor]
"""Picks a code for each row of logits [B, V] float32 of code group 1…G-1; returns [B] int64."""


@dataclass(frozen=True, slots=True)
class _Pass:
    """One pass of B rows over positions [first, first+count): rope tables [B*count, d], `mask` [count, G] float32."""

    batch: int
    first: int
    count: int
    rope: tuple[Tensor, Tensor]
    mask: Tensor


class _Layer:
    """One dense layer: causal attention over the frame's own positions and SwiGLU."""

    def __init__(self, config: PredictorConfig, weights: Weights, index: int, ops: Ops) -> None:
        name = f"predictor.layers.{index}"
        self.ops, self.eps = ops, config.eps
        self.heads, self.head_dim = config.heads, config.head_dim
        self.norm1, self.norm2 = weights[f"{name}.input_norm"], weights[f"{name}.post_norm"]
        self.turned = config.heads + config.kv_heads
        norms = (weights[f"{name}.q_norm"], config.heads), (weights[f"{name}.k_norm"], config.kv_heads)
        self.qk_norm = torch.cat([norm.expand(heads, -1) for norm, heads in norms])
        self.qkv, self.out = weights[f"{name}.qkv"], weights[f"{name}.o"]
        self.gate_up, self.down = weights[f"{name}.gate_up"], weights[f"{name}.down"]

    def forward(self, x: Tensor, at: _Pass, keys: Tensor, values: Tensor) -> Tensor:
        """Run over `x` [B*count, H] with this layer's scratch `keys`, `values` [B, G, Hkv, d]; returns [B*count, H]."""
        ops = self.ops
        x = x + self._attend(ops.rms_norm(x, self.norm1, self.eps), at, keys, values)
        inner = ops.silu_mul(ops.linear(ops.rms_norm(x, self.norm2, self.eps), self.gate_up))
        return x + ops.linear(inner, self.down)

    def _attend(self, x: Tensor, at: _Pass, keys: Tensor, values: Tensor) -> Tensor:
        ops = self.ops
        rows = ops.linear(x, self.qkv).view(x.shape[0], -1, self.head_dim)
        # Queries and keys go through norm and rope as one: fewer calls, and a frame makes fifteen passes of them.
        rotated = ops.rotate(ops.rms_norm(rows[:, : self.turned], self.qk_norm, self.eps), *at.rope)
        rotated = rotated.view(at.batch, at.count, -1, self.head_dim)
        span = slice(at.first, at.first + at.count)
        keys[:, span] = rotated[:, :, self.heads :]
        values[:, span] = rows[:, self.turned :].view(at.batch, at.count, -1, self.head_dim)
        mixed = ops.attention(rotated[:, :, : self.heads], keys, values, at.mask)
        return ops.linear(mixed.flatten(0, 1), self.out)


class CodePredictor:
    """Predicts code groups 1…G-1 of a frame. Its keys and values live for one frame; a row never sees its neighbours."""

    def __init__(self, config: PredictorConfig, weights: Weights, ops: Ops) -> None:
        self.ops, self.config = ops, config
        self.layers = [_Layer(config, weights, index, ops) for index in range(config.layers)]
        self.norm = weights["predictor.norm"]
        self.embeds = [weights[f"predictor.embed.{group}"] for group in range(config.groups - 1)]
        self.heads = [weights[f"predictor.head.{group}"] for group in range(config.groups - 1)]
        dim, groups = config.head_dim, config.groups
        frequencies = 1.0 / config.rope_theta ** (torch.arange(0, dim, 2, device=ops.device).float() / dim)
        angles = torch.arange(groups, device=ops.device)[:, None] * frequencies
        self.rope = ops.rope_tables(angles, self.norm.dtype)
        self._kept: dict[int, list[_Pass]] = {}
        self.mask = torch.full((groups, groups), float("-inf"), device=ops.device).triu(1)

    def frame(self, y: Tensor, c0: Tensor, first_embed: Tensor, choose: Choose) -> tuple[Tensor, Tensor]:
        """Complete the frames of B rows from the Talker's `y` [B, H], codes `c0` [B] int64 and `first_embed` [B, H] = C[c0].

        `choose` is asked once a group. Returns codes [B, G-1] int64 of groups 1…G-1, and [B, H], the sum of `first_embed` and
        the chosen codes' embeddings, added in float32 and rounded once.
        """
        batch, config = y.shape[0], self.config
        scratch = y.new_zeros(config.layers, 2, batch, config.groups, config.kv_heads, config.head_dim)
        caches = [tuple(layer.unbind()) for layer in scratch.unbind()]
        total, codes = first_embed.float(), []
        x = torch.stack([y, first_embed], dim=1).flatten(0, 1)
        for group, (at, head, embed) in enumerate(
            zip(self._passes(batch), self.heads, self.embeds, strict=True), start=1
        ):
            hidden = self._run(x, at, caches)
            codes.append(choose(self.ops.linear(hidden, head).float(), group))
            x = self.ops.embedding(embed, codes[-1])
            total = total + x
        return torch.stack(codes, dim=1), total.to(y.dtype)

    def _passes(self, batch: int) -> list[_Pass]:
        """The passes of a frame of `batch` rows, one for each group; they are kept, as each frame takes the same."""
        if batch not in self._kept:
            self._kept[batch] = [self._pass(batch, group) for group in range(1, self.config.groups)]
        return self._kept[batch]

    def _pass(self, batch: int, group: int) -> _Pass:
        """The pass that predicts `group`: the first takes two positions, the Talker's row and its code; each later one."""
        first, count = (0, 2) if group == 1 else (group, 1)
        cos, sin = (table[first : first + count].expand(batch, count, -1).flatten(0, 1) for table in self.rope)
        return _Pass(batch, first, count, (cos, sin), self.mask[first : first + count])

    def _run(self, x: Tensor, at: _Pass, caches: Sequence[tuple[Tensor, ...]]) -> Tensor:
        """Run the layers over `x` [B*count, H]; returns the normed rows of each frame's last position, [B, H]."""
        for layer, (keys, values) in zip(self.layers, caches, strict=True):
            x = layer.forward(x, at, keys, values)
        last = x if at.count == 1 else x.view(at.batch, at.count, -1)[:, -1]
        return self.ops.rms_norm(last, self.norm, self.config.eps)
