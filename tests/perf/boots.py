"""Whether two boots answer alike, alone and in company, with --batch-invariant and without, and what that costs.

`python -m tests.perf.boots --out FOLDER` boots an engine in two processes, one after the other, and writes boots.md and
boots.json there. It ends with 1 when tokens differ that may not, with 64 on wrong usage, with 69 without a GPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from tests.perf.usage import DEVICES, Parser, checkpoint, folder_to_write, require_gpu, require_torch

# Before the imports that fail without it.
if __name__ == "__main__":
    require_torch("boots")

from tests.perf.in_process import Answers, Load, answers, engine_settings, equal, load, random_prompts
from tests.perf.in_process import running as engine_of
from tests.shared import REPOSITORY

BOOTS = 2
PLAIN, INVARIANT = "default", "--batch-invariant"

Boot = Mapping[str, Answers]


def boot(folder: Path | None, device: str, asked: Load) -> dict[str, Answers]:
    """What this process answers in each mode; a CPU is batch-invariant anyway and has the one mode."""
    model, found = load(folder, device), dict[str, Answers]()
    prompts = random_prompts(model, asked)
    for mode in (PLAIN, INVARIANT) if device == "cuda" else (PLAIN,):
        with engine_of(model, engine_settings(device, batch_invariant=mode == INVARIANT)) as engine:
            found[mode] = answers(engine, prompts, asked)
    return found


def matches(boots: Sequence[Boot], mode: str, asked: Load) -> dict[str, int]:
    """At how many prompts all tokens agree: between boots at each concurrency, and in company with alone."""
    one, other = (boot[mode].tokens for boot in boots)
    alone = asked.concurrencies[0]
    between = {f"boot 1 and 2, c={c}": equal(one[c], other[c]) for c in asked.concurrencies}
    company = {f"c={c} and c={alone}, boot 1": equal(one[c], one[alone]) for c in asked.concurrencies[1:]}
    return between | company


def must_agree(mode: str, device: str, asked: Load) -> list[str]:
    """The comparisons in which every prompt must agree: alone between boots; everything where company moves no bit."""
    first = asked.concurrencies[0]
    between = [f"boot 1 and 2, c={c}" for c in asked.concurrencies]
    company = [f"c={c} and c={first}, boot 1" for c in asked.concurrencies[1:]]
    return [*between, *company] if mode == INVARIANT or device == "cpu" else between[:1]


def faults(boots: Sequence[Boot], device: str, asked: Load) -> list[str]:
    """The comparisons that must agree and don't."""
    return [
        f"{mode}: {name}"
        for mode in boots[0]
        for name in must_agree(mode, device, asked)
        if matches(boots, mode, asked)[name] < asked.count
    ]


def markdown(boots: Sequence[Boot], device: str, asked: Load) -> str:
    """Two tables: which answers agree, and ms a step with what --batch-invariant adds."""
    lines = [
        "# Two boots",
        "",
        f"{asked.count} prompts of {asked.length} random ids, {asked.tokens} greedy tokens each, on two boots of an engine.",
        "",
        "| mode | compared | prompts that agree in every token | must |",
        "|---|---|---:|---:|",
    ]
    for mode in boots[0]:
        must = must_agree(mode, device, asked)
        for name, count in matches(boots, mode, asked).items():
            lines.append(f"| {mode} | {name} | {count} of {asked.count} | {'all' if name in must else '–'} |")
    heads = [f"c={c}, boot {number}" for c in asked.concurrencies for number in range(1, BOOTS + 1)]
    lines += ["", f"| ms a step | {' | '.join(heads)} |", f"|---|{'---:|' * len(heads)}"]
    for mode in boots[0]:
        cells = [f"{boot[mode].step_ms[c]:.3f}" + _change(boot, mode, c) for c in asked.concurrencies for boot in boots]
        lines.append(f"| {mode} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"Differ and may not: {'; '.join(faults(boots, device, asked)) or 'nothing'}.", ""])


def _change(boot: Boot, mode: str, concurrency: int) -> str:
    if mode == PLAIN:
        return ""
    return f" ({boot[mode].step_ms[concurrency] / boot[PLAIN].step_ms[concurrency] - 1:+.1%})"


def _read(path: Path) -> dict[str, Answers]:
    """A boot's answers as its process wrote them; JSON has no numbers for names."""
    values = json.loads(path.read_text(encoding="utf-8"))
    return {
        mode: Answers(*({int(c): value for c, value in one[part].items()} for part in ("tokens", "step_ms")))
        for mode, one in values.items()
    }


def _child(words: Sequence[str], path: Path) -> dict[str, Answers]:
    command = [sys.executable, "-m", "tests.perf.boots", *words, "--boot", str(path)]
    subprocess.run(command, cwd=REPOSITORY, check=True)
    return _read(path)


def main() -> int:
    """Run both boots, or with --boot one of them; 1 when tokens differ that may not, else 0."""
    parser = Parser("boots", __doc__)
    parser.add_argument("--out", type=folder_to_write, default=Path("."))
    parser.add_argument(
        "--model", type=checkpoint, help="a checkpoint folder; absent: the released shapes, weights drawn"
    )
    parser.add_argument("--device", choices=DEVICES, default="cuda")
    parser.add_argument("--boot", type=Path, help=argparse.SUPPRESS)
    wish, asked = parser.parse_args(), Load()
    require_gpu("boots", wish.device)
    if wish.boot is not None:
        found = {mode: asdict(one) for mode, one in boot(wish.model, wish.device, asked).items()}
        wish.boot.write_text(json.dumps(found), encoding="utf-8")
        return 0
    words = ["--device", wish.device, *(["--model", str(wish.model.resolve())] if wish.model else [])]
    with tempfile.TemporaryDirectory(prefix="boots-") as place:
        boots = [_child(words, Path(place) / f"{number}.json") for number in range(BOOTS)]
    return report(boots, wish.device, asked, wish.out)


def report(boots: Sequence[Boot], device: str, asked: Load, out: Path) -> int:
    """Write and print what two boots came to; 1 when tokens differ that may not, else 0."""
    out.mkdir(parents=True, exist_ok=True)
    text = markdown(boots, device, asked)
    (out / "boots.md").write_text(text, encoding="utf-8")
    values = {
        "load": asdict(asked),
        "matches": {mode: matches(boots, mode, asked) for mode in boots[0]},
        "step_ms": [{mode: one.step_ms for mode, one in boot.items()} for boot in boots],
        "faults": faults(boots, device, asked),
    }
    (out / "boots.json").write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    print(text)
    return int(bool(values["faults"]))


if __name__ == "__main__":
    sys.exit(main())
