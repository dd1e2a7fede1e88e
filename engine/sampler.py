"""Logits -> token ids: penalties, bias, greedy or drawn. Random numbers are a function of a counter, never of the company.

Order: repetition penalty, frequency and presence penalties, bias, temperature, min-p, top-k (ties stay), top-p, draw.
Suppressed tokens come as -inf and stay so. A step takes the least sampling class that covers its rows; a greedy row gets the
same token in each class.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.kernels import Ops
from engine.request import Sampling

LEAST_TEMPERATURE = 1e-6
GREEDY, ADJUSTED, SAMPLED, SAMPLED_ADJUSTED = "greedy", "adjusted", "sampled", "sampled_adjusted"
CLASSES = (GREEDY, ADJUSTED, SAMPLED, SAMPLED_ADJUSTED)
THINKER_STREAM, TALKER_STREAM = 0, 1

# Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC11): the constants of Philox4x32.
_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


def philox(counter: npt.NDArray[np.uint64], key: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Philox4x32-10 of counters [4, N] and keys [2, N], 32-bit words held in uint64; returns words [4, N]."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for turn in range(_ROUNDS):
        key0 = (k0 + np.uint64(turn * _WEYL[0])) & _LOW
        key1 = (k1 + np.uint64(turn * _WEYL[1])) & _LOW
        left, right = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (right >> _SHIFT) ^ c1 ^ key0,
            right & _LOW,
            (left >> _SHIFT) ^ c3 ^ key1,
            left & _LOW,
        )
    return np.stack([c0, c1, c2, c3])


def uniforms(seeds: Sequence[int], steps: Sequence[int], codebooks: int, stream: int) -> npt.NDArray[np.float64]:
    """One number in (0, 1) per row and codebook, keyed by (seed, step, codebook, stream); returns [R, codebooks]."""
    rows = len(seeds)
    seed = np.repeat(np.array(seeds, dtype=np.uint64), codebooks)
    counter = np.zeros((4, rows * codebooks), dtype=np.uint64)
    counter[0] = np.repeat(np.array(steps, dtype=np.uint64), codebooks)
    counter[1] = np.tile(np.arange(codebooks, dtype=np.uint64), rows)
    counter[2] = stream
    words = philox(counter, np.stack([seed & _LOW, seed >> _SHIFT]))
    high = (words[0] << np.uint64(21)) ^ (words[1] >> np.uint64(11))
    numbers: npt.NDArray[np.float64] = (high.astype(np.float64) + 0.5) * 2.0**-53
    return numbers.reshape(rows, codebooks)


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """The sampling wishes of a step's R rows. Each tensor is [R], `uniform` [R, codebooks] float64; None: no row asks for it.

    `adjusted` says that a row has penalties or bias, `log_min_p` is the natural logarithm of min-p.
    """

    slots: Tensor
    repetition: Tensor | None = None
    frequency: Tensor | None = None
    presence: Tensor | None = None
    biased: bool = False
    temperature: Tensor | None = None
    log_min_p: Tensor | None = None
    top_k: Tensor | None = None
    top_p: Tensor | None = None
    uniform: Tensor | None = None

    @property
    def adjusted(self) -> bool:
        """Whether a row's logits change before the choice: by a penalty or by a bias."""
        return self.biased or self.repetition is not None or self.frequency is not None or self.presence is not None

    @property
    def kind(self) -> str:
        """The least class that covers the rows: one of CLASSES."""
        if self.temperature is None:
            return ADJUSTED if self.adjusted else GREEDY
        return SAMPLED_ADJUSTED if self.adjusted else SAMPLED

    def predictor(self, top_k: int, top_p: float) -> SamplingRows:
        """What the code predictor chooses with: for rows that draw temperature 1, `top_k` and `top_p`; nothing adjusted."""
        plain = SamplingRows(self.slots, uniform=self.uniform)
        if self.temperature is None:
            return plain
        return replace(
            plain,
            temperature=torch.where(self.temperature > 0, 1.0, 0.0),
            top_k=torch.full_like(self.slots, top_k),
            top_p=torch.full_like(self.temperature, top_p),
        )


class Sampler:
    """Chooses the tokens of one component, and keeps on the device what each slot's penalties and bias look at.

    `stream` and `codebooks` key the random numbers. Each state is [slots, vocab], made by the first request that asks for it.
    """

    def __init__(self, slots: int, vocab: int, *, stream: int, codebooks: int, ops: Ops) -> None:
        self._shape = (slots, vocab)
        self._stream = stream
        self._codebooks = codebooks
        self._ops = ops
        self._seen: Tensor | None = None
        self._counts: Tensor | None = None
        self._bias: Tensor | None = None
        self.counters = {f"{kind}_{what}": 0 for kind in CLASSES for what in ("steps", "rows")}

    def open(self, slot: int, sampling: Sampling, prompt: npt.NDArray[np.int32] | None) -> None:
        """Take a request into `slot`. The ids of `prompt` [n] count as seen for its repetition penalty, never as generated."""
        for state in (self._seen, self._counts, self._bias):
            if state is not None:
                state[slot].zero_()
        if sampling.repetition_penalty != 1.0:
            self._seen = self._made(self._seen, torch.bool)
            if prompt is not None:
                self._seen[slot].index_fill_(0, self._ops.put(prompt.astype(np.int64)), True)
        if sampling.frequency_penalty or sampling.presence_penalty:
            self._counts = self._made(self._counts, torch.int32)
        if sampling.logit_bias:
            self._bias = self._made(self._bias, torch.float32)
            ids = self._ops.put(np.array(list(sampling.logit_bias), dtype=np.int64))
            self._bias[slot].index_copy_(0, ids, self._column(sampling.logit_bias.values()))

    def _made(self, state: Tensor | None, dtype: torch.dtype) -> Tensor:
        return torch.zeros(self._shape, dtype=dtype, device=self._ops.device) if state is None else state

    def rows(self, wishes: Sequence[Sampling], slots: Tensor, steps: Sequence[int]) -> SamplingRows:
        """Gather the wishes of R rows that lie in `slots` [R] int64, each at its own one of `steps`; counts the class taken."""
        rows = self._draws(self._adjustments(SamplingRows(slots), wishes), wishes, steps)
        self.counters[f"{rows.kind}_steps"] += 1
        self.counters[f"{rows.kind}_rows"] += len(wishes)
        return rows

    def _adjustments(self, rows: SamplingRows, wishes: Sequence[Sampling]) -> SamplingRows:
        return replace(
            rows,
            repetition=self._asked([wish.repetition_penalty for wish in wishes], off=1.0),
            frequency=self._asked([wish.frequency_penalty for wish in wishes], off=0.0),
            presence=self._asked([wish.presence_penalty for wish in wishes], off=0.0),
            biased=any(wish.logit_bias for wish in wishes),
        )

    def _draws(self, rows: SamplingRows, wishes: Sequence[Sampling], steps: Sequence[int]) -> SamplingRows:
        temperature = self._asked([wish.temperature for wish in wishes], off=0.0)
        if temperature is None:
            return rows
        top_k = [wish.top_k for wish in wishes]
        numbers = uniforms([wish.seed for wish in wishes], steps, self._codebooks, self._stream)
        return replace(
            rows,
            temperature=temperature,
            # The logarithm is taken here because a vector's can differ in the last bit from one place to the next.
            log_min_p=self._asked(
                [math.log(p) if (p := wish.min_p) > 0 else -math.inf for wish in wishes], off=-math.inf
            ),
            top_k=self._ops.put(np.array(top_k, dtype=np.int64)) if any(top_k) else None,
            top_p=self._asked([wish.top_p for wish in wishes], off=1.0),
            uniform=self._ops.put(numbers),
        )

    def _asked(self, values: Sequence[float], *, off: float) -> Tensor | None:
        return None if all(value == off for value in values) else self._column(values)

    def _column(self, values: Iterable[float]) -> Tensor:
        return self._ops.put(np.fromiter(values, np.float32))

    def choose(self, logits: Tensor, rows: SamplingRows, codebook: int = 0) -> Tensor:
        """Choose a token for each row of `logits` [R, V] float32, suppressed ones -inf. Returns [R] int64."""
        logits = self._adjust(logits, rows)
        best = self._ops.argmax(logits)
        if rows.temperature is None or rows.uniform is None:
            return best
        return torch.where(rows.temperature > 0, draw(narrow(logits, rows), rows.uniform[:, codebook]), best)

    def _adjust(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        if rows.repetition is not None and self._seen is not None:
            logits = penalise(logits, self._seen.index_select(0, rows.slots), rows.repetition)
        if self._counts is not None and (rows.frequency is not None or rows.presence is not None):
            logits = penalise_generated(logits, self._counts.index_select(0, rows.slots), rows.frequency, rows.presence)
        if rows.biased and self._bias is not None:
            logits = logits + self._bias.index_select(0, rows.slots)
        return logits

    def note(self, rows: SamplingRows, tokens: Tensor) -> None:
        """Note the chosen `tokens` [R] for the penalties: once a step, after all that can fail."""
        at = (rows.slots, tokens)
        if rows.repetition is not None and self._seen is not None:
            self._seen.index_put_(at, torch.ones_like(tokens, dtype=torch.bool))
        if self._counts is not None and (rows.frequency is not None or rows.presence is not None):
            self._counts.index_put_(at, torch.ones_like(tokens, dtype=torch.int32), accumulate=True)


def penalise(logits: Tensor, seen: Tensor, penalty: Tensor) -> Tensor:
    """Weaken the tokens of `seen` [R, V] bool in `logits` [R, V] by each row's `penalty` [R]; returns [R, V]."""
    by = penalty[:, None]
    weaker = torch.where(logits < 0, logits * by, logits / by)
    return torch.where(seen & (by != 1), weaker, logits)


def penalise_generated(logits: Tensor, counts: Tensor, frequency: Tensor | None, presence: Tensor | None) -> Tensor:
    """Subtract from `logits` [R, V] `frequency` [R] times `counts` [R, V] int32, and `presence` [R] where a count is not 0."""
    if frequency is not None:
        logits = logits - frequency[:, None] * counts
    if presence is not None:
        logits = logits - presence[:, None] * (counts > 0)
    return logits


def narrow(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Divide `logits` [R, V] by the rows' temperatures and drop what min-p, top-k and top-p leave out; returns [R, V].

    That is vLLM's order. Transformers drops by min-p last, where it is measured by the same largest probability, so the two
    differ only in how much top-p has to cover.
    """
    assert rows.temperature is not None
    # Below the least temperature a quotient may overflow, and what is drawn is the largest logit anyway.
    temperature = torch.where(rows.temperature > 0, rows.temperature.clamp(min=LEAST_TEMPERATURE), 1.0)
    scaled = logits / temperature[:, None]
    if rows.log_min_p is not None:
        scaled = keep_min_p(scaled, rows.log_min_p)
    if rows.top_k is not None:
        scaled = keep_top_k(scaled, rows.top_k)
    return scaled if rows.top_p is None else keep_top_p(scaled, rows.top_p)


def keep_min_p(logits: Tensor, log_min_p: Tensor) -> Tensor:
    """Drop what is less likely than min-p times the likeliest of `logits` [R, V]; `log_min_p` [R]. Returns [R, V]."""
    least = logits.amax(-1, keepdim=True) + log_min_p[:, None]
    return logits.masked_fill(logits < least, float("-inf"))


def keep_top_k(logits: Tensor, top_k: Tensor) -> Tensor:
    """Drop what lies strictly below each row's k-th value in `logits` [R, V]; `top_k` [R], 0 keeps all. Returns [R, V]."""
    vocabulary = logits.shape[1]
    k = torch.where((top_k <= 0) | (top_k > vocabulary), vocabulary, top_k)
    ordered = logits.sort(dim=-1, descending=True).values
    least = ordered.gather(1, (k - 1)[:, None])
    return logits.masked_fill(logits < least, float("-inf"))


def keep_top_p(logits: Tensor, top_p: Tensor) -> Tensor:
    """Drop the least likely tokens of `logits` [R, V] whose summed probability is at most 1 - `top_p` [R]; returns [R, V]."""
    ordered, order = logits.sort(dim=-1, stable=True)
    below = ordered.softmax(-1).cumsum(-1) <= (1 - top_p)[:, None]
    below[:, -1] = False
    drop = torch.zeros_like(below).scatter(1, order, below) & (top_p < 1)[:, None]
    return logits.masked_fill(drop, float("-inf"))


def draw(logits: Tensor, uniform: Tensor) -> Tensor:
    """Pick a token per row of `logits` [R, V] where the running sum of its probabilities passes `uniform` [R]; returns [R]."""
    running = logits.softmax(-1).double().cumsum(-1)
    picked = (running < uniform[:, None] * running[:, -1:]).sum(-1)
    # A row whose number lands past the last token that has a chance takes that one.
    last = (logits > float("-inf")).double().cumsum(-1).argmax(-1)
    return torch.minimum(picked, last)


def step_logprobs(logits: Tensor, chosen: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Natural log-probabilities of raw `logits` [R, V]: of the tokens `chosen` [R], and of the `count` likeliest.

    Returns [R] float32, the likeliest ids [R, count] int64, best first and of equal logits the lowest id first, and their
    log-probabilities [R, count] float32.
    """
    # Ranked before the softmax, whose rounding makes ties of what is not one: the first id is the greedy token.
    left, ranked = logits.clone(), [chosen[:, None]]
    for _ in range(count):
        ranked.append(left.argmax(-1, keepdim=True))
        left.scatter_(1, ranked[-1], float("-inf"))
    ids = torch.cat(ranked, dim=1)
    logprobs = logits.log_softmax(-1).gather(1, ids)
    return logprobs[:, 0], ids[:, 1:], logprobs[:, 1:]
