"""The OpenAI door: what is written to it, and what is read from streams in either form of sound."""

from __future__ import annotations

import base64
import io
import json
import struct
import wave
from pathlib import Path

import pytest
import soundfile

from gate.client import Target, door_of, measure
from gate.door import Reply
from gate.openai import OpenAiDoor, shared_out
from gate.record import EventStamp, Item
from tests.gate.test_client import cell, fake, prompts
from tests.gate.trees import write_tone

DOOR = OpenAiDoor("served")
PCM = struct.pack("<4h", 1, -2, 3, -4)


def event(value: object) -> bytes:
    return b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode())


def delta(**fields: object) -> dict[str, object]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": None}], "usage": None}


def usage(prompt: int, completion: int, **details: int) -> dict[str, object]:
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, "completion_tokens_details": details or None}
    return {"choices": [], "usage": counts}


def read(*values: object) -> Reply:
    return DOOR.read([(1000 * place, event(value)) for place, value in enumerate(values, 1)])


def as_wav(pcm: bytes, rate: int, channels: int = 1) -> str:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(channels)
        out.setsampwidth(2)
        out.setframerate(rate)
        out.writeframes(pcm)
    return base64.b64encode(file.getvalue()).decode()


def without_rate(wav: str) -> str:
    data = base64.b64decode(wav)
    return base64.b64encode(data[:24] + bytes(4) + data[28:]).decode()


def test_a_text_cell_asks_greedily_for_a_stream_with_usage() -> None:
    assert json.loads(DOOR.body(cell(), prompts(1)[0], Path())) == {
        "model": "served",
        "messages": [{"role": "user", "content": "prompt 0"}],
        "max_tokens": 8,
        "temperature": 0.0,
        "seed": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "modalities": ["text"],
        "ignore_eos": True,
    }
    assert "ignore_eos" not in json.loads(DOOR.body(cell(ignore_eos=False), prompts(1)[0], Path()))


def test_random_ids_go_to_the_completions_route_and_its_text_is_read() -> None:
    target = Target("http://x", "01-base", "base", 0, door="openai", model="served")
    ids = cell(workload="ids", prompt_tokens=3, ids_below=256)
    door = door_of(target, ids)
    assert (door.path, door_of(target, cell()).path) == ("/v1/completions", "/v1/chat/completions")
    body = json.loads(door.body(ids, Item("T2T@1-0000", None, None, 0.0, None, None, [7, 8, 9]), Path()))
    assert body["prompt"] == [7, 8, 9] and body["ignore_eos"] and not {"messages", "modalities"} & body.keys()
    text = {"object": "text_completion", "choices": [{"index": 0, "text": "two words", "finish_reason": "length"}]}
    reply = read(text, usage(3, 2), b"[DONE]")
    assert (reply.text, reply.completion_tokens, reply.error) == ("two words", 2, None)


def test_a_speech_cell_sends_the_clip_as_a_wav_of_the_same_samples_before_the_text(tmp_path: Path) -> None:
    write_tone(tmp_path / "a.flac", 300, 0.1)
    item = Item(id="a", text="Say.", audio="a.flac", audio_seconds=0.1, reference="x", speaker=None)
    body = json.loads(DOOR.body(cell("A2S"), item, tmp_path))
    (message,) = body["messages"]
    sound, text = message["content"]
    assert (text, sound["input_audio"]["format"]) == ({"type": "text", "text": "Say."}, "wav")
    samples, rate = soundfile.read(io.BytesIO(base64.b64decode(sound["input_audio"]["data"])), dtype="int16")
    kept, same = soundfile.read(str(tmp_path / "a.flac"), dtype="int16")
    assert rate == same and samples.tolist() == kept.tolist() and len(samples) == 1600
    assert (body["modalities"], body["audio"]) == (["text", "audio"], {"voice": "ethan", "format": "pcm16"})
    assert "speech" not in body
    ours = json.loads(OpenAiDoor("served", ours=True).body(cell("A2S"), item, tmp_path))
    assert ours["speech"] == {"max_frames": 6, "ignore_eos": True}


def test_text_is_stamped_from_its_first_character_and_tokens_are_usages() -> None:
    reply = read(
        delta(role="assistant", content=""),
        delta(content="two"),
        delta(content=" words"),
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]},
        usage(9, 5),
        b"[DONE]",
    )
    assert reply.error is None
    assert (reply.text, reply.finish_reason) == ("two words", "length")
    assert (reply.prompt_tokens, reply.completion_tokens) == (9, 5)
    assert reply.events == [EventStamp(2000, 3, 3, 0), EventStamp(3000, 2, 6, 0)]


def test_openais_sound_is_raw_pcm_with_its_transcript_as_the_text() -> None:
    data = base64.b64encode(PCM).decode()
    reply = read(
        delta(audio={"id": "a"}),
        delta(audio={"transcript": "hi"}),
        delta(audio={"data": data}),
        delta(audio={"data": data}),
        usage(9, 102, text_tokens=2, audio_tokens=100),
        b"[DONE]",
    )
    assert (reply.error, reply.text, reply.completion_tokens, reply.pcm_samples) == (None, "hi", 2, 8)
    assert [event.pcm_samples for event in reply.events] == [0, 4, 4]
    assert reply.sample_rate == 24000


def test_vllm_omnis_sound_is_a_wav_file_a_chunk_whose_headers_are_no_sound_and_whose_usage_of_0_counts_nothing() -> (
    None
):
    chunk = {**delta(content=as_wav(PCM, 16000)), "modality": "audio", "usage": {"completion_tokens": 0}}
    reply = read({**delta(content="hi"), "modality": "text"}, chunk, chunk, usage(9, 2), b"[DONE]")
    raw = read(delta(content="hi"), delta(audio={"data": base64.b64encode(PCM + PCM).decode()}), usage(9, 2), b"[DONE]")
    assert (reply.error, reply.text, reply.completion_tokens, reply.pcm_samples) == (None, "hi", 2, 8)
    assert reply.sample_rate == 16000
    assert reply.pcm_sha256 == raw.pcm_sha256 is not None


def test_vllm_omnis_raw_chunks_have_their_rate_beside_them() -> None:
    data = base64.b64encode(PCM).decode()
    sound = {**delta(content=data), "modality": "audio", "audio_metadata": {"sample_rate": 48000, "format": "pcm16"}}
    reply = read(delta(content="hi"), sound, usage(1, 1), b"[DONE]")
    assert (reply.pcm_samples, reply.sample_rate, reply.text) == (4, 48000, "hi")


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ([delta(content="a"), usage(1, 1)], "the stream ended without [DONE]"),
        ([delta(content="a"), b"[DONE]"], "no usage came, though stream_options.include_usage asked for it"),
        ([{"error": {"message": "it broke", "type": "server_error", "code": 500}}], "500: it broke"),
        (
            [{"error": {"message": "it broke", "type": "server_error", "param": "audio"}}],
            "server_error (audio): it broke",
        ),
        ([delta(audio={"data": "?"}), b"[DONE]"], "a chunk of sound is not base64"),
        ([{**delta(content=as_wav(PCM, 8000, 2)), "modality": "audio"}], "sound of 16 bits, 2 channels; 16, 1 wanted"),
        (
            [{**delta(content=base64.b64encode(b"RIFF").decode()), "modality": "audio"}],
            "a chunk of sound is no WAV file",
        ),
        ([{**delta(content=without_rate(as_wav(PCM, 8000))), "modality": "audio"}], "sound of 0 samples a second"),
        (
            [b'{"zz": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"],
            "an event of the stream is not a chat completion chunk",
        ),
        ([usage(9, 10**30)], "an event of the stream is not a chat completion chunk: Expected `int"),
        ([usage(9, 10**18)], "an event of the stream is not a chat completion chunk: Expected `int"),
        ([usage(9, -5)], "an event of the stream is not a chat completion chunk: Expected `int"),
        ([usage(9, 2, text_tokens=10**30)], "an event of the stream is not a chat completion chunk: Expected `int"),
        (
            [{**delta(content=""), "audio_metadata": {"sample_rate": -8000}}],
            "an event of the stream is not a chat completion chunk: Expected `int",
        ),
        ([b"{"], "an event of the stream is not a chat completion chunk"),
        ([{"choices": 3}], "an event of the stream is not a chat completion chunk"),
    ],
)
def test_a_stream_that_is_not_whole_says_what_is_wrong(values: list[object], error: str) -> None:
    assert str(read(*values).error).startswith(error)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            b'{"error": {"message": "no such model", "type": "x", "param": "model", "code": null}}',
            "x (model): no such model",
        ),
        (b'{"object": "error", "message": "too long", "code": 400}', "too long"),
        (b'{"error": "plain"}', "plain"),
        (b'{"detail": "Not Found"}', '{"detail": "Not Found"}'),
        (b"<html>", "<html>"),
        (b"[" * 100_000, "[" * 200),
    ],
)
def test_a_refusal_is_a_sentence_in_whatever_form_it_comes(body: bytes, words: str) -> None:
    assert DOOR.refusal(body) == words


def test_tokens_are_shared_out_over_the_events_that_bring_text() -> None:
    events = [EventStamp(1, 0, 2, 0), EventStamp(2, 0, 0, 9), EventStamp(3, 0, 1, 0)]
    assert [event.tokens for event in shared_out(events, 5)] == [3, 0, 2]
    assert [event.tokens for event in shared_out(events, 1)] == [1, 0, 0]
    assert shared_out([], 5) == []


@pytest.mark.parametrize("sound", ["openai", "omni"])
def test_a_peer_is_measured_like_ours_but_for_token_ids(tmp_path: Path, sound: str) -> None:
    with fake(tmp_path, sound=sound, token_ms=2, peer=True) as ours:
        target = Target(ours.url, "01-base", "base", ours.origin_ns, ours.limits, "openai", "fake", ours=True)
        (record,) = measure(target, cell("T2S"), [], prompts(1), tmp_path).records
    assert record.ok and record.error is None
    assert (record.completion_tokens, record.prompt_tokens, record.finish_reason) == (8, 2, "length")
    assert record.token_ids == [] and record.steps == [ord(character) for character in record.text]
    assert record.pcm_samples == 6 * 1920 and [event.tokens for event in record.events if event.chars] == [1] * 8


def test_a_peer_that_counts_more_tokens_than_asked_for_has_failed(tmp_path: Path) -> None:
    with fake(tmp_path, short_by=-1, peer=True) as ours:
        target = Target(ours.url, "01-base", "base", ours.origin_ns, ours.limits, "openai", "fake", ours=False)
        (record,) = measure(target, cell(), [], prompts(1), tmp_path).records
    assert (record.ok, record.error) == (False, "counted more tokens than asked for: 9 of 8")


def test_a_refusing_or_failing_peer_leaves_records_that_say_why(tmp_path: Path) -> None:
    with fake(tmp_path, key="secret", peer=True) as ours:
        target = Target(ours.url, "01-base", "base", ours.origin_ns, ours.limits, "openai", "fake", ours=False)
        (record,) = measure(target, cell(), [], prompts(1), tmp_path).records
        (keyed,) = measure(target, cell(), [], prompts(1), tmp_path, {"Authorization": "Bearer secret"}).records
    assert (record.ok, record.error) == (False, "HTTP 401: 401: Unauthorized")
    assert keyed.ok
