"""What `/metrics` shows: counters, gauges and histograms as Prometheus text, each with a sentence that says what it means.

A name that ends in `_total` is a counter, any other value a gauge.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.metrics import Histogram

PREFIX = "walkgate_"
_COUNTER_ENDING = "_total"
_COMPONENT = "(audio_encoder|thinker|talker|code2wav)"
_SAMPLING = {
    "greedy": "every row took its likeliest token",
    "adjusted": "no row was sampled, and some had penalties or biases",
    "sampled": "some rows were sampled, and none had penalties or biases",
    "sampled_adjusted": "some rows were sampled, and some had penalties or biases",
}

# By pattern of the name without the prefix; what its groups match fills the sentence.
_HELP = {
    "http_requests_total": "POST requests that reached a route, however they ended.",
    "http_refused_total": "Requests answered with a 4xx by their route.",
    "http_failed_total": "Requests that ended with a 5xx, or with an error in their stream.",
    "http_disconnected_total": "Requests whose client left before the end of its answer.",
    "http_overloaded_total": "Requests answered with 429 because the server was full.",
    "http_unauthorised_total": "Requests answered with 401.",
    "http_open": "Requests that routes are answering now.",
    "ttft_seconds": "Seconds from handing a request to the engine to its first text token; only of text that is sent.",
    "ttfa_seconds": "Seconds from handing a request to the engine to its first sound.",
    "itl_seconds": "Mean seconds between the text tokens of a request, one value a request of two tokens or more.",
    "e2e_seconds": "Seconds from handing a request to the engine to its end; only of requests that ended whole.",
    "prompt_tokens": "Prompt tokens of a request, audio included; only of requests that ended whole.",
    "generated_tokens": "Text tokens that a request generated; only of requests that ended whole.",
    "audio_seconds_out": "Seconds of speech that a request made; only of requests that ended whole with speech.",
    "front_resident_bytes": "Memory that the front process holds.",
    "engine_resident_bytes": "Memory that the engine process holds.",
    "engine_answered": "1 if the engine's values are of now, 0 if it was too busy or dead and they are its last known ones.",
    "engine_open": "Engine requests that the front waits for.",
    "open_limit": "How many requests may be open before the next is a 429.",
    "requests_total": "Requests that the engine was given.",
    "requests_done_total": "Engine requests that ended whole.",
    "requests_cancelled_total": "Engine requests whose client left, or of which another choice failed.",
    "requests_failed_total": "Engine requests that ended with an error.",
    "requests_waiting": "Engine requests that wait for pages or a slot.",
    "requests_running": "Engine requests that hold pages and a slot.",
    "tokens_total": "Text tokens that were generated.",
    "frames_total": "Frames of speech, of 80 ms each, that the Talker generated.",
    "samples_total": "Samples of speech, 24,000 a second, that were made.",
    "profile_windows_total": "Windows of steps that were opened for a profiler.",
    "streams_dropped_total": "Tokens or frames that a walk passes to a component that the request does not use, such as "
    "text for a Talker when no speech was asked for. Nothing of an answer is lost.",
    "slots": "Requests that the engine can hold at once.",
    "slots_free": "Slots that no request holds.",
    f"{_COMPONENT}_pages": "KV pages of the {0}.",
    f"{_COMPONENT}_pages_free": "KV pages of the {0} that no request holds.",
    f"{_COMPONENT}_steps_total": "Steps of the {0}.",
    f"{_COMPONENT}_rows_total": "Rows of all steps of the {0}: one for each request in a step.",
    f"{_COMPONENT}_steps_launched_ahead_total": "Steps of the {0} launched before the one in front was read.",
    f"{_COMPONENT}_steps_mixed_total": "Steps of the {0} with rows of several walks.",
    f"{_COMPONENT}_steps_split_after_error_total": "Steps of the {0} that failed and were run again row by row.",
    f"{_COMPONENT}_rows_overrun_total": "Rows of the {0} that were launched ahead of their request's end, and dropped.",
    f"{_COMPONENT}_plan_cache_hits_total": "Steps of the {0} that took the plan of the step before.",
    f"{_COMPONENT}_plan_cache_uncached_total": "Steps of the {0} that no plan is kept for.",
    f"{_COMPONENT}_plan_cache_misses_(first|rows|generation|pages)_total": "Steps of the {0} planned anew; reason: {1}.",
    "walk_([a-z0-9_]+)_rows_total": "Rows of the walk {0}.",
    "stop_checks_vectorised_total": "Steps whose rows were checked for their end all at once.",
    "stop_checks_by_row_total": "Steps whose rows were checked for their end one by one.",
    "steps_captured_total": "Decode steps of the Thinker replayed from a CUDA graph.",
    "prompt_steps_captured_total": "Steps of the Thinker with prompts replayed from a CUDA graph.",
    "steps_eager_total": "Steps of the Thinker run kernel by kernel.",
    "captures_total": "CUDA graphs captured at the start.",
    "padded_rows_total": "Rows by which replayed steps were larger than what they had to do.",
    "kernels_compiled_late_total": "GPU kernels made ready after serving had begun: each held up a step.",
    "kernels_([a-z_]+)_total": "Calls of GPU operations that went the way {0}, in layers.",
    "audio_windows_(captured|eager|padded)_total": "Windows of the audio encoder by how they ran: {0}.",
    "clips_encoded_total": "Audio clips that the audio encoder has read.",
    "loopback_rows_device_total": "Rows that read their last token on the device.",
    "loopback_rows_host_total": "Rows that got their last token from the host.",
    "logprob_rows_total": "Rows whose log-probabilities were sent.",
    "talker_prompts_total": "Requests that the Talker has begun to speak.",
    "code2wav_chunks_stateful_total": "Chunks of sound made from the state that the last chunk left.",
    "code2wav_chunks_recomputed_total": "Chunks of sound made from all their frames again.",
    "phase_([a-z]+)_(wall|cpu)_seconds_total": "Seconds of {1} time that the engine thread spent in its phase {0}.",
    "phase_([a-z]+)_(wall|cpu)_ms_per_step": "Milliseconds of {1} time in the phase {0} for each step of the Thinker.",
    **{
        f"{_COMPONENT}_sampling_{kind}_steps_total": f"Steps of the {{0}} in which {how}."
        for kind, how in _SAMPLING.items()
    },
    **{
        f"{_COMPONENT}_sampling_{kind}_rows_total": f"Rows of the steps of the {{0}} in which {how}."
        for kind, how in _SAMPLING.items()
    },
}


class _Families(Collector):
    """One metric family a value or a histogram."""

    def __init__(self, values: Mapping[str, float], histograms: Mapping[str, Histogram]) -> None:
        self.values = values
        self.histograms = histograms

    def collect(self) -> Iterable[Metric]:
        yield from _scalars(self.values)
        yield from _histograms(self.histograms)


def _scalars(values: Mapping[str, float]) -> Iterator[Metric]:
    for name, value in sorted(values.items()):
        kind = CounterMetricFamily if name.endswith(_COUNTER_ENDING) else GaugeMetricFamily
        yield kind(PREFIX + name, help_of(name), value=value)


def _histograms(histograms: Mapping[str, Histogram]) -> Iterator[Metric]:
    for name, histogram in histograms.items():
        bounds = [*map(str, histogram.bounds), "+Inf"]
        buckets = list(zip(bounds, map(float, histogram.cumulative()), strict=True))
        yield HistogramMetricFamily(PREFIX + name, help_of(name), buckets=buckets, sum_value=histogram.sum)


@cache
def help_of(name: str) -> str:
    """Return the sentence that says what the metric `name`, without its prefix, means; its words alone if there is none."""
    for pattern, text in _HELP.items():
        if found := re.fullmatch(pattern, name):
            return text.format(*(group.replace("_", " ") for group in found.groups()))
    return name.replace("_", " ")


def prometheus_text(values: Mapping[str, float], histograms: Mapping[str, Histogram]) -> str:
    """Return Prometheus text in which each value and histogram is called `walkgate_` plus its name."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(values, histograms))
    return generate_latest(registry).decode()
