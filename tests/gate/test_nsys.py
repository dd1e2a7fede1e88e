"""Nsight exports: real ones where the data folder has them, and small ones made here, one for each of the format's traps."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gate import nsys, trace
from gate.cli import app
from gate.kernels import Activity, Call, StepRange, TraceError, tables
from tests.shared import shared

PID = 424
THREAD = (PID << 24) + 425
PROCESS = PID << 24
COLUMNS = {
    "StringIds": "id INTEGER, value TEXT",
    "META_DATA_EXPORT": "name TEXT, value TEXT",
    "NVTX_EVENTS": "start INTEGER, end INTEGER, eventType INTEGER, text TEXT, globalTid INTEGER, textId INTEGER",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start INTEGER, end INTEGER, globalTid INTEGER, correlationId INTEGER, nameId INTEGER",
    "CUPTI_ACTIVITY_KIND_KERNEL": "start INTEGER, end INTEGER, deviceId INTEGER, correlationId INTEGER, globalPid INTEGER, "
    "demangledName INTEGER, shortName INTEGER, graphNodeId INTEGER",
    "CUPTI_ACTIVITY_KIND_MEMCPY": "start INTEGER, end INTEGER, deviceId INTEGER, correlationId INTEGER, globalPid INTEGER, "
    "bytes INTEGER, copyKind INTEGER",
    "CUPTI_ACTIVITY_KIND_MEMSET": "start INTEGER, end INTEGER, deviceId INTEGER, correlationId INTEGER, globalPid INTEGER, "
    "value INTEGER, bytes INTEGER",
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": "start INTEGER, end INTEGER, deviceId INTEGER, correlationId INTEGER",
}
STRINGS = [
    (1, "void gemm<(int)4>(int)"),
    (2, "gemm"),
    (3, "_norm_kernel"),
    (4, "walkgate.step 1 decode rows=1 bucket=1"),
]
Rows = dict[str, Sequence[tuple[object, ...]]]


def step(number: int) -> Rows:
    """A step of 200 ns: a range, a graph launch listed twice as some versions do, two kernels, a copy and a fill."""
    at, correlation = 200 * number, 10 * number
    return {
        "NVTX_EVENTS": [(at, at + 90, 59, f"walkgate.step {number} decode rows=1 bucket=1", THREAD, None)],
        "CUPTI_ACTIVITY_KIND_RUNTIME": [
            (at + 2, at + 9, THREAD, correlation, 5),
            (at + 3, at + 8, THREAD, correlation, 6),
            (at + 10, at + 12, THREAD, correlation + 1, 7),
            (at + 14, at + 16, THREAD, correlation + 2, 8),
        ],
        "CUPTI_ACTIVITY_KIND_KERNEL": [
            (at + 50, at + 60, 0, correlation, PROCESS, 1, 2, (2 << 32) + 1),
            (at + 60, at + 65, 0, correlation, PROCESS, 3, 3, (2 << 32) + 2),
        ],
        "CUPTI_ACTIVITY_KIND_MEMCPY": [(at + 70, at + 71, 0, correlation + 1, PROCESS, 8, 2)],
        "CUPTI_ACTIVITY_KIND_MEMSET": [(at + 80, at + 82, 0, correlation + 2, PROCESS, 0, 8)],
    }


def joined(*parts: Rows) -> Rows:
    return {name: [row for part in parts for row in part.get(name, ())] for name in COLUMNS}


def export(path: Path, rows: Rows) -> Path:
    """An export with these rows; a table without rows is left out, as Nsight does."""
    with closing(sqlite3.connect(path)) as made:
        for name, found in rows.items():
            if found:
                made.execute(f"CREATE TABLE {name} ({COLUMNS[name]})")
                made.executemany(f"INSERT INTO {name} VALUES ({', '.join('?' * len(found[0]))})", found)
        made.commit()
    return path


def loop(steps: int, *more: Rows) -> Rows:
    versions = [("EXPORT_PRODUCT_VERSION", "2023.4.4.54"), ("EXPORT_SCHEMA_VERSION", "3.7.2")]
    fixed: Rows = {"StringIds": STRINGS, "META_DATA_EXPORT": versions}
    return joined(fixed, *(step(number) for number in range(steps)), *more)


def test_an_export_is_read_to_ranges_calls_and_activities(tmp_path: Path) -> None:
    found = nsys.read(export(tmp_path / "a.sqlite", loop(2)))

    assert found.source == "Nsight Systems 2023.4.4.54, schema 3.7.2, a.sqlite"
    assert found.ranges[1] == StepRange(PID, str(THREAD), "walkgate.step 1 decode rows=1 bucket=1", 200, 290)
    assert found.calls[0] == Call(PID, str(THREAD), 0, 2)
    assert found.activities[0] == Activity(PID, 0, 0, "void gemm<(int)4>(int)", "gemm", 50, 60)
    assert [one.row for one in found.activities[4:]] == ["Memcpy DtoH", "Memcpy DtoH", "Memset", "Memset"]


def test_a_call_listed_twice_does_not_count_its_kernels_twice(tmp_path: Path) -> None:
    (table,) = tables(trace.read(export(tmp_path / "a.sqlite", loop(6))))

    assert (table.kind, table.steps, table.unattributed_ns) == ("decode rows=1 bucket=1", 4, 0)
    assert {row.name: (row.count, row.total_ns) for row in table.rows} == {
        "gemm": (4, 40),
        "_norm_kernel": (4, 20),
        "Memset": (4, 8),
        "Memcpy DtoH": (4, 4),
    }
    assert (table.union_ns, table.gap_ns, table.span_ns) == (72, 728, 800)


def test_a_ranges_text_stands_in_its_row_or_among_the_strings(tmp_path: Path) -> None:
    by_id: Rows = {"NVTX_EVENTS": [(0, 9, 59, None, THREAD, 4), (20, 29, 60, "started", THREAD, None)]}
    found = nsys.read(export(tmp_path / "a.sqlite", loop(0, by_id)))
    assert [one.text for one in found.ranges] == ["walkgate.step 1 decode rows=1 bucket=1", "started"]


def test_marks_ranges_without_an_end_and_ranges_without_a_name_are_none(tmp_path: Path) -> None:
    others: Rows = {
        "NVTX_EVENTS": [
            (0, None, 34, "a mark", THREAD, None),
            (1, None, 59, "cut off", THREAD, None),
            (2, 9, 59, None, THREAD, None),
            (3, 9, 75, "a domain", THREAD, None),
        ]
    }
    assert nsys.read(export(tmp_path / "a.sqlite", loop(0, others))).ranges == []


def test_a_kernel_without_a_launch_call_is_unattributed(tmp_path: Path) -> None:
    stray: Rows = {"CUPTI_ACTIVITY_KIND_KERNEL": [(500, 507, 0, 999, PROCESS, 3, 3, None)]}
    (table,) = tables(nsys.read(export(tmp_path / "a.sqlite", loop(6, stray))))
    assert (table.unattributed_ns, table.union_ns + table.gap_ns) == (7, 800)


def test_an_export_without_ranges_is_totalled(tmp_path: Path) -> None:
    rows = {**loop(3), "NVTX_EVENTS": []}
    (table,) = tables(nsys.read(export(tmp_path / "a.sqlite", rows)))
    assert (table.kind, table.steps, table.sum_ns, table.span_ns) == (None, None, 54, 432)


def test_an_unknown_kind_of_copy_and_a_lost_name_keep_their_rows(tmp_path: Path) -> None:
    odd: Rows = {
        "CUPTI_ACTIVITY_KIND_KERNEL": [(0, 5, 0, 1, PROCESS, 77, 77, None)],
        "CUPTI_ACTIVITY_KIND_MEMCPY": [(6, 8, 0, 2, PROCESS, 8, 11)],
    }
    (table,) = tables(nsys.read(export(tmp_path / "a.sqlite", loop(0, odd))))
    assert [row.name for row in table.rows] == ["(no name)", "Memcpy of kind 11"]


def test_a_capture_of_graphs_as_wholes_is_refused_with_the_option_that_traces_their_nodes(tmp_path: Path) -> None:
    whole: Rows = {"CUPTI_ACTIVITY_KIND_GRAPH_TRACE": [(0, 9, 0, 1)]}
    with pytest.raises(TraceError, match="--cuda-graph-trace=node"):
        nsys.read(export(tmp_path / "a.sqlite", loop(6, whole)))


def test_what_is_no_export_is_refused_with_its_name(tmp_path: Path) -> None:
    pointer = tmp_path / "pointer.sqlite"
    pointer.write_text("version https://git-lfs.github.com/spec/v1\n" * 40)
    with pytest.raises(TraceError, match=r"pointer\.sqlite is no Nsight export.*Git LFS pointer"):
        nsys.read(pointer)
    with pytest.raises(TraceError, match=r"other\.sqlite is an SQLite file without Nsight's tables"):
        nsys.read(export(tmp_path / "other.sqlite", {"META_DATA_EXPORT": [("a", "b")]}))
    with pytest.raises(TraceError, match=r"there\.sqlite is no Nsight export that can be read.*unable to open"):
        nsys.read(tmp_path / "not there.sqlite")
    with closing(sqlite3.connect(tmp_path / "old.sqlite")) as old:
        old.execute("CREATE TABLE StringIds (id INTEGER, value TEXT)")
        old.execute("CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER)")
    with pytest.raises(TraceError, match=r"old\.sqlite is no Nsight export that can be read.*no such column"):
        nsys.read(tmp_path / "old.sqlite")


@pytest.mark.parametrize(
    ("table", "row"),
    [
        ("CUPTI_ACTIVITY_KIND_KERNEL", (None, None, 0, 1, PROCESS, 1, 2, None)),
        ("CUPTI_ACTIVITY_KIND_KERNEL", ("soon", "late", 0, 1, PROCESS, 1, 2, None)),
        ("CUPTI_ACTIVITY_KIND_KERNEL", (1.5, 2.5, 0, 1, PROCESS, 1, 2, None)),
        ("CUPTI_ACTIVITY_KIND_KERNEL", (0, 5, 0, 1, PROCESS, 90, 2, None)),  # its name is a blob
        ("CUPTI_ACTIVITY_KIND_MEMCPY", (0, 5, 0, 1, PROCESS, 8, None)),
        ("CUPTI_ACTIVITY_KIND_MEMSET", (0, b"5", 0, 1, PROCESS, 0, 8)),
        ("CUPTI_ACTIVITY_KIND_RUNTIME", (0, 5, None, 1, 5)),
        ("NVTX_EVENTS", (0, 5, 59, b"walkgate.step 1 x", THREAD, None)),
        ("META_DATA_EXPORT", (b"EXPORT_PRODUCT_VERSION", "1")),
    ],
)
def test_a_value_of_another_type_is_refused_with_its_table(tmp_path: Path, table: str, row: tuple[object, ...]) -> None:
    odd: Rows = {"StringIds": [(90, b"\xff")], table: [row]}
    path = export(tmp_path / "a.sqlite", loop(6, odd))
    done = CliRunner().invoke(app, ["kernels", str(path)])
    assert (done.exit_code, done.stderr.count("\n")) == (64, 1), done.output
    assert f"{path} has a damaged row in {table}: Expected `" in done.stderr
    assert "export it again: nsys export --type sqlite" in done.stderr


def test_numbers_for_names_are_refused(tmp_path: Path) -> None:
    path = export(tmp_path / "a.sqlite", loop(6))
    with closing(sqlite3.connect(path)) as made:
        made.execute("DROP TABLE StringIds")
        made.execute("CREATE TABLE StringIds (id, value)")
        made.execute("INSERT INTO StringIds VALUES (1, 77)")
        made.commit()
    with pytest.raises(
        TraceError, match=r"a damaged row in CUPTI_ACTIVITY_KIND_KERNEL: Expected `str \| null`, got `int`"
    ):
        nsys.read(path)


def test_a_version_that_is_null_is_unknown(tmp_path: Path) -> None:
    versions: Rows = {"StringIds": STRINGS, "META_DATA_EXPORT": [("EXPORT_PRODUCT_VERSION", None)]}
    found = nsys.read(export(tmp_path / "a.sqlite", joined(versions, step(1))))
    assert found.source == "Nsight Systems unknown, schema unknown, a.sqlite"


def test_an_export_is_only_read(tmp_path: Path) -> None:
    path = export(tmp_path / "a.sqlite", loop(6))
    before = path.read_bytes()
    done = CliRunner().invoke(app, ["kernels", str(path)])
    assert done.exit_code == 0, done.output
    assert (path.read_bytes(), [one.name for one in tmp_path.iterdir()]) == (before, ["a.sqlite"])


def test_a_node_traced_export_of_an_h200_has_every_kernel_in_a_step() -> None:
    found = nsys.read(shared("data", "nsys", "h200_graph_node.sqlite"))
    one, eight = (tables(found, pattern="step ", kind=kind)[0] for kind in ("b=1", "b=8"))

    assert (one.steps, eight.steps) == (26, 12)
    for table in (one, eight):
        assert {row.name: row.count for row in table.rows} == {
            "nvjet_sm90_tst_64x8_64x16_4x1_v_bz_NNT": 4 * (table.steps or 0),
            "at::native::vectorized_elementwise_kernel": 9 * (table.steps or 0),
            "at::native::unrolled_elementwise_kernel": table.steps,
            "softmax_warp_forward": table.steps,
            "at::native::reduce_kernel": table.steps,
            "Memcpy DtoH": table.steps,
        }
        assert table.unattributed_ns == 0
        assert table.union_ns + table.gap_ns == table.span_ns
    assert (one.sum_ns, one.span_ns) == (836_621, 2_747_722)


def test_a_captured_graphs_kernels_share_the_correlation_of_its_launch_in_an_export_of_an_h200() -> None:
    path = shared("data", "nsys", "h200_graph_node.sqlite")
    with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as made:
        counts = made.execute(
            "SELECT COUNT(*), COUNT(graphNodeId) FROM CUPTI_ACTIVITY_KIND_KERNEL JOIN CUPTI_ACTIVITY_KIND_RUNTIME r "
            "USING (correlationId) JOIN StringIds ON id = nameId WHERE value LIKE 'cudaGraphLaunch%' GROUP BY correlationId"
        ).fetchall()
    assert counts == [(14, 14)] * 40


def test_the_torch_profiler_and_nsight_give_the_same_rows_for_the_same_loop() -> None:
    exported, traced = (
        tables(trace.read(shared("data", "nsys", name)), pattern="step")[0]
        for name in ("h200_graph_node.sqlite", "h200_kineto.json")
    )
    counts = [{row.name: row.count / (table.steps or 0) for row in table.rows} for table in (exported, traced)]
    assert counts[0] == counts[1]


@pytest.mark.parametrize(
    ("name", "activities", "kernels", "without_call", "gpus"),
    [("h100_2gpu_1s.sqlite", 4_368, 3_442, 1_810, 2), ("mfu_2gpu_before.sqlite", 5_299, 4_010, 24, 2)],
)
def test_public_exports_are_read_whole(name: str, activities: int, kernels: int, without_call: int, gpus: int) -> None:
    found = nsys.read(shared("data", "nsys", name))
    called = {call.launch for call in found.calls}
    ran = found.activities[:kernels]

    assert len(found.activities) == activities
    assert sum(one.launch not in called for one in ran) == without_call
    assert all(not one.row.startswith("Mem") for one in ran) and found.activities[kernels].row.startswith("Mem")
    totals = tables(found)
    assert len(totals) == gpus
    assert all(table.union_ns + table.gap_ns == table.span_ns and table.steps is None for table in totals)


def test_registered_names_of_a_public_export_are_found() -> None:
    found = nsys.read(shared("data", "nsys", "mfu_2gpu_before.sqlite"))
    assert sum(one.text == "ncclSend" for one in found.ranges) == 132
