"""Ready tracks -> one Step. First come, first served admission against the worst case; pure policy, no torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from engine.errors import RequestError
from engine.step import Component, Row, Step
from engine.track import Track

NextWalk = Callable[[Track], str | None]
_Ready = tuple[Track, str]
# What a client asks for less of, to fit a component's pages.
LIMIT_FIELDS = {Component.THINKER: "max_tokens", Component.TALKER: "speech.max_frames"}


@dataclass(frozen=True, slots=True)
class Need:
    """The most a request can come to hold in one component: positions of KV, what to prefill, how much to make."""

    component: Component
    positions: int
    prompt_length: int
    limit: int
    waits_for_source: bool = False


@dataclass(frozen=True, slots=True)
class Policy:
    """The limits of a step: rows, positions prefilled together, and the (start, length) that a ready track runs.

    Prompts of `chunked` components are cut to fit a step's positions; with `mixed` they ride along with decode rows.
    """

    max_rows: dict[Component, int]
    prefill_positions: int
    decode_walks: frozenset[str]
    row_span: Callable[[Track], tuple[int, int]]
    batching: bool = True
    chunked: frozenset[Component] = frozenset()
    mixed: bool = False


def whole_rows(rows: Sequence[Row], positions: int) -> list[Row]:
    """Return the first of `rows`, unchanged, while they fit `positions` together; the first always does."""
    taken: list[Row] = []
    for row in rows:
        if taken and row.length > positions:
            break
        positions -= row.length
        taken.append(row)
    return taken


def chunk_rows(rows: Sequence[Row], positions: int, most: int) -> list[Row]:
    """Cut `rows` to `positions` together, at most `most` of them.

    The oldest goes on with at least half of the positions, so that it is never starved; the others share what is left, the
    shortest first, so that a short prompt does not wait for a long one.
    """
    if not rows:
        return []
    oldest, *others = sorted(rows, key=lambda row: row.generation)
    others.sort(key=lambda row: row.length)
    kept = min(positions // 2, sum(row.length for row in others)) if most > 1 else 0
    taken: list[Row] = []
    for row in [oldest, *others][:most]:
        length = min(row.length, positions if taken else positions - kept)
        if length < 1:
            break
        taken.append(row if length == row.length else msgspec.structs.replace(row, length=length))
        positions -= length
    return taken


@dataclass(slots=True)
class _Waiting:
    request_id: str
    needs: tuple[Need, ...]
    pages: dict[Component, int]


@dataclass(slots=True)
class Pools:
    """What is left to give: pages per component with a cache, and slots. `take`/`release` are the pools' own."""

    page_size: int
    total_pages: dict[Component, int]
    free_pages: Callable[[Component], int]
    take_pages: Callable[[Component, int], tuple[int, ...]]
    release_pages: Callable[[Component, tuple[int, ...]], None]
    free_slots: Callable[[], int]
    take_slot: Callable[[], int]
    release_slot: Callable[[int], None]


@dataclass(slots=True)
class Scheduler:
    """Holds the tracks, admits requests in order of arrival, and forms the next step of a component."""

    pools: Pools
    policy: Policy
    next_walk: NextWalk
    tracks: dict[Component, dict[str, Track]] = field(init=False)
    _waiting: deque[_Waiting] = field(default_factory=deque, init=False)
    _generation: int = field(default=0, init=False)
    _steps: dict[Component, int] = field(init=False)
    _prefilled_last: dict[Component, bool] = field(init=False)

    def __post_init__(self) -> None:
        self.tracks = {component: {} for component in Component}
        self._steps = dict.fromkeys(Component, 0)
        self._prefilled_last = dict.fromkeys(Component, False)

    @property
    def waiting(self) -> int:
        """How many requests wait for pages or a slot."""
        return len(self._waiting)

    def add(self, request_id: str, needs: Iterable[Need]) -> None:
        """Queue a request. RequestError (400) if it could not fit even into an empty engine, with the numbers."""
        wanted = tuple(needs)
        pages = {
            need.component: -(-need.positions // self.pools.page_size)
            for need in wanted
            if need.component in self.pools.total_pages
        }
        for component, count in pages.items():
            total = self.pools.total_pages[component]
            if count > total:
                limit = LIMIT_FIELDS[component]
                raise RequestError(
                    f"the request needs up to {count} KV pages of {self.pools.page_size} positions in the {component}, "
                    f"the engine has {total}: lower {limit}, shorten the prompt or start with more --kv-pages",
                    field=limit,
                    code="too_large",
                )
        self._waiting.append(_Waiting(request_id, wanted, pages))

    def admit(self) -> list[tuple[str, dict[Component, Track]]]:
        """Give slots and worst-case pages to waiting requests, in order of arrival, until the next one does not fit."""
        admitted = []
        while self._waiting and self._fits(self._waiting[0]):
            entry = self._waiting.popleft()
            slot = self.pools.take_slot()
            tracks = {need.component: self._open(entry, need, slot) for need in entry.needs}
            admitted.append((entry.request_id, tracks))
        return admitted

    def _fits(self, entry: _Waiting) -> bool:
        return self.pools.free_slots() > 0 and all(
            self.pools.free_pages(component) >= count for component, count in entry.pages.items()
        )

    def _open(self, entry: _Waiting, need: Need, slot: int) -> Track:
        self._generation += 1
        track = Track(
            request_id=entry.request_id,
            component=need.component,
            generation=self._generation,
            slot=slot,
            limit=need.limit,
            prompt_length=need.prompt_length,
            pages=self.pools.take_pages(need.component, entry.pages.get(need.component, 0)),
            audio_output=any(other.component == Component.TALKER for other in entry.needs),
            waits_for_source=need.waits_for_source,
        )
        self.tracks[need.component][entry.request_id] = track
        return track

    def close(self, request_id: str) -> None:
        """Take back the pages and the slot of a request, waiting or admitted. No step in flight may hold its rows."""
        for entry in self._waiting:
            if entry.request_id == request_id:
                self._waiting.remove(entry)
                return
        slot = None
        for tracks in self.tracks.values():
            track = tracks.pop(request_id, None)
            if track is not None:
                assert track.in_flight == 0, f"{request_id} still runs in {track.component}"
                self.pools.release_pages(track.component, track.pages)
                slot = track.slot
        if slot is not None:
            self.pools.release_slot(slot)

    def next_step(self, component: Component) -> Step | None:
        """Form the component's next step from its ready tracks, or None.

        Decode rows go first; prompts ride along in the same step with `mixed`, else the two kinds take turns.
        """
        ready = [
            (track, walk) for track in self.tracks[component].values() if (walk := self.next_walk(track)) is not None
        ]
        prefill = [pair for pair in ready if pair[1] not in self.policy.decode_walks]
        decode = [pair for pair in ready if pair[1] in self.policy.decode_walks]
        rows = (
            self._mixed_rows(component, decode, prefill)
            if self._mixes
            else self._rows_in_turn(component, decode, prefill)
        )
        return self._form(component, rows) if rows else None

    @property
    def _mixes(self) -> bool:
        return self.policy.mixed and self.policy.batching

    def _mixed_rows(self, component: Component, decode: list[_Ready], prefill: list[_Ready]) -> list[Row]:
        most = self.policy.max_rows[component]
        decoding = self._decode_rows(decode, most - 1 if prefill and most > 1 else most)
        return decoding + self._prefill_rows(component, prefill, most - len(decoding))

    def _rows_in_turn(self, component: Component, decode: list[_Ready], prefill: list[_Ready]) -> list[Row]:
        most = self.policy.max_rows[component] if self.policy.batching else 1
        take_prefill = bool(prefill) and not (decode and self._prefilled_last[component])
        rows = self._prefill_rows(component, prefill, most) if take_prefill else self._decode_rows(decode, most)
        if rows:
            self._prefilled_last[component] = take_prefill
        return rows

    def _decode_rows(self, pairs: list[_Ready], most: int) -> list[Row]:
        """In order of slot, so that the same tracks make the same step whatever order they came in."""
        return sorted((self._row(track, walk) for track, walk in pairs[:most]), key=lambda row: row.slot)

    def _prefill_rows(self, component: Component, pairs: list[_Ready], most: int) -> list[Row]:
        rows = [self._row(track, walk) for track, walk in pairs]
        rows = [row for row in rows if row.length > 0]
        if component in self.policy.chunked:
            return chunk_rows(rows, self.policy.prefill_positions, most)
        return whole_rows(rows, self.policy.prefill_positions)[:most]

    def _row(self, track: Track, walk: str) -> Row:
        start, length = self.policy.row_span(track)
        return Row(
            request_id=track.request_id,
            generation=track.generation,
            slot=track.slot,
            walk=walk,
            start=start,
            length=length,
            pages=track.pages,
        )

    def _form(self, component: Component, rows: list[Row]) -> Step:
        number = self._steps[component]
        self._steps[component] += 1
        for row in rows:
            self.tracks[component][row.request_id].note_launch(row.length)
        if len(rows) < len(self.tracks[component]):
            self._rotate(component, rows)
        return Step(number=number, component=component, rows=tuple(rows))

    def _rotate(self, component: Component, rows: list[Row]) -> None:
        """Put the tracks that just got their turn behind those that did not."""
        tracks = self.tracks[component]
        for row in rows:
            tracks[row.request_id] = tracks.pop(row.request_id)

    def retire(self, step: Step) -> None:
        """Note that `step` is no longer in flight."""
        for row in step.rows:
            track = self.tracks[step.component].get(row.request_id)
            if track is not None and track.generation == row.generation:
                track.in_flight -= 1
