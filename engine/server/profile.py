"""`POST /profile`: its fields, the name of its trace, and its answer. Not here: what is profiled (engine/profiling.py)."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from fastapi import FastAPI
from pydantic import AfterValidator, Field
from python_multipart.multipart import parse_options_header
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from engine.errors import RequestError
from engine.profiling import TORCH, Outcome, Window
from engine.server import openapi
from engine.server.exchange import answer
from engine.server.fields import Fields, checked, shown
from engine.server.front import Front
from engine.server.reply import JSON

# Requests wait while a profiler stops: the more steps it saw, the longer.
MOST_STEPS, MOST_SKIPPED, MOST_SECONDS = 200, 100_000, 600.0
_MOST_MARKS = 100

# The client names no folder: a name holds no separator, and what is put behind it makes even `..` a file.
_NAME = r"^[A-Za-z0-9_.-]{1,100}$"


def _named(name: str) -> str:
    """Return `name`; ValueError in words if it is none, for the pattern alone says little to a client."""
    if re.fullmatch(_NAME, name) is None:
        raise ValueError("must be 1 to 100 of the letters A-Z and a-z, digits, _, - and .")
    return name


TraceName = Annotated[str, AfterValidator(_named), Field(json_schema_extra={"pattern": _NAME})]


class ProfileFields(Fields):
    """The body of `/profile`: `steps` Thinker steps after `skip` others, waited for `seconds` in all, into a trace `name`."""

    kind: Literal["torch", "cuda"] = "torch"
    steps: Annotated[int, Field(ge=1, le=MOST_STEPS)] = 50
    skip: Annotated[int, Field(ge=0, le=MOST_SKIPPED)] = 5
    seconds: Annotated[float, Field(gt=0.0, le=MOST_SECONDS)] = 30.0
    name: TraceName | None = None


class ProfileAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """How a window ended: `steps` were seen in `seconds`, `complete` if that is all; `path` is the trace, if there is one."""

    kind: str
    steps: int
    path: str | None
    seconds: float
    complete: bool


def add_profile_route(app: FastAPI, front: Front) -> None:
    """Let `app` answer `POST /profile` for `front`."""
    answers = openapi.answers("How the window ended", {JSON: openapi.schema_of(ProfileAnswer)})
    errors = openapi.errors(*openapi.POST_ERRORS, openai=False)
    for status, reason in ((403, "The server has no --profile-dir"), (409, "Another window is open")):
        errors[status] = {**errors[400], "description": reason}
    extra = openapi.body({JSON: openapi.schema_of(ProfileFields)})

    @app.post("/profile", openapi_extra=extra, responses=answers | errors, response_class=Response)
    async def profile(http: HTTPRequest) -> Response:
        async def begin(data: bytes) -> Response:
            # A drain that began while the body came has ended every window: nothing would end this one.
            if (refusal := front.unready()) is not None:
                raise refusal
            fields, window = window_of(front.settings.profile_dir, http.headers.get("content-type", ""), data)
            return Response(_answer(fields, await front.client.profile(window)), media_type=JSON)

        return await answer(front.counters, http, begin, front.max_body_bytes)


def window_of(folder: Path | None, content_type: str, data: bytes) -> tuple[ProfileFields, Window]:
    """The window that a body asks for, its trace in `folder`; RequestError names the flag, or the field and the fix."""
    if folder is None:
        message = "this server profiles nothing; start it with --profile-dir DIR"
        raise RequestError(message, code="profile_off", status=403)
    if parse_options_header(content_type)[0] != b"application/json":
        message = f"Content-Type is {shown(content_type)!r}; send {JSON}"
        raise RequestError(message, code="unsupported_media_type", status=415)
    fields = checked(ProfileFields, data, _MOST_MARKS)
    return fields, Window(
        kind=fields.kind,
        steps=fields.steps,
        skip=fields.skip,
        seconds=fields.seconds,
        path=_trace_path(folder, fields),
    )


def _trace_path(folder: Path, fields: ProfileFields) -> str | None:
    if fields.kind != TORCH:
        if fields.name is not None:
            message = f"name: kind {fields.kind} writes no trace here; leave it out"
            raise RequestError(message, field="name", code="conflict")
        return None
    path = folder / f"{fields.name or f'steps-{time.time_ns()}'}.json.gz"
    if path.exists():
        message = f"name: {path.name} is there already; choose another"
        raise RequestError(message, field="name", code="invalid_value")
    return str(path)


def _answer(fields: ProfileFields, outcome: Outcome) -> bytes:
    return msgspec.json.encode(
        ProfileAnswer(
            kind=fields.kind,
            steps=outcome.steps,
            path=outcome.path,
            seconds=round(outcome.seconds, 6),
            complete=outcome.steps == fields.steps,
        )
    )
