"""Bodies of multipart/form-data, taken apart. Not here: what the parts may hold."""

from __future__ import annotations

from dataclasses import dataclass

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import Field as FormField
from python_multipart.multipart import File as FormFile
from python_multipart.multipart import FormParser

from engine.errors import RequestError

# Each costs several objects, and a form of 64 MiB has room for a million.
_MOST_PARTS = 10_000


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a form; `is_file` says that it came with a file name."""

    name: str
    data: bytes
    is_file: bool


def parse_form(boundary: bytes, data: bytes) -> list[Part]:
    """The parts of a body, fields first and files then, each in order; RequestError if it is no whole form."""
    if not boundary:
        raise RequestError("multipart/form-data without a boundary", code="invalid_multipart")
    if data.count(b"\r\n--" + boundary) > _MOST_PARTS:
        raise RequestError(f"the form has more than the {_MOST_PARTS} parts that are read", code="too_many")
    fields: list[Part] = []
    files: list[Part] = []
    ended: list[bool] = []
    try:
        parser = FormParser(
            "multipart/form-data",
            lambda one: fields.append(_field(one)),
            lambda one: files.append(_file(one)),
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
    return fields + files


def _field(part: FormField) -> Part:
    return Part(_name(part.field_name), part.value or b"", is_file=False)


def _file(part: FormFile) -> Part:
    part.file_object.seek(0)
    data = part.file_object.read()
    part.close()
    return Part(_name(part.field_name), data, is_file=True)


def _name(raw: bytes | None) -> str:
    return (raw or b"").decode("utf-8", errors="replace")
