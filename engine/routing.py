"""The one choice of how a block of experts runs, asked by the router and by the experts alike. Pure policy, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

Scoring = Literal["softmax", "sigmoid"]


class Route(StrEnum):
    """How the rows of a step reach their experts.

    PER_PAIR: the router_topk kernel, then each pair of a row and an expert by itself, with no alignment. ROUTE_ALIGN: one
    kernel for weights, ids and alignment, then the grouped GEMM. ROUTER_TOPK: the router_topk and align kernels, then the
    grouped GEMM. UNFUSED: softmax, sort and renormalisation in torch, then the align kernels and the grouped GEMM.
    """

    PER_PAIR = "per_pair"
    ROUTE_ALIGN = "route_align"
    ROUTER_TOPK = "router_topk"
    UNFUSED = "unfused"


@dataclass(frozen=True, slots=True)
class Router:
    """What is fixed about a router: `fused` allows the fused kernels, `ranks` counts the devices that share a layer.

    Raises ValueError for a `top_k` or `ranks` below 1.
    """

    top_k: int
    renormalise: bool
    fused: bool
    scoring: Scoring = "softmax"
    ranks: int = 1

    def __post_init__(self) -> None:
        if self.top_k < 1 or self.ranks < 1:
            raise ValueError(f"a router needs top_k and ranks of at least 1, has {self.top_k} and {self.ranks}")


@dataclass(frozen=True, slots=True)
class Limits:
    """Where one route hands over to the next: the most rows that run per pair, the most slots (rows * top_k) of route_align.

    The defaults serve a device without a routing table; `omni tune` measures its own.
    """

    per_pair_rows: int = 4
    route_align_slots: int = 512


def choose(rows: int, router: Router, limits: Limits, *, per_pair: bool, route_align: bool) -> Route:
    """The route of a step of `rows` token rows; `per_pair` and `route_align` are the switches of those two routes.

    An unfused router takes no fused route. Renormalised weights or not, softmax or sigmoid, masked rows or none: the route
    is the same, because every fused kernel handles them all. With several ranks an alignment is each rank's own, so
    route_align, which lies before the exchange between ranks, is not taken. Raises ValueError for fewer rows than one.
    """
    if rows < 1:
        raise ValueError(f"a step has at least 1 row, not {rows}")
    if not router.fused:
        return Route.UNFUSED
    if per_pair and rows <= limits.per_pair_rows:
        return Route.PER_PAIR
    if route_align and router.ranks == 1 and rows * router.top_k <= limits.route_align_slots:
        return Route.ROUTE_ALIGN
    return Route.ROUTER_TOPK
