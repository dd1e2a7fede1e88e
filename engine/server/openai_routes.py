"""The routes of the OpenAI interface.

Not here: the fields (openai.py), what the engine is asked (openai_work.py), the answers (openai_reply.py).
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
from fastapi import FastAPI
from python_multipart.multipart import parse_options_header
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from engine.errors import RequestError
from engine.model.processor import Processor
from engine.server import openai, openapi, sound
from engine.server.exchange import answer
from engine.server.fields import checked, checked_value, most_marks, shown
from engine.server.form import parse_form
from engine.server.front import Front
from engine.server.openai_objects import (
    ChatChunk,
    ChatCompletion,
    Completion,
    Model,
    ModelList,
    TranscriptDelta,
    TranscriptDone,
    Transcription,
    VerboseTranscription,
)
from engine.server.openai_reply import (
    EVENTS,
    JSON,
    PLAIN,
    ChatReply,
    CompletionReply,
    SpeechReply,
    TranscriptionReply,
)
from engine.server.openai_work import (
    Unwanted,
    chat_requests,
    check_model,
    completion_requests,
    speech_request,
    transcription_request,
)
from engine.server.respond import Job, respond

FORM = "multipart/form-data"
_STREAMED_SPEECH = (sound.PCM, sound.WAV)

F = TypeVar("F", bound=openai.ModelFields)
Prepare = Callable[[HTTPRequest, bytes, Processor, Unwanted], Job]
Handle = Callable[[HTTPRequest], Awaitable[Response]]


def add_openai_routes(app: FastAPI, front: Front) -> None:
    """Let `app` answer the OpenAI routes for `front`."""
    routes = _Routes(front, int(time.time()))
    schema_of, errors = openapi.schema_of, openapi.errors(*openapi.POST_ERRORS, 404, openai=True)

    def fields_of(kind: type[openai.ModelFields]) -> openapi.Schema:
        schema = schema_of(kind)
        schema["properties"]["model"] = {"type": "string", "enum": [front.model_name]}
        return schema

    def post(path: str, prepare: Prepare, summary: str, body: openapi.Content, answers: openapi.Content) -> None:
        app.post(
            path,
            name=prepare.__name__,
            summary=summary,
            openapi_extra=openapi.body(body),
            responses=openapi.answers(summary, answers) | errors,
            response_class=Response,
        )(routes.answering(prepare))

    post(
        "/v1/chat/completions",
        routes.chat,
        "Answer a conversation",
        {JSON: fields_of(openai.ChatFields)},
        {JSON: schema_of(ChatCompletion), EVENTS: schema_of(ChatChunk)},
    )
    post(
        "/v1/completions",
        routes.completions,
        "Go on from prompts",
        {JSON: fields_of(openai.CompletionFields)},
        {JSON: schema_of(Completion), EVENTS: schema_of(Completion)},
    )
    files = [sound.media_type(name) for name in ("mp3", "opus", "flac", "wav", "pcm")]
    post(
        "/v1/audio/speech",
        routes.speech,
        "Read a text aloud",
        {JSON: fields_of(openai.SpeechFields)},
        dict.fromkeys(files, openapi.BINARY),
    )
    form = fields_of(openai.TranscriptionFields)
    form["properties"]["file"] = openapi.BINARY
    form["required"] = ["file", *form["required"]]
    texts = {"anyOf": [schema_of(Transcription), schema_of(VerboseTranscription)]}
    pieces = {"anyOf": [schema_of(TranscriptDelta), schema_of(TranscriptDone)]}
    post(
        "/v1/audio/transcriptions",
        routes.transcriptions,
        "Write down what is said",
        {FORM: form},
        {JSON: texts, PLAIN: openapi.TEXT, EVENTS: pieces},
    )
    _add_models(app, routes)


def _add_models(app: FastAPI, routes: _Routes) -> None:
    found = openapi.answers("The models", {JSON: openapi.schema_of(ModelList)})
    errors = openapi.errors(401, 503, openai=True)
    app.get("/v1/models", responses=found | errors, response_class=Response)(routes.models)
    found = openapi.answers("The model", {JSON: openapi.schema_of(Model)})
    errors = openapi.errors(401, 404, 503, openai=True)
    parameter = {"parameters": [{"name": "name", "in": "path", "required": True, "schema": openapi.TEXT}]}
    # A model may be called by its folder, so the name may hold slashes.
    app.get("/v1/models/{name:path}", openapi_extra=parameter, responses=found | errors, response_class=Response)(
        routes.model
    )


class _Routes:
    """What the routes do. `created` is when the server began, in seconds since 1970."""

    def __init__(self, front: Front, created: int) -> None:
        self.front = front
        self.created = created

    def answering(self, prepare: Prepare) -> Handle:
        """The handler of a route: `prepare` runs off the event loop, and what it made is answered."""

        async def handle(http: HTTPRequest) -> Response:
            async def begin(data: bytes) -> Response:
                job = await self.front.off_loop(lambda processor, unwanted: prepare(http, data, processor, unwanted))
                self._check_room(len(job.requests))
                return await respond(self.front, job)

            return await answer(self.front.counters, http, begin, self.front.max_body_bytes)

        return handle

    def _check_room(self, choices: int) -> None:
        """Refuse what could never be taken, and so must not be told to come back later."""
        most = self.front.settings.max_open
        if choices > most:
            message = f"{choices} choices are more than the {most} requests that this server takes at once"
            raise RequestError(message, field="n", code="too_many")

    def chat(self, http: HTTPRequest, data: bytes, processor: Processor, unwanted: Unwanted) -> Job:
        """The job of a conversation."""
        fields = self._from_json(openai.ChatFields, http, data, processor)
        requests = chat_requests(processor, fields, unwanted)
        return Job(requests, ChatReply(processor, fields, requests, self.front.model_name), fields.stream)

    def completions(self, http: HTTPRequest, data: bytes, processor: Processor, unwanted: Unwanted) -> Job:
        """The job of prompts to go on from."""
        fields = self._from_json(openai.CompletionFields, http, data, processor)
        requests = completion_requests(processor, fields, unwanted)
        return Job(requests, CompletionReply(processor, fields, requests, self.front.model_name), fields.stream)

    def speech(self, http: HTTPRequest, data: bytes, processor: Processor, unwanted: Unwanted) -> Job:
        """The job of a text to be read aloud."""
        fields = self._from_json(openai.SpeechFields, http, data, processor)
        request = speech_request(processor, fields, unwanted)
        return Job([request], SpeechReply(fields), fields.response_format in _STREAMED_SPEECH)

    def transcriptions(self, http: HTTPRequest, data: bytes, processor: Processor, unwanted: Unwanted) -> Job:
        """The job of audio to be written down."""
        kind, options = _content_type(http)
        if kind != FORM:
            raise _wrong_type(http, FORM)
        values, file = _form(options.get(b"boundary", b""), data)
        fields = self._known(checked_value(openai.TranscriptionFields, values))
        request = transcription_request(processor, fields, file, unwanted)
        return Job([request], TranscriptionReply(processor, fields, request), fields.stream)

    async def models(self) -> Response:
        """List the models that are served."""
        return Response(msgspec.json.encode(ModelList("list", [await self._model()])), media_type=JSON)

    async def model(self, http: HTTPRequest) -> Response:
        """Describe one model."""
        check_model(http.path_params["name"], self._names)
        return Response(msgspec.json.encode(await self._model()), media_type=JSON)

    async def _model(self) -> Model:
        longest = await self.front.off_loop(lambda processor, _: processor.max_model_len)
        return Model(self.front.model_name, "model", self.created, "walkgate", longest)

    @property
    def _names(self) -> tuple[str, str]:
        """What the served model may be called: its name, or its folder as a client of the same machine knows it."""
        return self.front.model_name, str(self.front.model)

    def _from_json(self, kind: type[F], http: HTTPRequest, data: bytes, processor: Processor) -> F:
        if _content_type(http)[0] != JSON:
            raise _wrong_type(http, JSON)
        return self._known(checked(kind, data, most_marks(processor.max_model_len)))

    def _known(self, fields: F) -> F:
        """`fields`, once they ask for the model that is served and go together."""
        check_model(fields.model, self._names)
        fields.check()
        return fields


def _content_type(http: HTTPRequest) -> tuple[str, dict[bytes, bytes]]:
    kind, options = parse_options_header(http.headers.get("content-type", ""))
    return kind.decode("latin-1"), options


def _wrong_type(http: HTTPRequest, wanted: str) -> RequestError:
    given = http.headers.get("content-type")
    message = f"Content-Type is {shown(given)!r}" if given else "Content-Type is missing"
    return RequestError(f"{message}; send {wanted}", code="unsupported_media_type", status=415)


def _form(boundary: bytes, data: bytes) -> tuple[dict[str, object], bytes]:
    """The fields of a form by name, typed as in JSON, and its one file."""
    values: dict[str, object] = {}
    files: list[bytes] = []
    for part in parse_form(boundary, data):
        name = shown(part.name)
        if part.is_file and part.name == "file":
            files.append(part.data)
        elif part.is_file or part.name == "file":
            raise RequestError(f"{name}: only `file` is a file, and it has a file name", field=name or None)
        elif part.name in values:
            raise RequestError(f"{name} comes twice", field=name, code="conflict")
        else:
            values[part.name] = _typed(part.name, part.data)
    if len(files) != 1:
        message = f"send one file called `file`, not {len(files)}"
        raise RequestError(message, field="file", code="conflict" if files else "missing")
    return values, files[0]


def _typed(name: str, data: bytes) -> object:
    """A field's value: forms hold text only, so numbers and booleans are read where a field has them."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise RequestError(f"{shown(name)} is not UTF-8", field=shown(name)) from None
    if name == "stream":
        return {"true": True, "false": False}.get(text.lower(), text)
    if name == "temperature":
        try:
            return float(text)
        except ValueError:
            return text
    return text
