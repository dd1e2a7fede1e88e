"""How words are spelled and sound, for training: embeddings that show a token's letters, and losses that ask for letters and
for sounds.

With a table of embeddings drawn at random, a model learns the spelling and the sound of every token by itself, from as many
examples as it meets. Here a token's row shows its letters one by one, so what is learned of one token holds for all that are
spelled alike. The table is never trained: Thinker and Talker can be trained side by side on the same one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.model.tiny import byte_letters
from engine.tiny.stack import EMBEDDING_DEVIATION, ctc

# What is heard of a text; a space tells words apart.
LETTERS = " abcdefghijklmnopqrstuvwxyz'"
_INDEX = {letter: index for index, letter in enumerate(LETTERS)}
# What the main voice writes down before it says a text: a sign a sound, silence first, and pauses.
SOUNDS = " ,.?!AIOTWYbdfhijklmnpstuvwzæðŋɐɑɔəɛɜɡɪɹʃʊʌʒʤʧθᵊᵻ"
_SOUND_INDEX = {sign: index for index, sign in enumerate(SOUNDS)}
# A token may show marks as well.
_SHOWN = LETTERS + ".,?"
# Letters of a token that its embedding shows, one part of the row each.
MOST_LETTERS = 4
# How byte-level BPE writes a space.
_SPACE = byte_letters()[ord(" ")]
# Letters that one row may spell. Speech has up to 20 letters a second and 12.5 rows.
SLOTS = 3
# Frames whose sounds a row is asked for, its own and the next ones.
AHEAD = 3
IGNORED = -100  # no target here


def letters(text: str) -> list[int]:
    """Indices into LETTERS of what is heard of `text`."""
    return [_INDEX[letter] for letter in text.lower() if letter in _INDEX]


def sounds(signs: str) -> list[int]:
    """Indices into SOUNDS of the signs of frames (`voices.frame_sounds`), each one's; a sign that is not known is silence."""
    return [_SOUND_INDEX.get(sign, 0) for sign in signs]


def spelled(tokens: Sequence[str], width: int, seed: int) -> Tensor:
    """A table [len(tokens), width] float32 of embeddings that show letters, exact in bfloat16.

    A token of up to MOST_LETTERS letters and marks has one value set for each of them, by place and letter; the rest of its
    row, and the whole row of any other token, is drawn at random. ValueError where `width` has no room for both.
    """
    shown = MOST_LETTERS * len(_SHOWN)
    if width <= shown:
        raise ValueError(f"a row of {width} values can't show letters, which take {shown}")
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(len(tokens), width, generator=generator) * EMBEDDING_DEVIATION
    for row, token in zip(table, tokens, strict=True):
        text = token.replace(_SPACE, " ").lower()
        if 0 < len(text) <= MOST_LETTERS and all(letter in _SHOWN for letter in text):
            row[:shown] = 0.0
            for place, letter in enumerate(text):
                # As long as the random row that it stands for.
                row[place * len(_SHOWN) + _SHOWN.index(letter)] = EMBEDDING_DEVIATION * (shown / len(text)) ** 0.5
    return table.bfloat16().float()


class LettersHead(nn.Module):
    """Asks rows for the letters that are said while they last, by CTC. Only training has it; nothing of it is exported."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self._signs = len(LETTERS) + 1
        self.out = nn.Linear(width, SLOTS * self._signs)

    def forward(self, rows: Tensor, targets: Tensor, counts: Tensor, lengths: Tensor) -> Tensor:
        """The loss a letter, a scalar, of `rows` [B, R, width] for `targets` [B, S], of which `counts` and `lengths` [B] count.

        Both are on the host (see `ctc`).
        """
        return ctc(self.scores(rows), targets, SLOTS * counts, lengths)

    def scores(self, rows: Tensor) -> Tensor:
        """Scores [B, SLOTS * R, letters + blank] of `rows` [B, R, width]."""
        scores: Tensor = self.out(rows)
        return scores.reshape(len(rows), -1, self._signs)


class SoundsHead(nn.Module):
    """Asks rows for the sounds of the frame that each is about to speak and of the AHEAD - 1 after it. Only training has it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.out = nn.Linear(width, AHEAD * len(SOUNDS))

    def forward(self, rows: Tensor, targets: Tensor) -> Tensor:
        """The loss a sound, a scalar, of `rows` [n, width] for `targets` [n, AHEAD], IGNORED where there is none."""
        scores = self.out(rows).view(-1, len(SOUNDS))
        return F.cross_entropy(scores, targets.flatten(), ignore_index=IGNORED)
