"""The benchmark of the engine on a GPU, through HTTP: `gate run` over the sets of cells, beside floors, targets and memory.

`python -m tests.perf.h200 --out FOLDER` measures the card's read-only ceiling, runs each set into a folder of its own there,
and writes benchmark.md and benchmark.json from what the runs left. It ends with 1 when a run failed, with 64 on wrong usage,
with 69 without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean

from tests.perf.usage import DEVICES, Parser, checkpoint, count, folder_to_write, require_gpu, require_torch, seconds

# Before the imports that fail without it.
if __name__ == "__main__":
    require_torch("h200")

from engine.model.config import OmniConfig
from engine.model.released import write_released
from gate.cell import Cell
from gate.metrics import measured, session_metrics
from gate.record import Record, RunData, SessionInfo
from gate.run import load_run
from gate.rundir import RunDirError
from gate.workload import default_root, load_cells
from tests.perf.floors import Reads, kv_bytes, text_tok_s, weight_bytes
from tests.shared import REPOSITORY

SETS = ("h200", "h200-audio")
MODEL = "qwen3-omni-30b-a3b"
COPY_BYTES_PER_S = 4.3e12  # what the floors of the design assume an H200 to copy
LEAST_S = 10.0  # a set is not begun with less time left
# (must, aim); None where there is none.
SPEEDS: dict[str, tuple[float | None, float | None]] = {
    "T2T@1": (400, 500),
    "T2T@4": (750, 850),
    "T2T@8": (950, 1080),
    "T2T@16": (1300, 1450),
    "T2T@64": (3600, 3900),
    "A2T@1": (75, 100),
    "A2T@16": (220, 260),
    "A2T@64": (None, 450),
}
LATENCIES: dict[tuple[str, str], tuple[float | None, float | None]] = {
    ("T2T@1", "TTFT p50"): (21, 18),
    ("T2T@64", "TTFT p99"): (300, None),
    ("A2T@1", "TTFT p50"): (None, 25),
    ("A2T@16", "TTFT p50"): (None, 150),
}
# RTFx of clips of 7.7 s at COPY_BYTES_PER_S: the design's own figures, with the encoder's and the prompts' arithmetic in them.
AUDIO_FLOORS = {"A2T@1": 142.0, "A2T@16": 330.0}
SPARE_BYTES = 8e9
CACHES = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
}
STEPS = ("steps_captured", "prompt_steps_captured", "steps_eager")
PAGE, VALUES = "benchmark.md", "benchmark.json"


@dataclass(frozen=True, slots=True)
class Row:
    """A cell over all sessions: its primary metric and latencies by session, and what its counters and answers say.

    `floor` is in the metric's unit, at the bandwidth that the design assumes; the shares are of the sessions' mean. `captured`
    counts steps by how they ran, `plan_hits` is a share, `distinct` tokens are the mean over the steps of all answers.
    """

    cell: str
    metric: str
    values: dict[str, float]
    ttft_p50_ms: dict[str, float]
    ttft_p99_ms: dict[str, float]
    failed: int
    floor: float | None
    must: float | None
    aim: float | None
    share_of_floor: float | None
    share_of_ceiling: float | None
    compiled_late: float | None
    plan_hits: float | None
    captured: dict[str, float]
    requests: int
    answers: int
    distinct: float | None

    @property
    def mean(self) -> float | None:
        """The mean over sessions; None before a session is whole."""
        return fmean(self.values.values()) if self.values else None


@dataclass(slots=True)
class Memory:
    """The GPU memory in use, in bytes: before a run, and the most that was seen while it lasted; None without nvidia-smi."""

    before: int | None = None
    peak: int | None = None


@dataclass(slots=True)
class Bench:
    """Everything that a benchmark came to so far. `ceiling` is bytes a second, None where it was not measured."""

    ceiling: float | None
    gpu: str
    rows: list[Row] = field(default_factory=list)
    boots: list[dict[str, object]] = field(default_factory=list)
    memory: dict[str, Memory] = field(default_factory=dict)
    expected_bytes: int | None = None
    problems: list[str] = field(default_factory=list)


def rows_of(run: RunData, config: OmniConfig, ceiling: float | None) -> list[Row]:
    """The rows of a run's cells, in the plan's order; a cell that no session finished has no values."""
    values = {(row.cell, row.metric, row.session): row.value for row in session_metrics(run)}
    return [_row(run, cell, values, config, ceiling) for cell in run.plan.cells]


def _row(
    run: RunData, cell: Cell, values: dict[tuple[str, str, str], float], config: OmniConfig, ceiling: float | None
) -> Row:
    sessions = [session.id for session in run.sessions]

    def by_session(metric: str) -> dict[str, float]:
        found = {session: values.get((cell.name, metric, session)) for session in sessions}
        return {session: round(value, 3) for session, value in found.items() if value is not None}

    speeds, floor = by_session(cell.primary), floor_of(cell, config, COPY_BYTES_PER_S)
    mean = fmean(speeds.values()) if speeds else None
    must, aim = SPEEDS.get(cell.name, (None, None))
    at_ceiling = floor * ceiling / COPY_BYTES_PER_S if floor and ceiling else None
    records = [record for session in sessions for record in measured(run.records, session, cell.name)]
    return Row(
        cell=cell.name,
        metric=cell.primary,
        values=speeds,
        ttft_p50_ms=by_session("TTFT p50"),
        ttft_p99_ms=by_session("TTFT p99"),
        failed=sum(not record.ok for record in records),
        floor=floor,
        must=must,
        aim=aim,
        share_of_floor=mean / floor if mean and floor else None,
        share_of_ceiling=mean / at_ceiling if mean and at_ceiling else None,
        compiled_late=_counted(run.sessions, cell, "kernels_compiled_late"),
        plan_hits=_plan_hits(run.sessions, cell),
        captured={name: _counted(run.sessions, cell, name) or 0.0 for name in STEPS},
        requests=len(records),
        answers=len({tuple(record.token_ids) for record in records if record.ok}),
        distinct=distinct_tokens(records),
    )


def floor_of(cell: Cell, config: OmniConfig, bytes_per_s: float) -> float | None:
    """The most that a cell can reach in its primary metric; None for one without a floor."""
    if cell.task != "T2T" or cell.prompt_tokens is None:
        known = AUDIO_FLOORS.get(cell.name)
        return known and known * bytes_per_s / COPY_BYTES_PER_S
    return text_tok_s(Reads.of(config.thinker), cell.concurrency, cell.prompt_tokens, cell.max_tokens, bytes_per_s)


def _counted(sessions: Sequence[SessionInfo], cell: Cell, name: str) -> float | None:
    """What a counter grew by while a cell ran, warm waves included, over all sessions; None where no server has it."""
    key = f"{cell.name} walkgate_{name}_total"
    found = [session.counters[key] for session in sessions if key in session.counters]
    return sum(found) if found else None


def _plan_hits(sessions: Sequence[SessionInfo], cell: Cell) -> float | None:
    """The share of the Thinker's decode steps whose plan the cache had."""
    hits = _counted(sessions, cell, "thinker_plan_cache_hits")
    if hits is None:
        return None
    reasons = ("first", "rows", "generation", "pages")
    misses = sum(_counted(sessions, cell, f"thinker_plan_cache_misses_{reason}") or 0.0 for reason in reasons)
    return hits / (hits + misses) if hits + misses else None


def distinct_tokens(records: Sequence[Record]) -> float | None:
    """How many different tokens the answers of one session hold at a step, as the mean over steps and sessions.

    A model whose answers are all alike would read fewer experts than one that is asked different things.
    """
    by_session: dict[str, list[list[int]]] = {}
    for record in records:
        if record.ok:
            by_session.setdefault(record.session, []).append(record.token_ids)
    counts = [len(set(step)) for answers in by_session.values() for step in zip(*answers, strict=False)]
    return fmean(counts) if counts else None


def boots_of(run: RunData) -> list[dict[str, object]]:
    """Of each session how long its boot took, in seconds: as the gate saw it, and as the engine says of itself."""
    return [
        {
            "session": f"{run.plan.set_name} {session.id}",
            "ready_s": session.boot_seconds,
            "engine_s": session.info.get("engine_boot_seconds"),
            "problems": session.problems,
        }
        for session in run.sessions
    ]


def expected_bytes(run: RunData, config: OmniConfig) -> int | None:
    """Weights and KV pages of a server, in bytes, by what its /info says of its pages; None before a session has one."""
    limits = next((session.info["limits"] for session in run.sessions if "limits" in session.info), None)
    if limits is None:
        return None
    return weight_bytes(config) + kv_bytes(config, int(limits["kv_pages"]) * int(limits["page_size"]))


def markdown(bench: Bench) -> str:
    """The benchmark as one page."""
    ceiling = "not measured" if bench.ceiling is None else f"{bench.ceiling / 1e12:.3f} TB/s"
    lines = [
        f"# Benchmark on {bench.gpu}",
        "",
        f"Read-only ceiling of the card: {ceiling}. Floors are for the closed loop at {COPY_BYTES_PER_S / 1e12:g} TB/s; the "
        "share of the ceiling is that of the floor at the bandwidth measured here. Every session is shown raw.",
        "",
        "| cell | metric | sessions | floor | of floor | of ceiling | must | aim | reached |",
        "|---|---|---|---:|---:|---:|---:|---:|---|",
    ]
    lines += [_speed_line(row) for row in bench.rows]
    lines += ["", "| cell | TTFT p50 ms | TTFT p99 ms | must | aim |", "|---|---|---|---:|---:|"]
    lines += [_latency_line(row) for row in bench.rows]
    lines += [
        "",
        "| cell | requests | failed | different answers | tokens at a step | steps captured | with prompts | eager | plan hits "
        "| compiled late |",
        f"|---|{'---:|' * 9}",
    ]
    lines += [_counter_line(row) for row in bench.rows]
    lines += ["", "| boot | ready s | engine s |", "|---|---:|---:|"]
    lines += [
        f"| {boot['session']} | {_number(boot['ready_s'])} | {_number(boot['engine_s'])} |" for boot in bench.boots
    ]
    lines += ["", *_memory_lines(bench), *(f"Problem: {problem}" for problem in bench.problems)]
    return "\n".join(lines).rstrip() + "\n"


def _speed_line(row: Row) -> str:
    raw = " ".join(f"{value:.4g}" if value < 1000 else f"{value:.0f}" for value in row.values.values())
    cells = [
        row.cell,
        row.metric,
        raw or "–",
        _number(row.floor),
        _share(row.share_of_floor),
        _share(row.share_of_ceiling),
    ]
    return f"| {' | '.join([*cells, _number(row.must), _number(row.aim), _reached(row)])} |"


def _reached(row: Row) -> str:
    if row.mean is None:
        return "not measured"
    if row.aim is not None and row.mean >= row.aim:
        return "aim"
    if row.must is None:
        return "–"
    return "must" if row.mean >= row.must else "**no**"


def _latency_line(row: Row) -> str:
    goals = [LATENCIES.get((row.cell, name), (None, None)) for name in ("TTFT p50", "TTFT p99")]
    must, aim = (
        ", ".join(
            f"{name} {goal[k]:g}" for name, goal in zip(("p50", "p99"), goals, strict=True) if goal[k] is not None
        )
        for k in (0, 1)
    )
    raw = (" ".join(f"{value:.1f}" for value in one.values()) for one in (row.ttft_p50_ms, row.ttft_p99_ms))
    return f"| {' | '.join([row.cell, *(text or '–' for text in (*raw, must, aim))])} |"


def _counter_line(row: Row) -> str:
    steps = (f"{row.captured[name]:.0f}" for name in STEPS)
    words = [str(row.requests), str(row.failed), str(row.answers), _number(row.distinct), *steps]
    return f"| {' | '.join([row.cell, *words, _share(row.plan_hits), _number(row.compiled_late)])} |"


def _memory_lines(bench: Bench) -> Iterator[str]:
    for name, memory in bench.memory.items():
        if memory.peak is None or memory.before is None:
            continue
        used = memory.peak - memory.before
        text = f"GPU memory at its peak during {name}: {used / 1e9:.1f} GB (before: {memory.before / 1e9:.1f} GB)"
        if bench.expected_bytes is not None:
            over = used - bench.expected_bytes
            text += f"; weights and KV pages {bench.expected_bytes / 1e9:.1f} GB, so {over / 1e9:+.1f} GB beside them"
            text += f" (at most {SPARE_BYTES / 1e9:g}{': **missed**' if over > SPARE_BYTES else ''})"
        yield from (f"{text}.", "")


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else "–"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


@contextmanager
def watched_memory(interval_s: float = 1.0) -> Iterator[Memory]:
    """Note the memory in use on the first GPU before and, every `interval_s` seconds, while the context lasts."""
    memory, over = Memory(before=gpu_memory()), threading.Event()

    def watch() -> None:
        while not over.wait(interval_s):
            now = gpu_memory()
            memory.peak = now if memory.peak is None else max(memory.peak, now or 0)

    thread = threading.Thread(target=watch, daemon=True)
    if memory.before is not None:
        thread.start()
    try:
        yield memory
    finally:
        over.set()
        if thread.is_alive():
            thread.join()


def gpu_memory() -> int | None:
    """The bytes in use on the first GPU as nvidia-smi says; None without it."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    return int(done.stdout.split()[0]) << 20 if done.returncode == 0 and done.stdout.strip() else None


def measured_ceiling(device: str) -> dict[str, object]:
    """What ceiling.py measures, from a process of its own; empty on a CPU."""
    if device != "cuda":
        return {}
    done = subprocess.run(
        [sys.executable, "-m", "tests.perf.ceiling"], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, check=True
    )
    return dict(json.loads(done.stdout.splitlines()[-1]))


def chosen(asked: argparse.Namespace) -> dict[str, list[str]]:
    """The sets that are asked for, each with those of its cells that are; ValueError for a set or a cell that is none."""
    known = load_cells(asked.workloads or default_root())
    absent = next((name for name in asked.sets.split(",") if name not in known), None)
    if absent is not None:
        raise ValueError(f"--sets: there is no {absent!r}; there are {', '.join(known)}")
    wanted = [cell for cell in asked.cells.split(",") if cell]
    found = {name: [cell.name for cell in known[name].cells] for name in asked.sets.split(",")}
    lost = [cell for cell in wanted if not any(cell in cells for cells in found.values())]
    if lost:
        raise ValueError(f"--cells: {lost[0]!r} is in none of {asked.sets}")
    kept = {name: [cell for cell in cells if not wanted or cell in wanted] for name, cells in found.items()}
    return {name: cells for name, cells in kept.items() if cells}


def gate_words(
    asked: argparse.Namespace, name: str, cells: Sequence[str], folder: Path, caches: Path, left_s: float
) -> list[str]:
    """The command line that runs cells of a set into a folder; every server compiles into the same caches."""
    words = [sys.executable, "-m", "gate", "run", ".", "--set", name, "--run", str(folder), "--device", asked.device]
    words += ["--model", asked.model, "--sessions", str(asked.sessions), "--boot-timeout", str(asked.boot_timeout)]
    words += ["--args", asked.args] if asked.args else []
    words += ["--cells", ",".join(cells)]
    words += ["--workloads", str(asked.workloads.resolve())] if asked.workloads else []
    words += ["--librispeech", asked.librispeech] if asked.librispeech and name.endswith("audio") else []
    words += ["--stop-after", f"{left_s:.0f}s"] if left_s != float("inf") else []
    env = {variable: str(caches / place) for variable, place in CACHES.items()}
    # The gate gives its servers no import path but their own tree; packages that are nowhere else must be named.
    named = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    path = os.pathsep.join(str(Path(place).resolve()) for place in named)
    env |= {"PYTHONPATH": path} if path else {}
    return words + [word for key, value in env.items() for word in ("--env", f"{key}={value}")]


def benchmark(asked: argparse.Namespace) -> Bench:
    """Measure the ceiling and run every set that is asked for; what failed is a problem of the result."""
    began, card = time.monotonic(), measured_ceiling(asked.device)
    bench = Bench(float(str(card["best_bytes_per_s"])) if card else None, str(card.get("gpu", "a CPU")))
    with tempfile.TemporaryDirectory(prefix="h200-") as place:
        caches, config = asked.caches or Path(place) / "caches", _config(asked.model, Path(place) / "shapes")
        for name, cells in chosen(asked).items():
            left_s = asked.stop_after - (time.monotonic() - began)
            if left_s < LEAST_S:
                bench.problems.append(f"no time was left for {name}")
                continue
            words = gate_words(asked, name, cells, asked.out / name, caches, left_s)
            _run_set(bench, name, asked.out / name, words, config)
            write(asked.out, bench)
    return bench


def _run_set(bench: Bench, name: str, folder: Path, words: Sequence[str], config: OmniConfig) -> None:
    """Run a set and add what its folder holds."""
    with watched_memory() as bench.memory[name]:
        code = subprocess.run(words, cwd=REPOSITORY).returncode
    if code:
        bench.problems.append(f"gate run of {name} ended with {code}")
    try:
        run = load_run(folder)
    except RunDirError as error:
        bench.problems.append(str(error))
        return
    rows = rows_of(run, config, bench.ceiling)
    bench.rows += rows
    bench.boots += boots_of(run)
    bench.expected_bytes = bench.expected_bytes or expected_bytes(run, config)
    bench.problems += [f"{row.failed} requests of {row.cell} failed" for row in rows if row.failed]
    bench.problems += [f"{row.cell} was not measured" for row in rows if not row.values]


def _config(model: str, place: Path) -> OmniConfig:
    """The sizes of a checkpoint folder, or of the released shapes that the server knows by name."""
    if Path(model).is_dir():
        return OmniConfig.load(Path(model))
    write_released(place)
    return OmniConfig.load(place)


def write(out: Path, bench: Bench) -> None:
    """Write benchmark.md and benchmark.json into a folder."""
    out.mkdir(parents=True, exist_ok=True)
    (out / PAGE).write_text(markdown(bench), encoding="utf-8")
    (out / VALUES).write_text(json.dumps(asdict(bench), indent=1) + "\n", encoding="utf-8")


def earlier(out: Path, sets: Iterable[str]) -> list[str]:
    """The names of what an earlier benchmark left in a folder, which is not to be mixed with another one's."""
    return [name for name in (*sets, PAGE, VALUES) if (out / name).exists()]


def parser() -> Parser:
    """The command line."""
    found = Parser("h200", __doc__)
    found.add_argument("--out", type=folder_to_write, required=True, help="a folder without earlier runs in it")
    found.add_argument("--sets", default=",".join(SETS), help="sets of workloads/cells.toml")
    found.add_argument("--cells", default="", help="only these of their cells")
    found.add_argument(
        "--sessions", type=count, default=2, help="server boots a set; the very first compiles its kernels"
    )
    found.add_argument(
        "--librispeech", type=_librispeech, help="a folder in LibriSpeech's layout, or hub, for the audio sets"
    )
    found.add_argument(
        "--stop-after", type=seconds, default=float("inf"), help="seconds; ends at the boundary of a cell"
    )
    found.add_argument(
        "--model", type=_model, default=MODEL, help="a name that `omni serve` knows, or a checkpoint folder"
    )
    found.add_argument("--args", default="--load-format dummy", help="more arguments of the server")
    found.add_argument("--device", choices=DEVICES, default="cuda")
    found.add_argument(
        "--caches",
        type=folder_to_write,
        help="a folder for compiled kernels; absent: a new one, so that boot 1 is cold",
    )
    found.add_argument("--workloads", type=Path, help="a folder with cells.toml; absent: the repository's")
    found.add_argument("--boot-timeout", type=seconds, default=400.0)
    return found


def _librispeech(text: str) -> str:
    if text == "hub":
        return text
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is no folder; name one in LibriSpeech's layout, or hub")
    return str(Path(text).resolve())


def _model(text: str) -> str:
    return text if text == MODEL else str(checkpoint(text).resolve())


def main() -> int:
    """Run the benchmark, print its page, and return 1 when something failed."""
    asked = parser().parse_args()
    asked.out = asked.out.resolve()
    try:
        sets = chosen(asked)
    except ValueError as error:
        parser().error(str(error))
    if not asked.librispeech and any(name.endswith("audio") for name in sets):
        parser().error("the audio set needs --librispeech PATH, or hub; --sets h200 leaves it out")
    if found := earlier(asked.out, sets):
        names = ", ".join(found)
        parser().error(
            f"--out: {asked.out} holds an earlier benchmark ({names}); remove these to run it again, or name another folder"
        )
    require_gpu("h200", asked.device)
    bench = benchmark(asked)
    write(asked.out, bench)
    print(markdown(bench))
    return int(bool(bench.problems))


if __name__ == "__main__":
    sys.exit(main())
