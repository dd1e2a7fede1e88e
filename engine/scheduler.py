"""Ready tracks -> one Step. First come, first served admission against the worst case; pure policy, no torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from engine.errors import RequestError
from engine.step import Component, Row, Step
from engine.track import Track

NextWalk = Callable[[Track], str | None]


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
    """The limits of a step: rows, positions prefilled together, and the (start, length) that a ready track runs."""

    max_rows: dict[Component, int]
    prefill_positions: int
    decode_walks: frozenset[str]
    row_span: Callable[[Track], tuple[int, int]]
    batching: bool = True


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
                raise RequestError(
                    f"the request needs up to {count} KV pages of {self.pools.page_size} positions in the {component}, "
                    f"the engine has {total}: lower max_tokens, shorten the prompt or start with more --kv-pages",
                    field="max_tokens",
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
        """Form the component's next step from its ready tracks, or None. Prefill and decode steps take turns when both wait."""
        ready = [
            (track, walk)
            for track in self.tracks[component].values()
            if track.in_flight == 0 and (walk := self.next_walk(track)) is not None
        ]
        prefill = [pair for pair in ready if pair[1] not in self.policy.decode_walks]
        decode = [pair for pair in ready if pair[1] in self.policy.decode_walks]
        take_prefill = bool(prefill) and not (decode and self._prefilled_last[component])
        rows = self._prefill_rows(prefill) if take_prefill else [self._row(*pair) for pair in decode]
        rows = [row for row in rows if row.length > 0][: self.policy.max_rows[component] if self.policy.batching else 1]
        if not rows:
            return None
        self._prefilled_last[component] = take_prefill
        return self._form(component, rows)

    def _prefill_rows(self, pairs: list[tuple[Track, str]]) -> list[Row]:
        """Whole prompts, in order of arrival, while they fit the step's budget; the first always does."""
        rows: list[Row] = []
        budget = self.policy.prefill_positions
        for track, walk in pairs:
            row = self._row(track, walk)
            if rows and row.length > budget:
                break
            budget -= row.length
            rows.append(row)
        return rows

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
            self.tracks[component][row.request_id].in_flight += 1
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
