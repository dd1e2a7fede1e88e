"""What `/generate` answers: engine events to lines of a stream, or to one object. No torch."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from typing import ClassVar

import msgspec
from starlette.responses import Response

from engine.detokenize import Detokenizer
from engine.errors import RequestError
from engine.request import Event, Usage
from engine.server.protocol import GenerateFields
from engine.server.sound import SAMPLE_RATE, WAV, encoded

JSON, LINES = "application/json", "application/x-ndjson"

Line = dict[str, object]


def error_body(error: RequestError) -> bytes:
    """The JSON text of a refusal or a failure."""
    return msgspec.json.encode({"error": {"message": error.message, "field": error.field, "code": error.code}})


@dataclass(slots=True)
class GenerateReply:
    """One request's answer in the making, as engine/server/respond.py asks for it."""

    stream_type: ClassVar[str] = LINES
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
    _last: Event | None = None

    def chunk(self, place: int, event: Event) -> bytes:
        """The lines that an event makes, each with its line end; none if it holds nothing that was asked for."""
        text = self._step(event)
        line = self._text_part(event, text) | self._audio_part(event)
        made = [line] if line else []
        if event.done:
            made.append({"finished": True, **self._end(event)})
        return b"".join(msgspec.json.encode(one) + b"\n" for one in made)

    def end(self) -> bytes:
        """Nothing: the last event's line ends the stream."""
        return b""

    def failure(self, error: RequestError) -> bytes:
        """The last line of a stream that fails."""
        return error_body(error) + b"\n"

    def add(self, place: int, event: Event) -> None:
        """Keep what an event brought for the one object at the end."""
        self._last = event
        self._text.append(self._step(event))
        self._token_ids += event.token_ids
        self._logprobs += _logprobs(event)
        self._trace += _trace(event)
        self._pcm.append(event.pcm)
        self._codes += event.codes
        self._frames += event.frames

    def whole(self) -> Response:
        """The one object of a reply that is not streamed."""
        texts = "text" in self.fields.output
        found: Line = {"text": "".join(self._text) if texts else "", "token_ids": self._token_ids if texts else []}
        if self.fields.top_logprobs:
            found["logprobs"] = self._logprobs
        if self.fields.trace:
            found["trace"] = self._trace
        assert self._last is not None
        found |= {"audio": self._whole_audio(), **self._end(self._last)}
        return Response(msgspec.json.encode(found), media_type=JSON)

    def _step(self, event: Event) -> str:
        """Take note of an event; returns the text that it completes."""
        self.finish_reason = event.finish_reason or self.finish_reason
        self.audio_finish_reason = event.audio_finish_reason or self.audio_finish_reason
        text = self.detokenizer.push(event.token_ids, event.shown_bytes)
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
        data = base64.b64encode(encoded(b"".join(self._pcm), WAV)).decode("ascii")
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
    return [{"logprob": step.chosen, "token_ids": step.token_ids, "logprobs": step.logprobs} for step in event.logprobs]


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
