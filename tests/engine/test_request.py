"""Requests and events as they travel between the front and the engine."""

import msgspec
import pytest

from engine.request import Clip, Event, Request, Sampling, Speech, StepLogprobs, StepTrace, Usage

FULL = Request(
    id="a-1",
    prompt_ids=[1, 2, 151645],
    max_tokens=7,
    sampling=Sampling(temperature=0.5, top_k=3, top_p=0.9, repetition_penalty=1.1, seed=2**63),
    clips=[Clip(mel=b"\x00\x01\x02\x03", mel_bins=1, frames=1, tokens=1, seconds=0.01)],
    speech=Speech(voice="ethan", max_frames=9, sampling=Sampling(temperature=0.9, top_k=50), codes=True),
    emit_text=False,
    ignore_eos=True,
    stop_ids=[5],
    logprobs=2,
    trace=True,
)


def test_a_request_survives_the_wire_with_every_field() -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(FULL), type=Request) == FULL


def test_an_event_survives_the_wire_with_every_field() -> None:
    event = Event(
        request_id="a-1",
        token_ids=[4, 5],
        logprobs=[StepLogprobs(-0.25, [4, 9], [-0.25, -1.5]), StepLogprobs(-0.5, [5, 1], [-0.5, -2.0])],
        trace=[StepTrace(3, 4, 2)],
        pcm=b"\x00\x80",
        frames=1,
        codes=[[1] * 16],
        finish_reason="stop",
        audio_finish_reason="length",
        usage=Usage(
            prompt_tokens=3,
            completion_tokens=2,
            audio_tokens_in=1,
            audio_seconds_in=0.01,
            audio_frames=1,
            audio_samples=1,
        ),
        error=None,
        done=True,
    )
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(event), type=Event)
    assert decoded == event
    assert decoded.logprobs[1].token_ids == [5, 1]
    assert decoded.trace[0].bucket == 4


def test_a_request_that_says_nothing_more_is_greedy_text_without_audio() -> None:
    plain = Request(id="p", prompt_ids=[1], max_tokens=1)
    assert plain.sampling == Sampling(temperature=0.0, top_k=0, top_p=1.0, repetition_penalty=1.0, seed=0)
    assert (plain.clips, plain.speech, plain.stop_ids) == ([], None, [])
    assert (plain.emit_text, plain.ignore_eos, plain.logprobs, plain.trace) == (True, False, None, False)


def test_two_events_never_share_their_lists() -> None:
    first, second = Event(request_id="a"), Event(request_id="b")
    first.token_ids += [1]
    first.codes.append([2])
    assert (second.token_ids, second.codes) == ([], [])


@pytest.mark.parametrize(
    ("value", "field", "to"), [(FULL, "max_tokens", 8), (FULL.sampling, "seed", 1), (FULL.clips[0], "tokens", 2)]
)
def test_what_was_asked_can_not_be_changed_on_the_way(value: object, field: str, to: int) -> None:
    with pytest.raises(AttributeError, match="immutable"):
        setattr(value, field, to)


def test_a_request_with_a_field_of_the_wrong_type_is_refused_by_name() -> None:
    wire = msgspec.msgpack.encode({"id": "a", "prompt_ids": [1], "max_tokens": "many"})
    with pytest.raises(msgspec.ValidationError, match="max_tokens"):
        msgspec.msgpack.decode(wire, type=Request)
