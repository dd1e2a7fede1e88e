"""What runs a Thinker step's forward: `Eager` as it comes, `Graphs` by replaying a captured one, with the same two methods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from engine.kernels import Ints, Ops, Plan
from engine.kv.pages import KVCache
from engine.loopback import Slots
from engine.model.thinker import Thinker

MOST_CAPTURED = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What a step over n token rows reads, on the host but for the media's states.

    `ids` [n] holds prompt ids, and -1 - slot where a row takes what its slot holds. `media` gives token rows [m] and their
    states [m, H]. `last` [M] are the token rows whose logits are wanted; `states` asks for what the Talker accepts. `walk` is
    the step's one decode walk, or None when prompts are among its rows.
    """

    ids: npt.NDArray[np.int32]
    plan: Plan
    last: Ints
    media: Sequence[tuple[Ints, Tensor]] = ()
    states: bool = False
    walk: str | None = None


@dataclass(frozen=True, slots=True)
class Forwarded:
    """`logits` [M, V] float32 of the rows asked for, None without any, and what the Talker `accept`s [n, H] if it was kept."""

    logits: Tensor | None
    accept: Tensor | None


class Capture(Protocol):
    """Runs the Thinker's steps. `buckets` are the captured row counts of decode steps."""

    mode: str
    buckets: tuple[int, ...]

    @property
    def counters(self) -> dict[str, int]:
        """How steps ran."""

    @property
    def ways(self) -> dict[str, int]:
        """How often each way of the kernels was taken."""

    def bucket(self, inputs: Inputs) -> int:
        """The padded row count that a step runs in (no tensors)."""

    def run(self, inputs: Inputs) -> Forwarded:
        """Run a step over its n token rows."""


class Eager:
    """Runs every step as it comes, in a bucket of its own row count; `buckets` lists captured sizes, so it stays empty."""

    mode = "eager"
    buckets: tuple[int, ...] = ()

    def __init__(self, thinker: Thinker, cache: KVCache, tokens: Slots, ops: Ops, page_size: int) -> None:
        self.thinker = thinker
        self.page_size = page_size
        self.cache = cache
        self.tokens = tokens
        self.ops = ops
        self.eager_steps = 0

    @property
    def counters(self) -> dict[str, int]:
        """How steps ran: eagerly."""
        return {"steps_eager": self.eager_steps}

    @property
    def ways(self) -> dict[str, int]:
        """How often each way of the kernels was taken."""
        return dict(self.ops.counters)

    def bucket(self, inputs: Inputs) -> int:
        """The padded row count that a step runs in (no tensors)."""
        return len(inputs.plan.last)

    def run(self, inputs: Inputs) -> Forwarded:
        """Run a step over its n token rows."""
        self.eager_steps += 1
        plan, ids = self.ops.upload(inputs.plan, prompts=inputs.walk is None), self.ops.put(inputs.ids)
        media = self._media(inputs) if inputs.media else None
        x = self.thinker.embed_rows(ids, self.tokens.values, media)
        hidden, accept = self.thinker.forward(x, plan, self.cache.keys, self.cache.values, states=inputs.states)
        return Forwarded(self.logits(hidden, inputs), accept)

    def logits(self, hidden: Tensor, inputs: Inputs) -> Tensor | None:
        """The logits [M, V] of the rows of `hidden` [n, H] that a step asks for, None when it asks for none."""
        if len(inputs.last) == 0:
            return None
        if len(inputs.last) < hidden.shape[0]:
            hidden = hidden.index_select(0, self.ops.put(inputs.last))
        return self.thinker.logits(hidden)

    def _media(self, inputs: Inputs) -> Tensor:
        """The states of a step's media at their token rows, zeros elsewhere: [n, H]."""
        rows = self.thinker.embedding.new_zeros((len(inputs.ids), self.thinker.hidden))
        place_media(rows, inputs, self.ops)
        return rows


def decode_buckets(most: int) -> tuple[int, ...]:
    """The row counts of decode captures for up to `most` rows: powers of two to 16, then every 8, 16 and 32 (no tensors)."""
    sizes = [1, 2, 4, 8, *range(16, 32, 8), *range(32, 64, 16), *range(64, 4097, 32)]
    return (*(size for size in sizes if size < most), most)


def prompt_buckets(most: int) -> tuple[int, ...]:
    """The token rows of captured steps with prompts, for steps of up to `most` (no tensors).

    Beyond MOST_CAPTURED token rows a step is long enough for the host to launch its kernels one by one meanwhile.
    """
    sizes = [16, 32, 64, 96, *range(128, 512, 64), *range(512, MOST_CAPTURED + 1, 128)]
    within = min(most, MOST_CAPTURED)
    return (*(size for size in sizes if size < within), within)


def place_media(rows: Tensor, inputs: Inputs, ops: Ops) -> None:
    """Write the states of a step's media into `rows` [n or more, H], each at its token row."""
    for places, states in inputs.media:
        rows.index_copy_(0, ops.put(places), states.to(rows.dtype))
