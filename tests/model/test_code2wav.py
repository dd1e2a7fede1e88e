from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.errors import CheckpointError
from engine.kernels import ops_for
from engine.model.code2wav import Code2Wav
from engine.model.config import OmniConfig
from engine.model.weights import Weights, load_weights
from tests.hf import load_hf

ENGINE_CHUNK = 4


@pytest.fixture(scope="module")
def config(tiny_checkpoint: Path) -> OmniConfig:
    return OmniConfig.load(tiny_checkpoint)


@pytest.fixture(scope="module")
def weights(tiny_checkpoint: Path, config: OmniConfig) -> Weights:
    return load_weights(tiny_checkpoint, config)


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.inference_mode():
        yield


def codes_of(frames: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 64, (16, frames), generator=torch.Generator().manual_seed(seed))


def vocoder(config: OmniConfig, weights: Weights, chunk_frames: int = ENGINE_CHUNK) -> Code2Wav:
    return Code2Wav(config, weights, ops_for("cpu"), chunk_frames)


def stream(code2wav: Code2Wav, codes: Tensor, chunk: int) -> Tensor:
    state = code2wav.new_state()
    return torch.cat([code2wav.step(part, state) for part in torch.split(codes, chunk, dim=1)])


@pytest.mark.hf
@pytest.mark.parametrize("chunk", [1, 2, 4, 7, 25])
def test_any_chunking_gives_the_waveform_of_hugging_faces_one_shot_forward(tiny_checkpoint, config, weights, chunk):
    codes = codes_of(61)
    want = load_hf(tiny_checkpoint).code2wav(codes[None])[0, 0]
    at_its_own_shape = stream(vocoder(config, weights, chunk), codes, chunk)
    inside_a_larger_shape = stream(vocoder(config, weights, 25), codes, chunk)
    assert want.shape == (1920 * 61 - 555,)
    assert want.abs().max() > 0.01  # not silence
    torch.testing.assert_close(at_its_own_shape, want, rtol=0, atol=1e-5)
    torch.testing.assert_close(inside_a_larger_shape, want, rtol=0, atol=1e-5)


@pytest.mark.hf
def test_more_than_three_hundred_frames_equal_the_one_shot_forward_and_lose_no_sample(tiny_checkpoint, config, weights):
    codes = codes_of(310, seed=1)
    want = load_hf(tiny_checkpoint).code2wav(codes[None])[0, 0]
    got = vocoder(config, weights, 25).decode(codes)
    assert got.shape == (594_645,)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


def test_streaming_at_the_engines_chunk_shape_is_bit_equal_to_decoding_at_once(config, weights):
    code2wav, codes = vocoder(config, weights), codes_of(30)
    assert torch.equal(stream(code2wav, codes, ENGINE_CHUNK), code2wav.decode(codes))


def test_two_streams_that_take_turns_get_the_bits_that_each_gets_alone(config, weights):
    code2wav = vocoder(config, weights)
    first, second = codes_of(14, seed=2), codes_of(9, seed=3)
    states = code2wav.new_state(), code2wav.new_state()
    got: tuple[list[Tensor], list[Tensor]] = ([], [])
    for start in range(0, 16, ENGINE_CHUNK):
        for codes, state, out in zip((first, second), states, got, strict=True):
            part = codes[:, start : start + ENGINE_CHUNK]
            if part.shape[1]:
                out.append(code2wav.step(part, state))
    assert torch.equal(torch.cat(got[0]), code2wav.decode(first))
    assert torch.equal(torch.cat(got[1]), code2wav.decode(second))


def test_chunks_of_changing_length_join_without_a_seam(config, weights):
    code2wav, codes = vocoder(config, weights, 7), codes_of(20)
    state = code2wav.new_state()
    parts = [code2wav.step(codes[:, a:b], state) for a, b in ((0, 1), (1, 8), (8, 10), (10, 13), (13, 20))]
    assert [len(part) for part in parts] == [1365, 13440, 3840, 5760, 13440]
    torch.testing.assert_close(torch.cat(parts), code2wav.decode(codes), rtol=0, atol=1e-5)


def test_the_first_n_frames_give_1365_samples_and_1920_for_each_frame_after_the_first(config, weights):
    code2wav = vocoder(config, weights)
    assert [code2wav.samples(frames) for frames in (0, 1, 2, 4, 60)] == [0, 1365, 3285, 7125, 114_645]
    assert code2wav.decode(codes_of(1)).shape == (1365,)
    assert code2wav.decode(codes_of(6)).shape == (10_965,)
    assert code2wav.decode(codes_of(0)).shape == (0,)


def test_a_stream_holds_as_many_numbers_as_its_window_and_its_convolutions_need(config, weights):
    code2wav = vocoder(config, weights)
    state = code2wav.new_state()
    # Two layers of keys and values over 7 past frames of 32; two depthwise convolutions and the first one of 6 x 32; the held
    # column of each stretch; residual units of 6 + 18 + 54 columns; the last convolution of 6 x 2.
    want = 2 * 2 * 7 * 32 + 3 * 6 * 32 + (32 + 16 + 8 + 4) + 78 * (16 + 8 + 4 + 2) + 6 * 2
    assert want == 3884
    assert state.elements() == want
    for part in torch.split(codes_of(10), 4, dim=1):
        code2wav.step(part, state)
        assert state.elements() == want
    assert state.frames == 10


def test_a_waveform_stays_within_one(config, weights):
    tensors = dict(weights.tensors)
    tensors["code2wav.conv_out.weight"] = tensors["code2wav.conv_out.weight"] * 1000
    loud = vocoder(config, Weights(tensors, weights.shard)).decode(codes_of(8))
    assert loud.min() == -1.0
    assert loud.max() == 1.0


@pytest.mark.parametrize("frames", [0, 5])
def test_a_step_of_no_frame_or_too_many_is_an_error_that_names_the_limit(config, weights, frames):
    code2wav = vocoder(config, weights)
    with pytest.raises(ValueError, match=f"a step takes 1 to 4 frames, got {frames}"):
        code2wav.step(codes_of(frames), code2wav.new_state())


def test_bfloat16_weights_give_the_same_wave_but_for_rounding(tiny_checkpoint, config, weights):
    rounded = load_weights(tiny_checkpoint, config, torch.bfloat16)
    want, got = vocoder(config, weights).decode(codes_of(10)), vocoder(config, rounded).decode(codes_of(10))
    assert got.dtype == torch.float32
    assert (got - want).norm() < 0.03 * want.norm()  # Hugging Face's own bfloat16 wave is 0.017 off


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ratios": (1,)}, "upsampling_ratios"),
        ({"kv_heads": 2}, "num_key_value_heads must be 4, is 2"),
    ],
)
def test_a_shape_that_can_not_be_streamed_is_an_error_that_names_the_key(config, weights, change, message):
    other = dataclasses.replace(config, code2wav=dataclasses.replace(config.code2wav, **change))
    with pytest.raises(CheckpointError, match=message):
        vocoder(other, weights)
