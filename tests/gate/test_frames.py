from __future__ import annotations

from pathlib import Path

import pandas
import pytest

from gate.frames import build_frames
from tests.gate.runs import A2T, T2S, T2T, make_run

RUN = make_run({"base": [2000, 2002], "head": [2600, 2602]}, [T2T, A2T, T2S])


def test_every_table_has_its_rows() -> None:
    frames = build_frames(RUN)

    assert {name: len(frame) for name, frame in frames.items()} == {
        "records": 4 * 3 * 5,  # sessions × cells × one warm and four measured
        "sessions": len(frames["sessions"]),
        "comparisons": 3,
        "greedy": 3 * 6,
        "wer": 4 + 1 + 1,  # A2T: a row a session and the change; T2S, which is not judged: one
    }
    assert set(frames["sessions"]["metric"]) >= {"tok/s", "RTFx", "audio-s/s", "TTFT p50", "TTFA p50", "failed"}


def test_a_comparison_row_by_hand() -> None:
    row = build_frames(RUN)["comparisons"].set_index("cell").loc["T2T@1"]

    assert (row["verdict"], row["sessions_base"], row["df"]) == ("regression", 2, 2)
    assert row["mean_base"] == pytest.approx(366.5, abs=0.1)
    # 0.12 s against 0.144 s a session
    assert row["change_percent"] == pytest.approx(-16.66, abs=0.01)
    assert row["spread_percent"] == pytest.approx(0.5)


def test_a_record_row_by_hand() -> None:
    records = build_frames(RUN)["records"]
    row = records[(records["session"] == "01-base") & (records["cell"] == "T2S@1") & (records["index"] == 3)].iloc[0]

    assert (row["ttft_ms"], row["ttfa_ms"], row["e2e_ms"], row["audio_out_s"]) == (10.0, 36.0, 36.0, 0.64)
    assert not row["warm"]
    assert pandas.isna(row["error"])


def test_tables_go_through_parquet_and_csv_with_their_columns(tmp_path: Path) -> None:
    for name, frame in build_frames(RUN).items():
        frame.to_parquet(tmp_path / f"{name}.parquet", index=False)
        frame.to_csv(tmp_path / f"{name}.csv", index=False)

        pandas.testing.assert_frame_equal(pandas.read_parquet(tmp_path / f"{name}.parquet"), frame, check_dtype=False)
        assert list(pandas.read_csv(tmp_path / f"{name}.csv").columns) == list(frame.columns)


def test_a_run_without_any_session_has_tables_without_rows_but_with_columns(tmp_path: Path) -> None:
    empty = make_run({"base": [2000], "head": [2000]}, [T2T], change=lambda _: None)

    frames = build_frames(empty)

    assert {name: len(frame) for name, frame in frames.items()} == {
        "records": 0,
        "sessions": 0,
        "comparisons": 1,
        "greedy": 0,
        "wer": 0,
    }
    assert all(len(frame.columns) > 5 for frame in frames.values())
    for name, frame in frames.items():
        frame.to_parquet(tmp_path / f"{name}.parquet", index=False)
