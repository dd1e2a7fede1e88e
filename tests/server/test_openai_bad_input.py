"""Every kind of bad input to the OpenAI routes ends as a 4xx in OpenAI's form that names the parameter."""

from __future__ import annotations

import json

import numpy as np
import openai
import pytest

from tests.server.serving import Server, audio_file, base64_text, multipart, tone

NAME = "tiny-checkpoint"
JSON = {"Content-Type": "application/json"}
NAN = float("nan")
USER = {"role": "user", "content": "a"}
GOOD = {"model": NAME, "messages": [USER], "max_tokens": 1}
SPEAK = {"modalities": ["text", "audio"]}


def parts(*found: dict) -> dict:
    return {"messages": [{"role": "user", "content": list(found)}]}


def audio(data: str, **more: object) -> dict:
    return parts({"type": "input_audio", "input_audio": {"data": data, "format": "wav", **more}})


def url(text: str) -> dict:
    return parts({"type": "audio_url", "audio_url": {"url": text}})


def silence(count: int) -> str:
    return base64_text(audio_file(np.zeros(count, np.float32)))


# What differs from a good chat, the parameter that the refusal names, and words of its message.
CHAT: list[tuple[dict, str | None, str]] = [
    ({"messages": None}, "messages", "messages: is missing"),
    ({"messages": []}, "messages", "at least 1 item"),
    ({"messages": "hi"}, "messages", "valid list"),
    ({"messages": [{"role": "user"}]}, "messages[0]", "`content` is missing"),
    ({"messages": [{"content": "a"}]}, "messages[0].role", "is missing"),
    ({"messages": [USER, {"role": "tool", "content": "a"}]}, "messages[1].role", "'assistant', got 'tool'"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "valid list"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content", "at least 1 item"),
    ({"messages": [USER | {"contents": "b"}]}, "messages[0].contents", "did you mean 'content'"),
    ({"messages": [{"role": "user", "content": "a <|audio_pad|>"}]}, "messages", "1 run of the audio placeholder"),
    ({"messages": [{"role": "user", "content": "x" * 2_000_000}]}, "messages", "2000000 characters"),
    ({"messages": [{"role": "user", "content": "word " * 5000}]}, "messages", "4096 tokens"),
    ({"messages": [{"role": "assistant", "audio": {"id": "audio-1"}}]}, "messages[0]", "send the transcript"),
    ({"messages": [USER | {"audio": {"id": "a"}}]}, "messages[0]", "belongs to assistant messages"),
    (parts({"type": "image_url", "image_url": {"url": "x"}}), "messages[0].content[0].type", "image and video input"),
    (parts({"type": "video_url", "video_url": {"url": "x"}}), "messages[0].content[0].type", "image and video input"),
    (parts({"type": "input_image"}), "messages[0].content[0].type", "image and video input is not served yet"),
    (parts({"type": "file"}), "messages[0].content[0].type", "'text', 'input_audio' or 'audio_url', got 'file'"),
    (parts({"type": "text"}), "messages[0].content[0]", "has the field `text`"),
    (parts({"type": "text", "text": "a", "input_audio": {"data": ""}}), "messages[0].content[0]", "and no other"),
    (audio("%%%"), "messages[0].content[0].input_audio.data", "is not base64"),
    (audio("QUJ"), "messages[0].content[0].input_audio.data", "is not base64"),
    (audio(""), "messages[0].content[0].input_audio", "is empty"),
    (audio(silence(0)), "messages[0].content[0].input_audio", "holds no samples"),
    (audio(silence(1)), "messages[0].content[0].input_audio", "shorter than one window"),
    (audio(base64_text(b"GIF89a" + bytes(200))), "messages[0].content[0].input_audio", "can't be decoded"),
    (audio(base64_text(audio_file(tone(2.0))[:32000])), "messages[0].content[0].input_audio", "is cut off"),
    (audio(silence(9000), format="xyz"), "messages[0].content[0].input_audio.format", "'wav', 'mp3'"),
    (
        {"messages": [USER, {"role": "system", "content": audio("")["messages"][0]["content"]}]},
        "messages[1]",
        "only user messages may hold audio, not system messages",
    ),
    (url("https://example.com/a.wav"), "messages[0].content[0].audio_url.url", "this server fetches nothing"),
    (url("file:///etc/passwd"), "messages[0].content[0].audio_url.url", "this server fetches nothing"),
    (url("data:image/png;base64,QUJD"), "messages[0].content[0].audio_url.url", "says that it is image/png"),
    (url("data:audio/wav;base64,QUJ"), "messages[0].content[0].audio_url.url", "is not base64"),
    (url("data:audio/wav,abc"), "messages[0].content[0].audio_url", "can't be decoded"),
    ({"model": None}, "model", "is missing"),
    ({"model": 5}, "model", "valid string"),
    ({"stream": "x"}, "stream", "boolean"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage", "no such field"),
    ({"temperature": "hot"}, "temperature", "number"),
    ({"temperature": NAN}, "temperature", "finite"),
    ({"temperature": float("inf")}, "temperature", "finite"),
    ({"temperature": -1}, "temperature", "greater than or equal to 0"),
    ({"top_p": 0}, "top_p", "greater than 0"),
    ({"top_p": NAN}, "top_p", "finite"),
    ({"top_k": -2}, "top_k", "greater than or equal to -1"),
    ({"min_p": 1.5}, "min_p", "less than or equal to 1"),
    ({"frequency_penalty": 2.1}, "frequency_penalty", "less than or equal to 2"),
    ({"presence_penalty": -2.1}, "presence_penalty", "greater than or equal to -2"),
    ({"repetition_penalty": 0}, "repetition_penalty", "greater than or equal to 0.01"),
    ({"logit_bias": {"65": 101}}, "logit_bias.65", "less than or equal to 100"),
    ({"logit_bias": {"a": 1}}, "logit_bias.a", "match pattern"),
    ({"logit_bias": {"512": 1}}, "logit_bias", "512; ids of this model are 0 to 511"),
    ({"stop_token_ids": [512]}, "stop_token_ids", "512; ids of this model are 0 to 511"),
    ({"stop": ""}, "stop[0]", "at least 1 character"),
    ({"stop": ["a"] * 17}, "stop", "at most 16 items"),
    ({"stop": 5}, "stop", "valid list"),
    ({"seed": "x"}, "seed", "integer"),
    ({"seed": 2**63}, "seed", "less than"),
    ({"seed": 1.5}, "seed", "integer"),
    ({"max_tokens": "x"}, "max_tokens", "integer"),
    ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
    ({"max_tokens": 10**30}, "max_tokens", "less than"),
    ({"max_tokens": 5000}, "max_tokens", "max_tokens is 5000"),
    ({"max_tokens": None, "max_completion_tokens": 5000}, "max_completion_tokens", "max_completion_tokens is 5000"),
    ({"max_completion_tokens": 2}, "max_tokens", "give one"),
    ({"n": 0}, "n", "greater than or equal to 1"),
    ({"n": 17}, "n", "less than or equal to 16"),
    ({"logprobs": "yes"}, "logprobs", "boolean"),
    ({"logprobs": 3}, "logprobs", "boolean"),
    ({"top_logprobs": 3}, "top_logprobs", "needs logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
    ({"modalities": [123]}, "modalities[0]", "'text' or 'audio'"),
    ({"modalities": []}, "modalities", "at least 1 item"),
    ({"modalities": ["text", "text"]}, "modalities", "twice"),
    ({"audio": {"voice": "ethan"}}, "audio", 'needs "audio" in modalities'),
    ({"speech": {}}, "speech", 'needs "audio" in modalities'),
    (SPEAK | {"audio": {"voice": "alloy"}}, "audio.voice", "aiden, chelsie, ethan"),
    (SPEAK | {"audio": {"voice": ""}}, "audio.voice", "voice '' is not one of aiden, chelsie, ethan"),
    (SPEAK | {"audio": {"format": "aac"}}, "audio.format", "'wav', 'mp3', 'flac', 'opus' or 'pcm16'"),
    (SPEAK | {"audio": {"format": "wav"}, "stream": True}, "audio.format", "a stream takes 'pcm16' only"),
    (SPEAK | {"stop": "x"}, "stop", "can't go with speech"),
    (SPEAK | {"stop_token_ids": [5]}, "stop_token_ids", "can't go with speech"),
    (SPEAK | {"speech": {"max_frames": 5000}}, "speech.max_frames", "max_frames is 5000"),
    (SPEAK | {"speech": {"temperature": NAN}}, "speech.temperature", "finite"),
    (SPEAK | {"messages": [{"role": "system", "content": "a"}]}, "messages", "add a message of role user"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format", "not served"),
    ({"tools": [{"type": "function"}]}, "tools", "tools are not served"),
    ({"tool_choice": "required"}, "tool_choice", "tools are not served"),
    ({"functions": [{}]}, "functions", "functions are not served"),
    ({"store": True}, "store", "keeping answers is not served"),
    ({"max_token": 5}, "max_token", "did you mean 'max_tokens'"),
    ({"user": 5}, "user", "valid string"),
    ({"metadata": {"a": 5}}, "metadata.a", "valid string"),
]

COMPLETION: list[tuple[dict, str | None, str]] = [
    ({"prompt": None}, "prompt", "is missing"),
    ({"prompt": []}, "prompt", "none empty"),
    ({"prompt": [[]]}, "prompt", "none empty"),
    ({"prompt": [1.5]}, "prompt", "must be a string, a list of strings"),
    ({"prompt": [True]}, "prompt", "must be a string, a list of strings"),
    ({"prompt": ""}, "prompt", "prompt is empty"),
    ({"prompt": [1, 512]}, "prompt", "prompt[1] is 512; ids of this model are 0 to 511"),
    ({"prompt": [[1], [-1]]}, "prompt", "prompt[0] is -1"),
    ({"prompt": [65] * 4096}, "prompt", "4096"),
    ({"prompt": ["a"] * 20, "n": 16}, "prompt", "320 choices; one request may ask for 128"),
    ({"prompt": "<|image_pad|>"}, "prompt", "image and video input is not served"),
    ({"logprobs": 6}, "logprobs", "less than or equal to 5"),
    ({"logprobs": True}, "logprobs", "integer"),
    ({"echo": True}, "echo", "echoing the prompt is not served"),
    ({"suffix": "b"}, "suffix", "not served"),
    ({"best_of": 2}, "best_of", "not served"),
    ({"messages": [USER]}, "messages", "no such field"),
]

SPEECH: list[tuple[dict, str | None, str]] = [
    ({"input": None}, "input", "is missing"),
    ({"input": ""}, "input", "at least 1 character"),
    ({"input": "word " * 5000}, "input", "4096 tokens"),
    ({"input": "x" * 2_000_000}, "input", "characters"),
    ({"voice": "alloy"}, "voice", "aiden, chelsie, ethan"),
    ({"voice": ""}, "voice", "voice '' is not one of aiden, chelsie, ethan"),
    ({"response_format": "aac"}, "response_format", "'mp3', 'opus', 'flac', 'wav' or 'pcm'"),
    ({"speed": 1.5}, "speed", "another speed than 1 is not served"),
    ({"stream_format": "sse"}, "stream_format", "not served"),
    ({"instructions": "Whisper."}, "instructions", "not served"),
]


def refused(server: Server, path: str, body: dict, status: int = 400) -> dict:
    found, data = server.request("POST", path, json.dumps(body).encode(), JSON)
    answer = json.loads(data)
    assert found == status, answer
    error = answer["error"]
    assert answer.keys() == {"error"} and error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error" and error["code"]
    return error


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "image_url", "image_url": {"url": "x"}}],
        [{"type": "text", "text": "a"}, {"type": "video_url", "video_url": {"url": "x"}}],
        [{"type": "input_image"}],
        [{"type": "text", "text": "a", "image_url": "x"}],
        [{"type": "image_url", "image_url": {"url": "x"}}] * 7,
    ],
)
def test_images_and_videos_are_told_once_to_be_not_served(server: Server, content: list):
    error = refused(server, "/v1/chat/completions", GOOD | {"messages": [{"role": "user", "content": content}]})
    words = "image and video input is not served yet; this server takes text and audio"
    assert (error["code"], error["message"]) == ("not_served", f"{error['param']}: {words}")


def test_a_placeholder_of_an_image_is_not_served_either(server: Server):
    assert refused(server, "/v1/completions", {"model": NAME, "prompt": "<|image_pad|>"})["code"] == "not_served"


def named(value: object) -> str:
    return repr(value)[:60]


@pytest.mark.parametrize(("body", "param", "words"), CHAT, ids=named)
def test_a_chat_that_cannot_be_served_is_refused_by_name(server: Server, body: dict, param: str | None, words: str):
    error = refused(server, "/v1/chat/completions", GOOD | body)
    assert error["param"] == param, error
    assert words in error["message"]


@pytest.mark.parametrize(("body", "param", "words"), COMPLETION, ids=named)
def test_a_completion_that_cannot_be_served_is_refused_by_name(
    server: Server, body: dict, param: str | None, words: str
):
    error = refused(server, "/v1/completions", {"model": NAME, "prompt": "a", "max_tokens": 1} | body)
    assert error["param"] == param, error
    assert words in error["message"]


@pytest.mark.parametrize(("body", "param", "words"), SPEECH, ids=named)
def test_a_text_that_cannot_be_read_aloud_is_refused_by_name(server: Server, body: dict, param: str | None, words: str):
    error = refused(server, "/v1/audio/speech", {"model": NAME, "input": "a", "voice": "ethan"} | body)
    assert error["param"] == param, error
    assert words in error["message"]


FILE = ("file", "a.wav", audio_file(tone(0.5)))
FORMS: list[tuple[list[tuple[str, str | None, bytes]], str | None, str]] = [
    ([("model", None, NAME.encode())], "file", "send one file called `file`, not 0"),
    ([FILE], "model", "is missing"),
    ([FILE, FILE, ("model", None, NAME.encode())], "file", "not 2"),
    ([("file", None, b"words"), ("model", None, NAME.encode())], "file", "has a file name"),
    ([FILE, ("sound", "a.wav", b"x"), ("model", None, NAME.encode())], "sound", "only `file` is a file"),
    ([FILE, ("model", None, NAME.encode()), ("model", None, b"x")], "model", "comes twice"),
    ([("file", "a.wav", b""), ("model", None, NAME.encode())], "file", "file is empty"),
    ([("file", "a.wav", b"no sound" * 99), ("model", None, NAME.encode())], "file", "file can't be decoded"),
    ([FILE, ("model", None, b"\xff\xfe")], "model", "is not UTF-8"),
    ([FILE, ("model", None, NAME.encode()), ("response_format", None, b"srt")], "response_format", "'json', 'text'"),
    ([FILE, ("model", None, NAME.encode()), ("temperature", None, b"hot")], "temperature", "number"),
    ([FILE, ("model", None, NAME.encode()), ("temperature", None, b"nan")], "temperature", "finite"),
    ([FILE, ("model", None, NAME.encode()), ("stream", None, b"maybe")], "stream", "boolean"),
    ([FILE, ("model", None, NAME.encode()), ("language", None, b"xx")], "language", "must be one of ar, de, en"),
    ([FILE, ("model", None, NAME.encode()), ("langauge", None, b"en")], "langauge", "did you mean 'language'"),
    (
        [FILE, ("model", None, NAME.encode()), ("stream", None, b"true"), ("response_format", None, b"text")],
        "response_format",
        "a stream has the format json",
    ),
    (
        [FILE, ("model", None, NAME.encode()), ("timestamp_granularities[]", None, b"word")],
        "timestamp_granularities[]",
        "timestamps are not served",
    ),
]


@pytest.mark.parametrize(("form", "param", "words"), FORMS, ids=[row[2] for row in FORMS])
def test_a_form_that_cannot_be_transcribed_is_refused_by_name(
    server: Server, form: list, param: str | None, words: str
):
    body, headers = multipart(form)
    status, data = server.request("POST", "/v1/audio/transcriptions", body, headers)
    error = json.loads(data)["error"]
    assert (status, error["param"]) == (400, param), error
    assert words in error["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/audio/speech"])
def test_a_model_that_is_not_served_is_404(server: Server, path: str):
    body = {"model": "gpt-4o", "messages": [USER], "prompt": "a", "input": "a"}
    kept = {"/v1/chat/completions": "messages", "/v1/completions": "prompt", "/v1/audio/speech": "input"}[path]
    error = refused(server, path, {"model": "gpt-4o", kept: body[kept]}, 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert NAME in error["message"]


RAW: list[tuple[str, bytes, dict[str, str], int, str]] = [
    ("no body", b"", JSON, 400, "not JSON"),
    ("half a body", b'{"model": "a"', JSON, 400, "not JSON"),
    ("a list", b"[1]", JSON, 400, "object"),
    ("a null", b"null", JSON, 400, "object"),
    ("bytes that are no UTF-8", b'{"model": "\xff"}', JSON, 400, "not JSON"),
    ("half a surrogate pair", b'{"model": "\\ud800"}', JSON, 400, "not JSON"),
    ("a deep nest", b"[" * 100_000, JSON, 400, "not JSON"),
    ("a form of a page", b"model=a", {"Content-Type": "application/x-www-form-urlencoded"}, 415, "application/json"),
    ("no content type", b"{}", {}, 415, "Content-Type is missing"),
]


@pytest.mark.parametrize(("data", "headers", "status", "words"), [row[1:] for row in RAW], ids=[row[0] for row in RAW])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/audio/speech"])
def test_a_body_that_cannot_be_read_is_refused(
    server: Server, path: str, data: bytes, headers: dict[str, str], status: int, words: str
):
    found, answer = server.request("POST", path, data, headers)
    assert found == status, answer
    assert words in json.loads(answer)["error"]["message"]


def test_a_body_over_the_limit_is_413(server: Server):
    status, answer = server.request("POST", "/v1/chat/completions", b" " * (64 * 1024 * 1024 + 1), JSON)
    assert (status, json.loads(answer)["error"]["code"]) == (413, "too_large")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nowhere", 404),
        ("GET", "/v1", 404),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("GET", "/v1/models/gpt-4o", 404),
    ],
)
def test_an_unknown_route_method_or_model_is_answered_in_openais_form(
    server: Server, method: str, path: str, status: int
):
    found, data = server.request(method, path)
    assert found == status
    assert json.loads(data)["error"].keys() == {"message", "type", "param", "code"}


def test_the_client_raises_what_it_has_for_each_status(server: Server):
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=NAME, messages=[USER], temperature=-1)
    assert (bad.value.param, bad.value.code) == ("temperature", "invalid_value")
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-4o", messages=[USER])


def test_labels_and_values_that_ask_for_nothing_are_taken(server: Server):
    asked = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "store": False, "functions": None}
    labels = {"user": "u", "metadata": {"a": "b"}, "safety_identifier": "s", "prompt_cache_key": "k", "top_k": -1}
    status, data = server.request("POST", "/v1/chat/completions", json.dumps(GOOD | asked | labels).encode(), JSON)
    assert status == 200, data


def test_the_server_is_as_well_after_all_this_as_before(server: Server):
    assert server.get("/health")[0] == 200
    found = server.metrics()
    assert found["http_failed_total"] == 0
    assert found["http_open"] == found["requests_running"] == found["requests_waiting"] == 0
    assert "Traceback" not in server.text()
