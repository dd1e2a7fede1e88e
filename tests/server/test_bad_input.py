"""Every kind of bad input ends as a 4xx that names its field, and the server answers the next request as before."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Callable

import numpy as np
import pytest

from tests.server.serving import Server, audio_file, base64_text, multipart, tone

JSON = {"Content-Type": "application/json"}
NAN = float("nan")
AUDIO_PAD = "<|audio_pad|>"

# Body fields, the field that the refusal names, and words of its message.
FIELDS: list[tuple[dict, str | None, str]] = [
    ({}, "text", "give `text` or `prompt_token_ids`"),
    ({"text": ""}, "text", "empty"),
    ({"text": None}, "text", "give `text`"),
    ({"text": 5}, "text", "valid string"),
    ({"text": ["a"]}, "text", "valid string"),
    ({"text": "a", "prompt_token_ids": [65]}, "prompt_token_ids", "not both"),
    ({"text": "a", "prompt_token_ids": None}, "prompt_token_ids", "null"),
    ({"prompt_token_ids": []}, "prompt_token_ids", "empty"),
    ({"prompt_token_ids": [65, 512]}, "prompt_token_ids", "prompt_token_ids[1] is 512; ids of this model are 0 to 511"),
    ({"prompt_token_ids": [-1]}, "prompt_token_ids", "prompt_token_ids[0]"),
    ({"prompt_token_ids": ["65"]}, "prompt_token_ids", "valid integer"),
    ({"prompt_token_ids": [1.0]}, "prompt_token_ids", "valid integer"),
    ({"prompt_token_ids": [True]}, "prompt_token_ids", "valid integer"),
    ({"prompt_token_ids": [2**70]}, "prompt_token_ids", "prompt_token_ids[0]"),
    ({"prompt_token_ids": [65] * 4096}, "prompt_token_ids", "4096"),
    ({"prompt_token_ids": [65], "system": "Be brief."}, "system", "prompt_token_ids"),
    ({"text": "word " * 5000}, "text", "4096 tokens"),
    ({"text": "x" * 2_000_000}, "text", "2000000 characters"),
    ({"text": "a", "system": "x" * 2_000_000}, "system", "2000000 characters"),
    ({"text": f"a {AUDIO_PAD}"}, "text", "1 run of the audio placeholder"),
    ({"text": "a <|image_pad|>"}, "text", "image and video input is not served yet"),
    ({"text": "a <|video_pad|>"}, "text", "image and video input is not served yet"),
    ({"text": "a", "image": "x"}, "image", "image and video input is not served yet"),
    ({"text": "a", "images": ["x"]}, "images", "image and video input is not served yet"),
    ({"text": "a", "video": "x"}, "video", "image and video input is not served yet"),
    ({"text": "a", "videos": []}, "videos", "image and video input is not served yet"),
    ({"text": "a", "max_token": 5}, "max_token", "did you mean 'max_tokens'"),
    ({"text": "a", "modalities": ["text"]}, "modalities", "no such field"),
    ({"text": "a", "speech": {"voices": "x"}, "output": ["audio"]}, "speech.voices", "did you mean 'voice'"),
    ({"text": "a", "stream": "x"}, "stream", "boolean"),
    ({"text": "a", "stream": 1}, "stream", "boolean"),
    ({"text": "a", "max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
    ({"text": "a", "max_tokens": -5}, "max_tokens", "greater than or equal to 1"),
    ({"text": "a", "max_tokens": "7"}, "max_tokens", "integer"),
    ({"text": "a", "max_tokens": 7.0}, "max_tokens", "integer"),
    ({"text": "a", "max_tokens": True}, "max_tokens", "integer"),
    ({"text": "a", "max_tokens": None}, "max_tokens", "integer"),
    ({"text": "a", "max_tokens": 4096}, "max_tokens", "max_tokens is 4096"),
    ({"text": "a", "max_tokens": 10**30}, "max_tokens", "less than"),
    ({"text": "a", "temperature": "hot"}, "temperature", "number"),
    ({"text": "a", "temperature": NAN}, "temperature", "finite"),
    ({"text": "a", "temperature": float("inf")}, "temperature", "finite"),
    ({"text": "a", "temperature": -0.1}, "temperature", "greater than or equal to 0"),
    ({"text": "a", "temperature": 101}, "temperature", "less than or equal to 100"),
    ({"text": "a", "temperature": True}, "temperature", "number"),
    ({"text": "a", "top_p": 0}, "top_p", "greater than 0"),
    ({"text": "a", "top_p": 1.01}, "top_p", "less than or equal to 1"),
    ({"text": "a", "top_p": NAN}, "top_p", "finite"),
    ({"text": "a", "top_k": -1}, "top_k", "greater than or equal to 0"),
    ({"text": "a", "top_k": 2.5}, "top_k", "integer"),
    ({"text": "a", "repetition_penalty": 1e-38}, "repetition_penalty", "greater than or equal to 0.01"),
    ({"text": "a", "repetition_penalty": NAN}, "repetition_penalty", "finite"),
    ({"text": "a", "min_p": -0.1}, "min_p", "greater than or equal to 0"),
    ({"text": "a", "min_p": 1.1}, "min_p", "less than or equal to 1"),
    ({"text": "a", "min_p": NAN}, "min_p", "finite"),
    ({"text": "a", "frequency_penalty": 2.1}, "frequency_penalty", "less than or equal to 2"),
    ({"text": "a", "frequency_penalty": "much"}, "frequency_penalty", "number"),
    ({"text": "a", "presence_penalty": -2.1}, "presence_penalty", "greater than or equal to -2"),
    ({"text": "a", "presence_penalty": True}, "presence_penalty", "number"),
    ({"text": "a", "presence_penalty": NAN}, "presence_penalty", "finite"),
    ({"text": "a", "logit_bias": [65]}, "logit_bias", "object"),
    ({"text": "a", "logit_bias": {}}, "logit_bias", "at least 1 item"),
    ({"text": "a", "logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias", "at most 1024 items"),
    ({"text": "a", "logit_bias": {"yes": 1}}, "logit_bias", "logit_bias.yes: String should match pattern"),
    ({"text": "a", "logit_bias": {"-1": 1}}, "logit_bias", "logit_bias.-1: String should match pattern"),
    ({"text": "a", "logit_bias": {"065": 1}}, "logit_bias", "logit_bias.065: String should match pattern"),
    ({"text": "a", "logit_bias": {"6.5": 1}}, "logit_bias", "logit_bias.6.5: String should match pattern"),
    ({"text": "a", "logit_bias": {"65": 100.5}}, "logit_bias", "logit_bias.65: must be less than or equal to 100"),
    ({"text": "a", "logit_bias": {"65": -101}}, "logit_bias", "greater than or equal to -100"),
    ({"text": "a", "logit_bias": {"65": "x"}}, "logit_bias", "number"),
    ({"text": "a", "logit_bias": {"65": 1, "512": 1}}, "logit_bias", "holds 512; ids of this model are 0 to 511"),
    ({"text": "a", "logit_bias": {"9999999999": 1}}, "logit_bias", "holds 9999999999"),
    ({"text": "a", "stop": ""}, "stop", "at least 1 character"),
    ({"text": "a", "stop": ["a", ""]}, "stop", "stop[1]"),
    ({"text": "a", "stop": []}, "stop", "at least 1 item"),
    ({"text": "a", "stop": ["x"] * 17}, "stop", "at most 16 items"),
    ({"text": "a", "stop": "x" * 257}, "stop", "at most 256 characters"),
    ({"text": "a", "stop": 5}, "stop", "valid array"),
    ({"text": "a", "stop": [5]}, "stop", "valid string"),
    ({"text": "a", "stop": None}, "stop", "valid array"),
    ({"text": "a", "stop": "x", "output": ["text", "audio"]}, "stop", "leave"),
    ({"text": "a", "stop_token_ids": [1], "output": ["audio"]}, "stop_token_ids", "leave"),
    ({"text": "a", "stop_token_ids": []}, "stop_token_ids", "at least 1 item"),
    ({"text": "a", "stop_token_ids": list(range(257))}, "stop_token_ids", "at most 256 items"),
    ({"text": "a", "stop_token_ids": [-1]}, "stop_token_ids", "stop_token_ids[0]"),
    ({"text": "a", "stop_token_ids": [3, 512]}, "stop_token_ids", "holds 512; ids of this model are 0 to 511"),
    ({"text": "a", "stop_token_ids": 5}, "stop_token_ids", "valid array"),
    ({"text": "a", "seed": -1}, "seed", "greater than or equal to 0"),
    ({"text": "a", "seed": 2**63}, "seed", "less than"),
    ({"text": "a", "ignore_eos": "yes"}, "ignore_eos", "boolean"),
    ({"text": "a", "top_logprobs": -1}, "top_logprobs", "greater than or equal to 0"),
    ({"text": "a", "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
    ({"text": "a", "top_logprobs": True}, "top_logprobs", "integer"),
    ({"text": "a", "top_logprobs": "yes"}, "top_logprobs", "integer"),
    ({"text": "a", "trace": "yes"}, "trace", "boolean"),
    ({"text": "a", "output": ["audio"], "trace": True}, "trace", "add"),
    ({"text": "a", "output": ["audio"], "top_logprobs": 2}, "top_logprobs", "add"),
    ({"text": "a", "output": []}, "output", "at least 1 item"),
    ({"text": "a", "output": "text"}, "output", "valid array"),
    ({"text": "a", "output": [123]}, "output", "'text' or 'audio'"),
    ({"text": "a", "output": ["speech"]}, "output", "'text' or 'audio'"),
    ({"text": "a", "output": ["text", "text"]}, "output", "twice"),
    ({"text": "a", "speech": {}}, "speech", 'needs "audio" in output'),
    ({"text": "a", "speech": None}, "speech", "null"),
    ({"text": "a", "output": ["audio"], "speech": "ethan"}, "speech", "object"),
    ({"text": "a", "output": ["audio"], "speech": {"voice": "nobody"}}, "speech.voice", "aiden, chelsie, ethan"),
    ({"text": "a", "output": ["audio"], "speech": {"voice": 3}}, "speech.voice", "valid string"),
    (
        {"text": "a", "output": ["audio"], "speech": {"max_frames": 0}},
        "speech.max_frames",
        "greater than or equal to 1",
    ),
    ({"text": "a", "output": ["audio"], "speech": {"max_frames": 4096}}, "speech.max_frames", "max_frames is 4096"),
    ({"text": "a", "output": ["audio"], "speech": {"temperature": NAN}}, "speech.temperature", "finite"),
    ({"text": "a", "output": ["audio"], "speech": {"min_p": 0.1}}, "speech.min_p", "no such field"),
    ({"text": "a", "output": ["audio"], "speech": {"seed": -1}}, "speech.seed", "greater than or equal to 0"),
    ({"text": "a", "output": ["audio"], "speech": {"codes": 1}}, "speech.codes", "boolean"),
    ({"prompt_token_ids": [65, 66], "output": ["audio"]}, "prompt_token_ids", "assistant turn"),
    ({"text": "a", "audio": [5]}, "audio", "valid string"),
    ({"text": "a", "audio": {"data": "x"}}, "audio", "valid array"),
    ({"text": "a", "audio": "%%%"}, "audio", "not base64"),
    ({"text": "a", "audio": "QUJ"}, "audio", "not base64"),
    ({"text": "a", "audio": "ünïcode"}, "audio", "not base64"),
    ({"text": "a", "audio": ["QUJD", "QUJ"]}, "audio", "audio[1] is not base64"),
    ({"text": "a", "audio": "data:audio/wav;base64,QUJD"}, "audio", "can't be decoded"),
    ({"text": "a", "audio": "data:audio/wav,QUJD"}, "audio", "without ;base64"),
    ({"text": "a", "audio": ""}, "audio", "empty"),
    ({"text": "a", "audio": base64_text(b"GIF89a" + bytes(200))}, "audio", "can't be decoded"),
    ({"text": "a", "audio": base64_text(b"RIFF")}, "audio", "can't be decoded"),
]


def named(message: str) -> str:
    return message[:60]


@pytest.mark.parametrize(("body", "field", "words"), FIELDS, ids=lambda value: named(repr(value)))
def test_a_field_that_cannot_be_used_is_refused_by_name(server: Server, body: dict, field: str | None, words: str):
    status, answer = server.post(body)
    assert status == 400, answer
    assert answer["error"]["field"] == field, answer
    assert words in answer["error"]["message"]
    assert answer["error"]["code"]


def wav_of(samples: np.ndarray, rate: int = 16000) -> bytes:
    return audio_file(samples, rate, "WAV", "FLOAT")


def with_nan() -> bytes:
    samples = tone(0.5)
    samples[100] = np.nan
    return wav_of(samples)


def header_of_rate(rate: int) -> bytes:
    data = bytearray(audio_file(tone(0.5)))
    struct.pack_into("<I", data, 24, rate)
    return bytes(data)


AUDIO: list[tuple[str, Callable[[], bytes], str]] = [
    ("zero samples", lambda: audio_file(np.zeros(0, np.float32)), "holds no samples"),
    ("one sample", lambda: audio_file(np.zeros(1, np.float32)), "shorter than one window of 25 ms"),
    ("24 ms", lambda: audio_file(tone(0.024)), "shorter than one window of 25 ms"),
    ("24 ms at 8 kHz", lambda: audio_file(tone(0.024, 8000), 8000), "shorter than one window of 25 ms"),
    ("WAV cut in half", lambda: audio_file(tone(2.0))[:32000], "is cut off"),
    ("WAV cut in its header", lambda: audio_file(tone(2.0))[:20], "can't be decoded"),
    ("FLAC cut in half", lambda: audio_file(tone(2.0), 16000, "FLAC")[:-8000], "can't be decoded"),
    ("OGG cut in its only page", lambda: audio_file(tone(2.0), 16000, "OGG")[:-1000], "holds no samples"),
    ("OGG cut in its header", lambda: audio_file(tone(2.0), 16000, "OGG")[:100], "can't be decoded"),
    ("NaN", with_nan, "NaN or infinite"),
    ("1 Hz", lambda: header_of_rate(1), "sample rate of 1 Hz"),
    ("4 GHz", lambda: header_of_rate(2**32 - 1), "can't be decoded"),
    (
        "ten minutes",
        lambda: audio_file(tone(600.0, 8000), 8000, "FLAC"),
        "lasts 600.0 s and the clips before it 0.2 s; this server takes at most 313 s",
    ),
    ("text", lambda: b"this is no audio at all, only words" * 20, "can't be decoded"),
    ("zeros", lambda: bytes(5000), "can't be decoded"),
    ("PNG", lambda: b"\x89PNG\r\n\x1a\n" + bytes(500), "can't be decoded"),
]


@pytest.mark.parametrize(("make", "words"), [row[1:] for row in AUDIO], ids=[row[0] for row in AUDIO])
def test_a_broken_clip_is_refused_and_told_apart_from_its_neighbour(
    server: Server, make: Callable[[], bytes], words: str
):
    good = base64_text(audio_file(tone(0.2)))
    status, answer = server.post({"text": "a", "audio": [good, base64_text(make())], "max_tokens": 2})
    assert status == 400, answer
    assert answer["error"]["field"] == "audio"
    assert answer["error"]["message"].startswith("audio[1] ")
    assert words in answer["error"]["message"]


def test_a_wav_whose_writer_did_not_know_its_length_is_heard(server: Server):
    data = bytearray(audio_file(tone(1.0)))
    struct.pack_into("<I", data, 4, 0xFFFFFFFF)
    struct.pack_into("<I", data, 40, 0xFFFFFFFF)
    assert data[36:40] == b"data"
    usage = server.answer(text="a", audio=base64_text(bytes(data)), max_tokens=1)["usage"]
    assert usage["audio_tokens_in"] == 13


def test_clips_that_fit_alone_but_not_together_are_refused_with_both_numbers(server: Server):
    clip = base64_text(audio_file(tone(200.0, 8000), 8000, "FLAC"))
    status, answer = server.post({"text": "a", "audio": [clip, clip]})
    assert (status, answer["error"]["field"]) == (400, "audio")
    assert answer["error"]["message"] == (
        "audio[1] lasts 200.0 s and the clips before it 200.0 s; this server takes at most 313 s of audio in all"
    )


@pytest.mark.parametrize(
    ("runs", "clips", "words"),
    [
        ([1, 1], 1, "2 runs of the audio placeholder"),
        ([], 1, "0 runs of the audio placeholder"),
        ([1], 0, "1 run of the audio placeholder"),
        ([12], 1, "has 12 tokens; audio[0] takes 13"),
        ([1, 14], 2, "has 14 tokens; audio[1] takes 13"),
    ],
)
def test_placeholders_that_do_not_match_the_clips_are_refused(server: Server, runs: list[int], clips: int, words: str):
    from tokenizers import Tokenizer

    _, info = server.get("/info")
    pad = Tokenizer.from_file(info["model"]["folder"] + "/tokenizer.json").token_to_id(AUDIO_PAD)
    ids = [65]
    for run in runs:
        ids += [pad] * run + [65]
    audio = [base64_text(audio_file(tone(1.0)))] * clips
    status, answer = server.post({"prompt_token_ids": ids, "audio": audio, "max_tokens": 1})
    assert (status, answer["error"]["field"]) == (400, "prompt_token_ids")
    assert words in answer["error"]["message"]


RAW: list[tuple[str, bytes, dict[str, str], int, str]] = [
    ("no body", b"", JSON, 400, "not JSON"),
    ("half a body", b'{"text": "a"', JSON, 400, "not JSON"),
    ("a list", b"[1]", JSON, 400, "object"),
    ("a null", b"null", JSON, 400, "object"),
    ("bytes that are no UTF-8", b'{"text": "\xff"}', JSON, 400, "not JSON"),
    ("half a surrogate pair", b'{"text": "\\ud800"}', JSON, 400, "not JSON"),
    ("a deep nest", b"[" * 100_000, JSON, 400, "not JSON"),
    ("a number out of range", b'{"text": "a", "temperature": 1e999}', JSON, 400, "finite"),
    ("a form of a page", b"text=a", {"Content-Type": "application/x-www-form-urlencoded"}, 415, "Content-Type"),
    ("no content type", b'{"text": "a"}', {}, 415, "Content-Type is missing"),
    ("a form without boundary", b"x", {"Content-Type": "multipart/form-data"}, 400, "boundary"),
    ("a form that is none", b"x", {"Content-Type": "multipart/form-data; boundary=b"}, 400, "multipart"),
    ("an empty form", b"--b--\r\n", {"Content-Type": "multipart/form-data; boundary=b"}, 400, "one part `request`"),
]


@pytest.mark.parametrize(("data", "headers", "status", "words"), [row[1:] for row in RAW], ids=[row[0] for row in RAW])
def test_a_body_that_cannot_be_read_is_refused(
    server: Server, data: bytes, headers: dict[str, str], status: int, words: str
):
    found, answer = server.request("POST", "/generate", data, headers)
    assert found == status, answer
    assert words in json.loads(answer)["error"]["message"]


CLIP = audio_file(tone(0.2))
FORMS: list[tuple[list[tuple[str, str | None, bytes]], str, str]] = [
    ([("audio", "a.wav", CLIP)], "request", "one part `request`"),
    ([("request", None, b'{"text": "a"}')] * 2, "request", "not 2"),
    ([("request", None, b'{"text": "a"}'), ("audio", None, b"words")], "audio", "must be a file"),
    (
        [("request", None, b'{"text": "a"}'), ("sound", "a.wav", CLIP)],
        "sound",
        "no such field; known are request, audio",
    ),
    ([("request", None, b'{"text": "a"}'), ("image", "a.png", b"x")], "image", "image and video input"),
    ([("request", None, b'{"text": "a", "max_tokens": 0}')], "max_tokens", "greater than or equal to 1"),
    ([("request", None, b'{"text": "a", "maxtokens": 1}')], "maxtokens", "did you mean 'max_tokens'"),
    ([("request", None, b'{"text": "a"}'), ("audio", "a.wav", b"")], "audio", "empty"),
    (
        [("request", None, b'{"text": "a", "audio": "' + base64.b64encode(CLIP) + b'"}'), ("audio", "a.wav", CLIP)],
        "audio",
        "one way",
    ),
]


@pytest.mark.parametrize(("parts", "field", "words"), FORMS, ids=[row[2] for row in FORMS])
def test_a_form_is_held_to_the_same_rules_as_json(server: Server, parts: list, field: str, words: str):
    body, headers = multipart(parts)
    status, data = server.request("POST", "/generate", body, headers)
    error = json.loads(data)["error"]
    assert (status, error["field"]) == (400, field), error
    assert words in error["message"]


def test_a_form_that_ends_early_is_refused(server: Server):
    body, headers = multipart([("request", None, b'{"text": "a"}')])
    status, data = server.request("POST", "/generate", body[:-20], headers)
    assert status == 400, data


def test_a_body_over_the_limit_is_413_with_both_numbers(server: Server):
    status, answer = server.request("POST", "/generate", b" " * (64 * 1024 * 1024 + 1), JSON)
    error = json.loads(answer)["error"]
    assert (status, error["code"]) == (413, "too_large")
    assert "67108865" in error["message"] and "67108864" in error["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/nowhere", 404), ("GET", "/generate", 405), ("POST", "/health", 405)]
)
def test_an_unknown_route_or_method_is_answered_in_the_same_form(server: Server, method: str, path: str, status: int):
    found, data = server.request(method, path)
    assert found == status
    assert "POST /generate" in json.loads(data)["error"]["message"]


def test_all_faults_of_a_body_are_told_at_once(server: Server):
    _, answer = server.post({"text": "a", "max_tokens": 0, "top_p": 2, "sed": 1})
    assert answer["error"]["message"].count(";") >= 2
    assert all(name in answer["error"]["message"] for name in ("max_tokens", "top_p", "seed"))


def test_the_server_is_as_well_after_all_this_as_before(server: Server):
    assert server.get("/health") == (200, {"status": "ok"})
    assert server.answer(text="Still there?", max_tokens=4, ignore_eos=True)["usage"]["completion_tokens"] == 4
    counters = server.metrics()
    assert counters["http_failed_total"] == 0
    assert counters["http_open"] == counters["requests_running"] == counters["requests_waiting"] == 0
    assert counters["thinker_pages_free"] == counters["thinker_pages"]
    assert "Traceback" not in server.text()
