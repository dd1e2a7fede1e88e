"""The engine's turn over scripted runners: what reaches the client, what streams on, what ends, and what comes back."""

import numpy as np
import pytest

from engine.loop import settle
from engine.request import Usage
from engine.step import Component, Step
from engine.track import Track
from tests.engine.scripted import ScriptedEngine, merged, pages_of

END = 9


def samples(pcm: bytes) -> list[int]:
    return [int(sample) for sample in np.frombuffer(pcm, dtype="<i2")]


# --- Text ---


def test_a_text_request_gets_one_token_a_turn_and_ends_on_its_stop_id() -> None:
    engine = ScriptedEngine({"a": [1, 2, END]})
    engine.add("a")
    turns = engine.run()
    assert [[event.token_ids for event in events] for events in turns] == [[[1]], [[2]], [[END]]]
    assert [events[0].done for events in turns] == [False, False, True]
    whole = merged(turns)["a"]
    assert (whole.finish_reason, whole.audio_finish_reason, whole.error) == ("stop", None, None)
    assert whole.usage == Usage(
        prompt_tokens=4, completion_tokens=3, audio_tokens_in=0, audio_seconds_in=0, audio_frames=0, audio_samples=0
    )


def test_a_text_that_fills_its_limit_ends_with_length() -> None:
    engine = ScriptedEngine({"a": [1, 2, 3, 4, 5]})
    engine.add("a", max_tokens=3)
    whole = merged(engine.run())["a"]
    assert (whole.token_ids, whole.finish_reason) == ([1, 2, 3], "length")


def test_ignoring_the_end_of_text_runs_to_the_limit() -> None:
    engine = ScriptedEngine({"a": [END, 1, END, 2]})
    engine.add("a", max_tokens=4, ignore_eos=True)
    whole = merged(engine.run())["a"]
    assert (whole.token_ids, whole.finish_reason) == ([END, 1, END, 2], "length")


def test_requests_run_together_and_each_gets_its_own_tokens() -> None:
    engine = ScriptedEngine({"a": [1, 2, 3, END], "b": [4, END], "c": [5, 6, END]})
    for request_id in "abc":
        engine.add(request_id)
    whole = merged(engine.run())
    assert {request_id: event.token_ids for request_id, event in whole.items()} == {
        "a": [1, 2, 3, END],
        "b": [4, END],
        "c": [5, 6, END],
    }
    assert engine.thinker.launches == [["a", "b", "c"], ["a", "b", "c"], ["a", "c"], ["a"]]


def test_a_waiting_request_starts_in_the_turn_after_its_place_is_given_back() -> None:
    engine = ScriptedEngine({"a": [1, END], "b": [2, END]}, slots=1)
    engine.add("a")
    engine.add("b")
    assert engine.thinker.launches == []
    turns = engine.run()
    assert engine.thinker.launches == [["a"], ["a"], ["b"], ["b"]]
    assert merged(turns)["b"].token_ids == [2, END]


@pytest.mark.parametrize(("text_walk", "dropped"), [(True, 1), (False, 3)])
def test_text_that_no_talker_waits_for_is_dropped_and_counted(text_walk: bool, dropped: int) -> None:
    engine = ScriptedEngine({"a": [1, 2, END]}, text_walk=text_walk)
    engine.add("a")
    engine.run()
    assert engine.loop.counters["streams_dropped"] == dropped


# --- Audio in ---


def test_the_prompt_waits_until_its_clips_are_encoded() -> None:
    engine = ScriptedEngine({"a": [1, END], "b": [2, END]})
    engine.add("a", prompt=30, clips=2)
    engine.add("b")
    engine.loop.turn()
    assert (engine.audio.launches, engine.thinker.launches) == ([["a"]], [["b"]])
    whole = merged(engine.run())["a"]
    assert engine.audio.launches == [["a"]]
    assert whole.token_ids == [1, END]
    assert whole.usage is not None
    assert (whole.usage.audio_tokens_in, whole.usage.audio_seconds_in) == (26, 2.0)


# --- Speech ---


def test_speech_speaks_each_id_then_the_end_marker_then_padding_and_sounds_every_frame_in_order() -> None:
    engine = ScriptedEngine({"a": [5, 6, 7, END]}, {"a": 7})
    engine.add("a", max_frames=20)
    whole = merged(engine.run())["a"]
    assert engine.talker.spoken["a"] == [0, 1, 2, -1, None, None, None, None]
    assert whole.token_ids == [5, 6, 7, END]
    assert samples(whole.pcm) == [0, 1, 2, 3, 4, 5, 6]
    assert whole.codes == [[frame] * 16 for frame in range(7)]
    assert whole.frames == 7
    assert engine.code2wav.boundaries["a"] == [4, 7]
    assert (whole.finish_reason, whole.audio_finish_reason, whole.done) == ("stop", "stop", True)
    assert whole.usage == Usage(
        prompt_tokens=4, completion_tokens=4, audio_tokens_in=0, audio_seconds_in=0, audio_frames=7, audio_samples=7
    )


def test_speech_that_fills_its_limit_ends_with_length_and_still_sounds_every_frame() -> None:
    engine = ScriptedEngine({"a": [5, 6, END]}, {"a": 100})
    engine.add("a", max_frames=6)
    whole = merged(engine.run())["a"]
    assert samples(whole.pcm) == [0, 1, 2, 3, 4, 5]
    assert (whole.finish_reason, whole.audio_finish_reason) == ("stop", "length")


def test_speech_that_ends_on_a_chunk_boundary_has_no_empty_chunk() -> None:
    engine = ScriptedEngine({"a": [5, 6, END]}, {"a": 8})
    engine.add("a", max_frames=20)
    whole = merged(engine.run())["a"]
    assert engine.code2wav.boundaries["a"] == [4, 8]
    assert (len(samples(whole.pcm)), whole.audio_finish_reason) == (8, "stop")


def test_chunks_end_at_the_same_frames_alone_and_in_company() -> None:
    alone = ScriptedEngine({"a": [5, 6, 7, END]}, {"a": 11})
    alone.add("a", max_frames=20)
    alone.run()
    texts = {"a": [5, 6, 7, END], "b": [5] * 9 + [END], "c": [5, END], "d": [5, END]}
    busy = ScriptedEngine(texts, {"a": 11, "b": 13, "c": 2}, max_rows=1)
    for request_id in "bacd":
        busy.add(request_id, max_frames=0 if request_id == "d" else 20)
    whole = merged(busy.run())
    assert busy.code2wav.boundaries["a"] == alone.code2wav.boundaries["a"] == [4, 8, 11]
    assert busy.talker.spoken["a"] == alone.talker.spoken["a"]
    assert samples(whole["b"].pcm) == list(range(13))


def test_speech_starts_before_the_text_has_ended() -> None:
    engine = ScriptedEngine({"a": [5] * 12 + [END]}, {"a": 12}, chunk_frames=2)
    engine.add("a", max_frames=20)
    turns = engine.run()
    first_sound = next(turn for turn, [event] in enumerate(turns) if event.pcm)
    last_text = max(turn for turn, [event] in enumerate(turns) if event.token_ids)
    assert first_sound < last_text


def test_what_several_components_made_in_one_turn_comes_as_one_event() -> None:
    engine = ScriptedEngine({"a": [5] * 8 + [END]}, {"a": 8}, chunk_frames=1)
    engine.add("a", max_frames=20)
    turns = engine.run()
    assert all(len(events) == 1 for events in turns)
    together = turns[4][0]
    assert (together.token_ids, together.codes, samples(together.pcm)) == ([5], [[2] * 16], [1])
    assert merged(turns)["a"].done


def test_text_that_was_not_asked_for_is_spoken_but_not_sent() -> None:
    engine = ScriptedEngine({"a": [5, 6, END]}, {"a": 3})
    engine.add("a", max_frames=20, emit_text=False)
    whole = merged(engine.run())["a"]
    assert whole.token_ids == []
    assert samples(whole.pcm) == [0, 1, 2]
    assert whole.usage is not None and whole.usage.completion_tokens == 3


@pytest.mark.parametrize(("frames", "reason"), [(2, "length"), (20, "stop")])
def test_a_text_that_is_only_spoken_is_written_no_further_than_its_speech(frames: int, reason: str) -> None:
    engine = ScriptedEngine({"a": [5] * 50 + [END]}, {"a": 3})
    engine.add("a", max_tokens=100, max_frames=frames, emit_text=False)
    whole = merged(engine.run())["a"]
    assert samples(whole.pcm) == list(range(min(frames, 3)))
    assert (whole.finish_reason, whole.audio_finish_reason, whole.done) == (reason, reason, True)
    assert whole.usage is not None and whole.usage.completion_tokens < 20


def test_the_end_of_the_text_is_told_when_it_ends_and_the_end_of_the_speech_when_all_is_heard() -> None:
    engine = ScriptedEngine({"a": [5, END]}, {"a": 9})
    engine.add("a", max_frames=20)
    turns = [event for [event] in engine.run()]
    told = [turn for turn, event in enumerate(turns) if event.finish_reason]
    heard = [turn for turn, event in enumerate(turns) if event.audio_finish_reason]
    assert told == [1]
    assert heard == [len(turns) - 1]
    assert turns[-1].pcm and turns[-1].done
    assert [event.done for event in turns[:-1]] == [False] * (len(turns) - 1)


@pytest.mark.parametrize(("text", "max_tokens", "reason"), [([END], 20, "stop"), ([5, 6], 1, "length")])
def test_a_text_of_a_single_token_is_silence(text: list[int], max_tokens: int, reason: str) -> None:
    engine = ScriptedEngine({"a": text}, {"a": 100})
    engine.add("a", max_tokens=max_tokens, max_frames=20)
    whole = merged(engine.run())["a"]
    assert engine.talker.launches == []
    assert (whole.token_ids, whole.pcm, whole.frames, whole.codes) == (text[:1], b"", 0, [])
    assert (whole.finish_reason, whole.audio_finish_reason, whole.error) == (reason, "stop", None)
    assert whole.usage is not None and (whole.usage.audio_frames, whole.usage.audio_samples) == (0, 0)


def test_a_talker_that_ends_before_its_first_frame_is_silence_too() -> None:
    engine = ScriptedEngine({"a": [5, 6, END]}, {"a": 0})
    engine.add("a", max_frames=20)
    whole = merged(engine.run())["a"]
    assert engine.talker.launches == [["a"]]
    assert (whole.pcm, whole.frames, whole.finish_reason, whole.audio_finish_reason) == (b"", 0, "stop", "stop")


def test_speech_that_ends_before_its_text_does_not_end_the_text() -> None:
    engine = ScriptedEngine({"a": [5] * 9 + [END]}, {"a": 1})
    engine.add("a", max_frames=20)
    whole = merged(engine.run())["a"]
    assert whole.token_ids == [5] * 9 + [END]
    assert (samples(whole.pcm), whole.finish_reason, whole.audio_finish_reason) == ([0], "stop", "stop")


# --- Errors ---


def test_a_row_that_fails_ends_its_request_with_an_error_and_the_others_proceed() -> None:
    engine = ScriptedEngine({"a": [1, 2, 3, END], "b": [4, 5, END], "c": [6, 7, END]})
    for request_id in "abc":
        engine.add(request_id)
    turns = [engine.loop.turn()]
    engine.thinker.fails = {"b"}
    turns += engine.run()
    whole = merged(turns)
    assert (whole["b"].token_ids, whole["b"].error) == ([4], "ValueError: b is broken")
    assert (whole["b"].done, whole["b"].finish_reason, whole["b"].usage) == (True, None, None)
    assert (whole["a"].token_ids, whole["c"].token_ids) == ([1, 2, 3, END], [6, 7, END])
    assert (whole["a"].error, whole["c"].error) == (None, None)
    counters = engine.loop.counters
    assert (counters["requests_failed"], counters["requests_done"], counters["requests"]) == (1, 2, 3)


def test_a_failed_request_gives_back_its_place_in_the_turn_that_tells_the_client() -> None:
    engine = ScriptedEngine({"a": [1] * 9}, {"a": 9})
    engine.add("a", max_tokens=9, max_frames=11)
    engine.loop.turn()
    assert engine.held == (1, pages_of(13), pages_of(20))
    engine.thinker.fails = {"a"}
    [event] = engine.loop.turn()
    assert event.error is not None
    assert engine.held == (0, 0, 0)
    assert engine.loop.turn() == []


def test_a_talker_that_fails_ends_the_whole_request_and_leaves_the_others_speaking() -> None:
    texts = {"a": [5] * 8 + [END], "b": [6] * 8 + [END]}
    engine = ScriptedEngine(texts, {"a": 8, "b": 8})
    engine.add("a", max_frames=20)
    engine.add("b", max_frames=20)
    turns = [engine.loop.turn() for _ in range(4)]
    engine.talker.fails = {"a"}
    turns += engine.run()
    whole = merged(turns)
    assert (whole["a"].error, whole["a"].done) == ("ValueError: a is broken", True)
    assert len(whole["a"].token_ids) < 9
    assert (whole["b"].token_ids, samples(whole["b"].pcm)) == ([6] * 8 + [END], list(range(8)))


@pytest.mark.parametrize("where", ["thinker", "talker", "code2wav"])
def test_a_request_that_a_runner_can_not_take_in_fails_alone(where: str) -> None:
    engine = ScriptedEngine({"a": [1, 2, END], "b": [3, 4, END]}, {"a": 2, "b": 2})
    getattr(engine, where).refuses = {"a"}
    engine.add("a", max_frames=5)
    engine.add("b", max_frames=5)
    whole = merged(engine.run())
    assert (whole["a"].error, whole["a"].done, whole["a"].token_ids) == ("ValueError: a can't be opened", True, [])
    assert (whole["b"].token_ids, samples(whole["b"].pcm)) == ([3, 4, END], [0, 1])
    assert engine.loop.counters["requests_failed"] == 1


# --- Cancelling ---


def test_a_cancelled_waiting_request_makes_no_event_and_takes_no_place() -> None:
    engine = ScriptedEngine({"a": [1, 2, END], "c": [3, END]}, slots=1)
    for request_id in "abc":
        engine.add(request_id)
    engine.loop.turn()
    engine.loop.cancel("b")
    assert set(engine.loop.waiting) == {"c"}
    whole = merged(engine.run())
    assert set(whole) == {"a", "c"}
    assert "b" not in {request_id for launch in engine.thinker.launches for request_id in launch}


def test_a_request_cancelled_between_turns_gives_back_its_place_at_once_and_says_no_more() -> None:
    engine = ScriptedEngine({"a": [1] * 20, "b": [2, 2, END]}, {"a": 20})
    engine.add("a", max_frames=20)
    engine.add("b")
    before = [engine.loop.turn() for _ in range(2)]
    engine.loop.cancel("a")
    assert engine.held == (1, pages_of(24), 0)
    assert set(engine.loop.admitted) == {"b"}
    after = engine.run()
    assert {event.request_id for events in before for event in events} == {"a", "b"}
    assert {event.request_id for events in after for event in events} == {"b"}


def test_a_request_cancelled_while_its_step_is_in_flight_keeps_its_place_until_the_step_is_retired() -> None:
    engine = ScriptedEngine({"a": [1] * 20, "b": [2, 2, 2, END]})
    engine.add("a")
    engine.add("b")
    engine.loop.turn()
    held = []

    def cancel(step: Step) -> None:
        engine.loop.cancel("a")
        held.append((engine.held, set(engine.loop.admitted), set(engine.thinker.live)))

    engine.thinker.during_launch = cancel
    events = engine.loop.turn()
    engine.thinker.during_launch = lambda step: None
    assert held == [((2, 12, 0), {"a", "b"}, {"a", "b"})]
    assert [event.request_id for event in events] == ["b"]
    assert (engine.held, set(engine.loop.admitted)) == ((1, 6, 0), {"b"})
    assert merged(engine.run())["b"].done


def test_a_cancelled_request_is_launched_no_more_while_it_waits_for_its_step_in_flight() -> None:
    engine = ScriptedEngine({"a": [5] * 9 + [END]}, {"a": 9})
    engine.add("a", max_frames=20)
    for _ in range(3):
        engine.loop.turn()
    assert engine.talker.launches == [["a"]]
    engine.thinker.during_launch = lambda step: engine.loop.cancel("a")
    assert engine.loop.turn() == []
    assert engine.talker.launches == [["a"]]  # though the text for its next frame was there
    assert (engine.held, engine.loop.admitted) == ((0, 0, 0), {})


def test_with_two_steps_in_flight_a_cancelled_request_waits_for_its_own_and_says_no_more() -> None:
    engine = ScriptedEngine({"a": [1] * 20, "b": [2, 2, 2, END]}, depth=2)
    engine.add("a")
    engine.add("b")
    engine.loop.turn()  # the prompts are read, the first decode step is still in flight
    assert engine.scheduler.tracks[Component.THINKER]["b"].in_flight == 1
    engine.loop.cancel("b")
    engine.loop.cancel("b")
    assert engine.loop.counters["requests_cancelled"] == 1
    assert (engine.held, set(engine.thinker.live)) == ((2, 12, 0), {"a", "b"})
    events = engine.loop.turn()
    assert [(event.request_id, event.token_ids) for event in events] == [("a", [1])]  # b's token is dropped
    assert (engine.held, set(engine.thinker.live)) == ((1, 6, 0), {"a"})
    engine.loop.cancel("a")
    while engine.loop.admitted:
        assert engine.loop.turn() == []
    assert engine.held == (0, 0, 0)


def test_the_next_step_is_launched_before_the_last_one_is_read() -> None:
    engine = ScriptedEngine({"a": [1, 2, 3, END]}, depth=2)
    engine.add("a")
    events = engine.loop.turn()
    assert [event.token_ids for event in events] == [[1]]
    assert engine.thinker.launches == [["a"], ["a"]]
    assert engine.lanes[1].counters["steps_launched_ahead"] == 1


def test_a_row_launched_after_its_track_had_ended_makes_nothing() -> None:
    engine = ScriptedEngine({"a": [1, END], "b": [2, 2, 2]}, depth=2)
    engine.add("a")
    engine.add("b", max_tokens=3)
    whole = merged(engine.run())
    assert (whole["a"].token_ids, whole["b"].token_ids) == ([1, END], [2, 2, 2])
    # a ran once too often, since its end was read one step late; b did not, since its limit was known.
    assert engine.thinker.launches == [["a", "b"], ["a", "b"], ["a", "b"]]


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
def test_whatever_rides_along_or_runs_ahead_each_request_gets_the_same(chunked: bool, mixed: bool, depth: int) -> None:
    texts = {"a": [1] * 6 + [END], "b": [2, 3, 4, 5, END], "c": [7] * 20, "d": [8, END], "e": [6] * 9}
    plain = ScriptedEngine(texts, {"b": 7, "c": 30}, slots=3)
    other = ScriptedEngine(
        texts, {"b": 7, "c": 30}, slots=3, depth=depth, chunked=chunked, mixed=mixed, prefill_positions=5
    )
    answers = []
    for engine in (plain, other):
        engine.add("a", prompt=23)
        engine.add("b", max_frames=20, prompt=2)
        engine.add("c", max_frames=9, clips=1)
        engine.add("d", prompt=11)
        engine.add("e", max_tokens=9, ignore_eos=True)
        answers.append(merged(engine.run()))
    assert answers[0] == answers[1]
    # A row that ran once too often asked for one text more.
    assert {name: engine.talker.spoken[name][: len(told)] for name, told in plain.talker.spoken.items()} == (
        plain.talker.spoken
    )


def test_a_place_given_back_is_taken_by_the_next_in_line_with_a_generation_of_its_own() -> None:
    engine = ScriptedEngine({"a": [1] * 20, "b": [2, END]}, slots=1)
    engine.add("a")
    engine.add("b")
    engine.loop.turn()
    first = engine.scheduler.tracks[Component.THINKER]["a"]
    engine.loop.cancel("a")
    engine.loop.turn()
    second = engine.scheduler.tracks[Component.THINKER]["b"]
    assert second.slot == first.slot
    assert second.generation != first.generation
    assert merged(engine.run())["b"].token_ids == [END]


def test_cancelling_twice_or_an_unknown_or_a_finished_request_does_nothing() -> None:
    engine = ScriptedEngine({"a": [1, END], "b": [1, 1, END]})
    engine.add("a")
    engine.add("b")
    engine.loop.cancel("never seen")
    engine.loop.turn()
    engine.loop.cancel("b")
    engine.loop.cancel("b")
    engine.run()
    engine.loop.cancel("a")
    counters = engine.loop.counters
    assert (counters["requests_cancelled"], counters["requests_done"]) == (1, 1)


# --- Counters and the pure rule ---


def test_counters_add_up_what_was_made() -> None:
    engine = ScriptedEngine({"a": [1, 2, END], "b": [3, END]}, {"a": 5})
    engine.add("a", max_frames=20)
    engine.add("b")
    engine.run()
    assert engine.loop.counters == {
        "requests": 2,
        "requests_done": 2,
        "requests_cancelled": 0,
        "requests_failed": 0,
        "tokens": 5,
        "frames": 5,
        "samples": 5,
        "streams_dropped": 1,
    }


def test_an_idle_turn_makes_nothing() -> None:
    engine = ScriptedEngine({})
    assert engine.loop.turn() == []
    assert [lane.counters["steps"] for lane in engine.lanes] == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("component", "ended", "prefilled", "generated", "arrived", "reason"),
    [
        (Component.TALKER, False, 0, 0, 0, None),
        (Component.TALKER, False, 0, 0, 1, None),
        (Component.TALKER, True, 0, 0, 0, "stop"),
        (Component.TALKER, True, 0, 0, 1, "stop"),
        (Component.TALKER, True, 0, 0, 2, None),
        (Component.TALKER, True, 9, 5, 2, None),
        (Component.CODE2WAV, False, 0, 0, 0, None),
        (Component.CODE2WAV, False, 0, 4, 4, None),
        (Component.CODE2WAV, True, 0, 0, 0, "stop"),
        (Component.CODE2WAV, True, 0, 4, 6, None),
        (Component.CODE2WAV, True, 0, 6, 6, "stop"),
    ],
)
def test_a_track_settles_once_its_source_has_ended_and_nothing_is_left_to_do(
    component: Component, ended: bool, prefilled: int, generated: int, arrived: int, reason: str | None
) -> None:
    track = Track(
        request_id="a",
        component=component,
        generation=1,
        slot=0,
        limit=100,
        prompt_length=9,
        prefilled=prefilled,
        generated=generated,
        arrived=arrived,
        source_ended=ended,
    )
    assert settle(track) == reason
