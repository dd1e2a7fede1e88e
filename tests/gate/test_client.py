"""The load client against a real server: what it sends, what it stamps, and what it calls a failure."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gate.cell import Cell
from gate.client import Limits, Target, measure
from gate.generate import GenerateDoor
from gate.record import Item, Record
from gate.session import serving
from tests.gate.test_session import make_arm
from tests.gate.trees import write_tone


def cell(task: str = "T2T", concurrency: int = 1, **changes: object) -> Cell:
    fields: dict[str, object] = {
        "name": f"{task}@{concurrency}",
        "task": task,
        "concurrency": concurrency,
        "requests": 4,
        "warm_waves": 1,
        "max_tokens": 8,
        "ignore_eos": True,
        "max_frames": 6 if task.endswith("S") else None,
        "primary": "tok/s",
        "workload": "prompts",
        "greedy": True,
    }
    return Cell(**{**fields, **changes})  # type: ignore[arg-type]


def prompts(count: int) -> list[Item]:
    return [
        Item(id=f"p{n}", text=f"prompt {n}", audio=None, audio_seconds=0.0, reference=None, speaker=None)
        for n in range(count)
    ]


@contextmanager
def fake(tmp_path: Path, **behaviour: object) -> Iterator[Target]:
    arm, boot = make_arm(tmp_path, **behaviour)
    with serving(arm, boot, tmp_path / "server.log") as server:
        yield Target(server.url, "01-base", "base", time.perf_counter_ns(), Limits(request_s=5.0, silence_s=1.0))


def run(target: Target, what: Cell, items: list[Item], warm: list[Item], root: Path) -> list[Record]:
    return measure(target, what, warm, items, root).records


def test_a_greedy_cell_asks_for_top_two_and_trace_and_another_does_not() -> None:
    body = json.loads(GenerateDoor().body(cell(), prompts(1)[0], Path()))
    assert body == {
        "text": "prompt 0",
        "output": ["text"],
        "stream": True,
        "max_tokens": 8,
        "temperature": 0.0,
        "ignore_eos": True,
        "top_logprobs": 2,
        "trace": True,
    }
    assert "trace" not in json.loads(GenerateDoor().body(cell(greedy=False), prompts(1)[0], Path()))


def test_a_speech_cell_sends_the_clip_as_base64_and_asks_for_audio_of_a_fixed_length(tmp_path: Path) -> None:
    write_tone(tmp_path / "clips" / "a.flac", 300, 0.1)
    item = Item(id="a", text="Say.", audio="clips/a.flac", audio_seconds=0.1, reference="x", speaker=None)
    body = json.loads(GenerateDoor().body(cell("A2S"), item, tmp_path))
    assert base64.b64decode(body["audio"][0]) == (tmp_path / "clips" / "a.flac").read_bytes()
    assert body["output"] == ["text", "audio"]
    assert body["speech"] == {"max_frames": 6, "ignore_eos": True}


def test_every_event_of_a_reply_is_stamped_in_order_and_added_up(tmp_path: Path) -> None:
    with fake(tmp_path, token_ms=5) as target:
        (record,) = run(target, cell(), prompts(1), [], tmp_path)
    assert record.ok and record.error is None
    assert [event.tokens for event in record.events] == [1] * 8
    stamps = [event.t_us for event in record.events]
    assert stamps == sorted(stamps) and stamps[0] >= 5_000 and record.e2e_us >= stamps[-1] >= 40_000
    assert record.token_ids == [hashlib.sha256(f"prompt 0/{n}".encode()).digest()[0] for n in range(8)]
    assert sum(event.chars for event in record.events) == len(record.text)
    assert record.top2[0] == (record.token_ids[0], record.token_ids[0] + 1, -0.5, -1.5)
    assert record.trace == [(step, 1, 1) for step in range(1, 9)]
    assert (record.completion_tokens, record.prompt_tokens, record.finish_reason) == (8, 2, "length")


def test_speech_is_counted_in_samples_and_hashed(tmp_path: Path) -> None:
    with fake(tmp_path) as target:
        first, again = run(target, cell("T2S"), prompts(1) * 2, [], tmp_path)
    assert first.ok and first.pcm_samples == 6 * 1920 == sum(event.pcm_samples for event in first.events)
    assert first.pcm_sha256 == again.pcm_sha256 and len(str(first.pcm_sha256)) == 64
    assert first.audio_finish_reason == "length"


def test_warm_waves_come_first_and_the_closed_loop_keeps_c_requests_in_flight(tmp_path: Path) -> None:
    with fake(tmp_path, token_ms=4) as target:
        records = run(target, cell(concurrency=2), prompts(6), prompts(2), tmp_path)
    assert [record.warm for record in records] == [True] * 2 + [False] * 6
    measured = records[2:]
    assert [record.index for record in measured] == list(range(6))
    assert {record.client for record in measured} == {0, 1}
    spans = [(record.t0_ns, record.t0_ns + record.e2e_us * 1000) for record in measured]
    assert min(start for start, _ in spans) >= max(r.t0_ns + r.e2e_us * 1000 for r in records[:2])
    overlaps = [sum(start <= moment < end for start, end in spans) for moment, _ in spans]
    assert max(overlaps) == 2


def test_failures_are_records_that_say_why_and_the_rest_goes_on(tmp_path: Path) -> None:
    items = [
        Item(id=name, text=text, audio=None, audio_seconds=0.0, reference=None, speaker=None)
        for name, text in (("a", "fine"), ("b", "BOOM here"), ("c", "NO thanks"), ("d", "fine too"))
    ]
    with fake(tmp_path, raise_on="BOOM", refuse_on="NO") as target:
        records = run(target, cell(), items, [], tmp_path)
    assert [record.ok for record in records] == [True, False, False, True]
    assert records[1].error == "internal: planted"
    assert records[2].error == "HTTP 400: refused (text): this prompt is refused"


@pytest.mark.parametrize(
    ("behaviour", "task", "error"),
    [
        ({"cut": True}, "T2T", "the stream ended without a final line"),
        ({"short_by": 8}, "T2T", "no tokens"),
        ({"short_by": -8}, "T2T", "counted more tokens than asked for: 16 of 8"),
        ({"lose_audio": True}, "T2S", "audio lost: usage says 11520 samples, 7680 arrived"),
    ],
)
def test_a_reply_that_is_not_whole_is_a_failure(
    tmp_path: Path, behaviour: dict[str, object], task: str, error: str
) -> None:
    with fake(tmp_path, **behaviour) as target:
        (record,) = run(target, cell(task), prompts(1), [], tmp_path)
    assert (record.ok, record.error) == (False, error)


def test_short_output_and_absent_audio_are_facts_for_the_verdict_and_no_failure_here(tmp_path: Path) -> None:
    with fake(tmp_path, short_by=3, no_audio=True) as target:
        (record,) = run(target, cell("T2S"), prompts(1), [], tmp_path)
    assert (record.ok, record.completion_tokens, record.pcm_samples, record.pcm_sha256) == (True, 5, 0, None)


def test_a_server_that_dies_leaves_records_for_every_request(tmp_path: Path) -> None:
    with fake(tmp_path, die_after=2) as target:
        records = run(target, cell(), prompts(4), [], tmp_path)
    assert [record.ok for record in records] == [True, False, False, False]
    assert str(records[1].error).startswith("ServerDisconnectedError: ")
    # While the process goes its port resets a connection; once it is gone the port refuses.
    names = {str(record.error).partition(":")[0] for record in records[2:]}
    assert names <= {"ClientConnectorError", "ClientOSError", "ServerDisconnectedError"}


def test_a_server_that_hangs_costs_two_time_outs_and_the_rest_is_not_sent(tmp_path: Path) -> None:
    began = time.monotonic()
    with fake(tmp_path, hang_after=2) as target:
        records = run(target, cell(), prompts(6), [], tmp_path)
    assert time.monotonic() - began < 15
    assert [record.ok for record in records] == [True] + [False] * 5
    assert records[1].error == "timed out (limits: 5 s a request, 1 s of silence)"
    assert {record.error for record in records[3:]} == {"not sent: 2 requests in a row had timed out"}


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (b'{"zz": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "maximum recursion depth exceeded"),
        (b'{"usage": {"completion_tokens": 1' + b"0" * 30 + b"}}", "Expected `int` <= 2147483647"),
        (b'{"usage": {"prompt_tokens": -1}}', "Expected `int` >= 0"),
        (b'{"usage": {"audio_samples": 1' + b"0" * 30 + b"}}", "Expected `int` <= 2147483647"),
        (b'{"token_ids": [1, 99999999999999999999]}', "Expected `int` <= 2147483647"),
        (b'{"trace": [{"step": 4294967296, "bucket": 1, "rows": 1}]}', "Expected `int` <= 2147483647"),
        (b'{"sample_rate": -24000}', "Expected `int` >= 0"),
        (b'{"logprobs": [{"token_ids": [1], "logprobs": [-0.5]}]}', "Expected `array` of length >= 2"),
    ],
)
def test_a_line_that_no_table_could_hold_is_the_failure_of_its_request(line: bytes, fault: str) -> None:
    error = str(GenerateDoor().read([(1000, line), (2000, b'{"finished": true}')]).error)
    assert error.startswith("a line of the stream is not what the contract says: ") and fault in error


def test_a_refusal_nested_too_deep_is_cut() -> None:
    assert GenerateDoor().refusal(b"[" * 100_000) == "[" * 200


def test_a_line_longer_than_any_buffer_arrives_whole(tmp_path: Path) -> None:
    pcm = bytes(2 * 600_000)

    async def serve_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        long = json.dumps({"pcm": base64.b64encode(pcm).decode(), "token_ids": [1], "text": "x"}).encode()
        last = json.dumps({"finished": True, "usage": {"completion_tokens": 1, "audio_samples": 600_000}}).encode()
        body = long + b"\n" + last + b"\n"
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()
        writer.close()

    with threaded_server(serve_one) as url:
        target = Target(url, "01-base", "base", time.perf_counter_ns())
        (record,) = run(target, cell("T2S", max_tokens=1), prompts(1), [], tmp_path)
    assert record.ok and record.pcm_samples == 600_000
    assert record.pcm_sha256 == hashlib.sha256(pcm).hexdigest()


@contextmanager
def threaded_server(handler: object) -> Iterator[str]:
    import threading

    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(handler, "127.0.0.1", 0))  # type: ignore[arg-type]
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        server.close()
        loop.close()
