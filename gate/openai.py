"""Everybody's door, POST /v1/chat/completions, streamed: how peers are asked, and our own server beside a peer.

A prompt of token ids goes to /v1/completions, the one route that takes it.

Token ids don't come through it: tokens are counted by the server's usage and compared as text. Sound comes in one of two
forms: OpenAI's `delta.audio.data` (raw 16-bit PCM) or vLLM-Omni's `modality: "audio"` with `delta.content`, each chunk a WAV
file of its own.
"""

from __future__ import annotations

import base64
import binascii
import io
import wave
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import soundfile

from gate.cell import SPEECH_TASKS, Cell
from gate.door import DoorError, Pcm, Reply, Stamped
from gate.generate import UNREADABLE, Count, speech_fields
from gate.record import EventStamp, Item

VOICE = "ethan"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


class _CompletionDetails(msgspec.Struct):
    text_tokens: Count | None = None
    audio_tokens: Count | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: Count = 0
    completion_tokens: Count | None = 0
    completion_tokens_details: _CompletionDetails | None = None


class _Audio(msgspec.Struct):
    data: str | None = None
    transcript: str | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    audio: _Audio | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)
    text: str | None = None  # of /v1/completions
    finish_reason: str | None = None


class _AudioMetadata(msgspec.Struct):
    sample_rate: Count | None = None


class _Fault(msgspec.Struct):
    message: str = ""
    type: str | None = None
    param: str | None = None
    code: str | int | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    modality: str | None = None
    audio_metadata: _AudioMetadata | None = None
    error: _Fault | None = None


class _Refusal(msgspec.Struct):
    error: _Fault | str | None = None
    message: str | None = None
    detail: msgspec.Raw | None = None


_DECODER = msgspec.json.Decoder(_Chunk)


@dataclass(frozen=True)
class OpenAiDoor:
    """POST /v1/chat/completions of the model with this name, or /v1/completions where that is the `path`.

    `ours` says that the server takes our `speech` extension.
    """

    model: str
    ours: bool = False
    path: str = CHAT
    accept: str = "text/event-stream"

    def body(self, cell: Cell, item: Item, root: Path) -> bytes:
        """The JSON body for one item in one cell; audio paths are relative to `root` unless absolute."""
        return msgspec.json.encode(self._completion(cell, item) if item.token_ids else self._chat(cell, item, root))

    def _completion(self, cell: Cell, item: Item) -> dict[str, object]:
        return {"prompt": item.token_ids, **self._shared(cell)}

    def _chat(self, cell: Cell, item: Item, root: Path) -> dict[str, object]:
        content: object = item.text or ""
        if item.audio is not None:
            sound = {"data": base64.b64encode(wav_bytes(root / item.audio)).decode("ascii"), "format": "wav"}
            content = [{"type": "input_audio", "input_audio": sound}, {"type": "text", "text": item.text or ""}]
        messages = [{"role": "user", "content": content}]
        body: dict[str, object] = {"messages": messages, "modalities": ["text"], **self._shared(cell)}
        if cell.task in SPEECH_TASKS:
            body |= {"modalities": ["text", "audio"], "audio": {"voice": VOICE, "format": "pcm16"}}
            body |= {"speech": speech_fields(cell)} if self.ours else {}
        return body

    def _shared(self, cell: Cell) -> dict[str, object]:
        """The fields that both routes take."""
        # Not max_completion_tokens: vLLM-Omni drops it without a word, and every server takes the older name.
        return {
            "model": self.model,
            "max_tokens": cell.max_tokens,
            "temperature": 0.0,
            "seed": 0,  # speech is sampled even where the text is greedy
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"ignore_eos": True} if cell.ignore_eos else {}),
        }

    def read(self, lines: Sequence[Stamped]) -> Reply:
        """Add up the server-sent events of a reply of status 200; what is wrong with the stream stands in `error`."""
        reply, pcm, done = Reply(), Pcm(), False
        try:
            for t_us, line in lines:
                data = _event_data(line)
                done = done or data == b"[DONE]"
                if data and not done:
                    _add(reply, _DECODER.decode(data), t_us, pcm)
        except UNREADABLE as error:
            reply.error = f"an event of the stream is not a chat completion chunk: {error}"
        except DoorError as error:
            reply.error = str(error)
        reply.pcm_samples, reply.pcm_sha256, reply.pcm = pcm.samples, pcm.digest(), bytes(pcm.data)
        reply.events = shared_out(reply.events, reply.completion_tokens)
        if reply.error is None and not done:
            reply.error = "the stream ended without [DONE]"
        elif reply.error is None and reply.text and not reply.completion_tokens:
            reply.error = "no usage came, though stream_options.include_usage asked for it: tokens can't be counted"
        return reply

    def refusal(self, body: bytes) -> str:
        """The sentence in the body of another status."""
        try:
            found = msgspec.json.decode(body, type=_Refusal)
        except UNREADABLE:
            return body[:200].decode("utf-8", errors="replace")
        if isinstance(found.error, _Fault):
            return _sentence(found.error)
        return found.error or found.message or body[:200].decode("utf-8", errors="replace")


def wav_bytes(path: Path) -> bytes:
    """A clip as a WAV file of 16 bits: the one container that every server reads."""
    samples, rate = soundfile.read(str(path), dtype="int16")
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format="WAV", subtype="PCM_16")
    return file.getvalue()


def _event_data(line: bytes) -> bytes:
    """The data of a server-sent event's line; empty for comments, blank lines and other fields."""
    field, _, data = line.strip().partition(b":")
    return data.strip() if field == b"data" else b""


def _sentence(fault: _Fault) -> str:
    name = fault.code if fault.code is not None else fault.type
    where = f" ({fault.param})" if fault.param else ""
    return f"{name if name is not None else 'error'}{where}: {fault.message}"


def _add(reply: Reply, chunk: _Chunk, t_us: int, pcm: Pcm) -> None:
    if chunk.error is not None:
        raise DoorError(_sentence(chunk.error))
    if chunk.usage is not None:
        _add_usage(reply, chunk.usage)
    for choice in chunk.choices:
        audio = choice.delta.audio or _Audio()
        spoken = chunk.modality == "audio"
        text = (choice.delta.content or choice.text or "" if not spoken else "") + (audio.transcript or "")
        samples = pcm.push(_sound(reply, chunk, choice.delta.content if spoken else audio.data))
        if text or samples:
            reply.events.append(EventStamp(t_us, 0, len(text), samples))
        reply.text += text
        reply.finish_reason = choice.finish_reason or reply.finish_reason


def _sound(reply: Reply, chunk: _Chunk, data: str | None) -> bytes:
    """The PCM of one chunk, without the header where the chunk is a WAV file; notes the sample rate where it is stated."""
    if not data:
        return b""
    try:
        sound = base64.b64decode(data, validate=True)
    except binascii.Error as error:
        raise DoorError(f"a chunk of sound is not base64: {error}") from error
    if chunk.audio_metadata is not None and chunk.audio_metadata.sample_rate:
        reply.sample_rate = chunk.audio_metadata.sample_rate
    if not sound.startswith(b"RIFF"):
        return sound
    try:
        with wave.open(io.BytesIO(sound)) as file:
            if (file.getsampwidth(), file.getnchannels()) != (2, 1):
                raise DoorError(
                    f"sound of {8 * file.getsampwidth()} bits, {file.getnchannels()} channels; 16, 1 wanted"
                )
            if not file.getframerate():
                raise DoorError("sound of 0 samples a second")
            reply.sample_rate = file.getframerate()
            return bytes(file.readframes(file.getnframes()))
    except (wave.Error, EOFError) as error:
        raise DoorError(f"a chunk of sound is no WAV file: {error}") from error


def _add_usage(reply: Reply, usage: _Usage) -> None:
    """Usage may come with any chunk, and vLLM-Omni's chunks of sound say 0: the largest count is the reply's."""
    details = usage.completion_tokens_details or _CompletionDetails()
    total = usage.completion_tokens or 0
    text = details.text_tokens if details.text_tokens is not None else total - (details.audio_tokens or 0)
    reply.completion_tokens = max(reply.completion_tokens, text)
    reply.prompt_tokens = max(reply.prompt_tokens, usage.prompt_tokens)


def shared_out(events: Sequence[EventStamp], tokens: int) -> list[EventStamp]:
    """Events with the reply's token count shared out evenly over those that bring text, the earlier ones first.

    The door doesn't say which tokens an event brings; so `tokens per chunk` is right, and first text stands for first token.
    """
    texts = sum(event.chars > 0 for event in events)
    each, more = divmod(tokens, texts) if texts else (0, 0)
    found: list[EventStamp] = []
    place = 0
    for event in events:
        share = each + (place < more) if event.chars else 0
        place += event.chars > 0
        found.append(EventStamp(event.t_us, share, event.chars, event.pcm_samples))
    return found
