"""Engine events to OpenAI's answers: whole objects, or the chunks of a stream of server-sent events. No torch."""

from __future__ import annotations

import base64
import codecs
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import msgspec
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from engine.detokenize import Detokenizer
from engine.errors import RequestError
from engine.model.processor import Processor
from engine.request import Event, Request, StepLogprobs
from engine.request import Usage as EngineUsage
from engine.server import openai, sound
from engine.server.failure import openai_error
from engine.server.openai_objects import (
    Audio,
    AudioDelta,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatMessage,
    ChunkChoice,
    Completion,
    CompletionDetails,
    Delta,
    DurationUsage,
    Finish,
    InputDetails,
    Logprobs,
    PromptDetails,
    TextChoice,
    TextLogprobs,
    TokenLogprob,
    TokenUsage,
    TopLogprob,
    TranscriptDelta,
    TranscriptDone,
    Transcription,
    Usage,
    VerboseTranscription,
)

F = TypeVar("F", bound=openai.TextFields)

JSON, EVENTS, PLAIN = "application/json", "text/event-stream", "text/plain"
_DONE = b"data: [DONE]\n\n"
# JSON has no minus infinity; OpenAI writes this for what can't happen.
_LEAST_LOGPROB = -9999.0


def _event(value: object) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def _failure_event(error: RequestError) -> bytes:
    return b"data: " + openai_error(error) + b"\n\n"


@dataclass(slots=True)
class _Tokens:
    """How token ids are shown."""

    processor: Processor

    def shown(self, token: int) -> tuple[str, list[int] | None]:
        """A token as text and bytes; a part of a character is spelled byte by byte, a special token has no bytes."""
        data = self.processor.token_bytes.of(token)
        if not data:
            return self.processor.tokenizer.id_to_token(token) or "", None
        try:
            return data.decode(), list(data)
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data), list(data)

    def logprobs(self, token_ids: Sequence[int], steps: Sequence[StepLogprobs]) -> list[TokenLogprob]:
        """The entries of some steps; none if they weren't asked for."""
        if not steps:
            return []
        return [self._entry(token, step) for token, step in zip(token_ids, steps, strict=True)]

    def _entry(self, token: int, step: StepLogprobs) -> TokenLogprob:
        top = [
            TopLogprob(text, max(value, _LEAST_LOGPROB), data)
            for value, (text, data) in zip(step.logprobs, map(self.shown, step.token_ids), strict=True)
        ]
        text, data = self.shown(token)
        return TokenLogprob(text, max(step.chosen, _LEAST_LOGPROB), data, top)


@dataclass(slots=True)
class _Progress:
    """What one engine request has made so far."""

    detokenizer: Detokenizer
    texts: list[str] = field(default_factory=list)
    pcm: list[bytes] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    text_finish: Finish = "stop"
    audio_finish: Finish = "stop"
    usage: EngineUsage | None = None
    begun: bool = False

    @classmethod
    def of(cls, processor: Processor, request: Request) -> _Progress:
        """The beginning of `request`."""
        return cls(Detokenizer(processor.token_bytes, request.stop_ids))

    def take(self, event: Event) -> str:
        """Take note of an event; returns the text that it completes."""
        text = self.detokenizer.push(event.token_ids, event.shown_bytes)
        if event.finish_reason or event.done:
            text += self.detokenizer.finish()
        self.text_finish = _finish(event.finish_reason, self.text_finish)
        self.audio_finish = _finish(event.audio_finish_reason, self.audio_finish)
        self.usage = event.usage or self.usage
        return text

    @property
    def finish(self) -> Finish:
        """Why the whole ended: "length" if the text or the speech was cut."""
        return "length" if "length" in (self.text_finish, self.audio_finish) else "stop"

    @property
    def text(self) -> str:
        """All the text that was kept."""
        return "".join(self.texts)


def _finish(told: str | None, before: Finish) -> Finish:
    if told is None:
        return before
    return "length" if told == "length" else "stop"


def _usage(made: Sequence[_Progress], n: int) -> Usage:
    """The usage of some requests, `n` of which share a prompt."""
    found = [one.usage for one in made if one.usage is not None]
    prompts = found[::n]
    prompt = sum(one.prompt_tokens for one in prompts)
    text, frames = sum(one.completion_tokens for one in found), sum(one.audio_frames for one in found)
    return Usage(
        prompt,
        text + frames,
        prompt + text + frames,
        PromptDetails(sum(one.audio_tokens_in for one in prompts)),
        CompletionDetails(text, frames),
    )


class _Choices(Generic[F]):
    """What chat and completions have in common: choices, one for each engine request."""

    stream_type = EVENTS

    def __init__(self, processor: Processor, fields: F, requests: Sequence[Request], model: str) -> None:
        self.fields = fields
        self.model = model
        self.id = requests[0].id.rpartition("-")[0]
        self.created = int(time.time())
        self.tokens = _Tokens(processor)
        self.made = [_Progress.of(processor, request) for request in requests]

    def failure(self, error: RequestError) -> bytes:
        """The last event of a stream that fails."""
        return _failure_event(error)

    def add(self, place: int, event: Event) -> None:
        """Keep what an event brought."""
        one = self.made[place]
        one.texts.append(one.take(event))
        one.pcm.append(event.pcm)
        one.logprobs += self.tokens.logprobs(event.token_ids, event.logprobs)

    @property
    def usage(self) -> Usage:
        """The usage of all choices."""
        return _usage(self.made, self.fields.n)

    @property
    def usage_so_far(self) -> UnsetType | None:
        """What stands for the usage in a chunk that is not the last."""
        return None if self.fields.wants_usage else UNSET


class ChatReply(_Choices[openai.ChatFields]):
    """Answers of `/v1/chat/completions`."""

    def chunk(self, place: int, event: Event) -> bytes:
        """The chunks that an event makes: role, text, speech and end, each of its own."""
        one = self.made[place]
        text = one.take(event)
        logprobs = self.tokens.logprobs(event.token_ids, event.logprobs)
        found: list[bytes] = []
        if not one.begun:
            one.begun = True
            found.append(self._chunk(place, self._opening(place)))
        if text or logprobs:
            found.append(self._chunk(place, self._text_delta(text), Logprobs(logprobs) if logprobs else None))
        if event.pcm:
            found.append(self._chunk(place, Delta(audio=AudioDelta(data=_base64(event.pcm)))))
        if event.done:
            if self.fields.speaks:
                found.append(self._chunk(place, Delta(audio=self._audio_end(one))))
            found.append(self._chunk(place, Delta(), finish=one.finish))
        return b"".join(found)

    def end(self) -> bytes:
        """The usage, where it was asked for, and the end of the stream."""
        if not self.fields.wants_usage:
            return _DONE
        last = ChatChunk(self.id, "chat.completion.chunk", self.created, self.model, [], self.usage)
        return _event(last) + _DONE

    def whole(self) -> Response:
        """The object with all choices."""
        choices = [self._choice(place) for place in range(len(self.made))]
        answer = ChatCompletion(self.id, "chat.completion", self.created, self.model, choices, self.usage)
        return Response(msgspec.json.encode(answer), media_type=JSON)

    def _chunk(self, place: int, delta: Delta, logprobs: Logprobs | None = None, finish: Finish | None = None) -> bytes:
        choices = [ChunkChoice(place, delta, logprobs, finish)]
        return _event(ChatChunk(self.id, "chat.completion.chunk", self.created, self.model, choices, self.usage_so_far))

    def _opening(self, place: int) -> Delta:
        if self.fields.speaks:
            audio = AudioDelta(id=self._audio_id(place), transcript="")
            return Delta(role="assistant", refusal=None, audio=audio)
        return Delta(role="assistant", content="", refusal=None)

    def _text_delta(self, text: str) -> Delta:
        return Delta(audio=AudioDelta(transcript=text)) if self.fields.speaks else Delta(content=text)

    def _audio_end(self, one: _Progress) -> AudioDelta:
        return AudioDelta(
            expires_at=self.created, text_finish_reason=one.text_finish, audio_finish_reason=one.audio_finish
        )

    def _audio_id(self, place: int) -> str:
        return f"audio-{self.id.removeprefix('chatcmpl-')}-{place}"

    def _choice(self, place: int) -> ChatChoice:
        one = self.made[place]
        message = ChatMessage("assistant", one.text)
        if self.fields.speaks:
            message = ChatMessage("assistant", None, audio=self._audio(place))
        logprobs = Logprobs(one.logprobs) if self.fields.logprobs else None
        return ChatChoice(place, message, logprobs, one.finish)

    def _audio(self, place: int) -> Audio:
        one = self.made[place]
        kind = sound.PCM if self.fields.audio_format == "pcm16" else self.fields.audio_format
        data = _base64(sound.encoded(b"".join(one.pcm), kind))
        return Audio(self._audio_id(place), data, one.text, self.created, one.text_finish, one.audio_finish)


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


class CompletionReply(_Choices[openai.CompletionFields]):
    """Answers of `/v1/completions`: the choices of the first prompt, then those of the next one."""

    def __init__(
        self, processor: Processor, fields: openai.CompletionFields, requests: Sequence[Request], model: str
    ) -> None:
        super().__init__(processor, fields, requests, model)
        self.offsets = [_Offsets() for _ in requests]

    def chunk(self, place: int, event: Event) -> bytes:
        """The chunk that an event makes, if it shows anything."""
        one = self.made[place]
        text = one.take(event)
        logprobs = self.tokens.logprobs(event.token_ids, event.logprobs)
        if not (text or logprobs or event.done):
            return b""
        choice = TextChoice(place, text, self._logprobs(place, logprobs), one.finish if event.done else None)
        return _event(self._completion([choice], self.usage_so_far))

    def end(self) -> bytes:
        """The usage, where it was asked for, and the end of the stream."""
        return (_event(self._completion([], self.usage)) if self.fields.wants_usage else b"") + _DONE

    def whole(self) -> Response:
        """The object with all choices."""
        choices = [
            TextChoice(place, one.text, self._logprobs(place, one.logprobs), one.finish)
            for place, one in enumerate(self.made)
        ]
        return Response(msgspec.json.encode(self._completion(choices, self.usage)), media_type=JSON)

    def _completion(self, choices: list[TextChoice], usage: Usage | UnsetType | None) -> Completion:
        return Completion(self.id, "text_completion", self.created, self.model, choices, usage)

    def _logprobs(self, place: int, entries: Sequence[TokenLogprob]) -> TextLogprobs | None:
        if self.fields.logprobs is None:
            return None
        return TextLogprobs(
            [one.token for one in entries],
            [one.logprob for one in entries],
            [{top.token: top.logprob for top in one.top_logprobs} | {one.token: one.logprob} for one in entries],
            [self.offsets[place].next(bytes(one.bytes or ())) for one in entries],
        )


class _Offsets:
    """At which character of the text each token begins: a token inside a character begins where that character does."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._characters = 0

    def next(self, data: bytes) -> int:
        """The offset of the next token, which has these bytes."""
        offset = self._characters
        self._characters += len(self._decoder.decode(data))
        return offset


class SpeechReply:
    """Answers of `/v1/audio/speech`: an audio file, or one that grows as it is sent."""

    def __init__(self, fields: openai.SpeechFields) -> None:
        self.format = fields.response_format
        self.stream_type = sound.media_type(self.format)
        self.pcm: list[bytes] = []
        self.begun = False

    def chunk(self, place: int, event: Event) -> bytes:
        """The samples that an event brings, after the head of the file."""
        head = sound.wav_header() if self.format == sound.WAV and not self.begun else b""
        self.begun = True
        return head + event.pcm

    def end(self) -> bytes:
        """Nothing: the samples end where the body ends."""
        return b""

    def failure(self, error: RequestError) -> None:
        """Audio has no place for an error, so the body must break off."""

    def add(self, place: int, event: Event) -> None:
        """Keep what an event brought."""
        self.pcm.append(event.pcm)

    def whole(self) -> Response:
        """The file."""
        return Response(sound.encoded(b"".join(self.pcm), self.format), media_type=self.stream_type)


class TranscriptionReply:
    """Answers of `/v1/audio/transcriptions`."""

    stream_type = EVENTS

    def __init__(self, processor: Processor, fields: openai.TranscriptionFields, request: Request) -> None:
        self.fields = fields
        self.seconds = request.clips[0].seconds
        self.made = _Progress.of(processor, request)

    def chunk(self, place: int, event: Event) -> bytes:
        """The text that an event completes, and at the end all of it with the usage."""
        text = self.made.take(event)
        self.made.texts.append(text)
        found = _event(TranscriptDelta("transcript.text.delta", text)) if text else b""
        if event.done:
            usage = self._usage()
            found += _event(TranscriptDone("transcript.text.done", self.made.text, usage, self.made.finish))
        return found

    def end(self) -> bytes:
        """The end of the stream."""
        return _DONE

    def failure(self, error: RequestError) -> bytes:
        """The last event of a stream that fails."""
        return _failure_event(error)

    def add(self, place: int, event: Event) -> None:
        """Keep what an event brought."""
        self.made.texts.append(self.made.take(event))

    def whole(self) -> Response:
        """The text, bare or in an object."""
        text, finish = self.made.text, self.made.finish
        if self.fields.response_format == "text":
            return Response(text, media_type=PLAIN)
        if self.fields.response_format == "json":
            return Response(msgspec.json.encode(Transcription(text, self._usage(), finish)), media_type=JSON)
        language = openai.LANGUAGES[self.fields.language].lower() if self.fields.language else "unknown"
        usage = DurationUsage("duration", self.seconds)
        answer = VerboseTranscription("transcribe", language, self.seconds, text, usage, finish)
        return Response(msgspec.json.encode(answer), media_type=JSON)

    def _usage(self) -> TokenUsage:
        used = self.made.usage
        assert used is not None
        audio, total = used.audio_tokens_in, used.prompt_tokens + used.completion_tokens
        details = InputDetails(audio, used.prompt_tokens - audio)
        return TokenUsage("tokens", used.prompt_tokens, used.completion_tokens, total, details)
