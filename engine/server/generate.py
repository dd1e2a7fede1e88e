"""A body of `/generate` to the Request that the engine runs, off the event loop: audio takes time to decode. No torch."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from typing import TypeVar

from engine.errors import RequestError
from engine.model.generation import Generation
from engine.model.processor import Inputs, Processor
from engine.request import Request, Sampling, Speech
from engine.server.fields import most_marks
from engine.server.openai import TalkerFields
from engine.server.protocol import GenerateFields, SpeechFields, parse

T = TypeVar("T")


def prepare(
    processor: Processor, content_type: str, data: bytes, unwanted: Callable[[], bool]
) -> tuple[GenerateFields, Request]:
    """Check a body and make its Request; RequestError names the field and the fix.

    `unwanted` is asked before each clip; once it says True, engine.model.processor.Unwanted is raised.
    """
    body = parse(content_type, data, most_marks(processor.max_model_len))
    fields = body.fields
    bias = {int(token): value for token, value in fields.logit_bias.items()}
    vocab = processor.config.thinker.vocab
    check_ids("logit_bias", bias, vocab)
    check_ids("stop_token_ids", fields.stop_token_ids, vocab)
    draft = Request(
        id=uuid.uuid4().hex,
        prompt_ids=[],
        max_tokens=fields.max_tokens,
        sampling=_sampling(fields, bias),
        speech=_speech(fields.speech or SpeechFields(), processor.generation) if "audio" in fields.output else None,
        emit_text="text" in fields.output,
        ignore_eos=fields.ignore_eos,
        stop=fields.stop,
        stop_ids=fields.stop_token_ids,
        logprobs=fields.top_logprobs or None,
        trace=fields.trace,
    )
    inputs = Inputs(
        text=fields.text,
        system=fields.system,
        prompt_token_ids=fields.prompt_token_ids,
        audio=body.audio,
        clamp_tokens="max_tokens" not in fields.model_fields_set,
        clamp_frames=fields.speech is None or fields.speech.max_frames is None,
    )
    return fields, processor.complete(draft, inputs, unwanted)


def check_ids(name: str, ids: Iterable[int], vocab: int) -> None:
    """Refuse ids that the model has no token for; RequestError on the field called `name`."""
    for token in ids:
        if token >= vocab:
            message = f"{name} holds {token}; ids of this model are 0 to {vocab - 1}"
            raise RequestError(message, field=name, code="out_of_vocabulary")


def _sampling(fields: GenerateFields, bias: dict[int, float]) -> Sampling:
    return Sampling(
        temperature=fields.temperature,
        top_k=fields.top_k,
        top_p=fields.top_p,
        min_p=fields.min_p,
        repetition_penalty=fields.repetition_penalty,
        frequency_penalty=fields.frequency_penalty,
        presence_penalty=fields.presence_penalty,
        logit_bias=bias,
        seed=fields.seed,
    )


def _speech(fields: SpeechFields, default: Generation) -> Speech:
    return Speech(
        voice=fields.voice,
        max_frames=either(fields.max_frames, default.talker_max_new_tokens),
        sampling=talker_sampling(fields, default.speech(fields.seed)),
        ignore_eos=fields.ignore_eos,
        codes=fields.codes,
    )


def talker_sampling(fields: SpeechFields | TalkerFields, default: Sampling) -> Sampling:
    """How the Talker's codes are drawn: as `fields` ask, and where they don't, as `default` says."""
    return Sampling(
        temperature=either(fields.temperature, default.temperature),
        top_k=either(fields.top_k, default.top_k),
        top_p=either(fields.top_p, default.top_p),
        repetition_penalty=either(fields.repetition_penalty, default.repetition_penalty),
        seed=default.seed,
    )


def either(asked: T | None, default: T) -> T:
    """What was asked, or the default where nothing was."""
    return default if asked is None else asked
