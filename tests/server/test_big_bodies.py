"""Bodies that are small to send and dear to read: each is refused in little time, and /health answers meanwhile."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tests.server.serving import Server, audio_file, base64_text, multipart, tone

NAME = "tiny-checkpoint"
JSON = {"Content-Type": "application/json"}
CHAT, GENERATE = "/v1/chat/completions", "/generate"
MIB = 1 << 20
LONGEST_S = 3.0
CHAT_HEAD = f'{{"model":"{NAME}","messages":[{{"role":"user","content":"hi"}}],'


def joined(head: str, item: str, count: int, tail: str) -> bytes:
    return (head + ",".join([item] * count) + tail).encode()


def messages(item: str, count: int) -> bytes:
    return joined(f'{{"model":"{NAME}","messages":[', item, count, "]}")


def keys(head: str, count: int) -> bytes:
    return (head + ",".join(f'"k{n}":0' for n in range(count)) + "}").encode()


def chat_with_url(url: str) -> bytes:
    part = {"type": "audio_url", "audio_url": {"url": url}}
    return json.dumps({"model": NAME, "messages": [{"role": "user", "content": [part]}]}).encode()


SHORT = '{"role":"user","content":"a"}'
MARKS = "brackets, colons and commas"
# What is sent where, the status, and words of the refusal.
BODIES: dict[str, tuple[str, Callable[[], bytes], int, str]] = {
    "100,000 messages": (CHAT, lambda: messages(SHORT, 100_000), 400, MARKS),
    "22,000 messages": (CHAT, lambda: messages(SHORT, 22_000), 400, "messages has 22000 messages and parts"),
    "as many messages as tokens": (CHAT, lambda: messages(SHORT, 4096), 400, "characters"),
    "many wrong messages": (CHAT, lambda: messages('{"role":"x","content":7}', 22_000), 400, "messages[0].role"),
    "metadata of lists": (CHAT, lambda: joined(CHAT_HEAD + '"metadata":[', "[]", 15 * MIB, "]}"), 400, MARKS),
    "two million fields": (CHAT, lambda: keys(CHAT_HEAD, 2_000_000), 400, MARKS),
    "50,000 fields": (CHAT, lambda: keys(CHAT_HEAD, 50_000), 400, "k0: no such field"),
    "an unknown field of lists": (GENERATE, lambda: joined('{"text":"a","zz":[', "[]", 15 * MIB, "]}"), 400, MARKS),
    "50,000 fields of generate": (GENERATE, lambda: keys('{"text":"a",', 50_000), 400, "k0: no such field"),
    "15 million ids": (GENERATE, lambda: joined('{"prompt_token_ids":[', "1", 15 * MIB, "]}"), 400, MARKS),
    "a text of 60 MiB": (GENERATE, lambda: b'{"text":"' + b"hello " * (10 * MIB) + b'"}', 400, "characters"),
    "base64 in pieces": (GENERATE, lambda: b'{"text":"a","audio":"' + b"A " * (30 * MIB) + b'"}', 400, "audio[0]"),
    "a long stop string": (GENERATE, lambda: b'{"text":"a","stop":"' + rb"\n" * (30 * MIB) + b'"}', 400, "stop[0]"),
    "20 million escapes": (CHAT, lambda: chat_with_url("data:audio/wav," + "%41" * (20 * MIB)), 400, "send base64"),
    "a name of 20 MiB": (CHAT, lambda: (CHAT_HEAD + '"' + "k" * (20 * MIB) + '":0}').encode(), 400, "kkk…: no such"),
    "a model of 30 MiB": (CHAT, lambda: json.dumps({"model": "x" * (30 * MIB), "messages": [{"role": "user",
        "content": "a"}]}).encode(), 404, "xxx…' does not exist"),
}  # fmt: skip


@contextmanager
def watched(server: Server) -> Iterator[list[float]]:
    """How long each look at /health took, in seconds, in a thread of its own for as long as the block runs."""
    took: list[float] = []
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.02):
            began = time.monotonic()
            assert server.get("/health")[0] == 200
            took.append(time.monotonic() - began)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield took
    finally:
        over.set()
        thread.join()


def refused(server: Server, path: str, data: bytes, headers: dict[str, str], status: int, words: str) -> dict:
    with watched(server) as looks:
        time.sleep(0.1)
        began = time.monotonic()
        found, answer = server.request("POST", path, data, headers)
        took = time.monotonic() - began
        time.sleep(0.1)
    assert found == status, answer[:1000]
    assert len(answer) < 4000
    error = json.loads(answer)["error"]
    assert words in error["message"]
    assert max(looks) < LONGEST_S
    assert took < 5 * LONGEST_S
    return error


@pytest.mark.parametrize(("path", "make", "status", "words"), BODIES.values(), ids=list(BODIES))
def test_a_body_that_is_dear_to_read_is_refused_while_health_answers(
    server: Server, path: str, make: Callable[[], bytes], status: int, words: str
):
    refused(server, path, make(), JSON, status, words)


def test_the_json_of_a_form_is_held_to_the_same_measure(server: Server):
    body, headers = multipart([("request", None, joined('{"text":"a","zz":[', "[]", 5 * MIB, "]}"))])
    assert refused(server, GENERATE, body, headers, 400, MARKS)["code"] == "too_large"


@pytest.mark.parametrize("count", [9_000, 11_000])
def test_a_form_of_very_many_parts_is_refused(server: Server, count: int):
    body, headers = multipart([("audio", "a.wav", b"")] * count)
    words = "one part `request`" if count < 10_000 else "more than the 10000 parts"
    refused(server, GENERATE, body, headers, 400, words)


def test_names_of_a_form_are_shown_in_short(server: Server):
    body, headers = multipart([("n" * 100_000, None, b"x")])
    for path in (GENERATE, "/v1/audio/transcriptions"):
        found, answer = server.request("POST", path, body, headers)
        assert found == 400 and len(answer) < 2000, answer[:300]
    found, answer = server.request("POST", "/x" * 10_000)
    assert found == 404 and len(answer) < 2000
    found, answer = server.request("POST", GENERATE, b"{}", {"Content-Type": "t" * 20_000})
    assert found == 415 and len(answer) < 2000
    speech = {"text": "a", "output": ["audio"], "speech": {"voice": "v" * 100_000}}
    found, answer = server.request("POST", GENERATE, json.dumps(speech).encode(), JSON)
    assert found == 400 and b"at most 80 characters" in answer and len(answer) < 2000
    bias = {"text": "a", "logit_bias": {"b" * 100_000: 1}}
    found, answer = server.request("POST", GENERATE, json.dumps(bias).encode(), JSON)
    assert found == 400 and len(answer) < 2000


def test_a_long_prompt_of_ids_and_a_large_clip_are_still_taken(server: Server):
    assert server.answer(prompt_token_ids=[65] * 4000, max_tokens=1)["usage"]["prompt_tokens"] == 4000
    clip = base64_text(audio_file(tone(60.0, 96000, 2), 96000))
    assert len(clip) > 29 * MIB
    with watched(server) as looks:
        assert server.answer(text="a", audio=clip, max_tokens=1)["usage"]["audio_tokens_in"] == 780
    assert max(looks) < LONGEST_S
