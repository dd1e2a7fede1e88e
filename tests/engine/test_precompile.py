"""What a cold start compiles in several processes. That it compiles what the engine runs is for a GPU to show (tests/gpu)."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine import precompile
from engine.capture import decode_buckets, prompt_buckets
from engine.config import EngineSettings

SETTINGS = EngineSettings(device="cuda", dtype="bfloat16", prefill_chunk=512)
ABOUT = ("2.11", "3.6", "NVIDIA H200")


def test_the_mark_changes_with_whatever_changes_a_kernel(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    first = precompile.mark_name(tmp_path, SETTINGS, ABOUT)
    assert first == precompile.mark_name(tmp_path, SETTINGS, ABOUT)
    others = [
        precompile.mark_name(tmp_path, replace(SETTINGS, max_batch=32), ABOUT),
        precompile.mark_name(tmp_path, replace(SETTINGS, disabled=frozenset({"gemv"})), ABOUT),
        precompile.mark_name(tmp_path, SETTINGS, ("2.11", "3.6", "NVIDIA H100")),
    ]
    tiles = tmp_path / "tiles"
    tiles.mkdir()
    own = replace(SETTINGS, tiles=str(tiles))
    others.append(precompile.mark_name(tmp_path, own, ABOUT))
    (tiles / "gemv.json").write_text("{}")
    others.append(precompile.mark_name(tmp_path, own, ABOUT))
    (tmp_path / "config.json").write_text('{"a": 1}')
    others.append(precompile.mark_name(tmp_path, SETTINGS, ABOUT))
    assert len({first, *others}) == 7


@pytest.mark.parametrize("shares", [2, 3, 8])
def test_the_shares_together_are_every_bucket_once(shares: int):
    for buckets in (decode_buckets(64), prompt_buckets(576)):
        parts = [buckets[share - 1 :: shares - 1] for share in range(1, shares)]
        assert sorted(size for part in parts for size in part) == list(buckets)


@pytest.fixture
def cold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache without marks, a GPU by name, and a folder that is looked at."""
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(precompile.os, "cpu_count", lambda: 4)
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def started(monkeypatch: pytest.MonkeyPatch, code: str) -> list[str]:
    """Have shares run `code` in a process of their own instead; returns the list of those that were started."""
    shares: list[str] = []

    def start(folder: Path, settings: EngineSettings, what: list[str], errors: Path) -> subprocess.Popen[bytes]:
        shares.append(what[0])
        with errors.open("wb") as file:
            return subprocess.Popen([sys.executable, "-c", code], stderr=file)

    monkeypatch.setattr(precompile, "_start", start)
    return shares


def test_a_cold_start_compiles_once_and_a_warm_one_nothing(cold: Path, monkeypatch: pytest.MonkeyPatch):
    shares = started(monkeypatch, "")
    precompile.prepare(cold, SETTINGS)
    precompile.prepare(cold, SETTINGS)
    assert shares == ["flash", "0", "1", "2"]
    precompile.prepare(cold, replace(SETTINGS, max_batch=8))
    assert len(shares) == 8


def test_a_share_that_fails_leaves_no_mark_and_stops_nothing(
    cold: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    shares = started(monkeypatch, "raise ValueError('no room')")
    precompile.prepare(cold, SETTINGS)
    precompile.prepare(cold, SETTINGS)
    assert shares == ["flash", "0", "1", "2"] * 2
    assert "3 of 3 processes that compile kernels failed (ValueError: no room)" in caplog.text
