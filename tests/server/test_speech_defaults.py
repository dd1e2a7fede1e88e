"""How speech is drawn where a request does not say: as the checkpoint does, on every route."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from engine.errors import RequestError
from engine.model.config import OmniConfig
from engine.model.generation import Generation
from engine.model.processor import Processor
from engine.request import Request, Sampling
from engine.server import openai
from engine.server.generate import prepare
from engine.server.openai_work import chat_requests, speech_request

OWN = Generation(talker_do_sample=False, talker_top_k=9, talker_top_p=0.5, talker_repetition_penalty=1.2)
SAID = {"model": "m", "messages": [{"role": "user", "content": "Hello there."}], "modalities": ["text", "audio"]}


def never() -> bool:
    return False


def generated(processor: Processor, speech: dict | None) -> Request:
    body = {"text": "Hello there.", "output": ["audio"], "max_tokens": 4} | ({"speech": speech} if speech else {})
    return prepare(processor, "application/json", json.dumps(body).encode(), never)[1]


def chatted(processor: Processor, speech: dict | None) -> Request:
    return chat_requests(processor, openai.ChatFields.model_validate(SAID | {"speech": speech, "seed": 0}), never)[0]


def read_aloud(processor: Processor, speech: dict | None) -> Request:
    body = {"model": "m", "input": "Hello there.", "voice": "ethan", "speech": speech}
    return speech_request(processor, openai.SpeechFields.model_validate(body), never)


@pytest.fixture(scope="module")
def processor(tiny_checkpoint: Path) -> Processor:
    return replace(Processor.load(tiny_checkpoint, OmniConfig.load(tiny_checkpoint), 512), generation=OWN)


@pytest.mark.parametrize("route", [generated, chatted, read_aloud])
def test_what_a_request_leaves_open_is_the_checkpoints(
    processor: Processor, route: Callable[[Processor, dict | None], Request]
):
    drawn = Sampling(top_k=9, top_p=0.5, repetition_penalty=1.2, seed=5)
    asked = {"temperature": 0.7, "top_k": 0, "top_p": 0.25, "repetition_penalty": 1.0}
    nothing, seeded, hot, all_of_it = (
        route(processor, speech).speech
        for speech in (None, {"seed": 5}, {"seed": 5, "temperature": 0.7}, asked | {"seed": 6})
    )
    assert nothing is not None and nothing.sampling.temperature == 0.0 and nothing.sampling.top_k == 9
    assert seeded is not None and seeded.sampling == drawn
    assert hot is not None and hot.sampling == Sampling(
        temperature=0.7, top_k=9, top_p=0.5, repetition_penalty=1.2, seed=5
    )
    assert all_of_it is not None and all_of_it.sampling == Sampling(**asked, seed=6)


@pytest.mark.parametrize("route", [generated, chatted, read_aloud])
def test_frames_that_nobody_asked_for_are_the_checkpoints_and_shrink(
    processor: Processor, route: Callable[[Processor, dict | None], Request]
):
    few = replace(processor, generation=Generation(talker_max_new_tokens=7))
    for wanted, speech, model in ((7, None, few), (9, {"max_frames": 9}, few)):
        made = route(model, speech).speech
        assert made is not None and made.max_frames == wanted
    free = route(processor, None).speech
    assert free is not None and 7 < free.max_frames < 4096


def test_null_is_refused_where_it_would_mean_nothing(processor: Processor):
    with pytest.raises(RequestError, match=r"speech\.top_k is null; leave it out instead") as refused:
        generated(processor, {"top_k": None})
    assert refused.value.field == "speech.top_k"


def test_a_text_that_can_not_be_repeated_whole_or_says_nothing_is_refused(processor: Processor):
    words = "one two three four five six seven eight nine ten "
    tokens = len(processor.token_ids(words))
    longest = words * (512 // tokens)
    with pytest.raises(RequestError, match="are left to repeat them") as refused:
        read_aloud_text(processor, longest[: len(longest) * 2 // 3])
    assert (refused.value.field, refused.value.code) == ("input", "too_long")
    with pytest.raises(RequestError, match="nothing but spaces"):
        read_aloud_text(processor, " \n")
    assert read_aloud_text(processor, longest[: len(longest) // 3]).max_tokens > tokens * (512 // tokens) // 3


def read_aloud_text(processor: Processor, text: str) -> Request:
    return speech_request(processor, openai.SpeechFields(model="m", input=text, voice="ethan"), never)
