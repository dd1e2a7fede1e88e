"""The Thinker: text and media rows in, text logits out. Its encoders and its sampling live elsewhere."""

from __future__ import annotations

from torch import Tensor

from engine.kernels import Ops, Plan
from engine.model.config import OmniConfig
from engine.model.layers import Deepstack, Stack
from engine.model.weights import Weights


class Thinker:
    """The text model. `layers`, `kv_heads` (of this rank) and `head_dim` give the shape of its caches."""

    def __init__(self, config: OmniConfig, weights: Weights, ops: Ops) -> None:
        self._ops = ops
        self._embed = weights["thinker.embed"]
        self._head = weights["thinker.head"]
        self._accept = None if config.talker is None else config.talker.accept_layer
        self.stack = Stack("thinker", config.thinker, weights, ops)
        self.layers = config.thinker.layers
        self.kv_heads = config.thinker.kv_heads // weights.shard.world
        self.head_dim = config.thinker.head_dim
        self.hidden = config.thinker.hidden
        self.vocab = config.thinker.vocab

    @property
    def embedding(self) -> Tensor:
        """The table of text embeddings [V, H]."""
        return self._embed

    def embed(self, ids: Tensor) -> Tensor:
        """Rows [n, H] of token `ids` [n] int64."""
        return self._ops.embedding(self._embed, ids)

    def embed_rows(self, ids: Tensor, slots: Tensor, media: Tensor | None) -> Tensor:
        """Rows [n, H] of a step's `ids` [n] int32, as `Ops.embed_rows` reads them, with `slots` [S] int64, `media` [n, H]."""
        return self._ops.embed_rows(self._embed, ids, slots, media)

    def forward(
        self,
        x: Tensor,
        plan: Plan,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        states: bool,
        deepstack: Deepstack | None = None,
        rope: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Run rows `x` [n, H] over caches [layers, pages, page_size, Hkv, d], with `rope` tables [n, d] if made already.

        Returns the rows after the final norm [n, H] and, with `states`, the rows that the Talker accepts [n, H].
        """
        tap = self._accept if states else None
        return self.stack.forward(x, plan, k_cache, v_cache, tap=tap, deepstack=deepstack, rope=rope)

    def logits(self, hidden: Tensor) -> Tensor:
        """Text logits [r, V] float32 of rows `hidden` [r, H]."""
        return self._ops.linear_float(hidden, self._head)
