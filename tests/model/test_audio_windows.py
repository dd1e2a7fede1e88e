from __future__ import annotations

import pytest

from engine.model.audio_windows import Batch, Window, WindowShape, batches, cut, rows_of, shape_for
from engine.model.positions import audio_tokens

FULL = WindowShape(100, 8)


def test_a_chunk_becomes_an_eighth_of_its_frames_rounded_up():
    assert [rows_of(frames) for frames in (0, 1, 8, 9, 45, 99, 100)] == [0, 1, 1, 2, 6, 13, 13]
    assert (FULL.frames, FULL.rows) == (800, 104)


@pytest.mark.parametrize(
    ("frames", "windows"),
    [
        (1, [Window(0, 1, 1)]),
        (800, [Window(0, 800, 104)]),
        (801, [Window(0, 800, 104), Window(800, 801, 1)]),
        (2530, [Window(0, 800, 104), Window(800, 1600, 104), Window(1600, 2400, 104), Window(2400, 2530, 17)]),
    ],
)
def test_a_clip_is_cut_into_full_windows_and_what_is_left(frames: int, windows: list[Window]):
    assert cut(frames, FULL) == windows


def test_the_rows_of_the_windows_are_the_tokens_of_the_clip():
    assert [sum(window.rows for window in cut(frames, FULL)) for frames in range(1, 2000)] == [
        audio_tokens(frames) for frames in range(1, 2000)
    ]


def test_one_clip_of_a_whole_chunk_gives_its_request_full_windows():
    assert shape_for([45, 100], FULL) == FULL
    assert shape_for([2530], FULL) == FULL


def test_clips_that_are_all_shorter_than_a_chunk_are_as_wide_as_the_longest():
    assert shape_for([45, 99, 7], FULL) == WindowShape(99, 1)
    assert cut(7, WindowShape(99, 1)) == [Window(0, 7, 1)]


def test_windows_go_in_batches_of_the_largest_bucket_and_the_rest_in_the_smallest_that_fits():
    buckets = (1, 2, 4, 8)
    assert batches(0, buckets) == []
    assert batches(3, buckets) == [Batch(0, 3, 4)]
    assert batches(8, buckets) == [Batch(0, 8, 8)]
    assert batches(17, buckets) == [Batch(0, 8, 8), Batch(8, 16, 8), Batch(16, 17, 1)]
    assert batches(3, (1,)) == [Batch(0, 1, 1), Batch(1, 2, 1), Batch(2, 3, 1)]
