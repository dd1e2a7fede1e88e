"""The engine on a GPU: the small model in float32 answers as on a CPU, captured or not, and nothing is compiled late."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.config import EngineSettings
from engine.detokenize import TokenBytes
from engine.engine import Engine, kernel_options
from engine.model.chat import load_tokenizer
from engine.model.omni import OmniModel, load_model
from engine.request import Request, StepLogprobs
from tests.engine.test_engine import Collected, everything_is_back, mixed_request, run
from tests.shared import REPOSITORY

DEVICE = "cuda"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
REQUESTS = 48
# Ways to launch the same kernels. Rows and buckets are others then, so float32 is what makes the tokens equal.
CAPTURES = ("captures", "prompt_captures", "shared_captures", "in_graph_tables", "audio_captures", "dependent_launch")


def settings(*off: str, batch_invariant: bool = False) -> EngineSettings:
    return EngineSettings(
        device=DEVICE,
        max_batch=16,
        prefill_chunk=32,
        max_model_len=1024,
        disabled=frozenset(off),
        batch_invariant=batch_invariant,
    )


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Path) -> OmniModel:
    return load_model(tiny_checkpoint, device=DEVICE, options=kernel_options(settings()))


@pytest.fixture(scope="module")
def requests(tiny_checkpoint: Path) -> list[Request]:
    """Text, audio in and speech out; greedy and sampled; short and long."""
    on_cpu, rng = load_model(tiny_checkpoint), random.Random(11)
    return [mixed_request(on_cpu, rng, index) for index in range(REQUESTS)]


def answers(model: OmniModel, settings: EngineSettings, requests: Sequence[Request], folder: Path) -> tuple:
    engine = Engine(model.with_options(kernel_options(settings)), settings, TokenBytes(load_tokenizer(folder)).of)
    found = run(engine, requests, random.Random(5))
    assert everything_is_back(engine)
    assert [one.last.error for one in found.values()] == [None] * len(requests)
    return found, engine.counters()


@pytest.fixture(scope="module")
def on_cpu(requests: list[Request], tiny_checkpoint: Path) -> dict[str, Collected]:
    cpu = EngineSettings(max_batch=16, prefill_chunk=32, max_model_len=1024)
    return answers(load_model(tiny_checkpoint), cpu, requests, tiny_checkpoint)[0]


@pytest.fixture(scope="module")
def on_gpu(model: OmniModel, requests: list[Request], tiny_checkpoint: Path) -> tuple:
    return answers(model, settings(), requests, tiny_checkpoint)


def test_text_from_text_and_from_audio_is_that_of_a_cpu(requests, on_cpu, on_gpu):
    got, _ = on_gpu
    moved = [one.id for one in requests if got[one.id].token_ids != on_cpu[one.id].token_ids]
    assert moved == []
    assert all(got[one.id].finish_reason == on_cpu[one.id].finish_reason for one in requests)
    assert sum(bool(one.clips) for one in requests) > 8


def test_greedy_speech_has_the_codes_of_a_cpu_and_drawn_speech_nearly_always(requests, on_cpu, on_gpu):
    """A draw that falls between two codes goes the way of the last bit, and everything after it is another speech."""
    got, _ = on_gpu
    speaking = [one for one in requests if one.speech is not None]
    same = {one.id: got[one.id].codes == on_cpu[one.id].codes for one in speaking}
    greedy = [same[one.id] for one in speaking if one.speech.sampling.temperature == 0.0]
    drawn = [same[one.id] for one in speaking if one.speech.sampling.temperature > 0.0]
    assert len(greedy) >= 4 and all(greedy)
    assert len(drawn) >= 4 and sum(drawn) >= 0.75 * len(drawn)
    for one in speaking:
        ours, theirs = (np.frombuffer(which[one.id].pcm, dtype="<i2").astype(np.float64) for which in (got, on_cpu))
        if same[one.id]:
            assert len(ours) == len(theirs) and np.abs(ours - theirs).max(initial=0) <= 0.002 * 32767


def test_steps_are_captured_and_counted(on_gpu):
    _, counters = on_gpu
    assert counters["steps_captured_total"] > 0
    assert counters["steps_eager_total"] > 0  # those that the Talker wants states of
    assert counters["prompt_steps_captured_total"] > 0
    assert counters["captures_total"] > 0 and counters["padded_rows_total"] > 0
    assert counters["thinker_plan_cache_hits_total"] > 0 and counters["thinker_steps_split_after_error_total"] == 0


@pytest.mark.parametrize("off", [*[(name,) for name in CAPTURES], CAPTURES], ids=[*CAPTURES, "all"])
def test_captures_on_and_off_give_the_same_tokens(model, requests, on_gpu, tiny_checkpoint, off):
    got, counters = answers(model, settings(*off), requests, tiny_checkpoint)
    want, _ = on_gpu
    assert [one.id for one in requests if got[one.id].token_ids != want[one.id].token_ids] == []
    assert (counters["steps_captured_total"] == 0) == ("captures" in off)
    assert (counters["prompt_steps_captured_total"] == 0) == bool({"captures", "prompt_captures"} & set(off))


def logprobs(found: Collected) -> list[StepLogprobs]:
    return [step for event in found.events for step in event.logprobs]


def test_a_batch_invariant_engine_gives_each_request_the_bits_that_it_gets_alone(model, requests, tiny_checkpoint):
    texts = [one for one in requests if one.speech is None][:12]
    invariant = settings(batch_invariant=True)
    together, _ = answers(model, invariant, texts, tiny_checkpoint)
    engine = Engine(
        model.with_options(kernel_options(invariant)), invariant, TokenBytes(load_tokenizer(tiny_checkpoint)).of
    )
    for one in texts:
        alone = run(engine, [one])[one.id]
        assert alone.token_ids == together[one.id].token_ids, one.id
        assert logprobs(alone) == logprobs(together[one.id]), one.id


def test_nothing_is_compiled_once_the_engine_is_ready(tiny_checkpoint: Path):
    command = [sys.executable, "-m", "tests.gpu.late", str(tiny_checkpoint), DEVICE]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    counters = json.loads(done.stdout.splitlines()[-1])
    assert counters["kernels_compiled_late_total"] == 0
    assert counters["steps_captured_total"] > 0 and counters["prompt_steps_captured_total"] > 0
