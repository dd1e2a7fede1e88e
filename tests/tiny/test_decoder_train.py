"""The decoder trained on with codes that are foreseen: what is drawn, and that it learns them and leaves its codes alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.tiny.codec import Decoder
from engine.tiny.decoder_train import FRAMES, TRUE_SHARE, Segments, Spoken, train
from engine.tiny.optim import Settings
from tests.tiny.exported import Ticks
from tests.tiny.test_codec import SMALL

CPU = torch.device("cpu")
FRAME = 1920


def utterance(frames: int, first: int) -> Spoken:
    """True codes count frames from `first`, foreseen ones are 100 more, and each sample is the number of its frame."""
    numbers = first + np.arange(frames)
    true = np.tile(numbers, (SMALL.quantizers, 1))
    wave = np.repeat(numbers, FRAME)[: frames * FRAME - 700].astype(np.int16)
    return Spoken(true + 1000, true, wave)


def test_a_segment_is_of_one_utterance_and_its_samples_are_those_of_its_frames():
    torch.manual_seed(0)
    segments = Segments([utterance(30, 100), utterance(FRAMES - 1, 500), utterance(FRAMES, 700)], FRAME, CPU)
    codes, wave = segments.draw(400)
    assert codes.shape == (400, SMALL.quantizers, FRAMES) and wave.shape == (400, FRAMES * FRAME)
    foreseen = codes[:, 0, 0] >= 1000
    assert float(foreseen.float().mean()) == pytest.approx(1 - TRUE_SHARE, abs=0.06)
    numbers = codes - 1000 * foreseen[:, None, None]
    assert torch.equal(numbers, (numbers[:, :1, :1] + torch.arange(FRAMES)).expand_as(numbers))
    heard = (wave.view(400, FRAMES, FRAME) * 32768).long()
    # The last samples of an utterance's last frame are silence.
    assert torch.equal(heard[..., : FRAME - 700], numbers[:, 0, :, None].expand(-1, -1, FRAME - 700))
    assert set(numbers[:, 0, 0].tolist()) == {*range(100, 107), 700}


def test_utterances_that_are_all_too_short_are_refused():
    with pytest.raises(ValueError, match=f"no utterance has {FRAMES} frames"):
        Segments([utterance(FRAMES - 1, 0)], FRAME, CPU)


def test_the_decoder_learns_what_is_meant_by_codes_and_keeps_their_table(tmp_path: Path):
    torch.manual_seed(0)
    draw = np.random.default_rng(0)
    spoken = []
    for _ in range(4):
        true = draw.integers(0, SMALL.codebook, (SMALL.quantizers, 26))
        loud = np.repeat(true[0] / SMALL.codebook, FRAME)
        spoken.append(Spoken(true, true, (draw.normal(0, 3000, 26 * FRAME) * loud).astype(np.int16)))
    decoder = Decoder(SMALL)
    before = {name: value.clone() for name, value in decoder.state_dict().items()}
    settings = Settings(minutes=0.5, peak=2e-3, warmup=3, average=0.5, log_every=5, save_s=600)
    segments = Segments(spoken, FRAME, CPU)
    trained, over = train(
        decoder, segments, tmp_path, settings=settings, minutes=0.5, device=CPU, batch=2, clock=Ticks()
    )
    assert over
    curve = [json.loads(line) for line in (tmp_path / "curve.jsonl").read_text(encoding="utf-8").splitlines()]
    assert curve[-1]["loss"] < 0.8 * curve[0]["loss"]
    after = trained.state_dict()
    assert torch.equal(after["code_embedding.weight"], before["code_embedding.weight"])
    assert sum(not torch.equal(after[name], value) for name, value in before.items()) > len(before) / 2
