"""The engine equals the naive loop, token for token, whatever comes along, and gives everything back."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from engine.config import EngineSettings
from engine.engine import Engine
from engine.errors import RequestError
from engine.model.omni import OmniModel, load_model
from engine.model.positions import audio_tokens
from engine.request import Clip, Event, Request, Sampling, Speech
from tests.naive import NaiveResult, generate

FRAME_COUNTS = (30, 100, 145, 230)


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Path) -> OmniModel:
    return load_model(tiny_checkpoint)


def clip(rng: random.Random) -> Clip:
    frames = rng.choice(FRAME_COUNTS)
    mel = np.random.default_rng(rng.randrange(2**32)).standard_normal((128, frames), dtype=np.float32)
    return Clip(mel=mel.tobytes(), mel_bins=128, frames=frames, tokens=audio_tokens(frames), seconds=frames / 100)


def prompt(model: OmniModel, rng: random.Random, clips: list[Clip], words: int) -> list[int]:
    ids = model.config.ids
    newline = 10
    user = [rng.randrange(0, 250) for _ in range(words)]
    media = [token for one in clips for token in [ids.audio_start, *[ids.audio] * one.tokens, ids.audio_end]]
    return [
        *[ids.im_start, ids.user, newline, *media, *user, ids.im_end, newline],
        *[ids.im_start, ids.assistant, newline],
    ]


def mixed_request(model: OmniModel, rng: random.Random, index: int) -> Request:
    """Text or speech out, with 0 to 2 clips, greedy or sampled, with or without penalty, short or long."""
    clips = [clip(rng) for _ in range(rng.choice((0, 0, 1, 2)))]
    hot = rng.random() < 0.4
    sampling = Sampling(
        temperature=0.9 if hot else 0.0,
        top_k=rng.choice((0, 20)) if hot else 0,
        top_p=rng.choice((1.0, 0.9)) if hot else 1.0,
        repetition_penalty=rng.choice((1.0, 1.0, 1.2)),
        seed=rng.randrange(2**40),
    )
    speech = None
    if rng.random() < 0.35:
        warm = rng.random() < 0.5
        speech = Speech(
            voice=rng.choice(("ethan", "chelsie", "aiden")),
            max_frames=rng.randrange(1, 11),
            sampling=Sampling(temperature=0.9 if warm else 0.0, top_k=50, repetition_penalty=1.05, seed=index),
            ignore_eos=rng.random() < 0.5,
            codes=True,
        )
    return Request(
        id=f"r{index}",
        prompt_ids=prompt(model, rng, clips, rng.randrange(1, 40)),
        max_tokens=rng.randrange(1, 24),
        sampling=sampling,
        clips=clips,
        speech=speech,
        ignore_eos=rng.random() < 0.5,
        logprobs=2 if rng.random() < 0.3 else None,
        trace=rng.random() < 0.3,
    )


def naive(model: OmniModel, request: Request) -> NaiveResult:
    mels = [torch.frombuffer(bytearray(one.mel), dtype=torch.float32).view(128, one.frames) for one in request.clips]
    return generate(
        model,
        request.prompt_ids,
        mels,
        request.max_tokens,
        sampling=request.sampling,
        speech=request.speech,
        ignore_eos=request.ignore_eos,
    )


class Collected:
    """All events of one request, joined."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.codes: list[list[int]] = []
        self.pcm = b""
        self.events: list[Event] = []

    def take(self, event: Event) -> None:
        assert not any(earlier.done for earlier in self.events), "an event after the last one"
        self.events.append(event)
        self.token_ids += event.token_ids
        self.codes += event.codes
        self.pcm += event.pcm

    @property
    def last(self) -> Event:
        assert self.events[-1].done
        return self.events[-1]

    @property
    def finish_reason(self) -> str | None:
        return next((event.finish_reason for event in self.events if event.finish_reason), None)


def drain(engine: Engine, collected: dict[str, Collected], *, turns: int | None = None) -> None:
    while engine.has_work and turns != 0:
        for event in engine.step():
            collected.setdefault(event.request_id, Collected()).take(event)
        turns = None if turns is None else turns - 1


def run(engine: Engine, requests: Iterable[Request], rng: random.Random | None = None) -> dict[str, Collected]:
    """Add requests, at random moments with `rng`, and run them to their ends."""
    collected: dict[str, Collected] = {}
    for request in requests:
        engine.add(request)
        drain(engine, collected, turns=rng.randrange(0, 6) if rng else 0)
    drain(engine, collected)
    return collected


def pcm_of(result: NaiveResult) -> bytes:
    return (result.pcm * 32767.0).round().clamp(-32768, 32767).to(torch.int16).numpy().astype("<i2").tobytes()


def everything_is_back(engine: Engine) -> bool:
    counters = engine.counters()
    return (
        counters["slots_free"] == counters["slots"]
        and counters["thinker_pages_free"] == counters["thinker_pages"]
        and counters["talker_pages_free"] == counters["talker_pages"]
        and counters["requests_waiting"] == counters["requests_running"] == 0
    )


def assert_equals_naive(request: Request, got: Collected, want: NaiveResult) -> None:
    assert got.token_ids == want.token_ids, request.id
    assert got.finish_reason == want.finish_reason, request.id
    assert got.last.usage is not None
    assert got.last.usage.completion_tokens == len(want.token_ids)
    if request.speech is not None:
        assert got.codes == want.frames, request.id
        assert got.pcm == pcm_of(want), request.id
        assert got.last.audio_finish_reason == want.audio_finish_reason, request.id
        assert got.last.usage.audio_samples == len(want.pcm)


@pytest.fixture(scope="module")
def mixed(model: OmniModel) -> list[tuple[Request, NaiveResult]]:
    rng = random.Random(11)
    requests = [mixed_request(model, rng, index) for index in range(64)]
    return [(request, naive(model, request)) for request in requests]


def test_64_mixed_requests_at_random_times_equal_the_naive_loop_and_everything_comes_back(
    model: OmniModel, mixed: list[tuple[Request, NaiveResult]]
) -> None:
    engine = Engine(model, EngineSettings(max_batch=16))
    collected = run(engine, [request for request, _ in mixed], random.Random(5))
    for request, want in mixed:
        assert_equals_naive(request, collected[request.id], want)
    assert everything_is_back(engine)
    counters = engine.counters()
    assert counters["requests_done_total"] == 64
    # The steps were really shared: far fewer of them than rows.
    assert counters["thinker_steps_total"] < 0.7 * counters["thinker_rows_total"]


@pytest.mark.parametrize("switch", ["text_walk", "device_loopback", "vectorised_stop", "batching", "stateful_code2wav"])
def test_each_switch_off_gives_the_same_tokens_and_the_counter_shows_the_other_path(
    model: OmniModel, mixed: list[tuple[Request, NaiveResult]], switch: str
) -> None:
    some = mixed[:20]
    engine = Engine(model, EngineSettings(disabled=frozenset({switch})))
    collected = run(engine, [request for request, _ in some], random.Random(7))
    for request, want in some:
        assert_equals_naive(request, collected[request.id], want)
    counters = engine.counters()
    assert engine.info()["switches"][switch] is False
    assert {
        "text_walk": counters["walk_thinker_text_decode_rows_total"] == 0 < counters["walk_thinker_decode_rows_total"],
        "device_loopback": counters["loopback_rows_device_total"] == 0 < counters["loopback_rows_host_total"],
        "vectorised_stop": counters["stop_checks_by_row_total"] > 0 == counters["stop_checks_vectorised_total"],
        "batching": counters["thinker_steps_total"] == counters["thinker_rows_total"],
        "stateful_code2wav": counters["code2wav_chunks_stateful_total"]
        == 0
        < counters["code2wav_chunks_recomputed_total"],
    }[switch]


def test_all_switches_on_take_the_fast_paths(model: OmniModel, mixed: list[tuple[Request, NaiveResult]]) -> None:
    engine = Engine(model, EngineSettings())
    run(engine, [request for request, _ in mixed[:20]])
    counters = engine.counters()
    assert counters["walk_thinker_text_decode_rows_total"] > 0 < counters["walk_thinker_decode_rows_total"]
    assert counters["loopback_rows_device_total"] > 0 == counters["loopback_rows_host_total"]
    assert counters["stop_checks_vectorised_total"] > 0 == counters["stop_checks_by_row_total"]
    assert counters["code2wav_chunks_stateful_total"] > 0 == counters["code2wav_chunks_recomputed_total"]


def test_64_requests_cancelled_at_random_moments_give_back_all_pages_and_slots(model: OmniModel) -> None:
    rng = random.Random(3)
    engine = Engine(model, EngineSettings(max_batch=8))
    collected: dict[str, Collected] = {}
    for index in range(64):
        request = mixed_request(model, rng, index)
        engine.add(request)
        drain(engine, collected, turns=rng.randrange(0, 4))
        engine.cancel(request.id)
    drain(engine, collected)
    assert everything_is_back(engine)
    counters = engine.counters()
    assert counters["requests_cancelled_total"] + counters["requests_done_total"] == 64
    assert counters["requests_cancelled_total"] > 30


def test_a_cancelled_neighbour_moves_no_token(model: OmniModel, mixed: list[tuple[Request, NaiveResult]]) -> None:
    engine = Engine(model, EngineSettings(max_batch=6))
    collected: dict[str, Collected] = {}
    for index, (request, _) in enumerate(mixed[:16]):
        engine.add(request)
        engine.add(msgspec.structs.replace(request, id=f"doomed{index}"))
        drain(engine, collected, turns=3)
        engine.cancel(f"doomed{index}")
    drain(engine, collected)
    for request, want in mixed[:16]:
        assert_equals_naive(request, collected[request.id], want)


def speech_requests(model: OmniModel) -> list[Request]:
    rng = random.Random(21)
    return [
        Request(
            id=f"s{index}",
            prompt_ids=prompt(model, rng, [], 6 + index),
            max_tokens=10,
            ignore_eos=True,
            speech=Speech(
                voice="ethan",
                max_frames=9,
                sampling=Sampling(temperature=0.9, top_k=50, repetition_penalty=1.05, seed=index),
                ignore_eos=True,
                codes=True,
            ),
        )
        for index in range(16)
    ]


def test_16_speech_requests_give_the_same_codes_and_bytes_alone_and_four_at_a_time_on_two_boots(
    tiny_checkpoint: Path,
) -> None:
    first, second = load_model(tiny_checkpoint), load_model(tiny_checkpoint)
    requests = speech_requests(first)
    boot_a = Engine(first, EngineSettings(max_batch=4))
    alone: dict[str, Collected] = {}
    for request in requests:
        alone |= run(boot_a, [request])
    in_company = run(boot_a, requests)
    on_boot_b = run(Engine(second, EngineSettings(max_batch=4)), requests)
    for request in requests:
        assert len(alone[request.id].codes) == 9
        assert len(alone[request.id].pcm) == 2 * (1920 * 9 - 555)
        for other in (in_company, on_boot_b):
            assert other[request.id].codes == alone[request.id].codes
            assert other[request.id].pcm == alone[request.id].pcm


def test_a_request_larger_than_the_pool_is_refused_with_the_number(model: OmniModel) -> None:
    engine = Engine(model, EngineSettings(kv_pages=4))
    rng = random.Random(0)
    with pytest.raises(
        RequestError, match=r"needs up to \d+ KV pages of 16 positions in the thinker, the engine has 4"
    ):
        engine.add(Request(id="large", prompt_ids=prompt(model, rng, [], 60), max_tokens=20))
    with pytest.raises(RequestError, match="the limit is 4096"):
        engine.add(Request(id="long", prompt_ids=prompt(model, rng, [], 6), max_tokens=4090))
    assert not engine.has_work


def test_a_request_that_must_wait_runs_when_there_is_room(model: OmniModel) -> None:
    rng = random.Random(1)
    requests = [Request(id=f"w{i}", prompt_ids=prompt(model, rng, [], 20), max_tokens=12) for i in range(6)]
    engine = Engine(model, EngineSettings(kv_pages=5))  # room for one at a time
    collected = run(engine, requests)
    for request in requests:
        assert collected[request.id].token_ids == naive(model, request).token_ids


def test_a_text_of_one_token_is_answered_with_silence(model: OmniModel) -> None:
    request = msgspec.structs.replace(speech_requests(model)[0], max_tokens=1)
    got = run(Engine(model, EngineSettings()), [request])[request.id]
    assert got.pcm == b"" and got.codes == []
    assert got.last.audio_finish_reason == "stop"
    assert got.last.usage is not None and got.last.usage.audio_frames == 0


def test_text_is_withheld_when_only_audio_is_asked_for(model: OmniModel) -> None:
    spoken = speech_requests(model)[1]
    both = run(Engine(model, EngineSettings()), [spoken])[spoken.id]
    audio = run(Engine(model, EngineSettings()), [msgspec.structs.replace(spoken, emit_text=False)])[spoken.id]
    assert audio.token_ids == [] and audio.pcm == both.pcm != b""


def test_top_two_holds_the_chosen_token_of_a_greedy_request_and_trace_names_its_step(model: OmniModel) -> None:
    request = Request(
        id="t",
        prompt_ids=prompt(model, random.Random(4), [], 9),
        max_tokens=8,
        ignore_eos=True,
        logprobs=2,
        trace=True,
    )
    got = run(Engine(model, EngineSettings()), [request])["t"]
    pairs = [pair for event in got.events for pair in event.logprobs]
    assert [pair.token_ids[0] for pair in pairs] == got.token_ids
    assert all(pair.logprobs[0] >= pair.logprobs[1] for pair in pairs)
    traces = [trace for event in got.events for trace in event.trace]
    assert [trace.step for trace in traces] == list(range(8))
    assert {(trace.bucket, trace.rows) for trace in traces} == {(1, 1)}


def test_stop_ids_of_a_request_end_it(model: OmniModel) -> None:
    request = Request(id="a", prompt_ids=prompt(model, random.Random(4), [], 9), max_tokens=12, ignore_eos=True)
    tokens = run(Engine(model, EngineSettings()), [request])["a"].token_ids
    cut = msgspec.structs.replace(request, stop_ids=[tokens[4]])
    got = run(Engine(model, EngineSettings()), [cut])["a"]
    assert got.token_ids == tokens[: tokens.index(tokens[4]) + 1]
    assert got.finish_reason == "stop"


def test_two_open_requests_may_not_share_an_id(model: OmniModel) -> None:
    engine = Engine(model, EngineSettings())
    request = Request(id="same", prompt_ids=prompt(model, random.Random(2), [], 3), max_tokens=2)
    engine.add(request)
    with pytest.raises(RequestError, match="'same' is open"):
        engine.add(request)
