"""A plan that was moved on equals a plan laid out anew, and every miss has its reason."""

import random

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels import Plan, ops_for
from engine.kernels.blocks import BlockLayout
from engine.kv.plan import build_plan
from engine.kv.plan_cache import PlanCache
from engine.step import Component, Row, Step

PAGE = 8
DECODE, TEXT_DECODE = "thinker_decode", "thinker_text_decode"
OPS = ops_for("cpu")


def positions(row: Row) -> np.ndarray:
    """Places of a row whose generation says how far they run ahead of its positions, as a prompt with pictures does."""
    return np.broadcast_to(
        np.arange(row.start, row.start + row.length, dtype=np.float32) + row.generation, (3, row.length)
    )


def row(slot: int, start: int, *, generation: int | None = None, walk: str = TEXT_DECODE, pages: int = 8) -> Row:
    """A row of a track whose pages are scattered, and its own."""
    held = tuple(random.Random(slot).sample(range(100 * slot, 100 * slot + 100), pages))
    number = slot if generation is None else generation
    return Row(request_id=f"r{number}", generation=number, slot=slot, walk=walk, start=start, length=1, pages=held)


def step(*rows: Row) -> Step:
    return Step(number=0, component=Component.THINKER, rows=rows)


def cache(*, enabled: bool = True) -> PlanCache:
    return PlanCache(PAGE, ops_for("cpu"), frozenset({DECODE, TEXT_DECODE}), enabled=enabled)


def assert_same(got: Plan, want: Plan) -> None:
    laid, fresh = got.layout, want.layout
    assert isinstance(laid, BlockLayout) and isinstance(fresh, BlockLayout)
    assert got.page_size == want.page_size and len(laid.groups) == len(fresh.groups)
    pairs = [(getattr(got, name), getattr(want, name)) for name in ("positions", "write", "last")]
    pairs.append((laid.places, fresh.places))
    for mine, other in zip(laid.groups, fresh.groups, strict=True):
        assert mine.blocks == other.blocks
        pairs += [(mine.rows, other.rows), (mine.pages, other.pages), (mine.mask, other.mask)]
    for mine_tensor, other_tensor in pairs:
        assert mine_tensor.dtype == other_tensor.dtype and torch.equal(mine_tensor, other_tensor)


def planned(plans: PlanCache, *rows: Row) -> Plan:
    """The cache's plan of a step, which must equal a fresh one."""
    plan = plans.plan(step(*rows), positions)
    assert_same(plan, build_plan(step(*rows), positions, PAGE, OPS))
    return plan


def counted(plans: PlanCache) -> dict[str, int]:
    return {name: count for name, count in plans.counters.items() if count}


def test_the_same_rows_hit_over_every_boundary_of_blocks_and_pages() -> None:
    plans = cache()
    for at in range(1, 41):
        planned(plans, row(0, at), row(3, at + 6), row(5, at + 20))
    assert counted(plans) == {"misses_first": 1, "hits": 39}


@pytest.mark.parametrize(
    ("then", "reason"),
    [
        ((row(0, 5), row(1, 9), row(2, 3)), "rows"),  # admitted
        ((row(0, 5),), "rows"),  # finished
        ((row(1, 9), row(0, 5)), "rows"),  # another order
        ((row(0, 5), row(1, 9, generation=7)), "generation"),  # the slot's next tenant
        ((row(0, 5), row(1, 9, pages=9)), "pages"),
    ],
)
def test_a_miss_has_its_reason_and_the_step_after_it_hits(then: tuple[Row, ...], reason: str) -> None:
    plans = cache()
    planned(plans, row(0, 4), row(1, 8))
    planned(plans, *then)
    assert counted(plans) == {"misses_first": 1, f"misses_{reason}": 1}
    planned(plans, *(msgspec.structs.replace(one, start=one.start + 1) for one in then))
    assert counted(plans) == {"misses_first": 1, f"misses_{reason}": 1, "hits": 1}


def test_each_walk_keeps_its_own_plan_and_a_step_of_both_walks_another() -> None:
    plans = cache()
    for at in range(4, 7):
        planned(plans, row(0, at))
        planned(plans, row(1, at, walk=DECODE))
        planned(plans, row(0, at), row(1, at, walk=DECODE))
    assert counted(plans) == {"misses_first": 3, "hits": 6}


def test_rows_hit_again_after_they_ran_in_a_step_with_a_prompt() -> None:
    plans = cache()
    planned(plans, row(0, 7))
    prompt = msgspec.structs.replace(row(1, 0, walk="thinker_prefill"), length=13)
    planned(plans, row(0, 8), prompt)
    planned(plans, row(0, 9))
    assert counted(plans) == {"misses_first": 1, "uncached": 1, "hits": 1}


def test_an_earlier_plan_stays_as_it_was_for_the_step_that_is_in_flight() -> None:
    plans = cache()
    planned(plans, row(0, 4), row(1, 6))
    kept = planned(plans, row(0, 5), row(1, 7))
    planned(plans, row(0, 6), row(1, 8))
    assert_same(kept, build_plan(step(row(0, 5), row(1, 7)), positions, PAGE, OPS))


def test_switched_off_every_plan_is_laid_out_anew_and_counted_so() -> None:
    plans = cache(enabled=False)
    for at in range(4, 9):
        planned(plans, row(0, at))
    assert counted(plans) == {"uncached": 5}


@settings(max_examples=150, deadline=None)
@given(
    events=st.lists(
        st.tuples(st.sampled_from(["run", "run", "run", "admit", "finish", "swap", "skip"]), st.integers(0, 5)),
        max_size=60,
    )
)
def test_through_admissions_ends_and_new_tenants_a_plan_equals_a_fresh_one(events: list[tuple[str, int]]) -> None:
    """Tracks come, run, pause, leave and are replaced in any order; hits are the steps whose rows were the last ones."""
    plans = cache()
    tracks: dict[int, list[int]] = {}  # slot -> [generation, position]
    last: dict[frozenset[str], list[tuple[int, int]]] = {}
    generation, hits = 10, 0
    for event, slot in events:
        if event in ("admit", "swap") and (event == "swap") == (slot in tracks):
            generation += 1
            tracks[slot] = [generation, slot + 1]
        elif event == "finish":
            tracks.pop(slot, None)
        elif event in ("run", "skip") and tracks:
            running = [one for one in sorted(tracks) if event == "run" or one != slot]
            walks = {one: DECODE if one % 2 else TEXT_DECODE for one in running}
            rows = [row(one, tracks[one][1], generation=tracks[one][0], walk=walks[one]) for one in running]
            rows = [one for one in rows if one.start < PAGE * 8]
            if not rows:
                continue
            planned(plans, *rows)
            key, mine = frozenset(one.walk for one in rows), [(one.slot, one.generation) for one in rows]
            hits += last.get(key) == mine
            last[key] = mine
            for one in rows:
                tracks[one.slot][1] += 1
    assert plans.counters["hits"] == hits
