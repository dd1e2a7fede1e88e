"""The gate and the real engine: our server asked at the OpenAI door as a peer would be, and at its own."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from gate.arm import ArmChoice, ArmError, laid_out
from gate.host import Cores
from gate.record import Record, RunData
from gate.run import carry_out, write_report
from gate.rundir import RunDir
from gate.session import Boot, serving
from gate.wish import Wish
from tests.gate.test_run import Notes
from tests.gate.trees import make_workloads

ROOT = Path(__file__).resolve().parents[2]
SAME = ("text", "completion_tokens", "prompt_tokens", "finish_reason", "pcm_samples", "pcm_sha256")
COMMAND = f"cmd:{sys.executable} -m engine.server.cli serve {{model}} --port {{port}}"


@pytest.fixture(scope="module")
def wish(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path) -> Wish:
    place = tmp_path_factory.mktemp("own")
    return Wish(
        choices=(ArmChoice("base", COMMAND), ArmChoice("head", str(ROOT))),
        repository=ROOT,
        run_dir=place / "run",
        set_name="demo",
        sessions=1,
        model=tiny_checkpoint,
        workloads=make_workloads(place / "workloads"),
        boot_s=120.0,
    )


@pytest.fixture(scope="module")
def both(wish: Wish) -> RunData:
    """A command arm and a tree arm of the same engine, at the OpenAI door."""
    return carry_out(wish, Notes()).load()


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no affinity call on this platform")
@pytest.mark.parametrize("ref", [COMMAND, str(ROOT)], ids=["command", "tree"])
def test_a_commands_server_and_all_it_starts_are_pinned_as_a_trees_are(
    tmp_path: Path, tiny_checkpoint: Path, ref: str
) -> None:
    core = min(os.sched_getaffinity(0))
    boot = Boot(tiny_checkpoint, "cpu", Cores((core,), (core,), True), boot_s=120.0)
    with (
        laid_out((ArmChoice("arm", ref),), ROOT, tmp_path, keep=False) as (arm,),
        serving(arm, boot, tmp_path / "server.log") as server,
    ):
        assert server.child is not None
        warden = psutil.Process(server.child.process.pid)
        family = [warden, *warden.children(recursive=True)]
        threads = [thread.id for process in family for thread in process.threads()]
        told = [process.environ().get("OMP_NUM_THREADS") for process in family]
        cores = {tuple(os.sched_getaffinity(thread)) for thread in threads}
    assert len(family) == 3  # the warden, the front and the engine
    assert (cores, set(told)) == ({(core,)}, {"1"})


def test_our_server_answers_every_cell_at_the_openai_door_as_a_command_and_as_a_tree(both: RunData) -> None:
    assert both.plan.door == "openai"
    assert [(r.session, r.cell, r.error) for r in both.records if not r.ok] == []
    spoken = {(record.arm, record.pcm_samples > 0) for record in both.records if record.cell in ("T2S@1", "A2S@1")}
    assert spoken == {("base", True), ("head", True)}
    assert all(record.prompt_tokens > 0 for record in both.records)


def test_a_command_and_a_tree_of_one_engine_say_the_same_and_their_prompts_are_equal(wish: Wish, both: RunData) -> None:
    answers: dict[str, dict[tuple[str, int], Record]] = {"base": {}, "head": {}}
    for record in both.records:
        if not record.warm:
            answers[record.arm][record.cell, record.index] = record
    assert answers["base"].keys() == answers["head"].keys()
    for place, record in answers["base"].items():
        other = answers["head"][place]
        assert (record.text, record.pcm_sha256, record.prompt_tokens) == (
            other.text,
            other.pcm_sha256,
            other.prompt_tokens,
        )
    folder = RunDir(wish.run_dir)
    assert write_report(folder).comparisons.faults == []
    report = folder.report.read_text()
    assert "Equal in every request." in report
    assert "not checked (command arm)" in report and "No token moved" in report


def test_both_doors_give_one_text_one_sound_and_one_count(wish: Wish, both: RunData) -> None:
    alone = replace(
        wish, choices=(ArmChoice("arm", COMMAND),), door="generate", run_dir=wish.run_dir.with_name("generate")
    )
    ours = carry_out(alone, Notes()).load()
    theirs = {(r.cell, r.index): r for r in both.records if r.arm == "base" and not r.warm}
    for record in ours.records:
        if record.warm:
            continue
        other = theirs[record.cell, record.index]
        assert record.ok and record.token_ids and not other.token_ids
        seen, said = ({name: getattr(one, name) for name in SAME} for one in (record, other))
        assert seen == said, record.cell


def test_a_switch_that_our_server_does_not_know_is_its_own_sentence(wish: Wish) -> None:
    choice = ArmChoice("arm", str(ROOT), args=("--disable", "nonsense"))
    wrong = replace(wish, choices=(choice,), run_dir=wish.run_dir.with_name("wrong"))
    with pytest.raises(ArmError, match=r"arm's server refused its command line: .*nonsense"):
        carry_out(wrong, Notes())
