"""`/metrics`: the histograms over engine requests, whichever door they came through, and what the text says of each value."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.metrics import Histogram, RequestHistograms, RequestTimes
from engine.request import Event, Usage
from engine.server.exposition import PREFIX, help_of, prometheus_text
from tests.server.serving import Server, audio_file, multipart, serving, tone, wait_until
from tests.shared import REPOSITORY

NAME = "tiny-checkpoint"
CONFIGURATION = (REPOSITORY / "docs" / "configuration.md").read_text(encoding="utf-8")


def usage(tokens: int, samples: int = 0) -> Usage:
    return Usage(
        prompt_tokens=7,
        completion_tokens=tokens,
        audio_tokens_in=0,
        audio_seconds_in=0.0,
        audio_frames=samples // 1920,
        audio_samples=samples,
    )


def observed(histograms: RequestHistograms) -> dict[str, tuple[int, float]]:
    """How many values each histogram has, and their sum; of those that have any."""
    found = {name: (one.cumulative()[-1], one.sum) for name, one in histograms.by_name().items()}
    return {name: (count, round(total, 6)) for name, (count, total) in found.items() if count}


def test_a_bound_belongs_to_the_values_at_most_that_large():
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 2.5):
        histogram.observe(value)
    assert (histogram.cumulative(), histogram.sum) == ([2, 4, 5], 7.5)


def test_a_histogram_as_text():
    histogram = Histogram((0.001, 60.0))
    histogram.observe(0.25)
    text = prometheus_text({}, {"ttft_seconds": histogram})
    assert text.splitlines() == [
        f"# HELP walkgate_ttft_seconds {help_of('ttft_seconds')}",
        "# TYPE walkgate_ttft_seconds histogram",
        'walkgate_ttft_seconds_bucket{le="0.001"} 0.0',
        'walkgate_ttft_seconds_bucket{le="60.0"} 1.0',
        'walkgate_ttft_seconds_bucket{le="+Inf"} 1.0',
        "walkgate_ttft_seconds_count 1.0",
        "walkgate_ttft_seconds_sum 0.25",
    ]


def test_each_time_of_a_request_is_counted_once():
    histograms = RequestHistograms()
    times = RequestTimes(histograms, 10.0)
    times.take(Event(request_id="a", token_ids=[1]), 10.5)
    times.take(Event(request_id="a", token_ids=[2]), 10.75)
    times.take(Event(request_id="a", pcm=b"\0\0", frames=1), 11.0)
    times.take(Event(request_id="a", token_ids=[3], finish_reason="length"), 11.5)
    assert observed(histograms) == {"ttft_seconds": (1, 0.5), "ttfa_seconds": (1, 1.0)}
    times.take(Event(request_id="a", pcm=b"\0\0", frames=1, done=True, usage=usage(3, 48000)), 14.0)
    assert observed(histograms) == {
        "ttft_seconds": (1, 0.5),
        "ttfa_seconds": (1, 1.0),
        "itl_seconds": (1, 0.5),
        "e2e_seconds": (1, 4.0),
        "prompt_tokens": (1, 7.0),
        "generated_tokens": (1, 3.0),
        "audio_seconds_out": (1, 2.0),
    }


@pytest.mark.parametrize(
    ("event", "names"),
    [
        (
            Event(request_id="a", token_ids=[1], done=True, usage=usage(1)),
            {"ttft_seconds", "e2e_seconds", "prompt_tokens", "generated_tokens"},
        ),
        # Text that isn't sent: no first token that anybody saw, and no gaps.
        (
            Event(request_id="a", pcm=b"\0\0", done=True, usage=usage(5, 1)),
            {"ttfa_seconds", "e2e_seconds", "prompt_tokens", "generated_tokens", "audio_seconds_out"},
        ),
        (Event(request_id="a", error="ValueError: planted", done=True), set()),
    ],
    ids=["one token", "speech only", "failed"],
)
def test_what_a_request_did_not_have_is_not_counted(event: Event, names: set[str]):
    histograms = RequestHistograms()
    RequestTimes(histograms, 0.0).take(event, 1.0)
    assert observed(histograms).keys() == names


@pytest.fixture(scope="module")
def timed(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that shows every metric there is."""
    with serving(tiny_checkpoint, tmp_path_factory.mktemp("timed") / "log", "--phase-timing") as running:
        yield running


def rises(before: dict[str, float], after: dict[str, float], end: str) -> dict[str, float]:
    names = RequestHistograms().by_name()
    return {name: round(after[f"{name}_{end}"] - before[f"{name}_{end}"], 6) for name in names}


def test_every_door_counts_and_the_sums_are_what_the_answers_say(timed: Server):
    before = timed.metrics()
    speech = {"output": ["text", "audio"], "speech": {"max_frames": 6, "ignore_eos": True}}
    answers = [
        timed.answer(text="One.", max_tokens=5, ignore_eos=True),
        timed.answer(text="Two.", max_tokens=9, ignore_eos=True, **speech),
    ]
    spoken = answers[1]["usage"]["audio_seconds_out"]
    chat = {"model": NAME, "messages": [{"role": "user", "content": "a"}], "n": 3, "max_tokens": 4, "ignore_eos": True}
    assert b"[DONE]" in timed.open_stream("/v1/chat/completions", **chat).read()
    body, headers = multipart([("model", None, NAME.encode()), ("file", "a.wav", audio_file(tone(0.5)))])
    assert timed.request("POST", "/v1/audio/transcriptions", body, headers)[0] == 200
    after = timed.metrics()
    counts = rises(before, after, "count")
    assert counts.pop("itl_seconds") in (5, 6)  # the transcript may end at its first token
    assert counts == {
        **dict.fromkeys(("ttft_seconds", "e2e_seconds", "prompt_tokens", "generated_tokens"), 6),
        **dict.fromkeys(("ttfa_seconds", "audio_seconds_out"), 1),
    }
    sums = rises(before, after, "sum")
    assert sums["audio_seconds_out"] == pytest.approx(spoken)
    assert sums["prompt_tokens"] > sum(answer["usage"]["prompt_tokens"] for answer in answers)
    assert sums["generated_tokens"] == after["tokens_total"] - before["tokens_total"]
    assert 0 < sums["ttft_seconds"] < sums["e2e_seconds"]
    assert 0 < sums["ttfa_seconds"] < sums["e2e_seconds"]
    assert after['e2e_seconds_bucket{le="+Inf"}'] == after["e2e_seconds_count"]


def test_a_request_that_is_given_up_has_a_first_token_and_no_end(timed: Server):
    before = timed.metrics()
    reply = timed.open_stream(text="Count.", max_tokens=3000, ignore_eos=True)
    reply.readline()
    reply.close()
    assert wait_until(lambda: timed.metrics()["engine_open"] == 0, 5)
    counts = rises(before, timed.metrics(), "count")
    assert (counts["ttft_seconds"], counts["e2e_seconds"], counts["generated_tokens"]) == (1, 0, 0)


def test_the_text_has_a_sentence_for_every_metric(timed: Server):
    text = timed.request("GET", "/metrics")[1].decode()
    helps = dict(re.findall(rf"^# HELP {PREFIX}(\S+) (.*)$", text, flags=re.MULTILINE))
    types = re.findall(rf"^# TYPE {PREFIX}(\S+) (\S+)$", text, flags=re.MULTILINE)
    assert helps.keys() == {name for name, _ in types}
    assert {name for name, kind in types if kind == "histogram"} == RequestHistograms().by_name().keys()
    assert len(helps) > 100
    for name, sentence in helps.items():
        assert sentence.endswith(".") and sentence.count(" ") >= 2, name
    assert "no speech was asked for" in helps["streams_dropped_total"]
    assert helps["audio_encoder_steps_total"] == "Steps of the audio encoder."


def test_the_manual_names_metrics_that_there_are(timed: Server):
    part = CONFIGURATION[CONFIGURATION.index("\n## Metrics") : CONFIGURATION.index("\n## The end")]
    rows = [line for line in part.splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    shown = {re.sub(r"_(count|sum)$", "", name) for name in timed.metrics()}
    assert named <= shown
    assert RequestHistograms().by_name().keys() <= named
