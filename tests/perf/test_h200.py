"""The benchmark: its floors against the design's own figures, what it makes of a run, and one whole run on the small model."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from engine.config import GPU_SWITCHES, SWITCHES
from engine.model.config import OmniConfig
from engine.model.released import write_released
from gate.cell import Cell
from gate.record import RunData, SessionInfo
from gate.run import load_run
from gate.workload import default_root, load_cells
from tests.gate.runs import make_plan, token_record
from tests.perf import ablate, h200
from tests.perf.floors import Reads, kv_bytes, text_tok_s, weight_bytes
from tests.perf.h200 import Bench, Memory, floor_of, markdown, rows_of
from tests.shared import REPOSITORY


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> OmniConfig:
    folder = tmp_path_factory.mktemp("released")
    write_released(folder)
    return OmniConfig.load(folder)


@pytest.mark.parametrize(("concurrency", "tok_s"), [(1, 681), (4, 1082), (8, 1317), (16, 1712), (64, 4498)])
def test_the_floors_are_those_of_the_design(released: OmniConfig, concurrency: int, tok_s: float):
    found = text_tok_s(Reads.of(released.thinker), concurrency, prompt=64, tokens=257, bytes_per_s=4.3e12)
    assert found == pytest.approx(tok_s, rel=0.01)


def test_what_a_step_reads_is_what_the_specification_says(released: OmniConfig):
    reads = Reads.of(released.thinker)
    assert (round(reads.dense / 1e6, 1), round(reads.head / 1e6, 1), reads.expert) == (1837.5, 622.9, 9_437_184)
    assert [round(reads.distinct(rows), 1) for rows in (1, 8, 16, 64)] == [8.0, 51.6, 82.4, 125.9]
    assert [round(reads.step(rows) / 1e6) for rows in (1, 8, 16, 64)] == [6084, 25843, 39797, 59510]
    assert reads.kv == 98_304


def test_what_a_server_must_hold_is_its_weights_and_its_pages(released: OmniConfig):
    assert weight_bytes(released) / 1e9 == pytest.approx(69.4, abs=0.1)
    assert kv_bytes(released, 1000) == 1000 * (98_304 + 20_480)


def test_every_cell_of_the_sets_has_a_target_and_every_text_cell_a_floor_above_it(released: OmniConfig):
    sets = load_cells(default_root())
    cells = [cell for name in h200.SETS for cell in sets[name].cells]
    assert {cell.name for cell in cells} == h200.SPEEDS.keys()
    assert {name for name, _ in h200.LATENCIES} <= h200.SPEEDS.keys()
    for cell in cells:
        must, aim = h200.SPEEDS[cell.name]
        floor = floor_of(cell, released, h200.COPY_BYTES_PER_S)
        if cell.task == "T2T":
            assert floor is not None and must is not None and aim is not None and must < aim < floor
    faster = floor_of(cells[0], released, 2 * h200.COPY_BYTES_PER_S)
    assert faster == pytest.approx(2 * (floor_of(cells[0], released, h200.COPY_BYTES_PER_S) or 0))


def made_run() -> RunData:
    """Two sessions of T2T@1 with four requests of five tokens, 10 ms each: 50 tok/s, less in the second."""
    cell = Cell("T2T@1", "T2T", 1, 4, 0, 5, True, None, "tok/s", "ids", False, 64, 151643)
    plan = make_plan(["base", "base"], [cell], 2)
    records, sessions = [], []
    for slot, gap_us in enumerate((10_000, 20_000)):
        name = f"{slot + 1:02d}-base"
        for index in range(4):
            start = index * 5 * gap_us * 1000
            records.append(token_record(name, cell, index, start, gap_us, gap_us, 5))
        counters = {
            "T2T@1 walkgate_steps_captured_total": 16.0,
            "T2T@1 walkgate_prompt_steps_captured_total": 4.0,
            "T2T@1 walkgate_steps_eager_total": 0.0,
            "T2T@1 walkgate_thinker_plan_cache_hits_total": 12.0,
            "T2T@1 walkgate_thinker_plan_cache_misses_rows_total": 4.0,
            "T2T@1 walkgate_kernels_compiled_late_total": float(slot),
        }
        sessions.append(session(name, slot, counters))
    return RunData(plan=plan, sessions=sessions, records=records, items={})


def session(name: str, slot: int, counters: dict[str, float]) -> SessionInfo:
    limits = {"kv_pages": 10, "page_size": 16}
    return SessionInfo(
        id=name,
        arm="base",
        slot=slot,
        commit=None,
        dirty=False,
        source_digest="",
        weights_digest="",
        boot_seconds=30.0 + slot,
        info={"limits": limits, "engine_boot_seconds": 25.0},
        host_before={},
        host_after={},
        counters=counters,
        problems=[],
    )


def test_a_row_says_speed_against_floor_ceiling_and_targets_and_what_the_counters_say(released: OmniConfig):
    run = made_run()
    (row,) = rows_of(run, released, ceiling=4.3e12 * 1.02)
    assert row.values == {"01-base": 100.0, "02-base": 50.0} and row.mean == 75.0
    assert row.ttft_p50_ms == {"01-base": 10.0, "02-base": 20.0}
    assert (row.must, row.aim, row.failed, row.requests) == (400, 500, 0, 8)
    floor = floor_of(run.plan.cells[0], released, 4.3e12)
    assert floor is not None and row.floor == floor
    assert row.share_of_floor == pytest.approx(75 / floor)
    assert row.share_of_ceiling == pytest.approx(75 / floor / 1.02)
    assert row.captured == {"steps_captured": 32.0, "prompt_steps_captured": 8.0, "steps_eager": 0.0}
    assert (row.plan_hits, row.compiled_late) == (0.75, 1.0)
    # Each of a session's four answers has tokens of its own at every step; both sessions answer alike.
    assert (row.answers, row.distinct) == (4, 4.0)


def test_the_page_shows_every_session_and_what_is_missed(released: OmniConfig):
    run = made_run()
    bench = Bench(4.39e12, "NVIDIA H200", rows_of(run, released, 4.39e12), h200.boots_of(run))
    bench.expected_bytes = h200.expected_bytes(run, released)
    bench.memory = {"h200": Memory(before=10**9, peak=10**9 + (bench.expected_bytes or 0) + 5 * 10**9)}
    bench.problems = ["gate run of h200-audio ended with 3"]
    text = markdown(bench)
    assert "Read-only ceiling of the card: 4.390 TB/s" in text
    assert "| T2T@1 | tok/s | 100 50 | " in text and "| 400 | 500 | **no** |" in text
    assert "| T2T@1 | 10.0 20.0 | 10.0 20.0 | p50 21 | p50 18 |" in text
    assert "| T2T@1 | 8 | 0 | 4 | 4 | 32 | 8 | 0 | 75.0% | 1 |" in text
    assert "| quick 02-base | 31 | 25 |" in text
    assert "so +5.0 GB beside them (at most 8)." in text
    bench.memory = {"h200": Memory(before=0, peak=(bench.expected_bytes or 0) + 9 * 10**9)}
    assert "so +9.0 GB beside them (at most 8: **missed**)." in markdown(bench)
    assert "Problem: gate run of h200-audio ended with 3" in text


def test_a_row_reaches_must_or_aim_by_the_mean_of_its_sessions(released: OmniConfig):
    (row,) = rows_of(made_run(), released, None)
    assert row.share_of_ceiling is None

    def reached(*speeds: float) -> str:
        return h200._reached(replace(row, values={str(n): value for n, value in enumerate(speeds)}))

    assert [reached(399), reached(300, 500), reached(450, 550), reached()] == ["**no**", "must", "aim", "not measured"]


CELLS = """version = 1
[defaults.T2T]
workload = "ids"
prompt_tokens = 8
max_tokens = 6
ignore_eos = true
[sets.small]
cells = [
  { task = "T2T", concurrency = 1, requests = 2, warm_waves = 1 },
  { task = "T2T", concurrency = 2, requests = 4, greedy = true },
]
"""


def test_the_whole_benchmark_runs_on_the_small_model(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / "cells.toml").write_text(CELLS)
    words = [
        "h200",
        "--out",
        str(tmp_path / "out"),
        "--sets",
        "small",
        "--sessions",
        "1",
        "--device",
        "cpu",
        "--args",
        "",
    ]
    words += ["--model", str(tiny_checkpoint), "--workloads", str(tmp_path / "w"), "--stop-after", "200"]
    monkeypatch.setattr(sys, "argv", words)
    assert h200.main() == 0
    run = load_run(tmp_path / "out" / "small")
    assert all(record.ok and len(record.token_ids) == 6 and record.prompt_tokens == 8 for record in run.records)
    assert {record.item for record in run.records if record.cell == "T2T@2"} == {f"T2T@2-{n:04d}" for n in range(4)}
    found = json.loads((tmp_path / "out" / "benchmark.json").read_text())
    assert [(row["cell"], row["requests"], row["failed"]) for row in found["rows"]] == [
        ("T2T@1", 2, 0),
        ("T2T@2", 4, 0),
    ]
    assert all(row["plan_hits"] > 0 and row["captured"]["steps_eager"] > 0 for row in found["rows"])
    assert found["expected_bytes"] > 0 and found["problems"] == []
    assert "| T2T@1 | tok/s | " in (tmp_path / "out" / "benchmark.md").read_text()


def test_each_set_runs_its_own_of_the_cells_that_are_asked_for():
    def asked(*words: str) -> dict[str, list[str]]:
        return h200.chosen(h200.parser().parse_args(["--out", "x", *words]))

    assert asked() == {
        "h200": ["T2T@1", "T2T@4", "T2T@8", "T2T@16", "T2T@64"],
        "h200-audio": ["A2T@1", "A2T@16", "A2T@64"],
    }
    assert asked("--cells", "T2T@8,A2T@1") == {"h200": ["T2T@8"], "h200-audio": ["A2T@1"]}
    assert asked("--cells", "T2T@8") == {"h200": ["T2T@8"]}
    for words, told in ((("--cells", "T2T@5"), "'T2T@5' is in none of h200,h200-audio"), (("--sets", "x"), "no 'x'")):
        with pytest.raises(ValueError, match=told):
            asked(*words)


def test_a_servers_packages_caches_and_time_are_those_of_the_benchmark(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", "packages")
    asked = h200.parser().parse_args(["--out", "x", "--librispeech", "hub"])
    words = h200.gate_words(asked, "h200", ["T2T@1"], Path("x/h200"), Path("/c"), 90.4)
    assert words[1:6] == ["-m", "gate", "run", ".", "--set"] and "--librispeech" not in words
    assert {f"PYTHONPATH={Path('packages').resolve()}", "TRITON_CACHE_DIR=/c/triton", "90s"} <= set(words)
    assert words[words.index("--args") + 1] == "--load-format dummy"
    assert "--librispeech" in h200.gate_words(asked, "h200-audio", ["A2T@1"], Path("x"), Path("/c"), float("inf"))


def test_a_folder_with_an_earlier_benchmark_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def refusal() -> str:
        monkeypatch.setattr(sys, "argv", ["h200", "--out", str(tmp_path), "--sets", "h200", "--device", "cpu"])
        monkeypatch.setattr(h200, "benchmark", lambda asked: pytest.fail("something was measured"))
        with pytest.raises(SystemExit) as caught:
            h200.main()
        assert caught.value.code == 64
        return capsys.readouterr().err

    for name in ("benchmark.md", "benchmark.json", "h200"):
        (tmp_path / name).mkdir()
        assert refusal() == (
            f"h200: --out: {tmp_path} holds an earlier benchmark ({name}); remove these to run it again, "
            "or name another folder\n"
        )
        (tmp_path / name).rmdir()
    # What ablate.py and boots.py write is no run.
    (tmp_path / "ablation.md").touch()
    assert h200.earlier(tmp_path, ["h200"]) == []


def test_a_benchmark_that_failed_can_be_run_again_once_what_the_refusal_names_is_gone(tmp_path: Path):
    bench = Bench(None, "a CPU", problems=["gate run of small ended with 3"])
    h200.write(tmp_path, bench)
    (tmp_path / "small").mkdir()
    found = h200.earlier(tmp_path, ["small", "other"])
    assert found == ["small", "benchmark.md", "benchmark.json"]
    (tmp_path / found[0]).rmdir()
    for name in found[1:]:
        (tmp_path / name).unlink()
    assert h200.earlier(tmp_path, ["small", "other"]) == []


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--sets", "x"), "h200: --sets: there is no 'x'; "),
        (("--cells", "A2T@1"), "h200: the audio set needs --librispeech PATH, or hub; --sets h200 leaves it out\n"),
        (("--sessions", "two"), "h200: argument --sessions: 'two' is no whole number from 1 on\n"),
        (("--librispeech", "/none"), "h200: argument --librispeech: '/none' is no folder; name one in "),
        (("--model", "/none"), "h200: argument --model: '/none' has no config.json; name a checkpoint folder\n"),
        (("--workloads", "/none"), "h200: /none/cells.toml cannot be read (No such file or directory); "),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_64(
    words: tuple[str, ...], told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "argv", ["h200", "--out", "x", *words])
    with pytest.raises(SystemExit) as caught:
        h200.main()
    err = capsys.readouterr().err
    assert caught.value.code == 64 and err.startswith(told) and err.count("\n") == 1


def test_the_manual_says_of_every_switch_whether_it_may_move_a_token_on_a_gpu():
    text = (REPOSITORY / "docs" / "configuration.md").read_text(encoding="utf-8").split("## Switches\n")[1]
    found = dict(re.findall(r"^\| `(\w+)` \|.*\| (\w+) \|$", text, flags=re.MULTILINE))
    assert found.keys() == {*SWITCHES, *GPU_SWITCHES}
    assert {name for name, when in found.items() if when == "sums"} == ablate.OTHER_SUMS.keys()
    # An ablation is of text, so it knows nothing of the audio encoder.
    assert {name for name, when in found.items() if when == "company"} == ablate.OTHER_COMPANY.keys() | {
        "audio_captures"
    }
    assert set(found.values()) == {"sums", "company", "no"}


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_the_targets_for_gpus_say_in_one_line_that_there_is_no_gpu_or_no_torch(tmp_path: Path):
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')")
    # Without the variables of a `make test` around this.
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    hidden = {**kept, "CUDA_VISIBLE_DEVICES": ""}
    for target in ("gpu-test", "gpu-bench"):
        for env, told in ((hidden, "sees no CUDA GPU"), ({**hidden, "PYTHONPATH": str(tmp_path)}, "no torch here")):
            command = ["make", "-s", target, f"GPU_PYTHON={sys.executable}", f"OUT={tmp_path / 'out'}"]
            done = subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=60)
            assert done.returncode != 0 and done.stdout == ""
            first, *rest = done.stderr.splitlines()
            assert first.startswith(f"{sys.executable}: ") and told in first
            assert all(line.startswith("make: ") for line in rest)
    assert not (tmp_path / "out").exists()


def test_the_manual_of_gpus_names_every_command_and_what_is_written():
    text = (REPOSITORY / "docs" / "gpu.md").read_text(encoding="utf-8")
    targets = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    for name in ("gpu-test", "gpu-bench"):
        assert f"make {name}" in text and f"\n{name}:" in targets
    for module in ("h200", "ablate", "boots", "ceiling"):
        assert (REPOSITORY / "tests" / "perf" / f"{module}.py").is_file() and f"tests.perf.{module}" in text
    for name in ("benchmark.md", "ablation.md", "boots.md"):
        assert f"`{name}`" in text
