"""The read-only ceiling of a card: how many bytes a second a kernel reads that does nothing else.

`python -m tests.perf.ceiling` prints it as one JSON object; in a process of its own, so that no memory stays taken.
It ends with 64 on wrong usage, with 69 without a GPU.
"""

from __future__ import annotations

import json

from tests.perf.usage import Parser, require_gpu, require_torch

# Before the imports that fail without them.
if __name__ == "__main__":
    Parser("ceiling", __doc__).parse_args()
    require_torch("ceiling")
    require_gpu("ceiling", "cuda")

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, PROGRAMS = 4096, 528  # four programs for each of the 132 processors of an H200
GIBIBYTES, ROUNDS = 8, 10


@triton.jit
def _sum_blocks(source, sums, blocks, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    program = tl.program_id(0)
    total = tl.zeros((BLOCK,), dtype=tl.int32)
    # Moved along, not multiplied: a place of this many does not fit 32 bits.
    places = source + program * BLOCK + tl.arange(0, BLOCK)
    for _ in range(program, blocks, tl.num_programs(0)):
        total += tl.load(places)
        places += tl.num_programs(0) * BLOCK
    tl.store(sums + program, tl.sum(total, 0))


def sum_blocks(source: Tensor, programs: int = PROGRAMS) -> Tensor:
    """The sums [programs] int32 of every `programs`-th block of `source` [n] int32; n is a multiple of BLOCK."""
    sums = torch.empty(programs, dtype=torch.int32, device=source.device)
    _sum_blocks[(programs,)](source, sums, len(source) // BLOCK, BLOCK, num_warps=8)
    return sums


def read_ceiling(gibibytes: int = GIBIBYTES, rounds: int = ROUNDS) -> dict[str, object]:
    """The best and the median bytes a second of `rounds` readings of `gibibytes` GiB by the first GPU."""
    source = torch.ones(gibibytes << 28, dtype=torch.int32, device="cuda")
    assert int(sum_blocks(source).sum()) == len(source)
    speeds = []
    for _ in range(rounds):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        sum_blocks(source)
        ended.record()
        torch.cuda.synchronize()
        speeds.append(source.nbytes / (began.elapsed_time(ended) / 1e3))
    ranked = sorted(speeds)
    return {
        "gpu": torch.cuda.get_device_name(),
        "gibibytes": gibibytes,
        "best_bytes_per_s": ranked[-1],
        "median_bytes_per_s": ranked[len(ranked) // 2],
    }


if __name__ == "__main__":
    print(json.dumps(read_ceiling()))
