"""The tile registry: which table and which row of it, what a bad file says, and that every shipped table is sound."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.kernels import tiles
from engine.kernels.tiles import OPS, ROUTING, SHIPPED, Registry, TableError, read_routing, read_table, table_path
from engine.routing import Limits

GPU = "NVIDIA H200"
SIZES = {"K": 2048, "N": 5120}
EXPERTS = {"E": 128, "H": 2048, "I": 768, "k": 8}
PROVENANCE = {"torch": "2.11", "triton": "3.6", "date": "2026-01-31", "command": "omni tune", "method": "graph replays"}


def tile(bn: int) -> dict[str, int]:
    return {"BN": bn, "warps": 4, "stages": 1}


def gemv_table(rows: dict[str, dict[str, int]], **changed: object) -> dict[str, Any]:
    entry = {"sizes": SIZES, "dtype": "bfloat16", "rows": rows}
    return {"op": "gemv", "gpu": GPU, "provenance": PROVENANCE, "entries": [entry], **changed}


def routing_table(per_pair_rows: int, route_align_slots: int) -> dict[str, Any]:
    limits = {"per_pair_rows": per_pair_rows, "route_align_slots": route_align_slots}
    entry = {"sizes": EXPERTS, "dtype": "bfloat16", "limits": limits}
    return {"op": ROUTING, "gpu": GPU, "provenance": PROVENANCE, "entries": [entry]}


def write(folder: Path, table: dict[str, Any]) -> Path:
    path = table_path(folder, table["op"], table["gpu"])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(table))
    return path


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in place of the shipped tables."""
    folder = tmp_path / "shipped"
    monkeypatch.setattr(tiles, "SHIPPED", folder)
    return folder


def test_a_row_count_takes_the_largest_row_up_to_it(shipped: Path):
    write(shipped, gemv_table({"2": tile(2), "8": tile(8), "16": tile(16)}))
    registry = Registry(GPU)
    rows = (1, 2, 3, 7, 8, 9, 15, 16, 17, 2048)
    found = [registry.find("gemv", SIZES, "bfloat16", count) for count in rows]
    assert [one and one["BN"] for one in found] == [2, 2, 2, 2, 8, 8, 8, 16, 16, 16]


def test_rows_are_ordered_by_number_and_not_as_they_lie_in_the_file(shipped: Path):
    write(shipped, gemv_table({"16": tile(16), "2": tile(2)}))
    assert Registry(GPU).find("gemv", SIZES, "bfloat16", 3) == tile(2)


@pytest.mark.parametrize("gpu", ["NVIDIA H200 NVL", "NVIDIA H20", "nvidia h200"])
def test_another_gpu_takes_no_tile_of_it(shipped: Path, gpu: str):
    write(shipped, gemv_table({"1": tile(1)}))
    assert Registry(gpu).find("gemv", SIZES, "bfloat16", 1) is None


@pytest.mark.parametrize(
    ("op", "sizes", "dtype"),
    [
        ("gemv", {"K": 2048, "N": 128}, "bfloat16"),
        ("gemv", SIZES, "float32"),
        ("split_gemm", SIZES, "bfloat16"),
    ],
)
def test_other_sizes_dtypes_and_ops_take_no_tile_of_it(shipped: Path, op: str, sizes: dict[str, int], dtype: str):
    write(shipped, gemv_table({"1": tile(1)}))
    assert Registry(GPU).find(op, sizes, dtype, 1) is None


def test_the_order_of_sizes_does_not_matter_and_other_names_are_refused(shipped: Path):
    write(shipped, gemv_table({"1": tile(1)}))
    registry = Registry(GPU)
    assert registry.find("gemv", {"N": 5120, "K": 2048}, "bfloat16", 1) == tile(1)
    with pytest.raises(ValueError, match="the sizes of gemv are K, N, not K, M"):
        registry.find("gemv", {"K": 2048, "M": 5120}, "bfloat16", 1)


def test_look_ups_are_counted_by_whether_a_tile_was_found(shipped: Path):
    write(shipped, gemv_table({"1": tile(1)}))
    registry = Registry(GPU)
    for _ in range(3):
        registry.find("gemv", SIZES, "bfloat16", 1)
    for _ in range(2):
        registry.find("gemv", SIZES, "float32", 1)
    assert registry.values() == {"tiles_tuned_total": 3, "tiles_default_total": 2}


def test_a_second_look_up_gives_the_very_same_tile(shipped: Path):
    write(shipped, gemv_table({"1": tile(1)}))
    registry = Registry(GPU)
    assert registry.find("gemv", SIZES, "bfloat16", 5) is registry.find("gemv", SIZES, "bfloat16", 5)


def test_missing_tables_are_one_warning_that_names_the_gpu_and_the_ops(shipped: Path, caplog: pytest.LogCaptureFixture):
    write(shipped, gemv_table({"1": tile(1)}))
    with caplog.at_level(logging.WARNING, "walkgate.engine"):
        registry = Registry(GPU)
        for _ in range(3):
            registry.find("split_gemm", SIZES, "bfloat16", 1)
    [record] = caplog.records
    missing = [*(op for op in OPS if op != "gemv"), ROUTING]
    assert record.getMessage() == (
        f"no tuned tiles for {GPU}: {', '.join(missing)} use defaults; `omni tune` measures them"
    )


def test_a_table_of_ones_own_wins_over_the_shipped_one_op_by_op(shipped: Path, tmp_path: Path):
    write(shipped, gemv_table({"1": tile(1)}))
    write(shipped, routing_table(3, 96))
    own = tmp_path / "own"
    write(own, gemv_table({"1": tile(4)}))
    registry = Registry(GPU, own)
    assert registry.find("gemv", SIZES, "bfloat16", 1) == tile(4)
    assert registry.limits(EXPERTS, "bfloat16") == Limits(3, 96)


def test_hand_over_points_are_those_of_the_experts_and_the_dtype_or_the_defaults(shipped: Path):
    write(shipped, routing_table(0, 64))
    registry = Registry(GPU)
    assert registry.limits(EXPERTS, "bfloat16") == Limits(0, 64)
    assert registry.limits(EXPERTS, "float32") == Limits(4, 512)
    assert registry.limits({**EXPERTS, "k": 6}, "bfloat16") == Limits(4, 512)


def break_key(table: dict[str, Any]) -> None:
    table["entries"][0]["rows"]["1"]["BM"] = 16


def break_missing_key(table: dict[str, Any]) -> None:
    del table["entries"][0]["rows"]["1"]["warps"]


def break_number(table: dict[str, Any]) -> None:
    table["entries"][0]["rows"]["1"]["BN"] = 0


def set_number(key: str, value: int) -> Callable[[dict[str, Any]], None]:
    def spoil(table: dict[str, Any]) -> None:
        table["entries"][0]["rows"]["1"][key] = value

    return spoil


def break_dtype(table: dict[str, Any]) -> None:
    table["entries"][0]["dtype"] = "nonsense"


def break_row(table: dict[str, Any]) -> None:
    table["entries"][0]["rows"]["0"] = tile(1)


def break_rows(table: dict[str, Any]) -> None:
    table["entries"][0]["rows"] = {}


def break_sizes(table: dict[str, Any]) -> None:
    table["entries"][0]["sizes"] = {"K": 2048}


def break_twice(table: dict[str, Any]) -> None:
    table["entries"] *= 2


def break_field(table: dict[str, Any]) -> None:
    table["note"] = "fast"


def break_provenance(table: dict[str, Any]) -> None:
    del table["provenance"]["date"]


def break_gpu(table: dict[str, Any]) -> None:
    table["gpu"] = "NVIDIA B200"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (break_key, "a tile of gemv has the keys BN, warps, stages, not BN, warps, stages, BM"),
        (break_missing_key, "a tile of gemv has the keys BN, warps, stages, not BN, stages"),
        (break_number, r"Expected `int` >= 1.*rows"),
        (set_number("BN", 3), "BN in a tile of gemv must be a power of two from 1 to 1024, is 3"),
        (set_number("BN", 2048), "BN in a tile of gemv must be a power of two from 1 to 1024, is 2048"),
        (
            set_number("BN", 2**70),
            "BN in a tile of gemv must be a power of two from 1 to 1024, is 1180591620717411303424",
        ),
        (set_number("warps", 5), "warps in a tile of gemv must be a power of two from 1 to 16, is 5"),
        (set_number("warps", 32), "warps in a tile of gemv must be a power of two from 1 to 16, is 32"),
        (set_number("stages", 9), "stages in a tile of gemv must be a number from 1 to 8, is 9"),
        (break_dtype, "an entry is for the dtype 'nonsense'; there are float32, bfloat16, float16"),
        (break_row, r"Expected `int` >= 1.*rows"),
        (break_rows, "length >= 1"),
        (break_sizes, "the sizes of an entry are K, N, not K"),
        (break_twice, "two entries are for bfloat16"),
        (break_field, "unknown field `note`"),
        (break_provenance, "missing required field `date`"),
        (break_gpu, "GPU 'NVIDIA B200', which belong in another file"),
    ],
)
def test_a_bad_table_is_an_error_at_start_that_names_the_file_and_the_fix(
    shipped: Path, spoil: Callable[[dict[str, Any]], None], message: str
):
    table = json.loads(json.dumps(gemv_table({"1": tile(1)})))
    path = write(shipped, table)
    spoil(table)
    path.write_text(json.dumps(table))
    with pytest.raises(TableError, match=message) as caught:
        Registry(GPU)
    assert str(path) in str(caught.value) and "`omni tune`" in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe"])
def test_a_file_that_is_no_table_is_an_error_that_names_it(shipped: Path, content: bytes):
    path = table_path(shipped, "gemv", GPU)
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    with pytest.raises(TableError, match=r"NVIDIA_H200\.json"):
        Registry(GPU)


@pytest.mark.parametrize(
    ("op", "key"),
    [("split_gemm", key) for key in ("RP", "BN", "BK")]
    + [(op, key) for op in ("grouped_gate_up", "grouped_down") for key in ("BM", "BN", "BK")]
    + [("decode_attention", "BT")],
)
def test_an_axis_of_a_tensor_core_product_is_at_least_16(tmp_path: Path, op: str, key: str):
    sizes = dict.fromkeys(OPS[op].sizes, 64)
    numbers = dict.fromkeys(OPS[op].tile, 16) | {"stages": 3}
    entry = {"sizes": sizes, "dtype": "bfloat16", "rows": {"1": numbers}}
    path = write(tmp_path, gemv_table({}, op=op, entries=[entry]))
    assert read_table(path).entries[0].rows == {1: numbers}
    numbers[key] = 8
    path = write(tmp_path, gemv_table({}, op=op, entries=[entry]))
    with pytest.raises(TableError, match=f"{key} in a tile of {op} must be a power of two from 16 to 1024, is 8"):
        read_table(path)


def test_a_folder_in_place_of_a_table_is_refused(shipped: Path):
    table_path(shipped, "gemv", GPU).mkdir(parents=True)
    with pytest.raises(TableError, match=r"gemv/NVIDIA_H200\.json: it is not a file"):
        Registry(GPU)


def test_a_link_that_leads_nowhere_does_not_leave_the_shipped_table_in_force(shipped: Path, tmp_path: Path):
    write(shipped, gemv_table({"1": tile(1)}))
    own = table_path(tmp_path / "own", "gemv", GPU)
    own.parent.mkdir(parents=True)
    own.symlink_to(tmp_path / "gone.json")
    with pytest.raises(TableError, match=r"own/gemv/NVIDIA_H200\.json: it is not a file, or a link to one"):
        Registry(GPU, tmp_path / "own")


def test_a_link_to_a_table_serves(shipped: Path, tmp_path: Path):
    path = write(shipped, gemv_table({"1": tile(1)}))
    path.rename(tmp_path / "elsewhere.json")
    path.symlink_to(tmp_path / "elsewhere.json")
    assert Registry(GPU).find("gemv", SIZES, "bfloat16", 1) == tile(1)


def test_a_file_in_place_of_the_folder_of_an_op_is_refused(shipped: Path):
    shipped.mkdir()
    (shipped / "gemv").write_text("")
    with pytest.raises(TableError, match=r"gemv/NVIDIA_H200\.json: Not a directory"):
        Registry(GPU)


def test_a_folder_of_an_unknown_op_is_refused(tmp_path: Path):
    path = write(tmp_path, gemv_table({"1": tile(1)}, op="gemm"))
    with pytest.raises(TableError, match="no op is called 'gemm'"):
        read_table(path)


def test_a_routing_table_is_checked_too(tmp_path: Path):
    path = write(tmp_path, routing_table(-1, 64))
    with pytest.raises(TableError, match="Expected `int` >= 0"):
        read_routing(path)


def test_every_shipped_table_is_sound_and_at_its_place():
    found = sorted(path for path in SHIPPED.rglob("*") if path.is_file())
    for path in found:
        (read_routing if path.parent.name == ROUTING else read_table)(path)
    assert {path.parent.name for path in found} <= {*OPS, ROUTING}
