"""Tuning: what is tried, what wins, when it stops, and the whole flow at small sizes."""

from __future__ import annotations

import json
import math
import multiprocessing
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from engine.config import SettingError
from engine.errors import WalkgateError
from engine.kernels.bench import Benches, Compilers, default_tile
from engine.kernels.tiles import (
    EXPERT_OPS,
    OPS,
    ROUTING,
    Entry,
    Provenance,
    Registry,
    Table,
    Tile,
    read_table,
    table_path,
)
from engine.kernels.tune import (
    ROWS,
    BadTile,
    Budget,
    Job,
    Shapes,
    Trial,
    Wanted,
    attempt,
    best,
    fits,
    hand_over,
    jobs,
    neighbours,
    proposals,
    sweep,
    tables,
    winners,
)
from engine.routing import Limits, Route
from engine.server.tune import TuneSettings, Tuning, check_place, settings, write_json

RELEASED = Shapes(
    hidden=2048, heads=32, kv_heads=4, head_dim=128, experts=128, top_k=8, inter=768, vocab=152064, page=16
)
SMALL = Shapes(hidden=32, heads=2, kv_heads=1, head_dim=16, experts=4, top_k=2, inter=16, vocab=32, page=4)
PROVENANCE = Provenance("2.11", "3.6", "2026-01-31", "omni tune", "wall clock")
GEMV = Job("gemv", (2048, 5120), "bfloat16", 1)
GROUPED = Job("grouped_down", (128, 2048, 768, 8), "bfloat16", 64)
TILE = {"BN": 8, "warps": 4, "stages": 1}


def trial(bn: int, microseconds: float | None, error: str | None = None) -> Trial:
    return Trial(GEMV, TILE | {"BN": bn}, microseconds, 0.0, error)


class WallTimer:
    """Times a launch by the wall clock, once."""

    def microseconds(self, launch: Callable[[int], object], copies: int) -> float:
        began = time.perf_counter()
        for copy in range(copies):
            launch(copy)
        return (time.perf_counter() - began) * 1e6 / copies


class Formula:
    """A bench whose times and differences are functions of the tile."""

    def __init__(self, cost: Callable[[Tile], float], difference: Callable[[Tile], float] = lambda tile: 0.0) -> None:
        self.cost = cost
        self.difference = difference
        self.timed: list[Tile] = []

    def check(self, tile: Tile) -> float:
        return self.difference(tile)

    def microseconds(self, tile: Tile) -> float:
        self.timed.append(tile)
        return self.cost(tile)


def compiled_already(wanted: Wanted, budget: Budget) -> list[Trial]:
    return []


def run_sweep(
    wanted: Sequence[Job],
    bench: Formula,
    *,
    prepare: Callable[[Wanted, Budget], list[Trial]] | None = None,
    budget: Budget | None = None,
    rounds: int = 3,
) -> tuple[list[Trial], list[tuple[int, int]]]:
    announced: list[tuple[int, int]] = []
    found = sweep(
        wanted,
        lambda job: TILE,
        lambda job: bench,
        prepare or compiled_already,
        budget or Budget(60.0),
        lambda number, trials: announced.append((number, trials)),
        rounds=rounds,
    )
    return list(found), announced


def off(tile: Tile, bn: int, warps: int) -> float:
    """A cost that is least, 10, at one tile."""
    return 10.0 + abs(math.log2(tile["BN"] / bn)) + abs(math.log2(tile["warps"] / warps))


def test_the_released_sizes_are_those_of_the_products_the_attention_and_the_experts():
    assert RELEASED.of("gemv") == ((2048, 5120), (4096, 2048), (2048, 128), (2048, 152064))
    assert RELEASED.of("decode_attention") == ((32, 4, 128, 16),)
    assert RELEASED.of("grouped_down") == ((128, 2048, 768, 8),)


def test_products_of_the_same_size_are_one_job():
    square = Shapes(hidden=32, heads=2, kv_heads=1, head_dim=16, experts=32, top_k=2, inter=16, vocab=32, page=4)
    assert square.of("gemv") == ((32, 64), (32, 32))


def test_an_op_is_tuned_at_the_rows_that_it_runs_at_and_experts_come_first():
    found = jobs(RELEASED, "bfloat16", OPS, ROWS)
    rows = {op: sorted({job.rows for job in found if job.op == op}) for op in OPS}
    assert rows == {
        "gemv": [1, 2, 4, 8],
        "split_gemm": [1, 2, 4, 8, 16, 32, 64],
        "decode_attention": [1, 2, 4, 8, 16, 32, 64],
        "per_pair_gate_up": [1, 2, 4, 8],
        "per_pair_down": [1, 2, 4, 8],
        "grouped_gate_up": list(ROWS),
        "grouped_down": list(ROWS),
    }
    assert {job.op for job in found[: sum(job.op in EXPERT_OPS for job in found)]} == set(EXPERT_OPS)


def test_only_the_ops_and_rows_that_were_asked_for_are_jobs():
    assert jobs(RELEASED, "bfloat16", ["per_pair_down"], [4, 1, 4, 64]) == [
        Job("per_pair_down", (128, 2048, 768, 8), "bfloat16", 1),
        Job("per_pair_down", (128, 2048, 768, 8), "bfloat16", 4),
    ]


def test_neighbours_double_or_halve_one_number_or_move_bn_with_warps():
    found = [(tile["BN"], tile["warps"]) for tile in neighbours(GEMV, TILE)]
    assert found == [(16, 4), (4, 4), (8, 8), (8, 2), (16, 8), (4, 2)]


def test_more_slices_of_k_come_with_shorter_blocks_of_it():
    job = Job("split_gemm", (2048, 5120), "bfloat16", 8)
    whole = {"RP": 16, "BN": 64, "BK": 256, "SK": 8, "warps": 4, "stages": 3}
    found = [(tile["SK"], tile["BK"]) for tile in neighbours(job, whole)]
    assert (16, 128) in found and (4, 512) in found and (16, 256) not in found


def test_stages_move_by_one():
    tile = {"BM": 16, "BN": 128, "BK": 128, "warps": 8, "stages": 3}
    found = [one["stages"] for one in neighbours(GROUPED, tile) if one["stages"] != 3]
    assert found == [4, 2]


def test_neighbours_stay_inside_their_bounds():
    smallest = {"BN": 1, "warps": 1, "stages": 1}
    assert [(one["BN"], one["warps"]) for one in neighbours(GEMV, smallest)] == [(2, 1), (1, 2), (2, 2)]


@pytest.mark.parametrize(
    ("job", "tile", "expected"),
    [
        (GEMV, {"BN": 16, "warps": 4, "stages": 1}, True),
        (GEMV, {"BN": 32, "warps": 4, "stages": 1}, False),
        (Job("gemv", (2048, 5120), "float32", 1), {"BN": 16, "warps": 4, "stages": 1}, False),
        (Job("gemv", (64, 6), "float32", 1), {"BN": 8, "warps": 4, "stages": 1}, True),
        (Job("gemv", (64, 6), "float32", 1), {"BN": 16, "warps": 4, "stages": 1}, False),
        (GROUPED, {"BM": 16, "BN": 256, "BK": 128, "warps": 8, "stages": 3}, True),
        (GROUPED, {"BM": 16, "BN": 256, "BK": 128, "warps": 8, "stages": 4}, False),
        (GROUPED, {"BM": 128, "BN": 64, "BK": 32, "warps": 8, "stages": 2}, False),
    ],
)
def test_a_tile_fits_when_it_is_no_larger_than_the_job_and_than_registers_and_shared_memory(
    job: Job, tile: Tile, expected: bool
):
    assert fits(job, tile) is expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("op", OPS)
def test_every_tile_of_the_first_round_has_the_keys_of_its_table_and_differs_from_the_others(op: str, dtype: str):
    for job in jobs(RELEASED, dtype, [op], ROWS):
        tiles = proposals(job, [], default_tile(job))
        assert [set(tile) for tile in tiles] == [set(OPS[op].tile)] * len(tiles)
        assert len({tuple(sorted(tile.items())) for tile in tiles}) == len(tiles) > 1


@pytest.mark.parametrize(
    ("trials", "expected"),
    [
        ([trial(8, 10.0), trial(16, 9.0), trial(4, 9.5)], 16),
        ([trial(8, 10.0), trial(16, 9.91)], 8),
        ([trial(8, 10.0), trial(16, 9.89)], 16),
        ([trial(8, 10.0), trial(16, None, "out of registers")], 8),
        ([trial(8, None, "out of registers"), trial(16, 12.0)], 16),
    ],
)
def test_the_fastest_tile_wins_if_it_beats_the_default_by_a_hundredth(trials: list[Trial], expected: int):
    found = best(trials)
    assert found is not None and found.tile["BN"] == expected


def test_without_a_usable_trial_there_is_no_best():
    assert best([trial(8, None, "out of registers")]) is None
    assert best([]) is None


def test_the_next_round_tries_what_is_new_around_the_best():
    tried = [trial(8, 10.0), trial(16, 8.0), trial(4, 12.0)]
    found = [(tile["BN"], tile["warps"]) for tile in proposals(GEMV, tried, TILE)]
    assert found == [(16, 8), (32, 8), (8, 2)]


def test_a_job_whose_tiles_all_fail_tries_no_more():
    assert proposals(GEMV, [trial(8, None, "out of registers")], TILE) == []


def test_a_sweep_climbs_to_the_best_tile_round_by_round():
    found, announced = run_sweep([GEMV], Formula(lambda tile: off(tile, bn=2, warps=1)))
    [won] = winners(found).values()
    assert (won.tile["BN"], won.tile["warps"]) == (2, 1)
    assert [number for number, _ in announced] == [1, 2, 3]
    assert sum(trials for _, trials in announced) == len(found)


def test_a_sweep_ends_when_no_tile_is_left_to_try():
    bench = Formula(lambda tile: off(tile, bn=8, warps=4))
    found, announced = run_sweep([GEMV], bench)
    assert announced == [(1, 7)] and len(bench.timed) == 7
    assert winners(found)[GEMV].tile == TILE


def test_one_round_tries_only_the_default_and_its_neighbours():
    found, announced = run_sweep([GEMV], Formula(lambda tile: off(tile, bn=2, warps=1)), rounds=1)
    assert announced == [(1, 7)] and len(found) == 7


def test_a_spent_budget_ends_the_sweep_and_leaves_what_was_found():
    now = [0.0]
    budget = Budget(25.0, clock=lambda: now[0])

    def slow(tile: Tile) -> float:
        now[0] += 10.0
        return off(tile, bn=16, warps=4)

    other = Job("gemv", (4096, 2048), "bfloat16", 1)
    found, announced = run_sweep([GEMV, other], Formula(slow), budget=budget)
    assert [one.job for one in found] == [GEMV] * 3
    assert announced[0][0] == 1 and len(announced) == 1
    assert list(winners(found)) == [GEMV]


def test_a_spent_budget_measures_nothing():
    bench = Formula(lambda tile: 1.0)
    assert run_sweep([GEMV], bench, budget=Budget(0.0)) == ([], []) and bench.timed == []


def test_a_tile_that_failed_to_compile_is_a_trial_and_is_not_run():
    bench = Formula(lambda tile: off(tile, bn=16, warps=4))

    def prepare(wanted: Wanted, budget: Budget) -> list[Trial]:
        return [Trial(job, tile, error="spilled") for job in wanted for tile in wanted[job] if tile["BN"] == 16]

    found, _ = run_sweep([GEMV], bench, prepare=prepare, rounds=1)
    assert [one.error for one in found if one.tile["BN"] == 16] == ["spilled"] * 2
    assert all(tile["BN"] != 16 for tile in bench.timed)
    assert winners(found)[GEMV].tile == TILE


@pytest.mark.parametrize("difference", [0.02, math.inf, math.nan])
def test_a_fast_tile_with_another_result_is_dropped(difference: float):
    bench = Formula(lambda tile: 1.0, lambda tile: difference if tile["BN"] == 16 else 0.0)
    found = attempt(GEMV, bench, TILE | {"BN": 16})
    assert found.microseconds is None and found.error == "its result differs from the default tile's"
    assert attempt(GEMV, bench, TILE).microseconds == 1.0


def test_a_tile_that_does_not_run_is_a_trial_with_the_reason():
    def refuse(tile: Tile) -> float:
        raise BadTile("out of resource: shared memory")

    assert attempt(GEMV, Formula(refuse), TILE).error == "out of resource: shared memory"


def test_winners_become_one_table_an_op_that_the_registry_reads_back(tmp_path: Path):
    other = Job("gemv", (4096, 2048), "bfloat16", 1)
    found = {
        Job("gemv", (2048, 5120), "bfloat16", 8): trial(2, 9.0),
        GEMV: trial(8, 10.0),
        other: Trial(other, TILE | {"BN": 4}, 5.0, 0.0),
    }
    [table] = tables(found, "NVIDIA H200", PROVENANCE)
    write_json(table_path(tmp_path, "gemv", "NVIDIA H200"), table)
    registry = Registry("NVIDIA H200", tmp_path)
    looked_up = [registry.find("gemv", {"K": 2048, "N": 5120}, "bfloat16", rows) for rows in (1, 7, 8)]
    assert [one and one["BN"] for one in looked_up] == [8, 8, 2]
    assert registry.find("gemv", {"K": 4096, "N": 2048}, "bfloat16", 1) == TILE | {"BN": 4}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("op", OPS)
def test_every_default_tile_and_its_neighbours_may_stand_in_a_table(tmp_path: Path, op: str, dtype: str):
    # At K = 768 split_gemm cuts into three slices, which is no power of two.
    thirds = replace(RELEASED, hidden=768, heads=6)
    path = table_path(tmp_path, op, "NVIDIA H200")
    for job in (job for stack in (RELEASED, thirds, SMALL) for job in jobs(stack, dtype, [op], ROWS)):
        rows = {number: dict(tile) for number, tile in enumerate(proposals(job, [], default_tile(job)), 1)}
        write_json(path, Table(op, "NVIDIA H200", PROVENANCE, [Entry(job.named(), dtype, rows)]))
        assert read_table(path).entries[0].rows == rows


def blocks(*rows: tuple[int, float, float, float]) -> Mapping[int, Mapping[Route, float]]:
    return {
        count: {Route.PER_PAIR: pairs, Route.ROUTE_ALIGN: aligned, Route.ROUTER_TOPK: apart}
        for count, pairs, aligned, apart in rows
    }


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ([(1, 20, 25, 28), (4, 50, 45, 48), (8, 99, 80, 83), (16, 190, 120, 119)], Limits(1, 64)),
        ([(1, 20, 25, 28), (4, 50, 55, 58), (8, 99, 80, 83), (16, 190, 120, 121)], Limits(4, 128)),
        ([(1, 30, 25, 28), (4, 50, 55, 58)], Limits(0, 32)),
        ([(1, 20, 25, 24), (4, 50, 55, 54)], Limits(4, 32)),
        ([(1, 20, 25, 24), (4, 60, 55, 54), (8, 99, 80, 83)], Limits(1, 8)),
        ([(4, 50, 50, 50)], Limits(4, 32)),
    ],
)
def test_routes_hand_over_where_they_first_lose(times: list[tuple[int, float, float, float]], expected: Limits):
    assert hand_over(blocks(*times), top_k=8) == expected


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("op", OPS)
def test_every_op_runs_at_its_default_tile_and_at_a_neighbour(op: str, rows: int):
    benches = Benches(torch.device("cpu"), WallTimer(), cold_bytes=0, context=6)
    for job in jobs(SMALL, "float32", [op], [rows])[:1]:
        bench = benches.build(job)
        default, *others = proposals(job, [], default_tile(job))
        assert bench.check(default) == 0.0
        assert bench.check(others[-1]) <= 1e-5
        assert bench.microseconds(default) > 0.0


def test_a_bench_has_as_many_copies_as_keep_a_cache_cold():
    job = Job("gemv", (32, 64), "float32", 1)
    of_one = Benches(torch.device("cpu"), WallTimer(), cold_bytes=0).build(job)
    of_four = Benches(torch.device("cpu"), WallTimer(), cold_bytes=4 * 32 * 64 * 4).build(job)
    assert (of_one.copies, of_four.copies) == (1, 4)


def test_a_bench_refuses_a_tile_that_does_not_compile():
    bench = Benches(torch.device("cpu"), WallTimer(), cold_bytes=0).build(Job("gemv", (32, 64), "float32", 1))
    with pytest.raises(BadTile, match="power of 2"):
        bench.check({"BN": 3, "warps": 4, "stages": 1})


def test_compilers_return_the_tiles_that_fail_and_those_that_are_not_done_in_time():
    job = Job("gemv", (32, 64), "float32", 1)
    bad = {"BN": 3, "warps": 4, "stages": 1}
    with Compilers("cpu", 1) as compilers:
        [failed] = compilers.prepare({job: [TILE, bad]}, Budget(120.0))
        late = compilers.prepare({job: [TILE | {"BN": 1 << n} for n in range(6)]}, Budget(0.0))
    assert failed.tile == bad and "power of 2" in (failed.error or "")
    assert late and {one.error for one in late} == {"not compiled in time"}


def test_a_compiler_that_crashes_loses_its_tiles_and_is_replaced():
    job = Job("gemv", (32, 64), "float32", 1)
    with Compilers("cpu", 1) as compilers:
        assert compilers.prepare({job: [TILE]}, Budget(120.0)) == []
        [worker] = multiprocessing.active_children()
        worker.kill()
        worker.join()
        outcomes = [compilers.prepare({job: [TILE]}, Budget(120.0)) for _ in range(2)]
    # Whether the first tile is lost depends on whether the crash was seen before it was handed over.
    assert [one.error for one in outcomes[0]] in ([], ["a compiler crashed before it was done"])
    assert outcomes[1] == []


def tuning(asked: TuneSettings, prepare: Callable[[Wanted, Budget], list[Trial]] = compiled_already) -> Tuning:
    return Tuning(
        asked,
        SMALL,
        dtype="float32",
        gpu="Small GPU",
        provenance=PROVENANCE,
        benches=Benches(torch.device("cpu"), WallTimer(), cold_bytes=0, context=6),
        prepare=prepare,
        console=Console(quiet=True),
    )


def test_a_whole_run_writes_tables_hand_over_points_and_a_log(tmp_path: Path):
    ops = ("gemv", "per_pair_gate_up", ROUTING)
    asked = TuneSettings(out=tmp_path, model="small", ops=ops, rows=(1, 2), hand_over_rows=(1, 2), rounds=1)
    run = tuning(asked)
    run.run()
    registry = Registry("Small GPU", tmp_path)
    for job, won in winners(run.trials).items():
        assert registry.find(job.op, job.named(), "float32", job.rows) == won.tile
    assert {job.op for job in winners(run.trials)} == {"gemv", "per_pair_gate_up"}
    limits = registry.limits({"E": 4, "H": 32, "I": 16, "k": 2}, "float32")
    assert limits == hand_over(run.blocks, top_k=2) and set(run.blocks) == {1, 2}
    assert read_table(table_path(tmp_path, "gemv", "Small GPU")).provenance == PROVENANCE
    log = json.loads(table_path(tmp_path, "log", "Small GPU").read_text())
    assert len(log["trials"]) == len(run.trials) and set(log["blocks"]) == {"1", "2"}


def test_a_run_that_breaks_leaves_the_tables_of_what_it_had_measured(tmp_path: Path):
    asked = TuneSettings(out=tmp_path, model="small", ops=("per_pair_gate_up", "gemv"), rows=(1,), rounds=1)
    calls = []

    def prepare(wanted: Wanted, budget: Budget) -> list[Trial]:
        calls.append(wanted)
        if len(calls) == 2:
            raise WalkgateError("a compiler died")
        return []

    with pytest.raises(WalkgateError, match="a compiler died"):
        tuning(asked, prepare).run()
    found = Registry("Small GPU", tmp_path).find("per_pair_gate_up", {"E": 4, "H": 32, "I": 16, "k": 2}, "float32", 1)
    assert found is not None
    assert not table_path(tmp_path, "gemv", "Small GPU").exists()


def test_a_folder_that_cannot_be_written_is_an_error_that_names_it(tmp_path: Path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(WalkgateError, match=r"can't write .*taken"):
        write_json(table_path(tmp_path / "taken", "gemv", "Small GPU"), {})


def taken_folder(out: Path) -> None:
    out.write_text("")


def taken_op(out: Path) -> None:
    out.mkdir()
    (out / "gemv").write_text("")


def taken_table(out: Path) -> None:
    table_path(out, "gemv", "Small GPU").mkdir(parents=True)


def taken_log(out: Path) -> None:
    table_path(out, "log", "Small GPU").mkdir(parents=True)


@pytest.mark.parametrize("take", [taken_folder, taken_op, taken_table, taken_log])
def test_a_place_that_cannot_be_written_is_told_before_anything_is_compiled(
    tmp_path: Path, take: Callable[[Path], None]
):
    def prepare(wanted: Wanted, budget: Budget) -> list[Trial]:
        raise AssertionError("the sweep began")

    take(tmp_path / "out")
    asked = TuneSettings(out=tmp_path / "out", model="small", ops=("gemv",), rows=(1,), rounds=1)
    with pytest.raises(WalkgateError, match=r"can't write .*Small_GPU\.json: .*; name another folder with --out"):
        tuning(asked, prepare).run()


def test_looking_whether_a_place_can_be_written_leaves_its_files_as_they_were(tmp_path: Path):
    kept, absent = tmp_path / "gemv" / "kept.json", tmp_path / "gemv" / "absent.json"
    write_json(kept, {"a": 1})
    before = kept.read_bytes()
    check_place(kept)
    check_place(absent)
    assert kept.read_bytes() == before and list(tmp_path.rglob("*.*")) == [kept]


def test_the_words_of_the_command_line_become_settings():
    found = settings(Path("out"), "small", "gemv, routing,gemv", "8,1, 2", quick=False, budget_s=60.0)
    assert (found.ops, found.rows, found.rounds) == (("gemv", "routing"), (1, 2, 8), 3)
    assert found.command == "omni tune --model small --ops gemv,routing --rows 1,2,8 --budget-s 60"
    quick = settings(Path("out"), "small", "", "", quick=True, budget_s=60.0)
    assert (quick.ops, quick.rows, quick.rounds) == ((*OPS, ROUTING), (1, 4, 16, 64, 512), 1)


@pytest.mark.parametrize(
    ("ops", "rows", "budget_s", "message"),
    [
        ("gemm", "", 60.0, "--ops: no op is called 'gemm'"),
        ("", "0", 60.0, "--rows must be 1 to 2048, is 0"),
        ("", "4096", 60.0, "--rows must be 1 to 2048, is 4096"),
        ("", "one", 60.0, "--rows must be numbers"),
        ("", "", 0.0, "--budget-s must be above 0"),
        ("", "", math.nan, "--budget-s must be above 0"),
    ],
)
def test_words_that_mean_nothing_are_refused(ops: str, rows: str, budget_s: float, message: str):
    with pytest.raises(SettingError, match=message):
        settings(Path("out"), "small", ops, rows, quick=False, budget_s=budget_s)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to tune")
def test_without_a_gpu_the_command_says_so_and_ends_with_1(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-m", "engine.server.cli", "tune", "--out", str(tmp_path / "tables")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == (
        "omni: omni tune measures kernels on an NVIDIA GPU, and PyTorch finds none on this machine\n"
    )
    assert not (tmp_path / "tables").exists()
