"""Admission in order of arrival, steps in turn, and everything given back: with plain pools and no torch."""

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from engine.errors import RequestError
from engine.scheduler import Need, Policy, Pools, Scheduler, chunk_rows
from engine.step import Component, Row, Step
from engine.track import Track

THINKER, TALKER, CODE2WAV = Component.THINKER, Component.TALKER, Component.CODE2WAV
PAGE = 4


class Stock:
    """Numbers to give out and take back; giving back what is not out is an error."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.free = set(range(total))

    def take(self, count: int) -> tuple[int, ...]:
        assert count <= len(self.free), "taken more than there is"
        taken = tuple(sorted(self.free)[:count])
        self.free -= set(taken)
        return taken

    def give_back(self, numbers: tuple[int, ...]) -> None:
        assert not self.free & set(numbers), "given back twice"
        self.free |= set(numbers)


def next_walk(track: Track) -> str | None:
    if track.finished:
        return None
    return "prefill" if track.prefilled < track.prompt_length else "decode"


def prompts_only(track: Track) -> str | None:
    return "prefill" if track.prefilled < track.prompt_length else None


def row_span(track: Track) -> tuple[int, int]:
    if track.prefilled < track.prompt_length:
        return track.prefilled, track.prompt_length - track.prefilled
    return track.prompt_length + track.launched - 1, 1


class World:
    """A scheduler over plain pools, and what the engine's loop does with its steps."""

    def __init__(
        self,
        *,
        pages: int = 100,
        talker_pages: int = 100,
        slots: int = 16,
        max_rows: int = 16,
        prefill_positions: int = 1000,
        batching: bool = True,
        walk: Callable[[Track], str | None] = next_walk,
        span: Callable[[Track], tuple[int, int]] = row_span,
        chunked: bool = False,
        mixed: bool = False,
    ) -> None:
        self.pages = {THINKER: Stock(pages), TALKER: Stock(talker_pages)}
        self.slots = Stock(slots)
        self.scheduler = Scheduler(
            pools=Pools(
                page_size=PAGE,
                total_pages={component: stock.total for component, stock in self.pages.items()},
                free_pages=lambda component: len(self.pages[component].free),
                take_pages=lambda component, count: self.pages[component].take(count) if count else (),
                release_pages=lambda component, taken: self.pages[component].give_back(taken) if taken else None,
                free_slots=lambda: len(self.slots.free),
                take_slot=lambda: self.slots.take(1)[0],
                release_slot=lambda slot: self.slots.give_back((slot,)),
            ),
            policy=Policy(
                max_rows=dict.fromkeys(Component, max_rows),
                prefill_positions=prefill_positions,
                decode_walks=frozenset({"decode"}),
                row_span=span,
                batching=batching,
                chunked=frozenset({THINKER, TALKER}) if chunked else frozenset(),
                mixed=mixed,
            ),
            next_walk=walk,
        )

    def add(self, request_id: str, prompt: int = 4, limit: int = 4, frames: int = 0) -> None:
        needs = [Need(THINKER, positions=prompt + limit, prompt_length=prompt, limit=limit)]
        if frames:
            needs.append(Need(TALKER, positions=9 + frames, prompt_length=9, limit=frames))
            needs.append(Need(CODE2WAV, positions=0, prompt_length=0, limit=frames))
        self.scheduler.add(request_id, needs)

    def admit(self) -> list[str]:
        return [request_id for request_id, _ in self.scheduler.admit()]

    def track(self, request_id: str, component: Component = THINKER) -> Track:
        return self.scheduler.tracks[component][request_id]

    def progress(self, step: Step) -> None:
        """What a runner notes when `step` is done, and the retirement of the step."""
        for row in step.rows:
            track = self.track(row.request_id, step.component)
            track.generated += row.start + row.length >= track.prompt_length
        self.scheduler.retire(step)

    def step(self) -> list[tuple[str, str]] | None:
        """Run one step of the Thinker; returns (request, walk) for each row."""
        step = self.scheduler.next_step(THINKER)
        if step is None:
            return None
        self.progress(step)
        return [(row.request_id, row.walk) for row in step.rows]

    def decoding(self, *request_ids: str) -> None:
        """Add, admit and prefill requests, so that only decode rows are left."""
        for request_id in request_ids:
            self.add(request_id)
        assert self.admit() == list(request_ids)
        for request_id in request_ids:
            track = self.track(request_id)
            track.prefilled, track.launched, track.generated = 4, 1, 1


# --- Admission ---


def test_a_request_is_given_its_worst_case_pages_and_one_slot_for_all_its_tracks() -> None:
    world = World()
    world.add("a", prompt=5, limit=4, frames=4)  # 9 positions, and 9 + 4 in the Talker
    [(request_id, tracks)] = world.scheduler.admit()
    assert request_id == "a"
    assert {component: len(track.pages) for component, track in tracks.items()} == {THINKER: 3, TALKER: 4, CODE2WAV: 0}
    assert {track.slot for track in tracks.values()} == {0}
    assert len(world.slots.free) == 15
    assert all(track.audio_output for track in tracks.values())
    assert [tracks[component].limit for component in (THINKER, TALKER, CODE2WAV)] == [4, 4, 4]
    assert [tracks[component].prompt_length for component in (THINKER, TALKER, CODE2WAV)] == [5, 9, 0]


def test_a_text_request_has_no_talker_track_and_no_audio_output() -> None:
    world = World()
    world.add("a")
    [(_, tracks)] = world.scheduler.admit()
    assert list(tracks) == [THINKER]
    assert not tracks[THINKER].audio_output
    assert world.scheduler.next_step(TALKER) is None


def test_waiting_for_a_source_is_handed_to_the_track() -> None:
    world = World()
    world.scheduler.add("a", [Need(THINKER, 8, prompt_length=4, limit=4, waits_for_source=True)])
    [(_, tracks)] = world.scheduler.admit()
    assert tracks[THINKER].waits_for_source


def test_a_request_larger_than_the_pool_is_refused_with_both_numbers() -> None:
    world = World(pages=10)
    world.add("fits", prompt=30, limit=10)
    with pytest.raises(RequestError, match=r"11 KV pages of 4 positions in the thinker.*has 10") as caught:
        world.add("too large", prompt=31, limit=10)
    assert (caught.value.status, caught.value.field, caught.value.code) == (400, "max_tokens", "too_large")
    assert world.scheduler.waiting == 1
    assert world.admit() == ["fits"]


def test_speech_larger_than_the_talker_s_pool_is_refused_too() -> None:
    world = World(talker_pages=5)
    with pytest.raises(RequestError, match=r"6 KV pages.*talker.*has 5: lower speech\.max_frames") as refused:
        world.add("a", frames=12)
    assert refused.value.field == "speech.max_frames"
    assert world.scheduler.waiting == 0


def test_requests_wait_for_pages_and_are_admitted_in_order_of_arrival() -> None:
    world = World(pages=4)
    for request_id in "abcd":
        world.add(request_id)  # 8 positions: 2 pages
    assert world.admit() == ["a", "b"]
    assert world.scheduler.waiting == 2
    assert world.admit() == []
    world.scheduler.close("b")
    assert world.admit() == ["c"]
    world.scheduler.close("a")
    assert world.admit() == ["d"]


def test_requests_wait_for_slots_even_when_pages_are_left() -> None:
    world = World(slots=2)
    for request_id in "abc":
        world.add(request_id)
    assert world.admit() == ["a", "b"]
    world.scheduler.close("a")
    assert world.admit() == ["c"]


def test_a_request_waits_until_every_component_has_its_pages() -> None:
    world = World(talker_pages=4)
    world.add("a", frames=4)
    world.add("b", frames=4)
    assert world.admit() == ["a"]
    assert len(world.pages[THINKER].free) == 98  # nothing was taken for b
    world.scheduler.close("a")
    assert world.admit() == ["b"]


def test_a_big_waiting_request_is_not_overtaken_by_a_small_later_one() -> None:
    world = World(pages=6)
    world.add("running", limit=4)
    world.admit()
    world.add("big", prompt=4, limit=20)  # all 6 pages
    world.add("small", limit=4)
    assert world.admit() == []
    world.scheduler.close("running")
    assert world.admit() == ["big"]
    world.scheduler.close("big")
    assert world.admit() == ["small"]


def test_a_cancelled_waiting_request_lets_those_behind_it_in() -> None:
    world = World(pages=6)
    world.add("running", limit=4)
    world.admit()
    world.add("big", prompt=4, limit=20)
    world.add("small", limit=4)
    world.scheduler.close("big")
    assert world.scheduler.waiting == 1
    assert world.admit() == ["small"]


def test_closing_an_unknown_or_closed_request_gives_nothing_back_twice() -> None:
    world = World()
    world.add("a")
    world.admit()
    world.scheduler.close("never seen")
    world.scheduler.close("a")
    world.scheduler.close("a")
    assert (len(world.slots.free), len(world.pages[THINKER].free)) == (16, 100)


def test_a_request_whose_rows_are_in_flight_can_not_be_closed() -> None:
    world = World()
    world.add("a")
    world.admit()
    step = world.scheduler.next_step(THINKER)
    assert step is not None
    with pytest.raises(AssertionError, match="a still runs in thinker"):
        world.scheduler.close("a")
    assert len(world.slots.free) == 15


# --- Steps ---


def test_a_row_carries_what_its_track_holds_and_steps_are_numbered_from_zero() -> None:
    world = World()
    world.add("a", prompt=5)
    world.add("b", prompt=3)
    world.admit()
    step = world.scheduler.next_step(THINKER)
    assert step is not None and step.number == 0 and step.component == THINKER
    assert [(row.request_id, row.walk, row.start, row.length) for row in step.rows] == [
        ("a", "prefill", 0, 5),
        ("b", "prefill", 0, 3),
    ]
    for row in step.rows:
        track = world.track(row.request_id)
        assert (row.generation, row.slot, row.pages) == (track.generation, track.slot, track.pages)
    world.progress(step)
    after = world.scheduler.next_step(THINKER)
    assert after is not None and after.number == 1
    assert [(row.walk, row.start, row.length) for row in after.rows] == [("decode", 5, 1), ("decode", 3, 1)]


def test_each_component_counts_its_own_steps() -> None:
    world = World()
    world.add("a", frames=4)
    world.admit()
    numbers = []
    for component in (THINKER, THINKER, TALKER, THINKER, TALKER):
        step = world.scheduler.next_step(component)
        assert step is not None
        numbers.append((step.component, step.number))
        world.progress(step)
    assert numbers == [(THINKER, 0), (THINKER, 1), (TALKER, 0), (THINKER, 2), (TALKER, 1)]


def test_a_track_in_flight_is_launched_ahead_at_the_position_that_follows() -> None:
    world = World()
    world.decoding("a")
    steps = [world.scheduler.next_step(THINKER) for _ in range(3)]
    assert [step.rows[0].start for step in steps if step] == [4, 5, 6]
    track = world.track("a")
    assert (track.in_flight, track.launched, track.generated) == (3, 4, 1)
    for step in steps:
        assert step is not None
        world.progress(step)
    assert (track.in_flight, track.launched, track.generated) == (0, 4, 4)


def test_an_idle_component_has_no_step_and_uses_up_no_number() -> None:
    world = World()
    assert world.scheduler.next_step(THINKER) is None
    world.add("a")
    assert world.scheduler.next_step(THINKER) is None  # queued, not admitted
    world.admit()
    step = world.scheduler.next_step(THINKER)
    assert step is not None and step.number == 0


def test_finished_and_waiting_tracks_take_no_row() -> None:
    world = World(walk=lambda track: None if track.request_id == "waits" else next_walk(track))
    world.decoding("done", "waits", "runs")
    world.track("done").finish_reason = "stop"
    assert world.step() == [("runs", "decode")]


def test_rows_with_nothing_to_do_yet_are_left_out_and_do_not_take_the_place_of_others() -> None:
    world = World(max_rows=1, span=lambda track: (0, 0) if track.request_id == "not yet" else row_span(track))
    world.add("not yet")
    world.add("ready")
    world.admit()
    assert world.step() == [("ready", "prefill")]
    assert world.track("not yet").in_flight == 0
    world.track("ready").finish_reason = "stop"
    assert world.step() is None


def test_prefill_and_decode_take_turns_when_both_wait() -> None:
    world = World(prefill_positions=4)
    world.decoding("old")
    for request_id in "abc":
        world.add(request_id)
    world.admit()
    steps = [world.step() for _ in range(6)]
    assert steps == [
        [("a", "prefill")],
        [("old", "decode"), ("a", "decode")],
        [("b", "prefill")],
        [("old", "decode"), ("a", "decode"), ("b", "decode")],
        [("c", "prefill")],
        [("old", "decode"), ("a", "decode"), ("b", "decode"), ("c", "decode")],
    ]


def test_without_decode_rows_prompts_follow_each_other() -> None:
    world = World(prefill_positions=4, walk=prompts_only)
    world.add("a")
    world.add("b")
    world.admit()
    first = world.scheduler.next_step(THINKER)
    second = world.scheduler.next_step(THINKER)
    assert first is not None and second is not None
    assert [first.rows[0].request_id, second.rows[0].request_id] == ["a", "b"]
    assert {first.rows[0].walk, second.rows[0].walk} == {"prefill"}


def test_prompts_share_a_step_in_order_while_they_fit_its_positions() -> None:
    world = World(prefill_positions=10, walk=prompts_only)
    for request_id, prompt in (("a", 4), ("b", 6), ("c", 1), ("d", 9), ("e", 1)):
        world.add(request_id, prompt=prompt)
    world.admit()
    rows = []
    while (step := world.scheduler.next_step(THINKER)) is not None:
        rows.append([row.request_id for row in step.rows])
    assert rows == [["a", "b"], ["c", "d"], ["e"]]


def test_a_prompt_larger_than_the_step_s_positions_runs_alone() -> None:
    world = World(prefill_positions=10)
    world.add("large", prompt=50)
    world.add("small", prompt=1)
    world.admit()
    assert world.step() == [("large", "prefill")]


def test_a_prompt_that_does_not_fit_is_not_overtaken_within_the_step() -> None:
    world = World(prefill_positions=10)
    for request_id, prompt in (("a", 6), ("b", 6), ("c", 2)):
        world.add(request_id, prompt=prompt)
    world.admit()
    assert world.step() == [("a", "prefill")]


def chunks(world: World, steps: int) -> list[list[tuple[str, int, int]]]:
    """The prompt rows (request, start, length) of the next steps of the Thinker."""
    found = []
    for _ in range(steps):
        step = world.scheduler.next_step(THINKER)
        assert step is not None
        found.append([(row.request_id, row.start, row.length) for row in step.rows if row.walk == "prefill"])
        world.progress(step)
    return found


def test_a_prompt_is_cut_into_chunks_and_only_its_last_one_makes_a_token() -> None:
    world = World(prefill_positions=10, chunked=True)
    world.add("a", prompt=25)
    world.admit()
    assert chunks(world, 2) == [[("a", 0, 10)], [("a", 10, 10)]]
    assert (world.track("a").launched, world.track("a").generated) == (0, 0)
    assert chunks(world, 1) == [[("a", 20, 5)]]
    assert (world.track("a").launched, world.track("a").generated) == (1, 1)
    assert world.step() == [("a", "decode")]


def test_a_short_prompt_does_not_wait_for_a_long_one_and_the_long_one_goes_on() -> None:
    world = World(prefill_positions=10, chunked=True)
    world.add("long", prompt=30)
    world.admit()
    assert chunks(world, 1) == [[("long", 0, 10)]]
    world.add("middle", prompt=9)
    world.add("short", prompt=3)
    world.admit()
    assert chunks(world, 1) == [[("long", 10, 5), ("short", 0, 3), ("middle", 0, 2)]]


def test_the_oldest_prompt_always_gets_half_however_many_come_after_it() -> None:
    world = World(prefill_positions=10, chunked=True, slots=40, walk=prompts_only)
    world.add("oldest", prompt=20)
    for place in range(30):
        world.add(f"later {place}", prompt=1)
    world.admit()
    assert [rows[0] for rows in chunks(world, 4)] == [("oldest", start, 5) for start in (0, 5, 10, 15)]


def test_what_the_oldest_prompt_leaves_goes_to_the_others() -> None:
    world = World(prefill_positions=10, chunked=True)
    for request_id, prompt in (("a", 2), ("b", 20), ("c", 5)):
        world.add(request_id, prompt=prompt)
    world.admit()
    assert chunks(world, 1) == [[("a", 0, 2), ("c", 0, 5), ("b", 0, 3)]]


@pytest.mark.parametrize("most", [1, 2, 5])
@pytest.mark.parametrize("positions", [1, 2, 7, 64])
def test_chunks_never_exceed_a_step_and_use_it_up_while_prompts_wait(positions: int, most: int) -> None:
    for lengths in ([1], [100], [3, 3], [50, 1, 1, 1], [1, 1, 50], [9, 8, 7, 6, 5]):
        rows = [
            Row(request_id=str(n), generation=n, slot=n, walk="prefill", start=0, length=length)
            for n, length in enumerate(lengths)
        ]
        taken = chunk_rows(rows, positions, most)
        used = sum(row.length for row in taken)
        assert taken[0].generation == 0 and all(row.length > 0 for row in taken) and len(taken) <= most
        assert all(row.length <= lengths[row.generation] for row in taken)
        assert used <= positions
        assert used == positions or len(taken) == min(most, len(lengths))


def test_prompt_chunks_ride_along_with_decode_rows_which_come_first_in_order_of_slot() -> None:
    world = World(prefill_positions=4, chunked=True, mixed=True)
    world.decoding("x", "y")
    world.add("a", prompt=6)
    world.admit()
    assert [world.step() for _ in range(3)] == [
        [("x", "decode"), ("y", "decode"), ("a", "prefill")],
        [("x", "decode"), ("y", "decode"), ("a", "prefill")],
        [("x", "decode"), ("y", "decode"), ("a", "decode")],
    ]


def test_in_mixed_steps_a_prompt_is_never_crowded_out_and_decode_rows_take_turns() -> None:
    world = World(max_rows=2, mixed=True)
    world.decoding("x", "y", "z")
    world.add("a")
    world.admit()
    assert world.step() == [("x", "decode"), ("a", "prefill")]
    assert world.step() == [("y", "decode"), ("z", "decode")]


def test_with_batching_off_mixed_steps_fall_back_to_turns() -> None:
    world = World(batching=False, mixed=True)
    world.decoding("old")
    world.add("a")
    world.admit()
    assert [world.step() for _ in range(3)] == [[("a", "prefill")], [("old", "decode")], [("a", "decode")]]


def test_rows_beyond_the_most_a_step_holds_take_turns() -> None:
    world = World(max_rows=2)
    world.decoding("a", "b", "c", "d", "e")
    served = [[request_id for request_id, _ in world.step() or []] for _ in range(5)]
    assert served == [["a", "b"], ["c", "d"], ["a", "e"], ["b", "c"], ["a", "d"]]


def test_with_batching_off_each_step_has_one_row_and_everyone_is_served_in_turn() -> None:
    world = World(batching=False)
    world.decoding("a", "b", "c")
    assert [world.step() for _ in range(6)] == [[(request_id, "decode")] for request_id in "abcabc"]


def test_with_batching_off_prompts_and_decodes_still_take_turns() -> None:
    world = World(batching=False)
    world.decoding("old")
    world.add("a")
    world.add("b")
    world.admit()
    assert [world.step() for _ in range(5)] == [
        [("a", "prefill")],
        [("old", "decode")],
        [("b", "prefill")],
        [("a", "decode")],
        [("old", "decode")],
    ]


def test_a_generation_is_never_used_twice_even_for_a_repeated_id_in_the_same_slot() -> None:
    world = World(slots=1)
    seen = []
    for _ in range(5):
        world.add("same", frames=4)
        [(_, tracks)] = world.scheduler.admit()
        assert {track.slot for track in tracks.values()} == {0}
        seen += [track.generation for track in tracks.values()]
        world.scheduler.close("same")
    assert len(set(seen)) == 15


def test_retiring_a_step_of_a_former_tenant_leaves_the_new_one_in_flight() -> None:
    world = World()
    world.add("same")
    world.admit()
    old = world.scheduler.next_step(THINKER)
    assert old is not None
    world.scheduler.retire(old)
    world.scheduler.close("same")
    world.add("same")
    world.admit()
    assert world.scheduler.next_step(THINKER) is not None
    world.scheduler.retire(old)
    assert world.track("same").in_flight == 1


# --- Any order of arrivals, steps, ends and cancels ---


class AnyOrder(RuleBasedStateMachine):
    """Requests come, run, finish and are cancelled in any order; nothing is lost, shared or handed out twice."""

    @initialize(batching=st.booleans(), chunked=st.booleans(), mixed=st.booleans(), max_rows=st.integers(1, 3))
    def boot(self, batching: bool, chunked: bool, mixed: bool, max_rows: int) -> None:
        self.world = World(
            pages=8,
            talker_pages=8,
            slots=3,
            max_rows=max_rows,
            prefill_positions=8,
            batching=batching,
            chunked=chunked,
            mixed=mixed,
        )
        self.next_start: dict[tuple[Component, int], int] = {}
        self.queue: list[str] = []
        self.running: set[str] = set()
        self.leaving: set[str] = set()
        self.flying: list[Step] = []
        self.generations: set[int] = set()
        self.count = 0

    @rule(prompt=st.integers(1, 16), limit=st.integers(1, 16), frames=st.sampled_from([0, 0, 3, 23]))
    def arrive(self, prompt: int, limit: int, frames: int) -> None:
        self.count += 1
        request_id = f"r{self.count}"
        self.world.add(request_id, prompt, limit, frames)
        self.queue.append(request_id)

    @rule()
    def admit(self) -> None:
        for request_id, tracks in self.world.scheduler.admit():
            assert request_id == self.queue.pop(0), "overtaken"
            new = {track.generation for track in tracks.values()}
            assert len(new) == len(tracks) and not new & self.generations
            self.generations |= new
            self.running.add(request_id)

    @rule(component=st.sampled_from([THINKER, TALKER]))
    def launch(self, component: Component) -> None:
        step = self.world.scheduler.next_step(component)
        if step is not None:
            ids = [row.request_id for row in step.rows]
            assert len(set(ids)) == len(ids)
            assert set(ids) <= self.running - self.leaving
            for row in step.rows:  # every position once, in order, however many steps fly
                place = (component, row.generation)
                assert row.start == self.next_start.get(place, 0)
                self.next_start[place] = row.start + row.length
            self.flying.append(step)

    @precondition(lambda self: self.flying)
    @rule()
    def land(self) -> None:
        self.world.progress(self.flying.pop(0))
        self.give_back()

    @precondition(lambda self: self.running or self.queue)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """A request finishes or is cancelled; its tracks run no more and it is closed once nothing of it flies."""
        request_id = data.draw(st.sampled_from(sorted(self.running) + self.queue))
        if request_id in self.queue:
            self.queue.remove(request_id)
            self.world.scheduler.close(request_id)
            return
        self.leaving.add(request_id)
        for tracks in self.world.scheduler.tracks.values():
            if request_id in tracks:
                tracks[request_id].finish_reason = "cancelled"
        self.give_back()

    def give_back(self) -> None:
        flying = {row.request_id for step in self.flying for row in step.rows}
        for request_id in sorted(self.leaving - flying):
            self.world.scheduler.close(request_id)
            self.leaving.remove(request_id)
            self.running.remove(request_id)

    @invariant()
    def what_is_not_free_is_held_by_exactly_one_running_request(self) -> None:
        if not hasattr(self, "world"):
            return
        for component, stock in self.world.pages.items():
            held = [page for track in self.world.scheduler.tracks[component].values() for page in track.pages]
            assert sorted([*held, *stock.free]) == list(range(stock.total))
        slots = [track.slot for track in self.world.scheduler.tracks[THINKER].values()]
        assert sorted([*slots, *self.world.slots.free]) == [0, 1, 2]
        assert self.world.scheduler.waiting == len(self.queue)

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        self.leaving |= self.running
        while self.flying:
            self.world.progress(self.flying.pop(0))
        self.give_back()
        while self.queue:  # whoever still waits is let in once those before it have left
            self.admit()
            assert self.running
            self.leaving |= self.running
            self.give_back()
        assert len(self.world.slots.free) == 3
        assert [len(stock.free) for stock in self.world.pages.values()] == [8, 8]


def test_everything_comes_back_in_any_order_of_arrivals_steps_ends_and_cancels() -> None:
    run_state_machine_as_test(AnyOrder, settings=settings(max_examples=100, stateful_step_count=40, deadline=None))
