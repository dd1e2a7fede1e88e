"""What the front process counts and measures, as plain values: HTTP requests, and how engine requests got on. No torch.

How it is shown is engine/server/exposition.py's to say. The engine's own counters live in the engine process.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate

from engine.request import Event, Usage

_SAMPLES_A_SECOND = 24_000
_LATENCY_BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0)
_SPEECH_BOUNDS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0)
_TOKEN_BOUNDS = (1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0)


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


class Histogram:
    """How many values are at most each of some bounds, and the sum of all."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.sum = 0.0
        self._counts = [0] * (len(bounds) + 1)

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def cumulative(self) -> list[int]:
        """How many values are at most each bound; the last number counts them all."""
        return list(accumulate(self._counts))


class RequestHistograms:
    """Histograms over engine requests, of which an HTTP request with several choices makes several.

    Seconds are counted from when the front handed a request to the engine, so its wait for room there is included.
    """

    def __init__(self) -> None:
        self.ttft_seconds = Histogram(_LATENCY_BOUNDS)
        self.ttfa_seconds = Histogram(_LATENCY_BOUNDS)
        self.itl_seconds = Histogram(_LATENCY_BOUNDS)
        self.e2e_seconds = Histogram(_LATENCY_BOUNDS)
        self.prompt_tokens = Histogram(_TOKEN_BOUNDS)
        self.generated_tokens = Histogram(_TOKEN_BOUNDS)
        self.audio_seconds_out = Histogram(_SPEECH_BOUNDS)

    def by_name(self) -> dict[str, Histogram]:
        """Return the histograms by metric name, without the prefix."""
        return dict(vars(self))


@dataclass(slots=True)
class RequestTimes:
    """How one engine request gets on. `began` and the times of its events are seconds of one clock.

    First tokens and first sound count when they come; everything else when the request is done, so not if it failed.
    """

    histograms: RequestHistograms
    began: float
    _first_token_at: float | None = None
    _last_token_at: float = 0.0
    _sounded: bool = False

    def take(self, event: Event, now: float) -> None:
        """Note an event that came at `now`."""
        if event.token_ids:
            self._last_token_at = now
            if self._first_token_at is None:
                self._first_token_at = now
                self.histograms.ttft_seconds.observe(now - self.began)
        if event.pcm and not self._sounded:
            self._sounded = True
            self.histograms.ttfa_seconds.observe(now - self.began)
        if event.usage is not None:
            self._end(event.usage, now)

    def _end(self, usage: Usage, now: float) -> None:
        found = self.histograms
        found.e2e_seconds.observe(now - self.began)
        found.prompt_tokens.observe(usage.prompt_tokens)
        found.generated_tokens.observe(usage.completion_tokens)
        if usage.audio_samples:
            found.audio_seconds_out.observe(usage.audio_samples / _SAMPLES_A_SECOND)
        gaps = usage.completion_tokens - 1
        if self._first_token_at is not None and gaps > 0:
            found.itl_seconds.observe((self._last_token_at - self._first_token_at) / gaps)
