"""The choice of a route, as a truth table."""

from __future__ import annotations

import pytest

from engine.routing import Limits, Route, Router, choose

LIMITS = Limits(per_pair_rows=4, route_align_slots=128)
FUSED = Router(top_k=8, renormalise=True, fused=True)


def route(rows: int, router: Router = FUSED, *, per_pair: bool = True, route_align: bool = True) -> Route:
    return choose(rows, router, LIMITS, per_pair=per_pair, route_align=route_align)


@pytest.mark.parametrize(
    ("rows", "per_pair", "route_align", "expected"),
    [
        (1, True, True, Route.PER_PAIR),
        (4, True, True, Route.PER_PAIR),
        (5, True, True, Route.ROUTE_ALIGN),
        (16, True, True, Route.ROUTE_ALIGN),
        (17, True, True, Route.ROUTER_TOPK),
        (2048, True, True, Route.ROUTER_TOPK),
        (1, False, True, Route.ROUTE_ALIGN),
        (4, False, True, Route.ROUTE_ALIGN),
        (17, False, True, Route.ROUTER_TOPK),
        (4, True, False, Route.PER_PAIR),
        (5, True, False, Route.ROUTER_TOPK),
        (16, True, False, Route.ROUTER_TOPK),
        (1, False, False, Route.ROUTER_TOPK),
    ],
)
def test_rows_and_switches_choose_the_route(rows: int, per_pair: bool, route_align: bool, expected: Route):
    assert route(rows, per_pair=per_pair, route_align=route_align) is expected


@pytest.mark.parametrize("rows", [1, 4, 5, 16, 17, 2048])
@pytest.mark.parametrize("per_pair", [True, False])
@pytest.mark.parametrize("route_align", [True, False])
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_unfused_router_takes_no_fused_route(rows: int, per_pair: bool, route_align: bool, ranks: int):
    unfused = Router(top_k=8, renormalise=True, fused=False, ranks=ranks)
    assert route(rows, unfused, per_pair=per_pair, route_align=route_align) is Route.UNFUSED


@pytest.mark.parametrize(("rows", "expected"), [(4, Route.PER_PAIR), (5, Route.ROUTER_TOPK), (17, Route.ROUTER_TOPK)])
def test_several_ranks_do_not_take_route_align(rows: int, expected: Route):
    assert route(rows, Router(top_k=8, renormalise=True, fused=True, ranks=2)) is expected


@pytest.mark.parametrize("rows", [1, 4, 5, 16, 17])
def test_renormalisation_and_scoring_change_no_route(rows: int):
    others = [
        Router(top_k=8, renormalise=False, fused=True),
        Router(top_k=8, renormalise=True, fused=True, scoring="sigmoid"),
        Router(top_k=8, renormalise=False, fused=True, scoring="sigmoid"),
    ]
    assert [route(rows, other) for other in others] == [route(rows)] * 3


@pytest.mark.parametrize(
    ("top_k", "rows", "expected"),
    [(6, 21, Route.ROUTE_ALIGN), (6, 22, Route.ROUTER_TOPK), (1, 128, Route.ROUTE_ALIGN), (1, 129, Route.ROUTER_TOPK)],
)
def test_route_align_ends_at_slots_and_not_at_rows(top_k: int, rows: int, expected: Route):
    assert route(rows, Router(top_k=top_k, renormalise=True, fused=True)) is expected


def test_limits_of_zero_turn_both_routes_off():
    limits = Limits(per_pair_rows=0, route_align_slots=0)
    assert choose(1, FUSED, limits, per_pair=True, route_align=True) is Route.ROUTER_TOPK


def test_a_device_without_a_table_hands_over_after_4_rows_and_after_512_slots():
    found = [choose(rows, FUSED, Limits(), per_pair=True, route_align=True) for rows in (4, 5, 64, 65)]
    assert found == [Route.PER_PAIR, Route.ROUTE_ALIGN, Route.ROUTE_ALIGN, Route.ROUTER_TOPK]


def test_a_step_without_rows_and_a_router_without_experts_are_refused():
    with pytest.raises(ValueError, match="at least 1 row, not 0"):
        route(0)
    with pytest.raises(ValueError, match="has 0 and 1"):
        Router(top_k=0, renormalise=True, fused=True)
    with pytest.raises(ValueError, match="has 8 and 0"):
        Router(top_k=8, renormalise=True, fused=True, ranks=0)
