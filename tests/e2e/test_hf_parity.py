"""Greedy requests from prompt to waveform: the same text ids, the same 16 codes a frame and the same wave as Hugging Face."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.model.omni import OmniModel, load_model
from engine.model.positions import audio_tokens
from engine.request import Sampling, Speech
from tests.hf import chat, clip, hf_generate, load_hf
from tests.naive import generate

pytestmark = pytest.mark.hf

# Hugging Face's greedy Talker keeps its repetition penalty of 1.05.
SPEECH = Speech(voice="ethan", max_frames=24, sampling=Sampling(repetition_penalty=1.05))
CLIPS = {"text": (), "two turns": (), "one clip": (330,), "two clips": (330, 145), "a short and a long clip": (45, 230)}
MAX_TOKENS = 12


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Path) -> OmniModel:
    return load_model(tiny_checkpoint)


def scenario(name: str, model: OmniModel) -> tuple[list[int], list[Tensor]]:
    """Prompt ids and mels. Text is given byte by byte, which the small checkpoint's tokenizer has an id for each."""
    ids = model.config.ids
    generator = torch.Generator().manual_seed(5)
    mels = [torch.randn(128, frames, generator=generator) for frames in CLIPS[name]]
    media = [token for mel in mels for token in [*clip(ids, audio_tokens(mel.shape[1])), *b"What is this? "]]
    system = ("system", list(b"Be brief."))
    if name == "two turns":
        turns = ("user", list(b"Who are you?")), ("assistant", list(b"A voice.")), ("user", list(b"And where?"))
        return chat(ids, system, *turns), mels
    return chat(ids, system, ("user", [*media, *b"Tell me a story."])), mels


@pytest.mark.parametrize("name", CLIPS)
def test_a_greedy_request_gives_hugging_faces_text_codes_and_waveform(tiny_checkpoint, model, name):
    prompt, mels = scenario(name, model)
    want = hf_generate(load_hf(tiny_checkpoint), prompt, mels, MAX_TOKENS, SPEECH.max_frames)
    got = generate(model, prompt, mels, MAX_TOKENS, speech=SPEECH)
    assert got.token_ids == want.token_ids
    assert got.frames == want.frames
    assert got.pcm.shape == want.pcm.shape == (1920 * len(want.frames) - 555,)
    torch.testing.assert_close(got.pcm, want.pcm, rtol=0, atol=1e-5)
    # Enough was compared: several text ids, and frames from while the text lasts and after it.
    assert len(set(want.token_ids)) > 3
    assert len(want.frames) > len(want.token_ids)
    assert len({tuple(frame) for frame in want.frames}) > 8


def test_a_text_that_ends_by_itself_ends_and_is_spoken_as_hugging_faces(tiny_checkpoint, model):
    ids = model.config.ids
    for start in range(32, 127):
        prompt = chat(ids, ("user", [start, start + 1]))
        text = generate(model, prompt, [], 40).token_ids
        if text[-1] == ids.im_end and len(text) > 2:
            break
    want = hf_generate(load_hf(tiny_checkpoint), prompt, [], 40, 16)
    got = generate(model, prompt, [], 40, speech=Speech(voice="Ethan", max_frames=16, sampling=SPEECH.sampling))
    assert (got.token_ids, got.frames) == (want.token_ids, want.frames)
    assert got.finish_reason == "stop"
    assert got.audio_finish_reason == ("stop" if want.layer0[-1] == model.talker.eos else "length")
    torch.testing.assert_close(got.pcm, want.pcm, rtol=0, atol=1e-5)
