"""The batched audio encoder against its definition, which encodes clip by clip."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels import ops_for
from engine.model.audio_batch import MOST_EAGER, BatchedAudioEncoder
from engine.model.audio_encoder import AudioEncoder
from engine.model.config import OmniConfig
from engine.model.weights import Weights, load_weights


@pytest.fixture(scope="module")
def config(tiny_checkpoint: Path) -> OmniConfig:
    """The small model with windows of 8 chunks, as the released one has."""
    small = OmniConfig.load(tiny_checkpoint)
    return replace(small, audio=replace(small.audio, window_infer=800))


@pytest.fixture(scope="module")
def weights(tiny_checkpoint: Path, config: OmniConfig) -> Weights:
    return load_weights(tiny_checkpoint, config)


@pytest.fixture(scope="module")
def definition(config: OmniConfig, weights: Weights) -> AudioEncoder:
    return AudioEncoder(config, weights, ops_for("cpu"))


@pytest.fixture
def batched(config: OmniConfig, weights: Weights) -> BatchedAudioEncoder:
    return BatchedAudioEncoder(config, weights)


def mel(frames: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((128, frames), dtype=np.float32)


def same(got: list[Tensor], want: list[Tensor]) -> None:
    assert [rows.shape for rows in got] == [rows.shape for rows in want]
    for one, other in zip(got, want, strict=True):
        assert other.abs().mean() > 0.1
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


@pytest.mark.parametrize("frames", [1, 8, 9, 45, 99, 100, 101, 230, 400, 799, 800, 801, 1000, 1699, 2500, 2507])
def test_a_clip_of_any_length_encodes_as_the_definition_says(batched, definition, frames):
    same(batched.encode([[mel(frames)]]), definition.encode([[mel(frames)]]))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_requests_of_several_clips_encode_together_as_each_does_alone(batched, definition, seed):
    lengths = np.random.default_rng(seed).integers(1, 1200, size=(5, 2))
    requests = [[mel(int(frames), place) for place, frames in enumerate(row)] for row in lengths]
    same(batched.encode(requests), definition.encode(requests))


def test_requests_shorter_than_a_chunk_keep_their_width_among_longer_ones(batched, definition):
    requests = [[mel(45)], [mel(250, 2), mel(45)], [mel(99, 1), mel(45)], [mel(30, 3)], [mel(45, 4)]]
    got = batched.encode(requests)
    same(got, definition.encode(requests))
    assert not torch.allclose(got[0], got[1][-6:], atol=1e-5)  # the clip of 45 frames, alone and padded to 100


def test_the_windows_of_the_small_model_are_cut_as_its_config_says(tiny_checkpoint, weights):
    config = OmniConfig.load(tiny_checkpoint)
    two_chunks = BatchedAudioEncoder(config, weights).encode([[mel(555)]])
    same(two_chunks, AudioEncoder(config, weights, ops_for("cpu")).encode([[mel(555)]]))


def test_more_windows_than_a_batch_holds_run_in_several(batched, definition):
    requests = [[mel(800 * 9, 1)], [mel(800 * 9 + 30, 2)]]
    same(batched.encode(requests), definition.encode(requests))
    assert MOST_EAGER < 19
    assert batched.counters == {"windows_captured": 0, "windows_eager": 19, "windows_padded": 0}


def test_windows_that_only_fill_a_batch_change_no_row(batched):
    windows = batched.encode([[mel(1030)]])[0]
    pieces = batched._pieces([mel(1030)], batched.full)
    padded = batched._run(pieces, batched.full, 4)
    torch.testing.assert_close(padded, windows, rtol=0, atol=1e-5)
    assert batched.counters == {"windows_captured": 0, "windows_eager": 4, "windows_padded": 2}


def test_what_fills_a_batch_is_silence_that_sees_one_key(batched):
    packed = batched._pack([], batched.full, 2)
    assert packed.tolist() == [0.0] * (2 * 128 * 800) + [1.0, 1.0]
    assert batched._forward(packed, batched.full).isfinite().all()


def test_the_convolutions_keep_channels_innermost_from_the_first_on(batched):
    x = torch.ones(2, 1, 128, 100)
    for weight, bias in batched.convolutions:
        x = torch.conv2d(x, weight, bias, 2, 1)
        assert x.stride()[1] == 1


def test_bfloat16_weights_give_the_same_rows_but_for_rounding(tiny_checkpoint, config, definition):
    rounded = BatchedAudioEncoder(config, load_weights(tiny_checkpoint, config, torch.bfloat16))
    (want,), (got,) = definition.encode([[mel(330)]]), rounded.encode([[mel(330)]])
    assert got.dtype == torch.bfloat16
    assert (got.float() - want).norm() < 0.03 * want.norm()


def test_what_cannot_be_encoded_is_refused(batched):
    with pytest.raises(ValueError, match="a request has no audio clips"):
        batched.encode([[mel(100)], []])
    with pytest.raises(ValueError, match=r"an audio clip is \[128, 0\], must be \[128, T\] with mel frames T >= 1"):
        batched.encode([[mel(100), mel(0)]])
    with pytest.raises(ValueError, match=r"an audio clip is \[1, 100\], must be \[128, T\]"):
        batched.encode([[mel(100)[:1]]])
    assert batched.encode([]) == []


def test_a_cpu_captures_nothing_and_says_so(batched):
    with pytest.raises(ValueError, match="nothing is captured on device 'cpu'"):
        batched.capture([1, 2])
