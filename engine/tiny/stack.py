"""Layers of the Thinker, the Talker and the code predictor for training: the engine's mathematics, differentiable and batched.

Batches are padded on the right. Attention is causal, so a row never sees the padding after it, and positions are 0, 1, …
(a prompt without pictures has equal positions on all three axes of the rope). Parameters have the released names, but for
those that hold several released tensors (`STACKED`); `tensors` exports them. Nothing here serves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.model.config import PredictorConfig, StackConfig
from engine.model.layers import inverse_frequencies

# A parameter [n, ...] whose name ends like this is n released tensors of these names.
STACKED = {
    "experts.gate_proj": "experts.{}.gate_proj.weight",
    "experts.up_proj": "experts.{}.up_proj.weight",
    "experts.down_proj": "experts.{}.down_proj.weight",
    "code_predictor.model.codec_embedding": "code_predictor.model.codec_embedding.{}.weight",
    "code_predictor.lm_head": "code_predictor.lm_head.{}.weight",
}
EMBEDDINGS = ("embed_tokens", "codec_embedding.powers", "codec_embedding.special")
# Layers whose output is added to the residual stream, and those that must start near zero: heads and routers.
ADDED = ("o_proj", "out_proj", "down_proj", "fc2")
QUIET = ("lm_head", "lm_head.powers", "codec_head.powers", "codec_head.special", "mlp.gate", "shared_expert_gate")
QUIET_DEVIATION = 0.02
EMBEDDING_DEVIATION = 0.3

# What only training has: nothing of it is exported.
HEADS = ("letters_head", "sounds_head")

Rope = tuple[Tensor, Tensor]
"""Cosines and sines, each [L, d] float32."""


@dataclass(frozen=True, slots=True)
class Weighting:
    """How much letters or sounds and the imbalance of the experts count beside the loss of what is said."""

    letters: float = 0.0
    balance: float = 0.01


class RmsNorm(nn.Module):
    """RMS norm."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `x` [..., width]; returns [..., width]."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def rope_tables(length: int, theta: float, head_dim: int, device: torch.device) -> Rope:
    """Tables of positions 0…`length` - 1, each [length, head_dim] float32."""
    angles = torch.arange(length, device=device)[:, None] * inverse_frequencies(theta, head_dim, device)
    twice = torch.cat([angles, angles], dim=-1)
    return twice.cos(), twice.sin()


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """Rotate `x` [B, L, heads, d] by halves; returns [B, L, heads, d]."""
    left, right = x.chunk(2, dim=-1)
    cos, sin = (table[:, None] for table in rope)
    return x * cos + torch.cat([-right, left], dim=-1) * sin


class Attention(nn.Module):
    """Causal attention with grouped keys and values, and a norm on the heads of queries and keys."""

    def __init__(self, config: StackConfig | PredictorConfig) -> None:
        super().__init__()
        self.head_dim, self.share = config.head_dim, config.heads // config.kv_heads
        self.q_proj = nn.Linear(config.hidden, config.heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden, config.kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden, config.kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.heads * config.head_dim, config.hidden, bias=False)
        self.q_norm = RmsNorm(config.head_dim, config.eps)
        self.k_norm = RmsNorm(config.head_dim, config.eps)

    def forward(self, x: Tensor, rope: Rope) -> Tensor:
        """Attend over normalised rows `x` [B, L, H]; returns [B, L, H]."""
        q, k, v = (proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(self.q_norm(q), rope), rotate(self.k_norm(k), rope)
        k, v = (rows.repeat_interleave(self.share, dim=2) for rows in (k, v))
        q, k, v = (rows.transpose(1, 2) for rows in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(-2))
        return out


class SwiGlu(nn.Module):
    """A dense SwiGLU feed-forward."""

    def __init__(self, hidden: int, inter: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inter, bias=False)
        self.up_proj = nn.Linear(hidden, inter, bias=False)
        self.down_proj = nn.Linear(inter, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Run over `x` [..., H]; returns [..., H]."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class ExpertBank(nn.Module):
    """All experts of a layer. Every row goes through every one of them: they are small, and one product does it."""

    def __init__(self, config: StackConfig) -> None:
        super().__init__()
        experts, inter, hidden = config.experts, config.moe_inter, config.hidden
        self.gate_proj = nn.Parameter(torch.empty(experts, inter, hidden))
        self.up_proj = nn.Parameter(torch.empty(experts, inter, hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, inter))

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        """Sum of the experts' outputs for `x` [..., H] with `weights` [..., E]; returns [..., H]."""
        gate, up = F.linear(x, self.gate_proj.flatten(0, 1)), F.linear(x, self.up_proj.flatten(0, 1))
        inner = (F.silu(gate) * up).view(*weights.shape, -1) * weights[..., None]
        return F.linear(inner.flatten(-2), self.down_proj.transpose(0, 1).flatten(1))


class Experts(nn.Module):
    """Router, experts and, where the config has one, the shared expert behind its sigmoid gate."""

    def __init__(self, config: StackConfig) -> None:
        super().__init__()
        self.top_k, self.renormalise = config.top_k, config.norm_topk
        self.gate = nn.Linear(config.hidden, config.experts, bias=False)
        self.experts = ExpertBank(config)
        self.shared_expert = SwiGlu(config.hidden, config.shared_inter) if config.shared_inter else None
        self.shared_expert_gate = nn.Linear(config.hidden, 1, bias=False) if config.shared_inter else None

    def forward(self, x: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """Run over normalised rows `x` [B, L, H]; returns [B, L, H] and how unevenly the `valid` rows [B, L] spread, a scalar.

        That is 1 when all experts are equally likely and `experts` when one takes every row.
        """
        probabilities = self.gate(x).softmax(-1)
        kept, ids = probabilities.topk(self.top_k, dim=-1)
        weights = kept / kept.sum(-1, keepdim=True) if self.renormalise else kept
        chosen = torch.zeros_like(probabilities).scatter(-1, ids, 1.0)
        out = self.experts(x, torch.zeros_like(probabilities).scatter(-1, ids, weights))
        if self.shared_expert is not None and self.shared_expert_gate is not None:
            out = out + self.shared_expert_gate(x).sigmoid() * self.shared_expert(x)
        return out, imbalance(probabilities, chosen, valid)


def imbalance(probabilities: Tensor, chosen: Tensor, valid: Tensor) -> Tensor:
    """Load-balancing loss, a scalar: `probabilities` and `chosen` (0 or 1) are [B, L, E], of the `valid` rows [B, L]."""
    rows = valid[..., None].to(probabilities.dtype)
    counted = (chosen * rows).sum((0, 1))
    likely = (probabilities * rows).sum((0, 1)) / rows.sum()
    return probabilities.shape[-1] * (counted / counted.sum() * likely).sum()


class _Layer(nn.Module):
    """Norms and attention of one layer; what follows them is a subclass's.

    In training a share `dropout` of what the layer adds is left out.
    """

    def __init__(self, config: StackConfig | PredictorConfig, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.input_layernorm = RmsNorm(config.hidden, config.eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RmsNorm(config.hidden, config.eps)

    def attended(self, x: Tensor, rope: Rope) -> Tensor:
        """`x` [B, L, H] plus its attention; returns [B, L, H]."""
        out: Tensor = x + self.dropout(self.self_attn(self.input_layernorm(x), rope))
        return out


class ExpertLayer(_Layer):
    """One layer of the Thinker or the Talker."""

    def __init__(self, config: StackConfig, dropout: float = 0.0) -> None:
        super().__init__(config, dropout)
        self.mlp = Experts(config)

    def forward(self, x: Tensor, rope: Rope, valid: Tensor) -> tuple[Tensor, Tensor]:
        """Run over `x` [B, L, H], of which the `valid` rows [B, L] count; returns [B, L, H] and the imbalance, a scalar."""
        x = self.attended(x, rope)
        added, uneven = self.mlp(self.post_attention_layernorm(x), valid)
        return x + self.dropout(added), uneven


class DenseLayer(_Layer):
    """One layer of the code predictor."""

    def __init__(self, config: PredictorConfig, dropout: float = 0.0) -> None:
        super().__init__(config, dropout)
        self.mlp = SwiGlu(config.hidden, config.inter)

    def forward(self, x: Tensor, rope: Rope) -> Tensor:
        """Run over `x` [B, L, H]; returns [B, L, H]."""
        x = self.attended(x, rope)
        out: Tensor = x + self.dropout(self.mlp(self.post_attention_layernorm(x)))
        return out


class Stack(nn.Module):
    """All layers of the Thinker or the Talker and the norm after them."""

    def __init__(self, config: StackConfig, dropout: float = 0.0) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(ExpertLayer(config, dropout) for _ in range(config.layers))
        self.norm = RmsNorm(config.hidden, config.eps)

    def forward(self, x: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """Run over `x` [B, L, H] with its `valid` rows [B, L].

        Returns [B, L, H] after the norm, and the layers' mean imbalance, a scalar.
        """
        rope = rope_tables(x.shape[1], self.config.rope_theta, self.config.head_dim, x.device)
        uneven = []
        for layer in self.layers:
            x, one = layer(x, rope, valid)
            uneven.append(one)
        return self.norm(x), torch.stack(uneven).mean()


@torch.no_grad()
def initialise(module: nn.Module, layers: int, seed: int) -> None:
    """Draw every matrix of `module`, which has `layers` residual layers: norms and biases keep what they were built with.

    Rows of unit variance stay so through a layer, and each layer adds little to the residual stream at first. No tensors
    in or out; the same seed draws the same values on every machine of one torch version.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()
        elif parameter.dim() > 1:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * _deviation(name, parameter, layers))


def _deviation(name: str, parameter: Tensor, layers: int) -> float:
    stem = name.removesuffix(".weight")
    if stem.endswith(EMBEDDINGS):
        return EMBEDDING_DEVIATION
    if stem.endswith(QUIET):
        return QUIET_DEVIATION
    fan_in = parameter.shape[-1] if stem.endswith(tuple(STACKED)) else math.prod(parameter.shape[1:])
    return 1 / math.sqrt(2 * layers * fan_in if stem.endswith(ADDED) else fan_in)


def ctc(scores: Tensor, targets: Tensor, rows: Tensor, lengths: Tensor) -> Tensor:
    """CTC loss a token, a scalar, of `scores` [C, R, V + 1] whose last is the blank, for `targets` [C, S] below V.

    `rows` and `lengths` [C] say how much of either counts; on the host, or the loss waits for the device to read them. What
    has too few rows for its targets counts nothing.
    """
    likely = scores.log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(likely, targets, rows, lengths, blank=scores.shape[2] - 1, zero_infinity=True)


def tensors(parameters: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The released tensors, any shape, of a module's `parameters`; `prefix` (with its dot) goes before their names."""
    found: dict[str, Tensor] = {}
    for name, value in parameters.items():
        if name.startswith(HEADS):
            continue
        whole = prefix + name
        ending = next((end for end in STACKED if whole.endswith(end)), None)
        if ending is None:
            found[whole] = value.detach()
        else:
            form = whole.removesuffix(ending) + STACKED[ending]
            found.update((form.format(index), part) for index, part in enumerate(value.detach()))
    return found
