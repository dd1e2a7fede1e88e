"""What `/generate` accepts: the fields of its body, and how they must go together. No torch.

Not here: checks that every body shares (fields.py), audio and token ids (engine/model/processor.py), the answer (reply.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, ValidationError
from pydantic_core import ErrorDetails
from python_multipart.multipart import parse_options_header

from engine.errors import RequestError
from engine.server.fields import (
    MOST_STOPS,
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
    Voice,
    check_marks,
    from_base64,
    refusal,
    shown,
    unknown_code,
    unknown_field,
)
from engine.server.form import Part, parse_form

MOST_STOP_IDS, MOST_BIASED, MOST_LOGPROBS = 256, 1024, 20

# The keys of JSON are strings; with one spelling for each id no two of them mean the same.
TokenKey = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,9})$")]
Output = Literal["text", "audio"]


def _text_only() -> list[Output]:
    return ["text"]


def _one_or_many(value: object) -> object:
    return [value] if isinstance(value, str) else value


class SpeechFields(Fields):
    """The `speech` object: how the Talker speaks. `max_frames` counts frames of 80 ms.

    How many, and what draws their codes, is the checkpoint's own where it isn't given.
    """

    voice: Voice = "ethan"
    max_frames: Count | None = None
    temperature: Temperature | None = None
    top_k: TopK | None = None
    top_p: TopP | None = None
    repetition_penalty: Penalty | None = None
    seed: Seed = 0
    ignore_eos: bool = False
    codes: bool = False


class GenerateFields(Fields):
    """The body of `/generate`. Exactly one of `text` and `prompt_token_ids` is given."""

    text: str | None = None
    prompt_token_ids: list[TokenId] | None = None
    system: str | None = None
    audio: Annotated[list[str], BeforeValidator(_one_or_many)] = Field(default_factory=list)
    output: list[Output] = Field(default_factory=_text_only, min_length=1)
    stream: bool = False
    max_tokens: Count = 256
    temperature: Temperature = 0.0
    top_k: TopK = 0
    top_p: TopP = 1.0
    min_p: MinP = 0.0
    repetition_penalty: Penalty = 1.0
    frequency_penalty: CountPenalty = 0.0
    presence_penalty: CountPenalty = 0.0
    logit_bias: dict[TokenKey, Bias] = Field(default_factory=dict, min_length=1, max_length=MOST_BIASED)
    seed: Seed = 0
    ignore_eos: bool = False
    stop: Annotated[list[StopString], BeforeValidator(_one_or_many)] = Field(
        default_factory=list, min_length=1, max_length=MOST_STOPS
    )
    stop_token_ids: list[TokenId] = Field(default_factory=list, min_length=1, max_length=MOST_STOP_IDS)
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] = 0
    trace: bool = False
    speech: SpeechFields | None = None


@dataclass(frozen=True, slots=True)
class Body:
    """A checked body: its fields, and the bytes of each audio file in order."""

    fields: GenerateFields
    audio: tuple[bytes, ...]


def parse(content_type: str, data: bytes, most: int) -> Body:
    """Read a body of JSON or multipart/form-data; RequestError names the field and the fix.

    `most` are the brackets, colons and commas that its JSON may hold.
    """
    kind, options = parse_options_header(content_type)
    if kind == b"application/json":
        fields = parse_fields(data, most)
        return Body(fields, _from_base64(fields.audio))
    if kind == b"multipart/form-data":
        return _parse_multipart(parse_form(options.get(b"boundary", b""), data), most)
    found = repr(shown(content_type)) if content_type else "missing"
    raise RequestError(
        f"Content-Type is {found}; send application/json, or multipart/form-data with `request` and `audio` parts",
        code="unsupported_media_type",
        status=415,
    )


def parse_fields(data: bytes, most: int) -> GenerateFields:
    """Check the JSON text of a body of `most` brackets, colons and commas, values against each other included."""
    check_marks(data, most)
    try:
        fields = GenerateFields.model_validate_json(data)
    except ValidationError as error:
        raise _refusal(error.errors(include_url=False, include_context=False)) from None
    _check_together(fields)
    return fields


def _check_together(fields: GenerateFields) -> None:
    given = fields.model_fields_set
    if fields.text is None and fields.prompt_token_ids is None:
        raise RequestError("give `text` or `prompt_token_ids`", field="text", code="missing")
    for name in ("text", "prompt_token_ids", "system", "speech"):
        if name in given and getattr(fields, name) is None:
            raise RequestError(f"{name} is null; leave it out instead", field=name)
    if fields.speech is not None:
        for name in sorted(fields.speech.model_fields_set):
            if getattr(fields.speech, name) is None:
                raise RequestError(f"speech.{name} is null; leave it out instead", field=f"speech.{name}")
    if fields.text is not None and fields.prompt_token_ids is not None:
        raise RequestError("give `text` or `prompt_token_ids`, not both", field="prompt_token_ids", code="conflict")
    if fields.system is not None and fields.text is None:
        raise RequestError("`system` goes with `text`; put it into prompt_token_ids", field="system", code="conflict")
    if len(set(fields.output)) != len(fields.output):
        raise RequestError("output names a kind twice", field="output")
    if fields.speech is not None and "audio" not in fields.output:
        raise RequestError('`speech` needs "audio" in output', field="speech", code="conflict")
    for name in ("stop", "stop_token_ids"):
        if getattr(fields, name) and "audio" in fields.output:
            message = f'`{name}` can\'t cut what is spoken already; leave "audio" out of output'
            raise RequestError(message, field=name, code="conflict")
    for name in ("top_logprobs", "trace"):
        if getattr(fields, name) and "text" not in fields.output:
            raise RequestError(f'`{name}` comes with text; add "text" to output', field=name, code="conflict")


def _refusal(errors: Sequence[ErrorDetails]) -> RequestError:
    first = errors[0]
    if first["type"] == "json_invalid":
        return RequestError(f"the body is not JSON: {first['msg'].removeprefix('Invalid JSON: ')}", code="invalid_json")
    for error in errors:
        error["loc"] = tuple(part for part in error["loc"] if part != "[key]")
    found = refusal(errors, GenerateFields)
    # Below `speech` lie fields, which a client may want to know; below others places and keys of its own.
    names = [shown(str(part)) for part in first["loc"]]
    found.field = ".".join(names if names[:1] == ["speech"] else names[:1]) or None
    return found


def _from_base64(texts: Sequence[str]) -> tuple[bytes, ...]:
    try:
        return tuple(from_base64(text, f"audio[{place}]") for place, text in enumerate(texts))
    except RequestError as error:
        error.field = "audio"
        raise


def _parse_multipart(parts: Sequence[Part], most: int) -> Body:
    for part in parts:
        _check_part(part)
    requests = [part.data for part in parts if part.name == "request"]
    if len(requests) != 1:
        message = f"send one part `request` with the JSON fields, not {len(requests)}"
        raise RequestError(message, field="request", code="missing" if not requests else "conflict")
    fields = parse_fields(requests[0], most)
    files = tuple(part.data for part in parts if part.name == "audio")
    if fields.audio and files:
        raise RequestError("audio comes both as base64 and as files; send it one way", field="audio", code="conflict")
    return Body(fields, files or _from_base64(fields.audio))


def _check_part(part: Part) -> None:
    if part.name == "audio" and not part.is_file:
        raise RequestError("the part `audio` must be a file (with a file name)", field="audio")
    if part.name not in ("request", "audio"):
        message = unknown_field(part.name, ("request", "audio"))
        raise RequestError(message, field=shown(part.name) or None, code=unknown_code(part.name))
