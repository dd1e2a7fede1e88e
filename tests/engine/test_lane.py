"""Steps in flight in one lane, and a step that fails: only the row at fault does."""

from pathlib import Path

import msgspec
import pytest
from torch import Tensor

from engine.config import EngineSettings
from engine.engine import Engine
from engine.lane import Lane
from engine.model.omni import OmniModel, load_model
from engine.request import Request, Sampling, Speech
from engine.runner import TalkerRunner
from engine.sampler import SamplingRows
from engine.step import Component, Row, Step
from engine.track import Track
from tests.engine.scripted import ThinkerScript


def a_step(number: int, *request_ids: str) -> Step:
    rows = tuple(
        Row(request_id=request_id, generation=slot, slot=slot, walk="thinker_text_decode", start=4, length=1)
        for slot, request_id in enumerate(request_ids)
    )
    return Step(number=number, component=Component.THINKER, rows=rows)


def a_runner(*request_ids: str) -> ThinkerScript:
    """A runner with decoding requests; request number n makes the tokens 10n, 10n + 1, …"""
    runner = ThinkerScript({one: [10 * n + token for token in range(9)] for n, one in enumerate(request_ids, start=1)})
    for slot, request_id in enumerate(request_ids):
        request = Request(id=request_id, prompt_ids=[1] * 4, max_tokens=100)
        track = Track(
            request_id=request_id, component=Component.THINKER, generation=slot, slot=slot, limit=100, in_flight=1
        )
        runner.open(request, track)
    return runner


def test_a_step_is_launched_once_and_finished_with_what_each_row_made() -> None:
    runner = a_runner("a", "b")
    lane = Lane(runner)
    step = a_step(0, "a", "b")
    lane.launch(step)
    finished, made = lane.finish()
    assert finished is step
    assert [(one.request_id, one.walk, one.token_ids, one.error) for one in made] == [
        ("a", "thinker_text_decode", [10], None),
        ("b", "thinker_text_decode", [20], None),
    ]
    assert runner.launches == [["a", "b"]]
    assert (lane.counters["steps"], lane.counters["rows"], lane.counters["steps_split_after_error"]) == (1, 2, 0)


def test_a_row_that_fails_in_a_step_fails_alone_and_the_others_make_their_tokens() -> None:
    runner = a_runner("a", "b", "c")
    runner.fails = {"b"}
    lane = Lane(runner)
    step = a_step(0, "a", "b", "c")
    lane.launch(step)
    finished, made = lane.finish()
    assert finished is step  # with all its rows, so that all are retired
    assert {one.request_id: (one.token_ids, one.error) for one in made} == {
        "a": ([10], None),
        "b": ([], "ValueError: b is broken"),
        "c": ([30], None),
    }
    assert len(made) == 3
    assert runner.launches == [["a", "b", "c"], ["a"], ["b"], ["c"]]
    assert (lane.counters["steps"], lane.counters["rows"], lane.counters["steps_split_after_error"]) == (1, 3, 1)


def test_a_row_that_fails_alone_is_not_run_again() -> None:
    runner = a_runner("a")
    runner.fails = {"a"}
    lane = Lane(runner)
    lane.launch(a_step(0, "a"))
    _, made = lane.finish()
    assert [(one.request_id, one.error) for one in made] == [("a", "ValueError: a is broken")]
    assert runner.launches == [["a"]]
    assert lane.counters["steps_split_after_error"] == 0


def test_a_step_that_fails_only_as_a_whole_fails_nobody() -> None:
    runner = a_runner("a", "b")

    def too_much_at_once(step: Step) -> None:
        if len(step.rows) > 1:
            raise MemoryError("too much at once")

    runner.during_launch = too_much_at_once
    lane = Lane(runner)
    lane.launch(a_step(0, "a", "b"))
    _, made = lane.finish()
    assert [(one.request_id, one.token_ids, one.error) for one in made] == [("a", [10], None), ("b", [20], None)]


def test_a_step_in_which_every_row_fails_makes_one_error_a_row() -> None:
    runner = a_runner("a", "b")
    runner.fails = {"a", "b"}
    lane = Lane(runner)
    lane.launch(a_step(0, "a", "b"))
    _, made = lane.finish()
    assert [(one.request_id, one.error) for one in made] == [
        ("a", "ValueError: a is broken"),
        ("b", "ValueError: b is broken"),
    ]
    assert not lane.busy


def test_the_failed_row_is_logged_with_its_request_and_walk(caplog: pytest.LogCaptureFixture) -> None:
    runner = a_runner("a", "b")
    runner.fails = {"b"}
    lane = Lane(runner)
    lane.launch(a_step(0, "a", "b"))
    assert [record.getMessage() for record in caplog.records] == ["request b failed in thinker_text_decode"]
    assert caplog.records[0].exc_info is not None


def test_a_lane_has_room_for_as_many_steps_as_its_depth_and_finishes_them_in_order() -> None:
    runner = a_runner("a", "b")
    lane = Lane(runner, depth=2)
    assert (lane.component, lane.has_room, lane.busy) == (Component.THINKER, True, False)
    first, second = a_step(0, "a"), a_step(1, "b")
    lane.launch(first)
    assert (lane.has_room, lane.busy) == (True, True)
    lane.launch(second)
    assert (lane.has_room, lane.busy) == (False, True)
    assert lane.finish()[0] is first
    assert (lane.has_room, lane.busy) == (True, True)
    assert lane.finish()[0] is second
    assert (lane.has_room, lane.busy) == (True, False)


def test_a_failed_step_keeps_its_place_among_those_in_flight() -> None:
    runner = a_runner("a", "b")
    runner.fails = {"a"}
    lane = Lane(runner, depth=2)
    lane.launch(a_step(0, "a"))
    lane.launch(a_step(1, "b"))
    assert lane.finish()[1][0].error == "ValueError: a is broken"
    assert lane.finish()[1][0].token_ids == [20]


def spoken(model: OmniModel, *, fails_once: bool, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[list[int]]]:
    """The codes of two requests that speak together; the third frame's step may fail once, late, and is run again."""
    engine = Engine(model, EngineSettings())
    lane = next(lane for lane in engine.loop.lanes if isinstance(lane.runner, TalkerRunner))
    real, calls = TalkerRunner._predict, 0

    def predict(self: TalkerRunner, y: Tensor, first: Tensor, wishes: SamplingRows) -> tuple[Tensor, Tensor]:
        nonlocal calls
        calls += 1
        if fails_once and calls == 3:
            raise MemoryError("no room for the predictor")
        return real(self, y, first, wishes)

    monkeypatch.setattr(TalkerRunner, "_predict", predict)
    speech = Speech(voice="ethan", max_frames=6, sampling=Sampling(repetition_penalty=3.0), ignore_eos=True, codes=True)
    ids = model.config.ids
    for word, request_id in enumerate("ab", start=11):
        prompt = [ids.im_start, ids.user, 10, word, ids.im_end, 10, ids.im_start, ids.assistant, 10]
        engine.add(Request(id=request_id, prompt_ids=prompt, max_tokens=8, ignore_eos=True, speech=speech))
    codes: dict[str, list[list[int]]] = {"a": [], "b": []}
    while engine.has_work:
        for event in engine.step():
            assert event.error is None
            codes[event.request_id] += event.codes
    assert lane.counters["steps_split_after_error"] == int(fails_once)
    monkeypatch.undo()
    return codes


def test_speech_whose_step_was_run_again_is_the_same_speech(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A strong penalty tells: a first try that left its own tokens marked as seen would change the second."""
    model = load_model(tiny_checkpoint)
    smooth = spoken(model, fails_once=False, monkeypatch=monkeypatch)
    assert [len(codes) for codes in smooth.values()] == [6, 6]
    assert spoken(model, fails_once=True, monkeypatch=monkeypatch) == smooth


def test_what_can_not_be_read_fails_its_own_rows_only() -> None:
    runner = a_runner("a", "b")
    runner.texts["a"] = []  # reading past its end raises
    lane = Lane(runner, depth=2)
    lane.launch(a_step(0, "a"))
    lane.launch(a_step(1, "b"))
    assert [(one.request_id, one.error) for one in lane.finish()[1]] == [("a", "IndexError: list index out of range")]
    assert [(one.request_id, one.token_ids) for one in lane.finish()[1]] == [("b", [20])]


def test_steps_launched_ahead_and_steps_of_several_walks_are_counted() -> None:
    runner = a_runner("a", "b")
    lane = Lane(runner, depth=2)
    lane.launch(a_step(0, "a"))
    second = a_step(1, "b", "a")
    walks = ("thinker_decode", "thinker_text_decode")
    rows = tuple(msgspec.structs.replace(row, walk=walk) for row, walk in zip(second.rows, walks, strict=True))
    lane.launch(msgspec.structs.replace(second, rows=rows))
    assert (lane.counters["steps"], lane.counters["steps_launched_ahead"], lane.counters["steps_mixed"]) == (2, 1, 1)
