"""The expert layer: a router, the experts it picks, and the Talker's shared expert. No attention here."""

from __future__ import annotations

from torch import Tensor

from engine.kernels import Ops, Plan, Routed
from engine.model.config import StackConfig
from engine.model.weights import Weights


class ExpertLayer:
    """Routed SwiGLU experts, plus sigmoid-gated shared SwiGLU where the config has one.

    Reads `{name}.post_norm`, `.router`, `.gate_up`, `.down` and, with a shared expert, `.shared_gate_up`, `.shared_down`,
    `.shared_gate`.
    """

    def __init__(self, name: str, config: StackConfig, weights: Weights, ops: Ops) -> None:
        self._ops = ops
        self._ranks = weights.shard.world
        self._routed = Routed(
            norm=weights[f"{name}.post_norm"],
            eps=config.eps,
            router=weights[f"{name}.router"],
            gate_up=weights[f"{name}.gate_up"],
            down=weights[f"{name}.down"],
            top_k=config.top_k,
            renormalise=config.norm_topk,
        )
        self._shared: tuple[Tensor, Tensor, Tensor] | None = None
        if config.shared_inter:
            self._shared = (
                weights[f"{name}.shared_gate_up"],
                weights[f"{name}.shared_down"],
                weights[f"{name}.shared_gate"],
            )

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Pick experts for `x` [n, H]: weights [n, k] in x's dtype and ids [n, k] int64."""
        routed = self._routed
        return self._ops.route(self._ops.linear(x, routed.router), routed.top_k, routed.renormalise)

    def add_to(self, x: Tensor, plan: Plan) -> Tensor:
        """Return `x` [n, H] plus what the experts make of its rows, normalised and summed over the ranks; [n, H]."""
        if self._ranks == 1 and self._shared is None:
            return self._ops.add_experts(x, self._routed, plan)
        return x + self._ops.all_reduce(self.forward(self._ops.rms_norm(x, self._routed.norm, self._routed.eps)))

    def forward(self, x: Tensor) -> Tensor:
        """Return [n, H] for normalised rows `x` [n, H]; with several ranks, this rank's summand."""
        weights, ids = self.route(x)
        out = self._ops.experts(x, weights, ids, self._routed.gate_up, self._routed.down)
        return out if self._shared is None else out + self._shared_expert(x, *self._shared)

    def _shared_expert(self, x: Tensor, gate_up: Tensor, down: Tensor, gate: Tensor) -> Tensor:
        ops = self._ops
        inner = ops.silu_mul(ops.linear(x, gate_up))
        return ops.sigmoid(ops.linear(x, gate)) * ops.linear(inner, down)
