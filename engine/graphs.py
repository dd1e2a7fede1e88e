"""CUDA graphs of the Thinker's steps: captured once at every bucket, replayed from static buffers."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from engine.capture import MOST_CAPTURED, Eager, Forwarded, Inputs, decode_buckets, place_media, prompt_buckets
from engine.config import EngineSettings
from engine.kernels import Plan, Segment, host_plan
from engine.kernels.compiles import compiled, watch
from engine.kernels.cuda import CudaOps
from engine.kernels.rows import RunLayout, Shape, Words, fill, views
from engine.loopback import Slots
from engine.model.thinker import Thinker
from engine.model.walks import THINKER_DECODE, THINKER_TEXT_DECODE

PROMPTS = "prompts"
# Steps whose values may be on their way at once; more than a lane has in flight.
RING = 4


class StepBuffers:
    """The static inputs of a captured step of up to `count` token rows: ids, plan and media [count, H], on the device.

    `load` brings a step's values there by one copy, and its pages by another when they are not those of the step before.
    """

    def __init__(
        self, ops: CudaOps, count: int, pages: int, page_size: int, hidden: int, dtype: torch.dtype, decode: bool
    ) -> None:
        self._decode = decode and ops.options.on("decode_kernel")
        self._ops = ops
        self._shape = Shape(count, count, self._decode)
        self._words = torch.zeros(self._shape.words, dtype=torch.int32, device=ops.device)
        self._table = torch.zeros((count, pages), dtype=torch.int32, device=ops.device)
        self.ids, self.plan = views(self._words, self._shape, self._table, page_size, padded=True)
        self.media = torch.zeros((count, hidden), dtype=dtype, device=ops.device)
        self.x = self.media
        self.rope: tuple[Tensor, Tensor] | None = None
        self._ring = [torch.zeros(self._shape.words, dtype=torch.int32, pin_memory=True) for _ in range(RING)]
        self._copied = [torch.cuda.Event() for _ in self._ring]  # type: ignore[no-untyped-call]
        self._turn = 0
        self._pages_of: Words | None = None

    def clear(self) -> None:
        """Make every row padding."""
        words = np.zeros(self._shape.words, dtype=np.int32)
        first, size = self._shape.places["starts" if self._decode else "write"]
        words[first : first + size] = -1
        self._words.copy_(torch.from_numpy(words))

    def load(self, ids: Words, plan: Plan) -> None:
        """Bring the `ids` [n] and the `plan` of a step, both on the host, to the device; nobody waits."""
        runs = plan.layout
        assert isinstance(runs, RunLayout)
        self._turn = (self._turn + 1) % RING
        self._copied[self._turn].synchronize()
        staged = self._ring[self._turn]
        blocks = None if self._decode else self._ops.query_blocks(runs)
        fill(staged.numpy(), self._shape, ids, plan, blocks)
        self._words.copy_(staged, non_blocking=True)
        self._copied[self._turn].record()
        if runs.table is not self._pages_of:
            count, most = runs.table.shape
            self._table[:count, :most].copy_(self._ops.put(runs.table))
            self._pages_of = runs.table

    def prepare(self, thinker: Thinker, tokens: Slots) -> None:
        """Embed the rows and make the rope tables outside the capture, in place where it reads them."""
        x = thinker.embed_rows(self.ids, tokens.values, self.media)
        cos, sin = thinker.stack.rope(self.plan.positions, x.dtype)
        if self.rope is None:
            self.x, self.rope = torch.empty_like(x), (torch.empty_like(cos), torch.empty_like(sin))
        self.x.copy_(x)
        self.rope[0].copy_(cos)
        self.rope[1].copy_(sin)


@dataclass(slots=True)
class _Captured:
    """A captured step: its static inputs, where its results lie, and which ways its kernels took, at each of its replays."""

    graph: torch.cuda.CUDAGraph
    buffers: StepBuffers
    result: Tensor
    ways: Counter[str]
    replays: int = 0


class Graphs:
    """Replays captured steps: decode steps at every one of `buckets`, steps with prompts at `prompt_buckets` token rows.

    What fits no bucket, or keeps states for the Talker, runs eagerly. A decode capture ends at the logits, one of a step with
    prompts at the last norm. Each of `walks` has decode captures of its own, and other walks replay those of the first; with
    `tables_inside` embedding and rope tables are part of them. Rows whose bits may not depend on the company decode in the
    largest bucket.
    """

    mode = "graphs"

    def __init__(
        self,
        eager: Eager,
        ops: CudaOps,
        *,
        buckets: Sequence[int],
        prompt_buckets: Sequence[int],
        pages: int,
        walks: Sequence[str],
        tables_inside: bool,
    ) -> None:
        self.buckets = tuple(sorted(buckets))
        self.prompt_buckets = tuple(sorted(prompt_buckets))
        self._eager = eager
        self._ops = ops
        self._pages, self._page_size = pages, eager.page_size
        self._walks = tuple(walks)
        self._tables_inside = tables_inside
        self._compiled = 0
        watch()
        self._captured: dict[tuple[str, int], _Captured] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(ops.device)  # type: ignore[no-untyped-call]
        self.own_counters = {"steps_captured": 0, "prompt_steps_captured": 0, "captures": 0, "padded_rows": 0}

    @property
    def ways(self) -> dict[str, int]:
        """How often each way of the kernels was taken, in replays and eagerly."""
        total = Counter(self._ops.counters)
        for captured in self._captured.values():
            for way, count in captured.ways.items():
                total[way] += count * captured.replays
        return dict(total)

    @property
    def counters(self) -> dict[str, int]:
        """How steps ran, captured or eagerly, and how many kernels were compiled when serving had begun."""
        return self.own_counters | self._eager.counters | {"kernels_compiled_late": compiled() - self._compiled}

    @torch.inference_mode()
    def warm(self, settings: EngineSettings) -> None:
        """Run what no capture covers once, so that nothing is compiled later: the ends of steps with prompts, long steps."""
        most = settings.max_batch + settings.prefill_chunk
        decode, prompts = decode_buckets(settings.max_batch), prompt_buckets(most)
        # A step with prompts ends eagerly, at any number of rows that make a token.
        thinker = self._eager.thinker
        for count in range(1, decode[-1] + 1):
            rows = torch.zeros(count, thinker.hidden, dtype=thinker.embedding.dtype, device=self._ops.device)
            self._ops.argmax(thinker.logits(rows))
        captures = "captures" not in settings.disabled
        if not captures:
            for count in decode:
                self._try([1] * count)
        for count in {
            *(() if captures and "prompt_captures" not in settings.disabled else prompts),
            *range(MOST_CAPTURED, most + 1, 256),
            most,
        }:
            self._try([count])
        torch.cuda.synchronize()
        self._eager.eager_steps = 0
        self._ops.counters.clear()
        self._compiled = compiled()

    def _try(self, lengths: Sequence[int]) -> None:
        logits = self._eager.run(self._trial(lengths)).logits
        assert logits is not None
        self._ops.argmax(logits)

    def _trial(self, lengths: Sequence[int]) -> Inputs:
        """A step of prompts of these lengths (decode rows, if all are 1) from position 0, each on pages of its own."""
        segments: list[Segment] = []
        first = 0
        for length in lengths:
            pages = -(-length // self._page_size)
            segments.append(Segment(sum(s.length for s in segments), length, 0, tuple(range(first, first + pages))))
            first += pages
        count = sum(lengths)
        plan = host_plan(segments, torch.zeros(3, count), self._page_size, self._ops)
        walk = self._walks[0] if max(lengths) == 1 else None
        return Inputs(ids=np.zeros(count, dtype=np.int32), plan=plan, last=plan.last.numpy(), walk=walk)

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture every bucket, the largest first, so that memory is taken once."""
        sizes = self.buckets[-1:] if self._ops.options.batch_invariant else self.buckets
        wanted = [(walk, count) for walk in self._walks for count in reversed(sizes)]
        wanted += [(PROMPTS, count) for count in reversed(self.prompt_buckets)]
        for kind, count in wanted:
            self._captured[kind, count] = self._capture(count, decode=kind != PROMPTS)
            self.own_counters["captures"] += 1

    def _capture(self, count: int, *, decode: bool) -> _Captured:
        eager = self._eager
        buffers = StepBuffers(
            self._ops, count, self._pages, self._page_size, eager.thinker.hidden, eager.thinker.embedding.dtype, decode
        )
        buffers.clear()
        forward = partial(self._forward, buffers, decode)
        if not self._tables_inside:
            buffers.prepare(eager.thinker, eager.tokens)
        # Once as it comes: kernels are compiled and work space grows, neither of which may happen inside a capture.
        forward()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        before = self._ops.counters.copy()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool)
            result = forward()
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        counted = Counter(self._ops.counters)
        counted.subtract(before)
        self._ops.counters.clear()
        self._ops.counters.update(before)
        return _Captured(graph, buffers, result, counted)

    def _forward(self, buffers: StepBuffers, decode: bool) -> Tensor:
        thinker = self._eager.thinker
        if self._tables_inside:
            x, rope = thinker.embed_rows(buffers.ids, self._eager.tokens.values, buffers.media), None
        else:
            x, rope = buffers.x, buffers.rope
        cache = self._eager.cache
        hidden, _ = thinker.forward(x, buffers.plan, cache.keys, cache.values, states=False, rope=rope)
        return thinker.logits(hidden) if decode else hidden

    def bucket(self, inputs: Inputs) -> int:
        """The padded row count that a step runs in (no tensors)."""
        key = self._key(inputs)
        return self._eager.bucket(inputs) if key is None else key[1]

    def _key(self, inputs: Inputs) -> tuple[str, int] | None:
        if inputs.states:
            return None
        n = len(inputs.ids)
        sizes = self.buckets if inputs.walk is not None else self.prompt_buckets
        if inputs.walk is not None and self._ops.options.batch_invariant:
            sizes = self.buckets[-1:]
        place = bisect_left(sizes, n)
        if place == len(sizes):
            return None
        kind = PROMPTS if inputs.walk is None else inputs.walk if inputs.walk in self._walks else self._walks[0]
        return kind, sizes[place]

    def run(self, inputs: Inputs) -> Forwarded:
        """Replay the smallest capture that a step of n token rows fits, or run it eagerly."""
        key = self._key(inputs)
        if key is None:
            return self._eager.run(inputs)
        captured = self._captured[key]
        captured.buffers.load(inputs.ids, inputs.plan)
        place_media(captured.buffers.media, inputs, self._ops)
        if not self._tables_inside:
            captured.buffers.prepare(self._eager.thinker, self._eager.tokens)
        captured.graph.replay()
        captured.replays += 1
        n = len(inputs.ids)
        self.own_counters["padded_rows"] += key[1] - n
        if inputs.walk is not None:
            self.own_counters["steps_captured"] += 1
            return Forwarded(captured.result[:n], None)
        self.own_counters["prompt_steps_captured"] += 1
        return Forwarded(self._eager.logits(captured.result[:n], inputs), None)


def graphs_of(eager: Eager, settings: EngineSettings, pages: int, part: slice = slice(None)) -> Graphs:
    """The graphs that `settings` ask for, not yet captured, for tracks of up to `pages` pages; `part` takes some buckets."""
    ops = eager.ops
    assert isinstance(ops, CudaOps)
    most = settings.max_batch + settings.prefill_chunk

    def on(switch: str) -> bool:
        return switch not in settings.disabled

    captures = on("captures")
    return Graphs(
        eager,
        ops,
        buckets=decode_buckets(settings.max_batch)[part] if captures else (),
        prompt_buckets=prompt_buckets(most)[part] if captures and on("prompt_captures") else (),
        pages=pages,
        walks=(THINKER_TEXT_DECODE,) if on("shared_captures") else (THINKER_TEXT_DECODE, THINKER_DECODE),
        tables_inside=on("in_graph_tables"),
    )
