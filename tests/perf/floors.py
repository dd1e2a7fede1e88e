"""How fast the Thinker could be at the most: the bytes that must be read once, over a card's bandwidth. Pure.

Per decode step: attention, routers and norms, the text head, the experts that its rows share under uniform routing, and the
rows' keys and values. A closed loop adds one pass over the weights for each wave of prompts.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from engine.model.config import OmniConfig, StackConfig
from engine.model.weights import expected_tensors

BYTES = 2  # of a bfloat16


@dataclass(frozen=True, slots=True)
class Reads:
    """What a model's Thinker reads, in bytes: `dense` (attention, routers, norms), `head`, one `expert`, `kv` a position."""

    dense: int
    head: int
    expert: int
    kv: int
    layers: int
    experts: int
    top_k: int

    @classmethod
    def of(cls, c: StackConfig) -> Reads:
        """The reads of a stack of decoder layers in bfloat16."""
        heads = (c.heads + 2 * c.kv_heads) * c.head_dim
        layer = c.hidden * (heads + c.heads * c.head_dim + c.experts + 2) + 2 * c.head_dim
        return cls(
            dense=BYTES * (c.layers * layer + c.hidden),
            head=BYTES * c.vocab * c.hidden,
            expert=BYTES * 3 * c.moe_inter * c.hidden,
            kv=BYTES * 2 * c.layers * c.kv_heads * c.head_dim,
            layers=c.layers,
            experts=c.experts,
            top_k=c.top_k,
        )

    def distinct(self, rows: int) -> float:
        """How many experts of a layer `rows` rows pick together, if every choice is as likely as any other."""
        return self.experts * (1 - (1 - self.top_k / self.experts) ** rows)

    def step(self, rows: int) -> float:
        """The bytes of weights that a step of `rows` token rows reads."""
        return self.dense + self.head + self.layers * self.distinct(rows) * self.expert


def text_tok_s(reads: Reads, concurrency: int, prompt: int, tokens: int, bytes_per_s: float) -> float:
    """The most tokens a second of a closed loop of requests with `prompt` ids in and `tokens` tokens out."""
    steps = tokens - 1
    context = prompt + steps / 2
    decode = steps * (reads.step(concurrency) + concurrency * context * reads.kv)
    return concurrency * tokens * bytes_per_s / (decode + reads.step(concurrency * prompt))


def weight_bytes(config: OmniConfig) -> int:
    """The bytes of a model's weights in bfloat16, without the vision encoder, which is not loaded."""
    shapes = expected_tensors(config)
    return BYTES * sum(prod(shape) for name, shape in shapes.items() if ".visual." not in name)


def kv_bytes(config: OmniConfig, positions: int) -> int:
    """The bytes of the keys and values of so many positions, of the Thinker and, where there is one, of the Talker."""
    stacks = [config.thinker, *([config.talker.stack] if config.talker is not None else [])]
    return sum(Reads.of(stack).kv * positions for stack in stacks)
