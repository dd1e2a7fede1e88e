"""What the `openai` client gets from a real server on the small checkpoint."""

from __future__ import annotations

import base64
import io
import json
import time
import wave
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import openai
import pytest
import soundfile
from openai import OpenAI
from tokenizers import Tokenizer

from tests.server.serving import Server, audio_file, base64_text, tone, wait_until
from tests.shared import REPOSITORY

PROMPT = "Tell me how the sea sounds at night."
USER = [{"role": "user", "content": PROMPT}]
CLIP = (REPOSITORY / "workloads" / "clips" / "c00.flac").read_bytes()
CLIP_TOKENS, CLIP_SECONDS = 35, 2.693875
NAME = "tiny-checkpoint"
GREEDY = {"temperature": 0, "extra_body": {"ignore_eos": True}}
SHORT_SPEECH = {"max_frames": 6, "seed": 1, "ignore_eos": True}
FRAME_BYTES, FIRST_FRAME_BYTES = 2 * 1920, 2 * 1365


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint: Path) -> Tokenizer:
    return Tokenizer.from_file(str(tiny_checkpoint / "tokenizer.json"))


def chat(client: OpenAI, messages: list = USER, **wishes: object):
    return client.chat.completions.create(model=NAME, messages=messages, **wishes)


def heard(data: bytes = CLIP, format_name: str = "flac") -> dict:
    return {"type": "input_audio", "input_audio": {"data": base64_text(data), "format": format_name}}


def samples(data: bytes) -> np.ndarray:
    found, rate = soundfile.read(io.BytesIO(data), dtype="int16")
    assert rate == 24000
    return found


# --- Chat: text ---


def test_a_chat_says_what_generate_says_and_counts_the_same(client: OpenAI, server: Server):
    answer = chat(client, max_tokens=20, **GREEDY)
    same = server.answer(text=PROMPT, max_tokens=20, ignore_eos=True)
    (choice,) = answer.choices
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "length", None)
    assert choice.message.content == same["text"]
    assert (choice.message.role, choice.message.refusal, choice.message.audio) == ("assistant", None, None)
    assert (answer.object, answer.model) == ("chat.completion", NAME)
    assert abs(answer.created - time.time()) < 60
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (same["usage"]["prompt_tokens"], 20)
    assert usage.total_tokens == usage.prompt_tokens + 20
    assert usage.prompt_tokens_details.audio_tokens == usage.completion_tokens_details.audio_tokens == 0


def test_white_space_is_a_text_on_both_doors(client: OpenAI, server: Server):
    messages = [{"role": "user", "content": " \n"}]
    answer = client.chat.completions.create(model=NAME, messages=messages, max_tokens=4, **GREEDY)
    same = server.answer(text=" \n", max_tokens=4, ignore_eos=True)
    assert answer.choices[0].message.content == same["text"]
    assert answer.usage.prompt_tokens == same["usage"]["prompt_tokens"]


def test_a_stream_brings_role_text_end_and_usage_in_this_order(client: OpenAI):
    whole = chat(client, max_tokens=12, **GREEDY)
    chunks = list(chat(client, max_tokens=12, **GREEDY, stream=True, stream_options={"include_usage": True}))
    *pieces, last = chunks
    assert last.choices == [] and last.usage == whole.usage
    assert all(chunk.usage is None for chunk in pieces)
    assert {chunk.id for chunk in chunks} == {last.id} and last.object == "chat.completion.chunk"
    deltas = [chunk.choices[0].delta for chunk in pieces]
    assert (deltas[0].role, deltas[0].content) == ("assistant", "")
    assert all(delta.role is None for delta in deltas[1:])
    assert "".join(delta.content or "" for delta in deltas) == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in pieces] == [None] * (len(pieces) - 1) + ["length"]


def test_a_stream_on_the_wire_is_server_sent_events_that_end_with_done(server: Server):
    body = {"model": NAME, "messages": USER, "max_tokens": 3, "stream": True}
    status, data = server.request(
        "POST", "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    assert status == 200
    *events, end = data.decode().split("\n\n")
    assert end == "" and events[-1] == "data: [DONE]"
    assert all(event.startswith("data: {") and "\n" not in event for event in events[:-1])
    assert all("usage" not in json.loads(event[6:]) for event in events[:-1])


def test_turns_and_system_are_the_templates(client: OpenAI, server: Server, tokenizer: Tokenizer):
    turns = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Hi."},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": [{"type": "text", "text": "And "}, {"type": "text", "text": "now?"}]},
    ]
    prompt = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi.<|im_end|>\n"
        "<|im_start|>assistant\nHello!<|im_end|>\n<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer.encode(prompt).ids
    answer = chat(client, turns, max_tokens=10, **GREEDY)
    assert answer.usage.prompt_tokens == len(ids)
    assert (
        answer.choices[0].message.content == server.answer(prompt_token_ids=ids, max_tokens=10, ignore_eos=True)["text"]
    )


def test_an_answer_with_all_its_nulls_can_be_sent_back(client: OpenAI):
    first = chat(client, max_tokens=4).choices[0].message
    again = chat(client, [*USER, first.model_dump(), {"role": "user", "content": "Go on."}], max_tokens=4)
    assert again.usage.prompt_tokens > 40
    spoken = chat(client, modalities=["text", "audio"], max_tokens=4, extra_body={"speech": SHORT_SPEECH})
    message = spoken.choices[0].message
    assert message.content is None
    again = chat(client, [*USER, message.model_dump(), {"role": "user", "content": "Go on."}], max_tokens=4)
    told = [*USER, {"role": "assistant", "content": message.audio.transcript}, {"role": "user", "content": "Go on."}]
    assert again.usage.prompt_tokens == chat(client, told, max_tokens=4).usage.prompt_tokens


def test_without_a_limit_the_model_ends_where_it_likes(client: OpenAI):
    answer = chat(client, seed=3)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens > 16
    assert not answer.choices[0].message.content.endswith("<|im_end|>")


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_both_names_of_the_limit_hold(client: OpenAI, name: str):
    answer = chat(client, **{name: 7}, **GREEDY)
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (7, "length")
    assert chat(client, max_tokens=5, max_completion_tokens=5, **GREEDY).usage.completion_tokens == 5


def test_a_seed_decides_what_is_said_and_without_one_it_differs(client: OpenAI):
    def said(**wishes: object) -> str:
        return chat(client, max_tokens=16, **wishes).choices[0].message.content

    assert said(seed=5) == said(seed=5)
    assert len({said(seed=5), said(seed=6), said(seed=-5), said(), said()}) == 5
    assert said(temperature=0) == said(temperature=0)
    assert said(seed=5, top_p=1e-6) == said(seed=5, extra_body={"top_k": 1}) == said(temperature=0)


def test_choices_differ_are_repeatable_and_the_first_is_what_one_alone_says(client: OpenAI):
    prompt_tokens = chat(client, max_tokens=1).usage.prompt_tokens

    def said(n: int) -> list[str]:
        answer = chat(client, n=n, max_tokens=12, seed=11, extra_body={"ignore_eos": True})
        assert [choice.index for choice in answer.choices] == list(range(n))
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (prompt_tokens, 12 * n)
        return [choice.message.content for choice in answer.choices]

    three = said(3)
    assert three == said(3) and len(set(three)) == 3
    assert said(1) == three[:1]


def test_streamed_choices_interleave_by_index(client: OpenAI):
    whole = chat(client, n=3, max_tokens=12, seed=11)
    texts, order, ends = ["", "", ""], [], {}
    for chunk in chat(client, n=3, max_tokens=12, seed=11, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            order.append(choice.index)
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
    assert texts == [choice.message.content for choice in whole.choices]
    assert ends == {choice.index: choice.finish_reason for choice in whole.choices}
    assert order != sorted(order)
    assert chunk.usage == whole.usage


def test_log_probabilities_come_for_every_token_best_first(client: OpenAI, tokenizer: Tokenizer):
    answer = chat(client, max_tokens=8, logprobs=True, top_logprobs=5, **GREEDY)
    content = answer.choices[0].logprobs.content
    assert len(content) == 8
    assert b"".join(bytes(one.bytes or ()) for one in content).decode(errors="replace") == (
        answer.choices[0].message.content
    )
    for one in content:
        tops = [top.logprob for top in one.top_logprobs]
        assert len(tops) == 5 and tops == sorted(tops, reverse=True) and tops[0] < 0
        assert (one.token, one.logprob) == (one.top_logprobs[0].token, tops[0])
    chunks = chat(client, max_tokens=8, logprobs=True, top_logprobs=5, **GREEDY, stream=True)
    streamed = [one for chunk in chunks if chunk.choices[0].logprobs for one in chunk.choices[0].logprobs.content]
    assert streamed == content
    bare = chat(client, max_tokens=8, logprobs=True, **GREEDY).choices[0].logprobs.content
    assert [(one.logprob, one.top_logprobs) for one in bare] == [(one.logprob, []) for one in content]


def test_twenty_log_probabilities_of_a_drawn_token_hold_its_own(client: OpenAI):
    content = chat(client, max_tokens=8, seed=2, logprobs=True, top_logprobs=20).choices[0].logprobs.content
    for one in content:
        known = {top.token: top.logprob for top in one.top_logprobs}
        assert len(one.top_logprobs) == 20
        assert known.get(one.token, one.logprob) == one.logprob
        assert one.token in known or one.logprob <= min(known.values())


def test_the_end_token_is_listed_without_bytes(client: OpenAI):
    answer = chat(client, seed=3, logprobs=True)
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    assert (content[-1].token, content[-1].bytes) == ("<|im_end|>", None)


def test_a_stop_string_ends_the_text_before_itself(client: OpenAI):
    text = chat(client, max_tokens=24, **GREEDY).choices[0].message.content
    stop = text[9:12]
    assert stop.isascii()
    for wish in (stop, [stop], ["no such words", stop]):
        choice = chat(client, max_tokens=24, stop=wish, **GREEDY).choices[0]
        assert (choice.message.content, choice.finish_reason) == (text[: text.index(stop)], "stop")
    chunks = list(chat(client, max_tokens=24, stop=stop, stream=True, **GREEDY))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text[: text.index(stop)]
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_a_stop_token_ends_the_text(client: OpenAI, server: Server):
    ids = server.answer(text=PROMPT, max_tokens=24, ignore_eos=True)["token_ids"]
    answer = chat(client, max_tokens=24, temperature=0, extra_body={"stop_token_ids": [ids[5]]})
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == ids.index(ids[5]) + 1


@pytest.mark.parametrize(
    "wish",
    [
        {"frequency_penalty": 2.0},
        {"presence_penalty": 1.5},
        {"logit_bias": {"65": 3.5, "70": -100}},
        {"top_p": 0.6},
        {"top_k": 3},
        {"min_p": 0.2},
        {"repetition_penalty": 1.4},
    ],
    ids=lambda wish: next(iter(wish)),
)
def test_every_way_to_choose_a_token_is_that_of_generate(client: OpenAI, server: Server, wish: dict):
    common = {"max_tokens": 24, "seed": 8, "ignore_eos": True}
    want = server.answer(text=PROMPT, temperature=1.0, **common, **wish)["text"]
    assert want != server.answer(text=PROMPT, temperature=1.0, **common)["text"]
    assert chat(client, extra_body=common | wish).choices[0].message.content == want


# --- Chat: audio in ---


def test_audio_in_any_user_turn_is_heard_and_counted(client: OpenAI, server: Server):
    text = {"type": "text", "text": "Write down what you hear."}
    one = chat(client, [{"role": "user", "content": [heard(), text]}], max_tokens=10, **GREEDY)
    same = server.answer(text=text["text"], audio=base64_text(CLIP), max_tokens=10, ignore_eos=True)
    assert one.choices[0].message.content == same["text"]
    assert one.usage.prompt_tokens_details.audio_tokens == CLIP_TOKENS
    assert one.usage.prompt_tokens == same["usage"]["prompt_tokens"]
    other = audio_file(tone(1.0))
    turns = [
        {"role": "user", "content": [heard(), text]},
        {"role": "assistant", "content": "Nothing."},
        {"role": "user", "content": [text, heard(other, "wav")]},
    ]
    two = chat(client, turns, max_tokens=10, **GREEDY)
    assert two.usage.prompt_tokens_details.audio_tokens == CLIP_TOKENS + 13


@pytest.mark.parametrize(
    ("kind", "mime"), [("WAV", "audio/wav"), ("FLAC", ""), ("OGG", "audio/ogg"), ("MP3", "audio/mpeg")]
)
def test_a_data_url_is_the_same_as_input_audio(client: OpenAI, kind: str, mime: str):
    data = audio_file(tone(1.0), 16000, kind)
    url = {"type": "audio_url", "audio_url": {"url": f"data:{mime};base64,{base64_text(data)}"}}
    part = {"type": "input_audio", "input_audio": {"data": f"data:;base64,{base64_text(data)}"}}
    answers = [
        chat(client, [{"role": "user", "content": [one]}], max_tokens=6, **GREEDY).choices[0].message.content
        for one in (url, part, heard(data, kind.lower()))
    ]
    assert answers[0] == answers[1] == answers[2]


# --- Chat: audio out ---


def spoken(client: OpenAI, speech: dict = SHORT_SPEECH, **wishes: object):
    wishes = {"max_tokens": 8, "temperature": 0} | wishes
    return chat(client, modalities=["text", "audio"], extra_body={"speech": speech, "ignore_eos": True}, **wishes)


@pytest.fixture(scope="module")
def spoken_pcm(server: Server) -> bytes:
    """What /generate speaks for the same wishes."""
    answer = server.answer(text=PROMPT, max_tokens=8, ignore_eos=True, output=["text", "audio"], speech=SHORT_SPEECH)
    with wave.open(io.BytesIO(base64.b64decode(answer["audio"]["data"]))) as file:
        return file.readframes(file.getnframes())


@pytest.mark.parametrize("kind", ["wav", "flac", "pcm16"])
def test_speech_comes_in_the_format_asked_for_with_its_transcript(client: OpenAI, spoken_pcm: bytes, kind: str):
    text = chat(client, max_tokens=8, **GREEDY).choices[0].message.content
    answer = spoken(client, audio={"voice": "ethan", "format": kind})
    message = answer.choices[0].message
    assert (message.content, message.audio.transcript) == (None, text)
    data = base64.b64decode(message.audio.data)
    pcm = data if kind == "pcm16" else samples(data).tobytes()
    assert pcm == spoken_pcm
    assert len(pcm) == FIRST_FRAME_BYTES + 5 * FRAME_BYTES
    assert answer.usage.completion_tokens_details.audio_tokens == 6
    assert answer.usage.completion_tokens == 8 + 6
    assert message.audio.expires_at == answer.created and message.audio.id.startswith("audio-")


@pytest.mark.parametrize("kind", ["mp3", "opus"])
def test_lossy_speech_is_as_long_as_what_was_spoken(client: OpenAI, spoken_pcm: bytes, kind: str):
    audio = spoken(client, audio={"voice": "ethan", "format": kind}).choices[0].message.audio
    assert abs(len(samples(base64.b64decode(audio.data))) - len(spoken_pcm) // 2) < 2400


def test_streamed_speech_is_its_id_then_words_and_samples_then_its_end(client: OpenAI, spoken_pcm: bytes):
    chunks = list(spoken(client, stream=True, audio={"voice": "ethan", "format": "pcm16"}))
    parts = [chunk.choices[0].delta.audio for chunk in chunks]
    assert parts[0].id.startswith("audio-") and chunks[0].choices[0].delta.role == "assistant"
    pcm = b"".join(base64.b64decode(part.data) for part in parts if part and part.data)
    assert pcm == spoken_pcm
    text = "".join(part.transcript for part in parts if part and part.transcript)
    assert text == spoken(client).choices[0].message.audio.transcript
    assert parts[-2].expires_at and parts[-1] is None
    assert (parts[-2].text_finish_reason, parts[-2].audio_finish_reason) == ("length", "length")
    assert [chunk.choices[0].finish_reason for chunk in chunks[-2:]] == [None, "length"]


def test_the_finish_reason_says_which_of_text_and_speech_was_cut(client: OpenAI):
    def ends(speech: dict, **wishes: object) -> tuple[str, str, str]:
        choice = chat(client, modalities=["text", "audio"], seed=3, extra_body={"speech": speech}, **wishes).choices[0]
        audio = choice.message.audio
        return choice.finish_reason, audio.text_finish_reason, audio.audio_finish_reason

    assert ends({"max_frames": 3, "ignore_eos": True}) == ("length", "stop", "length")
    assert ends({"seed": 1}, max_tokens=4) == ("length", "length", "stop")
    assert ends({"seed": 1}) == ("stop", "stop", "stop")


def test_audio_alone_comes_with_its_transcript_too(client: OpenAI):
    answer = chat(client, modalities=["audio"], max_tokens=6, temperature=0, extra_body={"speech": SHORT_SPEECH})
    assert answer.choices[0].message.audio.transcript


def test_two_voices_in_turn_speak_differently_and_each_like_before(client: OpenAI):
    said = [
        spoken(client, audio={"voice": voice, "format": "pcm16"}).choices[0].message.audio.data
        for voice in ("ethan", "Chelsie", "ethan", "chelsie")
    ]
    assert said[0] == said[2] != said[1] == said[3]


def test_choices_speak_each_its_own(client: OpenAI):
    answer = chat(client, modalities=["text", "audio"], n=2, max_tokens=6, seed=4, extra_body={"speech": SHORT_SPEECH})
    audios = [choice.message.audio for choice in answer.choices]
    assert audios[0].data != audios[1].data and audios[0].id != audios[1].id
    assert answer.usage.completion_tokens_details.audio_tokens == 12


@pytest.mark.parametrize("tokens", [1, 2])
def test_a_text_of_one_word_is_spoken_and_of_one_token_ends_well(client: OpenAI, tokens: int):
    chunks = list(spoken(client, stream=True, max_tokens=tokens))
    pcm = b"".join(base64.b64decode(c.choices[0].delta.audio.data or "") for c in chunks if c.choices[0].delta.audio)
    assert bool(pcm) == (tokens > 1)  # the Talker never speaks a single token
    assert chunks[-1].choices[0].finish_reason == "length"


def test_speech_requests_at_once_are_those_alone(client: OpenAI):
    wishes = [
        {"audio": {"voice": voice, "format": "wav"}, "seed": seed} for voice in ("ethan", "aiden") for seed in (1, 2)
    ]
    alone = [spoken(client, **wish).choices[0].message.audio for wish in wishes]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda wish: spoken(client, **wish).choices[0].message.audio, wishes))
    assert [(one.data, one.transcript) for one in alone] == [(one.data, one.transcript) for one in together]


# --- Completions ---


def test_a_completion_goes_on_from_the_prompt_itself(client: OpenAI, server: Server, tokenizer: Tokenizer):
    ids = tokenizer.encode("The sea").ids
    want = server.answer(prompt_token_ids=ids, max_tokens=10, ignore_eos=True)
    for prompt in ("The sea", ids, [ids], ["The sea"]):
        answer = client.completions.create(model=NAME, prompt=prompt, max_tokens=10, **GREEDY)
        (choice,) = answer.choices
        assert (choice.text, choice.finish_reason, choice.logprobs) == (want["text"], "length", None)
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids), 10)
    assert client.completions.create(model=NAME, prompt="The sea", **GREEDY).usage.completion_tokens == 16


def test_choices_of_several_prompts_are_numbered_prompt_by_prompt(client: OpenAI):
    wishes = {"max_tokens": 6, "seed": 1}
    answer = client.completions.create(model=NAME, prompt=["one", "two two"], n=2, **wishes)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    texts = [choice.text for choice in answer.choices]
    for first, prompt in ((0, "one"), (2, "two two")):
        alone = client.completions.create(model=NAME, prompt=prompt, n=2, **wishes)
        assert [choice.text for choice in alone.choices] == texts[first : first + 2]
    tokens = [
        client.completions.create(model=NAME, prompt=p, max_tokens=1).usage.prompt_tokens for p in ("one", "two two")
    ]
    assert answer.usage.prompt_tokens == sum(tokens)


def test_streamed_completions_join_to_the_whole(client: OpenAI):
    wishes = {"prompt": ["one", "two"], "max_tokens": 8, "logprobs": 3, "stop": ["e"], "seed": 5}
    whole = client.completions.create(model=NAME, **wishes)
    texts, tokens, offsets, ends = ["", ""], [[], []], [[], []], [None, None]
    stream = client.completions.create(model=NAME, **wishes, stream=True, stream_options={"include_usage": True})
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            tokens[choice.index] += choice.logprobs.tokens
            offsets[choice.index] += choice.logprobs.text_offset
            ends[choice.index] = choice.finish_reason or ends[choice.index]
    assert texts == [choice.text for choice in whole.choices]
    assert tokens == [choice.logprobs.tokens for choice in whole.choices]
    assert offsets == [choice.logprobs.text_offset for choice in whole.choices]
    assert ends == [choice.finish_reason for choice in whole.choices]
    assert chunk.usage == whole.usage


def test_log_probabilities_of_a_completion_are_lists_of_equal_length(client: OpenAI):
    answer = client.completions.create(model=NAME, prompt="The sea", max_tokens=10, logprobs=2, **GREEDY)
    (choice,) = answer.choices
    found = choice.logprobs
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == len(found.text_offset) == 10
    for token, value, top, offset in zip(
        found.tokens, found.token_logprobs, found.top_logprobs, found.text_offset, strict=True
    ):
        assert top[token] == value == max(top.values()) and len(top) == 2
        assert token.startswith("bytes:") or choice.text[offset : offset + len(token)] == token


# --- Speech and transcriptions ---


@pytest.mark.parametrize(("kind", "media_type"), [("wav", "audio/wav"), ("pcm", "audio/pcm"), ("flac", "audio/flac")])
def test_speech_of_a_text_is_a_file_of_the_format(client: OpenAI, kind: str, media_type: str):
    def read_aloud(format_name: str) -> tuple[str, bytes]:
        answer = client.audio.speech.create(
            model=NAME,
            voice="chelsie",
            input="The sea is loud.",
            response_format=format_name,
            extra_body={"speech": SHORT_SPEECH},
        )
        return answer.response.headers["content-type"], answer.read()

    found, data = read_aloud(kind)
    assert found == media_type
    pcm = data if kind == "pcm" else data[44:] if kind == "wav" else samples(data).tobytes()
    assert len(pcm) == FIRST_FRAME_BYTES + 5 * FRAME_BYTES
    assert pcm == read_aloud("pcm")[1]


def test_speech_is_mp3_unless_asked_otherwise(client: OpenAI):
    answer = client.audio.speech.create(
        model=NAME, voice="ethan", input="The sea.", extra_body={"speech": SHORT_SPEECH}
    )
    assert answer.response.headers["content-type"] == "audio/mpeg"
    assert len(samples(answer.read())) > 10_000


def test_a_talker_that_finds_no_end_is_cut_at_two_seconds_a_token(client: OpenAI, tokenizer: Tokenizer):
    answer = client.audio.speech.create(
        model=NAME, voice="ethan", input="Hi.", response_format="pcm", extra_body={"speech": {"ignore_eos": True}}
    )
    frames = 25 * len(tokenizer.encode("Hi.").ids) + 32
    assert len(answer.read()) == FIRST_FRAME_BYTES + (frames - 1) * FRAME_BYTES


def test_samples_arrive_while_the_rest_is_still_spoken(client: OpenAI, server: Server):
    speech = {"max_frames": 40, "seed": 1, "ignore_eos": True}
    with client.audio.speech.with_streaming_response.create(
        model=NAME, voice="ethan", input="The sea is loud.", response_format="pcm", extra_body={"speech": speech}
    ) as answer:
        assert "content-length" not in answer.headers
        pieces = answer.iter_bytes()
        assert next(pieces)
        assert server.metrics()["requests_running"] == 1
        rest = b"".join(pieces)
    assert len(rest) > 30 * FRAME_BYTES


def test_a_streamed_wav_says_that_its_length_is_unknown(client: OpenAI):
    data = client.audio.speech.create(
        model=NAME, voice="ethan", input="Hi.", response_format="wav", extra_body={"speech": SHORT_SPEECH}
    ).read()
    assert data[:4] == b"RIFF" and data[4:8] == data[40:44] == b"\xff\xff\xff\xff"
    assert len(samples(data)) == (len(data) - 44) // 2


def transcribe(client: OpenAI, **wishes: object):
    return client.audio.transcriptions.create(model=NAME, file=("c00.flac", CLIP), **wishes)


def test_a_transcription_is_greedy_text_with_its_tokens_and_its_seconds(client: OpenAI):
    answer = transcribe(client, language="en")
    assert answer.text and answer.text == transcribe(client, language="en").text
    assert answer.text != transcribe(client, language="de").text
    usage = answer.usage
    assert (usage.type, usage.input_token_details.audio_tokens) == ("tokens", CLIP_TOKENS)
    assert usage.input_tokens == CLIP_TOKENS + usage.input_token_details.text_tokens
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert answer.finish_reason in ("stop", "length")
    assert transcribe(client, language="en", response_format="text") == answer.text
    verbose = transcribe(client, language="en", response_format="verbose_json")
    assert (verbose.text, verbose.duration, verbose.language) == (answer.text, CLIP_SECONDS, "english")
    assert (verbose.usage.type, verbose.usage.seconds) == ("duration", CLIP_SECONDS)


def test_a_streamed_transcription_ends_with_the_whole_text(client: OpenAI):
    whole = transcribe(client)
    *deltas, done = list(transcribe(client, stream=True))
    assert "".join(event.delta for event in deltas) == whole.text == done.text
    assert {event.type for event in deltas} == {"transcript.text.delta"} and done.type == "transcript.text.done"
    assert done.usage.output_tokens == whole.usage.output_tokens


def test_sixty_seconds_are_heard_whole_and_reported_so(client: OpenAI):
    data = audio_file(tone(62.0, 8000), 8000, "FLAC")
    answer = client.audio.transcriptions.create(model=NAME, file=("long.flac", data), response_format="verbose_json")
    assert answer.duration == pytest.approx(62.0, abs=1e-3)
    other = client.audio.transcriptions.create(model=NAME, file=("long.flac", data))
    assert other.usage.input_token_details.audio_tokens == 806


# --- Models ---


def test_the_served_model_is_listed_and_known_by_name_and_by_folder(
    client: OpenAI, server: Server, tiny_checkpoint: Path
):
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == (NAME, "model", "walkgate")
    assert model.max_model_len == 4096
    assert client.models.retrieve(NAME) == model
    status, data = server.get(f"/v1/models/{tiny_checkpoint}")
    assert (status, data["id"]) == (200, NAME)
    answer = client.chat.completions.create(model=str(tiny_checkpoint), messages=USER, max_tokens=1)
    assert answer.model == NAME
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.models.retrieve("gpt-4o")


# --- Leaving ---


@pytest.mark.parametrize("n", [1, 3])
def test_a_reader_that_leaves_cancels_all_choices(client: OpenAI, server: Server, n: int):
    stream = chat(client, n=n, max_tokens=2000, extra_body={"ignore_eos": True}, stream=True)
    next(iter(stream))
    stream.close()
    assert wait_until(lambda: server.metrics()["http_open"] == 0, 5)
    found = server.metrics()
    assert found["requests_running"] == found["requests_waiting"] == found["engine_open"] == 0
    assert found["slots_free"] == found["slots"] and found["thinker_pages_free"] == found["thinker_pages"]


def test_the_server_has_failed_nobody(server: Server):
    assert server.metrics()["http_failed_total"] == 0
    assert "Traceback" not in server.text()
