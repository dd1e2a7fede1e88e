"""Flags of the engine, through the command line and back out of /info and /metrics."""

from __future__ import annotations

from pathlib import Path

from engine.phases import PHASES
from tests.server.serving import serving


def test_phase_timing_launch_ahead_and_small_chunks_show_in_metrics_and_change_no_token(
    tiny_checkpoint: Path, tmp_path: Path
):
    body = {"text": "Tell me of rivers and stones. " * 12, "max_tokens": 12, "ignore_eos": True}
    with serving(tiny_checkpoint, tmp_path / "plain") as server:
        plain = server.answer(**body)
        assert not any(name.startswith("phase_") for name in server.metrics())
    flags = ("--phase-timing", "--enable", "launch_ahead", "--prefill-chunk", "16")
    with serving(tiny_checkpoint, tmp_path / "timed", *flags) as server:
        timed = server.answer(**body)
        metrics = server.metrics()
        _, info = server.get("/info")
    assert timed["token_ids"] == plain["token_ids"]
    assert info["switches"]["launch_ahead"] is True
    assert info["limits"]["prefill_chunk"] == 16
    assert metrics["walk_thinker_prefill_rows_total"] == -(-timed["usage"]["prompt_tokens"] // 16)
    assert metrics["thinker_steps_launched_ahead_total"] > 0
    for phase in PHASES:
        assert metrics[f"phase_{phase}_wall_seconds_total"] > 0
        assert metrics[f"phase_{phase}_cpu_ms_per_step"] >= 0
