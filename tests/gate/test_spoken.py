"""The round trip of spoken answers by hand: which are judged, their errors, and what the report says of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
import pytest

from gate.cell import Cell
from gate.record import JudgePlan, Record, RunData
from gate.report import headline
from gate.spoken import compare_spoken, names_to_judge, spoken_errors, unheard
from gate.summary import one_arm_exit_code
from gate.verdict import compare, exit_code
from gate.wer import WerComparison
from tests.gate.runs import A2T, T2S, WORDS, make_items, make_run
from tests.gate.test_report import rendered

changes = msgspec.structs.replace
A2S = changes(T2S, name="A2S@1", task="A2S", workload="clips")
EAR = JudgePlan(4, "Test ear 1.0")
MUMBLED = "f" * 64
STEADY = {"base": [2000, 2002], "head": [2001, 1999]}


def name_of(index: int, rate: int = 24000) -> str:
    """The name of the speech of request `index` in a run made by hand."""
    return f"{index:064d}-{rate}"


def spoken_run(
    change: Callable[[Record], Record] = lambda record: record,
    heard: Mapping[str, str] = {},
    judge: JudgePlan = EAR,
    cells: tuple[Cell, ...] = (T2S,),
) -> RunData:
    """A run whose speech is heard as it was meant, unless `heard` says otherwise."""
    run = make_run(STEADY, cells, change=lambda record: record if record.warm else change(record))
    words = {name_of(index): words for index, words in enumerate(WORDS)}
    return changes(run, plan=changes(run.plan, judge=judge), heard={**words, **heard})


def of_head(index: int, **values: object) -> Callable[[Record], Record]:
    """Change head's answer to one request, in every session."""
    return lambda record: changes(record, **values) if (record.arm, record.index) == ("head", index) else record


def found_in(run: RunData) -> WerComparison:
    (found,) = compare_spoken(run)
    return found


def test_equal_speech_is_judged_once_whatever_session_it_comes_from() -> None:
    run = spoken_run(of_head(1, pcm_sha256=MUMBLED))

    assert names_to_judge(run) == [*(name_of(index) for index in range(4)), f"{MUMBLED}-24000"]
    assert unheard(run) == [f"{MUMBLED}-24000"]


def test_equal_samples_at_another_rate_are_other_speech() -> None:
    run = spoken_run(of_head(3, sample_rate=16000))

    assert unheard(run) == [name_of(3, 16000)]


def test_warm_failed_silent_and_later_answers_are_not_judged() -> None:
    faults: dict[int, dict[str, object]] = {0: {"ok": False}, 1: {"pcm_sha256": None, "pcm_samples": 0}}
    run = spoken_run(lambda record: changes(record, **faults.get(record.index, {})), judge=JudgePlan(3, "ear"))

    assert names_to_judge(run) == [name_of(2)]


def test_text_cells_are_never_judged() -> None:
    assert names_to_judge(spoken_run(cells=(A2T,))) == []
    assert compare_spoken(spoken_run(cells=(A2T,))) == []


def test_what_was_heard_is_scored_against_the_answers_own_text() -> None:
    records = [
        changes(record, text="There are 12 bridges.", item="p07", audio_finish_reason=reason)
        for record, reason in zip(spoken_run().records[1:4], ("stop", "length", None), strict=True)
    ]
    heard = {name_of(0): "there are twelve bridges", name_of(1): "There are", name_of(2): ""}

    whole, cut, silent = spoken_errors(records, make_items(), heard)

    assert [(one.s, one.d, one.i, one.n) for one in (whole, cut, silent)] == [(0, 0, 0, 4), (0, 2, 0, 4), (0, 4, 0, 4)]
    assert [one.truncated for one in (whole, cut, silent)] == [False, True, False]
    assert [one.ended for one in (whole, cut, silent)] == [True, False, None]
    assert [one.empty for one in (whole, cut, silent)] == [False, False, True]
    assert whole.block == "p07"


def test_an_answer_without_words_has_no_rate() -> None:
    records = [changes(record, text="[laughs]") for record in spoken_run().records[1:3]]

    assert spoken_errors(records, make_items(), {name_of(0): "something", name_of(1): ""}) == []


def test_spoken_answers_to_clips_are_resampled_by_speaker() -> None:
    run = spoken_run(of_head(1, pcm_sha256=MUMBLED), {f"{MUMBLED}-24000": "turn right"}, cells=(A2S,))
    speech = {"pcm_samples": 15360, "sample_rate": 24000}
    records = [
        changes(record, pcm_sha256=record.pcm_sha256 or f"{record.index:064d}", text=WORDS[record.index], **speech)
        for record in run.records
    ]

    found = found_in(changes(run, records=records))

    assert (found.clips, found.blocks) == (4, 2)


def test_identical_speech_and_text_are_equal_by_construction() -> None:
    found = found_in(spoken_run(heard={name_of(1): "please turn left at the second bridge"}))

    assert (found.verdict, found.change) == ("identical", 0.0)
    assert [row.wer for row in [*found.base, *found.head]] == [pytest.approx(100 / 23)] * 4


def test_the_same_words_heard_in_other_speech_are_not_called_identical() -> None:
    found = found_in(spoken_run(of_head(1, pcm_sha256=MUMBLED), {f"{MUMBLED}-24000": WORDS[1]}))

    assert (found.verdict, found.change) == ("not worse", 0.0)


def test_answers_past_the_bound_do_not_make_speech_differ() -> None:
    found = found_in(spoken_run(of_head(3, pcm_sha256=MUMBLED), judge=JudgePlan(3, "ear")))

    assert (found.verdict, found.clips) == ("identical", 3)


def mumbles(record: Record) -> Record:
    return changes(record, pcm_sha256=MUMBLED) if record.arm == "head" else record


def test_a_head_that_mumbles_every_answer_is_worse_and_fails() -> None:
    run = spoken_run(mumbles, {f"{MUMBLED}-24000": "hm"})
    found = compare(run)

    assert [row.verdict for row in found.wer] == ["WER worse"]
    assert exit_code(found, expect_token_changes=True) == 1
    assert "WER worse in 1 cell" in headline(found)
    assert "- *WER worse*: T2S@1, round trip, by +100.00 points; listen to the answers that changed" in rendered(run)


def test_a_head_whose_text_differs_is_held_against_its_own_text() -> None:
    run = spoken_run(
        lambda record: changes(record, text="yes", pcm_sha256=MUMBLED) if record.arm == "head" else record,
        {f"{MUMBLED}-24000": "Yes!"},
    )

    assert [row.wer for row in found_in(run).head] == [0.0, 0.0]
    assert found_in(run).verdict == "not worse"


@pytest.mark.parametrize("why", ["install '.[judge]'", "--no-judge"])
def test_a_run_without_a_recogniser_says_why_in_the_row_and_fails_nothing(why: str) -> None:
    run = spoken_run(judge=JudgePlan(why_not=why))
    plain = make_run(STEADY, (T2S,))

    assert f"| T2S@1 round-trip WER % ↓ | – | – | – | – | not judged: {why} |" in rendered(run)
    assert "Spoken answers" not in rendered(run)
    assert exit_code(compare(run), False) == exit_code(compare(plain), False)


def test_speech_still_to_be_heard_gives_no_figure_and_leaves_the_run_unfinished() -> None:
    run = changes(spoken_run(), heard={name_of(0): WORDS[0]})
    found = compare(run)

    assert (found.wer[0].change, found.wer[0].base) == (None, [])
    assert exit_code(found, False) == 2
    assert headline(found).startswith("gate: unfinished, 3 recordings still to be heard · ")
    text = rendered(run)
    assert "not judged: 3 of 4 recordings still to be heard |" in text
    assert "*unfinished*: 3 recordings still to be heard; finish the run with `gate compare --resume`." in text


def test_a_run_of_one_arm_is_unfinished_too_until_its_speech_is_heard() -> None:
    run = make_run({"base": [2000]}, (T2S,))
    run = changes(run, plan=changes(run.plan, judge=EAR))
    all_heard = changes(run, heard={name_of(index): words for index, words in enumerate(WORDS)})

    assert one_arm_exit_code(compare(run)) == 2
    assert one_arm_exit_code(compare(all_heard)) == 0
    assert "| T2S@1 | base | 4 of 4 | 23 | 0.00 | 0 of 4 | 0 |" in rendered(all_heard)


def test_a_server_that_does_not_say_how_speech_ended_is_not_said_to_have_cut_it() -> None:
    text = rendered(spoken_run(lambda record: changes(record, audio_finish_reason=None)))

    assert "| T2S@1 | head | 8 of 8 | 46 | 0.00 | not stated | 0 |" in text


def test_the_bound_and_not_the_cell_says_how_many_answers_are_judged() -> None:
    text = rendered(spoken_run(judge=JudgePlan(2, "Test ear 1.0")))

    assert "| T2S@1 | base | 4 of 4 | 26 | 0.00 | 0 of 4 | 0 |" in text
    assert "Recogniser: Test ear 1.0; the first 2 answers of each cell and session." in text
