"""What bodies are checked with: the base of their fields, numbers in range, and errors that name a field. No torch.

Unknown fields, wrong types and values that can't be used are refused, never ignored.
"""

from __future__ import annotations

import binascii
import difflib
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, ClassVar, TypeVar

import pydantic_core
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from engine.errors import RequestError

_LATER = frozenset({"image", "images", "video", "videos", "image_url", "video_url"})
NOT_SERVED, UNKNOWN_FIELD = "not_served", "unknown_field"
MEDIA_LATER = "image and video input is not served yet; this server takes text and audio"
_MOST_ERRORS = 5
_LONGEST_VALUE = 60
_LONGEST_SHOWN = 80
_WHITESPACE = b" \t\n\r\v\f"
# What a body needs beside its prompt: conversations are a few marks a message, ids one each, and there are lists of a thousand.
_MARKS_A_TOKEN, _MORE_MARKS = 4, 100_000

Temperature = Annotated[float, Field(ge=0.0, le=100.0)]
TopK = Annotated[int, Field(ge=0, lt=2**31)]
TopP = Annotated[float, Field(gt=0.0, le=1.0)]
MinP = Annotated[float, Field(ge=0.0, le=1.0)]
# Below a hundredth a quotient may overflow, and nothing can be drawn from infinities.
Penalty = Annotated[float, Field(ge=0.01, le=100.0)]
CountPenalty = Annotated[float, Field(ge=-2.0, le=2.0)]
Bias = Annotated[float, Field(ge=-100.0, le=100.0)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
StopString = Annotated[str, Field(min_length=1, max_length=256)]
# A voice is looked up by the model's processor, whose message shows the whole of it.
Voice = Annotated[str, Field(max_length=_LONGEST_SHOWN)]
MOST_STOPS = 16

Unserved = Mapping[str, tuple[str, Sequence[object]]]


class Fields(BaseModel):
    """Fields of a body, or of an object in it.

    `unserved` are fields that other servers have: what they would ask for, and the values that ask for nothing and so may come.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)
    unserved: ClassVar[Unserved] = {}


F = TypeVar("F", bound=Fields)


def shown(text: str) -> str:
    """A client's own words as a message shows them: 80 characters at the most, so that no refusal grows with its request."""
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"


def most_marks(max_model_len: int) -> int:
    """How many brackets, colons and commas a body of JSON may hold whose prompt has `max_model_len` tokens at the most."""
    return _MARKS_A_TOKEN * max_model_len + _MORE_MARKS


def check_marks(data: bytes, most: int) -> None:
    """Refuse JSON of so many values that reading it would keep the server from answering anybody else.

    Base64 holds none of these marks, so that audio of any length passes.
    """
    found = sum(data.count(mark) for mark in b"[{:,")
    if found > most:
        message = f"the body holds {found} brackets, colons and commas; this server reads {most} in a request"
        raise RequestError(message, code="too_large")


def checked(kind: type[F], data: bytes, most: int) -> F:
    """Check a body of JSON, in which null means "not given"; RequestError names the field and the fix.

    `most` are the brackets, colons and commas that it may hold.
    """
    check_marks(data, most)
    try:
        value = pydantic_core.from_json(data)
    except ValueError as error:
        raise RequestError(f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object", code="invalid_json")
    return checked_value(kind, value)


def checked_value(kind: type[F], value: dict[str, object]) -> F:
    """Check what a body held; RequestError names the field and the fix."""
    given = {name: _without_null(one) for name, one in value.items() if one is not None}
    for name, (what, neutral) in kind.unserved.items():
        if name in given and not _is_one_of(given.pop(name), neutral):
            raise RequestError(f"{name}: {what} not served", field=name, code=NOT_SERVED)
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise refusal(error.errors(include_url=False, include_context=False), kind) from None


def _is_one_of(value: object, neutral: Sequence[object]) -> bool:
    # True is no 1 here, though Python says so.
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral)


def _without_null(value: object) -> object:
    if isinstance(value, dict):
        return {name: _without_null(one) for name, one in value.items() if one is not None}
    return [_without_null(one) for one in value] if isinstance(value, list) else value


def from_base64(text: str, name: str) -> bytes:
    """Decode base64, or a `data:` URL of it; RequestError on the field called `name`."""
    head, comma, _ = text[:200].partition(",")
    if head[:5].lower() == "data:" and comma:
        if not is_base64(head):
            raise RequestError(f"{name} is a data: URL without ;base64", field=name, code="invalid_base64")
        text = text[len(head) + 1 :]
    try:
        # Line breaks are what command line tools put in; anything else outside the alphabet is an error.
        return binascii.a2b_base64(text.encode("ascii").translate(None, _WHITESPACE), strict_mode=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise RequestError(f"{name} is not base64 ({error})", field=name, code="invalid_base64") from None


def is_base64(head: str) -> bool:
    """Whether what stands before the comma of a `data:` URL says that base64 follows."""
    return head[-7:].lower() == ";base64"


def refusal(errors: Sequence[ErrorDetails], kind: type[BaseModel]) -> RequestError:
    """What pydantic found wrong with a body of `kind`, as one error; its field is the first one at fault."""
    # One word about images is enough: a part that holds one is wrong by its type and by its field.
    media = [error for error in errors if _is_media(error)]
    told = [error for error in errors if not any(error is more for more in media[1:])]
    sentences = [_sentence(error, kind) for error in told[:_MOST_ERRORS]]
    if len(told) > _MOST_ERRORS:
        sentences.append(f"and {len(told) - _MOST_ERRORS} more")
    return RequestError("; ".join(sentences), field=_place(told[0]) or None, code=_code(told[0]))


def _code(error: ErrorDetails) -> str:
    if error["type"] == "extra_forbidden":
        return unknown_code(str(error["loc"][-1]))
    if error["type"] == NOT_SERVED:
        return NOT_SERVED
    return "missing" if _missing(error) else "invalid_value"


def _is_media(error: ErrorDetails) -> bool:
    """Whether it is about an image or a video, which no body takes."""
    return _code(error) == NOT_SERVED


def _missing(error: ErrorDetails) -> bool:
    return error["type"] == "missing"


def _place(error: ErrorDetails) -> str:
    # Pydantic says "[key]" where it is the name itself that is at fault.
    parts = (part for part in error["loc"] if part != "[key]")
    return "".join(f"[{part}]" if isinstance(part, int) else f".{shown(part)}" for part in parts).lstrip(".")


def _sentence(error: ErrorDetails, kind: type[BaseModel]) -> str:
    place, got = _place(error), error["input"]
    if error["type"] == "extra_forbidden":
        return unknown_field(place, _known(kind, error["loc"][:-1]))
    if _missing(error):
        return f"{place}: is missing"
    if error["type"] == NOT_SERVED:
        return f"{place}: {error['msg']}"
    message = error["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    lead = "must be " if message != error["msg"] and error["type"] != "value_error" else ""
    return f"{place or 'the body'}: {lead}{message}{_got(got)}"


def _got(value: object) -> str:
    """What was found in place of something else, if it is short."""
    if isinstance(value, dict | list) or (isinstance(value, str) and len(value) > _LONGEST_VALUE):
        return ""
    return f", got {value!r}" if len(repr(value)) <= _LONGEST_VALUE else ""


def unknown_code(name: str) -> str:
    """The code of a refusal that `unknown_field` words."""
    return NOT_SERVED if name in _LATER else UNKNOWN_FIELD


def unknown_field(place: str, known: Sequence[str]) -> str:
    """What to say about a field that there is not, among those that are `known` where it stands."""
    place = shown(place)
    name = place.rpartition(".")[2]
    if name in _LATER:
        return f"{place}: {MEDIA_LATER}"
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(known)}"
    return f"{place}: no such field; {hint}"


def _known(kind: type[BaseModel], path: Sequence[int | str]) -> list[str]:
    """The fields of the object at `path` inside a body of `kind`."""
    for name in path:
        if isinstance(name, str):
            kind = next(_models(kind.model_fields[name].annotation))
    return list(kind.model_fields)


def _models(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in typing.get_args(annotation):
        yield from _models(inner)
