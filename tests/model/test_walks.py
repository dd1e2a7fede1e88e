"""Which walk a track takes next, over every state it can be in; and which text goes with which frame."""

import pytest

from engine.model.walks import next_walk, row_span, text_index
from engine.step import Component
from engine.track import Track

CHUNK = 25


def track(component: Component, **state: object) -> Track:
    """A track of `component` with the state that the test names; room for 1,000 positions."""
    return Track(request_id="r", component=component, generation=1, slot=0, limit=1000, **state)  # type: ignore[arg-type]


THINKER_STATES = [
    # prompt, prefilled, generated, speech, waits, source ended -> walk with the text walk, and without it
    (10, 0, 0, False, False, False, "thinker_prefill", "thinker_prefill"),
    (10, 0, 0, True, False, False, "thinker_prefill", "thinker_prefill"),
    (10, 4, 0, False, False, False, "thinker_prefill", "thinker_prefill"),
    (10, 10, 1, False, False, False, "thinker_text_decode", "thinker_decode"),
    (10, 10, 1, True, False, False, "thinker_decode", "thinker_decode"),
    (10, 10, 500, False, False, False, "thinker_text_decode", "thinker_decode"),
    (10, 0, 0, False, True, False, None, None),
    (10, 0, 0, True, True, False, None, None),
    (10, 0, 0, False, True, True, "thinker_prefill", "thinker_prefill"),
    (10, 10, 1, False, True, True, "thinker_text_decode", "thinker_decode"),
    (10, 10, 1, True, True, True, "thinker_decode", "thinker_decode"),
]


@pytest.mark.parametrize(
    ("prompt", "prefilled", "launched", "speech", "waits", "ended", "with_text_walk", "without"), THINKER_STATES
)
def test_the_thinker_waits_for_audio_then_prefills_then_decodes(
    prompt: int,
    prefilled: int,
    launched: int,
    speech: bool,
    waits: bool,
    ended: bool,
    with_text_walk: str | None,
    without: str | None,
) -> None:
    one = track(
        Component.THINKER,
        prompt_length=prompt,
        prefilled=prefilled,
        launched=launched,
        audio_output=speech,
        waits_for_source=waits,
        source_ended=ended,
    )
    assert next_walk(one) == with_text_walk
    assert next_walk(one, text_walk=False) == without


def test_the_audio_encoder_runs_at_once() -> None:
    assert next_walk(track(Component.AUDIO_ENCODER, prompt_length=2)) == "audio_encoder"
    assert next_walk(track(Component.AUDIO_ENCODER, prompt_length=2, prefilled=2)) is None


@pytest.mark.parametrize("component", [Component.THINKER, Component.TALKER])
def test_nothing_is_launched_beyond_the_limit_however_little_of_it_was_read(component: Component) -> None:
    """A step launched ahead of a track's last one would write past its pages."""
    ready = {"prompt_length": 4, "prefilled": 4, "generated": 1, "arrived": 20, "source_ended": True}
    one = track(component, **ready, launched=6)
    one.limit = 7
    assert next_walk(one) is not None
    one.launched = 7
    assert next_walk(one) is None


TALKER_STATES = [
    # prompt, prefilled, frames made, text ids arrived, text ended -> walk
    (12, 0, 0, 0, False, None),
    (12, 0, 0, 1, False, None),  # the only id so far may be the last, which is never spoken
    (12, 0, 0, 1, True, None),  # a text of one id is never spoken at all
    (12, 0, 0, 2, False, "talker_prefill"),
    (12, 0, 0, 2, True, "talker_prefill"),
    (12, 5, 0, 2, False, "talker_prefill"),
    (12, 12, 1, 2, False, None),  # id 1 is there, but may be the last one
    (12, 12, 1, 3, False, "talker_decode"),
    (12, 12, 2, 3, False, None),
    (12, 12, 1, 2, True, "talker_decode"),  # now it is known: the end marker comes
    (12, 12, 5, 6, False, None),
    (12, 12, 5, 7, False, "talker_decode"),
    (12, 12, 400, 7, True, "talker_decode"),  # padding, for as long as the speech lasts
]


@pytest.mark.parametrize(("prompt", "prefilled", "frames", "arrived", "ended", "walk"), TALKER_STATES)
def test_the_talker_runs_only_once_it_knows_what_to_speak_next(
    prompt: int, prefilled: int, frames: int, arrived: int, ended: bool, walk: str | None
) -> None:
    one = track(
        Component.TALKER,
        prompt_length=prompt,
        prefilled=prefilled,
        launched=frames,
        arrived=arrived,
        source_ended=ended,
        audio_output=True,
    )
    assert next_walk(one) == walk
    assert next_walk(one, text_walk=False) == walk


@pytest.mark.parametrize(
    ("arrived", "done", "walk"), [(0, 0, None), (1, 0, "code2wav"), (7, 7, None), (8, 7, "code2wav")]
)
def test_code2wav_has_a_walk_while_frames_wait(arrived: int, done: int, walk: str | None) -> None:
    assert next_walk(track(Component.CODE2WAV, arrived=arrived, launched=done)) == walk


READY = {
    Component.AUDIO_ENCODER: track(Component.AUDIO_ENCODER, prompt_length=1),
    Component.THINKER: track(Component.THINKER, prompt_length=3),
    Component.TALKER: track(Component.TALKER, prompt_length=3, arrived=2),
    Component.CODE2WAV: track(Component.CODE2WAV, arrived=1),
}


@pytest.mark.parametrize("component", list(Component))
@pytest.mark.parametrize("reason", ["stop", "length", "cancelled"])
def test_a_finished_track_has_no_next_walk(component: Component, reason: str) -> None:
    one = READY[component]
    one.finish_reason = None
    assert next_walk(one) is not None
    one.finish_reason = reason
    assert next_walk(one) is None
    one.finish_reason = None


@pytest.mark.parametrize(
    ("component", "state", "span"),
    [
        (Component.AUDIO_ENCODER, {"prompt_length": 3}, (0, 3)),
        (Component.THINKER, {"prompt_length": 10}, (0, 10)),
        (Component.THINKER, {"prompt_length": 10, "prefilled": 4}, (4, 6)),
        # The first generated token sits at the position after the prompt, and is the input that makes the second.
        (Component.THINKER, {"prompt_length": 10, "prefilled": 10, "launched": 1}, (10, 1)),
        (Component.THINKER, {"prompt_length": 10, "prefilled": 10, "launched": 5}, (14, 1)),
        (Component.TALKER, {"prompt_length": 12, "arrived": 2}, (0, 12)),
        (Component.TALKER, {"prompt_length": 12, "prefilled": 12, "launched": 1, "arrived": 3}, (12, 1)),
        (Component.CODE2WAV, {"arrived": 24}, (0, 0)),
        (Component.CODE2WAV, {"arrived": 25}, (0, 25)),
        (Component.CODE2WAV, {"arrived": 49, "launched": 25}, (25, 0)),
        (Component.CODE2WAV, {"arrived": 90, "launched": 25}, (25, 25)),
        (Component.CODE2WAV, {"arrived": 49, "launched": 25, "source_ended": True}, (25, 24)),
        (Component.CODE2WAV, {"arrived": 60, "launched": 25, "source_ended": True}, (25, 25)),
        (Component.CODE2WAV, {"arrived": 60, "launched": 60, "source_ended": True}, (60, 0)),
    ],
)
def test_a_row_spans_the_rest_of_the_prompt_one_position_or_one_chunk(
    component: Component, state: dict[str, object], span: tuple[int, int]
) -> None:
    assert row_span(track(component, **state), CHUNK) == span


@pytest.mark.parametrize(
    ("text_tokens", "spoken"),
    [
        # What frames 1, 2, 3, … are given when the text has ended after this many ids; frame 0 takes id 0 in its prompt.
        (2, [-1, None, None, None, None]),
        (3, [1, -1, None, None, None]),
        (5, [1, 2, 3, -1, None]),
    ],
)
def test_the_end_marker_takes_the_place_of_the_last_id_and_padding_follows(
    text_tokens: int, spoken: list[int | None]
) -> None:
    assert [text_index(frame, text_tokens, True) for frame in range(1, 6)] == spoken


def test_while_text_still_comes_each_frame_speaks_its_own_id() -> None:
    assert [text_index(frame, frame + 2, False) for frame in range(1, 5)] == [1, 2, 3, 4]


@pytest.mark.parametrize("text_tokens", range(2, 9))
def test_whenever_the_talker_may_run_the_text_it_takes_is_the_one_it_would_take_with_the_whole_text(
    text_tokens: int,
) -> None:
    """The Talker never speaks an id early that the end of the text would have turned into the marker."""
    for frames in range(1, text_tokens + 3):
        for arrived in range(2, text_tokens + 1):
            one = track(Component.TALKER, prompt_length=9, prefilled=9, launched=frames, arrived=arrived)
            one.source_ended = False
            if next_walk(one) is not None:
                assert text_index(frames, arrived, False) == text_index(frames, text_tokens, True)
