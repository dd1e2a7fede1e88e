"""Whole runs against real servers: the order of effects, what is kept when things go wrong, and the rebuilt report."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from gate import rundir
from gate.arm import TRAINED_MODEL, Arm, ArmChoice, ArmError
from gate.cell import Cell
from gate.client import Limits
from gate.order import session_order
from gate.run import carry_out, load_run, plan_only, resume, write_report
from gate.rundir import RunDirError, create
from gate.session import Refused
from gate.verdict import REGRESSION
from gate.wish import Wish, check, chosen_cells, decode, encode, load_workloads
from gate.workload import WorkloadError
from tests.gate.trees import make_librispeech, make_repository, make_tree, make_workloads, run_git


class Notes:
    def __init__(self) -> None:
        self.said: list[str] = []
        self.steps: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def advance(self, done: int, total: int, text: str) -> None:
        self.steps.append(f"{done}/{total} {text}")


def make_wish(tmp_path: Path, base: dict[str, object], head: dict[str, object], **changes: object) -> Wish:
    repo = make_repository(tmp_path / "repo", base, head)
    wish = Wish(
        choices=(ArmChoice("base", "HEAD~1"), ArmChoice("head", "HEAD")),
        repository=repo,
        run_dir=tmp_path / "run",
        sessions=2,
        workloads=make_workloads(tmp_path / "workloads"),
        limits=Limits(request_s=10.0, silence_s=2.0),
        boot_s=20.0,
    )
    return replace(wish, **changes)  # type: ignore[arg-type]


def test_effects_come_in_order_model_then_boots_as_planned_each_stopped_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "effects.log"
    monkeypatch.setenv("FAKE_LOG", str(log))
    wish, notes = make_wish(tmp_path, {}, {}), Notes()
    folder = carry_out(wish, notes)
    data = folder.load()
    order = data.plan.order
    assert sorted(order) == ["base", "base", "head", "head"]
    assert log.read_text().splitlines() == [
        "base tiny",
        *(f"{arm} {event}" for arm in order for event in ("boot", "stop")),
    ]
    assert [session.id for session in data.sessions] == [
        f"{n}-{arm}" for n, arm in zip(["01", "02", "03", "04"], order, strict=True)
    ]
    assert notes.steps[:4] == [
        f"0/8 01-{order[0]} boots",
        f"0/8 01-{order[0]} T2T@1",
        f"1/8 01-{order[0]} T2T@2",
        f"2/8 02-{order[1]} boots",
    ]
    assert run_git(wish.repository, "worktree", "list").count("\n") == 0


def test_a_run_keeps_the_plan_the_identity_the_counters_and_every_record(tmp_path: Path) -> None:
    wish = make_wish(tmp_path, {}, {}, sessions=1)
    data = carry_out(wish, Notes()).load()
    plan, session = data.plan, data.sessions[0]
    assert plan.command == f"gate compare 'HEAD~1' HEAD --set quick --sessions 1 --seed 0 --workloads {wish.workloads}"
    assert [arm.commit for arm in plan.arms] == [
        run_git(wish.repository, "rev-parse", ref) for ref in ("HEAD~1", "HEAD")
    ]
    assert (plan.workload_counts, plan.workload_labels) == ({"prompts": 6}, {"prompts": "6 prompts"})
    assert session.source_digest in {arm.source_digest for arm in plan.arms}
    assert session.weights_digest == plan.model_digest
    assert session.counters["T2T@1 walkgate_tokens_total"] == 40.0  # 4 measured and 1 warm request of 8 tokens
    assert session.counters['T2T@2 walkgate_requests_total{task="any"}'] == 4.0
    assert set(session.client_lag) == {"T2T@1", "T2T@2"}
    assert session.host_before["cpu_model"] and session.host_after["monotonic_s"] > session.host_before["monotonic_s"]
    mine = [record for record in data.records if record.session == session.id and record.cell == "T2T@1"]
    assert [(record.warm, record.index) for record in mine] == [
        (True, 0),
        (False, 0),
        (False, 1),
        (False, 2),
        (False, 3),
    ]
    other = [record for record in data.records if record.session == "02-" + plan.order[1] and record.cell == "T2T@1"]
    assert [record.item for record in mine] == [record.item for record in other]
    assert all(record.ok for record in data.records)


def test_the_plan_is_on_disk_with_its_price_before_any_server_boots(tmp_path: Path) -> None:
    notes = Notes()
    folder = plan_only(make_wish(tmp_path, {}, {}), notes)
    plan = folder.load().plan
    assert notes.said[1].startswith(
        f"price: 4 sessions ({' '.join(plan.order)}), each with 2 cells, 8 requests measured and 1 in warm waves"
    )
    assert folder.load().sessions == []


def test_a_report_is_rebuilt_byte_for_byte_from_the_run_directory(tmp_path: Path) -> None:
    folder = carry_out(make_wish(tmp_path, {}, {}, set_name="demo"), Notes())
    code = write_report(folder).code
    files = [*sorted((folder.path / "tables").iterdir()), folder.report, folder.path / "report.json"]
    assert {path.suffix for path in files} == {".parquet", ".csv", ".md", ".json"}
    before = {path: path.read_bytes() for path in files}
    for path in files:
        path.unlink()
    assert write_report(rundir.existing(folder.path)).code == code
    assert {path: path.read_bytes() for path in files} == before


def test_a_moved_token_is_exit_1_unless_it_was_expected(tmp_path: Path) -> None:
    flip = {"flip": {"marker": "number", "step": 5}}
    folder = carry_out(make_wish(tmp_path, {}, flip, cells=("T2T@1",)), Notes())
    assert write_report(folder).code == 1
    assert "moved" in folder.report.read_text()
    expected = write_report(folder, expect_token_changes=True)
    # What is left is the speed of two equal arms, which a busy machine may tell apart.
    slower = any(cell.verdict == REGRESSION for cell in expected.comparisons.cells)
    assert expected.code in ((1,) if slower else (0, 2))


def test_a_head_that_fails_requests_is_broken_and_a_base_that_does_is_not_blamed_on_head(tmp_path: Path) -> None:
    fault: dict[str, object] = {"raise_on": "number 1"}
    broken_head = carry_out(make_wish(tmp_path / "a", {}, fault, cells=("T2T@2",), sessions=1), Notes())
    assert write_report(broken_head).code == 1
    assert "broken head" in broken_head.report.read_text()
    broken_base = carry_out(make_wish(tmp_path / "b", fault, {}, cells=("T2T@2",), sessions=1), Notes())
    assert write_report(broken_base).code == 3
    assert "broken base" in broken_base.report.read_text()


def test_a_server_that_dies_loses_nothing_measured_and_its_owed_requests_count_as_failed(tmp_path: Path) -> None:
    # Its third request is the second measured one of the first cell: one warm request came before.
    folder = carry_out(make_wish(tmp_path, {}, {"die_after": 3}, sessions=1), Notes())
    data = folder.load()
    (head,) = [session for session in data.sessions if session.arm == "head"]
    assert head.problems[0].splitlines()[0] == "the server ended with exit code 7"
    mine = [record for record in data.records if record.arm == "head" and not record.warm]
    assert [record.ok for record in mine if record.cell == "T2T@1"] == [True, False, False, False]
    owed = [record for record in mine if record.cell == "T2T@2"]
    assert [record.error for record in owed] == ["not sent: the server ended with exit code 7"] * 4
    assert all(record.ok for record in data.records if record.arm == "base")
    assert write_report(folder).code == 1


def test_short_output_of_head_alone_is_broken_head(tmp_path: Path) -> None:
    folder = carry_out(make_wish(tmp_path, {}, {"short_by": 2}, cells=("T2T@2",), sessions=1), Notes())
    assert write_report(folder).code == 1
    assert "6 of 8 tokens with ignore_eos" in folder.report.read_text()


def test_a_set_on_librispeech_asks_for_it(tmp_path: Path) -> None:
    wish = make_wish(tmp_path, {}, {})
    cell = replace_workload(chosen_cells(replace(wish, cells=("A2T@1",)))[0])
    with pytest.raises(WorkloadError, match=r"A2T@1 of --set quick runs on LibriSpeech: add --librispeech PATH or hub"):
        load_workloads(wish, [cell], tmp_path)


def replace_workload(cell: Cell) -> Cell:
    return msgspec.structs.replace(cell, workload="librispeech")


def test_a_server_that_does_not_boot_is_a_broken_arm_with_the_tail_of_its_log(tmp_path: Path) -> None:
    notes = Notes()
    folder = carry_out(make_wish(tmp_path, {}, {"exit_at_start": 5}, sessions=1), notes)
    (head,) = [session for session in folder.load().sessions if session.arm == "head"]
    assert "exit code 5 while starting" in head.problems[0] and "the fake gives up at once" in head.problems[0]
    assert write_report(folder).code == 1


@pytest.mark.parametrize("what", ["source_digest", "weights_digest"])
def test_a_server_of_another_source_or_other_weights_ends_the_run_before_anything_is_measured(
    tmp_path: Path, what: str
) -> None:
    wish = make_wish(tmp_path, {what: "f" * 64}, {what: "f" * 64})
    with pytest.raises(Refused, match="ffffffffffff"):
        carry_out(wish, Notes())
    data = load_run(wish.run_dir)
    assert data.records == [] and "ffffffffffff" in data.sessions[0].problems[0]
    assert run_git(wish.repository, "worktree", "list").count("\n") == 0


def test_one_model_folder_serves_both_arms_and_a_named_one_is_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "log"))
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    data = carry_out(make_wish(tmp_path, {}, {}, model=model, sessions=1, cells=("T2T@2",)), Notes()).load()
    assert data.plan.model_path == str(model)
    assert {session.weights_digest for session in data.sessions} == {data.plan.model_digest}
    assert "tiny" not in (tmp_path / "log").read_text()


def test_the_report_calls_the_trained_model_of_a_tree_by_its_name_and_does_not_say_where_it_lies(
    tmp_path: Path,
) -> None:
    wish = make_wish(tmp_path, {}, {}, sessions=1, cells=("T2T@2",))
    trained = wish.repository / TRAINED_MODEL
    trained.mkdir(parents=True)
    (trained / "config.json").write_text("{}")
    run_git(wish.repository, "add", "--all")
    run_git(wish.repository, "commit", "--quiet", "--message", "a trained model")
    folder = carry_out(wish, Notes())
    plan = folder.load().plan
    assert plan.model_path == str(folder.path / "model" / "omni-tiny")
    write_report(folder)
    assert f"| model | omni-tiny, weights {plan.model_digest} |" in folder.report.read_text()
    assert plan.model_path not in folder.report.read_text() + folder.report.with_suffix(".json").read_text()


def test_a_model_by_name_is_each_arms_own_and_its_weights_are_what_the_servers_state(tmp_path: Path) -> None:
    stated = {"weights_digest": "ab" * 32}
    wish = make_wish(tmp_path, stated, stated, model=Path("fake-30b"), sessions=1, cells=("T2T@2",))
    folder = carry_out(wish, Notes())
    plan = folder.load().plan
    assert (plan.model_path, plan.model_digest) == ("fake-30b", "")
    assert all(session.info["arguments"][1] == "fake-30b" for session in folder.load().sessions)
    assert {session.weights_digest for session in folder.load().sessions} == {"ab" * 32}
    assert "--model fake-30b" in plan.command
    assert decode(encode(wish)).model == Path("fake-30b")
    assert write_report(folder).comparisons.faults == []
    assert "fake-30b, by this name" in folder.report.read_text()


def test_arms_that_mean_other_weights_by_one_name_are_not_compared(tmp_path: Path) -> None:
    base, head = {"weights_digest": "ab" * 32}, {"weights_digest": "cd" * 32}
    folder = carry_out(make_wish(tmp_path, base, head, model=Path("fake-30b"), sessions=1, cells=("T2T@2",)), Notes())
    assert write_report(folder).code == 3


def test_a_name_that_no_arm_knows_is_a_sentence_and_blocks_no_other_try(tmp_path: Path) -> None:
    wish = make_wish(tmp_path, {}, {}, model=Path("nobody"), sessions=1, cells=("T2T@2",))
    told = r"--model nobody is not a folder, nor a name that base knows \(nobody is no model of the fake\)"
    with pytest.raises(ArmError, match=told):
        carry_out(wish, Notes())
    assert carry_out(replace(wish, model=None), Notes()).load().records
    with pytest.raises(ArmError, match="--model nobody is not a folder"):
        check(replace(wish, choices=(ArmChoice("arm", "cmd:true {port}"),)))


def test_a_cell_of_random_ids_asks_both_arms_the_same_prompts_and_compares_their_tokens(tmp_path: Path) -> None:
    wish = make_wish(tmp_path, {}, {"flip": {"marker": " ", "step": 3}}, sessions=1)
    row = '{ task = "T2T", concurrency = 2, requests = 6, warm_waves = 1, max_tokens = 8, ignore_eos = true, greedy = true, '
    cells = f'version = 1\n[sets.ids]\ncells = [ {row} workload = "ids", prompt_tokens = 4, ids_below = 999 }} ]\n'
    (wish.workloads / "cells.toml").write_text(cells)
    folder = carry_out(replace(wish, set_name="ids"), Notes())
    data = folder.load()
    asked = [{(r.index, r.item) for r in data.records if r.arm == arm and not r.warm} for arm in ("base", "head")]
    assert asked[0] == asked[1] and len({item for _, item in asked[0]}) == 6
    assert {len(data.items[item].token_ids or ()) for _, item in asked[0]} == {4}
    assert data.plan.workload_counts == {"ids T2T@2": 8}
    moves = write_report(folder).comparisons.moves
    assert [(move.item, move.step) for move in moves] == [(item, 3) for _, item in sorted(asked[0])]


def test_an_arm_may_be_a_folder_without_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "plain"
    make_tree(folder)
    monkeypatch.setenv("PATH", str(tmp_path))  # not even git is there
    wish = make_plain_wish(tmp_path, folder)
    data = carry_out(wish, Notes()).load()
    assert (data.plan.arms[0].kind, data.plan.arms[0].commit) == ("directory", None)
    assert all(record.ok for record in data.records)


def make_plain_wish(tmp_path: Path, folder: Path) -> Wish:
    return Wish(
        choices=(ArmChoice("arm", str(folder)),),
        repository=folder,
        run_dir=tmp_path / "run",
        sessions=1,
        cells=("T2T@2",),
        workloads=make_workloads(tmp_path / "workloads"),
        boot_s=20.0,
    )


def test_a_cell_made_for_librispeech_may_ask_the_clips_again(tmp_path: Path) -> None:
    wish = make_wish(tmp_path, {}, {}, librispeech=str(make_librispeech(tmp_path / "libri", clips=3)))
    cell = replace_workload(chosen_cells(replace(wish, cells=("A2T@1",)))[0])
    ((bent,), _) = load_workloads(wish, [msgspec.structs.replace(cell, requests=8)], tmp_path)
    assert (bent.workload, bent.requests) == ("librispeech", 8)


def test_librispeech_replaces_the_clips_and_a2t_takes_every_one(tmp_path: Path) -> None:
    subset = make_librispeech(tmp_path / "libri", clips=5)
    wish = make_wish(tmp_path, {}, {}, set_name="demo", sessions=1, librispeech=str(subset))
    data = carry_out(wish, Notes()).load()
    cells = {cell.name: (cell.workload, cell.requests) for cell in data.plan.cells}
    assert cells == {
        "T2T@1": ("prompts", 4),
        "A2T@1": ("librispeech", 5),
        "T2S@1": ("prompts", 2),
        "A2S@1": ("librispeech", 2),
    }
    assert data.plan.workload_labels["librispeech"] == "test-tiny, 5 clips"
    measured = {record.item for record in data.records if record.cell == "A2T@1" and not record.warm}
    assert measured == {f"11-22-{n:04d}" for n in range(5)}
    assert sum(r.audio_in_s for r in data.records if r.cell == "A2T@1" and r.arm == "base" and not r.warm) == 3.75


def test_one_arm_alone_is_measured_in_its_own_order(tmp_path: Path) -> None:
    wish = make_wish(tmp_path, {}, {}, choices=(ArmChoice("base", "HEAD"),), cells=("T2T@1",))
    data = carry_out(wish, Notes()).load()
    assert data.plan.order == ["base", "base"]
    assert data.plan.command.startswith("gate run HEAD --set quick --sessions 2")
    assert {record.arm for record in data.records} == {"base"}


def test_two_switch_sets_of_one_commit_reach_their_servers(tmp_path: Path) -> None:
    choices = (ArmChoice("base", "HEAD"), ArmChoice("head", "HEAD", args=("--disable", "plan_cache")))
    data = carry_out(make_wish(tmp_path, {}, {}, choices=choices, sessions=1, cells=("T2T@2",)), Notes()).load()
    seen = {session.arm: session.info["arguments"][-2:] for session in data.sessions}
    assert seen == {"base": ["--device", "cpu"], "head": ["--disable", "plan_cache"]}
    assert "HEAD HEAD --head-args '--disable plan_cache'" in data.plan.command


def test_a_record_line_cut_short_by_a_crash_is_left_out_and_a_spoilt_one_is_named(tmp_path: Path) -> None:
    folder = carry_out(make_wish(tmp_path, {}, {}, sessions=1, cells=("T2T@2",)), Notes())
    path = sorted(folder.path.glob("sessions/*/records.jsonl"))[0]
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    assert len(load_run(folder.path).records) == 7
    path.write_bytes(b"{}\n" + whole)
    with pytest.raises(RunDirError, match=r"records.jsonl, line 1: Object missing required field"):
        load_run(folder.path)


def test_names_that_do_not_exist_are_answered_with_those_that_do(tmp_path: Path) -> None:
    wish = make_wish(tmp_path, {}, {})
    with pytest.raises(WorkloadError, match=r"--set 'fast' does not exist; there are demo, quick"):
        chosen_cells(replace(wish, set_name="fast"))
    with pytest.raises(WorkloadError, match=r"--cells 'T2T@9' does not exist; there are A2S@1, A2T@1"):
        chosen_cells(replace(wish, cells=("T2T@9",)))
    assert [cell.name for cell in chosen_cells(replace(wish, cells=("A2T@1", "T2T@2")))] == ["A2T@1", "T2T@2"]


def test_a_run_directory_of_a_gate_that_was_killed_while_it_wrote_its_wish_is_taken(tmp_path: Path) -> None:
    (tmp_path / "run" / "sessions").mkdir(parents=True)
    (tmp_path / "run" / "wish.json.part").write_bytes(b"{")
    create(tmp_path / "run").write_wish(b"{}")
    assert not (tmp_path / "run" / "wish.json.part").exists()


def test_a_run_directory_that_holds_something_or_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("x")
    with pytest.raises(RunDirError, match="exists and is not an empty folder"):
        rundir.create(tmp_path / "full")
    with pytest.raises(RunDirError, match=r"cannot be written \(Not a directory\)"):
        rundir.create(tmp_path / "full" / "x" / "run")
    with pytest.raises(RunDirError, match=r"holds no plan.json"):
        rundir.existing(tmp_path / "full")


def test_session_files_are_replaced_whole(tmp_path: Path) -> None:
    folder = carry_out(make_wish(tmp_path, {}, {}, sessions=1, cells=("T2T@2",)), Notes())
    assert not list(folder.path.rglob("*.part"))
    for path in folder.path.glob("sessions/*/session.json"):
        assert json.loads(path.read_text())["problems"] == []


class Hurried(Notes):
    """Notes whose clock is a day ahead from the first step on that ends with `text`."""

    def __init__(self, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.text, self.ahead_s = text, 0.0
        monkeypatch.setattr("gate.run.time", self)

    perf_counter_ns = staticmethod(time.perf_counter_ns)

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead_s

    def advance(self, done: int, total: int, text: str) -> None:
        super().advance(done, total, text)
        if text.endswith(self.text):
            self.ahead_s = 86400.0


def test_a_run_stopped_with_two_base_sessions_and_one_of_head_judges_no_speed_until_it_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wish = make_wish(
        tmp_path, {}, {"token_ms": 20}, seed=next(s for s in range(99) if session_order(2, s) == BASE_INSIDE)
    )
    with monkeypatch.context() as hurried:
        folder = carry_out(wish, Hurried("03-base T2T@2", hurried), stop_after_s=3600)
    done = [session.id for session in folder.load().sessions]
    assert done == ["01-head", "02-base", "03-base"]
    for _ in range(2):  # when it stops, and from its files alone
        found = write_report(rundir.existing(folder.path))
        assert (found.code, {cell.verdict for cell in found.comparisons.cells}) == (2, {"no verdict"})
    report, facts = folder.report.read_text(), json.loads((folder.path / "report.json").read_text())
    assert report.startswith("### ⚖️ gate: unfinished, 3 of 4 planned sessions measured · 0 regressions,")
    assert facts["headline"].startswith("gate: unfinished, 3 of 4 planned sessions measured")
    assert report.count("no verdict: 3 of 4 planned sessions measured; finish with --resume |") == 2
    notes = Notes()
    whole = write_report(resume(folder.path, notes))
    assert notes.said[0] == (
        "left: 1 of 4 sessions (head), with 2 cells and 8 measured requests in all, at most 72 tokens"
    )
    assert not any("took" in said for said in notes.said)
    assert notes.steps == ["6/8 04-head boots", "6/8 04-head T2T@1", "7/8 04-head T2T@2"]
    assert (whole.code, {cell.verdict for cell in whole.comparisons.cells}) == (1, {"regression"})


def test_a_resumed_run_counts_what_is_done_wherever_it_stands_in_the_order(tmp_path: Path) -> None:
    folder = carry_out(make_wish(tmp_path, {}, {}), Notes())
    first = folder.load().sessions[0].id
    (folder.session(first) / "records.jsonl").unlink()
    notes = Notes()
    resume(folder.path, notes)
    assert notes.steps == [f"6/8 {first} boots", f"6/8 {first} T2T@1", f"7/8 {first} T2T@2"]


BASE_INSIDE = ["head", "base", "base", "head"]


def test_a_session_that_cannot_reach_its_first_cells_end_in_time_is_not_booted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wish = make_wish(tmp_path, {}, {}, sessions=1, cells=("T2T@2",))
    with monkeypatch.context() as hurried:
        folder = carry_out(wish, Hurried("T2T@2", hurried), stop_after_s=3600)
    (first,) = folder.load().sessions
    folder.write_session(msgspec.structs.replace(first, boot_seconds=500.0))
    notes = Notes()
    resume(folder.path, notes, stop_after_s=300)
    assert (notes.said[-1], notes.steps) == ("stopped by --stop-after", [])
    resume(folder.path, notes, stop_after_s=900)
    assert len(folder.load().sessions) == 2


def test_what_is_left_is_said_with_the_name_of_the_session_that_was_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wish = make_wish(tmp_path, {}, {}, cells=("T2T@2",))
    with monkeypatch.context() as hurried:
        folder = carry_out(wish, Hurried("T2T@2", hurried), stop_after_s=3600)
    notes = Notes()
    order = resume(folder.path, notes).load().plan.order
    assert f"left: 3 of 4 sessions ({' '.join(order[1:])}), with 3 cells" in notes.said[0]
    (timed,) = [said for said in notes.said if "took" in said]
    assert re.fullmatch(rf"session 02-{order[1]} took \d+ s; 2 sessions left, about \d+ s", timed)


def test_a_stopped_run_ends_at_a_cell_boundary_and_goes_on_in_its_own_slots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wish, notes = make_wish(tmp_path, {}, {}, sessions=1), Hurried("T2T@1", monkeypatch)
    folder = carry_out(wish, notes, stop_after_s=3600)
    assert notes.said[-1] == "stopped by --stop-after"
    (begun,) = folder.load().sessions
    assert begun.slot == 0 and begun.problems == [] and {r.cell for r in folder.load().records} == {"T2T@1"}
    assert run_git(wish.repository, "worktree", "list").count("\n") == 0
    monkeypatch.undo()
    whole = resume(folder.path, Notes()).load()
    assert [session.slot for session in whole.sessions] == [0, 1]
    assert len(whole.records) == 2 * 9 and all(record.ok for record in whole.records)
    assert [session.boots for session in whole.sessions] == [2, 1]


def test_the_snapshot_of_a_working_tree_stays_until_all_is_measured_and_then_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wish = make_wish(tmp_path, {}, {}, choices=(ArmChoice("arm", "."),), sessions=1)
    copy = wish.run_dir / "arms" / "arm"
    with monkeypatch.context() as hurried:
        folder = carry_out(wish, Hurried("T2T@1", hurried), stop_after_s=3600)
    assert (copy / "engine").is_dir()
    (wish.repository / "engine" / "later.py").write_text("changed = True\n")
    whole = resume(folder.path, Notes()).load()
    assert [session.boots for session in whole.sessions] == [2]
    assert list(copy.parent.iterdir()) == []
    notes = Notes()
    assert resume(folder.path, notes).load() == whole
    assert notes.said == [] and list(copy.parent.iterdir()) == []


def test_keep_leaves_the_snapshot_of_a_working_tree(tmp_path: Path) -> None:
    wish = make_wish(tmp_path, {}, {}, choices=(ArmChoice("arm", "."),), sessions=1, cells=("T2T@2",), keep=True)
    carry_out(wish, Notes())
    assert (wish.run_dir / "arms" / "arm" / "engine").is_dir()


def test_resuming_keeps_whole_sessions_and_the_commits_of_the_plan_though_head_has_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wish = make_wish(tmp_path, {}, {}, sessions=1, cells=("T2T@2",))
    folder = carry_out(wish, Notes())
    first, second = (folder.session(session.id) for session in folder.load().sessions)
    kept, plan = (first / "records.jsonl").read_bytes(), folder.load().plan
    (second / "records.jsonl").write_bytes(b"")
    run_git(wish.repository, "commit", "--quiet", "--allow-empty", "--message", "moved on")
    monkeypatch.chdir(tmp_path)
    data = resume(folder.path, Notes()).load()
    assert data.plan == plan
    assert (first / "records.jsonl").read_bytes() == kept
    assert [len((path / "records.jsonl").read_bytes().splitlines()) for path in (first, second)] == [4, 4]


def test_a_run_whose_evidence_changed_is_not_resumed(tmp_path: Path) -> None:
    wish = make_wish(tmp_path, {}, {}, sessions=1, cells=("T2T@2",))
    folder = plan_only(wish, Notes())
    (folder.path / "model" / "config.json").write_text("{}")
    (wish.workloads / "prompts.jsonl").write_text('{"id": "p00", "text": "another"}')
    with pytest.raises(RunDirError, match=r"cannot be resumed: the weights, the workload changed since its plan"):
        resume(folder.path, Notes())


def test_a_planned_run_is_carried_out_by_resuming_it(tmp_path: Path) -> None:
    folder = plan_only(make_wish(tmp_path, {}, {}, sessions=1, cells=("T2T@2",)), Notes())
    assert len(resume(folder.path, Notes()).load().records) == 8


def test_a_wish_survives_its_file_with_its_paths_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    choice = ArmChoice("base", "", Path("tree"), ("--disable", "x"), (("A", "1"),))
    wish = Wish((choice,), Path("repo"), tmp_path / "run", model=Path("models/m"), librispeech="l", workloads=Path("w"))
    found = decode(encode(wish))
    assert found == replace(
        wish,
        choices=(replace(choice, directory=tmp_path / "tree"),),
        repository=tmp_path / "repo",
        model=tmp_path / "models" / "m",
        librispeech=str(tmp_path / "l"),
        workloads=tmp_path / "w",
    )


def test_a_record_that_stands_twice_is_refused_by_its_line(tmp_path: Path) -> None:
    folder = carry_out(make_wish(tmp_path, {}, {}, sessions=1, cells=("T2T@2",)), Notes())
    path = folder.session(folder.load().sessions[0].id) / "records.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines, lines[1]]))
    with pytest.raises(
        RunDirError, match=rf"records\.jsonl, line {len(lines) + 1}: request 1 of T2T@2 stands in line 2"
    ):
        folder.load()


def test_a_run_that_failed_before_its_plan_does_not_block_the_same_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wish = make_wish(tmp_path, {}, {})
    prompts = (wish.workloads / "prompts.jsonl").read_text()
    (wish.workloads / "prompts.jsonl").write_text("{")
    with pytest.raises(WorkloadError, match=r"prompts\.jsonl, line 1"):
        plan_only(wish, Notes())
    assert not wish.run_dir.exists()
    (wish.workloads / "prompts.jsonl").write_text(prompts)
    with monkeypatch.context() as full:
        full.setattr(rundir, "LEAST_FREE_BYTES", 2**70)
        with pytest.raises(RunDirError, match="MiB free"):
            plan_only(wish, Notes())
    assert not wish.run_dir.exists()
    (wish.run_dir / "sessions").mkdir(parents=True)  # what a failure later on leaves
    assert plan_only(wish, Notes()).load().plan.set_name == "quick"


def test_arguments_that_a_server_refuses_on_its_first_boot_are_wrong_usage_with_its_own_sentence(
    tmp_path: Path,
) -> None:
    wish = make_wish(tmp_path, {}, {"exit_at_start": 64}, sessions=1, cells=("T2T@2",))
    told = "head's server refused its command line: the fake gives up at once: no such switch"
    with pytest.raises(ArmError, match=told):
        carry_out(wish, Notes())


def test_a_server_that_has_served_before_and_then_ends_with_64_is_broken_and_no_usage_error(tmp_path: Path) -> None:
    wish = make_wish(tmp_path, {}, {"usage_after": 1}, cells=("T2T@2",))
    folder = carry_out(wish, Notes())
    first, second = (session for session in folder.load().sessions if session.arm == "head")
    assert first.problems == [] and "the server refused its command line: no more boots" in second.problems[0]
    assert write_report(folder).code == 1


@pytest.mark.parametrize("failure", ["tiny", "hub"])
def test_a_run_that_fails_while_it_is_prepared_leaves_nothing_that_blocks_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: str
) -> None:
    wish = make_wish(tmp_path, {}, {}, sessions=1, cells=("T2T@2",))

    def fail(target: Path | list[Arm], *_: object) -> None:
        place = wish.run_dir / "half"
        place.mkdir()
        (place / "file").write_text("half of it")
        raise (WorkloadError if failure == "hub" else ArmError)("it failed")

    with monkeypatch.context() as broken:
        broken.setattr("gate.wish.librispeech_from_hub" if failure == "hub" else "gate.run.default_model", fail)
        with pytest.raises(ValueError, match="it failed"):
            plan_only(replace(wish, librispeech="hub" if failure == "hub" else None), Notes())
    assert sorted(path.name for path in wish.run_dir.rglob("*")) == ["sessions", "wish.json"]
    assert plan_only(wish, Notes()).load().plan.set_name == "quick"


def test_a_run_killed_before_its_plan_begins_anew_by_the_same_command_and_by_resume(tmp_path: Path) -> None:
    wish = make_wish(tmp_path, {}, {}, sessions=1, cells=("T2T@2",))
    folder = rundir.create(wish.run_dir)
    folder.write_wish(encode(wish))
    (folder.path / "arms" / "base").mkdir(parents=True)
    (folder.path / "arms" / "base" / "half.py").write_text("half of a tree")
    assert len(resume(folder.path, Notes()).load().records) == 8
    (folder.path / "plan.json").unlink()
    assert plan_only(wish, Notes()).load().sessions == []


def test_two_gates_are_never_at_work_in_one_run(tmp_path: Path) -> None:
    wish = make_wish(tmp_path, {}, {}, sessions=1, cells=("T2T@2",))
    held = rundir.create(wish.run_dir)
    told = f"another gate is at work in {wish.run_dir}; wait for it, or end it first"
    with rundir.claimed(held), pytest.raises(RunDirError, match=told):
        plan_only(wish, Notes())
    folder = plan_only(wish, Notes())
    with rundir.claimed(folder), pytest.raises(RunDirError, match=told):
        resume(folder.path, Notes())
    assert len(resume(folder.path, Notes()).load().records) == 8


def test_a_report_and_its_json_name_the_model_by_its_folder_and_not_by_where_it_lies(tmp_path: Path) -> None:
    model = tmp_path / "private" / "weights"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    folder = carry_out(make_wish(tmp_path, {}, {}, model=model, sessions=1, cells=("T2T@2",)), Notes())
    write_report(folder)
    for path in (folder.report, folder.path / "report.json"):
        assert "weights" in path.read_text() and str(model) not in path.read_text()
    assert "--model weights" in folder.report.read_text()


def test_a_run_of_one_session_says_so_in_the_singular(tmp_path: Path) -> None:
    notes = Notes()
    plan_only(make_wish(tmp_path, {}, {}, choices=(ArmChoice("arm", "HEAD"),), sessions=1, cells=("T2T@2",)), notes)
    assert notes.said[1].startswith("price: 1 session (arm), each with 1 cell, 4 requests measured and 0 in warm waves")
