"""The tools that measure engines in one process, on the small model: what they answer, compare and write."""

from __future__ import annotations

import json
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from engine.config import SWITCHES
from engine.kernels import KernelOptions
from engine.model.omni import OmniModel
from engine.step import Step
from tests.perf import ablate, boots
from tests.perf.in_process import (
    Answers,
    Load,
    distinct_experts,
    engine_settings,
    equal,
    first_difference,
    generate,
    load,
    random_prompts,
    running,
    step_ms,
)

SMALL = Load(count=3, length=8, tokens=4, concurrencies=(1, 2), steps=4)


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Path) -> OmniModel:
    return load(tiny_checkpoint, "cpu")


def test_a_model_with_other_options_shares_its_tensors_and_answers_alike(model: OmniModel):
    other = model.with_options(KernelOptions(off=frozenset({"gemv"})))
    assert other.thinker is not model.thinker and other.ops is not model.ops
    assert other.thinker.embedding.data_ptr() == model.thinker.embedding.data_ptr()
    assert other.weights is model.weights and other.weights_digest == model.weights_digest
    assert (other.talker is None, other.code2wav is None) == (model.talker is None, model.code2wav is None)


def test_prompts_are_all_different_and_hold_no_special_id(model: OmniModel):
    prompts = random_prompts(model, Load(count=50, length=8))
    assert len({tuple(prompt) for prompt in prompts}) == 50
    assert {len(prompt) for prompt in prompts} == {8}
    ids = model.config.ids
    assert max(max(prompt) for prompt in prompts) < min(ids.im_start, ids.im_end, ids.audio, ids.tts_pad) - 1
    assert (
        prompts == random_prompts(model, Load(count=50, length=8)) != random_prompts(model, Load(count=50, length=8), 1)
    )


def test_a_closed_loop_answers_every_prompt_alike_at_any_concurrency_and_leaves_nothing_behind(model: OmniModel):
    prompts = random_prompts(model, SMALL)
    with running(model, engine_settings("cpu", max_batch=4)) as engine:
        alone, together = (generate(engine, prompts, 5, c) for c in (1, 3))
        assert alone == together and {len(tokens) for tokens in alone} == {5}
        assert step_ms(engine, prompts[:2], steps=3, limit_s=30.0) > 0
        assert not engine.has_work
        counters = engine.counters()
        assert counters["thinker_pages_free"] == counters["thinker_pages"]


def test_a_request_that_fails_ends_the_loop(model: OmniModel, monkeypatch: pytest.MonkeyPatch):
    with running(model, engine_settings("cpu", max_batch=4)) as engine:
        monkeypatch.setattr(engine.loop.lanes[1].runner, "launch", lambda step: 1 / 0)
        with pytest.raises(RuntimeError, match=r"a request failed: .*division"):
            generate(engine, [[1, 2]], 2, 1)


def test_answers_are_compared_prompt_by_prompt():
    one, other = [[1, 2, 3], [4, 5, 6], [7, 8, 9]], [[1, 2, 3], [4, 5, 0], [7, 0, 9]]
    assert (equal(one, other), first_difference(one, other)) == (1, 1)
    assert (equal(one, one), first_difference(one, one)) == (3, None)


def test_no_switch_moves_a_token_on_a_cpu_and_each_has_a_row(model: OmniModel, tmp_path: Path):
    names = ablate.chosen("", "cpu")
    assert set(names) == set(SWITCHES) - {"stateful_code2wav"}
    names = names[:3]
    rows = list(ablate.ablate(model, "cpu", SMALL, names, budget_s=600))
    assert [row.off for row in rows] == ["nothing", *names]
    assert all(row.equal == {1: 3, 2: 3} and row.first == {1: None, 2: None} for row in rows)
    assert all(ms > 0 for row in rows for ms in row.step_ms.values()) and not any(row.faults for row in rows)
    ablate.write(tmp_path, [ablate.Experts(8, 46.44, 51.6)], rows, names[2:], SMALL)
    text = (tmp_path / "ablation.md").read_text()
    assert "| nothing | 3 of 3 | 3 of 3 |" in text and f"Not run, for want of time: {names[2]}." in text
    assert "Moved and may not: nothing." in text and "| 8 | 46.4 | 51.6 | 90.0% |" in text
    assert [row["off"] for row in json.loads((tmp_path / "ablation.json").read_text())["rows"]] == ["nothing", *names]


def test_the_experts_of_a_decode_step_are_counted_and_the_engine_is_left_as_it_was(model: OmniModel):
    c = model.config.thinker
    one, three = ablate.experts(model, "cpu", SMALL, rows=(1, 3))
    assert one == ablate.Experts(1, c.top_k, c.top_k)  # one row reads its own, whatever the others are
    assert c.top_k < three.distinct <= min(c.experts, 3 * c.top_k)
    assert three.uniform == pytest.approx(c.experts * (1 - (1 - c.top_k / c.experts) ** 3))
    with running(model, engine_settings("cpu", max_batch=4)) as engine:
        before = generate(engine, [[5, 6, 7]], 4, 1)
        assert distinct_experts(engine, [[5, 6, 7]], 2) == c.top_k
        assert "add_experts" not in vars(engine.model.ops)
        assert generate(engine, [[5, 6, 7]], 4, 1) == before


def test_the_budget_ends_an_ablation_between_two_switches(model: OmniModel):
    rows = list(ablate.ablate(model, "cpu", SMALL, ["text_walk", "plan_cache"], budget_s=1e-3))
    assert [row.off for row in rows] == ["nothing"]


def test_a_switch_may_move_tokens_only_where_its_arithmetic_differs():
    row = ablate.Row("gemv", 4, {1: 2, 16: 1}, {1: 3, 16: 2}, {1: 1.0, 16: 2.0}, 1.0)
    assert row.faults == [1, 16]
    assert replace(row, why="other sums").faults == []
    assert replace(row, why="another row count", company=True).faults == [1]
    assert replace(row, why="another row count", company=True, equal={1: 4, 16: 0}).faults == []


def test_the_switches_with_another_arithmetic_exist_and_an_unknown_one_is_refused():
    known = set(ablate.chosen("", "cuda"))
    assert known >= ablate.OTHER_SUMS.keys() | ablate.OTHER_COMPANY.keys()
    assert not ablate.OTHER_SUMS.keys() & ablate.OTHER_COMPANY.keys()
    assert ablate.chosen("gemv, captures", "cuda") == ["gemv", "captures"]
    with pytest.raises(ValueError, match="'gemv' is no switch of text on cpu"):
        ablate.chosen("gemv", "cpu")


def test_text_runs_in_the_same_steps_through_either_walk_so_text_walk_may_move_no_token(model: OmniModel):
    def steps(*off: str) -> list[list[tuple[str, int, int]]]:
        seen: list[list[tuple[str, int, int]]] = []

        def note(step: Step) -> AbstractContextManager[object]:
            seen.append([(row.request_id, row.start, row.length) for row in step.rows])
            return nullcontext()

        with running(model, engine_settings("cpu", off=off, max_batch=4)) as engine:
            for lane in engine.loop.lanes:
                lane.ranges = note
            generate(engine, random_prompts(model, SMALL), 5, 2)
        return seen

    assert steps() == steps("text_walk") != steps("batching")
    assert "text_walk" not in ablate.OTHER_SUMS | ablate.OTHER_COMPANY


def test_two_processes_answer_alike(tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    words = ["boots", "--device", "cpu", "--model", str(tiny_checkpoint), "--boot", str(tmp_path / "one.json")]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(boots, "Load", lambda: SMALL)
    assert boots.main() == 0
    one = boots._read(tmp_path / "one.json")
    other = boots.boot(tiny_checkpoint, "cpu", SMALL)
    assert boots.report([one, other], "cpu", SMALL, tmp_path) == 0
    text = (tmp_path / "boots.md").read_text()
    assert "| default | boot 1 and 2, c=2 | 3 of 3 | all |" in text and "Differ and may not: nothing." in text


def test_what_must_agree_between_boots_of_a_gpu():
    same = Answers({1: [[1, 2], [3, 4]], 16: [[1, 2], [3, 4]]}, {1: 2.0, 16: 3.0})
    slower = replace(same, step_ms={1: 3.0, 16: 3.3})
    other = replace(same, tokens={1: [[1, 2], [3, 4]], 16: [[1, 2], [3, 0]]})
    asked = Load(count=2, concurrencies=(1, 16))
    plain = [{boots.PLAIN: same, boots.INVARIANT: slower}, {boots.PLAIN: other, boots.INVARIANT: slower}]
    assert boots.faults(plain, "cuda", asked) == []
    assert "| --batch-invariant | 3.000 (+50.0%) | 3.000 (+50.0%) | 3.300 (+10.0%) |" in boots.markdown(
        plain, "cuda", asked
    )
    assert "| default | boot 1 and 2, c=16 | 1 of 2 | – |" in boots.markdown(plain, "cuda", asked)
    moved = [{boots.PLAIN: same, boots.INVARIANT: other}, {boots.PLAIN: same, boots.INVARIANT: same}]
    assert boots.faults(moved, "cuda", asked) == [
        "--batch-invariant: boot 1 and 2, c=16",
        "--batch-invariant: c=16 and c=1, boot 1",
    ]
