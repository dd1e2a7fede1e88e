"""Tuning on a GPU at small sizes: the timer, the compilers and a whole run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rich.console import Console

from engine.kernels.bench import Benches, Compilers, CudaTimer
from engine.kernels.tiles import ROUTING, Registry
from engine.kernels.tune import Shapes, winners
from engine.server.tune import TuneSettings, Tuning, made_by

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

SMALL = Shapes(hidden=256, heads=4, kv_heads=2, head_dim=64, experts=8, top_k=2, inter=128, vocab=512, page=16)


def test_twice_the_bytes_take_about_twice_as_long():
    timer = CudaTimer()
    small = torch.zeros(4, 64 << 20, dtype=torch.uint8, device="cuda")
    large = torch.zeros(2, 128 << 20, dtype=torch.uint8, device="cuda")
    # The best of some: other tests may use the GPU meanwhile.
    once = min(timer.microseconds(lambda copy: small[copy].add_(1), 4) for _ in range(8))
    twice = min(timer.microseconds(lambda copy: large[copy].add_(1), 2) for _ in range(8))
    assert 1.5 < twice / once < 2.5


def test_two_measurements_of_one_launch_agree():
    timer = CudaTimer()
    buffers = torch.zeros(4, 64 << 20, dtype=torch.uint8, device="cuda")
    first, second = (min(timer.microseconds(lambda copy: buffers[copy].add_(1), 4) for _ in range(8)) for _ in range(2))
    assert abs(first - second) < 0.05 * first


def test_a_whole_run_finds_a_tile_for_every_job_and_hand_over_points(tmp_path: Path):
    ops = ("gemv", "split_gemm", "decode_attention", "per_pair_down", "grouped_down", ROUTING)
    asked = TuneSettings(out=tmp_path, model="small", ops=ops, rows=(1,), hand_over_rows=(1, 8), rounds=1)
    timer = CudaTimer()
    device = torch.device("cuda")
    with Compilers("cuda", 8) as compilers:
        run = Tuning(
            asked,
            SMALL,
            dtype="bfloat16",
            gpu="Small GPU",
            provenance=made_by(asked, timer.method),
            benches=Benches(device, timer),
            prepare=compilers.prepare,
            console=Console(quiet=True),
        )
        run.run()
    found = winners(run.trials)
    assert set(found) == {trial.job for trial in run.trials}
    registry = Registry("Small GPU", tmp_path)
    assert all(registry.find(job.op, job.named(), "bfloat16", 1) == trial.tile for job, trial in found.items())
    assert set(run.blocks) == {1, 8} and all(time > 0 for times in run.blocks.values() for time in times.values())
