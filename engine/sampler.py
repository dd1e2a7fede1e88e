"""Logits -> token ids: greedy, temperature, top-k, top-p, repetition penalty. Random numbers are a function of a counter.

Processor order (spec section 9): repetition penalty, suppression, temperature, top-k (ties stay), top-p, softmax, draw.
A step takes the least sampling class that covers its rows; a greedy row gets the same token in each class.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.request import Sampling

LEAST_TEMPERATURE = 1e-6
GREEDY, PENALISED, SAMPLED = "greedy", "penalised", "sampled"
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
    """The sampling wishes of a step's R rows, one tensor a field: each [R] but `uniform` [R, codebooks] float64."""

    kind: str
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    penalty: Tensor
    uniform: Tensor

    @property
    def greedy(self) -> Tensor:
        """Which rows take the largest logit, [R] bool."""
        return self.temperature == 0


def sampling_class(rows: Sequence[Sampling]) -> str:
    """Return the least class that covers `rows` (no tensors): greedy, penalised (greedy with penalty) or sampled."""
    if any(row.temperature > 0 for row in rows):
        return SAMPLED
    return PENALISED if any(row.repetition_penalty != 1.0 for row in rows) else GREEDY


def sampling_rows(
    rows: Sequence[Sampling], steps: Sequence[int], *, codebooks: int, stream: int, device: torch.device
) -> SamplingRows:
    """Gather the wishes of R rows at their own `steps`, each tensor [R], `uniform` [R, codebooks]."""
    kind = sampling_class(rows)
    if kind == SAMPLED:
        uniform = torch.from_numpy(uniforms([row.seed for row in rows], steps, codebooks, stream)).to(device)
    else:
        uniform = torch.empty(0, dtype=torch.float64, device=device)
    return SamplingRows(
        kind=kind,
        temperature=torch.tensor([row.temperature for row in rows], dtype=torch.float32, device=device),
        top_k=torch.tensor([row.top_k for row in rows], dtype=torch.int64, device=device),
        top_p=torch.tensor([row.top_p for row in rows], dtype=torch.float32, device=device),
        penalty=torch.tensor([row.repetition_penalty for row in rows], dtype=torch.float32, device=device),
        uniform=uniform,
    )


def penalise(logits: Tensor, seen: Tensor, penalty: Tensor) -> Tensor:
    """Weaken the tokens of `seen` [R, V] bool in `logits` [R, V] by each row's `penalty` [R]; returns [R, V]."""
    by = penalty[:, None]
    weaker = torch.where(logits < 0, logits * by, logits / by)
    return torch.where(seen & (by != 1), weaker, logits)


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


def choose(logits: Tensor, rows: SamplingRows, seen: Tensor | None, codebook: int = 0) -> Tensor:
    """Choose a token for each row of `logits` [R, V] float32; `seen` [R, V] bool is read when a penalty asks. Returns [R].

    Suppressed tokens are -inf in `logits` already, where a penalty leaves them.
    """
    if rows.kind != GREEDY and seen is not None:
        logits = penalise(logits, seen, rows.penalty)
    best = logits.argmax(-1)
    if rows.kind != SAMPLED:
        return best
    # Below the least temperature a quotient may overflow, and what is drawn is the largest logit anyway.
    temperature = torch.where(rows.greedy, 1.0, rows.temperature.clamp(min=LEAST_TEMPERATURE))
    scaled = keep_top_p(keep_top_k(logits / temperature[:, None], rows.top_k), rows.top_p)
    return torch.where(rows.greedy, best, draw(scaled, rows.uniform[:, codebook]))


def top_two(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The two likeliest tokens of `logits` [R, V] and their log-probabilities: ids [R, 2] int64, values [R, 2] float32.

    Ties go to the lowest id.
    """
    # Ranked before the softmax, whose rounding makes ties of what is not one: the first id is the greedy token.
    first = logits.argmax(-1, keepdim=True)
    second = logits.scatter(1, first, float("-inf")).argmax(-1, keepdim=True)
    ids = torch.cat([first, second], dim=-1)
    return ids, logits.log_softmax(-1).gather(1, ids)
