"""What the OpenAI routes accept: the fields of each body, and how they must go together. No torch.

The names are OpenAI's, plus extensions that vLLM has too (top_k, min_p, repetition_penalty, stop_token_ids, ignore_eos) and
`speech`. Not here: what becomes of the fields (openai_work.py), and the answers (openai_reply.py).
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from engine.errors import RequestError
from engine.server.fields import (
    MEDIA_LATER,
    MOST_STOPS,
    NOT_SERVED,
    Bias,
    Count,
    CountPenalty,
    Fields,
    MinP,
    Penalty,
    Seed,
    StopString,
    Temperature,
    TokenId,
    TopK,
    TopP,
    Unserved,
    Voice,
)
from engine.server.protocol import MOST_BIASED, MOST_STOP_IDS, TokenKey

MOST_CHOICES = 128
TEXT, AUDIO, USER = "text", "audio", "user"
DEFAULT_VOICE = "ethan"
# What a transcription can be told about its language, by ISO 639-1 code (639-3 for Cantonese).
# fmt: off
LANGUAGES = {
    "ar": "Arabic", "de": "German", "en": "English", "es": "Spanish", "fr": "French", "id": "Indonesian", "it": "Italian",
    "ja": "Japanese", "ko": "Korean", "ms": "Malay", "nl": "Dutch", "pt": "Portuguese", "ru": "Russian", "th": "Thai",
    "tr": "Turkish", "ur": "Urdu", "vi": "Vietnamese", "yue": "Cantonese", "zh": "Chinese",
}
# fmt: on

# OpenAI takes seeds of 64 bits with a sign; -1 is vLLM's way to say that top_k is off, as 0 is.
AnySeed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
AnyTopK = Annotated[int, Field(ge=-1, lt=2**31)]
Choices = Annotated[int, Field(ge=1, le=16)]


Modality = Literal["text", "audio"]


def _text_only() -> list[Modality]:
    return ["text"]


def _language(value: str) -> str:
    if value not in LANGUAGES:
        raise ValueError(f"must be one of {', '.join(LANGUAGES)}")
    return value


def _one_or_many(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _parts(value: object) -> object:
    return [{"type": TEXT, "text": value}] if isinstance(value, str) else value


def _no_image(value: object) -> object:
    if isinstance(value, str) and any(word in value for word in ("image", "video")):
        raise PydanticCustomError(NOT_SERVED, MEDIA_LATER)
    return value


def _prompts(value: object) -> object:
    """Prompts as a list, each a string or token ids."""
    if isinstance(value, str) or _are_ids(value):
        return [value]
    if isinstance(value, list) and value and all(isinstance(one, str) or _are_ids(one) for one in value):
        return value
    raise ValueError("must be a string, a list of strings, a list of token ids, or a list of such lists; none empty")


def _are_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(one) is int for one in value)


Stops = Annotated[
    list[StopString],
    BeforeValidator(_one_or_many, json_schema_input_type=str | list[str]),
    Field(max_length=MOST_STOPS),
]
StopIds = Annotated[list[TokenId], Field(max_length=MOST_STOP_IDS)]


class InputAudio(Fields):
    """Audio as base64. What the data is, is seen in the data; `format` is taken as OpenAI has it."""

    data: str
    format: Literal["wav", "mp3", "flac", "ogg", "opus", "aiff", "au", "caf"] | None = None


class AudioUrl(Fields):
    """Audio as a `data:` URL."""

    url: str


class Part(Fields):
    """One part of a message: the field that has the name of its type."""

    type: Annotated[Literal["text", "input_audio", "audio_url"], BeforeValidator(_no_image)]
    text: str | None = None
    input_audio: InputAudio | None = None
    audio_url: AudioUrl | None = None

    @model_validator(mode="after")
    def _holds_its_type(self) -> Part:
        given = self.model_fields_set - {"type"}
        if given != {self.type}:
            raise ValueError(f"a part of type {self.type!r} has the field `{self.type}` and no other")
        return self


Content = Annotated[list[Part], BeforeValidator(_parts, json_schema_input_type=str | list[Part]), Field(min_length=1)]


class EarlierAudio(Fields):
    """Speech of an earlier answer. No server keeps it, so its transcript is what counts; the rest may come along."""

    model_config = ConfigDict(extra="ignore")
    transcript: str | None = None


class Message(Fields):
    """One message of a conversation; `developer` is another word for `system`."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Content | None = None
    audio: EarlierAudio | None = None
    name: str | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Message:
        if self.audio is not None and self.role != "assistant":
            raise ValueError("`audio` belongs to assistant messages; send audio as a part of type input_audio")
        if self.content is None and (self.audio is None or self.audio.transcript is None):
            raise ValueError("`content` is missing" + (_KEPT if self.audio else ""))
        if self.role != USER and any(part.type != TEXT for part in self.content or ()):
            raise ValueError(f"only user messages may hold audio, not {self.role} messages")
        return self


_KEPT = "; this server keeps no audio, so send the transcript of an earlier answer (as content, or as audio.transcript)"


class AudioOut(Fields):
    """How speech is sent. The default format is wav, and pcm16 in a stream."""

    voice: Voice = DEFAULT_VOICE
    format: Literal["wav", "mp3", "flac", "opus", "pcm16"] | None = None


class TalkerFields(Fields):
    """The extension `speech`: how the Talker speaks. `max_frames` counts frames of 80 ms.

    How many, and what draws their codes, is the checkpoint's own where it isn't given.
    """

    max_frames: Count | None = None
    temperature: Temperature | None = None
    top_k: TopK | None = None
    top_p: TopP | None = None
    repetition_penalty: Penalty | None = None
    seed: Seed | None = None
    ignore_eos: bool = False


class StreamOptions(Fields):
    """Whether a stream ends with a chunk that holds the usage."""

    include_usage: bool = False


class ModelFields(Fields):
    """What every body has: the model that is asked for."""

    model: str

    def check(self) -> None:
        """Hold the fields against each other; RequestError names the one at fault."""


class TextFields(ModelFields):
    """What chat and completions have in common. What isn't given is the checkpoint's, or OpenAI's, default."""

    max_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: AnyTopK | None = None
    min_p: MinP | None = None
    repetition_penalty: Penalty | None = None
    frequency_penalty: CountPenalty = 0.0
    presence_penalty: CountPenalty = 0.0
    logit_bias: dict[TokenKey, Bias] = Field(default_factory=dict, max_length=MOST_BIASED)
    seed: AnySeed | None = None
    stop: Stops = Field(default_factory=list)
    stop_token_ids: StopIds = Field(default_factory=list)
    ignore_eos: bool = False
    n: Choices = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None

    def check(self) -> None:
        """Hold the fields against each other; RequestError names the one at fault."""
        if self.stream_options is not None and not self.stream:
            raise _conflict("stream_options", "`stream_options` needs stream: true")

    @property
    def wants_usage(self) -> bool:
        """Whether a stream tells its usage."""
        return self.stream_options is not None and self.stream_options.include_usage


class ChatFields(TextFields):
    """The body of `/v1/chat/completions`."""

    unserved: ClassVar[Unserved] = {
        "tools": ("tools are", ([],)),
        "tool_choice": ("tools are", ("none", "auto")),
        "parallel_tool_calls": ("tools are", (True, False)),
        "functions": ("functions are", ([],)),
        "function_call": ("functions are", ("none", "auto")),
        "response_format": ("a format other than text is", ({"type": "text"},)),
        "store": ("keeping answers is", (False,)),
        "service_tier": ("a service tier is", ("auto", "default")),
        "reasoning_effort": ("reasoning is", ("none",)),
        "prediction": ("predicted output is", ()),
        "web_search_options": ("web search is", ()),
    }
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: Count | None = None
    modalities: list[Modality] = Field(default_factory=_text_only, min_length=1)
    audio: AudioOut | None = None
    speech: TalkerFields | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0
    metadata: dict[str, str] = Field(default_factory=dict)
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def speaks(self) -> bool:
        """Whether speech is asked for. It comes with its transcript, so "audio" alone is the same as both."""
        return AUDIO in self.modalities

    @property
    def audio_format(self) -> str:
        """The format of the speech: as asked for, or the default."""
        asked = self.audio.format if self.audio is not None else None
        return asked or ("pcm16" if self.stream else "wav")

    @property
    def length_field(self) -> str:
        """The name that the client gave to the limit of tokens."""
        return "max_tokens" if self.max_tokens is not None else "max_completion_tokens"

    def check(self) -> None:
        """Hold the fields against each other; RequestError names the one at fault."""
        TextFields.check(self)
        both = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(both) > 1:
            message = (
                f"max_tokens is {self.max_tokens} and max_completion_tokens {self.max_completion_tokens}; give one"
            )
            raise _conflict("max_tokens", message)
        if self.top_logprobs and not self.logprobs:
            raise _conflict("top_logprobs", "`top_logprobs` needs logprobs: true")
        if len(set(self.modalities)) != len(self.modalities):
            raise RequestError("modalities names a kind twice", field="modalities")
        if self.speaks:
            self._check_speech()
            return
        for name in ("audio", "speech"):
            if getattr(self, name) is not None:
                raise _conflict(name, f'`{name}` needs "audio" in modalities')

    def _check_speech(self) -> None:
        for name in ("stop", "stop_token_ids"):
            if getattr(self, name):
                raise _conflict(name, f"`{name}` can't go with speech: what was spoken can't be taken back")
        if self.stream and self.audio_format != "pcm16":
            message = f"audio.format is {self.audio_format!r}; a stream takes 'pcm16' only"
            raise _conflict("audio.format", message)
        if not any(message.role == USER for message in self.messages):
            raise RequestError("speech answers a user; add a message of role user", field="messages", code="no_user")


class CompletionFields(TextFields):
    """The body of `/v1/completions`."""

    unserved: ClassVar[Unserved] = {
        "echo": ("echoing the prompt is", (False,)),
        "suffix": ("inserting before a suffix is", ("",)),
        "best_of": ("choosing the best of several is", (1,)),
    }
    prompt: Annotated[
        list[str | list[int]],
        BeforeValidator(_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
    ]
    max_tokens: Count = 16
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None

    def check(self) -> None:
        """Hold the fields against each other; RequestError names the one at fault."""
        TextFields.check(self)
        if len(self.prompt) * self.n > MOST_CHOICES:
            message = f"{len(self.prompt)} prompts with n {self.n} make {len(self.prompt) * self.n} choices"
            raise RequestError(f"{message}; one request may ask for {MOST_CHOICES}", field="prompt", code="too_many")


class SpeechFields(ModelFields):
    """The body of `/v1/audio/speech`."""

    unserved: ClassVar[Unserved] = {
        "speed": ("another speed than 1 is", (1, 1.0)),
        "instructions": ("instructions are", ("",)),
        "stream_format": ("a stream of events is", ("audio",)),
    }
    input: Annotated[str, Field(min_length=1)]
    voice: Voice = DEFAULT_VOICE
    response_format: Literal["mp3", "opus", "flac", "wav", "pcm"] = "mp3"
    speech: TalkerFields | None = None


class TranscriptionFields(ModelFields):
    """The fields of the form of `/v1/audio/transcriptions`, beside its file."""

    unserved: ClassVar[Unserved] = {
        "timestamp_granularities[]": ("timestamps are", ()),
        "include[]": ("log-probabilities are", ()),
        "chunking_strategy": ("cutting audio is", ("auto",)),
    }
    language: Annotated[str, AfterValidator(_language)] | None = None
    prompt: str = ""
    response_format: Literal["json", "text", "verbose_json"] = "json"
    temperature: Temperature = 0.0
    stream: bool = False

    def check(self) -> None:
        """Hold the fields against each other; RequestError names the one at fault."""
        if self.stream and self.response_format != "json":
            raise _conflict("response_format", f"a stream has the format json, not {self.response_format}")


def _conflict(name: str, message: str) -> RequestError:
    return RequestError(message, field=name, code="conflict")
