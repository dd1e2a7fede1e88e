"""What two boots of the real server say: speech has the same codes and bytes alone, in company and on another boot."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.server.serving import Server, serving
from tests.shared import REPOSITORY

REQUESTS, FRAMES = 16, 10


def speak(server: Server, index: int) -> tuple[list[list[int]], str]:
    lines = (REPOSITORY / "workloads" / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    answer = server.answer(
        text=json.loads(lines[index])["text"],
        output=["text", "audio"],
        max_tokens=8,
        ignore_eos=True,
        speech={"max_frames": FRAMES, "seed": index, "ignore_eos": True, "codes": True},
    )
    return answer["audio"]["codes"], answer["audio"]["data"]


def four_at_a_time(server: Server) -> list[tuple[list[list[int]], str]]:
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(lambda index: speak(server, index), range(REQUESTS)))


def test_16_speech_requests_are_equal_alone_on_boot_a_and_four_at_a_time_on_boots_a_and_b(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    with serving(tiny_checkpoint, tmp_path / "a") as boot_a:
        alone = [speak(boot_a, index) for index in range(REQUESTS)]
        together_a = four_at_a_time(boot_a)
        shared_steps = boot_a.metrics()
    with serving(tiny_checkpoint, tmp_path / "b") as boot_b:
        together_b = four_at_a_time(boot_b)
    assert [len(codes) for codes, _ in alone] == [FRAMES] * REQUESTS
    assert together_a == alone
    assert together_b == alone
    assert len({wave for _, wave in alone}) == REQUESTS
    # Company was real: the Talker's steps held more rows than one on average.
    assert shared_steps["talker_rows_total"] > 1.3 * shared_steps["talker_steps_total"]
