"""A corpus of speech as log-mel frames, and batches of them for training. The frames are those that the server makes. No torch.

A shard holds float16 [frames, mel_bins], one clip after the other. Copy 0 of a clip is clean; each further one went through a
room, a noise and a level of its own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soxr
from numpy.typing import NDArray

from engine.model.clips import HOP, SAMPLE_RATE, log_mel
from engine.tiny import shards, speech
from engine.tiny.speech import Clip
from engine.tiny.voices import SAMPLE_RATE as SPOKEN_RATE
from engine.tiny.voices import Floats, Line

FRAMES_PER_SECOND = SAMPLE_RATE // HOP
# Lengths are moved by up to this much before they are sorted, so that clips meet other clips in each pass.
_LENGTH_JITTER = 0.1
_REVERB_SHARE, _NOISE_SHARE = 0.5, 0.8
_DECAY_SECONDS = (0.1, 0.5)  # until a room's sound is 60 dB down
_DIRECT_TO_REVERB_DB = (0.0, 15.0)
_SIGNAL_TO_NOISE_DB = (8.0, 35.0)
_NOISE_SLOPES = (0.0, 1.0)  # of amplitude over frequency: from white to as brown as street noise
_GAIN_DB = (-10.0, 6.0)


@dataclass(frozen=True, slots=True)
class MelClip:
    """Log-mel frames of one copy of a line: `frames` rows of the file `shard` from row `start` on."""

    line: Line
    copy: int
    shard: str
    start: int
    frames: int

    @property
    def seconds(self) -> float:
        """How long it lasts."""
        return self.frames / FRAMES_PER_SECOND


@dataclass(frozen=True, slots=True)
class Batch:
    """Clips of like length: `mel` float32 [clips, mel_bins, most frames], zero after each clip's own `frames` int64 [clips]."""

    clips: tuple[MelClip, ...]
    mel: Floats
    frames: NDArray[np.int64]


def at_16_khz(samples: Floats) -> Floats:
    """Resample `samples` [n] from 24 kHz to the 16 kHz that a model hears, by the server's own resampler: [2 n / 3]."""
    return np.asarray(soxr.resample(samples, SPOKEN_RATE, SAMPLE_RATE), dtype=np.float32)


def augment(samples: Floats, chance: np.random.Generator) -> Floats:
    """Put `samples` [n] at 16 kHz into a room, add noise and change the level, each at random: [n], within -1 to 1."""
    heard = samples.astype(np.float32)
    if chance.random() < _REVERB_SHARE:
        heard = _in_a_room(heard, chance)
    if chance.random() < _NOISE_SHARE:
        heard = heard + _noise(heard, chance)
    gain = _factor(chance.uniform(*_GAIN_DB))
    return np.asarray(np.clip(heard * gain, -1.0, 1.0), dtype=np.float32)


def extract(
    corpus: Path,
    folder: Path,
    mel_bins: int,
    copies: int,
    seed: int,
    workers: int,
    tell: Callable[[str], None] = print,
) -> list[MelClip]:
    """Write log-mel frames of `copies` copies of each clip of `corpus` into `folder`, and their manifest; what is there stays.

    ValueError when features of another corpus lie there.
    """
    by_shard = itertools.groupby(speech.manifest(corpus), key=lambda clip: clip.shard)
    named = {
        f"{Path(shard).stem}-{copy}": (clips, copy)
        for shard, clips in [(shard, list(group)) for shard, group in by_shard]
        for copy in range(copies)
    }
    arguments = {name: (corpus, clips, copy, mel_bins, seed) for name, (clips, copy) in named.items()}
    shards.make(folder, _extract, arguments, workers, tell)
    made = [clip for name in named for clip in shards.read_list(shards.list_of(folder, name), MelClip)]
    if [(clip.line, clip.copy) for clip in made] != [
        (clip.line, copy) for clips, copy in named.values() for clip in clips
    ]:
        raise ValueError(f"{folder} holds features of another corpus than {corpus}; name another folder")
    shards.write_list(folder / shards.MANIFEST, made)
    return made


def manifest(folder: Path) -> list[MelClip]:
    """The clips of the features in `folder`, in order."""
    return shards.read_list(folder / shards.MANIFEST, MelClip)


def read(folder: Path, clip: MelClip) -> NDArray[np.float16]:
    """The frames of `clip`, float16 [mel_bins, frames], of the features in `folder`."""
    return np.asarray(shards.read(folder, clip.shard, clip.start, clip.frames), dtype=np.float16).T


def batches(folder: Path, clips: Sequence[MelClip], seconds_per_batch: float, seed: int) -> Iterator[Batch]:
    """Yield each of `clips` once, in batches of like length in random order; another `seed` makes other batches.

    The clips of a batch with what pads them last no longer than `seconds_per_batch`; ValueError names a clip that is longer.
    """
    for batch in grouped([clip.frames for clip in clips], seconds_per_batch, seed):
        yield packed(folder, [clips[place] for place in batch])


def grouped(frames: Sequence[int], seconds_per_batch: float, seed: int) -> list[list[int]]:
    """Places in `frames`, the lengths of clips, as `batches` puts them together."""
    chance = np.random.default_rng(seed)
    most = round(seconds_per_batch * FRAMES_PER_SECOND)
    if max(frames, default=0) > most:
        raise ValueError(
            f"a clip lasts {max(frames) / FRAMES_PER_SECOND:.1f} s, a batch {seconds_per_batch:g} s; allow more"
        )
    moved = np.asarray(frames) * chance.uniform(1 - _LENGTH_JITTER, 1 + _LENGTH_JITTER, len(frames))
    groups: list[list[int]] = []
    longest = 0
    for place in map(int, np.argsort(moved, kind="stable")):
        longest = max(longest, frames[place])
        if not groups or longest * (len(groups[-1]) + 1) > most:
            groups.append([])
            longest = frames[place]
        groups[-1].append(place)
    return [groups[place] for place in chance.permutation(len(groups))]


def packed(folder: Path, clips: Sequence[MelClip]) -> Batch:
    """Read `clips` of the features in `folder` and pad them to the longest."""
    frames = np.array([clip.frames for clip in clips], dtype=np.int64)
    read_in = [read(folder, clip) for clip in clips]
    mel = np.zeros((len(clips), read_in[0].shape[0], int(frames.max())), dtype=np.float32)
    for row, rows in enumerate(read_in):
        mel[row, :, : rows.shape[1]] = rows
    return Batch(tuple(clips), mel, frames)


def _extract(folder: Path, name: str, corpus: Path, clips: Sequence[Clip], copy: int, mel_bins: int, seed: int) -> None:
    parts = []
    for clip in clips:
        samples = at_16_khz(speech.read(corpus, clip))
        if copy:
            samples = augment(samples, np.random.default_rng([seed, clip.line.seed, copy]))
        parts.append(log_mel(samples, mel_bins).T.astype(np.float16))
    starts = shards.save(folder, name, parts)
    places = zip(clips, starts, map(len, parts), strict=True)
    made = [MelClip(clip.line, copy, f"{name}.npy", start, frames) for clip, start, frames in places]
    shards.write_list(shards.list_of(folder, name), made)


def _in_a_room(samples: Floats, chance: np.random.Generator) -> Floats:
    """Add the sound that walls throw back: noise that dies away, as loud as a random share of the direct sound."""
    decay = chance.uniform(*_DECAY_SECONDS)
    length = round(decay * SAMPLE_RATE)
    # Amplitude falls by 60 dB, a factor of e ** 6.91, over the decay.
    walls = chance.standard_normal(length) * np.exp(-6.91 * np.arange(length) / length)
    size = 1 << math.ceil(math.log2(len(samples) + length))
    thrown = np.fft.irfft(np.fft.rfft(samples, size) * np.fft.rfft(walls, size), size)[: len(samples)]
    loudness = _rms(samples) / max(_rms(thrown), 1e-9) / _factor(chance.uniform(*_DIRECT_TO_REVERB_DB))
    return np.asarray(samples + thrown * loudness, dtype=np.float32)


def _noise(samples: Floats, chance: np.random.Generator) -> Floats:
    """Steady noise [n] of a random colour, some decibels below `samples` [n]."""
    spectrum = np.fft.rfft(chance.standard_normal(len(samples)))
    # Below 50 Hz the slope would put all energy where nobody hears it.
    frequencies = np.maximum(np.fft.rfftfreq(len(samples), 1 / SAMPLE_RATE), 50.0)
    noise = np.fft.irfft(spectrum * frequencies ** -chance.uniform(*_NOISE_SLOPES), len(samples))
    loudness = _rms(samples) / max(_rms(noise), 1e-9) / _factor(chance.uniform(*_SIGNAL_TO_NOISE_DB))
    return np.asarray(noise * loudness, dtype=np.float32)


def _rms(samples: NDArray[np.floating]) -> float:
    return math.sqrt(float(np.mean(np.square(samples), dtype=np.float64)))


def _factor(decibels: float) -> float:
    return float(10.0 ** (decibels / 20))
