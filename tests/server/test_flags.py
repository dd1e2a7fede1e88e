"""Flags of the engine, through the command line and back out of /info and /metrics."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from engine.config import GPU_SWITCHES, SWITCHES
from engine.model.weights import dummy_digest
from engine.phases import PHASES
from tests.server.serving import command, environment, serving


def test_phase_timing_launch_ahead_and_small_chunks_show_in_metrics_and_change_no_token(
    tiny_checkpoint: Path, tmp_path: Path
):
    body = {"text": "Tell me of rivers and stones. " * 12, "max_tokens": 12, "ignore_eos": True}
    with serving(tiny_checkpoint, tmp_path / "plain") as server:
        plain = server.answer(**body)
        assert not any(name.startswith("phase_") for name in server.metrics())
    flags = ("--phase-timing", "--enable", "launch_ahead", "--prefill-chunk", "16")
    with serving(tiny_checkpoint, tmp_path / "timed", *flags) as server:
        timed = server.answer(**body)
        metrics = server.metrics()
        _, info = server.get("/info")
    assert timed["token_ids"] == plain["token_ids"]
    assert info["switches"]["launch_ahead"] is True
    assert info["limits"]["prefill_chunk"] == 16
    assert metrics["walk_thinker_prefill_rows_total"] == -(-timed["usage"]["prompt_tokens"] // 16)
    assert metrics["thinker_steps_launched_ahead_total"] > 0
    for phase in PHASES:
        assert metrics[f"phase_{phase}_wall_seconds_total"] > 0
        assert metrics[f"phase_{phase}_cpu_ms_per_step"] >= 0


def test_a_folder_without_tensors_is_served_with_weights_drawn_for_it(tiny_checkpoint: Path, tmp_path: Path):
    folder = tmp_path / "shapes"
    shutil.copytree(tiny_checkpoint, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    answers = []
    for boot in range(2):
        with serving(folder, tmp_path / f"log{boot}", "--load-format", "dummy") as server:
            answers.append(server.answer(text="What is drawn?", max_tokens=12, ignore_eos=True, top_logprobs=2))
            assert server.get("/info")[1]["weights_digest"] == dummy_digest(folder)
    assert answers[0] == answers[1]


def test_the_released_shapes_are_known_by_name_and_need_no_weights_to_be_described(tmp_path: Path):
    cache = environment(XDG_CACHE_HOME=str(tmp_path))
    told = subprocess.run(command("info", "qwen3-omni-30b-a3b"), env=cache, capture_output=True, text=True, timeout=60)
    assert told.returncode == 0 and "layers 48" in told.stdout and "vocab 152064" in told.stdout
    words = command("serve", "qwen3-omni-30b-a3b", "--port", "0")
    refused = subprocess.run(words, env=cache, capture_output=True, text=True, timeout=60)
    assert refused.returncode == 64 and "add --load-format dummy" in refused.stderr


@pytest.mark.parametrize(
    ("device", "names", "off"), [("cpu", SWITCHES, ["launch_ahead"]), ("cuda", SWITCHES + GPU_SWITCHES, [])]
)
def test_info_says_which_switches_are_on_by_default_on_a_device(
    tiny_checkpoint: Path, device: str, names: tuple[str, ...], off: list[str]
):
    words = command("info", str(tiny_checkpoint), "--device", device)
    found = json.loads(subprocess.run([*words, "--json"], env=environment(), capture_output=True, timeout=60).stdout)
    assert found["device"] == device
    assert found["switches"] == {name: name not in off for name in names}
    told = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=60).stdout
    assert f"switches       on: {', '.join(name for name in names if name not in off)}\n" in told
    assert ("\n               off: launch_ahead\n" in told) == bool(off)


def test_info_tells_the_checkpoints_dtype_from_the_one_it_computes_in_and_says_that_there_is_no_gpu(
    tiny_checkpoint: Path,
):
    def told(device: str, *more: str) -> str:
        words = command("info", str(tiny_checkpoint), "--device", device, *more)
        env = environment(CUDA_VISIBLE_DEVICES="")
        return subprocess.run(words, env=env, capture_output=True, text=True, timeout=60).stdout

    text = told("cuda")
    assert "\n               checkpoint dtype: float32\n" in text
    assert "\ngpu            none: PyTorch sees no CUDA GPU on this machine\n" in text
    assert "\ndtype          bfloat16, in which cuda computes unless --dtype names another\n" in text
    found = json.loads(told("cuda", "--json"))
    assert (found["gpu"], found["dtype"], found["model"]["dtype"]) == (None, "bfloat16", "float32")
    assert "\ngpu " not in told("cpu") and "\ndtype          float32, in which cpu computes" in told("cpu")


def test_info_refuses_a_device_that_is_not_served(tiny_checkpoint: Path):
    words = command("info", str(tiny_checkpoint), "--device", "abacus")
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 64 and "--device 'abacus' is not served yet; there is cpu, cuda" in done.stderr
