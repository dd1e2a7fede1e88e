"""Features of a corpus, what training adds to them, and batches."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import soundfile

from engine.model.clips import decode, log_mel
from engine.tiny import mels, shards, speech
from engine.tiny.mels import MelClip
from engine.tiny.speech import Clip
from engine.tiny.voices import Floats, Line

BINS = 128
SECONDS = (0.5, 1.3, 0.8, 0.9)


def sound(seconds: float, seed: int, rate: int = 24000) -> Floats:
    """A tone that comes and goes over a little noise."""
    time = np.arange(round(seconds * rate)) / rate
    noise = np.random.default_rng(seed).standard_normal(len(time))
    return (0.3 * np.sin(2 * np.pi * 440 * time) * np.sin(9 * time) ** 2 + 0.003 * noise).astype(np.float32)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Four clips in two shards."""
    folder = tmp_path / "speech"
    folder.mkdir()
    made = []
    for name, numbers in (("00000", (0, 1)), ("00001", (2, 3))):
        parts = [np.rint(sound(SECONDS[number], number) * 32768).astype(np.int16) for number in numbers]
        starts = shards.save(folder, name, parts)
        made += [
            Clip(Line(f"text {number}", "hibari", number), f"{name}.npy", start, len(part))
            for number, start, part in zip(numbers, starts, parts, strict=True)
        ]
    shards.write_list(folder / shards.MANIFEST, made)
    return folder


def extract(corpus: Path, folder: Path, copies: int = 2, seed: int = 5) -> list[MelClip]:
    return mels.extract(corpus, folder, BINS, copies, seed, workers=1, tell=lambda _: None)


def test_speech_is_brought_to_16_khz_as_the_server_does_it():
    samples = np.rint(sound(1.5, 0) * 32768).astype(np.int16)
    file = io.BytesIO()
    soundfile.write(file, samples, 24000, format="WAV", subtype="PCM_16")
    served = decode(file.getvalue(), 0, 10.0).samples
    assert np.abs(mels.at_16_khz(samples / np.float32(32768)) - served).max() < 1e-5


def test_features_are_the_servers_and_further_copies_are_not_clean(corpus: Path, tmp_path: Path):
    made = extract(corpus, tmp_path / "mels")
    assert [(clip.line.text, clip.copy, clip.shard) for clip in made] == [
        *(("text 0", 0, "00000-0.npy"), ("text 1", 0, "00000-0.npy")),
        *(("text 0", 1, "00000-1.npy"), ("text 1", 1, "00000-1.npy")),
        *(("text 2", 0, "00001-0.npy"), ("text 3", 0, "00001-0.npy")),
        *(("text 2", 1, "00001-1.npy"), ("text 3", 1, "00001-1.npy")),
    ]
    assert [clip.frames for clip in made] == [50, 130, 50, 130, 80, 90, 80, 90]
    assert (made[1].start, made[1].seconds) == (50, 1.3)
    assert mels.manifest(tmp_path / "mels") == made
    for clip in made:
        [spoken] = [one for one in speech.manifest(corpus) if one.line == clip.line]
        clean = log_mel(mels.at_16_khz(speech.read(corpus, spoken)), BINS)
        read = mels.read(tmp_path / "mels", clip)
        assert read.shape == (BINS, clip.frames)
        apart = np.abs(read - clean)
        assert apart.max() < 2e-3 if clip.copy == 0 else apart.mean() > 0.02


def test_features_are_the_same_for_a_seed_and_go_on_where_they_stopped(corpus: Path, tmp_path: Path):
    extract(corpus, tmp_path / "a")
    extract(corpus, tmp_path / "b")
    (tmp_path / "b" / "00000-1.jsonl").unlink()
    extract(corpus, tmp_path / "b")
    extract(corpus, tmp_path / "c", seed=6)
    a, b, c = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in "abc")
    assert a == b
    assert a["00000-0.npy"] == c["00000-0.npy"]
    assert a["00000-1.npy"] != c["00000-1.npy"]


def test_features_of_another_corpus_are_refused(corpus: Path, tmp_path: Path):
    extract(corpus, tmp_path / "mels", copies=1)
    clips = speech.manifest(corpus)
    other = [Clip(Line("another text", "hibari", 0), clips[0].shard, 0, clips[0].samples), *clips[1:]]
    shards.write_list(corpus / shards.MANIFEST, other)
    with pytest.raises(ValueError, match="holds features of another corpus"):
        extract(corpus, tmp_path / "mels", copies=1)


def decibels(part: Floats, whole: Floats) -> float:
    return float(10 * np.log10(np.mean(np.square(part)) / np.mean(np.square(whole))))


def test_noise_lies_as_far_below_the_speech_as_asked(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mels, "_REVERB_SHARE", 0.0)
    monkeypatch.setattr(mels, "_NOISE_SHARE", 1.0)
    monkeypatch.setattr(mels, "_GAIN_DB", (0.0, 0.0))
    clean = sound(2.0, 0, 16000)
    ratios = [-decibels(mels.augment(clean, np.random.default_rng(seed)) - clean, clean) for seed in range(40)]
    assert 8.0 - 0.1 <= min(ratios) < 15.0
    assert 28.0 < max(ratios) <= 35.0 + 0.1


def test_a_room_answers_after_the_sound_and_never_before(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mels, "_REVERB_SHARE", 1.0)
    monkeypatch.setattr(mels, "_NOISE_SHARE", 0.0)
    monkeypatch.setattr(mels, "_GAIN_DB", (0.0, 0.0))
    clap = np.zeros(16000, np.float32)
    clap[4000] = 0.9
    for seed in range(10):
        added = mels.augment(clap, np.random.default_rng(seed)) - clap
        assert np.abs(added[:4000]).max() < 1e-6
        assert -15.1 <= decibels(added, clap) <= 0.1
        energy = [float(np.square(part).sum()) for part in np.split(added[4000:12000], 4)]
        assert energy[0] > 10 * energy[3]


def test_what_is_added_depends_on_the_seed_only():
    clean = sound(1.0, 0, 16000)
    heard = [mels.augment(clean, np.random.default_rng(seed)) for seed in (1, 1, 2)]
    assert np.array_equal(heard[0], heard[1])
    assert not np.array_equal(heard[0], heard[2])
    loud = mels.augment(clean * 3, np.random.default_rng(3))
    assert (len(loud), np.abs(loud).max() <= 1.0) == (16000, True)


def test_each_clip_is_in_one_batch_of_like_lengths_within_the_limit():
    frames = [int(length) for length in np.random.default_rng(0).integers(100, 1200, 3000)]
    groups = mels.grouped(frames, seconds_per_batch=200.0, seed=1)
    assert sorted(place for group in groups for place in group) == list(range(3000))
    padded = [max(frames[place] for place in group) * len(group) for group in groups]
    assert max(padded) <= 20_000
    assert sum(padded) < 1.15 * sum(frames)
    # Not sorted by length any more, and the batches of another pass hold other clips together.
    means = [sum(frames[place] for place in group) / len(group) for group in groups]
    assert means != sorted(means)
    assert groups == mels.grouped(frames, 200.0, 1)
    assert {frozenset(group) for group in groups}.isdisjoint(frozenset(g) for g in mels.grouped(frames, 200.0, 2))


def test_a_clip_longer_than_a_batch_is_an_error():
    with pytest.raises(ValueError, match=r"a clip lasts 12.0 s, a batch 10 s"):
        mels.grouped([1200, 300], 10.0, 0)
    assert mels.grouped([], 10.0, 0) == []


def test_batches_hold_each_clips_frames_and_zeros_after_them(corpus: Path, tmp_path: Path):
    folder = tmp_path / "mels"
    clips = [clip for clip in extract(corpus, folder) if clip.copy == 0]
    got = list(mels.batches(folder, clips, seconds_per_batch=2.0, seed=0))
    assert sorted(clip.line.text for batch in got for clip in batch.clips) == ["text 0", "text 1", "text 2", "text 3"]
    assert sorted(len(batch.clips) for batch in got) == [1, 1, 2]
    for batch in got:
        assert (batch.mel.dtype, batch.frames.dtype) == (np.float32, np.int64)
        assert batch.mel.shape == (len(batch.clips), BINS, batch.frames.max())
        for row, clip in enumerate(batch.clips):
            assert batch.frames[row] == clip.frames
            assert np.array_equal(batch.mel[row, :, : clip.frames], mels.read(folder, clip).astype(np.float32))
            assert not batch.mel[row, :, clip.frames :].any()
