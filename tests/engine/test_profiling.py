"""Windows of steps under torch's profiler: exactly the steps that were asked for, each in its range, and nobody else's harm."""

from __future__ import annotations

import gzip
import json
import os
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
from torch.profiler import profile

from engine import profiling
from engine.errors import RequestError
from engine.model.walks import THINKER_DECODE_WALKS
from engine.profiling import CUDA, TORCH, Outcome, Profiler, Window, range_name
from engine.step import Component, Row, Step
from tests.engine.scripted import ScriptedEngine, merged

NEVER_S = 600.0
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def a_step(number: int, *walks: str) -> Step:
    rows = tuple(
        Row(request_id=str(slot), generation=slot, slot=slot, walk=walk, start=4, length=1)
        for slot, walk in enumerate(walks)
    )
    return Step(number=number, component=Component.THINKER, rows=rows)


class Profiled:
    """A scripted engine whose Thinker steps each compute one matrix product, and a profiler over it."""

    def __init__(self, folder: Path, *, device: str = "cpu", depth: int = 1, tokens: int = 12, frames: int = 0) -> None:
        matrix = torch.ones((8, 8), device=device)
        said = list(range(10, 10 + tokens))
        self.engine = ScriptedEngine({"a": said}, {"a": frames} if frames else None, depth=depth)
        self.engine.thinker.during_launch = lambda step: matrix @ matrix
        self.engine.add("a", max_tokens=tokens, max_frames=frames, ignore_eos=True)
        self.profiler = Profiler(self.engine.lanes, (), THINKER_DECODE_WALKS, on_gpu=device == "cuda")
        self.path = folder / "trace.json.gz"

    def open(self, steps: int, skip: int, *, seconds: float = NEVER_S, kind: str = TORCH) -> None:
        path = str(self.path) if kind == TORCH else None
        self.profiler.open(Window(kind=kind, steps=steps, skip=skip, seconds=seconds, path=path))

    def run(self, turns: int = 100) -> Outcome | None:
        """Take turns until the window is over, as the worker does; None if it isn't after so many. Then wait for its trace."""
        for _ in range(turns):
            self.engine.loop.turn()
            if (outcome := self.profiler.close_if_over()) is not None:
                return outcome
            if all(lane.ranges is nullcontext for lane in self.engine.lanes):
                return self.end()
        return None

    def end(self) -> Outcome:
        """Wait for the end of the window without a turn of the engine."""
        while (outcome := self.profiler.close_if_over()) is None:
            time.sleep(0.001)
        return outcome

    def rest(self) -> list[int]:
        """Run the engine to its end; returns the tokens that come."""
        return merged(self.engine.run())["a"].token_ids

    def events(self) -> list[dict]:
        with gzip.open(self.path, "rt") as file:
            return json.load(file)["traceEvents"]

    def ranges(self) -> list[str]:
        """The names of the trace's ranges, in order of time."""
        found = [event for event in self.events() if event.get("cat") == "user_annotation"]
        return [event["name"] for event in sorted(found, key=lambda event: event["ts"])]

    def products(self) -> int:
        return sum(event["name"] == "aten::mm" for event in self.events())


def text_range(number: int) -> str:
    return f"walkgate.step {number} thinker_text_decode rows=1 bucket=1"


def test_a_range_names_the_number_the_walks_and_the_rows_of_its_step() -> None:
    step = a_step(17, "thinker_text_decode", "thinker_decode", "thinker_text_decode")
    assert range_name(step, 4) == "walkgate.step 17 thinker_decode+thinker_text_decode rows=3 bucket=4"


@pytest.mark.parametrize(
    ("walks", "bucket"),
    [
        (("thinker_text_decode",), 1),
        (("thinker_text_decode",) * 3, 4),
        (("thinker_text_decode", "thinker_decode"), 2),
        (("thinker_text_decode",) * 9, 9),  # more than is captured
        (("thinker_prefill", "thinker_text_decode", "thinker_text_decode"), 3),  # not captured at all
    ],
)
def test_the_bucket_of_a_step_is_the_captured_size_that_holds_it(walks: tuple[str, ...], bucket: int) -> None:
    profiler = Profiler([], (1, 2, 4, 8), THINKER_DECODE_WALKS, on_gpu=False)
    assert profiler._bucket(a_step(0, *walks)) == bucket


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("skip", "first"), [(0, 0), (2, 2), (7, 7)])
def test_the_trace_holds_the_steps_that_were_asked_for_and_no_other(
    tmp_path: Path, depth: int, skip: int, first: int
) -> None:
    one = Profiled(tmp_path, depth=depth)
    one.open(steps=3, skip=skip)
    outcome = one.run()
    assert outcome is not None and (outcome.steps, outcome.path) == (3, str(one.path))
    assert 0 < outcome.seconds < 10
    names = [text_range(number) for number in range(first, first + 3)]
    if skip == 0:
        names[0] = "walkgate.step 0 thinker_prefill rows=1 bucket=1"
    assert one.ranges() == names
    assert one.products() == 3
    assert len(one.rest()) + (skip + 3) >= 12  # and the request goes on to its end


def test_steps_are_counted_from_when_the_window_is_opened(tmp_path: Path) -> None:
    one = Profiled(tmp_path)
    for _ in range(4):
        one.engine.loop.turn()
    one.open(steps=2, skip=1)
    assert one.run() is not None
    assert one.ranges() == [text_range(5), text_range(6)]


def test_steps_of_other_components_have_ranges_and_count_for_nothing(tmp_path: Path) -> None:
    one = Profiled(tmp_path, frames=8)
    one.open(steps=7, skip=1)
    assert one.run() is not None
    walks = [name.split()[2] for name in one.ranges()]
    assert walks.count("thinker_decode") == 7
    assert walks.count("talker_decode") >= 3
    assert set(walks) == {"thinker_decode", "talker_prefill", "talker_decode", "code2wav"}


def test_nothing_stands_around_a_step_without_a_window(tmp_path: Path) -> None:
    one = Profiled(tmp_path)
    assert all(lane.ranges is nullcontext for lane in one.engine.lanes)
    one.open(steps=1, skip=0)
    assert not any(lane.ranges is nullcontext for lane in one.engine.lanes)
    assert one.run() is not None
    assert all(lane.ranges is nullcontext for lane in one.engine.lanes)


def test_a_window_without_enough_steps_in_its_time_says_how_many_came(tmp_path: Path) -> None:
    one = Profiled(tmp_path, tokens=6)
    one.open(steps=50, skip=2, seconds=0.2)
    assert one.run(turns=6) is None
    outcome = one.end()
    assert (outcome.steps, outcome.path) == (4, str(one.path))
    assert one.ranges() == [text_range(number) for number in (2, 3, 4, 5)]


@pytest.mark.parametrize("turns", [0, 2])
def test_a_window_that_never_begins_leaves_no_trace_and_the_next_one_works(tmp_path: Path, turns: int) -> None:
    one = Profiled(tmp_path)
    one.open(steps=2, skip=5, seconds=0.1)
    for _ in range(turns):  # in which the profiler is armed
        one.engine.loop.turn()
    outcome = one.end()
    assert outcome == Outcome(steps=0, seconds=0.0, path=None)
    assert not one.path.exists()
    one.open(steps=2, skip=0)
    assert one.run() is not None
    assert len(one.ranges()) == 2


def test_a_window_that_is_ended_early_keeps_what_it_has_seen(tmp_path: Path) -> None:
    one = Profiled(tmp_path)
    one.profiler.end()  # nothing is open, and nothing happens
    one.open(steps=9, skip=1)
    assert one.run(turns=3) is None
    one.profiler.end()
    outcome = one.end()
    assert (outcome.steps, outcome.path) == (2, str(one.path))
    assert one.ranges() == [text_range(1), text_range(2)]


def test_one_window_at_a_time_and_none_of_a_gpu_without_one(tmp_path: Path) -> None:
    one = Profiled(tmp_path)
    with pytest.raises(
        RequestError, match="kind: cuda needs a GPU and this engine runs on a CPU; ask for torch"
    ) as found:
        one.open(steps=1, skip=0, kind=CUDA)
    assert (found.value.field, found.value.status) == ("kind", 400)
    one.open(steps=2, skip=0)
    with pytest.raises(RequestError, match="another window is open") as found:
        one.open(steps=1, skip=0)
    assert (found.value.code, found.value.status) == ("profile_open", 409)
    outcome = one.run()
    assert outcome is not None and outcome.steps == 2


def test_a_trace_that_cannot_be_written_is_told_and_the_next_window_works(tmp_path: Path) -> None:
    one = Profiled(tmp_path / "gone")
    one.open(steps=2, skip=0)
    with pytest.raises(
        RequestError, match=f"{one.path} could not be written: No such file or directory; make room"
    ) as found:
        one.run()
    assert (found.value.status, found.value.code) == (500, "engine")
    one.path = tmp_path / "trace.json.gz"
    one.open(steps=2, skip=1)
    assert one.run() is not None
    assert len(one.ranges()) == 2
    assert len(one.rest()) > 0


@pytest.mark.parametrize("method", ["prepare_trace", "start_trace", "stop_trace"])
def test_a_profiler_that_fails_costs_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    def fail(self: profile) -> None:
        raise RuntimeError("planted")

    said = Profiled(tmp_path).rest()
    one = Profiled(tmp_path)
    with monkeypatch.context() as planted:
        planted.setattr(profile, method, fail)
        one.open(steps=1, skip=0)
        with pytest.raises(RequestError, match="profiling failed: RuntimeError: planted"):
            one.run()
    assert all(lane.ranges is nullcontext for lane in one.engine.lanes)
    assert one.rest() == said[1:]  # the first one came in the turn that the window saw
    again = Profiled(tmp_path)
    again.open(steps=2, skip=0)
    assert again.run() is not None
    assert len(again.ranges()) == 2


def test_a_step_that_is_run_again_row_by_row_stands_in_one_range(tmp_path: Path) -> None:
    one = Profiled(tmp_path)
    one.engine.thinker.texts["b"] = [20]
    one.engine.thinker.fails = {"b"}
    one.engine.add("b", max_tokens=1)
    one.open(steps=2, skip=0)
    assert one.run() is not None
    assert one.ranges() == ["walkgate.step 0 thinker_prefill rows=2 bucket=2", text_range(1)]
    assert one.engine.lanes[1].counters["steps_split_after_error"] == 1


@contextmanager
def files_end_at(size: int) -> Iterator[None]:
    """Every write beyond `size` bytes of a file fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("size", [0, 2000])
def test_a_full_disk_is_told_and_leaves_no_file(tmp_path: Path, size: int) -> None:
    one = Profiled(tmp_path)
    one.open(steps=3, skip=0)
    with (
        files_end_at(size),
        pytest.raises(RequestError, match="could not be written: its end is missing; is the disk full"),
    ):
        one.run()
    assert list(tmp_path.iterdir()) == []
    one.open(steps=2, skip=0)
    assert one.run() is not None
    assert list(tmp_path.iterdir()) == [one.path]


def test_a_disk_that_fills_up_while_a_trace_is_compressed_leaves_no_file(tmp_path: Path) -> None:
    one = Profiled(tmp_path)
    one.open(steps=3, skip=0)
    part = tmp_path / "trace.json.gz.part"
    part.symlink_to("/dev/full")
    with pytest.raises(
        RequestError, match=f"{one.path} could not be written: No space left on device; make room in the folder"
    ):
        one.run()
    assert list(tmp_path.iterdir()) == []


def test_the_engine_goes_on_while_a_trace_is_compressed(tmp_path: Path) -> None:
    one = Profiled(tmp_path, tokens=40)
    part = tmp_path / "trace.json.gz.part"
    os.mkfifo(part)  # a disk that takes nothing until somebody reads
    one.open(steps=2, skip=0)
    launched = []
    for _ in range(30):
        one.engine.loop.turn()
        launched.append(len(one.engine.thinker.launches))
        assert one.profiler.close_if_over() is None
    assert launched == list(range(1, 31))
    with pytest.raises(RequestError, match="another window is open"):
        one.open(steps=1, skip=0)
    assert not one.path.exists()
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(part.read_bytes()))
    reader.start()
    assert one.end().path == str(one.path)
    reader.join()
    assert len(json.loads(gzip.decompress(read[0]))["traceEvents"]) > 0


def test_a_turn_passes_between_stopping_and_saving(tmp_path: Path) -> None:
    one = Profiled(tmp_path)
    one.open(steps=1, skip=0)
    one.engine.loop.turn()
    assert one.profiler.close_if_over() is None
    assert list(tmp_path.iterdir()) == []
    assert one.end().steps == 1
    assert one.ranges() == ["walkgate.step 0 thinker_prefill rows=1 bucket=1"]


def test_a_trace_holds_three_seconds_at_the_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert profiling.MOST_RECORDED_S == 3.0
    monkeypatch.setattr(profiling, "MOST_RECORDED_S", 0.1)
    one = Profiled(tmp_path, tokens=6)
    one.open(steps=50, skip=2)
    assert one.run(turns=6) is None
    outcome = one.end()
    assert (outcome.steps, outcome.path) == (4, str(one.path))
    assert outcome.seconds >= 0.1


@GPU
def test_on_a_gpu_the_trace_holds_the_kernels_of_its_steps(tmp_path: Path) -> None:
    one = Profiled(tmp_path, device="cuda")
    one.open(steps=4, skip=3)
    assert one.run() is not None
    assert one.ranges() == [text_range(number) for number in range(3, 7)]
    assert sum(event.get("cat") == "kernel" for event in one.events()) >= 4


@GPU
def test_on_a_gpu_a_window_of_kind_cuda_writes_nothing_itself(tmp_path: Path) -> None:
    one = Profiled(tmp_path, device="cuda")
    one.open(steps=4, skip=3, kind=CUDA)
    outcome = one.run()
    assert outcome is not None and (outcome.steps, outcome.path) == (4, None)
    assert list(tmp_path.iterdir()) == []
