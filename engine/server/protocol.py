"""What `/generate` accepts: the body's fields, and the errors that name them. No torch.

Unknown fields, wrong types and values that can't be used are refused, never ignored. Not here: audio and token ids
(engine/model/processor.py), the lines of a reply (engine/server/reply.py).
"""

from __future__ import annotations

import binascii
import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import Field as FormField
from python_multipart.multipart import File as FormFile
from python_multipart.multipart import FormParser, parse_options_header

from engine.errors import RequestError

_LATER = frozenset({"image", "images", "video", "videos", "image_url", "video_url"})
_MOST_ERRORS = 5

Temperature = Annotated[float, Field(ge=0.0, le=100.0)]
TopK = Annotated[int, Field(ge=0, lt=2**31)]
TopP = Annotated[float, Field(gt=0.0, le=1.0)]
Penalty = Annotated[float, Field(gt=0.0, le=100.0)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Output = Literal["text", "audio"]


def _text_only() -> list[Output]:
    return ["text"]


def _one_or_many(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _is_no_bool(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("must be 0 or 2, not true or false")
    return value


class _Fields(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class SpeechFields(_Fields):
    """The `speech` object: how the Talker speaks. `max_frames` counts frames of 80 ms."""

    voice: str = "ethan"
    max_frames: Count = 4096
    temperature: Temperature = 0.9
    top_k: TopK = 50
    top_p: TopP = 1.0
    repetition_penalty: Penalty = 1.05
    seed: Seed = 0
    ignore_eos: bool = False
    codes: bool = False


class GenerateFields(_Fields):
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
    repetition_penalty: Penalty = 1.0
    seed: Seed = 0
    ignore_eos: bool = False
    top_logprobs: Annotated[Literal[0, 2], BeforeValidator(_is_no_bool)] = 0
    trace: bool = False
    speech: SpeechFields | None = None


@dataclass(frozen=True, slots=True)
class Body:
    """A checked body: its fields, and the bytes of each audio file in order."""

    fields: GenerateFields
    audio: tuple[bytes, ...]


def parse(content_type: str, data: bytes) -> Body:
    """Read a body of JSON or multipart/form-data; RequestError names the field and the fix."""
    kind, options = parse_options_header(content_type)
    if kind == b"application/json":
        fields = parse_fields(data)
        return Body(fields, tuple(_from_base64(text, place) for place, text in enumerate(fields.audio)))
    if kind == b"multipart/form-data":
        return _parse_multipart(options.get(b"boundary", b""), data)
    found = repr(content_type) if content_type else "missing"
    raise RequestError(
        f"Content-Type is {found}; send application/json, or multipart/form-data with `request` and `audio` parts",
        code="unsupported_media_type",
        status=415,
    )


def parse_fields(data: bytes) -> GenerateFields:
    """Check the JSON text of a body, values against each other included."""
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
    if fields.text is not None and fields.prompt_token_ids is not None:
        raise RequestError("give `text` or `prompt_token_ids`, not both", field="prompt_token_ids", code="conflict")
    if fields.system is not None and fields.text is None:
        raise RequestError("`system` goes with `text`; put it into prompt_token_ids", field="system", code="conflict")
    if len(set(fields.output)) != len(fields.output):
        raise RequestError(f"output names a kind twice: {fields.output}", field="output")
    if fields.speech is not None and "audio" not in fields.output:
        raise RequestError('`speech` needs "audio" in output', field="speech", code="conflict")
    for name in ("top_logprobs", "trace"):
        if getattr(fields, name) and "text" not in fields.output:
            raise RequestError(f'`{name}` comes with text; add "text" to output', field=name, code="conflict")


def _refusal(errors: Sequence[ErrorDetails]) -> RequestError:
    shown = [_sentence(error) for error in errors[:_MOST_ERRORS]]
    if len(errors) > _MOST_ERRORS:
        shown.append(f"and {len(errors) - _MOST_ERRORS} more")
    first = errors[0]
    if first["type"] == "json_invalid":
        return RequestError(f"the body is not JSON: {first['msg'].removeprefix('Invalid JSON: ')}", code="invalid_json")
    return RequestError("; ".join(shown), field=_field(first), code=_code(first))


def _field(error: ErrorDetails) -> str | None:
    return ".".join(part for part in error["loc"] if isinstance(part, str)) or None


def _code(error: ErrorDetails) -> str:
    return "unknown_field" if error["type"] == "extra_forbidden" else "invalid_value"


def _sentence(error: ErrorDetails) -> str:
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error["loc"]).lstrip(".")
    if error["type"] == "extra_forbidden":
        return _unknown(place)
    got = error["input"]
    shown = "" if isinstance(got, dict | list) or len(repr(got)) > 60 else f", got {got!r}"
    message = error["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    lead = "must be " if message != error["msg"] and error["type"] != "value_error" else ""
    return f"{place or 'the body'}: {lead}{message}{shown}"


def _unknown(place: str) -> str:
    parent, _, name = place.rpartition(".")
    if name in _LATER:
        return f"{place}: image and video input is not served yet; this server takes text and audio"
    known = SpeechFields.model_fields if parent == "speech" else GenerateFields.model_fields
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(known)}"
    return f"{place}: no such field; {hint}"


def _from_base64(text: str, place: int) -> bytes:
    try:
        # Line breaks are what command line tools put in; anything else outside the alphabet is an error.
        return binascii.a2b_base64("".join(text.split()).encode("ascii"), strict_mode=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        hint = "; send the bare base64, without `data:…,`" if text.startswith("data:") else ""
        raise RequestError(
            f"audio[{place}] is not base64 ({error}){hint}", field="audio", code="invalid_base64"
        ) from None


@dataclass(slots=True)
class _Form:
    """The parts of a multipart body, in order."""

    requests: list[bytes]
    files: list[bytes]

    def add_field(self, part: FormField) -> None:
        name = (part.field_name or b"").decode("utf-8", errors="replace")
        if name == "request":
            self.requests.append(part.value or b"")
        else:
            raise _bad_part(name, is_file=False)

    def add_file(self, part: FormFile) -> None:
        name = (part.field_name or b"").decode("utf-8", errors="replace")
        part.file_object.seek(0)
        data = part.file_object.read()
        part.close()
        if name == "request":
            self.requests.append(data)
        elif name == "audio":
            self.files.append(data)
        else:
            raise _bad_part(name, is_file=True)


def _bad_part(name: str, *, is_file: bool) -> RequestError:
    if name == "audio":
        return RequestError("the part `audio` must be a file (with a file name)", field="audio")
    if name in _LATER:
        return RequestError(_unknown(name), field=name, code="unknown_field")
    kind = "file" if is_file else "field"
    message = f"no part is called {name!r} ({kind}); send `request` with the JSON fields and `audio` files"
    return RequestError(message, field=name or None, code="unknown_field")


def _parse_multipart(boundary: bytes, data: bytes) -> Body:
    form = _Form([], [])
    ended: list[bool] = []
    if not boundary:
        raise RequestError("multipart/form-data without a boundary", code="invalid_multipart")
    try:
        parser = FormParser(
            "multipart/form-data",
            form.add_field,
            form.add_file,
            on_end=lambda: ended.append(True),
            boundary=boundary,
            config={"MAX_MEMORY_FILE_SIZE": len(data) + 1},  # the body is in memory already; nothing goes to a disk
        )
        parser.write(data)
        parser.finalize()
    except FormParserError as error:
        raise RequestError(f"the body is not multipart/form-data: {error}", code="invalid_multipart") from None
    if not ended:
        raise RequestError("the multipart body ends before its last boundary", code="invalid_multipart")
    if len(form.requests) != 1:
        message = f"send one part `request` with the JSON fields, not {len(form.requests)}"
        raise RequestError(message, field="request", code="missing" if not form.requests else "conflict")
    fields = parse_fields(form.requests[0])
    if fields.audio and form.files:
        raise RequestError("audio comes both as base64 and as files; send it one way", field="audio", code="conflict")
    decoded = [_from_base64(text, place) for place, text in enumerate(fields.audio)]
    return Body(fields, tuple(decoded + form.files))
