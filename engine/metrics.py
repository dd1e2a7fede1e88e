"""Counters as Prometheus text. A name that ends in `_total` is a counter, any other a gauge. No torch.

The engine's own counters live in the engine process and arrive here as plain values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

PREFIX = "walkgate_"
_COUNTER_ENDING = "_total"


@dataclass(slots=True)
class FrontCounters:
    """What the front process counts: requests by how they ended, and how many are open now.

    Requests that no route saw, because the server was full or no key was shown, count as `http_overloaded` and
    `http_unauthorised` only.
    """

    http_requests: int = 0
    http_refused: int = 0
    http_failed: int = 0
    http_disconnected: int = 0
    http_overloaded: int = 0
    http_unauthorised: int = 0
    http_open: int = 0

    def values(self) -> dict[str, float]:
        """Return the values by metric name, without the prefix."""
        return {
            "http_requests_total": self.http_requests,
            "http_refused_total": self.http_refused,
            "http_failed_total": self.http_failed,
            "http_disconnected_total": self.http_disconnected,
            "http_overloaded_total": self.http_overloaded,
            "http_unauthorised_total": self.http_unauthorised,
            "http_open": self.http_open,
        }


class _Values(Collector):
    """One metric family a value."""

    def __init__(self, values: Mapping[str, float]) -> None:
        self.values = values

    def collect(self) -> Iterable[Metric]:
        return _families(self.values)


def _families(values: Mapping[str, float]) -> Iterator[Metric]:
    for name, value in sorted(values.items()):
        text = name.replace("_", " ")
        if name.endswith(_COUNTER_ENDING):
            yield CounterMetricFamily(PREFIX + name, text, value=value)
        else:
            yield GaugeMetricFamily(PREFIX + name, text, value=value)


def prometheus_text(values: Mapping[str, float]) -> str:
    """Return Prometheus text in which each value is called `walkgate_` plus its name."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Values(values))
    return generate_latest(registry).decode()
