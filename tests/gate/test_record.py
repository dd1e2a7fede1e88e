from __future__ import annotations

import msgspec
import pytest

from gate.record import EventStamp, Record, RunData, Thresholds
from tests.gate.runs import T2S, T2T, make_run, token_record


def test_a_run_survives_json_unchanged() -> None:
    run = make_run({"base": [2000], "head": [2000]}, [T2T, T2S])

    assert msgspec.json.decode(msgspec.json.encode(run), type=RunData) == run


def test_an_event_is_four_numbers_in_its_line() -> None:
    assert msgspec.json.encode(EventStamp(15, 1, 4, 0)) == b"[15,1,4,0]"


def test_a_record_without_its_item_is_refused_by_name() -> None:
    line = msgspec.to_builtins(token_record("01-base", T2T, 0, 0, 10, 10, 2))
    del line["item"]

    with pytest.raises(msgspec.ValidationError, match="item"):
        msgspec.convert(line, Record)


def test_the_thresholds_are_those_of_the_design() -> None:
    limits = Thresholds()

    assert (limits.alpha, limits.s_min, limits.wer_points, limits.throttled) == (0.05, 0.005, 0.5, 0.05)
    assert [limits.floor[name] for name in ("tok/s", "RTFx", "audio-s/s")] == [0.02, 0.02, 0.02]
