"""Faults that users of other Omni servers reported and that need no images or real weights: here each one is a test."""

from __future__ import annotations

import base64
import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from tests.server.serving import Server, audio_file, base64_text, tone
from tests.shared import REPOSITORY

NAME = "tiny-checkpoint"
FRAME_SAMPLES, FIRST_FRAME_SAMPLES = 1920, 1365

# By repository and issue: the file and the test in which the fault would show.
TESTS = {
    "vllm-omni 826: audio a word shorter than a text that was cut": "engine/test_loop.py "
    "test_speech_speaks_each_id_then_the_end_marker_then_padding_and_sounds_every_frame_in_order",
    "vllm-omni 609: audio stops early with ignore_eos": "server/test_reported_faults.py "
    "test_ignoring_the_end_makes_every_frame_and_every_sample",
    "vllm-omni 1001: no audio for a one-word answer": "server/test_openai.py "
    "test_a_text_of_one_word_is_spoken_and_of_one_token_ends_well",
    "vllm-omni 676: five requests at once get wrong audio": "server/test_openai.py "
    "test_speech_requests_at_once_are_those_alone",
    "vllm-omni 887: streamed token counts are wrong": "server/test_openai.py "
    "test_a_stream_brings_role_text_end_and_usage_in_this_order",
    "vllm-omni 445: max_tokens is ignored in a chat": "server/test_openai.py test_both_names_of_the_limit_hold",
    "vllm-omni 1099: the worker dies of a long Talker run": "server/test_reported_faults.py "
    "test_speech_beyond_2048_positions_of_the_talker_is_whole",
    "vllm-omni 2995: a shape fault at 32 requests": "server/test_reported_faults.py "
    "test_32_requests_of_all_kinds_at_once_get_their_solo_answers",
    "vllm-omni 1830: seeded speech is not repeatable": "engine/test_engine.py "
    "test_16_speech_requests_give_the_same_codes_and_bytes_alone_and_four_at_a_time_on_two_boots",
    "vllm-omni 4446: dummy weights give codec ids out of range": "model/test_talker.py "
    "test_every_special_codec_id_is_suppressed_but_the_one_that_ends_speech",
    "vllm-omni 3683: SIGTERM leaves processes behind": "server/test_drain.py "
    "test_what_is_left_after_the_drain_ends_with_an_error_and_is_counted",
    "vllm-omni 3372: no progress after many requests": "e2e/test_soak.py "
    "test_of_200_requests_half_are_given_up_and_the_rest_get_their_solo_answers",
    "vllm-omni 3510: the same audio twice hangs": "server/test_reported_faults.py "
    "test_the_same_audio_request_twice_is_answered_twice_the_same",
    "vllm-omni 769: chunked prefill moves tokens": "engine/test_engine.py "
    "test_64_mixed_requests_at_random_times_equal_the_naive_loop_with_each_switch_off",
    "vllm-omni 6352: aborted requests leave memory behind": "e2e/test_soak.py "
    "test_of_200_requests_half_are_given_up_and_the_rest_get_their_solo_answers",
    "vllm-omni 1347: requests go on after their client left": "server/test_openai.py "
    "test_a_reader_that_leaves_cancels_all_choices",
    "vllm-omni 619: a fault of one stage hangs the server": "server/test_faults.py "
    "test_a_fault_of_a_step_ends_every_stream_and_the_server_with_70",
    "vllm-omni 4463: a Talker that only stops stalls the pipeline": "engine/test_loop.py "
    "test_a_talker_that_ends_before_its_first_frame_is_silence_too",
    "vllm-omni 7376: two choices with the same index": "server/test_openai.py "
    "test_choices_differ_are_repeatable_and_the_first_is_what_one_alone_says",
    "vllm-omni 4646: usage counts placeholders": "server/test_openai.py "
    "test_audio_in_any_user_turn_is_heard_and_counted",
    "vllm-omni 3649: wrong types pass": "server/test_openai_bad_input.py "
    "test_a_chat_that_cannot_be_served_is_refused_by_name",
    "vllm-omni 4371: a click at each chunk": "model/test_code2wav.py "
    "test_chunks_of_changing_length_join_without_a_seam",
    "vllm-omni 449: two audio requests in a batch fail": "server/test_reported_faults.py "
    "test_eight_short_clips_at_once_all_get_words",
    "vllm-omni 2274: the code predictor drifts from its reference": "model/test_code_predictor.py "
    "test_fifteen_greedy_codes_and_their_summed_embedding_are_hugging_faces",
    "vllm-omni 5363: the event loop stands still under load": "server/test_reported_faults.py "
    "test_32_requests_of_all_kinds_at_once_get_their_solo_answers",
    "vllm-omni 2071: the first request's voice sticks": "server/test_openai.py "
    "test_two_voices_in_turn_speak_differently_and_each_like_before",
    "vllm 27907: one audio_url ends the engine": "server/test_openai.py test_a_data_url_is_the_same_as_input_audio",
    "vllm 26815: audio beyond 30 s is cut silently": "server/test_reported_faults.py "
    "test_audio_around_and_beyond_30_seconds_is_heard_whole",
    "mlx-vlm 1768: 31 s of audio give special tokens only": "model/test_positions.py "
    "test_clips_of_one_to_a_thousand_frames_take_the_tokens_that_hugging_face_says",
    "sglang-omni 1173: usage reports audio that was dropped": "server/test_openai.py "
    "test_sixty_seconds_are_heard_whole_and_reported_so",
    "sglang-omni 229: two speech requests at once end the server": "server/test_openai.py "
    "test_choices_speak_each_its_own",
    "sglang-omni 299: empty replies to audio at 8 requests": "server/test_reported_faults.py "
    "test_eight_short_clips_at_once_all_get_words",
    "sglang-omni 353: a prompt longer than the Talker's context": "server/test_openai_bad_input.py "
    "test_a_chat_that_cannot_be_served_is_refused_by_name",
    "sglang-omni 214: a text-only chat is a 500": "server/test_openai.py "
    "test_a_chat_says_what_generate_says_and_counts_the_same",
    "vllm 29174: the order of the parts makes the answer empty": "server/test_reported_faults.py "
    "test_audio_and_text_in_either_order_get_words",
}


@pytest.mark.parametrize("symptom", TESTS)
def test_a_reported_fault_has_its_test(symptom: str):
    file, name = TESTS[symptom].split()
    assert f"\ndef {name}(" in (REPOSITORY / "tests" / file).read_text(encoding="utf-8")


def asked(server: Server, body: dict) -> dict:
    whole = {"model": NAME, "temperature": 0, "max_tokens": 8} | body
    status, data = server.request(
        "POST", "/v1/chat/completions", json.dumps(whole).encode(), {"Content-Type": "application/json"}
    )
    assert status == 200, data
    return json.loads(data)


def user(*parts: dict) -> dict:
    return {"messages": [{"role": "user", "content": list(parts)}]}


def text(words: str) -> dict:
    return {"type": "text", "text": words}


def sound(seconds: float) -> dict:
    data = base64_text(audio_file(tone(seconds, 8000), 8000, "FLAC"))
    return {"type": "input_audio", "input_audio": {"data": data, "format": "flac"}}


def speaking(max_frames: int, **more: object) -> dict:
    speech = {"max_frames": max_frames, "seed": 1, "ignore_eos": True}
    return {"modalities": ["text", "audio"], "audio": {"voice": "ethan", "format": "pcm16"}, "speech": speech} | more


def said(answer: dict) -> list[object]:
    """What an answer says, without what differs from one request to the next."""
    messages = [choice["message"] for choice in answer["choices"]]
    audio = [message["audio"] and (message["audio"]["data"], message["audio"]["transcript"]) for message in messages]
    return [[message["content"] for message in messages], audio, answer["usage"]]


def assert_spoken(answer: dict, frames: int) -> None:
    (choice,) = answer["choices"]
    pcm = base64.b64decode(choice["message"]["audio"]["data"])
    assert len(pcm) // 2 == FIRST_FRAME_SAMPLES + (frames - 1) * FRAME_SAMPLES
    assert answer["usage"]["completion_tokens_details"]["audio_tokens"] == frames
    assert choice["message"]["audio"]["audio_finish_reason"] == "length"


def test_ignoring_the_end_makes_every_frame_and_every_sample(server: Server):
    answer = asked(server, user(text("Go on.")) | speaking(150, ignore_eos=True, max_tokens=400))
    assert answer["usage"]["completion_tokens_details"]["text_tokens"] == 400
    assert_spoken(answer, 150)


def test_speech_beyond_2048_positions_of_the_talker_is_whole(server: Server):
    answer = asked(server, user(text("Go on, and on. " * 300)) | speaking(40))
    assert answer["usage"]["prompt_tokens"] > 2048
    assert_spoken(answer, 40)


def test_the_same_audio_request_twice_is_answered_twice_the_same(server: Server):
    body = user(sound(2.0), text("What is it?")) | speaking(4)
    assert said(asked(server, body)) == said(asked(server, body))


@pytest.mark.parametrize(("seconds", "tokens"), [(29.0, 377), (30.0, 390), (31.0, 403), (62.0, 806)])
def test_audio_around_and_beyond_30_seconds_is_heard_whole(server: Server, seconds: float, tokens: int):
    answer = asked(server, user(sound(seconds), text("What is it?")) | {"max_tokens": 2})
    assert answer["usage"]["prompt_tokens_details"]["audio_tokens"] == tokens


def test_eight_short_clips_at_once_all_get_words(server: Server):
    bodies = [user(sound(0.5 + 0.25 * place), text("What is it?")) for place in range(8)]
    alone = [said(asked(server, body)) for body in bodies]
    with ThreadPoolExecutor(8) as pool:
        together = [said(answer) for answer in pool.map(partial(asked, server), bodies)]
    assert together == alone
    assert all(contents[0] for contents, _, _ in together)


def test_audio_and_text_in_either_order_get_words(server: Server):
    answers = [
        asked(server, user(*parts)) for parts in ((sound(1.0), text("What is it?")), (text("What is it?"), sound(1.0)))
    ]
    assert all(answer["choices"][0]["message"]["content"] for answer in answers)
    assert answers[0]["usage"]["prompt_tokens"] == answers[1]["usage"]["prompt_tokens"]


def test_32_requests_of_all_kinds_at_once_get_their_solo_answers(server: Server):
    kinds = [
        user(text("One.")),
        user(text("Two, at a temperature.")) | {"temperature": 1, "seed": 5},
        user(text("Three choices.")) | {"n": 3, "temperature": 1, "seed": 6},
        user(sound(1.0), text("What is it?")),
        user(text("Say it.")) | speaking(6),
        user(sound(0.5)) | speaking(5, audio={"voice": "aiden", "format": "wav"}),
        user(text("Penalties.")) | {"frequency_penalty": 1.5, "logit_bias": {"65": 2}, "max_tokens": 40},
        user(text("A long prompt. " * 40)) | {"logprobs": True, "top_logprobs": 4},
    ]
    alone = [said(asked(server, body)) for body in kinds]
    with ThreadPoolExecutor(33) as pool:
        waiting = [pool.submit(asked, server, body) for body in kinds * 4]
        while not all(one.done() for one in waiting):
            assert pool.submit(server.get, "/health").result(timeout=2)[0] == 200
        assert [said(one.result()) for one in waiting] == alone * 4
