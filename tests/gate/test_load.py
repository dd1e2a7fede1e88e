"""The load client's own process: what it answers, where it runs, how late it was, and what its death means."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from pathlib import Path

import msgspec
import psutil
import pytest

from gate import client
from gate.client import lag_of
from gate.load import ClientError, Job, LoadClient, key_headers, load_client
from gate.record import Lag
from gate.run import carry_out, resume, write_report
from gate.verdict import compare
from tests.gate.runs import A2T, T2T, make_run
from tests.gate.test_client import cell, fake, prompts
from tests.gate.test_process import wait_gone
from tests.gate.test_report import rendered
from tests.gate.test_run import Notes, make_wish


def program_of(load: LoadClient) -> psutil.Process:
    """The client itself, under its warden."""
    warden, end = psutil.Process(load.start().pid), time.monotonic() + 10
    while not warden.children():
        assert time.monotonic() < end
        time.sleep(0.01)
    return warden.children()[0]


def test_a_cell_is_measured_in_another_process_on_the_clients_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gate").mkdir()
    (tmp_path / "gate" / "__init__.py").write_text("raise SystemExit('the wrong gate')")
    monkeypatch.chdir(tmp_path)
    core = min(os.sched_getaffinity(0))
    with fake(tmp_path / "server") as target, load_client([core], tmp_path / "client.log") as load:
        job = Job(target, cell(), prompts(1), prompts(3), str(tmp_path))
        found = load.measure(job)
        again = load.measure(job)
        program = program_of(load)
        assert os.sched_getaffinity(program.pid) == {core}
    assert [record.ok for record in found.records] == [True] * 4 == [record.ok for record in again.records]
    assert [record.text for record in found.records] == [record.text for record in again.records]
    assert 0 <= found.lag.p50 <= found.lag.p99 <= found.lag.max
    wait_gone([program.pid])
    assert (tmp_path / "client.log").read_text() == ""


def test_the_client_finds_packages_on_the_callers_import_path_but_runs_this_gate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoy, note = tmp_path / "packages", tmp_path / "note"
    (decoy / "gate").mkdir(parents=True)
    (decoy / "gate" / "__init__.py").write_text("raise SystemExit('the wrong gate')")
    (decoy / "sitecustomize.py").write_text(f"open({str(note)!r}, 'w').close()")
    monkeypatch.setenv("PYTHONPATH", str(decoy))
    with fake(tmp_path / "server") as target, load_client([], tmp_path / "client.log") as load:
        found = load.measure(Job(target, cell(), [], prompts(2), str(tmp_path)))
    assert [record.ok for record in found.records] == [True] * 2
    assert note.exists()


def test_a_client_that_is_killed_is_an_error_with_its_stderr_and_the_next_cell_gets_a_new_one(tmp_path: Path) -> None:
    with fake(tmp_path / "server", token_ms=200) as target, load_client([], tmp_path / "client.log") as load:
        program = program_of(load)
        threading.Timer(0.8, program.kill).start()
        with pytest.raises(ClientError, match=r"the load client was ended by signal 9\n"):
            load.measure(Job(target, cell(), [], prompts(3), str(tmp_path)))
    with fake(tmp_path / "next") as target, load_client([], tmp_path / "client.log") as load:
        broken = msgspec.structs.replace(Job(target, cell("A2T"), [], prompts(1), ""), items=[missing_clip()])
        with pytest.raises(ClientError, match=r"(?s)ended with exit code 1\n.*LibsndfileError|No such file"):
            load.measure(broken)
        assert load.measure(Job(target, cell(), [], prompts(1), "")).records[0].ok


def missing_clip() -> object:
    return msgspec.structs.replace(prompts(1)[0], audio="nowhere.flac")


def test_a_cell_whose_client_was_killed_is_invalid_the_others_count_and_a_resumed_run_measures_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure, doomed = LoadClient.measure, ["T2T@1"]

    def killed_in_the_first_cell(self: LoadClient, job: Job) -> object:
        if job.cell.name in doomed:
            doomed.clear()
            program = program_of(self)
            program.send_signal(signal.SIGSTOP)  # so that it dies in the window and not after it
            threading.Timer(0.3, program.kill).start()
        return measure(self, job)

    monkeypatch.setattr(LoadClient, "measure", killed_in_the_first_cell)
    folder = carry_out(make_wish(tmp_path, {}, {}, sessions=1), Notes())
    outcome = write_report(folder)
    verdicts = {row.cell: row.verdict for row in outcome.comparisons.cells}
    assert verdicts["T2T@1"] == "invalid" and verdicts["T2T@2"] == "no verdict"
    assert outcome.code == 3
    assert "the load client was ended by signal 9" in folder.report.read_text()
    assert "wrong gate" not in folder.report.read_text()
    whole = resume(folder.path, Notes()).load()
    assert not write_report(folder).comparisons.faults
    assert all(record.ok for record in whole.records) and len(whole.records) == 2 * 9


def test_lag_is_a_median_a_99th_percentile_and_the_longest() -> None:
    assert lag_of([float(late) for late in range(1, 101)]) == Lag(50.0, 99.0, 100.0)
    assert lag_of([-0.2, 3.0]) == Lag(0.0, 3.0, 3.0)
    assert lag_of([]) == Lag(0.0, 0.0, 0.0)


def test_a_client_that_is_held_up_says_so(tmp_path: Path) -> None:
    with fake(tmp_path / "server", token_ms=60) as target, load_client([], tmp_path / "client.log") as load:
        program = program_of(load)
        job = Job(target, cell(requests=1), [], prompts(1), str(tmp_path))

        def hold() -> None:
            time.sleep(0.25)
            program.send_signal(signal.SIGSTOP)
            time.sleep(0.15)
            program.send_signal(signal.SIGCONT)

        load.measure(job)
        thread = threading.Thread(target=hold)
        thread.start()
        found = load.measure(job)
        thread.join()
    assert found.lag.max > 100


def late(run_lag: Lag, gap_us: int) -> list[object]:
    run = make_run(
        {"base": [gap_us, gap_us], "head": [gap_us, gap_us]},
        [T2T, A2T],
        info=lambda s: msgspec.structs.replace(s, client_lag={"T2T@1": run_lag} if s.id == "02-head" else {}),
    )
    return [compare(run).late, rendered(run)]


@pytest.mark.parametrize(("gap_us", "limit_ms"), [(2000, 5.0), (9000, 10.0), (90_000, 20.0)])
def test_a_client_is_late_by_a_tenth_of_the_requests_time_but_not_under_5_ms_and_always_over_20(
    gap_us: int, limit_ms: float
) -> None:
    # A request takes 10 ms and ten gaps: 30, 100 and 910 ms.
    [(row,), text] = late(Lag(0.1, limit_ms + 0.1, 99.0), gap_us)
    assert (row.session, row.cell, row.p99_ms, row.limit_ms) == ("02-head", "T2T@1", limit_ms + 0.1, limit_ms)
    told = f"by up to {limit_ms + 0.1:.1f} ms (p99, T2T@1 of 02-head; limit {limit_ms:.1f} ms)"
    assert f"⚠️ client was late in T2T@1: its own loop {told}" in text
    [rows, text] = late(Lag(0.1, limit_ms, 99.0), gap_us)
    assert rows == [] and "was late" not in text


def test_the_key_is_the_gates_own_before_openais(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WALKGATE_GATE_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert key_headers() == {}
    monkeypatch.setenv("OPENAI_API_KEY", "b")
    assert key_headers() == {"Authorization": "Bearer b"}
    monkeypatch.setenv("WALKGATE_GATE_API_KEY", "a")
    assert key_headers() == {"Authorization": "Bearer a"}


def test_the_client_collects_no_garbage_in_the_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    drive = client._Drive.cell

    async def watched(self: client._Drive, *words: object) -> object:
        seen.append(gc.isenabled())
        return await drive(self, *words)  # type: ignore[arg-type]

    monkeypatch.setattr(client._Drive, "cell", watched)
    with fake(tmp_path) as target:
        client.measure(target, cell(), [], prompts(1), tmp_path)
    assert seen == [False] and gc.isenabled()
