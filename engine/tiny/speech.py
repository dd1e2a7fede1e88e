"""A corpus of spoken sentences on disk: which voice says what and how, and the samples. No features (mels.py), no torch.

A shard holds 16-bit samples at 24 kHz, one clip after the other. A line sounds the same in any company, so a corpus depends
on its lines only, not on the number of processes or on where an earlier run was broken off.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engine.tiny import shards
from engine.tiny.voices import MAIN_VOICE, SAMPLE_RATE, Floats, Line, speak

# Shares of a corpus: lines of the main voice where there are others, and lines at a voice's own speed and pitch.
MAIN_SHARE, PLAIN_SHARE = 0.7, 0.5
SPEEDS, PITCHES = (0.85, 1.2), (0.85, 1.2)
# Of 70,000 characters in all voices, silence at the ends cut off; of hibari alone 0.056.
SECONDS_PER_CHARACTER = 0.058
# 9.6 MB of samples at that measure; the slowest voice at its slowest takes 1.4 times as much.
SHARD_SECONDS = 200.0

Sentences = Callable[[int, int], Sequence[str]]


@dataclass(frozen=True, slots=True)
class Clip:
    """A line that was spoken: `samples` samples of the file `shard` from sample `start` on."""

    line: Line
    shard: str
    start: int
    samples: int

    @property
    def seconds(self) -> float:
        """How long it lasts."""
        return self.samples / SAMPLE_RATE


def plan(texts: Sequence[str], voices: Sequence[str], seed: int) -> list[Line]:
    """Give each text a voice, a speed and a pitch, in fixed shares and at random within them."""
    chance = random.Random(seed)
    others = [voice for voice in voices if voice != MAIN_VOICE]
    lines = []
    for text in texts:
        main = MAIN_VOICE in voices and (chance.random() < MAIN_SHARE or not others)
        voice = MAIN_VOICE if main else chance.choice(others)
        plain = chance.random() < PLAIN_SHARE
        speed, pitch = (1.0, 1.0) if plain else (chance.uniform(*SPEEDS), chance.uniform(*PITCHES))
        lines.append(Line(text, voice, chance.getrandbits(32), round(speed, 3), round(pitch, 3)))
    return lines


def enough(sentences: Sentences, hours: float, seed: int) -> list[str]:
    """The first of `sentences(seed, count)` that take `hours` to speak, by their characters; ValueError where no more come."""
    wanted = hours * 3600 / SECONDS_PER_CHARACTER
    count = 64
    while True:
        texts = list(sentences(seed, count))
        if len(texts) < count:
            raise ValueError(f"{count} sentences were asked for and {len(texts)} came; ask for fewer hours")
        sums = np.cumsum([len(text) for text in texts])
        if sums[-1] >= wanted:
            return texts[: int(np.searchsorted(sums, wanted)) + 1]
        count *= 2


def corpus(
    folder: Path,
    hours: float,
    seed: int,
    workers: int,
    sentences: Sentences,
    voices: Sequence[str],
    tell: Callable[[str], None] = print,
) -> list[Clip]:
    """Make a corpus of about `hours` of what `sentences(seed, count)` gives; one that was broken off goes on."""
    return record(plan(enough(sentences, hours, seed), voices, seed), folder, workers, tell)


def record(lines: Sequence[Line], folder: Path, workers: int, tell: Callable[[str], None] = print) -> list[Clip]:
    """Speak `lines` into shards in `folder` with `workers` processes, write the manifest and return it; what is there stays.

    ValueError when other lines were recorded there.
    """
    named = {f"{number:05d}": shard for number, shard in enumerate(_cut(lines))}
    there = [name for name in named if shards.list_of(folder, name).exists()]
    if any(
        [clip.line for clip in shards.read_list(shards.list_of(folder, name), Clip)] != named[name] for name in there
    ):
        raise ValueError(
            f"{folder} holds a corpus of other lines: of other texts, or begun with other voices on this machine; "
            f"bring those back, or delete the folder"
        )
    shards.make(folder, _record, {name: (shard,) for name, shard in named.items()}, workers, tell)
    clips = [clip for name in named for clip in shards.read_list(shards.list_of(folder, name), Clip)]
    shards.write_list(folder / shards.MANIFEST, clips)
    return clips


def manifest(folder: Path) -> list[Clip]:
    """The clips of the corpus in `folder`, in order."""
    return shards.read_list(folder / shards.MANIFEST, Clip)


def read(folder: Path, clip: Clip) -> Floats:
    """The samples of `clip`, float32 [n] at 24 kHz, of the corpus in `folder`."""
    samples = shards.read(folder, clip.shard, clip.start, clip.samples)
    return np.asarray(samples / np.float32(32768), dtype=np.float32)


def _cut(lines: Sequence[Line]) -> Iterator[list[Line]]:
    """Cut `lines` where about SHARD_SECONDS are full."""
    shard: list[Line] = []
    seconds = 0.0
    for line in lines:
        shard.append(line)
        seconds += len(line.text) * SECONDS_PER_CHARACTER / line.speed
        if seconds >= SHARD_SECONDS:
            yield shard
            shard, seconds = [], 0.0
    if shard:
        yield shard


def _record(folder: Path, name: str, lines: Sequence[Line]) -> None:
    parts = [np.rint(samples * 32768).astype("<i2") for samples in speak(lines)]
    starts = shards.save(folder, name, parts)
    clips = [Clip(line, f"{name}.npy", *at) for line, *at in zip(lines, starts, map(len, parts), strict=True)]
    shards.write_list(shards.list_of(folder, name), clips)
