from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.kernels import ops_for
from engine.model.audio_encoder import AudioEncoder
from engine.model.config import OmniConfig
from engine.model.weights import load_weights
from tests.hf import load_hf


@pytest.fixture(scope="module")
def encoder(tiny_checkpoint: Path) -> AudioEncoder:
    config = OmniConfig.load(tiny_checkpoint)
    return AudioEncoder(config, load_weights(tiny_checkpoint, config), ops_for("cpu"))


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.inference_mode():
        yield


def mel(frames: int, seed: int = 0) -> Tensor:
    return torch.randn(128, frames, generator=torch.Generator().manual_seed(seed))


def hugging_face(folder: Path, mels: list[Tensor]) -> Tensor:
    tower = load_hf(folder).thinker.model.audio_tower
    lengths = torch.tensor([one.shape[1] for one in mels])
    return tower(torch.cat(mels, dim=1), feature_lens=lengths).last_hidden_state


@pytest.mark.hf
@pytest.mark.parametrize(("frames", "rows"), [(1, 1), (30, 4), (100, 13), (130, 17), (330, 43), (555, 72), (1000, 130)])
def test_a_clip_of_any_length_encodes_as_hugging_face_does(tiny_checkpoint, encoder, frames, rows):
    (got,) = encoder.forward([mel(frames)])
    want = hugging_face(tiny_checkpoint, [mel(frames)])
    assert got.shape == (rows, 64)
    assert want.abs().mean() > 0.1
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


@pytest.mark.hf
@pytest.mark.parametrize("lengths", [(330, 145), (45, 330), (45, 60)])
def test_two_clips_of_one_request_encode_as_hugging_face_does(tiny_checkpoint, encoder, lengths):
    mels = [mel(frames, seed) for seed, frames in enumerate(lengths)]
    got = encoder.forward(mels)
    torch.testing.assert_close(torch.cat(got), hugging_face(tiny_checkpoint, mels), rtol=0, atol=1e-5)


def test_a_short_clip_is_padded_to_the_longest_chunk_of_its_request(encoder):
    alone, beside_a_long_one = encoder.forward([mel(45)])[0], encoder.forward([mel(45), mel(330, 1)])[0]
    assert alone.shape == beside_a_long_one.shape == (6, 64)
    assert not torch.equal(alone, beside_a_long_one)


def test_a_request_gets_the_same_bits_alone_and_after_other_requests(encoder):
    lengths = (30, 100, 130, 330, 555)
    alone = [encoder.forward([mel(frames)])[0] for frames in lengths]
    for frames in (1000, 7, 250):
        encoder.forward([mel(frames, 9), mel(frames // 2 + 1, 8)])
    again = [encoder.forward([mel(frames)])[0] for frames in reversed(lengths)]
    assert all(torch.equal(a, b) for a, b in zip(alone, reversed(again), strict=True))


def test_a_clip_gets_the_same_bits_beside_a_clip_that_is_no_longer_than_it(encoder):
    assert torch.equal(encoder.forward([mel(330)])[0], encoder.forward([mel(101, 1), mel(330)])[1])


def test_a_complete_window_does_not_change_when_more_sound_follows(encoder):
    # 200 mel frames make a window of 26 rows: the first window is final once it is complete.
    long = mel(500)
    assert torch.equal(encoder.forward([long])[0][:26], encoder.forward([long[:, :200].contiguous()])[0])


def test_a_request_without_clips_encodes_to_nothing(encoder):
    assert encoder.forward([]) == []


def test_a_clip_without_frames_is_an_error_that_says_so(encoder):
    with pytest.raises(ValueError, match="an audio clip has no mel frames"):
        encoder.forward([mel(100), mel(0)])


def test_requests_encode_each_as_it_does_alone_with_its_clips_joined(encoder):
    requests = [[mel(330).numpy(), mel(45, 1).numpy()], [mel(100, 2).numpy()]]
    first, second = encoder.encode(requests)
    assert torch.equal(first, torch.cat(encoder.forward([mel(330), mel(45, 1)])))
    assert torch.equal(second, encoder.forward([mel(100, 2)])[0])


def test_a_request_without_clips_among_others_is_an_error_that_says_so(encoder):
    with pytest.raises(ValueError, match="a request has no audio clips"):
        encoder.encode([[mel(100).numpy()], []])


def test_bfloat16_weights_give_the_same_rows_but_for_rounding(tiny_checkpoint, encoder):
    config = OmniConfig.load(tiny_checkpoint)
    rounded = AudioEncoder(config, load_weights(tiny_checkpoint, config, torch.bfloat16), ops_for("cpu"))
    (want,), (got,) = encoder.forward([mel(330)]), rounded.forward([mel(330)])
    assert got.dtype == torch.bfloat16
    assert (got.float() - want).norm() < 0.03 * want.norm()  # Hugging Face's own bfloat16 rows are 0.01 off
