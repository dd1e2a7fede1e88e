"""What `/generate` answers: engine events to lines of a stream, or to one object. No torch."""

from __future__ import annotations

import base64
import io
import wave
from dataclasses import dataclass, field

import msgspec

from engine.detokenize import Detokenizer
from engine.errors import RequestError
from engine.request import Event, Usage
from engine.server.protocol import GenerateFields

SAMPLE_RATE = 24000
_SAMPLE_BYTES = 2

Line = dict[str, object]


def error_body(error: RequestError) -> bytes:
    """The JSON text of a refusal or a failure."""
    return msgspec.json.encode(_error(error.message, error.field, error.code))


def failure_line(message: str) -> bytes:
    """The last line of a stream that failed after it had begun."""
    return msgspec.json.encode(_error(message, None, "engine")) + b"\n"


def _error(message: str, field_name: str | None, code: str) -> Line:
    return {"error": {"message": message, "field": field_name, "code": code}}


@dataclass(slots=True)
class Reply:
    """One request's answer in the making. Each event goes either through `lines` or through `add`, once, in order."""

    fields: GenerateFields
    detokenizer: Detokenizer
    finish_reason: str | None = None
    audio_finish_reason: str | None = None
    _token_ids: list[int] = field(default_factory=list)
    _text: list[str] = field(default_factory=list)
    _logprobs: list[object] = field(default_factory=list)
    _trace: list[object] = field(default_factory=list)
    _pcm: list[bytes] = field(default_factory=list)
    _codes: list[list[int]] = field(default_factory=list)
    _frames: int = 0

    def lines(self, event: Event) -> bytes:
        """The lines that an event makes, each with its line end; none if it holds nothing that was asked for."""
        text = self._step(event)
        line = self._text_part(event, text) | self._audio_part(event)
        made = [line] if line else []
        if event.done:
            made.append({"finished": True, **self._end(event)})
        return b"".join(msgspec.json.encode(one) + b"\n" for one in made)

    def add(self, event: Event) -> None:
        """Keep what an event brought for the one object at the end."""
        self._text.append(self._step(event))
        self._token_ids += event.token_ids
        self._logprobs += _logprobs(event)
        self._trace += _trace(event)
        self._pcm.append(event.pcm)
        self._codes += event.codes
        self._frames += event.frames

    def whole(self, last: Event) -> bytes:
        """The one object of a reply that is not streamed; `last` is the event that closed the request."""
        texts = "text" in self.fields.output
        found: Line = {"text": "".join(self._text) if texts else "", "token_ids": self._token_ids if texts else []}
        if self.fields.top_logprobs:
            found["logprobs"] = self._logprobs
        if self.fields.trace:
            found["trace"] = self._trace
        return msgspec.json.encode(found | {"audio": self._whole_audio(), **self._end(last)})

    def _step(self, event: Event) -> str:
        """Take note of an event; returns the text that it completes."""
        self.finish_reason = event.finish_reason or self.finish_reason
        self.audio_finish_reason = event.audio_finish_reason or self.audio_finish_reason
        text = self.detokenizer.push(event.token_ids)
        return text + self.detokenizer.finish() if event.finish_reason or event.done else text

    def _text_part(self, event: Event, text: str) -> Line:
        if "text" not in self.fields.output or not (event.token_ids or text):
            return {}
        part: Line = {"token_ids": event.token_ids, "text": text}
        if self.fields.top_logprobs:
            part["logprobs"] = _logprobs(event)
        if self.fields.trace:
            part["trace"] = _trace(event)
        return part

    def _audio_part(self, event: Event) -> Line:
        codes = {"codes": event.codes} if event.codes and self._wants_codes else {}
        if not (event.pcm or codes):
            return {}
        pcm = base64.b64encode(event.pcm).decode("ascii")
        return {"pcm": pcm, "sample_rate": SAMPLE_RATE, "frames": event.frames, **codes}

    def _whole_audio(self) -> Line | None:
        if "audio" not in self.fields.output:
            return None
        data = base64.b64encode(_wav(b"".join(self._pcm))).decode("ascii")
        codes = {"codes": self._codes} if self._wants_codes else {}
        return {"data": data, "sample_rate": SAMPLE_RATE, "frames": self._frames, **codes}

    @property
    def _wants_codes(self) -> bool:
        return self.fields.speech is not None and self.fields.speech.codes

    def _end(self, event: Event) -> Line:
        return {
            "finish_reason": self.finish_reason,
            "audio_finish_reason": self.audio_finish_reason,
            "usage": None if event.usage is None else _usage(event.usage),
        }


def _logprobs(event: Event) -> list[object]:
    return [{"token_ids": top.token_ids, "logprobs": top.logprobs} for top in event.logprobs]


def _trace(event: Event) -> list[object]:
    return [{"step": one.step, "bucket": one.bucket, "rows": one.rows} for one in event.trace]


def _usage(usage: Usage) -> dict[str, int | float]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "audio_tokens_in": usage.audio_tokens_in,
        "audio_seconds_in": usage.audio_seconds_in,
        "audio_frames": usage.audio_frames,
        "audio_samples": usage.audio_samples,
        "audio_seconds_out": usage.audio_samples / SAMPLE_RATE,
    }


def _wav(pcm: bytes) -> bytes:
    """A WAV file of 16-bit mono samples."""
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(_SAMPLE_BYTES)
        out.setframerate(SAMPLE_RATE)
        out.writeframes(pcm)
    return buffer.getvalue()
