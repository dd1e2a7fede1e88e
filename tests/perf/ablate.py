"""What each switch of the engine is worth and whether it moves a token: off in turn, over one load of the weights.

`python -m tests.perf.ablate --out FOLDER` writes ablation.md and ablation.json there, anew after each switch. First it counts
the experts that a decode step reads. It ends with 1 when a switch moved a token that it may not move, with 64 on
wrong usage, with 69 without a GPU.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tests.perf.usage import DEVICES, Parser, checkpoint, folder_to_write, require_gpu, require_torch, seconds

# Before the imports that fail without it.
if __name__ == "__main__":
    require_torch("ablate")

from engine.config import switches_of
from engine.model.omni import OmniModel
from tests.perf.floors import Reads
from tests.perf.in_process import (
    Answers,
    Load,
    answers,
    distinct_experts,
    engine_settings,
    equal,
    first_difference,
    load,
    random_prompts,
)
from tests.perf.in_process import running as engine_of

NOTHING = "nothing"
# These have no part in text from text.
NOT_TEXT = frozenset({"stateful_code2wav", "audio_captures"})
MAX_BATCH = 16
EXPERT_ROWS, EXPERT_STEPS = (1, 4, 8, 16, 64), 16
# On a GPU a product's last bits depend on the kernel and on its row count; a CPU has one way for all.
OTHER_SUMS = {
    "fused_routing": "torch's softmax and sums for the weights of the experts",
    "per_pair": "grouped products instead of one GEMV a pair: sums in another order",
    "grouped_gemm": "every row through every expert, summed in one product",
    "tuned_tiles": "default tiles cut a sum at other places",
    "gemv": "the library's products: sums in another order",
    "decode_kernel": "attention is summed over other splits of the context",
    "flashinfer": "attention over long prompts is summed over other blocks",
}
OTHER_COMPANY = {
    "device_loopback": "a request joins one step later",
    "batching": "one row a step",
    "launch_ahead": "a request joins one step later",
    "chunked_prefill": "prompts come in other steps",
    "mixed_steps": "prompts and answers come in other steps",
    "captures": "steps run at their own row count, not at a bucket's",
    "prompt_captures": "steps with prompts run at their own row count, not at a bucket's",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One switch off: per concurrency how many prompts agree with nothing off, the first step that differs, ms a step.

    `why` says why tokens may move, at every concurrency or (`company`) only where a step has more rows than one.
    """

    off: str
    prompts: int
    equal: dict[int, int]
    first: dict[int, int | None]
    step_ms: dict[int, float]
    boot_s: float
    why: str = ""
    company: bool = False

    @property
    def faults(self) -> list[int]:
        """The concurrencies at which tokens moved and may not."""
        may = {c: bool(self.why) and (c > 1 or not self.company) for c in self.equal}
        return [c for c, count in self.equal.items() if count < self.prompts and not may[c]]


def chosen(only: str, device: str) -> list[str]:
    """The switches to turn off, those of a list `a,b` or all that matter to text; ValueError for an unknown one."""
    known = [name for name in switches_of(device) if name not in NOT_TEXT]
    names = [name.strip() for name in only.split(",") if name.strip()]
    unknown = next((name for name in names if name not in known), None)
    if unknown is not None:
        raise ValueError(f"--only: {unknown!r} is no switch of text on {device}; there are {', '.join(known)}")
    return names or known


@dataclass(frozen=True, slots=True)
class Experts:
    """How many experts of a layer `rows` decode rows read together, and how many they would if all were as likely."""

    rows: int
    distinct: float
    uniform: float


def experts(model: OmniModel, device: str, asked: Load, rows: Sequence[int] = EXPERT_ROWS) -> list[Experts]:
    """The experts that decode steps of these row counts read, counted in uncaptured steps."""
    prompts = random_prompts(model, replace(asked, count=max(rows)))
    off = ["captures", "audio_captures"] if device == "cuda" else []
    reads = Reads.of(model.config.thinker)
    with engine_of(model, engine_settings(device, off=off, max_batch=max(rows))) as engine:
        return [Experts(n, distinct_experts(engine, prompts[:n], EXPERT_STEPS), reads.distinct(n)) for n in rows]


def ablate(model: OmniModel, device: str, asked: Load, names: Sequence[str], budget_s: float) -> Iterator[Row]:
    """Nothing off first, then one switch after the other while `budget_s` seconds leave room for the longest so far."""
    began, longest = time.monotonic(), 0.0
    prompts, base = random_prompts(model, asked), None
    for name in (NOTHING, *names):
        if time.monotonic() - began + longest > budget_s:
            return
        since = time.monotonic()
        found, boot_s = _run(model, device, asked, prompts, name)
        base = base or found
        yield _row(name, device, base, found, boot_s)
        longest = max(longest, time.monotonic() - since)


def _run(
    model: OmniModel, device: str, asked: Load, prompts: Sequence[Sequence[int]], name: str
) -> tuple[Answers, float]:
    # No audio comes, so its captures would only lengthen each boot.
    off = [*({name} - {NOTHING}), *(["audio_captures"] if device == "cuda" else [])]
    began = time.monotonic()
    with engine_of(model, engine_settings(device, off=off, max_batch=MAX_BATCH)) as engine:
        boot_s = time.monotonic() - began
        return answers(engine, prompts, asked), boot_s


def _row(name: str, device: str, base: Answers, found: Answers, boot_s: float) -> Row:
    pairs = {c: (base.tokens[c], found.tokens[c]) for c in base.tokens}
    row = Row(
        off=name,
        prompts=len(next(iter(base.tokens.values()))),
        equal={c: equal(*pair) for c, pair in pairs.items()},
        first={c: first_difference(*pair) for c, pair in pairs.items()},
        step_ms={c: round(ms, 4) for c, ms in found.step_ms.items()},
        boot_s=round(boot_s, 2),
    )
    if device == "cpu":
        return row
    company = name in OTHER_COMPANY
    return replace(row, why=OTHER_COMPANY[name] if company else OTHER_SUMS.get(name, ""), company=company)


def markdown(rows: Sequence[Row], left: Sequence[str], asked: Load) -> str:
    """The table of an ablation; `left` are the switches that the budget left no time for."""
    at = asked.concurrencies
    heads = ["off", *(f"tokens c={c}" for c in at), *(f"ms a step c={c}" for c in at), "boot s", "why tokens may move"]
    lines = [
        f"{asked.count} prompts of {asked.length} random ids, {asked.tokens} greedy tokens each. Tokens: at how many prompts "
        "every token is that of nothing off, and the first step that differs. A step: the median time in which each request "
        "gets one token.",
        "",
        f"| {' | '.join(heads)} |",
        f"|---|{'---|' * len(at)}{'---:|' * (len(at) + 1)}---|",
    ]
    lines += [f"| {' | '.join(_cells(row, rows[0], at))} |" for row in rows]
    if left:
        lines += ["", f"Not run, for want of time: {', '.join(left)}."]
    faults = [f"{row.off} at c={c}" for row in rows for c in row.faults]
    return "\n".join([*lines, "", f"Moved and may not: {', '.join(faults) or 'nothing'}.", ""])


def experts_markdown(found: Sequence[Experts]) -> str:
    """The table of the experts that decode steps read."""
    lines = ["| rows | distinct experts a layer and step | uniform | share |", "|---:|---:|---:|---:|"]
    lines += [
        f"| {one.rows} | {one.distinct:.1f} | {one.uniform:.1f} | {one.distinct / one.uniform:.1%} |" for one in found
    ]
    return "\n".join([*lines, ""])


def _cells(row: Row, base: Row, at: Sequence[int]) -> list[str]:
    why = f"only with company: {row.why}" if row.company else row.why
    return [
        row.off,
        *(_tokens(row.equal[c], row.prompts, row.first[c]) for c in at),
        *(f"{row.step_ms[c]:.3f} ({row.step_ms[c] / base.step_ms[c] - 1:+.1%})" for c in at),
        f"{row.boot_s:.1f}",
        why or "–",
    ]


def _tokens(count: int, prompts: int, first: int | None) -> str:
    return f"{count} of {prompts}" + ("" if first is None else f", from step {first}")


def write(out: Path, read: Sequence[Experts], rows: Sequence[Row], left: Sequence[str], asked: Load) -> None:
    """Write ablation.md and ablation.json into a folder."""
    out.mkdir(parents=True, exist_ok=True)
    parts = [
        "# Each switch off in turn",
        markdown(rows, left, asked),
        "# Experts that a step reads",
        experts_markdown(read),
    ]
    (out / "ablation.md").write_text("\n\n".join(parts), encoding="utf-8")
    values = {
        "load": asdict(asked),
        "rows": [asdict(row) | {"faults": row.faults} for row in rows],
        "left": list(left),
        "experts": [asdict(one) for one in read],
    }
    (out / "ablation.json").write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    """Run the ablation; 1 when a token moved that may not, else 0."""
    parser = Parser("ablate", __doc__)
    parser.add_argument("--out", type=folder_to_write, required=True)
    parser.add_argument(
        "--model", type=checkpoint, help="a checkpoint folder; absent: the released shapes, weights drawn"
    )
    parser.add_argument("--device", choices=DEVICES, default="cuda")
    parser.add_argument("--only", default="", help="switches, comma-separated; absent: all that matter to text")
    parser.add_argument("--budget-s", type=seconds, default=420.0, help="seconds for the switches; loading takes more")
    asked = parser.parse_args()
    try:
        names = chosen(asked.only, asked.device)
    except ValueError as error:
        parser.error(str(error))
    require_gpu("ablate", asked.device)
    wanted, rows = Load(), list[Row]()
    model = load(asked.model, asked.device)
    read = experts(model, asked.device, wanted)
    print(experts_markdown(read), flush=True)
    for row in ablate(model, asked.device, wanted, names, asked.budget_s):
        rows.append(row)
        write(asked.out, read, rows, names[len(rows) - 1 :], wanted)
        print(" ".join(_cells(row, rows[0], wanted.concurrencies)), flush=True)
    print(f"\n{(asked.out / 'ablation.md').read_text(encoding='utf-8')}")
    return int(any(row.faults for row in rows))


if __name__ == "__main__":
    sys.exit(main())
