from __future__ import annotations

import msgspec
import pytest

from gate.cell import METRICS, Cell
from gate.metrics import (
    better_is_up,
    cell_metrics,
    identity_residual,
    itl_ms,
    session_metrics,
    ttfa_us,
    ttft_us,
    window_s,
)
from gate.record import EventStamp, Record, Thresholds
from gate.stats import contrast
from gate.verdict import speed_verdict
from tests.gate.runs import A2T, T2S, T2T, make_run, one_client, token_record

WITH_DIRECTION = [name for name, metric in METRICS.items() if metric.better != "none"]


def measured(cell: Cell, gap_us: int = 2000) -> list[Record]:
    return [record for record in one_client("01-base", cell, gap_us) if not record.warm]


def test_a_text_cell_by_hand() -> None:
    # 4 requests in a row: first token after 10 ms, ten more 2 ms apart, so 30 ms each and a window of 0.12 s
    found = cell_metrics(T2T, measured(T2T))

    assert found == pytest.approx(
        {
            "issued": 4,
            "failed": 0,
            "tokens out": 44,
            "audio in": 0,
            "audio out": 0,
            "window": 0.12,
            "tok/s": 366.6667,
            "e2e p50": 30,
            "e2e p99": 30,
            "TTFT p50": 10,
            "TTFT p99": 10,
            "ITL undefined": 0,
            "ITL p50": 2,
            "gap p50": 2,
            "gap p99": 2,
            "gaps > 150 ms": 0,
            "gap max": 2,
            "tokens per chunk": 1,
            "identity residual": 0,
        }
    )


def test_rtfx_counts_input_audio_over_the_window() -> None:
    # 4 clips of 2 s in 4 × 20 ms
    assert cell_metrics(A2T, measured(A2T))["RTFx"] == pytest.approx(100.0)


def test_a_speech_cell_by_hand() -> None:
    # 10 + 3·2 ms for the text, speech of 0.64 s 20 ms later: 36 ms a request
    found = cell_metrics(T2S, measured(T2S))

    assert found["audio out"] == pytest.approx(2.56)
    assert found["audio-s/s"] == pytest.approx(2.56 / 0.144)
    assert (found["TTFT p50"], found["TTFA p50"]) == (10.0, 36.0)
    assert found["RTF p50"] == pytest.approx(0.036 / 0.64)
    assert "ITL p50" not in found and "gap p50" not in found


def test_the_first_token_is_an_event_with_a_token_and_not_one_with_nothing_or_only_audio() -> None:
    record = token_record("01-base", T2T, 0, 0, 9000, 1000, 3)
    early = [EventStamp(100, 0, 0, 0), EventStamp(200, 0, 0, 480), EventStamp(300, 1, 0, 0)]
    record = msgspec.structs.replace(record, events=[*early, *record.events])

    assert (ttft_us(record), ttfa_us(record)) == (300, 200)


def test_itl_uses_the_servers_count_and_is_left_out_below_two_tokens() -> None:
    record = token_record("01-base", T2T, 0, 0, 10_000, 2000, 6)

    assert itl_ms(record) == pytest.approx(2.0)
    assert itl_ms(msgspec.structs.replace(record, completion_tokens=11)) == pytest.approx(1.0)
    assert itl_ms(msgspec.structs.replace(record, completion_tokens=1)) is None
    one = [msgspec.structs.replace(record, completion_tokens=1), record]
    assert cell_metrics(T2T, one)["ITL undefined"] == 1


def test_gaps_are_between_arrivals_and_a_chunk_of_several_tokens_is_told() -> None:
    record = token_record("01-base", T2T, 0, 0, 10_000, 2000, 1)
    events = [EventStamp(10_000, 1, 1, 0), EventStamp(20_000, 1, 1, 0), EventStamp(20_000, 1, 1, 0)]
    late = EventStamp(180_000, 3, 9, 0)
    record = msgspec.structs.replace(record, events=[*events, late], e2e_us=180_000, completion_tokens=6)

    found = cell_metrics(T2T, [record])

    assert (found["gap p50"], found["gap max"], found["gaps > 150 ms"]) == (85.0, 160.0, 1.0)
    assert found["tokens per chunk"] == 2.0


def test_a_failed_request_is_counted_and_leaves_every_latency() -> None:
    good = measured(T2T)
    slow = token_record("01-base", T2T, 4, good[-1].t0_ns, 5_000_000, 2000, 2, ok=False, error="HTTP 500")

    found = cell_metrics(T2T, [*good, slow])

    assert (found["issued"], found["failed"], found["tokens out"]) == (5, 1, 44)
    assert found["e2e p99"] == found["e2e p50"] == 30.0
    # its time is in the window: a server that hangs on one request is not a fast server
    assert found["tok/s"] == pytest.approx(44 / (0.09 + 5.002))


def test_a_cell_in_which_all_failed_has_counts_and_no_speeds() -> None:
    failed = [msgspec.structs.replace(record, ok=False, e2e_us=0) for record in measured(T2T)]

    found = cell_metrics(T2T, failed)

    assert (found["issued"], found["failed"], found["window"]) == (4, 4, 0)
    assert "tok/s" not in found


def test_the_window_starts_at_the_first_send_and_ends_at_the_last_event() -> None:
    a = token_record("01-base", T2T, 0, 5_000_000_000, 10_000, 1000, 11)
    b = token_record("01-base", T2T, 1, 5_010_000_000, 500_000, 1000, 1)

    assert window_s([b, a]) == pytest.approx(0.51)


def test_the_identity_holds_for_a_busy_loop_and_names_idle_time() -> None:
    records = measured(T2T)
    late = [msgspec.structs.replace(record, t0_ns=record.t0_ns + record.index * 10_000_000) for record in records]

    assert identity_residual(1, records, window_s(records)) == pytest.approx(0.0)
    # 30 ms of waiting in 150 ms: a fifth of what the latencies promise is missing
    assert identity_residual(1, late, window_s(late)) == pytest.approx(-0.2)


def test_warm_records_enter_nothing() -> None:
    run = make_run({"base": [2000], "head": [2000]})
    cold = make_run({"base": [2000], "head": [2000]}, change=lambda record: None if record.warm else record)

    assert session_metrics(run) == session_metrics(cold)
    assert any(record.warm for record in run.records)


def test_a_cell_that_a_session_did_not_finish_has_no_row() -> None:
    run = make_run(
        {"base": [2000], "head": [2000]}, change=lambda r: None if r.session == "02-head" and r.index == 3 else r
    )

    assert {row.session for row in session_metrics(run)} == {"01-base"}


@pytest.mark.parametrize("metric", WITH_DIRECTION)
def test_a_better_value_of_any_metric_is_an_improvement_and_a_worse_one_a_regression(metric: str) -> None:
    better = 1.5 if metric in ("tok/s", "RTFx", "audio-s/s") else 0.5
    base = [100.0, 101.0, 99.0]

    verdicts = []
    for factor in (better, 1 / better):
        found = contrast(base, [value * factor for value in base], 0.005)
        assert found is not None
        verdicts.append(speed_verdict(metric, found, found.p, Thresholds()))

    assert verdicts == ["improvement", "regression"]


def test_a_plain_fact_has_no_better_direction() -> None:
    with pytest.raises(ValueError, match="'window' is a plain fact"):
        better_is_up("window")
