"""The Thinker through the operations of a GPU: what it computes is what the CPU's operations define, whichever way is taken."""

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.kernels import KernelOptions, Ops, Plan, Segment, host_plan, ops_for
from engine.kernels.cuda import CudaOps
from engine.kernels.rows import Shape, fill, views
from engine.model.config import OmniConfig
from engine.model.thinker import Thinker
from engine.model.weights import Weights, load_weights

PAGE_SIZE = 16
PAGES = 12
# Steps of (start, length, pages) per segment: two prompts at once, decode rows, decode rows beside a prompt, many decode rows.
STEPS = (
    ((0, 19, (7, 2)), (0, 5, (3,))),
    ((19, 1, (7, 2)), (5, 1, (3,))),
    ((20, 1, (7, 2)), (6, 1, (3,)), (0, 11, (0,))),
    ((21, 1, (7, 2)),),
    tuple((21 - offset, 1, (page,)) for offset, page in enumerate((8, 9, 10, 11, 1, 4, 5, 6), 6)),
)
SWITCHES = ("fused_routing", "route_align", "per_pair", "grouped_gemm", "gemv", "decode_kernel")


@pytest.fixture(scope="module")
def config(tiny_checkpoint: Path) -> OmniConfig:
    """The small model's, with two of its layers: the interpreter takes seconds for each."""
    whole = OmniConfig.load(tiny_checkpoint)
    return dataclasses.replace(whole, thinker=dataclasses.replace(whole.thinker, layers=2), talker=None)


@pytest.fixture(scope="module")
def weights(tiny_checkpoint: Path) -> Weights:
    read = load_weights(tiny_checkpoint, OmniConfig.load(tiny_checkpoint))
    # On a GPU they lie row by row.
    return Weights({name: tensor.contiguous() for name, tensor in read.tensors.items()}, read.shard)


def options(*off: str, **more: bool) -> KernelOptions:
    return KernelOptions(off=frozenset(off), dtype=torch.float32, **more)


def plan_of(step, ops: Ops, lead: int | None = None) -> tuple[Tensor, Plan]:
    segments, offset = [], 0
    for start, length, pages in step:
        segments.append(Segment(offset, length, start, pages))
        offset += length
    at = torch.cat([torch.arange(s.start, s.start + s.length).float() for s in segments]).expand(3, -1).contiguous()
    ids = torch.arange(offset) * 7 % 180 + (len(step) if lead is None else lead)
    return ids, host_plan(segments, at, PAGE_SIZE, ops)


@torch.inference_mode()
def run(config: OmniConfig, weights: Weights, ops: Ops, steps=STEPS, lead: int | None = None) -> list[Tensor]:
    """The logits of every row of `steps`, on the host; ids count from `lead`."""
    tensors = {name: tensor.to(ops.device) for name, tensor in weights.tensors.items() if name.startswith("thinker")}
    thinker = Thinker(config, Weights(tensors, weights.shard), ops)
    shape = (thinker.layers, PAGES, PAGE_SIZE, thinker.kv_heads, thinker.head_dim)
    keys, values = torch.zeros(shape, device=ops.device), torch.zeros(shape, device=ops.device)
    slots = torch.zeros(4, dtype=torch.int64, device=ops.device)
    found = []
    for step in steps:
        ids, plan = plan_of(step, ops, lead)
        x = thinker.embed_rows(ops.put(ids.int().numpy()), slots, None)
        hidden, _ = thinker.forward(x, ops.upload(plan), keys, values, states=False)
        found.append(thinker.logits(hidden).cpu())
    return found


@pytest.mark.parametrize("off", ["nothing", *SWITCHES])
def test_every_way_gives_the_logits_of_the_cpu(config, weights, device, off):
    ops = CudaOps(device, options(*(() if off == "nothing" else (off,))))
    for ours, theirs in zip(run(config, weights, ops), run(config, weights, ops_for("cpu")), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-4)
        assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


def test_the_ways_that_were_taken_are_counted(config, weights, device):
    ops = CudaOps(device, options())
    run(config, weights, ops)
    layers = config.thinker.layers
    # Steps of 24, 2, 13, 1 and 8 rows: up to 4 rows run per pair.
    assert ops.counters["experts_per_pair"] == 2 * layers
    assert ops.counters["experts_route_align"] == 3 * layers
    assert ops.counters["attention_decode"] == 3 * layers
    assert ops.counters["attention_paged"] == 2 * layers
    assert ops.counters["linear_gemv"] == 3 * layers + 1  # qkv, o and router; the head
    without = CudaOps(device, options("route_align", "per_pair", "gemv", "decode_kernel"))
    run(config, weights, without)
    assert without.counters["experts_router_topk"] == 5 * layers
    assert without.counters["attention_paged"] == 5 * layers
    assert not without.counters["linear_gemv"]


def test_a_row_has_the_same_bits_in_any_company_when_it_is_to(config, weights, device):
    """A prompt and its decode row alone, and with two others beside them: one kernel and one tile for every row count."""
    alone = (((0, 9, (7,)),), ((9, 1, (7,)),))
    beside = (((0, 9, (7,)), (0, 5, (3,)), (0, 7, (2,))), ((9, 1, (7,)), (5, 1, (3,)), (7, 1, (2,))))
    found = [
        run(config, weights, CudaOps(device, options(batch_invariant=True)), steps, lead=300)
        for steps in (alone, beside)
    ]
    for ours, theirs, rows in zip(*found, (9, 1), strict=True):
        assert torch.equal(ours, theirs[:rows])


@torch.inference_mode()
def test_a_padded_step_gives_its_rows_what_they_have_without_padding(config, weights, device):
    for decode, step in ((True, STEPS[1]), (False, STEPS[0])):
        results = []
        for padded in (False, True):
            ops = CudaOps(device, options())
            tensors = {name: tensor.to(device) for name, tensor in weights.tensors.items() if "thinker" in name}
            thinker = Thinker(config, Weights(tensors, weights.shard), ops)
            shape = (thinker.layers, PAGES, PAGE_SIZE, thinker.kv_heads, thinker.head_dim)
            keys, values = torch.zeros(shape, device=device), torch.zeros(shape, device=device)
            ids, plan = plan_of(step, ops)
            n = len(ids)
            count = n + 3 if padded else n
            blocks = None if decode else ops.query_blocks(plan.layout)
            layout = Shape(count, 0 if decode else count, decode)
            words = torch.zeros(layout.words, dtype=torch.int32).numpy()
            fill(words, layout, ids.int().numpy(), plan, blocks)
            table = torch.zeros((count, 4), dtype=torch.int32, device=device)
            table[: len(step), : plan.layout.table.shape[1]] = ops.put(plan.layout.table)
            there, static = views(ops.put(words), layout, table, PAGE_SIZE, padded=padded)
            x = thinker.embed_rows(there, torch.zeros(4, dtype=torch.int64, device=device), None)
            hidden, _ = thinker.forward(x, static, keys, values, states=False)
            assert hidden.isfinite().all()
            results.append((hidden[:n].cpu(), keys.cpu(), values.cpu()))
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
