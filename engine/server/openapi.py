"""What the OpenAPI document says about each route: its body, its answers and its errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from pydantic import BaseModel

from engine.server.openai_objects import ErrorBody

Schema = dict[str, Any]
Content = Mapping[str, Schema]
Responses = dict[int | str, dict[str, Any]]

BINARY: Schema = {"type": "string", "format": "binary"}
TEXT: Schema = {"type": "string"}
ANY_OBJECT: Schema = {"type": "object"}
_GENERATE_ERROR: Schema = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "field", "code"],
            "properties": {
                "message": {"type": "string"},
                "field": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}
_REASONS = {
    400: "A field is wrong, conflicts with another or asks for more than fits",
    401: "No valid API key",
    404: "There is no such model",
    408: "The body came too slowly",
    413: "The body is too large",
    415: "The content type is not served",
    429: "Too many requests are open; Retry-After says when to come back",
    500: "This one request failed",
    503: "The server is starting, stopping or dead",
}
POST_ERRORS = (400, 401, 408, 413, 415, 429, 500, 503)


def body(content: Content) -> dict[str, Any]:
    """A required request body, by media type."""
    return {"requestBody": {"required": True, "content": _by_type(content)}}


def answers(description: str, content: Content) -> Responses:
    """The answer of status 200, by media type."""
    return {200: {"description": description, "content": _by_type(content)}}


def errors(*statuses: int, openai: bool) -> Responses:
    """Errors by status, in OpenAI's form or in the other."""
    schema = schema_of(ErrorBody) if openai else _GENERATE_ERROR
    content = _by_type({"application/json": schema})
    return {status: {"description": _REASONS[status], "content": content} for status in statuses}


def schema_of(kind: type[BaseModel] | type[msgspec.Struct]) -> Schema:
    """The JSON schema of a class, without references, which an OpenAPI document would look up elsewhere."""
    if issubclass(kind, BaseModel):
        schema = kind.model_json_schema(ref_template="{model}")
    else:
        schema = msgspec.json.schema(kind, ref_template="{name}")
    named = schema.pop("$defs", {})
    whole: Schema = _inlined(schema, named)
    return whole


def _inlined(value: Any, named: Mapping[str, Schema]) -> Any:
    if isinstance(value, list):
        return [_inlined(one, named) for one in value]
    if not isinstance(value, dict):
        return value
    if "$ref" in value:
        beside = {key: one for key, one in value.items() if key != "$ref"}
        return _inlined(named[value["$ref"]] | beside, named)
    return {key: _inlined(one, named) for key, one in value.items()}


def _by_type(content: Content) -> dict[str, Any]:
    return {media_type: {"schema": schema} for media_type, schema in content.items()}
