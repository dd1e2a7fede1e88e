"""Pieces of the OpenAI interface that need no server: sound files, fields, seeds, names of errors."""

from __future__ import annotations

import io
import json
import wave

import numpy as np
import pytest
import soundfile

from engine.errors import RequestError
from engine.server import sound
from engine.server.failure import error_for
from engine.server.fields import checked, from_base64
from engine.server.openai import ChatFields, SpeechFields, TranscriptionFields
from engine.server.openai_work import _from_url, choice_seed, renamed

PCM = (np.sin(np.arange(24000) / 10) * 9000).astype("<i2").tobytes()
USER = {"role": "user", "content": "a"}
MARKS = 1000


def test_a_wav_is_what_the_standard_library_reads():
    with wave.open(io.BytesIO(sound.encoded(PCM, "wav"))) as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (1, 2, 24000)
        assert file.readframes(file.getnframes()) == PCM
    assert len(sound.wav_header()) == 44


@pytest.mark.parametrize("name", ["wav", "flac"])
def test_lossless_files_hold_the_samples(name: str):
    found, rate = soundfile.read(io.BytesIO(sound.encoded(PCM, name)), dtype="int16")
    assert rate == 24000 and found.tobytes() == PCM
    assert sound.encoded(PCM, "pcm") == PCM


@pytest.mark.parametrize("name", ["wav", "flac", "mp3", "opus"])
def test_no_samples_are_still_a_file(name: str):
    found, rate = soundfile.read(io.BytesIO(sound.encoded(b"", name)))
    assert rate == 24000 and len(found) <= 2400 and np.abs(found).max(initial=0) < 1e-6


def test_seeds_of_choices_differ_and_are_the_same_every_time():
    seeds = [choice_seed(7, place) for place in range(16)]
    assert seeds[0] == 7
    assert len(set(seeds)) == 16 and all(0 <= seed < 2**63 for seed in seeds)
    assert seeds[1] == choice_seed(7, 1) == 7651910736988481393
    assert choice_seed(8, 0) not in seeds


@pytest.mark.parametrize(
    ("message", "field", "told", "name"),
    [
        (
            "audio[1] is empty",
            "audio",
            "messages[2].content[0].input_audio is empty",
            "messages[2].content[0].input_audio",
        ),
        ("audio[0] to audio[1] take 9", "audio", "a to messages[2].content[0].input_audio take 9", "a"),
        ("the prompt has 9 tokens", "audio", "the prompt has 9 tokens", "messages"),
        ("text has 9 characters", "text", "messages has 9 characters", "messages"),
        ("send text instead", "output", "send text instead", "output"),
    ],
)
def test_errors_are_told_in_the_clients_own_names(message: str, field: str, told: str, name: str):
    with (
        pytest.raises(RequestError) as refused,
        renamed({"text": "messages", "audio": "messages"}, ["a", "messages[2].content[0].input_audio"]),
    ):
        raise RequestError(message, field=field, code="c", status=413)
    error = refused.value
    assert (error.message, error.field, error.code, error.status) == (told, name, "c", 413)


def test_null_counts_as_not_given_at_any_depth():
    body = {"model": "m", "temperature": None, "audio": None, "tools": None, "unknown": None}
    body["messages"] = [USER | {"name": None, "tool_calls": None}]
    fields = checked(ChatFields, json.dumps(body).encode(), MARKS)
    assert fields.model_fields_set == {"model", "messages"}
    assert fields.messages[0].model_fields_set == {"role", "content"}


def test_an_unserved_field_passes_only_with_a_value_that_asks_for_nothing():
    good = {"model": "m", "input": "a"}
    assert checked(SpeechFields, json.dumps(good | {"speed": 1}).encode(), MARKS).input == "a"
    assert checked(SpeechFields, json.dumps(good | {"speed": 1.0}).encode(), MARKS).input == "a"
    for speed in (0.5, True, "1"):
        with pytest.raises(RequestError, match="another speed than 1 is not served"):
            checked(SpeechFields, json.dumps(good | {"speed": speed}).encode(), MARKS)


def test_the_default_format_of_speech_is_wav_and_pcm16_in_a_stream():
    def format_of(**more: object) -> str:
        body = {"model": "m", "messages": [USER], "modalities": ["text", "audio"]} | more
        fields = checked(ChatFields, json.dumps(body).encode(), MARKS)
        fields.check()
        return fields.audio_format

    assert (format_of(), format_of(stream=True), format_of(audio={"format": "mp3"})) == ("wav", "pcm16", "mp3")


def test_base64_comes_bare_in_lines_or_as_a_data_url():
    for text in ("QUJD", "QU\nJD\n", "data:;base64,QUJD", "data:audio/wav;base64,QUJD", "DATA:audio/wav;BASE64,QUJD"):
        assert from_base64(text, "x") == b"ABC"
    for text in ("data:audio/wav,ABC", "data:base64,QUJD", "QUJ", "é"):
        with pytest.raises(RequestError) as refused:
            from_base64(text, "x")
        assert refused.value.field == "x"


def test_an_audio_url_is_read_whatever_its_case():
    for url in ("DATA:Audio/WAV;BASE64,QUJD", "data:;base64,QUJD", "Data:audio/wav,%41BC"):
        assert _from_url(url, "x") == b"ABC"
    with pytest.raises(RequestError, match="says that it is image/png; audio/… is served"):
        _from_url("data:IMAGE/png;base64,QUJD", "x")


def test_json_may_hold_so_many_brackets_colons_and_commas():
    body = b'{"model": "m", "input": "[:,"}'
    assert checked(SpeechFields, body, 7).input == "[:,"
    with pytest.raises(
        RequestError, match="the body holds 7 brackets, colons and commas; this server reads 6 in a req"
    ):
        checked(SpeechFields, body, 6)


def test_a_form_has_no_field_of_another_route():
    with pytest.raises(RequestError, match="no such field"):
        checked(TranscriptionFields, b'{"model": "m", "voice": "ethan"}', MARKS)


@pytest.mark.parametrize(
    ("status", "kind"), [(400, "invalid_request_error"), (404, "invalid_request_error"), (429, "rate_limit_error")]
)
def test_errors_have_the_form_of_their_interface(status: int, kind: str):
    error = RequestError("no", field="f", code="c", status=status)
    assert json.loads(error_for("/v1/models", error)) == {
        "error": {"message": "no", "type": kind, "param": "f", "code": "c"}
    }
    assert json.loads(error_for("/generate", error)) == {"error": {"message": "no", "field": "f", "code": "c"}}
