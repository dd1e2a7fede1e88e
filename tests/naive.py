"""The naive loop: one request at a time over the model, no batching, no scheduler. What the engine must equal, token for token.

It shares with the engine the model, the block rule of its operations, the page size (attention runs over whole pages) and, for
sampled requests, the random numbers. Everything that makes the engine an engine is absent; how a token is chosen is written
down a second time, for one row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from torch import Tensor

from engine.config import EngineSettings
from engine.kernels import Plan, Segment, make_plan
from engine.model.omni import OmniModel
from engine.model.positions import prompt_positions
from engine.model.talker import Talker
from engine.model.thinker import Thinker
from engine.request import Sampling, Speech
from engine.sampler import TALKER_STREAM, THINKER_STREAM, uniforms

THINKER, TALKER, PREDICTOR = "thinker", "talker", "predictor"
CODE_GROUPS = 16
PREDICTOR_SAMPLING = Sampling(temperature=1.0, top_k=50, top_p=0.8)  # spec section 7.3, whenever the Talker samples
PAGE_SIZE = EngineSettings().page_size


@dataclass(frozen=True, slots=True)
class Past:
    """What penalties look at: the ids of the prompt (none for the Talker) and those generated."""

    prompt: Collection[int]
    made: Sequence[int]


Choose = Callable[[str, Tensor, int, int, Past], Tensor]
"""(component, logits [1, V] float32, step, code group, past) -> token [1] int64."""


@dataclass(frozen=True, slots=True)
class NaiveResult:
    """What one request gives: text ids (with the one that ended it), frames of 16 codes, samples float32 [m] at 24 kHz.

    `text` are the bytes that may be shown, if the bytes of tokens were given.
    """

    token_ids: list[int]
    frames: list[list[int]]
    pcm: Tensor
    finish_reason: str
    audio_finish_reason: str | None
    text: bytes = b""


def wishes(sampling: Sampling, speech: Speech | None) -> Choose:
    """Choose as a request asks: by its `sampling` for text, by its `speech` for codes; greedy where the temperature is 0."""
    talker = speech.sampling if speech else Sampling()
    predictor = msgspec.structs.replace(PREDICTOR_SAMPLING, seed=talker.seed) if talker.temperature > 0 else Sampling()
    asked = {THINKER: sampling, TALKER: talker, PREDICTOR: predictor}

    def pick(component: str, logits: Tensor, step: int, group: int, past: Past) -> Tensor:
        stream, codebooks = (THINKER_STREAM, 1) if component == THINKER else (TALKER_STREAM, CODE_GROUPS)
        number = uniforms([asked[component].seed], [step], codebooks, stream)[0, group]
        return choose_one(logits[0], asked[component], past, float(number))[None]

    return pick


def choose_one(logits: Tensor, wish: Sampling, past: Past, number: float) -> Tensor:
    """The token [] int64 that one row of `logits` [V] gives; `number` in (0, 1) decides where it is drawn."""
    scores = adjusted(logits, wish, past)
    if wish.temperature == 0:
        return scores.argmax()
    scores = scores / torch.tensor(max(wish.temperature, 1e-6))
    if wish.min_p > 0:
        scores[scores < scores.max() + math.log(wish.min_p)] = -math.inf
    if 0 < wish.top_k < len(scores):
        scores[scores < scores.sort().values[-wish.top_k]] = -math.inf
    if wish.top_p < 1:
        values, order = scores.sort(stable=True)
        below = values.softmax(0).cumsum(0) <= 1 - torch.tensor(wish.top_p)
        scores[order[:-1][below[:-1]]] = -math.inf
    edges = scores.softmax(0).double().cumsum(0)
    return torch.searchsorted(edges, edges[-1] * number)


def adjusted(logits: Tensor, wish: Sampling, past: Past) -> Tensor:
    """A copy of `logits` [V] with the penalties and the bias that `wish` asks for."""
    counts = torch.zeros_like(logits)
    for token in past.made:
        counts[token] += 1
    scores = logits.clone()
    if wish.repetition_penalty != 1:
        by = torch.tensor(wish.repetition_penalty)
        for token in {*past.prompt, *past.made}:
            scores[token] = scores[token] * by if scores[token] < 0 else scores[token] / by
    scores = scores - torch.tensor(wish.frequency_penalty) * counts
    scores = scores - torch.tensor(wish.presence_penalty) * (counts > 0)
    for token, bias in wish.logit_bias.items():
        scores[token] += bias
    return scores


def cut_at(text: bytes, stops: Sequence[str]) -> int | None:
    """Where `text` is cut: where the match that ends first begins, the longest of those that end there; None without one."""
    for end in range(len(text) + 1):
        if lengths := [len(stop.encode()) for stop in stops if text[:end].endswith(stop.encode())]:
            return end - max(lengths)
    return None


class Alone:
    """One sequence of the Thinker or the Talker in a cache of its own: `room` positions, `places` [3, L] of its prompt."""

    def __init__(self, part: Thinker | Talker, places: np.ndarray, room: int, dtype: torch.dtype) -> None:
        self.part, self.places, self.done = part, places, 0
        self.pages = tuple(range(-(-room // PAGE_SIZE)))
        shape = (part.layers, len(self.pages), PAGE_SIZE, part.kv_heads, part.head_dim)
        self.keys, self.values = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)

    def plan(self, count: int) -> Plan:
        """The plan of the next `count` positions: the prompt's own, then one more on every axis for each step."""
        first = self.places.shape[1]
        after = self.places.max() + 1 + np.arange(max(self.done + count - first, 0), dtype=np.float32)
        places = np.concatenate([self.places, np.broadcast_to(after, (3, len(after)))], axis=1)
        segment = Segment(offset=0, length=count, start=self.done, pages=self.pages)
        here = torch.from_numpy(places[:, self.done : self.done + count].astype(np.float32))
        self.done += count
        return make_plan((segment,), here, PAGE_SIZE, "cpu")


@torch.inference_mode()
def generate(
    model: OmniModel,
    prompt_ids: Sequence[int],
    mels: Sequence[Tensor],
    max_tokens: int,
    *,
    sampling: Sampling = Sampling(),  # noqa: B008 - a frozen value
    speech: Speech | None = None,
    ignore_eos: bool = False,
    choose: Choose | None = None,
    stop: Sequence[str] = (),
    stop_ids: Collection[int] = (),
    token_bytes: Callable[[int], bytes] | None = None,
) -> NaiveResult:
    """Answer one request: `mels` are its clips [128, T]; `choose` replaces what `sampling` and `speech` ask for.

    `stop` needs `token_bytes`. A token of `stop_ids` is no part of the text.
    """
    pick = choose or wishes(sampling, speech)
    thinker, ids = model.thinker, torch.tensor(prompt_ids)
    x = thinker.embed(ids)
    if mels:
        x[ids == model.config.ids.audio] = torch.cat(model.audio_encoder.forward(list(mels)))
    alone = Alone(thinker, prompt_positions(prompt_ids, model.config)[0], len(prompt_ids) + max_tokens, x.dtype)
    hidden, states = thinker.forward(x, alone.plan(len(prompt_ids)), alone.keys, alone.values, states=bool(mels))
    tokens: list[int] = []
    text, reason = b"", None
    while reason is None:
        token = pick(THINKER, thinker.logits(hidden[-1:]), len(tokens), 0, Past(prompt_ids, tokens))
        tokens.append(int(token))
        if tokens[-1] in stop_ids or (tokens[-1] == model.config.ids.im_end and not ignore_eos):
            reason = "stop"
        else:
            text += token_bytes(tokens[-1]) if token_bytes else b""
            reason = "stop" if cut_at(text, stop) is not None else "length" if len(tokens) == max_tokens else None
        if reason is None:
            hidden, _ = thinker.forward(thinker.embed(token), alone.plan(1), alone.keys, alone.values, states=False)
    text = text[: cut_at(text, stop)]
    if speech is None:
        return NaiveResult(tokens, [], torch.zeros(0), reason, None, text)
    media = states[ids == model.config.ids.audio] if states is not None else x[:0]
    frames, audio_reason = speak(model, prompt_ids, media, tokens, speech, pick)
    pcm = model.code2wav.decode(torch.tensor(frames).t()) if frames else torch.zeros(0)
    return NaiveResult(tokens, frames, pcm, reason, audio_reason, text)


def speak(
    model: OmniModel, prompt_ids: Sequence[int], media: Tensor, tokens: list[int], speech: Speech, pick: Choose
) -> tuple[list[list[int]], str]:
    """The frames that speak `tokens`, up to the codec's end or `max_frames`, and which of the two it was.

    A text of a single token says nothing (that token only ends it): no frames.
    """
    if len(tokens) == 1:
        return [], "stop"
    talker, ids = model.talker, model.config.ids
    spoken = [*tokens[:-1], ids.tts_eos]
    x, talker_ids = talker.prompt(prompt_ids, media, tokens[0], speech.voice)
    alone = Alone(talker, prompt_positions(talker_ids, model.config)[0], len(talker_ids) + speech.max_frames, x.dtype)
    barred = talker.suppressed.clone()
    barred[talker.eos] = speech.ignore_eos
    frames: list[list[int]] = []
    while True:
        y = talker.forward(x, alone.plan(len(x)), alone.keys, alone.values)[-1:]
        step = len(frames)
        first = pick(
            TALKER,
            talker.logits(y).masked_fill(barred, float("-inf")),
            step,
            0,
            Past((), [frame[0] for frame in frames]),
        )
        if int(first) == talker.eos:
            return frames, "stop"
        rest, total = talker.predictor.frame(
            y,
            first,
            talker.codec_embed(first),
            lambda logits, group: pick(PREDICTOR, logits, len(frames), group, Past((), ())),
        )
        frames.append([int(first), *rest[0].tolist()])
        if len(frames) == speech.max_frames:
            return frames, "length"
        text = spoken[step + 1] if step + 1 < len(spoken) else ids.tts_pad
        x = total + talker.text_rows(torch.tensor([text]))
