"""Engines in this process, without HTTP: a model loaded once, random prompts answered in a closed loop, decode steps timed.

Lives here: what ablate.py and boots.py share. Not here: what they compare, and the load that goes through HTTP (h200.py).
"""

from __future__ import annotations

import gc
import random
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

from engine.config import PREFILL_CHUNKS, EngineSettings, default_dtype, switches_off
from engine.engine import Engine, kernel_options
from engine.kernels import Ops, Plan, Routed
from engine.model.omni import OmniModel, load_model
from engine.model.released import write_released
from engine.request import Event, Request

# Decode steps after the prompts that are not timed, and the most tokens of a request, which bound the KV pages.
WARM_STEPS, MODEL_LEN = 8, 2048


@dataclass(frozen=True, slots=True)
class Load:
    """What engines are asked: `count` prompts of `length` random ids, `tokens` greedy tokens each, at each concurrency.

    `steps` decode steps are timed, for `limit_s` seconds at the most.
    """

    count: int = 32
    length: int = 64
    tokens: int = 64
    concurrencies: tuple[int, ...] = (1, 16)
    steps: int = 256
    limit_s: float = 2.0


@dataclass(frozen=True, slots=True)
class Answers:
    """What an engine made of a Load: per concurrency the tokens of each prompt, and the median ms of a decode step."""

    tokens: dict[int, list[list[int]]]
    step_ms: dict[int, float]


def engine_settings(
    device: str, *, off: Sequence[str] = (), batch_invariant: bool = False, max_batch: int = 64
) -> EngineSettings:
    """The settings of `omni serve` on this device, with the switches `off`."""
    return EngineSettings(
        device=device,
        dtype=default_dtype(device),
        disabled=switches_off(device, ",".join(off), ""),
        batch_invariant=batch_invariant,
        max_batch=max_batch,
        max_model_len=MODEL_LEN,
        prefill_chunk=PREFILL_CHUNKS[device],
    )


def load(folder: Path | None, device: str) -> OmniModel:
    """The checkpoint in a folder; without one the released shapes, their weights drawn on the device."""
    settings = engine_settings(device)
    dtype, options = getattr(torch, settings.dtype), kernel_options(settings)
    if folder is not None:
        return load_model(folder, device=device, dtype=dtype, options=options)
    with tempfile.TemporaryDirectory(prefix="released-") as place:
        write_released(Path(place))
        return load_model(Path(place), device=device, dtype=dtype, dummy=True, options=options)


@contextmanager
def running(model: OmniModel, settings: EngineSettings) -> Iterator[Engine]:
    """An engine over a model's weights; its caches and captures are gone afterwards."""
    built = [Engine(model.with_options(kernel_options(settings)), settings)]
    try:
        yield built[0]
    finally:
        built.clear()
        gc.collect()
        if settings.device == "cuda":
            torch.cuda.empty_cache()


def random_prompts(model: OmniModel, asked: Load, seed: int = 0) -> list[list[int]]:
    """Prompts of ordinary ids: below the first special token, which stands before the mark of a turn."""
    below = model.config.ids.im_start - 1
    return [
        [random.Random(f"{seed}/{number}/{place}").randrange(below) for place in range(asked.length)]
        for number in range(asked.count)
    ]


def answers(engine: Engine, prompts: Sequence[Sequence[int]], asked: Load) -> Answers:
    """Answer all prompts at each concurrency, then time decode steps there."""
    return Answers(
        {c: generate(engine, prompts, asked.tokens, c) for c in asked.concurrencies},
        {c: step_ms(engine, prompts[:c], asked.steps, asked.limit_s) for c in asked.concurrencies},
    )


def generate(engine: Engine, prompts: Sequence[Sequence[int]], tokens: int, concurrency: int) -> list[list[int]]:
    """The greedy tokens of each prompt, `concurrency` of them open at a time; RuntimeError for one that fails."""
    made: list[list[int]] = [[] for _ in prompts]
    left, is_open = deque(enumerate(prompts)), set[int]()
    while left or is_open:
        while left and len(is_open) < concurrency:
            number, ids = left.popleft()
            engine.add(_request(number, ids, tokens))
            is_open.add(number)
        for event in _turn(engine):
            number = int(event.request_id)
            made[number] += event.token_ids
            if event.done:
                is_open.discard(number)
    return made


def step_ms(engine: Engine, prompts: Sequence[Sequence[int]], steps: int, limit_s: float) -> float:
    """The median ms in which every one of the prompts gets a token, over `steps` times or for `limit_s` seconds."""
    for number, ids in enumerate(prompts):
        engine.add(_request(number, ids, WARM_STEPS + steps + 1))
    made, stamps, began = 0, list[float](), time.perf_counter()
    while len(stamps) <= steps and (len(stamps) < 2 or time.perf_counter() - began < limit_s):
        made += sum(len(event.token_ids) for event in _turn(engine))
        if made >= (WARM_STEPS + len(stamps)) * len(prompts):
            stamps.append(time.perf_counter())
    _end_all(engine, len(prompts))
    return 1e3 * statistics.median(after - before for before, after in pairwise(stamps))


def distinct_experts(engine: Engine, prompts: Sequence[Sequence[int]], steps: int) -> float:
    """How many experts a layer of a decode step reads for all prompts together: the mean over layers and `steps` steps.

    The engine's captures must be off: a replay asks nobody.
    """
    for number, ids in enumerate(prompts):
        engine.add(_request(number, ids, WARM_STEPS + 2 * steps))
    made = 0
    while made < WARM_STEPS * len(prompts):
        made += sum(len(event.token_ids) for event in _turn(engine))
    with _experts_counted(engine.model.ops, len(prompts)) as counts:
        for _ in range(steps):
            _turn(engine)
    _end_all(engine, len(prompts))
    return statistics.fmean(counts)


@contextmanager
def _experts_counted(ops: Ops, rows: int) -> Iterator[list[int]]:
    """While inside, note the distinct experts of each layer of each step of `rows` rows, routed by the plain operations."""
    counts, add_experts = list[int](), ops.add_experts

    def counting(x: Tensor, routed: Routed, plan: Plan) -> Tensor:
        if len(x) == rows:
            logits = ops.linear(ops.rms_norm(x, routed.norm, routed.eps), routed.router)
            counts.append(len(ops.route(logits, routed.top_k, routed.renormalise)[1].unique()))
        return add_experts(x, routed, plan)

    with patch.object(ops, "add_experts", counting):
        yield counts


def _end_all(engine: Engine, count: int) -> None:
    for number in range(count):
        engine.cancel(str(number))
    while engine.has_work:
        engine.step()


def _request(number: int, ids: Sequence[int], tokens: int) -> Request:
    return Request(id=str(number), prompt_ids=list(ids), max_tokens=tokens, ignore_eos=True)


def _turn(engine: Engine) -> list[Event]:
    events = engine.step()
    fault = next((event.error for event in events if event.error is not None), None)
    if fault is not None:
        raise RuntimeError(f"a request failed: {fault}")
    return events


def equal(one: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> int:
    """At how many prompts two sets of answers agree in every token."""
    return sum(list(a) == list(b) for a, b in zip(one, other, strict=True))


def first_difference(one: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> int | None:
    """The earliest step at which any prompt's token differs; None when none does."""
    steps = (
        step
        for a, b in zip(one, other, strict=True)
        for step, pair in enumerate(zip(a, b, strict=True))
        if pair[0] != pair[1]
    )
    return min(steps, default=None)
