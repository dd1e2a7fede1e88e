"""Errors as HTTP bodies, each in the form of the interface that it belongs to: OpenAI's under /v1, else /generate's own."""

from __future__ import annotations

import msgspec

from engine.errors import RequestError
from engine.server.openai_objects import ErrorBody, ErrorDetail
from engine.server.reply import error_body


def error_for(path: str, error: RequestError) -> bytes:
    """The JSON text of a refusal or a failure of a request for `path`."""
    return openai_error(error) if path.startswith("/v1/") or path == "/v1" else error_body(error)


def openai_error(error: RequestError) -> bytes:
    """The same in OpenAI's form."""
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    if error.status == 429:
        kind = "rate_limit_error"
    return msgspec.json.encode(ErrorBody(ErrorDetail(error.message, kind, error.field, error.code)))
