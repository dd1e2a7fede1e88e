"""What `omni tune` runs: the kernels at given sizes on random inputs that rotate, timed under captured graphs.

A launch finds none of its weights in the L2 cache: there are as many copies of them as it takes, each met in turn.
"""

from __future__ import annotations

import math
import multiprocessing
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Protocol

import torch
import triton
from torch import Tensor

from engine.kernels import attention, gemv, grouped_gemm, per_pair
from engine.kernels.align import Alignment, align
from engine.kernels.route_align import route_align
from engine.kernels.router_topk import Picked, router_topk
from engine.kernels.scratch import Scratch
from engine.kernels.tiles import Tile
from engine.kernels.tune import BadTile, Budget, Job, Shapes, Trial, Wanted
from engine.routing import Route

EPS = 1e-6
# Five times the L2 cache of an H200.
COLD_BYTES = 256 << 20
# Positions of a row's context when decode attention is tuned.
CONTEXT = 512
# Up to here the norm is folded into the experts' first product; beyond, rows are normalised before.
FOLDED_ROWS = 64
# The part of the time left that one round may spend compiling.
COMPILING = 0.6

Launch = Callable[[Tile, int], Tensor]


class Timer(Protocol):
    """What measures a launch."""

    def microseconds(self, launch: Callable[[int], object], copies: int) -> float:
        """The time of one `launch(copy)`, over all copies in turn."""


class CudaTimer:
    """Times launches on a GPU: the median of `repeats`, each some replays of one captured graph of all copies."""

    def __init__(self, repeats: int = 5, milliseconds: float = 4.0, launches: int = 24) -> None:
        self.method = (
            f"median of {repeats} times {milliseconds:g} ms of replays of a CUDA graph of at least {launches} launches, "
            f"dependent launch on, weights rotating through {COLD_BYTES >> 20} MiB"
        )
        self._repeats = repeats
        self._milliseconds = milliseconds
        self._launches = launches
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def microseconds(self, launch: Callable[[int], object], copies: int) -> float:
        """The time of one `launch(copy)`; it must have run once before, since nothing compiles inside a capture."""
        passes = math.ceil(self._launches / copies)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            graph = self._captured(launch, copies, passes)
            self._replayed(graph, 1)
            replays = min(100, max(1, int(self._milliseconds / self._replayed(graph, 1))))
            measured = statistics.median(self._replayed(graph, replays) for _ in range(self._repeats))
        return 1000 * measured / (replays * passes * copies)

    def _captured(self, launch: Callable[[int], object], copies: int, passes: int) -> torch.cuda.CUDAGraph:
        # Not torch.cuda.graph: it collects garbage and empties the memory pool first, which is most of a short trial.
        graph = torch.cuda.CUDAGraph()
        self._stream.synchronize()
        graph.capture_begin()
        try:
            for copy in list(range(copies)) * passes:
                launch(copy)
        finally:
            graph.capture_end()
        return graph

    def _replayed(self, graph: torch.cuda.CUDAGraph, replays: int) -> float:
        """Milliseconds of some replays."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))


def default_tile(job: Job) -> Tile:
    """The tile that a kernel takes at the job's sizes when no table has one."""
    size, dtype = job.named(), _dtype(job.dtype)
    match job.op:
        case "gemv":
            return gemv.gemv_tile(size["N"], size["K"], dtype)
        case "split_gemm":
            return gemv.split_tile(job.rows, size["N"], size["K"], dtype)
        case "decode_attention":
            return attention.default_tile(job.rows)
        case "per_pair_gate_up":
            return per_pair.gate_up_tile(job.rows)
        case "per_pair_down":
            return per_pair.down_tile(job.rows)
        case "grouped_gate_up":
            return grouped_gemm.gate_up_tile(job.rows, dtype)
        case "grouped_down":
            return grouped_gemm.down_tile(job.rows, dtype)
    raise ValueError(f"no op is called {job.op!r}")


class KernelBench:
    """One job ready to run. `launch(tile, copy)` runs the kernel once and returns its result."""

    def __init__(self, launch: Launch, default: Tile, copies: int, timer: Timer) -> None:
        self.copies = copies
        self._launch = launch
        self._default = default
        self._timer = timer
        self._reference: Tensor | None = None

    def check(self, tile: Tile) -> float:
        """How far the tile's result is from the default tile's: relative RMS, scalar. Raises BadTile."""
        if self._reference is None:
            self._reference = self.run(self._default).double()
        result = self.run(tile).double()
        if not bool(result.isfinite().all()):
            return math.inf
        return float((result - self._reference).norm() / self._reference.norm())

    def run(self, tile: Tile) -> Tensor:
        """The result of one launch, of the op's shape [n, ...]. Raises BadTile for a tile that does not compile or fit."""
        try:
            return self._launch(tile, 0)
        except torch.AcceleratorError:
            # The device is of no use any more: that is no property of the tile.
            raise
        except (triton.TritonError, RuntimeError, ValueError) as error:
            raise BadTile(_first_line(error)) from error

    def microseconds(self, tile: Tile) -> float:
        """The time of one launch of a tile that `check` has passed."""
        return self._timer.microseconds(partial(self._launch, tile), self.copies)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]


def _dtype(name: str) -> torch.dtype:
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


@dataclass(frozen=True, slots=True)
class _Routed:
    """Rows on their way to their experts: `x` [n, H], and a choice of experts for each copy of the weights."""

    x: Tensor
    norm: Tensor
    logits: Tensor
    picked: list[Picked]
    alignments: list[Alignment]


@dataclass(frozen=True, slots=True)
class _Block:
    """A block of experts with `residual` [n, H] and copies of `gate_up` [E, 2I, H] and `down` [E, H, I], on any route."""

    routed: _Routed
    gate_up: Tensor
    down: Tensor
    residual: Tensor
    top_k: int
    tile: Callable[[str], Tile]
    scratch: Scratch
    pdl: bool

    def run(self, route: Route, copy: int) -> Tensor:
        logits, x, experts = self.routed.logits[copy], self.routed.x, self.down.shape[1]
        if route is Route.ROUTE_ALIGN:
            picked, alignment = route_align(
                logits, self.top_k, renormalise=True, x=x, eps=EPS, scratch=self.scratch, pdl=self.pdl
            )
            return self._grouped(copy, picked, alignment)
        picked = router_topk(logits, self.top_k, renormalise=True, x=x, eps=EPS, pdl=self.pdl)
        if route is Route.PER_PAIR:
            return self._per_pair(copy, picked)
        return self._grouped(copy, picked, align(picked.ids, experts, pdl=self.pdl))

    def _per_pair(self, copy: int, picked: Picked) -> Tensor:
        first, second = self.tile("per_pair_gate_up"), self.tile("per_pair_down")
        x, norm = self.routed.x, self.routed.norm
        h = per_pair.per_pair_gate_up(x, norm, picked, self.gate_up[copy], tile=first, pdl=self.pdl)
        return per_pair.per_pair_down(h, picked, self.down[copy], self.residual, tile=second, pdl=self.pdl)

    def _grouped(self, copy: int, picked: Picked, alignment: Alignment) -> Tensor:
        first, second = self.tile("grouped_gate_up"), self.tile("grouped_down")
        x, norm = self.routed.x, self.routed.norm
        h = grouped_gemm.grouped_gate_up(x, norm, picked, alignment, self.gate_up[copy], tile=first, pdl=self.pdl)
        return grouped_gemm.grouped_down(
            h, picked, alignment, self.down[copy], self.residual, tile=second, pdl=self.pdl
        )


class Benches:
    """Makes benches on one device. `cold_bytes` are what the copies of a launch's weights hold together; 0 makes one copy."""

    def __init__(
        self, device: torch.device, timer: Timer, cold_bytes: int = COLD_BYTES, context: int = CONTEXT
    ) -> None:
        self._device = device
        self._timer = timer
        self._cold_bytes = cold_bytes
        self._context = context
        self._pdl = device.type == "cuda"
        self._scratch = Scratch(device)
        self._generator = torch.Generator(device)

    def build(self, job: Job) -> KernelBench:
        """The bench of a job (no tensors in), with the same inputs every time."""
        self._generator.manual_seed(0)
        if self._device.type == "cuda":
            # What the graphs of earlier trials worked in is kept for them until now.
            torch.cuda.empty_cache()
        make = {
            "gemv": self._gemv,
            "split_gemm": self._split_gemm,
            "decode_attention": self._decode_attention,
            "per_pair_gate_up": self._gate_up,
            "per_pair_down": self._down,
            "grouped_gate_up": self._gate_up,
            "grouped_down": self._down,
        }[job.op]
        launch, copies = make(job, job.named(), _dtype(job.dtype))
        return KernelBench(launch, default_tile(job), copies, self._timer)

    def block_microseconds(
        self, shapes: Shapes, dtype: str, rows: int, tile: Callable[[str], Tile]
    ) -> dict[Route, float]:
        """The time of a whole block of experts (no tensors in) by route; `tile(op)` is the tile of each of its kernels."""
        self._generator.manual_seed(0)
        experts, hidden, inter, kind = shapes.experts, shapes.hidden, shapes.inter, _dtype(dtype)
        copies = self._copies(3 * min(experts, rows * shapes.top_k) * inter * hidden * kind.itemsize)
        block = _Block(
            routed=self._routed(rows, experts, hidden, shapes.top_k, kind, copies),
            gate_up=self._random(copies, experts, 2 * inter, hidden, dtype=kind, scale=hidden**-0.5),
            down=self._random(copies, experts, hidden, inter, dtype=kind, scale=inter**-0.5),
            residual=self._random(rows, hidden, dtype=kind),
            top_k=shapes.top_k,
            tile=tile,
            scratch=self._scratch,
            pdl=self._pdl,
        )
        found = {}
        for route in (Route.PER_PAIR, Route.ROUTE_ALIGN, Route.ROUTER_TOPK):
            launch = partial(block.run, route)
            launch(0)
            found[route] = self._timer.microseconds(launch, copies)
        return found

    def _copies(self, launch_bytes: int) -> int:
        return min(512, max(1, math.ceil(self._cold_bytes / launch_bytes)))

    def _random(self, *shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=self._device, generator=self._generator).mul_(scale)

    def _gemv(self, job: Job, size: Mapping[str, int], dtype: torch.dtype) -> tuple[Launch, int]:
        x, norm, weights = self._dense(job, size, dtype)

        def launch(tile: Tile, copy: int) -> Tensor:
            return gemv.gemv(x, weights[copy], norm=norm, eps=EPS, out_dtype=dtype, tile=tile, pdl=self._pdl)

        return launch, len(weights)

    def _split_gemm(self, job: Job, size: Mapping[str, int], dtype: torch.dtype) -> tuple[Launch, int]:
        x, norm, weights = self._dense(job, size, dtype)

        def launch(tile: Tile, copy: int) -> Tensor:
            return gemv.split_gemm(
                *(x, weights[copy]),
                norm=norm,
                eps=EPS,
                out_dtype=dtype,
                scratch=self._scratch,
                tile=tile,
                pdl=self._pdl,
            )

        return launch, len(weights)

    def _dense(self, job: Job, size: Mapping[str, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        outputs, width = size["N"], size["K"]
        copies = self._copies(outputs * width * dtype.itemsize)
        weights = self._random(copies, outputs, width, dtype=dtype, scale=width**-0.5)
        return self._random(job.rows, width, dtype=dtype), self._random(width, dtype=dtype), weights

    def _decode_attention(self, job: Job, size: Mapping[str, int], dtype: torch.dtype) -> tuple[Launch, int]:
        heads, kv_heads, dim, page, rows = size["Hq"], size["Hkv"], size["d"], size["page"], job.rows
        most = math.ceil(self._context / page)
        copies = self._copies(2 * rows * self._context * kv_heads * dim * dtype.itemsize)
        caches = self._random(2, copies, rows * most, page, kv_heads, dim, dtype=dtype)
        places = torch.randperm(rows * most, device=self._device, generator=self._generator)
        table = places.to(torch.int32).view(rows, most)
        starts = torch.full((rows,), self._context - 1, dtype=torch.int32, device=self._device)
        qkv = self._random(rows, (heads + 2 * kv_heads) * dim, dtype=dtype)
        norms = self._random(heads + kv_heads, dim, dtype=dtype)
        angles = self._random(rows, dim, dtype=torch.float32)
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)

        def launch(tile: Tile, copy: int) -> Tensor:
            return attention.decode_attention(
                *(qkv, norms, EPS, heads, cos, sin, caches[0, copy], caches[1, copy], table, starts),
                scratch=self._scratch,
                tile=tile,
                pdl=self._pdl,
            )

        return launch, copies

    def _gate_up(self, job: Job, size: Mapping[str, int], dtype: torch.dtype) -> tuple[Launch, int]:
        experts, hidden, inter, top_k, rows = size["E"], size["H"], size["I"], size["k"], job.rows
        copies = self._copies(2 * min(experts, rows * top_k) * inter * hidden * dtype.itemsize)
        routed = self._routed(rows, experts, hidden, top_k, dtype, copies)
        weights = self._random(copies, experts, 2 * inter, hidden, dtype=dtype, scale=hidden**-0.5)
        norm = routed.norm if rows <= FOLDED_ROWS else None

        def pairs(tile: Tile, copy: int) -> Tensor:
            return per_pair.per_pair_gate_up(
                routed.x, norm, routed.picked[copy], weights[copy], tile=tile, pdl=self._pdl
            )

        def grouped(tile: Tile, copy: int) -> Tensor:
            return grouped_gemm.grouped_gate_up(
                *(routed.x, norm, routed.picked[copy], routed.alignments[copy], weights[copy]),
                tile=tile,
                pdl=self._pdl,
            )

        return pairs if job.op == "per_pair_gate_up" else grouped, copies

    def _down(self, job: Job, size: Mapping[str, int], dtype: torch.dtype) -> tuple[Launch, int]:
        experts, hidden, inter, top_k, rows = size["E"], size["H"], size["I"], size["k"], job.rows
        copies = self._copies(min(experts, rows * top_k) * inter * hidden * dtype.itemsize)
        routed = self._routed(rows, experts, hidden, top_k, dtype, copies)
        weights = self._random(copies, experts, hidden, inter, dtype=dtype, scale=inter**-0.5)
        h, residual = self._random(rows * top_k, inter, dtype=dtype), self._random(rows, hidden, dtype=dtype)

        def pairs(tile: Tile, copy: int) -> Tensor:
            return per_pair.per_pair_down(h, routed.picked[copy], weights[copy], residual, tile=tile, pdl=self._pdl)

        def grouped(tile: Tile, copy: int) -> Tensor:
            return grouped_gemm.grouped_down(
                *(h, routed.picked[copy], routed.alignments[copy], weights[copy], residual), tile=tile, pdl=self._pdl
            )

        return pairs if job.op == "per_pair_down" else grouped, copies

    def _routed(self, rows: int, experts: int, hidden: int, top_k: int, dtype: torch.dtype, copies: int) -> _Routed:
        x, norm = self._random(rows, hidden, dtype=dtype), self._random(hidden, dtype=dtype)
        logits = self._random(copies, rows, experts, dtype=torch.float32)
        picked = [router_topk(each, top_k, renormalise=True, x=x, eps=EPS, pdl=False) for each in logits]
        return _Routed(x, norm, logits, picked, [align(each.ids, experts, pdl=False) for each in picked])


class _NoTimer:
    """The timer of a process that only compiles."""

    def microseconds(self, launch: Callable[[int], object], copies: int) -> float:
        raise AssertionError("a process that compiles times nothing")


_Task = tuple[Tile, tuple[Job, ...]]


class Compilers:
    """Processes that compile tiles into Triton's cache on disk, so that the one that measures finds them there.

    Compiling holds the interpreter's lock, so threads would take turns. Each process runs the kernels once, on one copy of
    their inputs; none runs while something is measured.
    """

    def __init__(self, device: str, workers: int) -> None:
        self._device = device
        self._workers = workers
        self._pool = self._started()

    def __enter__(self) -> Compilers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def prepare(self, wanted: Wanted, budget: Budget) -> list[Trial]:
        """Compile every tile of every job, defaults first; returns the trials of those that fail or are not done in time."""
        tasks = {self._submit(task): task for task in _tasks(wanted)}
        _, late = wait(tasks, timeout=COMPILING * budget.left())
        cancelled = {future for future in late if future.cancel()}
        # What already runs ends before anything is measured.
        wait(late - cancelled)
        return [
            trial
            for future, task in tasks.items()
            for trial in (_lost(task, "not compiled in time") if future in cancelled else _outcome(future, task))
        ]

    def _started(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(self._workers, mp_context=multiprocessing.get_context("spawn"))

    def _submit(self, task: _Task) -> Future[list[Trial]]:
        try:
            return self._pool.submit(_compile, self._device, task)
        except BrokenProcessPool:
            self._pool = self._started()
            return self._pool.submit(_compile, self._device, task)


def _outcome(future: Future[list[Trial]], task: _Task) -> list[Trial]:
    try:
        return future.result()
    except BrokenProcessPool:
        return _lost(task, "a compiler crashed before it was done")


def _lost(task: _Task, error: str) -> list[Trial]:
    tile, jobs = task
    return [Trial(job, tile, error=error) for job in jobs]


def _tasks(wanted: Wanted) -> list[_Task]:
    """What to compile: the jobs that differ by rows alone go together, since they may share a kernel."""
    together: dict[tuple[object, ...], tuple[Tile, list[Job]]] = {}
    depth: dict[tuple[object, ...], int] = defaultdict(lambda: 1 << 30)
    for job, tiles in wanted.items():
        for place, tile in enumerate(tiles):
            key = (job.op, job.sizes, job.dtype, *sorted(tile.items()))
            together.setdefault(key, (tile, []))[1].append(job)
            depth[key] = min(depth[key], place)
    return [(tile, tuple(jobs)) for key, (tile, jobs) in sorted(together.items(), key=lambda item: depth[item[0]])]


def _compile(device: str, task: _Task) -> list[Trial]:
    """Run a tile once for each of its jobs; returns the trials of those that fail."""
    torch.set_num_threads(1)
    benches = Benches(torch.device(device), _NoTimer(), cold_bytes=0)
    tile, jobs = task
    failed = []
    for job in jobs:
        try:
            benches.build(job).run(tile)
        except BadTile as error:
            failed.append(Trial(job, tile, error=str(error)))
    return failed
