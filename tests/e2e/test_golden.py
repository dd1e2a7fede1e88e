"""The small model says what traces/ holds. `python -m tests.e2e.test_golden` writes it anew; say in the commit why."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from engine.config import EngineSettings
from engine.engine import Engine
from engine.model.chat import ChatTemplate, load_tokenizer
from engine.model.omni import load_model
from engine.request import Request, StepLogprobs
from tests.shared import REPOSITORY

GOLDEN = REPOSITORY / "traces" / "tiny-greedy.jsonl"
TOKENS = 48
# A different processor may round a sum otherwise; it may then pick the other of two logits this close, and nothing else.
NEAR_TIE = 1e-3

Answer = tuple[list[int], list[StepLogprobs]]


def answers(checkpoint: Path) -> dict[str, Answer]:
    """What the small model says to each prompt of the workload, eight at a time, and the two likeliest ids of each step."""
    lines = (REPOSITORY / "workloads" / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = {item["id"]: item["text"] for item in map(json.loads, lines)}
    tokenizer, template = load_tokenizer(checkpoint), ChatTemplate.load(checkpoint)
    engine = Engine(load_model(checkpoint), EngineSettings(max_batch=8))
    for name, text in prompts.items():
        ids = tokenizer.encode(template.user_turn(text, None, 0), add_special_tokens=False).ids
        engine.add(Request(id=name, prompt_ids=ids, max_tokens=TOKENS, logprobs=2))
    said: dict[str, Answer] = {name: ([], []) for name in prompts}
    while engine.has_work:
        for event in engine.step():
            said[event.request_id][0].extend(event.token_ids)
            said[event.request_id][1].extend(event.logprobs)
    return said


def test_greedy_tokens_of_the_small_model_are_the_golden_ones(tiny_checkpoint: Path) -> None:
    golden = {line["prompt_id"]: line["token_ids"] for line in map(json.loads, GOLDEN.read_text().splitlines())}
    said = answers(tiny_checkpoint)
    assert set(said) == set(golden)
    same = 0
    for name, (tokens, top_two) in said.items():
        step = next((k for k, pair in enumerate(zip(tokens, golden[name], strict=False)) if pair[0] != pair[1]), None)
        if step is None:
            assert len(tokens) == len(golden[name]), name
            same += 1
        else:
            margin = top_two[step].logprobs[0] - top_two[step].logprobs[1]
            assert golden[name][step] in top_two[step].token_ids and margin < NEAR_TIE, f"{name} moved at step {step}"
    assert same >= 0.9 * len(golden)


def test_golden_answers_vary() -> None:
    golden = [line["token_ids"] for line in map(json.loads, GOLDEN.read_text().splitlines())]
    assert len({tuple(tokens) for tokens in golden}) == len(golden) == 64
    assert len({tokens[0] for tokens in golden}) >= 16


def main() -> None:
    from engine.model.tiny import write_tiny

    with tempfile.TemporaryDirectory() as folder:
        write_tiny(Path(folder) / "tiny")
        said = answers(Path(folder) / "tiny")
    lines = [json.dumps({"prompt_id": name, "token_ids": tokens}) for name, (tokens, _) in said.items()]
    GOLDEN.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
