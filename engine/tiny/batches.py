"""Conversations in text and speech, mixed and padded into batches for the Thinker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from engine.model.positions import audio_tokens

# Neighbours in length are drawn from this many times as many, so that the same clips don't always meet.
WINDOW = 8
HOST = ("heard", "spoken")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Conversation:
    """Ids of a prompt and its answer, and at most one clip.

    The first `prompt` of `ids` (at least one) are given, the others learned. `mel` is [bins, T], and the ids hold one audio
    placeholder for each row of it; `transcript` are the letters of what is said in it (`letters.letters`).
    """

    ids: Sequence[int]
    prompt: int
    mel: Tensor | None = None
    transcript: Sequence[int] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """B conversations padded on the right to L ids, and the C clips in them padded to T frames.

    `ids` [B, L], `lengths` [B], `mels` [C, bins, T] (None without clips), `frames` [C]. The rows of the clips, in order, go to
    the flat `places` [n] of [B, L]; they are the flat `rows` [n] of what the encoder gives. The hidden rows at the flat `asked`
    [m] are to predict `labels` [m]. `transcripts` [C, S] are padded with 0. Integers are int64. `heard` and `spoken` [C], the
    lengths of clips in rows and of transcripts, stay on the host: the CTC loss would wait for the device to read them.
    """

    ids: Tensor
    lengths: Tensor
    mels: Tensor | None
    frames: Tensor
    places: Tensor
    rows: Tensor
    asked: Tensor
    labels: Tensor
    transcripts: Tensor
    heard: Tensor
    spoken: Tensor

    def to(self, device: torch.device) -> Batch:
        """The same batch on `device` but for what stays on the host; every tensor keeps its shape."""
        moved = {}
        for part in fields(self):
            value = getattr(self, part.name)
            if value is not None and part.name not in HOST:
                moved[part.name] = value.to(device, non_blocking=True)
        return replace(self, **moved)

    @property
    def valid(self) -> Tensor:
        """Which rows are no padding, [B, L] bool."""
        return torch.arange(self.ids.shape[1], device=self.ids.device) < self.lengths[:, None]


def collate(conversations: Sequence[Conversation], audio: int, *, chunk: int = 100, rows_per_chunk: int = 13) -> Batch:
    """Pad `conversations` into a batch; `audio` is the id of audio placeholders, `chunk` frames make `rows_per_chunk` rows.

    Mels keep their device and become float32 [C, bins, T]. ValueError for one whose placeholders don't match its clip.
    """
    lengths = [len(one.ids) for one in conversations]
    ids = np.zeros((len(conversations), max(lengths)), dtype=np.int64)
    learned = np.zeros(ids.shape, dtype=bool)
    for index, one in enumerate(conversations):
        ids[index, : len(one.ids)] = one.ids
        learned[index, one.prompt : len(one.ids)] = True
        rows = 0 if one.mel is None else audio_tokens(one.mel.shape[1])
        if rows != (found := list(one.ids).count(audio)):
            raise ValueError(f"conversation {index} has {found} audio placeholders, its clip makes {rows} rows")
    clips = [one for one in conversations if one.mel is not None]
    frames = [one.mel.shape[1] for one in clips if one.mel is not None]
    stride = rows_per_chunk * -(-max(frames, default=0) // chunk)
    # Nothing predicts the first id.
    asked = np.flatnonzero(learned[:, 1:].ravel())
    asked += asked // max(ids.shape[1] - 1, 1)
    transcripts = np.zeros((len(clips), max((len(one.transcript) for one in clips), default=0)), dtype=np.int64)
    for index, one in enumerate(clips):
        transcripts[index, : len(one.transcript)] = one.transcript
    heard = [audio_tokens(count) for count in frames]
    taken = [index * stride + np.arange(count) for index, count in enumerate(heard)]
    return Batch(
        ids=torch.from_numpy(ids),
        lengths=torch.tensor(lengths),
        mels=_padded([one.mel for one in clips if one.mel is not None]),
        frames=torch.tensor(frames, dtype=torch.int64),
        places=torch.from_numpy(np.flatnonzero((ids == audio).ravel())),
        rows=torch.from_numpy(np.concatenate(taken) if taken else np.zeros(0, dtype=np.int64)),
        asked=torch.from_numpy(asked),
        labels=torch.from_numpy(ids.ravel()[asked + 1]),
        transcripts=torch.from_numpy(transcripts),
        heard=torch.tensor(heard, dtype=torch.int64),
        spoken=torch.tensor([len(one.transcript) for one in clips], dtype=torch.int64),
    )


def _padded(mels: list[Tensor]) -> Tensor | None:
    if not mels:
        return None
    padded = torch.nn.utils.rnn.pad_sequence([mel.t() for mel in mels], batch_first=True)
    return padded.transpose(1, 2).float()


def cost(one: Conversation) -> int:
    """What a conversation costs in a batch: its ids, and four for each of its clip's rows."""
    # Eight mel frames go through three convolutions and the encoder for each row.
    return len(one.ids) + (0 if one.mel is None else 4 * audio_tokens(one.mel.shape[1]))


def growing(progress: float, short: float = 0.15) -> float:
    """The share of all items, shortest first, that may be drawn at `progress`: at first a fifth, from `short` on all."""
    return min(1.0, 0.2 + 0.8 * progress / short)


class Alike(Generic[T]):
    """Draws items that are alike in size, all items as often as each other."""

    def __init__(self, items: Sequence[T], size: Callable[[T], int]) -> None:
        """`size` is what an item costs, above 0. ValueError without items."""
        if not items:
            raise ValueError("there is nothing to draw from")
        self._items = sorted(items, key=size)
        self._sizes = np.array([size(item) for item in self._items])
        self._until = self._sizes.cumsum()

    def draw(self, budget: float, share: float, generator: np.random.Generator) -> list[T]:
        """Different items that cost about `budget`, at least one, from the smallest `share` (above 0, up to 1) of all."""
        allowed = max(1, int(len(self._items) * share))
        # Fewer large items than small ones fit, so a large one is the middle of a draw more often.
        middle = int(np.searchsorted(self._until, generator.random() * self._until[allowed - 1], side="right"))
        count = max(1, min(allowed, int(budget / self._sizes[middle])))
        low = max(0, min(middle - WINDOW * count // 2, allowed - WINDOW * count))
        near = self._items[low : min(low + WINDOW * count, allowed)]
        return [near[int(index)] for index in generator.choice(len(near), count, replace=False)]


class Mixture:
    """Draws conversations of several kinds, each kind's share of a batch by cost.

    What a step draws depends on the seed and the step alone, so that training resumes where it was.
    """

    def __init__(self, kinds: Sequence[tuple[float, Sequence[Conversation]]], budget: int, seed: int) -> None:
        """`kinds` are weights and conversations; a batch costs about `budget`. ValueError for a kind without any."""
        total = sum(weight for weight, _ in kinds)
        self._kinds = [(budget * weight / total, Alike(conversations, cost)) for weight, conversations in kinds]
        self._seed = seed

    def draw(self, step: int, share: float) -> list[Conversation]:
        """The conversations of `step`, from the shortest `share` (above 0, up to 1) of each kind; at least one of each."""
        generator = np.random.default_rng((self._seed, step))
        return [one for budget, kind in self._kinds for one in kind.draw(budget, share, generator)]
