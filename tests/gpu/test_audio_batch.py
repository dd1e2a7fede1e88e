"""The audio encoder at released shapes, captured: right, the same on every boot, and never in the host's way."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels.reference import ReferenceOps
from engine.model import weights as weights_module
from engine.model.audio_batch import BatchedAudioEncoder
from engine.model.audio_encoder import AudioEncoder
from engine.model.config import OmniConfig
from engine.model.released import write_released
from engine.model.weights import WHOLE, Weights

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

LENGTHS = (100, 257, 800, 1411, 2530)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> OmniConfig:
    folder: Path = tmp_path_factory.mktemp("released")
    write_released(folder)
    return OmniConfig.load(folder)


def audio_weights(config: OmniConfig, dtype: torch.dtype) -> Weights:
    recipes = weights_module._audio(config.audio)
    drawn = {recipe.name: weights_module._drawn(recipe, torch.float32, "cuda", WHOLE) for recipe in recipes}
    return Weights({name: tensor.to(dtype) for name, tensor in drawn.items()}, WHOLE)


def captured(config: OmniConfig, dtype: torch.dtype, buckets: tuple[int, ...]) -> BatchedAudioEncoder:
    encoder = BatchedAudioEncoder(config, audio_weights(config, dtype))
    encoder.capture(buckets)
    return encoder


@pytest.fixture(scope="module")
def encoder(config: OmniConfig) -> BatchedAudioEncoder:
    return captured(config, torch.bfloat16, (1, 2, 4))


def defined(config: OmniConfig, requests: list[list[NDArray[np.float32]]]) -> list[Tensor]:
    """The definition in float32, without the TF32 that cuDNN uses unless told."""
    encoder = AudioEncoder(config, audio_weights(config, torch.float32), ReferenceOps(torch.device("cuda")))
    with torch.inference_mode(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        return encoder.encode(requests)


@pytest.fixture(scope="module")
def wanted(config: OmniConfig) -> list[Tensor]:
    return defined(config, [[mel(frames)] for frames in LENGTHS])


def mel(frames: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(frames + 7 * seed).standard_normal((128, frames), dtype=np.float32)


def error(got: Tensor, want: Tensor) -> float:
    assert got.isfinite().all()
    return ((got.float() - want).norm() / want.norm()).item()


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-4), (torch.bfloat16, 0.03)])
def test_captured_windows_are_what_the_definition_says(config, wanted, dtype, most):
    encoder = captured(config, dtype, (1, 2, 4))
    got = encoder.encode([[mel(frames)] for frames in LENGTHS])
    assert [error(one, other) < most for one, other in zip(got, wanted, strict=True)] == [True] * len(LENGTHS)
    # 1 + 1 + 1 + 2 + 4 windows: two batches of 4 and one of 1.
    assert encoder.counters == {"windows_captured": 9, "windows_eager": 0, "windows_padded": 0}


def test_a_request_shorter_than_a_chunk_runs_uncaptured(config, encoder):
    before = dict(encoder.counters)
    (got,) = encoder.encode([[mel(45)]])
    assert error(got, defined(config, [[mel(45)]])[0]) < 0.03
    assert encoder.counters["windows_eager"] == before["windows_eager"] + 1


def test_another_encoder_of_the_same_weights_gives_the_same_bits(config, encoder):
    again = captured(config, torch.bfloat16, (1, 2, 4))
    for requests in ([[mel(800)]], [[mel(1411)]], [[mel(2000)]], [[mel(45)]]):
        assert torch.equal(encoder.encode(requests)[0], again.encode(requests)[0])


def test_with_batches_of_one_window_a_request_has_the_same_bits_alone_and_in_company(config):
    encoder = captured(config, torch.bfloat16, (1,))
    requests = [[mel(frames)] for frames in (30, 45, 257, 1411)]
    together = encoder.encode(requests)
    assert all(torch.equal(encoder.encode([one])[0], rows) for one, rows in zip(requests, together, strict=True))


def test_encoding_never_waits_for_the_device(encoder):
    encoder.encode([[mel(45)]])
    torch.cuda.set_sync_debug_mode("error")
    try:
        encoder.encode([[mel(257)], [mel(1411), mel(30)], [mel(45)]])
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_many_steps_in_flight_do_not_overwrite_each_others_mels(encoder):
    requests = [[mel(800, seed)] for seed in range(30)]
    alone = []
    for one in requests:
        alone.append(encoder.encode([one])[0])
        torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)  # the device is busy for a while, so that every copy below waits
    in_flight = [encoder.encode([one])[0] for one in requests]
    assert all(torch.equal(one, other) for one, other in zip(alone, in_flight, strict=True))
