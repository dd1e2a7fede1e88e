"""`omni tune`: tune the kernels on this machine's GPU, write its tables and a log, show what was found.

What is tried and what wins is engine/kernels/tune.py's to say, what is run and timed engine/kernels/bench.py's.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table as Shown

from engine.config import EngineSettings, SettingError, default_dtype
from engine.errors import WalkgateError
from engine.kernels import tune
from engine.kernels.tiles import EXPERT_OPS, OPS, ROUTING, Provenance, Registry, RoutingTable, Table, Tile, table_path
from engine.kernels.tune import Budget, Job, Prepare, Shapes, Trial
from engine.model.config import StackConfig
from engine.routing import Limits, Route

if TYPE_CHECKING:
    from engine.kernels.bench import Benches

_MOST_COMPILERS = 16
_MOST_ROWS = 2048
# The trials lie beside the tables of ops, under this name.
_LOG = "log"


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneSettings:
    """What to tune and for how long: `ops` of OPS or "routing", row counts, seconds. Raises SettingError."""

    out: Path
    model: str
    ops: tuple[str, ...] = (*OPS, ROUTING)
    rows: tuple[int, ...] = tune.ROWS
    hand_over_rows: tuple[int, ...] = tune.HAND_OVER_ROWS
    rounds: int = tune.ROUNDS
    budget_s: float = 300.0

    def __post_init__(self) -> None:
        known = (*OPS, ROUTING)
        for op in self.ops:
            if op not in known:
                raise SettingError(f"--ops: no op is called {op!r}; there are {', '.join(known)}")
        for rows in self.rows:
            if not 1 <= rows <= _MOST_ROWS:
                raise SettingError(f"--rows must be 1 to {_MOST_ROWS}, is {rows}")
        if not self.budget_s > 0:
            raise SettingError(f"--budget-s must be above 0, is {self.budget_s:g}")

    @property
    def command(self) -> str:
        """The command that asks for this, without the place of its results."""
        ops, rows = ",".join(self.ops), ",".join(map(str, self.rows))
        quick = " --quick" if self.rounds == 1 else ""
        return f"omni tune --model {self.model} --ops {ops} --rows {rows} --budget-s {self.budget_s:g}{quick}"


def settings(out: Path, model: str, ops: str, rows: str, quick: bool, budget_s: float) -> TuneSettings:
    """The settings of the command line's words; lists are `a,b`, an empty one means all. Raises SettingError."""
    names = tuple(dict.fromkeys(name.strip() for name in ops.split(",") if name.strip()))
    try:
        counts = tuple(sorted({int(count) for count in rows.split(",") if count.strip()}))
    except ValueError:
        raise SettingError(f"--rows must be numbers such as 1,2,4, is {rows!r}") from None
    asked = TuneSettings(out=out, model=model, budget_s=budget_s)
    if quick:
        asked = replace(asked, rows=tune.QUICK_ROWS, hand_over_rows=tune.QUICK_HAND_OVER_ROWS, rounds=1)
    return replace(asked, ops=names or asked.ops, rows=counts or asked.rows)


def shapes(stack: StackConfig) -> Shapes:
    """The sizes of a model's layers that its kernels are tuned at."""
    return Shapes(
        hidden=stack.hidden,
        heads=stack.heads,
        kv_heads=stack.kv_heads,
        head_dim=stack.head_dim,
        experts=stack.experts,
        top_k=stack.top_k,
        inter=stack.moe_inter,
        vocab=stack.vocab,
        page=EngineSettings().page_size,
    )


def check_gpu() -> None:
    """Raise WalkgateError where there is no GPU to tune."""
    if not torch.cuda.is_available():
        raise WalkgateError("omni tune measures kernels on an NVIDIA GPU, and PyTorch finds none on this machine")


def tune_gpu(asked: TuneSettings, sizes: Shapes) -> None:
    """Tune the first GPU for `sizes`, write its tables and log under `asked.out`, and print what was found."""
    from engine.kernels.bench import Benches, Compilers, CudaTimer

    timer = CudaTimer()
    device = torch.device("cuda")
    provenance = made_by(asked, timer.method)
    workers = min(_MOST_COMPILERS, os.cpu_count() or 1)
    with Compilers("cuda", workers) as compilers:
        tuning = Tuning(
            asked,
            sizes,
            dtype=default_dtype("cuda"),
            gpu=torch.cuda.get_device_name(device),
            provenance=provenance,
            benches=Benches(device, timer),
            prepare=compilers.prepare,
            console=Console(),
        )
        tuning.run()


def made_by(asked: TuneSettings, method: str) -> Provenance:
    """The provenance of tables that are made now."""
    import triton

    return Provenance(
        torch=str(torch.__version__),
        triton=str(triton.__version__),
        date=datetime.now(UTC).date().isoformat(),
        command=asked.command,
        method=method,
    )


class Tuning:
    """One run of `omni tune`. Whatever ends it early, what was measured before is written."""

    def __init__(
        self,
        asked: TuneSettings,
        sizes: Shapes,
        *,
        dtype: str,
        gpu: str,
        provenance: Provenance,
        benches: Benches,
        prepare: Prepare,
        console: Console,
    ) -> None:
        self.trials: list[Trial] = []
        self.blocks: dict[int, dict[Route, float]] = {}
        self._asked = asked
        self._sizes = sizes
        self._dtype = dtype
        self._gpu = gpu
        self._provenance = provenance
        self._benches = benches
        self._prepare = prepare
        self._console = console
        self._budget = Budget(asked.budget_s)

    def run(self) -> None:
        """Sweep the experts, measure where their routes hand over, sweep the rest; write and show it all.

        Raises WalkgateError before all that where the results could not be written.
        """
        for name in (*self._asked.ops, _LOG):
            check_place(table_path(self._asked.out, name, self._gpu))
        experts = [op for op in self._asked.ops if op in EXPERT_OPS]
        others = [op for op in self._asked.ops if op in OPS and op not in EXPERT_OPS]
        try:
            self._sweep(experts)
            self._write(self._tables())
            if ROUTING in self._asked.ops:
                self._measure_blocks()
            self._sweep(others)
        finally:
            self._write(self._tables())
            self._write_log()
        self._show()

    def _sweep(self, ops: Iterable[str]) -> None:
        """Try tiles of some ops, under a progress bar."""
        from engine.kernels.bench import default_tile

        jobs = tune.jobs(self._sizes, self._dtype, ops, self._asked.rows)
        with self._progress() as progress:
            bar = progress.add_task("", total=None)

            def on_round(number: int, trials: int) -> None:
                names = ", ".join(dict.fromkeys(job.op for job in jobs))
                progress.reset(bar, total=trials, description=f"round {number}: {names}")

            found = tune.sweep(
                *(jobs, default_tile, self._benches.build, self._prepare, self._budget, on_round),
                rounds=self._asked.rounds,
            )
            for trial in found:
                self.trials.append(trial)
                progress.advance(bar)

    def _measure_blocks(self) -> None:
        """Time a whole block of experts by route, with the tiles that the registry has by now."""
        from engine.kernels.bench import default_tile

        registry = Registry(self._gpu, self._asked.out, EXPERT_OPS)
        experts = self._sizes.of(EXPERT_OPS[0])[0]
        for rows in self._asked.hand_over_rows:
            if not self._budget.left():
                return

            def tile(op: str, rows: int = rows) -> Tile:
                job = Job(op, experts, self._dtype, rows)
                return registry.find(op, job.named(), self._dtype, rows) or default_tile(job)

            self.blocks[rows] = self._benches.block_microseconds(self._sizes, self._dtype, rows, tile)

    def _progress(self) -> Progress:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        return Progress(*columns, console=self._console, transient=True)

    def _tables(self) -> list[Table | RoutingTable]:
        found: list[Table | RoutingTable] = []
        found += tune.tables(tune.winners(self.trials), self._gpu, self._provenance)
        if self.blocks:
            limits = tune.hand_over(self.blocks, self._sizes.top_k)
            found.append(tune.routing_table(self._sizes, self._dtype, limits, self._gpu, self._provenance))
        return found

    def _write(self, tables: Iterable[Table | RoutingTable]) -> None:
        for table in tables:
            write_json(table_path(self._asked.out, table.op, self._gpu), table)

    def _write_log(self) -> None:
        blocks: Mapping[str, Mapping[str, float]] = {
            str(rows): {str(route): time for route, time in times.items()} for rows, times in self.blocks.items()
        }
        log = {"gpu": self._gpu, "provenance": self._provenance, "trials": self.trials, "blocks": blocks}
        write_json(table_path(self._asked.out, _LOG, self._gpu), log)

    def _show(self) -> None:
        winners = tune.winners(self.trials)
        shown = Shown("op", "sizes", "rows", "default µs", "best µs", "change", "tile", title=self._gpu)
        for job, first in _firsts(self.trials).items():
            shown.add_row(*_cells(job, first, winners.get(job)))
        self._console.print(shown)
        if self.blocks:
            self._show_blocks(tune.hand_over(self.blocks, self._sizes.top_k))
        failed = sum(trial.error is not None for trial in self.trials)
        over = (
            "" if self._budget.left() else f" The budget of {self._asked.budget_s:g} s was spent before all was tried."
        )
        self._console.print(
            f"{len(self.trials)} trials, {failed} failed.{over} Tables and log: {self._asked.out}", soft_wrap=True
        )

    def _show_blocks(self, limits: Limits) -> None:
        shown = Shown(
            "rows", *(f"{route} µs" for route in next(iter(self.blocks.values()))), title="a block of experts"
        )
        for rows, times in self.blocks.items():
            shown.add_row(str(rows), *(f"{time:.1f}" for time in times.values()))
        self._console.print(shown)
        self._console.print(
            f"per pair up to {limits.per_pair_rows} rows, route_align up to {limits.route_align_slots} slots"
        )


def _firsts(trials: Iterable[Trial]) -> dict[Job, Trial]:
    """Each job's first trial, which is its default tile's."""
    firsts: dict[Job, Trial] = {}
    for trial in trials:
        firsts.setdefault(trial.job, trial)
    return firsts


def _cells(job: Job, first: Trial, best: Trial | None) -> list[str]:
    named = [job.op, " ".join(f"{name}={size}" for name, size in job.named().items()), str(job.rows)]
    if best is None or best.microseconds is None:
        return [*named, "–", "–", "–", f"none: {first.error}"]
    tile = " ".join(f"{key}={value}" for key, value in best.tile.items())
    if first.microseconds is None:
        return [*named, "–", f"{best.microseconds:.2f}", "–", tile]
    change = best.microseconds / first.microseconds - 1
    return [*named, f"{first.microseconds:.2f}", f"{best.microseconds:.2f}", f"{change:+.1%}", tile]


def check_place(path: Path) -> None:
    """Make the folder of a file that is to be written; WalkgateError where that or the writing would fail."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent) as probe:
            probe.write(b"probe")
        if path.exists():
            path.open("r+b").close()
    except OSError as error:
        raise WalkgateError(f"can't write {path}: {error.strerror or error}; name another folder with --out") from None


def write_json(path: Path, content: object) -> None:
    """Write a table or a log; WalkgateError for a place that can't be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n")
    except OSError as error:
        raise WalkgateError(f"can't write {path}: {error.strerror or error}") from None
