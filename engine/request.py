"""What is asked of the engine and what it answers: Request in, Event out. Values only; msgspec sends them between processes."""

from __future__ import annotations

import msgspec


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How the tokens of one component are chosen. Temperature 0 is greedy.

    `top_k` 0, `top_p` 1.0 and `min_p` 0.0 are off. `repetition_penalty` 1.0 is off and looks at generated tokens only for the
    Talker, at prompt and generated tokens for the Thinker. `frequency_penalty` (times a token was generated) and
    `presence_penalty` (whether it was) are subtracted from logits, `logit_bias` is added by token id. Random numbers are keyed
    by (`seed`, step, codebook).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int = 0


class Speech(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of the Talker: `max_frames` frames of 80 ms at the most, in the voice named."""

    voice: str
    max_frames: int
    sampling: Sampling
    ignore_eos: bool = False
    codes: bool = False


class Clip(msgspec.Struct, frozen=True, kw_only=True):
    """One audio input: log-mel values as little-endian float32 of shape [mel_bins, frames], and the tokens it takes."""

    mel: bytes
    mel_bins: int
    frames: int
    tokens: int
    seconds: float


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One request as the engine sees it: token ids, media arrays and limits, all validated by the front.

    `stop` are strings and `stop_ids` tokens that end the text, neither with speech. `logprobs` is how many of the likeliest
    tokens to report for each step beside the one chosen; None reports nothing.
    """

    id: str
    prompt_ids: list[int]
    max_tokens: int
    sampling: Sampling = Sampling()
    clips: list[Clip] = []
    speech: Speech | None = None
    emit_text: bool = True
    ignore_eos: bool = False
    stop: list[str] = []
    stop_ids: list[int] = []
    logprobs: int | None = None
    trace: bool = False


class StepLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural log-probabilities of one step, before any sampling: of the token chosen, and of the likeliest, best first."""

    chosen: float
    token_ids: list[int]
    logprobs: list[float]


class StepTrace(msgspec.Struct, frozen=True, array_like=True):
    """Where one token was made: the step's number in its lane, its bucket (padded rows) and its real rows."""

    step: int
    bucket: int
    rows: int


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """What a request consumed and produced, in tokens, frames, samples and seconds."""

    prompt_tokens: int
    completion_tokens: int
    audio_tokens_in: int
    audio_seconds_in: float
    audio_frames: int
    audio_samples: int


class Event(msgspec.Struct, kw_only=True):
    """What one engine step made for one request. `done` closes the request; `error` closes it too.

    With stop strings, `shown_bytes` counts the bytes of all text so far that may be shown: the rest may belong to a stop
    string, or come after one. None shows everything.
    """

    request_id: str
    token_ids: list[int] = []
    logprobs: list[StepLogprobs] = []
    trace: list[StepTrace] = []
    shown_bytes: int | None = None
    pcm: bytes = b""
    frames: int = 0
    codes: list[list[int]] = []
    finish_reason: str | None = None
    audio_finish_reason: str | None = None
    usage: Usage | None = None
    error: str | None = None
    done: bool = False
