"""The report, whole. `golden/report.md` was read line by line against the run below, whose every number is made by hand.

After a change of the layout: `python -m tests.gate.test_report` writes it again; read it before it is committed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from gate.record import JudgePlan, Lag, Record, RunData, SessionInfo
from gate.report import outliers, render_report, report_json
from gate.verdict import compare
from tests.gate.runs import A2T, SOURCE, T2S, T2T, WEIGHTS, WORDS, make_run

GOLDEN = Path(__file__).parent / "golden" / "report.md"
STEADY = {"base": [2000, 2002, 1998], "head": [2001, 1999, 2000]}
T2T_4 = msgspec.structs.replace(T2T, name="T2T@4", greedy=False)

changes = msgspec.structs.replace


def planted_run() -> RunData:
    """Head: decode 30 % slower, a flipped token, other words in two clips, a mumbled and a failed answer; base: a slow boot."""

    def change(record: Record) -> Record:
        if record.warm:
            return record
        if record.cell == "T2T@4":
            return changes(record, **_as_fast_as_base(record))
        if record.arm == "head" and record.cell == "T2T@1" and record.index == 2:
            return changes(record, token_ids=[*record.token_ids[:5], 7, *record.token_ids[6:]])
        if record.arm == "head" and record.cell == "A2T@1" and record.index in (0, 3):
            return changes(record, text="nobody <unk> | answered")
        if record.arm == "head" and record.cell == "T2S@1" and record.index == 2:
            return changes(record, pcm_sha256="f" * 64)
        if record.session == "03-head" and record.cell == "T2S@1" and record.index == 1:
            return changes(record, ok=False, error="HTTP 500: internal (speech): a|b", pcm_samples=0, pcm_sha256=None)
        return record

    def info(session: SessionInfo) -> SessionInfo:
        counters = {
            "T2T@1 walkgate_steps_total": 44.0,
            "T2T@1 walkgate_plan_cache_hits_total": 40.0 if session.arm == "base" else 36.0,
            "T2T@1 walkgate_step_seconds_sum": 0.1 + session.slot / 100,
        }
        lag = {"T2T@1": Lag(0.1, 0.5, 1.5 + session.slot), "A2T@1": Lag(0.2, 0.9, 1.0)}
        return changes(session, counters=counters, client_lag=lag)

    gaps = {"base": [2000, 2002, 2100], "head": [2600, 2604, 2597]}
    run = make_run(gaps, [T2T, T2T_4, A2T, T2S], change=change, info=info)
    heard = {f"{index:064d}-24000": words for index, words in enumerate(WORDS)}
    heard[f"{'f' * 64}-24000"] = "she walked seven miles"
    plan = changes(run.plan, judge=JudgePlan(3, "Test ear 1.0"))
    return changes(run, plan=plan, heard=heard)


def _as_fast_as_base(record: Record) -> dict[str, object]:
    """Stamps of a cell that head did not touch: 30 ms a request on both arms."""
    events = [changes(event, t_us=10_000 + 2000 * step) for step, event in enumerate(record.events)]
    return {"events": events, "e2e_us": 30_000, "t0_ns": 1_000_000_000 + 30_000_000 * record.index}


def rendered(run: RunData) -> str:
    return render_report(run, compare(run))


def test_the_whole_report_is_the_golden_one() -> None:
    assert rendered(planted_run()) == GOLDEN.read_text(encoding="utf-8")


def test_the_same_run_from_json_gives_the_same_bytes() -> None:
    run = planted_run()
    again = msgspec.json.decode(msgspec.json.encode(run), type=RunData)

    assert rendered(again).encode() == rendered(run).encode()
    assert report_json(again, compare(again)).encode() == report_json(run, compare(run)).encode()


def test_the_order_in_which_records_and_sessions_were_read_changes_nothing() -> None:
    run = planted_run()
    shuffled = changes(run, records=run.records[::-1], sessions=run.sessions[::-1])

    assert rendered(shuffled) == rendered(run)


def dead_head(record: Record) -> Record:
    return changes(record, ok=False, error="gone") if record.arm == "head" and not record.warm else record


def dead_base(record: Record) -> Record:
    return changes(record, ok=False, error="gone") if record.arm == "base" and not record.warm else record


def same(session: SessionInfo) -> SessionInfo:
    return session


def other_weights(session: SessionInfo) -> SessionInfo:
    return changes(session, weights_digest="0" * 64)


def text_only_base(session: SessionInfo) -> SessionInfo:
    return changes(session, info={"tasks": ["A2T"]}) if session.arm == "base" else session


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (make_run({"base": [2000, 2001], "head": [2600, 2601]}), "| **regression** |"),
        (make_run({"base": [2600, 2601], "head": [2000, 2001]}), "| **improvement** |"),
        (make_run(STEADY), "| equivalent within 2 % |"),
        (make_run({"base": [2000, 2300], "head": [2100, 2400]}), "| no verdict |"),
        (make_run(STEADY, change=dead_head), "| **broken head** |"),
        (make_run(STEADY, change=dead_base), "| **broken base** |"),
        (make_run(STEADY, info=other_weights), "| **invalid** |"),
        (make_run(STEADY, info=text_only_base), "| **new in head** |"),
    ],
)
def test_each_verdict_stands_in_the_table_by_its_own_words(run: RunData, words: str) -> None:
    rows = [line for line in rendered(run).splitlines() if line.startswith("| T2T@1 tok/s ↑ |")]

    assert len(rows) == 1
    assert rows[0].endswith(words)


def test_no_verdict_is_never_the_word_for_no_regression() -> None:
    text = rendered(make_run({"base": [2000, 2300], "head": [2100, 2400]}))

    assert "1 cell without a verdict" in text
    assert re.search(r"could still hide a loss of up to \d+\.\d %; about \d+ sessions an arm would settle 1 of 1", text)


def test_an_audio_cell_has_a_row_for_its_words_and_one_for_its_speed() -> None:
    lines = rendered(make_run(STEADY, [A2T])).splitlines()

    assert sum(line.startswith("| A2T@1 RTFx (input audio) ↑ |") for line in lines) == 1
    (wer,) = [line for line in lines if line.startswith("| A2T@1 WER % ↓ (4 clips) |")]
    assert wer.endswith("identical text, WER equal by construction |")


def test_what_was_not_measured_is_not_traced_and_not_zero() -> None:
    run = make_run(STEADY, info=lambda session: changes(session, host_before={}, host_after={}, info={}, counters={}))

    text = rendered(run)

    assert "machine not traced" in text
    assert "kernels not traced in this run" in text
    assert "versions: not traced; switched off: not traced" in text


def test_the_only_date_is_the_plans() -> None:
    stamp: Callable[[SessionInfo], SessionInfo] = lambda session: changes(  # noqa: E731 (a def for one expression hides it)
        session, host_before={**session.host_before, "time_unix_s": 1767322000.0}
    )

    text = rendered(make_run(STEADY, info=stamp))

    assert re.findall(r"20\d\d-\d\d-\d\d\S*", text) == ["2026-01-02T03:04:05Z,"]
    assert "1767322000" not in text


def test_a_run_of_one_arm_is_a_table_of_numbers() -> None:
    text = rendered(make_run({"base": [2000, 2010]}, [T2T, T2S]))

    assert text.startswith("### ⚖️ gate: one arm measured, nothing to compare it with · nothing broken\n")
    assert "| T2T@1 tok/s ↑ | 366.7 365.4 | measured |" in text
    assert "verdict came about" not in text


def test_the_words_of_one_arm_are_a_table_of_numbers_also_before_it_is_whole() -> None:
    run = make_run({"base": [2000, 2010]}, [A2T, T2S])
    row = "| A2T@1 WER % ↓ (4 clips) | 0.00 0.00 | measured |"
    first = [record for record in run.records if record.session == "01-base"]
    cut = changes(run, sessions=run.sessions[:1], records=first)

    lines = rendered(run).splitlines()
    start = lines.index("**Words**")
    assert lines[start + 2 : start + 5] == ["| cell | sessions | state |", "|---|---|---|", row]
    assert lines[start + 5].startswith("| T2S@1 round-trip WER % ↓ | – | not judged: ")
    assert "intervals are narrower" not in rendered(run)
    assert row.replace("0.00 0.00", "0.00") in rendered(cut)


def test_the_command_that_asks_for_the_run_again_is_whole() -> None:
    run = make_run(STEADY)
    command = f"gate compare main HEAD --head-env {'X' * 400}=1 --device cuda"

    row = f"| again | `{command}`, where `main` was bbbbbbbbbbbb and `HEAD` was cccccccccccc |"
    assert row in rendered(changes(run, plan=changes(run.plan, command=command)))


@pytest.mark.parametrize(
    ("command", "head", "told"),
    [
        (
            "gate compare bbbbbbbb .",
            {"ref": ".", "kind": "snapshot", "dirty": True},
            "a working tree with changes on cccccccccccc, which is not kept",
        ),
        ("gate compare bbbbbbbb .", {"ref": ".", "kind": "snapshot"}, "a working tree as in cccccccccccc"),
        ("gate compare bbbbbbbb v1", {"ref": "v1"}, "cccccccccccc"),
        (f"gate compare bbbbbbbb {'c' * 40}", {"ref": "c" * 40}, ""),
        ("gate demo --sessions 3", {}, ""),
    ],
)
def test_what_a_ref_of_the_command_was_is_said_where_it_may_be_another_later(
    command: str, head: dict[str, object], told: str
) -> None:
    run = make_run(STEADY)
    arms = (changes(run.plan.arms[0], ref="bbbbbbbb"), changes(run.plan.arms[1], **head))
    text = rendered(changes(run, plan=changes(run.plan, arms=arms, command=command)))
    assert f"| again | `{command}`{f', where `{command.split()[-1]}` was {told}' if told else ''} |" in text


def test_one_cause_in_several_sessions_and_cells_is_one_line_with_its_log() -> None:
    def change(record: Record) -> Record:
        if record.arm == "base" or record.warm or record.index % 2 == 0 or record.cell == "A2T@1":
            return record
        number = int(record.session[:2]) * 10 + record.index  # another id each time
        return changes(record, ok=False, error=f"engine: request {number:032x} ended: it raised")

    run = make_run({"base": [2000, 2001], "head": [2000, 2001]}, [T2T, T2T_4, A2T], change=change)
    text, found = rendered(run), compare(run)
    first = found.faults[0].words.partition("(")[2]
    assert len(found.faults) == 4 and "faults: 1 entry below" in text
    assert [line for line in text.splitlines() if line.startswith("- head, ")] == [
        f"- head, T2T@1, T2T@4, failed: 02-head, 03-head: 8 of 16 requests failed ({first}; see `sessions/02-head/server.log`"
    ]
    assert len(json.loads(report_json(run, found))["comparisons"]["faults"]) == 4
    url = changes(run, plan=changes(run.plan, arms=tuple(changes(arm, kind="url") for arm in run.plan.arms)))
    assert "server.log" not in rendered(url)


def test_faults_with_other_reasons_keep_their_lines() -> None:
    def change(record: Record) -> Record:
        sound = record.arm == "base" or record.warm or record.index != 1
        return record if sound else changes(record, ok=False, error=f"of {record.session}")

    text = rendered(make_run({"base": [2000, 2001], "head": [2000, 2001]}, [T2T], change=change))
    rows = [line for line in text.splitlines() if line.startswith("- head, ")]
    assert [row.rpartition("; see ")[2] for row in rows] == [
        "`sessions/02-head/server.log`",
        "`sessions/03-head/server.log`",
    ]


def test_a_run_without_any_session_still_has_a_report() -> None:
    run = changes(make_run(STEADY, change=lambda _: None), sessions=[])

    text = rendered(run)

    assert "0+0 sessions begun of 3+3 planned" in text
    assert "no verdict: 0 of 6 planned sessions measured; finish with --resume" in text
    assert "6 planned sessions" in text


def test_sessions_that_stand_out_are_found_and_close_ones_are_not() -> None:
    found = outliers([282, 311, 312])

    assert found[0] == pytest.approx(-0.0995, abs=1e-4)
    assert found[1:] == [None, None]
    assert outliers([1719, 1799, 1793])[0] is not None
    assert outliers([249.1, 247.1, 248.6]) == [None, None, None]
    assert outliers([282, 311]) == [None, None]


def test_the_json_says_what_the_markdown_says() -> None:
    run = planted_run()

    facts = json.loads(report_json(run, compare(run)))

    assert facts["schema"] == "gate/1"
    assert {cell["cell"]: cell["verdict"] for cell in facts["comparisons"]["cells"]} == {
        "T2T@1": "regression",
        "T2T@4": "equivalent",
        "A2T@1": "regression",
        "T2S@1": "broken head",
    }
    assert facts["comparisons"]["moves"][0]["item"] == "p02"
    assert facts["plan"]["seed"] == 7


def test_a_cell_with_too_few_records_is_named_with_their_number() -> None:
    def cut(record: Record) -> Record | None:
        return None if record.session == "02-head" and not record.warm and record.index == 3 else record

    text = rendered(make_run(STEADY, change=cut))

    assert "**Incomplete**" in text
    assert "\n- 02-head: T2T@1 has 3 of 4 records\n" in text
    assert "Incomplete" not in rendered(make_run(STEADY))


def test_nothing_blocks_says_that_the_exit_code_is_2_all_the_same() -> None:
    text = rendered(make_run({"base": [2000, 2300], "head": [2100, 2400]}))

    assert "nothing blocks (exit 2: undecided). *no verdict*" in text


@pytest.mark.parametrize(
    ("host", "line"),
    [
        ({"heavy_processes": [{"pid": 1, "name": "a", "percent": 29.0}]}, None),
        (
            {"heavy_processes": [{"pid": 1, "name": "a", "percent": 90.0}, {"pid": 2, "name": "b", "percent": 60.0}]},
            "⚠️ other processes used up to 1.5 cores during sessions 02-head: repeat on a quiet machine.",
        ),
        ({"throttled_s": 2.2}, "⚠️ a CPU quota took up to 3% of sessions 02-head: repeat on a quiet machine."),
    ],
)
def test_a_machine_that_was_not_quiet_is_said_under_the_headline(host: dict[str, object], line: str | None) -> None:
    def disturbed(session: SessionInfo) -> SessionInfo:
        after = {**session.host_after, **host}
        return changes(session, host_after=after) if session.id == "02-head" else session

    lines = rendered(make_run(STEADY, info=disturbed)).splitlines()

    assert lines[2] == line if line else "quiet machine" not in "\n".join(lines)


def at_urls(run: RunData) -> RunData:
    arms = tuple(
        changes(arm, kind="url", ref=f"http://{arm.name}:1", commit=None, source_digest="") for arm in run.plan.arms
    )
    plan = changes(run.plan, arms=arms, model_path="", model_digest="", door="openai")
    return changes(run, plan=plan)


def test_verdicts_on_servers_that_were_not_booted_are_marked_and_what_was_not_checked_is_said() -> None:
    def silent(session: SessionInfo) -> SessionInfo:
        return changes(session, info={}, source_digest="", weights_digest="") if session.arm == "head" else session

    def as_text(record: Record) -> Record:
        said = "one two" if record.arm == "base" or record.index else "one |"
        return changes(record, token_ids=[], top2=[], text=said)

    slower = {"base": [2000, 2001], "head": [2600, 2601]}
    text = rendered(at_urls(make_run(slower, change=as_text, info=silent)))
    lines = text.splitlines()
    (row,) = [line for line in lines if line.startswith("| T2T@1 tok/s ↑ |")]
    assert row.endswith("| **regression** (one boot) |")
    assert f"- base: `http://base:1` (URL), source {SOURCE['base']}, not checked (URL arm), weights {WEIGHTS}" in lines
    assert "- head: `http://head:1` (URL), a peer: no /info, source not checked (URL arm)" in lines
    assert [line for line in lines if "pinned" in line] == [
        f"- {arm}: URL arm: its server is not pinned by the gate" for arm in ("base", "head")
    ]
    assert any(
        line.startswith("- one boot: every session of base and head met the same running server") for line in lines
    )
    assert "| T2T@1 | `p00` | 4 | `'t'` | `'\\|'` | margin not traced | 2 of 2 |" in lines
    assert "| model | each arm its own; the gate named none |" in lines
    assert "| door | POST /v1/chat/completions, tokens counted by usage and compared as text |" in lines


def test_arms_that_did_not_read_the_same_prompt_are_named_with_their_counts() -> None:
    def longer(record: Record) -> Record:
        return changes(record, prompt_tokens=8) if record.arm == "head" and record.index == 3 else record

    gaps = {"base": [2000, 2001], "head": [2000, 2001]}
    told = "- prompt tokens a request, base and head: T2T@1 5 and 5.750 (equal in 3 of 4 requests). **The arms did not read"
    assert told in rendered(at_urls(make_run(gaps, change=longer)))
    assert "T2T@1 5 and 5. Equal in every request." in rendered(at_urls(make_run(gaps)))
    assert "prompt tokens" not in rendered(make_run(gaps))


def test_a_session_that_took_two_boots_says_so() -> None:
    text = rendered(make_run(STEADY, info=lambda s: changes(s, boots=2 if s.id == "02-head" else 1)))
    assert "| 02-head (2 boots) | 2.5 |" in text and "| 01-base | 2.5 |" in text


def test_the_report_of_a_stopped_run_says_so_first_with_base_before_head_and_what_to_do() -> None:
    run = make_run({"base": [2000, 2001], "head": [4000, 4001]})
    cut = changes(
        run,
        plan=changes(run.plan, order=["head", "base", "base", "head"]),
        sessions=[session for session in run.sessions if session.id != "03-head"],
        records=[record for record in run.records if record.session != "03-head"],
    )
    lines = rendered(cut).splitlines()
    assert lines[0].startswith("### ⚖️ gate: unfinished, 3 of 4 planned sessions measured · 0 regressions,")
    assert "2+1 sessions begun of 2+2 planned" in lines[2]
    told = "*unfinished*: 3 of 4 planned sessions measured; finish the run with `gate compare --resume`."
    assert f"**What you need to do:** nothing blocks (exit 2: undecided). {told}" in lines
    (row,) = [line for line in lines if line.startswith("| T2T@1 tok/s ↑ |")]
    assert row.endswith("| – | – | no verdict: 3 of 4 planned sessions measured; finish with --resume |")
    alone = make_run({"base": [2000, 2010]})
    alone = changes(alone, sessions=alone.sessions[:1], records=[r for r in alone.records if r.session == "01-base"])
    assert rendered(alone).startswith("### ⚖️ gate: unfinished, 1 of 2 planned sessions measured · one arm measured")
    assert f"**What you need to do:** {told.replace('3 of 4', '1 of 2')}" in rendered(alone).splitlines()


def test_tokens_are_not_called_unmoved_before_base_has_run_twice() -> None:
    run = make_run({"base": [2000, 2001], "head": [2000, 2001]})
    early = changes(
        run, sessions=run.sessions[:2], records=[r for r in run.records if r.session in ("01-base", "02-head")]
    )
    text = rendered(early)
    assert "tokens: not judged yet" in text.splitlines()[0]
    assert "Moved tokens are not judged before base has run twice." in text and "No token moved" not in text


def test_an_interval_that_spans_a_factor_of_ten_is_no_interval() -> None:
    wild = make_run({"base": [2000, 20000], "head": [2100, 15000]})
    assert "| too few sessions for an interval | no verdict |" in rendered(wild)
    assert "only over 100 %" in rendered(wild)
    assert "too few sessions for an interval" not in rendered(make_run({"base": [2000, 2300], "head": [2100, 2400]}))


if __name__ == "__main__":
    GOLDEN.write_text(rendered(planted_run()), encoding="utf-8")
