"""Torch-profiler traces: real ones where the data folder has them, small ones written here, and the command on both."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from gate import trace
from gate.cli import app
from gate.kernels import Activity, Call, StepRange, TraceError, tables
from tests.shared import shared

CLOCK_US = (
    "5111986805896.188"  # of a machine that has been up for two months; a binary float holds it to a nanosecond at best
)


def at(us: str) -> str:
    """A time of the trace, `us` microseconds after CLOCK_US, as the profiler writes it."""
    whole, _, part = CLOCK_US.partition(".")
    nanoseconds = int(whole + part) + int(us.replace(".", ""))
    return f"{nanoseconds // 1000}.{nanoseconds % 1000:03}"


def ns(us: str) -> int:
    return int(at(us).replace(".", ""))


def event(cat: str, name: str, start: str, us: str, **args: object) -> str:
    """A complete event as JSON text; `start` and `us` have three decimals."""
    host = cat in ("user_annotation", "cuda_runtime", "cuda_driver", "cpu_op")
    place = '"pid": 424, "tid": 425' if host else '"pid": 0, "tid": 7'
    return (
        f'{{"ph": "X", "cat": "{cat}", "name": {json.dumps(name)}, {place}, "ts": {at(start)}, "dur": {us}, '
        f'"args": {json.dumps(args)}}}'
    )


def step(number: int, kind: str = "decode rows=1 bucket=1") -> list[str]:
    """A step that launches a graph of two kernels and, by the driver, one eager kernel; its copy back follows."""
    host, gpu = f"{200 * number}.000", f"{200 * number + 50}.000"
    return [
        event("user_annotation", f"walkgate.step {number} {kind}", host, "90.000"),
        event("gpu_user_annotation", f"walkgate.step {number} {kind}", gpu, "40.000"),
        event("cpu_op", "aten::add", f"{200 * number + 1}.000", "2.000", device="not a number"),
        event("cuda_runtime", "cudaGraphLaunch", f"{200 * number + 2}.500", "9.000", correlation=10 * number),
        event("cuda_driver", "cuLaunchKernelEx", f"{200 * number + 20}.000", "3.000", correlation=10 * number + 1),
        event("cuda_runtime", "cudaMemcpyAsync", f"{200 * number + 30}.000", "3.000", correlation=10 * number + 2),
        event("kernel", "void gemm<4>(int)", gpu, "10.001", device=0, correlation=10 * number),
        event("kernel", "_norm_kernel", f"{200 * number + 60}.001", "5.500", device=0, correlation=10 * number),
        event("kernel", "_argmax_kernel", f"{200 * number + 70}.000", "2.000", device=0, correlation=10 * number + 1),
        event(
            *("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", f"{200 * number + 75}.000", "1.250"),
            device=0,
            correlation=10 * number + 2,
        ),
    ]


def document(*events: str) -> str:
    meta = '{"ph": "M", "name": "process_name", "pid": 424, "tid": 0, "ts": 1.5, "args": {"name": "python3"}}'
    flow = f'{{"ph": "s", "id": 4, "pid": 424, "tid": 425, "ts": {CLOCK_US}, "cat": "ac2g", "name": "ac2g"}}'
    spans = f'{{"ph": "X", "cat": "Trace", "ts": {CLOCK_US}, "dur": 1, "pid": "Spans", "tid": "Profiler", "name": "P"}}'
    return (
        f'{{"schemaVersion": 1, "displayTimeUnit": "ms", "traceEvents": [{", ".join([meta, flow, spans, *events])}]}}'
    )


def write(path: Path, *events: str) -> Path:
    text = document(*events).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def call(*words: object) -> Result:
    return CliRunner().invoke(app, ["kernels", *map(str, words)])


def test_times_are_read_to_the_nanosecond(tmp_path: Path) -> None:
    found = trace.read(write(tmp_path / "a.json", *step(3)))

    assert found.source == "torch profiler, a.json"
    text = "walkgate.step 3 decode rows=1 bucket=1"
    assert found.ranges == [StepRange(0, "424/425", text, ns("600.000"), ns("690.000"))]
    assert found.calls[0] == Call(0, "424/425", 30, ns("602.500"))
    gemm, norm, argmax, copy = found.activities
    assert gemm == Activity(0, 0, 30, "void gemm<4>(int)", "gemm", ns("650.000"), ns("660.001"))
    assert (norm.start_ns, norm.end_ns) == (ns("660.001"), ns("665.501"))
    assert (argmax.row, copy.row, copy.name) == ("_argmax_kernel", "Memcpy DtoH", "Memcpy DtoH (Device -> Pinned)")


def test_a_step_is_its_graphs_kernels_its_eager_ones_and_its_copies(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json.gz", *(one for number in range(6) for one in step(number)))
    (found,) = tables(trace.read(path))

    assert (found.kind, found.steps) == ("decode rows=1 bucket=1", 4)
    assert [(row.name, row.count, row.total_ns) for row in found.rows] == [
        ("gemm", 4, 40_004),
        ("_norm_kernel", 4, 22_000),
        ("_argmax_kernel", 4, 8_000),
        ("Memcpy DtoH", 4, 5_000),
    ]
    assert (found.union_ns, found.gap_ns, found.span_ns) == (75_004, 724_996, 800_000)
    assert found.unattributed_ns == 0


def test_a_damaged_or_foreign_file_is_refused_with_its_name(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole.json.gz", *step(1)).read_bytes()
    damaged = {
        "cut.json": document(*step(1)).encode()[:-40],
        "cut.json.gz": whole[:-40],
        "not.json.gz": b"no gzip",
        "list.json": b"[]",
        "other.json": b'{"metrics": []}',
        "args.json": document(event("kernel", "k", "1.000", "1.000", device=0)).encode(),
    }
    for name, data in damaged.items():
        path = tmp_path / name
        path.write_bytes(data)
        with pytest.raises(TraceError, match=f"{name} is no whole torch-profiler trace"):
            trace.read(path)


@pytest.mark.parametrize("time", ['"NaN"', '"Infinity"', "1e999999", "1e400", "1e30", "-1e30"])
@pytest.mark.parametrize("field", ["ts", "dur"])
def test_a_time_that_no_clock_shows_is_refused_with_its_event(tmp_path: Path, field: str, time: str) -> None:
    lines = [line.replace(f'"{field}": ', f'"{field}": {time}, "other": ') for line in step(1)]
    for index in (0, 3, 6, 9):  # a range, a call, a kernel and a copy
        path = write(tmp_path / "a.json", *step(0), lines[index])
        done = call(path)
        assert (done.exit_code, done.stderr.count("\n")) == (64, 1), done.output
        assert str(path) in done.stderr and "has ts " in done.stderr and "record it again" in done.stderr


def test_deep_nesting_is_refused(tmp_path: Path) -> None:
    deep = event("kernel", "k", "1.000", "1.000", a=0).replace(
        '"a": 0', '"a": ' + '{"a": ' * 100_000 + "1" + "}" * 100_000
    )
    done = call(write(tmp_path / "deep.json", deep))
    assert (done.exit_code, done.stderr.count("\n")) == (64, 1), done.output
    assert "deep.json is no whole torch-profiler trace" in done.stderr


@pytest.mark.parametrize("name", ["large.json", "large.json.gz"])
def test_a_trace_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    path = write(tmp_path / name, *step(1))
    size = len(document(*step(1)).encode())
    monkeypatch.setattr(trace, "MOST_BYTES", size)
    assert len(trace.read(path).activities) == 4
    monkeypatch.setattr(trace, "MOST_BYTES", size - 1)
    with pytest.raises(TraceError, match=f"{name} holds more than {size - 1:,} bytes of JSON; record fewer steps"):
        trace.read(path)


def test_a_trace_that_memory_can_not_hold_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "large.json"
    with path.open("wb") as file:
        file.truncate(1 << 30)  # takes no place on the disk
    limited = (
        "import resource, sys\n"
        "from gate.cli import main\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", limited, "kernels", str(path)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (64, f"gate: {path} takes more memory than there is; record fewer steps\n")


def test_a_report_of_nsight_is_refused_with_the_command_that_exports_it(tmp_path: Path) -> None:
    report = tmp_path / "run.nsys-rep"
    report.write_bytes(b"")
    done = call(report)
    assert done.exit_code == 64
    assert f"nsys export --type sqlite --output {tmp_path / 'run.sqlite'} {report}" in done.stderr


def test_a_file_of_no_known_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"neither a torch-profiler trace \(.json, .json.gz\) nor an Nsight export"):
        trace.read(tmp_path / "a.txt")


def test_the_command_prints_the_table_and_writes_its_json(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", *(one for number in range(6) for one in step(number)))
    out = tmp_path / "out.json"
    done = call(path, "--top", 2, "--json", out)

    assert done.exit_code == 0, done.output
    assert "| `gemm` | 1 × 10.00 = 10.00 | 53.3 % |" in done.stdout
    assert "| 2 others | 2 × 1.62 = 3.25 | 17.3 % |" in done.stdout
    assert "| in all, ns | 75,004 | 75,004 | 724,996 | 800,000 | 0 |" in done.stdout
    (table,) = json.loads(out.read_text())["head"]
    assert table["union_ns"] + table["gap_ns"] == table["span_ns"] == 800_000
    assert len(table["rows"]) == 4


def test_the_command_shows_the_change_from_a_base(tmp_path: Path) -> None:
    base = write(tmp_path / "base.json", *(one for number in range(6) for one in step(number)))
    slower = [one.replace('"dur": 5.500', '"dur": 8.500') for number in range(6) for one in step(number)]
    done = call(write(tmp_path / "head.json", *slower), "--base", base)

    assert done.exit_code == 0, done.output
    assert "| `_norm_kernel` | 1 × 5.50 = 5.50 | 1 × 8.50 = 8.50 | +3.00 |" in done.stdout
    assert "| gap | 181.25 | 178.25 | −3.00 |" in done.stdout


def test_a_file_that_can_not_be_read_is_refused_in_the_gates_own_words(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", *(one for number in range(6) for one in step(number)))
    for wrong, why in ((tmp_path / "none.json", "No such file or directory"), (tmp_path, "Is a directory")):
        for words in ((wrong,), (path, "--base", wrong), (wrong, "--json", path)):
            done = call(*words)
            assert (done.exit_code, done.stdout) == (64, "")
            assert done.stderr == f"gate: {wrong} can't be read: {why}; name a file of a profiler\n"


def test_the_json_never_overwrites_a_file_that_is_read(tmp_path: Path) -> None:
    path, base = (
        write(tmp_path / name, *(one for number in range(6) for one in step(number))) for name in ("a.json", "b.json")
    )
    link = tmp_path / "link.json"
    link.symlink_to(base)
    before = path.read_bytes()
    for out in (path, base, link, tmp_path / "." / "a.json"):
        done = call(path, "--base", base, "--json", out)
        assert done.exit_code == 64, done.output
        assert f"--json {out} is a file that is read; name another" in done.stderr
    assert path.read_bytes() == base.read_bytes() == before


def test_a_full_disk_is_no_usage_error(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", *(one for number in range(6) for one in step(number)))
    done = call(path, "--json", "/dev/full")
    assert done.exit_code == 70
    assert "the disk is full" in done.stderr


def test_wrong_usage_ends_with_64_and_a_sentence(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", *(one for number in range(6) for one in step(number)))
    cases = [
        ((path, "--steps", 6, "--range", "x"), "--steps takes the whole file"),
        ((path, "--range", "forward"), "no range of the file begins with 'forward'"),
        ((path, "--kind", "decode"), "no step of --kind 'decode'"),
        (
            (write(tmp_path / "cpu.json", *step(1)[:1]),),
            "cpu.json: the file holds no kernel, copy or fill of a GPU; was it",
        ),
        ((path, "--json", tmp_path / "none" / "out.json"), "out.json can't be written: No such file or directory"),
        ((path, "--json", tmp_path), "can't be written: Is a directory"),
        ((path, "--json", tmp_path / ("x" * 300)), "can't be written: File name too long"),
    ]
    for words, sentence in cases:
        done = call(*words)
        assert done.exit_code == 64, done.output
        assert sentence in done.stderr and done.stderr.startswith("gate: ")


def test_a_trace_of_an_h200_has_every_kernel_in_a_step() -> None:
    found = trace.read(shared("data", "nsys", "h200_kineto.json"))
    (table,) = tables(found, pattern="step")

    assert (len(found.activities), table.steps) == (510, 28)
    assert {row.name: row.count for row in table.rows} == {
        "nvjet_sm90_tst_64x8_64x16_4x1_v_bz_NNT": 4 * 28,
        "at::native::vectorized_elementwise_kernel": 9 * 28,
        "at::native::unrolled_elementwise_kernel": 28,
        "softmax_warp_forward": 28,
        "at::native::reduce_kernel": 28,
        "Memcpy DtoH": 28,
    }
    assert table.notes == ("28 of 30 steps of the file, the first and the last dropped",)
    assert (table.sum_ns, table.union_ns, table.gap_ns, table.span_ns) == (891_577, 891_577, 3_671_380, 4_562_957)
    assert table.unattributed_ns == 0


def test_a_captured_graphs_kernels_share_the_correlation_of_its_launch_in_a_trace_of_an_h200() -> None:
    found = trace.read(shared("data", "nsys", "h200_kineto.json"))
    events = json.loads(shared("data", "nsys", "h200_kineto.json").read_text())["traceEvents"]
    launches = {one["args"]["correlation"] for one in events if one["name"] == "cudaGraphLaunch"}
    replayed = [one.correlation for one in found.activities if one.correlation in launches]

    assert len(launches) == 30
    assert {replayed.count(launch) for launch in launches} == {14}
