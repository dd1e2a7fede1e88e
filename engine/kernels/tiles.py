"""The tile registry: tuned tiles of one GPU, read from JSON tables once. Which tiles are tried is tune.py's to say.

A table is `tables/<op>/<GPU name, spaces as underscores>.json`: who measured it and how, then per sizes and dtype a tile for
some row counts. The op "routing" has, instead of tiles, the points where one route hands over to the next.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from engine.config import DTYPES
from engine.errors import WalkgateError
from engine.routing import Limits

log = logging.getLogger("walkgate.engine")

Tile = Mapping[str, int]
SHIPPED = Path(__file__).parent / "tables"
ROUTING = "routing"


@dataclass(frozen=True, slots=True)
class Keys:
    """What an op's table is keyed by, what each of its tiles holds, and which of that are axes of a tl.dot."""

    sizes: tuple[str, ...]
    tile: tuple[str, ...]
    dot: tuple[str, ...] = ()


_DENSE = ("K", "N")
_EXPERTS = ("E", "H", "I", "k")
OPS: Mapping[str, Keys] = {
    "gemv": Keys(_DENSE, ("BN", "warps", "stages")),
    "split_gemm": Keys(_DENSE, ("RP", "BN", "BK", "SK", "warps", "stages"), ("RP", "BN", "BK")),
    "decode_attention": Keys(("Hq", "Hkv", "d", "page"), ("S", "BT", "warps", "stages"), ("BT",)),
    "per_pair_gate_up": Keys(_EXPERTS, ("BN", "warps", "stages")),
    "per_pair_down": Keys(_EXPERTS, ("BN", "warps", "stages")),
    "grouped_gate_up": Keys(_EXPERTS, ("BM", "BN", "BK", "warps", "stages"), ("BM", "BN", "BK")),
    "grouped_down": Keys(_EXPERTS, ("BM", "BN", "BK", "warps", "stages"), ("BM", "BN", "BK")),
}

EXPERT_OPS = ("per_pair_gate_up", "per_pair_down", "grouped_gate_up", "grouped_down")

# What Triton takes: powers of two, except of these, and at least 16 for an axis of a tl.dot.
_ANY_NUMBER = ("SK", "stages")
_LEAST_DOT = 16
_MOST = {"warps": 16, "stages": 8}
_MOST_WIDTH = 1024


class TableError(WalkgateError):
    """A tile table that can't be used; the message names the file and the fix."""


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class Provenance(_Strict, frozen=True):
    """Where a table's numbers come from: versions, ISO date, the command that made it, how it measured."""

    torch: str
    triton: str
    date: str
    command: str
    method: str


_Count = Annotated[int, msgspec.Meta(ge=1)]
_Amount = Annotated[int, msgspec.Meta(ge=0)]


class Entry(_Strict, frozen=True):
    """Tiles by row count, for one dtype and the op's sizes."""

    sizes: dict[str, _Count]
    dtype: str
    rows: Annotated[dict[_Count, dict[str, _Count]], msgspec.Meta(min_length=1)]


class Table(_Strict, frozen=True):
    """The tuned tiles of one op on one GPU."""

    op: str
    gpu: str
    provenance: Provenance
    entries: list[Entry]


class HandOver(_Strict, frozen=True):
    """`Limits` as a table holds them."""

    per_pair_rows: _Amount
    route_align_slots: _Amount


class RoutingEntry(_Strict, frozen=True):
    """Hand-over points for one dtype and one size of experts."""

    sizes: dict[str, _Count]
    dtype: str
    limits: HandOver


class RoutingTable(_Strict, frozen=True):
    """The hand-over points of one GPU."""

    op: str
    gpu: str
    provenance: Provenance
    entries: list[RoutingEntry]


_AnyTable = TypeVar("_AnyTable", Table, RoutingTable)
_Sizes = tuple[int, ...]


def table_path(folder: Path, op: str, gpu: str) -> Path:
    """Where the table of an op and a GPU lies under `folder`."""
    return folder / op / f"{gpu.replace(' ', '_').replace('/', '_')}.json"


def row_up_to(tiles: Mapping[int, Tile], rows: int) -> Tile:
    """The tile of the largest row count up to `rows`; below the first count that of the first."""
    counts = sorted(tiles)
    return tiles[counts[max(0, bisect_right(counts, rows) - 1)]]


def read_table(path: Path) -> Table:
    """Read and check a table of tiles; its op is the name of its folder. Raises TableError."""
    table = _decoded(path, Table)
    keys = OPS.get(table.op)
    if keys is None:
        raise _fault(path, f"no op is called {table.op!r}; there are {', '.join(OPS)}")
    _check_sizes(path, keys.sizes, table.entries)
    for tile in (tile for entry in table.entries for tile in entry.rows.values()):
        if set(tile) != set(keys.tile):
            raise _fault(path, f"a tile of {table.op} has the keys {', '.join(keys.tile)}, not {', '.join(tile)}")
        for key, value in tile.items():
            _check_number(path, table.op, key, value)
    return table


def read_routing(path: Path) -> RoutingTable:
    """Read and check a table of hand-over points. Raises TableError."""
    table = _decoded(path, RoutingTable)
    _check_sizes(path, _EXPERTS, table.entries)
    return table


def _decoded(path: Path, kind: type[_AnyTable]) -> _AnyTable:
    """The file as a table whose op and GPU are those of its place."""
    try:
        if not path.is_file():
            raise _fault(path, "it is not a file, or a link to one")
        table = msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise _fault(path, error.strerror or str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _fault(path, str(error)) from None
    if path != table_path(path.parent.parent, table.op, table.gpu):
        raise _fault(path, f"it says op {table.op!r} and GPU {table.gpu!r}, which belong in another file")
    return table


def _check_sizes(path: Path, names: Sequence[str], entries: Iterable[Entry | RoutingEntry]) -> None:
    seen = set()
    for entry in entries:
        if set(entry.sizes) != set(names):
            raise _fault(path, f"the sizes of an entry are {', '.join(names)}, not {', '.join(entry.sizes)}")
        if entry.dtype not in DTYPES:
            raise _fault(path, f"an entry is for the dtype {entry.dtype!r}; there are {', '.join(DTYPES)}")
        key = (entry.dtype, *(entry.sizes[name] for name in names))
        if key in seen:
            raise _fault(path, f"two entries are for {entry.dtype} and the sizes {entry.sizes}")
        seen.add(key)


def _check_number(path: Path, op: str, key: str, value: int) -> None:
    least, most = _LEAST_DOT if key in OPS[op].dot else 1, _MOST.get(key, _MOST_WIDTH)
    any_number = key in _ANY_NUMBER
    if not least <= value <= most or not (any_number or value.bit_count() == 1):
        kind = "a number" if any_number else "a power of two"
        raise _fault(path, f"{key} in a tile of {op} must be {kind} from {least} to {most}, is {value}")


def _lies(path: Path) -> bool:
    """Whether there is something at `path`, were it a folder or a link that leads nowhere. Raises TableError."""
    try:
        path.lstat()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise _fault(path, error.strerror or str(error)) from None
    return True


def _fault(path: Path, what: str) -> TableError:
    return TableError(f"tile table {path}: {what}; correct the file, delete it, or write it anew with `omni tune`")


class Registry:
    """The tiles of one GPU by its exact name. A table under `folder` wins over the shipped one of the same op.

    Reads the tables of `ops` at once, so that a bad file is a TableError at start. A GPU without some table is one warning; the
    kernels' default tiles serve it. Not for more than one thread.
    """

    def __init__(self, device_name: str, folder: Path | None = None, ops: Sequence[str] = (*OPS, ROUTING)) -> None:
        self.device_name = device_name
        self.tuned = 0
        self.defaults = 0
        folders = (SHIPPED,) if folder is None else (folder, SHIPPED)
        self._tiles: dict[tuple[str, str, _Sizes], Mapping[int, Tile]] = {}
        self._limits: dict[tuple[str, _Sizes], Limits] = {}
        self._found: dict[tuple[str, str, _Sizes, int], Tile | None] = {}
        missing = [op for op in ops if not self._read(op, folders)]
        if missing:
            log.warning(
                "no tuned tiles for %s: %s use defaults; `omni tune` measures them", device_name, ", ".join(missing)
            )

    def find(self, op: str, sizes: Mapping[str, int], dtype: str, rows: int) -> Tile | None:
        """The tile for `rows` rows: that of the largest row count up to it, below the first that of the first.

        `dtype` is a name such as "bfloat16". None means that the kernel's own default serves: the table has no such sizes.
        """
        key = (op, dtype, _ordered(op, OPS[op].sizes, sizes), rows)
        if key in self._found:
            tile = self._found[key]
        else:
            tiles = self._tiles.get(key[:3])
            tile = self._found[key] = None if tiles is None else row_up_to(tiles, rows)
        if tile is None:
            self.defaults += 1
        else:
            self.tuned += 1
        return tile

    def limits(self, sizes: Mapping[str, int], dtype: str) -> Limits:
        """Where routes hand over for experts of `sizes` (E, H, I, k); `Limits()` where nothing was measured."""
        return self._limits.get((dtype, _ordered(ROUTING, _EXPERTS, sizes)), Limits())

    def values(self) -> dict[str, float]:
        """Return the counts of look-ups by metric name, without the prefix."""
        return {"tiles_tuned_total": self.tuned, "tiles_default_total": self.defaults}

    def _read(self, op: str, folders: Sequence[Path]) -> bool:
        """Take the first table of an op that lies in `folders`; false when there is none."""
        paths = (table_path(folder, op, self.device_name) for folder in folders)
        path = next((path for path in paths if _lies(path)), None)
        if path is None:
            return False
        if op == ROUTING:
            for found in read_routing(path).entries:
                sizes = _ordered(op, _EXPERTS, found.sizes)
                self._limits[found.dtype, sizes] = Limits(found.limits.per_pair_rows, found.limits.route_align_slots)
            return True
        for entry in read_table(path).entries:
            self._tiles[op, entry.dtype, _ordered(op, OPS[op].sizes, entry.sizes)] = entry.rows
        return True


def _ordered(op: str, names: tuple[str, ...], sizes: Mapping[str, int]) -> _Sizes:
    """The sizes in the order of the op's key; ValueError for other names than those."""
    if len(sizes) != len(names) or not all(name in sizes for name in names):
        raise ValueError(f"the sizes of {op} are {', '.join(names)}, not {', '.join(sizes)}")
    return tuple(sizes[name] for name in names)
