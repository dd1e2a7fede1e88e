from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np
import pytest

from gate.record import Record, RunData
from gate.wer import clip_errors, compare_wer, paired_interval, totals, word_errors
from tests.gate.runs import A2T, make_items, make_run


def heard(texts: Mapping[str, Mapping[int, str]], base: int = 2, head: int = 2) -> RunData:
    """A run in which an arm heard other words in some clips: {arm: {request: text}}."""

    def change(record: Record) -> Record:
        text = texts.get(record.arm, {}).get(record.index)
        return record if text is None else msgspec.structs.replace(record, text=text)

    return make_run({"base": [2000] * base, "head": [2000] * head}, [A2T], change=change)


@pytest.mark.parametrize(
    ("reference", "hypothesis", "expected"),
    [
        ("THE CAT SAT", "the cat sat", (0, 0, 0, 3)),
        ("the cat sat", "the dog sat down", (1, 0, 1, 3)),
        ("the cat sat", "the sat", (0, 1, 0, 3)),
        ("the cat sat", "", (0, 3, 0, 3)),
        ("it's twenty one degrees", "it is 21 degrees", (0, 0, 0, 4)),
        ("[noise]", "some words", (0, 0, 2, 0)),
        ("the colour", "the color", (1, 0, 0, 2)),  # the spelling map is empty
    ],
)
def test_word_errors_by_hand(reference: str, hypothesis: str, expected: tuple[int, int, int, int]) -> None:
    assert word_errors(reference, hypothesis) == expected


def test_the_rate_is_that_of_the_corpus_and_not_the_mean_of_clips() -> None:
    run = heard({"base": {0: "the kettle is on the table", 3: "somebody answered a telephone"}}, base=1, head=1)

    found = totals(
        "01-base", "base", "A2T@1", clip_errors([r for r in run.records if r.arm == "base"][1:], make_items())
    )

    assert (found.s, found.d, found.i, found.n, found.clips) == (3, 0, 0, 23, 4)
    assert found.wer == pytest.approx(100 * 3 / 23)
    assert found.over_half == 0


def test_empty_cut_and_mostly_wrong_outputs_are_counted() -> None:
    run = heard({"base": {0: "", 1: "no no no no"}}, base=1, head=1)
    records = [msgspec.structs.replace(r, finish_reason="length") for r in run.records if r.arm == "base"][1:]

    found = totals("01-base", "base", "A2T@1", clip_errors(records, make_items()))

    assert (found.empty, found.truncated, found.over_half) == (1, 4, 2)


def test_failed_clips_have_no_words() -> None:
    run = heard({}, base=1, head=1)
    records = [msgspec.structs.replace(r, ok=r.index != 2) for r in run.records if r.arm == "base"][1:]

    assert [clip.item for clip in clip_errors(records, make_items())] == ["c00", "c01", "c03"]


def test_identical_text_is_equal_by_construction() -> None:
    (found,) = compare_wer(heard({}))

    assert (found.verdict, found.change, found.low, found.high) == ("identical", 0.0, 0.0, 0.0)
    assert [row.wer for row in [*found.base, *found.head]] == [0.0] * 4


def test_words_lost_on_every_clip_are_worse() -> None:
    (found,) = compare_wer(heard({"head": dict.fromkeys(range(4), "nothing of it")}))

    assert found.verdict == "WER worse"
    assert found.change == pytest.approx(100.0)
    assert found.low is not None and found.low > 0
    assert (found.clips, found.blocks) == (4, 2)


def test_one_speaker_of_two_is_not_enough_to_say_worse() -> None:
    # clips 0 and 2 share a speaker; a resample that draws only the other one shows no change
    (found,) = compare_wer(heard({"head": {0: "the kettle was on a stove"}}))

    assert found.change == pytest.approx(100 * 2 / 23)
    assert found.low == 0.0
    assert found.verdict == "not worse"


def test_better_words_are_not_worse() -> None:
    (found,) = compare_wer(heard({"base": dict.fromkeys(range(4), "nothing of it")}))

    assert found.verdict == "not worse"
    assert found.high is not None and found.high < 0


def test_a_change_under_half_a_point_is_not_worse_however_sure() -> None:
    # 0.4 points on each of 20 speakers
    sums = np.array([[10.0, 1000.0, 14.0, 1000.0]] * 20)

    assert paired_interval(sums, 0) == (pytest.approx(0.4), pytest.approx(0.4), pytest.approx(0.4))


def test_one_seed_gives_one_interval() -> None:
    sums = np.array([[1.0, 50.0, 4.0, 50.0], [3.0, 60.0, 3.0, 60.0], [0.0, 40.0, 2.0, 40.0]])

    assert paired_interval(sums, 3) == paired_interval(sums, 3)
    change, low, high = paired_interval(sums, 3)
    assert change == pytest.approx(100 * 5 / 150)
    assert low == pytest.approx(0.0)
    assert high == pytest.approx(6.0)


def test_each_arm_is_divided_by_its_own_words() -> None:
    # 10 of 100 words wrong, then 20 of 400: better, though there are more errors
    assert paired_interval(np.array([[10.0, 100.0, 20.0, 400.0]] * 3), 0) == (pytest.approx(-5.0),) * 3


def test_a_cell_without_any_text_has_no_verdict() -> None:
    run = make_run({"base": [2000], "head": [2000]}, [A2T], change=lambda r: msgspec.structs.replace(r, ok=False))

    (found,) = compare_wer(run)

    assert (found.verdict, found.change, found.clips) == ("no verdict", None, 0)


@pytest.mark.parametrize("arm", ["base", "head"])
def test_a_run_of_one_arm_has_its_clips_and_nothing_to_compare_them_with(arm: str) -> None:
    run = make_run({arm: [2000, 2000]}, [A2T])

    (found,) = compare_wer(run)

    assert (found.verdict, found.change, found.low, found.clips, found.blocks) == ("measured", None, None, 4, 2)
    assert [row.clips for row in [*found.base, *found.head]] == [4, 4]


def test_a_run_of_one_arm_whose_requests_failed_has_no_words() -> None:
    run = make_run({"base": [2000]}, [A2T], change=lambda r: msgspec.structs.replace(r, ok=False))

    (found,) = compare_wer(run)

    assert (found.verdict, found.base, found.clips) == ("no verdict", [], 0)
