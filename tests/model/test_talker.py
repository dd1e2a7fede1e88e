from __future__ import annotations

import copy
import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.errors import CheckpointError, RequestError
from engine.kernels import Segment, make_plan, ops_for
from engine.model.config import OmniConfig, SpecialIds
from engine.model.omni import OmniModel, load_model
from engine.model.talker import Talker, speaker_id, spoken_positions
from engine.model.weights import load_weights
from engine.request import Sampling, Speech
from tests.hf import chat, clip, hf_generate, load_hf
from tests.naive import generate, speak, wishes

FULL = Sampling(repetition_penalty=1.05)  # greedy as Hugging Face's Talker: the penalty stays


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Path) -> OmniModel:
    return load_model(tiny_checkpoint)


@pytest.fixture(scope="module")
def talker(model: OmniModel) -> Talker:
    assert model.talker is not None
    return model.talker


@pytest.fixture(scope="module")
def ids(model: OmniModel) -> SpecialIds:
    return model.config.ids


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.inference_mode():
        yield


def mel(frames: int, seed: int) -> Tensor:
    return torch.randn(128, frames, generator=torch.Generator().manual_seed(seed))


def voice(frames: int) -> Speech:
    return Speech(voice="Ethan", max_frames=frames, sampling=FULL)


def test_the_talker_reads_user_turns_whole_and_nothing_else(ids):
    start, end, newline = ids.im_start, ids.im_end, 10
    prompt = chat(ids, ("system", [7]), ("user", [1, 2]), ("assistant", [8, 9]), ("user", [3]))
    kept = spoken_positions(prompt, ids)
    assert [prompt[at] for at in kept] == [
        *[start, ids.user, newline, 1, 2, end, newline],
        *[start, ids.user, newline, 3, end, newline],
    ]
    assert kept == [6, 7, 8, 9, 10, 11, 12, 20, 21, 22, 23, 24, 25]


def test_tokens_before_the_first_turn_are_not_read(ids):
    prompt = [ids.user, ids.user, 5, *chat(ids, ("user", [1]))]
    assert spoken_positions(prompt, ids) == [3, 4, 5, 6, 7, 8]


def test_a_prompt_without_a_user_turn_is_a_request_error_that_says_what_to_add(ids):
    with pytest.raises(RequestError, match=f"needs a user turn.*{ids.im_start}, {ids.user}") as error:
        spoken_positions(chat(ids, ("system", [1, 2])), ids)
    assert (error.value.field, error.value.status) == ("prompt_token_ids", 400)


@pytest.mark.parametrize("kind", ["empty", "two ids", "closed", "answer begun", "no header"])
def test_a_prompt_that_does_not_end_with_an_open_assistant_turn_is_a_request_error(ids, kind):
    whole = chat(ids, ("user", [1]))
    prompt = {
        "empty": [],
        "two ids": [ids.im_start, ids.assistant],
        "closed": [*whole, 4, ids.im_end, 10],
        "answer begun": [*whole, 33, 44],
        "no header": whole[:-3],
    }[kind]
    with pytest.raises(RequestError, match="ends with an open assistant turn") as error:
        spoken_positions(prompt, ids)
    assert error.value.field == "prompt_token_ids"


def test_a_voice_is_found_in_any_case_and_an_unknown_one_lists_the_voices(model):
    assert speaker_id(model.config.speakers, "Aiden") == 319
    with pytest.raises(RequestError, match="no voice 'bob'; choose from aiden, chelsie, ethan") as error:
        speaker_id(model.config.speakers, "bob")
    assert error.value.field == "speech.voice"


def test_every_special_codec_id_is_suppressed_but_the_one_that_ends_speech(talker):
    allowed = (~talker.suppressed).nonzero()[:, 0].tolist()
    assert allowed == [*range(64), 166]
    assert talker.eos == 166


def test_the_nine_opening_rows_add_text_and_codec_rows_as_the_specification_lists_them(talker, ids):
    prompt = chat(ids, ("user", [1, 2]))
    rows, talker_ids = talker.prompt(prompt, None, 77, "chelsie")
    assert talker_ids == [*prompt[:-3], *[ids.tts_pad] * 9] == talker.prompt_ids(prompt)
    text = [*prompt[-3:], *[ids.tts_pad] * 4, ids.tts_bos, 77]
    codes = [171, 172, 173, 317, 164, 165]
    want = talker.text_rows(torch.tensor(text))
    want[3:] += talker.codec_embed(torch.tensor(codes))
    assert rows.shape == (16, 48)
    assert torch.equal(rows[-9:], want)


def test_media_states_go_to_the_user_turns_that_hold_their_placeholders(talker, ids):
    # The first clip lies in an earlier answer, which the Talker does not read: only the last two states are used.
    prompt = chat(ids, ("user", [1]), ("assistant", clip(ids, 1)), ("user", clip(ids, 2)))
    states = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    rows, talker_ids = talker.prompt(prompt, states, 77, "ethan")
    at = [place for place, token in enumerate(talker_ids) if token == ids.audio]
    assert torch.equal(rows[at], talker.hidden_projection.forward(states[1:], talker.ops))


def test_states_that_do_not_match_the_placeholders_are_an_error_with_both_counts(talker, ids):
    prompt = chat(ids, ("user", clip(ids, 2)))
    with pytest.raises(ValueError, match="has 2 media placeholders, but 3 states came"):
        talker.prompt(prompt, torch.zeros(3, 64), 77, "ethan")


def test_a_text_that_ends_at_once_is_spoken_as_silence(model, ids):
    result = generate(model, chat(ids, ("user", [1, 2])), [], 1, speech=voice(8))
    assert (result.frames, result.pcm.shape, result.audio_finish_reason) == ([], (0,), "stop")


def test_a_checkpoint_that_makes_text_only_has_no_talker(tiny_checkpoint, talker):
    config = OmniConfig.load(tiny_checkpoint)
    silent = OmniConfig(
        config.thinker, config.audio, config.vision, None, None, config.ids, config.positions_per_second, config.dtype
    )
    with pytest.raises(CheckpointError, match="enable_audio_output is false"):
        Talker(silent, load_weights(tiny_checkpoint, config), ops_for("cpu"), talker.thinker_embed)


def test_a_row_has_the_same_bits_alone_and_beside_other_requests(model, talker, ids):
    prompts = [talker.prompt(chat(ids, ("user", [1] * n)), torch.zeros(0, 64), n, "ethan")[0] for n in (1, 9, 4)]
    alone = []
    for rows in prompts:
        place = torch.arange(len(rows)).float().expand(3, -1)
        plan = make_plan((Segment(0, len(rows), 0, (0, 1)),), place, 16, "cpu")
        cache = torch.zeros(2, talker.layers, 2, 16, talker.kv_heads, talker.head_dim)
        alone.append(talker.forward(rows, plan, cache[0], cache[1]))
    segments, offset = [], 0
    for index, rows in enumerate(prompts):
        segments.append(Segment(offset, len(rows), 0, (5 - 2 * index, 4 - 2 * index)))
        offset += len(rows)
    places = torch.cat([torch.arange(len(rows)).float() for rows in prompts]).expand(3, -1)
    cache = torch.zeros(2, talker.layers, 6, 16, talker.kv_heads, talker.head_dim)
    together = talker.forward(torch.cat(prompts), make_plan(segments, places, 16, "cpu"), cache[0], cache[1])
    assert torch.equal(together, torch.cat(alone))
    assert torch.equal(talker.logits(together)[:1], talker.logits(together[:1]))


@pytest.mark.hf
@pytest.mark.parametrize("kind", ["text", "two turns", "two clips"])
def test_prefill_rows_and_trailing_text_are_those_hugging_faces_talker_is_given(tiny_checkpoint, talker, ids, kind):
    hf = load_hf(tiny_checkpoint)
    mels = [mel(130, 1), mel(45, 2)] if kind == "two clips" else []
    prompt = {
        "text": chat(ids, ("system", [7, 8]), ("user", [1, 2, 3])),
        "two turns": chat(ids, ("user", [1, 2]), ("assistant", [33, 44]), ("user", [5, 6])),
        "two clips": chat(ids, ("user", [*clip(ids, 17), 1, *clip(ids, 6)])),
    }[kind]
    want = hf_generate(hf, prompt, mels, 6, 1)
    rows, talker_ids = talker.prompt(prompt, accepted(hf, prompt, mels, ids), want.token_ids[0], "Ethan")
    assert talker_ids == want.talker_inputs["talker_input_ids"][0].tolist()
    torch.testing.assert_close(rows, want.talker_inputs["inputs_embeds"][0], rtol=0, atol=1e-5)
    trailing = talker.text_rows(torch.tensor([*want.token_ids[1:-1], ids.tts_eos]))
    torch.testing.assert_close(trailing, want.talker_inputs["trailing_text_hidden"][0], rtol=0, atol=1e-5)


def accepted(hf, prompt: list[int], mels: list[Tensor], ids: SpecialIds) -> Tensor:
    """Hugging Face's own accept-layer states at the prompt's audio pads, [m, 64]."""
    if not mels:
        return torch.zeros(0, 64)
    lengths = torch.tensor([one.shape[1] for one in mels])
    encoded = hf.thinker.model.audio_tower(torch.cat(mels, dim=1), feature_lens=lengths).last_hidden_state
    tokens = torch.tensor(prompt)
    x = hf.thinker.get_input_embeddings()(tokens).clone()
    x[tokens == ids.audio] = encoded
    places = torch.arange(len(prompt)).float().expand(3, 1, -1)
    out = hf.thinker.model.language_model(inputs_embeds=x[None], position_ids=places, output_hidden_states=True)
    return out.hidden_states[hf.config.talker_config.accept_hidden_layer][0, tokens == ids.audio]


@pytest.mark.hf
def test_twelve_greedy_steps_keep_penalty_and_suppression_as_hugging_face_does(tiny_checkpoint, model, ids):
    prompt = chat(ids, ("user", list(b"Say something.")))
    want = hf_generate(load_hf(tiny_checkpoint), prompt, [], 6, 12)
    frames, reason = speak(model, prompt, torch.zeros(0, 64), want.token_ids, voice(12), wishes(Sampling(), voice(12)))
    assert frames == want.frames
    assert (len(frames), len(want.layer0), reason) == (12, 13, "length")


@pytest.mark.hf
def test_speech_stops_at_the_codec_end_which_makes_no_frame(tiny_checkpoint, model, ids):
    prompt = chat(ids, ("user", list(b"Say something.")))
    hf, ours = copy.deepcopy(load_hf(tiny_checkpoint)), copy.deepcopy(model.talker)
    usual = hf_generate(hf, prompt, [], 6, 12)
    layer0 = usual.layer0
    step = next(at for at in range(3, 12) if layer0[at] not in layer0[:at])
    # The end's row is made a little longer than that of the code chosen there, so that it wins the first time.
    hf.talker.codec_head.weight[ours.eos] = hf.talker.codec_head.weight[layer0[step]] * 1.01
    ours.head[ours.eos] = ours.head[layer0[step]] * 1.01
    want = hf_generate(hf, prompt, [], 6, 12)
    altered = dataclasses.replace(model, talker=ours)
    frames, reason = speak(
        altered, prompt, torch.zeros(0, 64), want.token_ids, voice(12), wishes(Sampling(), voice(12))
    )
    assert want.layer0 == [*layer0[:step], ours.eos]
    assert frames == want.frames == usual.frames[:step]
    assert reason == "stop"


def test_speech_that_ends_before_its_first_frame_is_silence(model, ids):
    # Hugging Face raises here: it stacks no frames.
    prompt = chat(ids, ("user", list(b"Say something.")))
    ours = copy.deepcopy(model.talker)
    first = speak(model, prompt, torch.zeros(0, 64), [97, 98, 99], voice(1), wishes(Sampling(), voice(1)))[0][0][0]
    ours.head[ours.eos] = ours.head[first] * 1.01
    altered = dataclasses.replace(model, talker=ours)
    said = speak(altered, prompt, torch.zeros(0, 64), [97, 98, 99], voice(8), wishes(Sampling(), voice(8)))
    assert said == ([], "stop")
    on_and_on = Speech(voice="ethan", max_frames=8, sampling=FULL, ignore_eos=True)
    said = speak(altered, prompt, torch.zeros(0, 64), [97, 98, 99], on_and_on, wishes(Sampling(), on_and_on))
    assert (len(said[0]), said[1]) == (8, "length")


def test_sampled_speech_is_a_function_of_its_seed(model, ids):
    prompt = chat(ids, ("user", list(b"Say something.")))

    def said(seed: int) -> list[list[int]]:
        wish = Speech(voice="ethan", max_frames=6, sampling=Sampling(temperature=0.9, top_k=50, seed=seed))
        return generate(model, prompt, [], 4, speech=wish).frames

    assert said(1) == said(1) != said(2)
