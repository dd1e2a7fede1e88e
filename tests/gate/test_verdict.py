from __future__ import annotations

import itertools
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gate.cell import Cell
from gate.record import Record, RunData, SessionInfo, Thresholds
from gate.stats import contrast
from gate.verdict import CellComparison, compare, exit_code, find_faults, speed_verdict, throttled_share
from gate.wer import WerComparison
from tests.gate.runs import A2T, SOURCE, T2S, T2T, make_run

STEADY = {"base": [2000, 2002, 1998], "head": [2001, 1999, 2000]}
SLOWER = {"base": [2000, 2002, 1998], "head": [2600, 2604, 2597]}

changes = msgspec.structs.replace


def verdicts(run: RunData) -> dict[str, str]:
    return {cell.cell: cell.verdict for cell in compare(run).cells}


def failing(arm: str, cell: str = "T2T@1", index: int = 1) -> Callable[[Record], Record]:
    def change(record: Record) -> Record:
        hit = record.arm == arm and record.cell == cell and record.index == index and not record.warm
        return changes(record, ok=False, error="HTTP 500: boom\nmore") if hit else record

    return change


def with_info(arm: str, **values: object) -> Callable[[SessionInfo], SessionInfo]:
    return lambda session: changes(session, **values) if session.arm == arm else session


def code(run: RunData, expect_token_changes: bool = False) -> int:
    return exit_code(compare(run), expect_token_changes)


# --- speed ---------------------------------------------------------------------------------------------------------------


def test_a_planted_slow_down_is_a_regression() -> None:
    run = make_run(SLOWER)

    (cell,) = compare(run).cells

    # 44 tokens in 0.12 s against 44 in 0.144 s
    assert cell.verdict == "regression"
    assert cell.contrast is not None
    assert [round(row.value, 1) for row in (cell.base[0], cell.head[0])] == [366.7, 305.6]
    # the fastest of each: 4 · 29.98 ms against 4 · 35.97 ms
    assert cell.best_change == pytest.approx(-0.1665, abs=1e-4)
    assert code(run) == 1


def test_its_mirror_is_an_improvement() -> None:
    run = make_run({"base": SLOWER["head"], "head": SLOWER["base"]})

    assert (verdicts(run), code(run)) == ({"T2T@1": "improvement"}, 0)


def test_equal_arms_are_equivalent() -> None:
    assert (verdicts(make_run(STEADY)), code(make_run(STEADY))) == ({"T2T@1": "equivalent"}, 0)


def test_a_noisy_pair_has_no_verdict_and_says_what_it_does_not_exclude() -> None:
    run = make_run({"base": [2000, 2300], "head": [2100, 2400]})

    (cell,) = compare(run).cells

    assert (cell.verdict, code(run)) == ("no verdict", 2)
    assert cell.loss_not_excluded is not None and cell.loss_not_excluded > 0.1
    assert cell.settle_sessions is not None and cell.settle_sessions > 2
    assert cell.detectable is not None and cell.detectable > 0.1


def test_one_session_an_arm_has_no_verdict_however_large_the_change() -> None:
    run = make_run({"base": [2000], "head": [4000]})

    (cell,) = compare(run).cells

    assert (cell.verdict, cell.reasons) == ("no verdict", ["fewer than two sessions an arm have no spread to judge by"])
    assert code(run) == 2


def test_a_sure_change_under_the_floor_is_no_regression() -> None:
    limits = Thresholds()
    found = contrast([100.0] * 5, [99.0] * 5, 0.0001)

    assert found is not None and found.p is not None and found.p < 1e-6
    assert speed_verdict("tok/s", found, found.p, limits) == "equivalent"
    assert speed_verdict("tok/s", contrast([100.0] * 5, [97.9] * 5, 0.0001), 1e-9, limits) == "regression"


def test_holm_counts_every_cell() -> None:
    # p = 0.0305 alone; eight more cells that stay undecided raise it over 0.05
    noisy = {"base": [2000, 2060, 1940], "head": [2200, 2260, 2140]}
    alone = make_run(noisy)
    cells = [changes(T2T, name=f"T2T@{number}") for number in range(1, 10)]
    many = make_run(noisy, cells)

    assert verdicts(alone) == {"T2T@1": "regression"}
    assert set(verdicts(many).values()) == {"no verdict"}


@given(
    st.lists(st.floats(50.0, 200.0), min_size=2, max_size=5), st.lists(st.floats(50.0, 200.0), min_size=2, max_size=5)
)
def test_swapping_the_arms_turns_a_regression_into_an_improvement(base: list[float], head: list[float]) -> None:
    there, back = contrast(base, head, 0.005), contrast(head, base, 0.005)
    assert there is not None and back is not None
    mirrored = {"regression": "improvement", "improvement": "regression"}

    # Nearer to nothing than this, the floor decides; as a ratio it is not the same distance up and down.
    if abs(there.estimate) > 0.03:
        found = speed_verdict("tok/s", there, there.p, Thresholds())
        assert speed_verdict("tok/s", back, back.p, Thresholds()) == mirrored.get(found, found)


# --- tokens ----------------------------------------------------------------------------------------------------------------


def test_a_flipped_token_is_named_and_fails_unless_it_was_expected() -> None:
    def change(record: Record) -> Record:
        hit = record.arm == "head" and record.index == 2 and not record.warm
        return changes(record, token_ids=[*record.token_ids[:5], 7, *record.token_ids[6:]]) if hit else record

    run = make_run(STEADY, change=change)

    (move,) = compare(run).moves
    assert (move.cell, move.item, move.step, move.base_token, move.head_token) == ("T2T@1", "p02", 5, 125, 7)
    assert (verdicts(run)["T2T@1"], code(run), code(run, expect_token_changes=True)) == ("equivalent", 1, 0)


# --- broken and invalid --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("arm", "verdict", "expected"), [("head", "broken head", 1), ("base", "broken base", 3)])
def test_a_failed_request_on_one_arm_breaks_that_arm_and_no_speed_is_judged(
    arm: str, verdict: str, expected: int
) -> None:
    run = make_run(SLOWER, change=failing(arm))

    (cell,) = compare(run).cells

    assert (cell.verdict, code(run)) == (verdict, expected)
    assert cell.p_holm is None
    name = "02-head" if arm == "head" else "01-base"
    assert cell.reasons[0] == f"{name}: 1 of 4 requests failed (first: request 1, p01: HTTP 500: boom)"


def test_failures_on_both_arms_are_invalid_and_blame_neither() -> None:
    run = make_run(SLOWER, change=lambda record: failing("base")(failing("head")(record)))

    assert (verdicts(run), code(run)) == ({"T2T@1": "invalid"}, 3)


def test_a_broken_cell_leaves_the_others_their_verdict() -> None:
    run = make_run(SLOWER, [T2T, A2T, T2S], change=failing("head", "T2S@1"))

    assert verdicts(run) == {"T2T@1": "regression", "A2T@1": "regression", "T2S@1": "broken head"}


@pytest.mark.parametrize(
    ("cell", "values", "kind"),
    [
        (T2S, {"pcm_samples": 0, "pcm_sha256": None}, "missing audio"),
        (T2T, {"completion_tokens": 10}, "short"),
        (A2T, {"completion_tokens": 0}, "short"),
        (T2S, {"audio_finish_reason": "stop"}, "short"),
    ],
)
def test_output_that_is_missing_or_short_on_head_breaks_head(cell: Cell, values: dict[str, object], kind: str) -> None:
    run = make_run(
        STEADY,
        [cell],
        change=lambda r: changes(r, **values) if r.session == "02-head" and r.index == 3 and not r.warm else r,
    )

    assert [(fault.kind, fault.session, fault.count, fault.of) for fault in find_faults(run)] == [
        (kind, "02-head", 1, 4)
    ]
    assert verdicts(run) == {cell.name: "broken head"}


def test_a_failed_warm_request_breaks_nothing() -> None:
    run = make_run(STEADY, change=lambda record: changes(record, ok=not record.warm))

    assert verdicts(run) == {"T2T@1": "equivalent"}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"source_digest": "0" * 64}, "02-head served source 000000000000, the plan's tree is 4ead4ead4ead"),
        ({"weights_digest": "0" * 64}, "02-head loaded weights 000000000000, the plan names da7ada7ada7a"),
    ],
)
def test_another_source_or_other_weights_are_invalid_everywhere(values: dict[str, object], words: str) -> None:
    run = make_run(SLOWER, [T2T, A2T], info=with_info("head", **values))

    assert verdicts(run) == {"T2T@1": "invalid", "A2T@1": "invalid"}
    assert compare(run).cells[0].reasons[0] == words
    assert code(run) == 3
    assert SOURCE["head"].startswith("4ead")


def test_a_quota_that_held_a_session_back_for_over_a_twentieth_of_its_core_time_is_invalid() -> None:
    def throttled(seconds: float) -> RunData:
        def info(session: SessionInfo) -> SessionInfo:
            slow = session.id == "02-head"
            return changes(session, host_after={**session.host_after, "throttled_s": 1.0 + seconds * slow})

        return make_run(STEADY, info=info)

    # 20 s on 2 cores
    assert throttled_share(throttled(1.0).sessions[1]) == pytest.approx(0.025)
    assert verdicts(throttled(1.9)) == {"T2T@1": "equivalent"}
    assert verdicts(throttled(2.1)) == {"T2T@1": "invalid"}


@pytest.mark.parametrize(("arm", "verdict", "expected"), [("head", "broken head", 1), ("base", "broken base", 3)])
def test_a_server_that_died_breaks_its_arm_even_after_its_last_cell(arm: str, verdict: str, expected: int) -> None:
    run = make_run(STEADY, info=with_info(arm, problems=["the server ended with exit code -11\n  log"]))

    found = compare(run)

    assert (found.arm_verdict, exit_code(found, False)) == (verdict, expected)
    assert found.faults[0].words.endswith(": the server ended with exit code -11")


def test_servers_that_died_on_both_arms_are_invalid() -> None:
    run = make_run(STEADY, info=lambda session: changes(session, problems=["gone"]))

    assert (compare(run).arm_verdict, code(run)) == ("invalid", 3)


# --- what can't be compared -----------------------------------------------------------------------------------------------


def test_a_task_that_only_head_serves_is_new_there_and_its_failures_on_base_are_none_of_heads() -> None:
    run = make_run(
        STEADY, [T2T, T2S], change=failing("base", "T2S@1"), info=with_info("base", info={"tasks": ["T2T", "A2T"]})
    )

    assert (verdicts(run), code(run)) == ({"T2T@1": "equivalent", "T2S@1": "new in head"}, 0)


def test_a_task_that_head_no_longer_serves_is_broken() -> None:
    run = make_run(STEADY, [T2S], change=failing("head", "T2S@1"), info=with_info("head", info={"tasks": ["T2T"]}))

    (cell,) = compare(run).cells
    assert (cell.verdict, cell.reasons[0]) == ("broken head", "head's /info no longer lists T2S")


def test_sessions_that_did_not_reach_a_cell_are_named_and_not_counted() -> None:
    run = make_run(STEADY, [T2T, A2T], change=lambda r: None if (r.session, r.cell) == ("06-head", "A2T@1") else r)
    assert [session.id for session in run.sessions][-1] == "06-head"

    found = compare(run)

    assert found.unfinished == [("06-head", "A2T@1")]
    assert [len(cell.head) for cell in found.cells] == [3, 2]
    assert not found.faults


def test_a_metric_that_no_request_has_gives_no_verdict() -> None:
    run = make_run(STEADY, [changes(T2T, max_tokens=1, primary="ITL p50")])

    (cell,) = compare(run).cells
    assert (cell.verdict, cell.reasons, code(run)) == ("no verdict", ["ITL p50 has no value on base and head"], 2)


def test_a_run_of_one_arm_is_measured_and_not_judged() -> None:
    run = make_run({"base": [2000, 2010]})

    found = compare(run)

    assert (found.single, found.moves, [cell.verdict for cell in found.cells]) == (True, [], ["measured"])
    assert exit_code(found, False) == 0
    assert code(make_run({"base": [2000]}, change=failing("base"))) == 3


# --- exit codes -------------------------------------------------------------------------------------------------------------

ALL = ("regression", "broken head", "invalid", "broken base", "no verdict", "equivalent", "improvement", "new in head")


def bare(verdict: str) -> CellComparison:
    return CellComparison("T2T@1", "T2T", "tok/s", 0.02, [], [], None, None, verdict, [])


@pytest.mark.parametrize("both", list(itertools.product(ALL, ALL)))
def test_the_exit_code_of_any_two_verdicts_is_that_of_the_more_urgent(both: tuple[str, str]) -> None:
    found = changes(compare(make_run(STEADY)), cells=[bare(verdict) for verdict in both])

    first = min(ALL.index(verdict) for verdict in both)

    assert exit_code(found, False) == {0: 1, 1: 1, 2: 3, 3: 3, 4: 2}.get(first, 0)


def test_worse_words_fail_like_a_regression() -> None:
    worse = WerComparison("A2T@1", [], [], 2.0, 1.0, 3.0, 100, 20, "WER worse")
    found = changes(compare(make_run(STEADY)), wer=[worse])

    assert exit_code(found, True) == 1


def test_the_same_run_gives_an_equal_comparison() -> None:
    assert compare(make_run(SLOWER, [T2T, A2T, T2S])) == compare(make_run(SLOWER, [T2T, A2T, T2S]))


def as_urls(run: RunData) -> RunData:
    """The same run with both arms at URLs: no tree, no model of the plan's."""
    arms = tuple(changes(arm, kind="url", ref=f"http://{arm.name}:1", source_digest="") for arm in run.plan.arms)
    return changes(run, plan=changes(run.plan, arms=arms, model_path="", model_digest=""))


def test_sessions_of_a_url_are_one_boot_and_those_of_a_commit_are_not() -> None:
    run = make_run({"base": [2000, 2001], "head": [2600, 2601]})
    assert compare(run).one_boot == []
    found = compare(as_urls(run))
    assert found.one_boot == ["base", "head"]
    assert [cell.verdict for cell in found.cells] == ["regression"]
    assert compare(as_urls(make_run({"base": [2000], "head": [2600]}))).one_boot == []


def test_a_peer_must_serve_one_source_and_both_peers_one_set_of_weights_where_they_state_any() -> None:
    def moved(session: SessionInfo) -> SessionInfo:
        return changes(session, source_digest="f" * 64) if session.id == "03-head" else session

    def others(session: SessionInfo) -> SessionInfo:
        return changes(session, weights_digest="e" * 64) if session.arm == "head" else session

    def silent(session: SessionInfo) -> SessionInfo:
        return changes(session, weights_digest="", source_digest="") if session.arm == "head" else session

    gaps = {"base": [2000, 2001], "head": [2000, 2001]}
    (source,) = compare(as_urls(make_run(gaps, info=moved))).faults
    assert (source.kind, source.session) == ("source", "03-head")
    assert source.words == "03-head served source ffffffffffff, the arm's first session is 4ead4ead4ead"
    weights = compare(as_urls(make_run(gaps, info=others))).faults
    assert [fault.words for fault in weights] == [
        f"{name} loaded weights eeeeeeeeeeee, the first session da7ada7ada7a" for name in ("02-head", "03-head")
    ]
    assert compare(as_urls(make_run(gaps, info=silent))).faults == []
    assert compare(as_urls(make_run(gaps))).faults == []


def test_a_cell_whose_load_client_ended_is_invalid_alone() -> None:
    def lost(session: SessionInfo) -> SessionInfo:
        failures = {"T2T@1": "the load client was ended by signal 9\nmore"} if session.id == "02-head" else {}
        return changes(session, client_failures=failures)

    found = compare(make_run({"base": [2000, 2001], "head": [2000, 2001]}, [T2T, A2T], info=lost))
    assert {cell.cell: cell.verdict == "invalid" for cell in found.cells} == {"T2T@1": True, "A2T@1": False}
    assert [(fault.kind, fault.words) for fault in found.faults] == [
        ("client", "02-head: the load client was ended by signal 9")
    ]
    assert exit_code(found, False) == 3


def test_texts_are_compared_by_their_characters_where_no_ids_came() -> None:
    def as_text(record: Record) -> Record:
        said = "one two" if record.arm == "base" or record.index else "one too"
        return changes(record, token_ids=[], top2=[], text=said)

    (move,) = compare(make_run({"base": [2000, 2001], "head": [2000, 2001]}, change=as_text)).moves
    assert (move.index, move.step, move.base_token, move.head_token) == (0, 5, ord("w"), ord("o"))
    assert move.margin is None


def test_prompt_tokens_are_compared_request_by_request() -> None:
    def longer(record: Record) -> Record:
        return changes(record, prompt_tokens=8) if record.arm == "head" and record.index == 3 else record

    gaps = {"base": [2000], "head": [2000]}
    (equal,) = compare(make_run(gaps)).prompts
    assert (equal.base, equal.head, equal.equal, equal.of) == (5.0, 5.0, 4, 4)
    (longer_once,) = compare(make_run(gaps, change=longer)).prompts
    assert (longer_once.base, longer_once.head, longer_once.equal, longer_once.of) == (5.0, 5.75, 3, 4)
    assert compare(make_run({"base": [2000]})).prompts == []


def test_a_run_of_one_arm_has_its_values_whatever_the_arm_is_called() -> None:
    run = make_run({"base": [2000, 2010]})
    sessions = [changes(session, id=session.id.replace("base", "arm"), arm="arm") for session in run.sessions]
    records = [changes(record, session=record.session.replace("base", "arm"), arm="arm") for record in run.records]
    arm = changes(run.plan.arms[0], name="arm")
    plan = changes(run.plan, arms=(arm, arm), order=["arm", "arm"])
    (cell,) = compare(changes(run, plan=plan, sessions=sessions, records=records)).cells
    assert (cell.verdict, len(cell.base), cell.head) == ("measured", 2, [])


# --- a run that was stopped -------------------------------------------------------------------------------------------------


def stopped(run: RunData, gone: str, half: str = "") -> RunData:
    """The run without session `gone`, and without the last cell of session `half`."""
    last = run.plan.cells[-1].name
    kept = [r for r in run.records if r.session != gone and (r.session, r.cell) != (half, last)]
    return changes(run, sessions=[s for s in run.sessions if s.id != gone], records=kept)


@pytest.mark.parametrize(("gone", "half"), [("03-head", "04-base"), ("04-base", "03-head"), ("04-base", "")])
def test_no_speed_is_judged_while_planned_sessions_are_missing(gone: str, half: str) -> None:
    slower = {"base": [2000, 2001], "head": [4000, 4001]}
    run = stopped(make_run(slower, [T2T, changes(T2T, name="T2T@4"), A2T]), gone, half)
    found = compare(run)

    measured = 2 if half else 3
    assert [(cell.verdict, cell.contrast, cell.p_holm, cell.best_change) for cell in found.cells] == [
        ("no verdict", None, None, None)
    ] * 3
    assert found.cells[0].reasons == [f"{measured} of 4 planned sessions measured; finish with --resume"]
    assert (found.whole, found.planned, found.is_stopped, exit_code(found, False)) == (measured, 4, True, 2)
    assert set(verdicts(make_run(slower, [T2T, A2T])).values()) == {"regression"}


def test_a_stopped_run_says_early_what_is_certain_broken_and_moved() -> None:
    def flip(record: Record) -> Record:
        hit = record.arm == "head" and record.cell == "T2T@1" and not record.warm
        return changes(record, token_ids=[*record.token_ids[:5], 7, *record.token_ids[6:]]) if hit else record

    two = {"base": [2000, 2001], "head": [2000, 2001]}
    broken = stopped(make_run(two, [T2T, T2S], change=failing("head", "T2S@1")), "04-base")
    assert (verdicts(broken), code(broken)) == ({"T2T@1": "no verdict", "T2S@1": "broken head"}, 1)
    moved = make_run(two, change=flip)
    assert (len(compare(stopped(moved, "03-head")).moves), code(stopped(moved, "03-head"))) == (4, 1)
    # One boot of base, of two that are planned, has not shown what moves by itself.
    assert (compare(stopped(moved, "04-base")).moves, code(stopped(moved, "04-base"))) == ([], 2)


def test_words_are_not_judged_in_a_stopped_run() -> None:
    def change(record: Record) -> Record:
        worse = record.arm == "head" and not record.warm
        return changes(record, text="nobody answered at all") if worse else record

    two = make_run({"base": [2000, 2001], "head": [2000, 2001]}, [A2T], change=change)
    assert [row.verdict for row in compare(two).wer] == ["WER worse"]
    (row,) = compare(stopped(two, "03-head")).wer
    assert (row.verdict, row.change) == ("no verdict", None)


def test_a_stopped_run_whose_cells_are_all_decided_is_undecided_all_the_same() -> None:
    run = make_run(STEADY, [T2S], change=failing("base", "T2S@1"), info=with_info("base", info={"tasks": ["T2T"]}))
    assert (verdicts(run), code(run)) == ({"T2S@1": "new in head"}, 0)
    assert (verdicts(stopped(run, "06-head")), code(stopped(run, "06-head"))) == ({"T2S@1": "new in head"}, 2)


def test_a_cell_whose_load_client_ended_is_not_still_to_come() -> None:
    run = make_run(
        STEADY, [T2T, A2T], info=lambda s: changes(s, client_failures={"A2T@1": "gone"} if s.slot == 1 else {})
    )
    run = changes(run, records=[r for r in run.records if (r.session, r.cell) != ("02-head", "A2T@1")])
    assert (verdicts(run), compare(run).is_stopped) == ({"T2T@1": "equivalent", "A2T@1": "invalid"}, False)


def test_holm_counts_the_planned_cells_also_those_that_cannot_be_tested() -> None:
    # significant alone, and not as one of nine, of which eight are broken
    noisy = {"base": [2000, 2060, 1940], "head": [2200, 2260, 2140]}
    assert verdicts(make_run(noisy)) == {"T2T@1": "regression"}
    cells = [T2T, *(changes(T2T, name=f"T2T@{number}") for number in range(2, 10))]

    def change(record: Record) -> Record:
        return record if record.cell == "T2T@1" else failing("head", record.cell)(record)

    beside = verdicts(make_run(noisy, cells, change=change))
    assert (beside.pop("T2T@1"), set(beside.values())) == ("no verdict", {"broken head"})
