"""What `gate run` says of one arm beside its table: why requests failed, and the exit code."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from gate.record import Record, RunData
from gate.summary import failures, one_arm_exit_code
from gate.verdict import compare
from tests.gate.runs import A2T, T2T, make_run


def one_arm(fails: Callable[[Record], bool], error: str = "gone") -> RunData:
    """Two sessions of two cells with four measured requests each; those that `fails` picks failed."""

    def change(record: Record) -> Record:
        wrong = not record.warm and fails(record)
        return msgspec.structs.replace(record, ok=False, error=error) if wrong else record

    return make_run({"base": [2000, 2001]}, (T2T, A2T), change)


@pytest.mark.parametrize(
    ("fails", "code"),
    [
        (lambda record: False, 0),
        (lambda record: record.cell == "T2T@1" and record.index == 0, 1),
        (lambda record: record.session == "01-base", 1),
        (lambda record: record.cell == "A2T@1", 3),
        (lambda record: record.cell == "A2T@1" or record.index == 0, 3),
    ],
)
def test_one_arm_ends_with_1_where_a_request_failed_and_with_3_where_all_of_a_cell_did(
    fails: Callable[[Record], bool], code: int
) -> None:
    assert one_arm_exit_code(compare(one_arm(fails))) == code


def test_a_cell_that_a_stopped_run_did_not_get_to_is_2_and_one_whose_load_client_ended_3() -> None:
    whole = one_arm(lambda record: False)
    cut = msgspec.structs.replace(whole, records=[record for record in whole.records if record.cell == "T2T@1"])
    assert one_arm_exit_code(compare(cut)) == 2
    ended = [msgspec.structs.replace(one, client_failures={"A2T@1": "it ended\nlog"}) for one in cut.sessions]
    lost = msgspec.structs.replace(cut, sessions=ended)
    assert one_arm_exit_code(compare(lost)) == 3
    assert failures(lost, compare(lost)) == "A2T@1: 01-base: it ended\nA2T@1: 02-base: it ended"


def test_a_throttled_machine_makes_a_run_of_one_arm_3() -> None:
    whole = one_arm(lambda record: False)
    first, second = whole.sessions
    throttled = msgspec.structs.replace(first, host_after={**first.host_after, "throttled_s": 9.0})
    held = msgspec.structs.replace(whole, sessions=[throttled, second])
    assert one_arm_exit_code(compare(held)) == 3
    assert failures(held, compare(held)) == "01-base was held back by its CPU quota 20% of the time (limit 5 %)"


def test_failed_requests_are_told_by_their_reasons_in_the_order_of_their_records() -> None:
    run = one_arm(lambda record: record.index == 2, "HTTP 503: too many\nand a second line")
    assert failures(run, compare(run)) == "T2T@1, A2T@1: 4 requests failed: HTTP 503: too many"
    assert failures(one_arm(lambda record: False), compare(one_arm(lambda record: False))) == ""


def test_five_reasons_are_told_and_the_others_counted() -> None:
    def change(record: Record) -> Record:
        reason = f"reason {record.index + (4 if record.cell == 'A2T@1' else 0)}"
        return msgspec.structs.replace(record, ok=False, error=reason)

    run = make_run({"base": [2000, 2001]}, (T2T, A2T), change)
    assert failures(run, compare(run)).splitlines() == [
        "T2T@1: 2 requests failed: reason 0",
        "T2T@1: 2 requests failed: reason 1",
        "T2T@1: 2 requests failed: reason 2",
        "T2T@1: 2 requests failed: reason 3",
        "A2T@1: 2 requests failed: reason 4",
        "3 other reasons in sessions/*/records.jsonl",
    ]
