"""The objects of OpenAI's answers, field by field. Values only; a field that is UNSET is left out of the JSON."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

Finish = Literal["stop", "length"]


class ErrorDetail(msgspec.Struct):
    """What went wrong, and which parameter is at fault."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    """Every refusal and failure."""

    error: ErrorDetail


class TopLogprob(msgspec.Struct):
    """A token with its natural log-probability; `bytes` is null for a token that stands for no text."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(msgspec.Struct):
    """The token that was chosen, and the likeliest ones at its place, best first."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class Logprobs(msgspec.Struct):
    """One entry a token that was generated."""

    content: list[TokenLogprob]
    refusal: None = None


class PromptDetails(msgspec.Struct):
    """Of the prompt's tokens: those of audio, and those found in a cache."""

    audio_tokens: int
    cached_tokens: int = 0


class CompletionDetails(msgspec.Struct):
    """Of the completion's tokens: those of text, and frames of speech of 80 ms."""

    text_tokens: int
    audio_tokens: int
    reasoning_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class Usage(msgspec.Struct):
    """What a request took and made; a prompt counts once, however many choices it got."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class Audio(msgspec.Struct):
    """Speech of a message; `data` is base64. Which of text and speech was cut is told apart here."""

    id: str
    data: str
    transcript: str
    expires_at: int
    text_finish_reason: Finish
    audio_finish_reason: Finish


class ChatMessage(msgspec.Struct):
    """The answer; with speech its text is the transcript of `audio`."""

    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    audio: Audio | None = None


class ChatChoice(msgspec.Struct):
    """One of `n` answers."""

    index: int
    message: ChatMessage
    logprobs: Logprobs | None
    finish_reason: Finish


class ChatCompletion(msgspec.Struct):
    """A whole chat answer."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class AudioDelta(msgspec.Struct, omit_defaults=True):
    """A piece of speech: its id first, then transcript and data (base64 of bare samples), at last what Audio holds beside."""

    id: str | UnsetType = UNSET
    transcript: str | UnsetType = UNSET
    data: str | UnsetType = UNSET
    expires_at: int | UnsetType = UNSET
    text_finish_reason: Finish | UnsetType = UNSET
    audio_finish_reason: Finish | UnsetType = UNSET


class Delta(msgspec.Struct, omit_defaults=True):
    """A piece of a message; the first one of a choice names the role."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    refusal: UnsetType | None = UNSET
    audio: AudioDelta | UnsetType = UNSET


class ChunkChoice(msgspec.Struct):
    """A piece of one choice."""

    index: int
    delta: Delta
    logprobs: Logprobs | None = None
    finish_reason: Finish | None = None


class ChatChunk(msgspec.Struct):
    """A piece of a streamed chat answer; `usage` only where it was asked for, and null before the last one."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET


class TextLogprobs(msgspec.Struct):
    """Log-probabilities in the form of completions: lists with one entry a token. Offsets count characters of the text."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TextChoice(msgspec.Struct):
    """One text, or in a stream a piece of it."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Finish | None


class Completion(msgspec.Struct):
    """Texts that go on from prompts: all of it, or in a stream a piece."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage | UnsetType | None = UNSET


class InputDetails(msgspec.Struct):
    """Of a transcription's input: tokens of audio and of text."""

    audio_tokens: int
    text_tokens: int


class TokenUsage(msgspec.Struct):
    """What a transcription took and made."""

    type: Literal["tokens"]
    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_token_details: InputDetails


class DurationUsage(msgspec.Struct):
    """How much audio a transcription heard."""

    type: Literal["duration"]
    seconds: float


class Transcription(msgspec.Struct):
    """What was heard; `finish_reason` "length" says that the text was cut."""

    text: str
    usage: TokenUsage
    finish_reason: Finish


class VerboseTranscription(msgspec.Struct):
    """The same with the length of the audio in seconds. The language is the one that was named, if one was."""

    task: Literal["transcribe"]
    language: str
    duration: float
    text: str
    usage: DurationUsage
    finish_reason: Finish


class TranscriptDelta(msgspec.Struct):
    """A piece of a streamed transcription."""

    type: Literal["transcript.text.delta"]
    delta: str


class TranscriptDone(msgspec.Struct):
    """The end of a streamed transcription."""

    type: Literal["transcript.text.done"]
    text: str
    usage: TokenUsage
    finish_reason: Finish


class Model(msgspec.Struct):
    """A model that is served; `max_model_len` counts tokens of prompt and answer together."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(msgspec.Struct):
    """The models that are served: one."""

    object: Literal["list"]
    data: list[Model]
