"""How tiles are tuned: what is tried, which tile wins, when to stop. What is run and timed is bench.py's to say.

Each op, size and row count climbs: round by round, the neighbours of its best tile are tried, beginning with its default.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Protocol

from engine.kernels.tiles import (
    OPS,
    ROUTING,
    Entry,
    HandOver,
    Provenance,
    RoutingEntry,
    RoutingTable,
    Table,
    Tile,
)
from engine.routing import Limits, Route

ROUNDS = 3
# Rows that a table has a tile for; a decode batch is 64 rows at the most, prompt chunks have up to 2048.
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 512, 2048)
QUICK_ROWS = (1, 4, 16, 64, 512)
TIE = 0.005
HAND_OVER_ROWS = (1, 2, 3, 4, 6, 8, 16, 32, 64)
QUICK_HAND_OVER_ROWS = (1, 2, 4, 8, 16, 64)
# A tile must be this much faster than the default to replace it: two runs differ by about half of that.
MARGIN = 0.01
# Relative RMS difference from the default tile's result that another order of summation explains.
TOLERANCE = {"float32": 1e-4, "float16": 2e-3, "bfloat16": 1e-2}
_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
# Of a multiprocessor of Hopper: bytes of shared memory for one program; bytes of one thread's registers left for tiles.
_SHARED = 220 << 10
_REGISTERS = 640

# Experts come first: the hand-over points are measured with their tiles.
_MOST_ROWS = {
    "per_pair_gate_up": 8,
    "per_pair_down": 8,
    "grouped_gate_up": 2048,
    "grouped_down": 2048,
    "decode_attention": 64,
    "gemv": 8,
    "split_gemm": 64,
}
_BOUNDS: Mapping[str, Mapping[str, tuple[int, int]]] = {
    "per_pair_gate_up": {"BN": (1, 32), "warps": (1, 16)},
    "per_pair_down": {"BN": (1, 32), "warps": (1, 16)},
    "grouped_gate_up": {"BM": (16, 128), "BN": (16, 256), "BK": (32, 256), "warps": (2, 8), "stages": (1, 6)},
    "grouped_down": {"BM": (16, 128), "BN": (16, 256), "BK": (32, 256), "warps": (2, 8), "stages": (1, 6)},
    "decode_attention": {"S": (1, 32), "BT": (16, 128), "warps": (1, 8), "stages": (1, 5)},
    "gemv": {"BN": (1, 64), "warps": (1, 16)},
    "split_gemm": {"RP": (16, 64), "BN": (16, 128), "BK": (32, 512), "SK": (1, 32), "warps": (1, 8), "stages": (1, 6)},
}


@dataclass(frozen=True, slots=True)
class Shapes:
    """The sizes of a stack of layers: H, Hq, Hkv, d, E, k, I, the vocabulary, the positions of a KV page."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    top_k: int
    inter: int
    vocab: int
    page: int

    def of(self, op: str) -> tuple[tuple[int, ...], ...]:
        """The sizes that an op meets in the stack, each in the order of the op's table."""
        if op == "decode_attention":
            return ((self.heads, self.kv_heads, self.head_dim, self.page),)
        if op in ("gemv", "split_gemm"):
            queries = self.heads * self.head_dim
            qkv = (self.hidden, queries + 2 * self.kv_heads * self.head_dim)
            out, router, head = (queries, self.hidden), (self.hidden, self.experts), (self.hidden, self.vocab)
            return tuple(dict.fromkeys((qkv, out, router, head)))
        return ((self.experts, self.hidden, self.inter, self.top_k),)


@dataclass(frozen=True, slots=True)
class Job:
    """One tile to find: for an op, sizes in the order of `OPS[op].sizes`, a dtype and a row count."""

    op: str
    sizes: tuple[int, ...]
    dtype: str
    rows: int

    def named(self) -> dict[str, int]:
        """The sizes by name."""
        return dict(zip(OPS[self.op].sizes, self.sizes, strict=True))


@dataclass(frozen=True, slots=True)
class Trial:
    """What became of one tile: its time, or why it can't be used. `difference` is from the default tile's result."""

    job: Job
    tile: Tile
    microseconds: float | None = None
    difference: float | None = None
    error: str | None = None


class Bench(Protocol):
    """One job ready to run."""

    def check(self, tile: Tile) -> float:
        """How far the tile's result is from the default tile's: relative RMS. Raises BadTile."""

    def microseconds(self, tile: Tile) -> float:
        """The time of one launch. Raises BadTile."""


class BadTile(Exception):
    """A tile that can't be compiled or launched; the message is the compiler's."""


class Budget:
    """Seconds to spend from now on."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds

    def left(self) -> float:
        """Seconds that are left, 0 when none are."""
        return max(0.0, self._end - self._clock())


def jobs(shapes: Shapes, dtype: str, ops: Iterable[str], rows: Sequence[int]) -> list[Job]:
    """Every job of a stack: per op and size, those of `rows` that the op runs at, experts first."""
    asked = set(ops)
    return [
        Job(op, sizes, dtype, count)
        for op in _BOUNDS
        if op in asked
        for sizes in shapes.of(op)
        for count in sorted(set(rows))
        if count <= _MOST_ROWS[op]
    ]


def neighbours(job: Job, tile: Tile) -> list[Tile]:
    """The tiles one step from `tile` that may be worth a trial: one number doubled or halved.

    BN also moves together with warps, and SK against BK: alone they would soon be out of bounds.
    """
    bounds = _BOUNDS[job.op]
    moves = [{key: step} for key, step in product(bounds, (1, -1))]
    moves += [{"BN": step, "warps": step} for step in (1, -1) if "BN" in bounds]
    moves += [{"SK": step, "BK": -step} for step in (1, -1) if "SK" in bounds]
    stepped = (_stepped(tile, move) for move in moves)
    return [
        new for new in stepped if all(low <= new[key] <= high for key, (low, high) in bounds.items()) and fits(job, new)
    ]


def _stepped(tile: Tile, move: Mapping[str, int]) -> dict[str, int]:
    return {key: _step(key, value, move.get(key, 0)) for key, value in tile.items()}


def _step(key: str, value: int, step: int) -> int:
    if key == "stages":
        return value + step
    return value * 2 if step > 0 else value // 2 if step < 0 else value


def fits(job: Job, tile: Tile) -> bool:
    """Whether a tile is no larger than the job and can fit into a multiprocessor; the compiler has the last word."""
    size, width = job.named(), _BYTES[job.dtype]
    threads = 32 * tile["warps"]
    match job.op:
        case "gemv":
            return tile["BN"] <= _power_above(size["N"]) and _held(tile["BN"] * size["K"] * width, threads)
        case "per_pair_gate_up":
            return tile["BN"] <= _power_above(size["I"]) and _held(2 * tile["BN"] * size["H"] * width, threads)
        case "per_pair_down":
            return tile["BN"] <= _power_above(size["H"]) and _held(tile["BN"] * size["k"] * size["I"] * width, threads)
        case "decode_attention":
            return 2 * tile["stages"] * tile["BT"] * size["d"] * width <= _SHARED
        case "split_gemm":
            loads = max(1, size["K"] // (tile["SK"] * tile["BK"]))
            fed = min(tile["stages"], loads) * (tile["RP"] + tile["BN"]) * tile["BK"] * width
            inside = tile["RP"] <= (16 if job.rows <= 16 else 64) and tile["BN"] <= max(16, _power_above(size["N"]))
            sliced = tile["SK"] * tile["BK"] <= max(tile["BK"], size["K"])
            return inside and sliced and fed <= _SHARED and _held(4 * tile["RP"] * tile["BN"], threads)
        case _:
            weights = 2 if job.op == "grouped_gate_up" else 1
            fed = tile["stages"] * (tile["BM"] + weights * tile["BN"]) * tile["BK"] * width
            summed = 4 * weights * tile["BM"] * tile["BN"]
            return tile["BM"] <= max(16, _power_above(job.rows)) and fed <= _SHARED and _held(summed, threads)


def _held(size: int, threads: int) -> bool:
    return size <= _REGISTERS * threads


def _power_above(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()


def best(trials: Sequence[Trial]) -> Trial | None:
    """The fastest trial that gave a right result; the first, the default's, unless another is faster by MARGIN."""
    usable = [trial for trial in trials if trial.microseconds is not None]
    if not usable:
        return None
    fastest = min(usable, key=_time)
    first = trials[0]
    return first if first.microseconds is not None and _time(fastest) > (1 - MARGIN) * _time(first) else fastest


def _time(trial: Trial) -> float:
    return math.inf if trial.microseconds is None else trial.microseconds


def proposals(job: Job, trials: Sequence[Trial], default: Tile) -> list[Tile]:
    """What a job tries next: its default, then round by round what is new around the best so far; nothing once it stands."""
    if not trials:
        return [default, *neighbours(job, default)]
    found = best(trials)
    tried = [dict(trial.tile) for trial in trials]
    return [] if found is None else [tile for tile in neighbours(job, found.tile) if dict(tile) not in tried]


Wanted = Mapping[Job, Sequence[Tile]]
Prepare = Callable[[Wanted, Budget], Sequence[Trial]]


def sweep(
    wanted: Sequence[Job],
    default: Callable[[Job], Tile],
    build: Callable[[Job], Bench],
    prepare: Prepare,
    budget: Budget,
    on_round: Callable[[int, int], None],
    rounds: int = ROUNDS,
) -> Iterator[Trial]:
    """Try tiles for every job until each stands, `rounds` are over or the budget is spent.

    `prepare` compiles a round's tiles before any of them is timed, and returns the trials that failed there. `on_round` gets
    the round's number and how many trials it has. A job whose default tile fails gets no tile.
    """
    done: dict[Job, list[Trial]] = {job: [] for job in wanted}
    for number in range(1, rounds + 1):
        tiles = {job: proposals(job, done[job], default(job)) for job in wanted}
        if not any(tiles.values()) or not budget.left():
            return
        on_round(number, sum(map(len, tiles.values())))
        failed = {_key(trial.job, trial.tile): trial for trial in prepare(tiles, budget)}
        for trial in _round(tiles, build, failed, budget):
            done[trial.job].append(trial)
            yield trial


_Key = tuple[Job, frozenset[tuple[str, int]]]


def _key(job: Job, tile: Tile) -> _Key:
    return job, frozenset(tile.items())


def _round(
    tiles: Wanted, build: Callable[[Job], Bench], failed: Mapping[_Key, Trial], budget: Budget
) -> Iterator[Trial]:
    for job, proposed in tiles.items():
        if not proposed or not budget.left():
            continue
        bench = build(job)
        for tile in proposed:
            if not budget.left():
                return
            yield failed.get(_key(job, tile)) or attempt(job, bench, tile)


def attempt(job: Job, bench: Bench, tile: Tile) -> Trial:
    """Check a tile's result, then time it."""
    try:
        difference = bench.check(tile)
        if not difference <= TOLERANCE[job.dtype]:
            return Trial(job, tile, difference=difference, error="its result differs from the default tile's")
        return Trial(job, tile, bench.microseconds(tile), difference)
    except BadTile as error:
        return Trial(job, tile, error=str(error))


def winners(trials: Iterable[Trial]) -> dict[Job, Trial]:
    """The best trial of every job that has one."""
    by_job: dict[Job, list[Trial]] = defaultdict(list)
    for trial in trials:
        by_job[trial.job].append(trial)
    found = {job: best(each) for job, each in by_job.items()}
    return {job: trial for job, trial in found.items() if trial is not None}


def tables(found: Mapping[Job, Trial], gpu: str, provenance: Provenance) -> list[Table]:
    """One table per op of the winners."""
    rows: dict[str, dict[tuple[tuple[int, ...], str], dict[int, dict[str, int]]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    for job, trial in found.items():
        rows[job.op][job.sizes, job.dtype][job.rows] = dict(trial.tile)
    return [
        Table(op, gpu, provenance, [_entry(op, sizes, dtype, tiles) for (sizes, dtype), tiles in entries.items()])
        for op, entries in rows.items()
    ]


def _entry(op: str, sizes: tuple[int, ...], dtype: str, tiles: dict[int, dict[str, int]]) -> Entry:
    return Entry(dict(zip(OPS[op].sizes, sizes, strict=True)), dtype, dict(sorted(tiles.items())))


def hand_over(times: Mapping[int, Mapping[Route, float]], top_k: int) -> Limits:
    """Where routes hand over, from the microseconds of a whole block of experts by rows and route.

    Per pair is taken up to the last measured row count before it first loses; beyond that, route_align likewise against
    router_topk, which has a kernel more: a difference within TIE is no loss.
    """
    per_pair = 0
    for rows in sorted(times):
        if times[rows][Route.PER_PAIR] > min(times[rows].values()):
            break
        per_pair = rows
    slots = per_pair * top_k
    for rows in (rows for rows in sorted(times) if rows > per_pair):
        if times[rows][Route.ROUTE_ALIGN] > times[rows][Route.ROUTER_TOPK] * (1 + TIE):
            break
        slots = rows * top_k
    return Limits(per_pair, slots)


def routing_table(shapes: Shapes, dtype: str, limits: Limits, gpu: str, provenance: Provenance) -> RoutingTable:
    """The table of one hand-over measurement."""
    sizes = dict(zip(OPS["grouped_down"].sizes, shapes.of("grouped_down")[0], strict=True))
    over = HandOver(limits.per_pair_rows, limits.route_align_slots)
    return RoutingTable(ROUTING, gpu, provenance, [RoutingEntry(sizes, dtype, over)])
