"""Workloads: loaded, checked, hashed and put in order."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from gate.cell import Cell, parse_cells
from gate.workload import (
    CLIP_INSTRUCTION,
    WorkloadError,
    default_root,
    librispeech_from_hub,
    load_cells,
    load_clips,
    load_librispeech,
    load_prompts,
    load_questions,
    make_ids,
    ordered,
    warm_items,
    workload_hash,
)
from tests.gate.trees import make_librispeech, make_workloads, write_tone


def test_prompts_and_clips_become_items(tmp_path: Path) -> None:
    root = make_workloads(tmp_path / "w")
    assert [(item.id, item.text) for item in load_prompts(root).items][:2] == [
        ("p00", "prompt number 0"),
        ("p01", "prompt number 1"),
    ]
    clip = load_clips(root).items[1]
    assert (clip.id, clip.text, clip.audio, clip.audio_seconds) == ("c01", CLIP_INSTRUCTION, "clips/c01.flac", 0.5)
    assert (clip.reference, clip.speaker) == ("the cat sat", "s1")


def test_the_gates_own_workloads_are_whole() -> None:
    root = default_root()
    assert len(load_prompts(root).items) == 64
    assert len(load_questions(root).items) == 48
    assert 28 <= len(load_clips(root).items) <= 36
    assert {"demo", "quick", "pr", "h200", "h200-audio"} <= set(load_cells(root))


def test_a_subset_in_librispeechs_layout_gives_every_clip_with_its_transcript(tmp_path: Path) -> None:
    subset = make_librispeech(tmp_path, clips=3)
    (tmp_path / "refs").mkdir()
    (tmp_path / "refs" / "all.trans.txt").write_text("11-22-0000 SOMETHING ELSE\n")
    workload = load_librispeech(subset)
    assert workload.label == "test-tiny, 3 clips"
    assert [item.id for item in workload.items] == ["11-22-0000", "11-22-0001", "11-22-0002"]
    item = workload.items[2]
    assert (item.reference, item.speaker, item.audio_seconds) == ("THE WORDS OF CLIP 2", "11", 0.75)
    assert item.audio == str(subset / "11" / "22" / "11-22-0002.flac")
    assert len(load_librispeech(tmp_path).items) == 3


def empty_words(transcripts: Path) -> None:
    words = "THE WORDS OF CLIP 1"
    transcripts.write_text(transcripts.read_text().replace(words, " "))


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda chapter: (chapter / "11-22.trans.txt").unlink(), r"11-22.trans.txt cannot be read"),
        (lambda chapter: (chapter / "11-22.trans.txt").write_text("11-22-0000 A\n"), r"has no line for 11-22-0001"),
        (lambda chapter: (chapter / "11-22-0001.flac").write_bytes(b"no"), r"11-22-0001.flac is not readable audio"),
        (lambda chapter: [path.unlink() for path in chapter.glob("*.flac")], r"holds no SPEAKER/CHAPTER"),
        (
            lambda chapter: (chapter / "11-22-0002.flac").unlink(),
            r"has a line for 11-22-0002, but there is no 11-22-0002.flac",
        ),
        (
            lambda chapter: empty_words(chapter / "11-22.trans.txt"),
            r"11-22.trans.txt has no words for 11-22-0001; write them",
        ),
    ],
)
def test_a_spoilt_librispeech_folder_is_named(tmp_path: Path, spoil: object, told: str) -> None:
    subset = make_librispeech(tmp_path)
    spoil(subset / "11" / "22")  # type: ignore[operator]
    with pytest.raises(WorkloadError, match=told):
        load_librispeech(subset)


def test_the_hub_without_a_network_is_one_sentence_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("Couldn't reach the Hub\nmore lines")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    told = r"^openslr/librispeech_asr cannot be had from the hub \(Couldn't reach the Hub\); name a folder: --librispeech PATH$"
    with pytest.raises(WorkloadError, match=told):
        librispeech_from_hub(tmp_path)


def test_rows_from_the_hub_are_written_in_librispeechs_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    write_tone(tmp_path / "a.flac", 300, 0.5)
    row = {"id": "7-8-0000", "text": "HELLO THERE", "audio": {"bytes": (tmp_path / "a.flac").read_bytes(), "path": "x"}}
    table = datasets.Dataset.from_dict({key: [value] for key, value in row.items()})
    monkeypatch.setattr(table, "cast_column", lambda *_: table)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: table)
    librispeech_from_hub(tmp_path / "out")
    (item,) = librispeech_from_hub(tmp_path / "out").items
    (lines,) = (path.read_text() for path in (tmp_path / "out").rglob("*.trans.txt"))
    assert lines == "7-8-0000 HELLO THERE\n"
    assert (item.id, item.reference, item.speaker, item.audio_seconds) == ("7-8-0000", "HELLO THERE", "7", 0.5)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"id": "a"}', r"prompts.jsonl, line 1: Object missing required field `text`"),
        ('{"id": "a", "text": "b", "extra": 1}', r"unknown field `extra`"),
        ('{"id": "a", "text": "b"}\n{"id": "a", "text": "c"}', r"has the id 'a' twice"),
        ("", r"'prompts' in .* is empty"),
    ],
)
def test_a_spoilt_prompt_file_names_its_line(tmp_path: Path, line: str, told: str) -> None:
    (tmp_path / "prompts.jsonl").write_text(line)
    with pytest.raises(WorkloadError, match=told):
        load_prompts(tmp_path)


def test_a_manifest_that_names_an_absent_clip_is_an_error(tmp_path: Path) -> None:
    root = make_workloads(tmp_path / "w")
    (root / "clips" / "c02.flac").unlink()
    with pytest.raises(WorkloadError, match=r"manifest.jsonl names clips/c02.flac, which is not under"):
        load_clips(root)


def test_the_hash_covers_ids_texts_references_and_audio_bytes(tmp_path: Path) -> None:
    root = make_workloads(tmp_path / "w", prompts=1, clips=1)
    parts = [b"p00", b"prompt number 0", b"", b"", b"c00", CLIP_INSTRUCTION.encode(), b"the cat sat"]
    parts.append((root / "clips" / "c00.flac").read_bytes())
    expected = hashlib.sha256(b"".join(len(part).to_bytes(8, "little") + part for part in parts)).hexdigest()
    assert workload_hash([load_prompts(root), load_clips(root)]) == expected
    (root / "prompts.jsonl").write_text(json.dumps({"id": "p00", "text": "prompt number 1"}))
    assert workload_hash([load_prompts(root), load_clips(root)]) != expected


def test_the_order_depends_on_the_seed_and_the_workload_alone_and_repeats_where_items_run_out(tmp_path: Path) -> None:
    items = load_prompts(make_workloads(tmp_path / "w", prompts=5)).items
    ids = [item.id for item in ordered(items, 7, 0, "prompts")]
    assert ids == [item.id for item in ordered(items[::-1], 7, 0, "prompts")]
    assert sorted(ids[:5]) == ["p00", "p01", "p02", "p03", "p04"] and ids[5:] == ids[:2]
    orders = {tuple(item.id for item in ordered(items, 5, seed, "prompts")) for seed in range(8)}
    assert len(orders) > 1
    assert [item.id for item in warm_items(items, 6, 0, "prompts")] == [*ids[4::-1], ids[4]]


def test_a_transcript_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    folder = make_librispeech(tmp_path)
    path = folder / "11" / "22" / "11-22.trans.txt"
    path.write_bytes(b"11-22-0000 CAF\xc9\n")
    with pytest.raises(WorkloadError, match=r"11-22\.trans\.txt is not UTF-8 at byte 14"):
        load_librispeech(folder)


def ids_cell(**changes: object) -> Cell:
    row = {"task": "T2T", "concurrency": 2, "requests": 5, "warm_waves": 1, "workload": "ids", "prompt_tokens": 6}
    words = ", ".join(f"{key} = {json.dumps(value)}" for key, value in {**row, **changes}.items())
    (cell,) = parse_cells(f"version = 1\n[sets.small]\ncells = [{{ {words} }}]\n")["small"].cells
    return cell


def test_prompts_of_random_ids_are_all_different_and_depend_on_seed_cell_and_number_alone(tmp_path: Path) -> None:
    cell = ids_cell(ids_below=1000)
    found = make_ids(cell, 3, tmp_path)
    assert (found.name, found.label) == ("ids T2T@2", "7 prompts of 6 random ids below 1000")
    assert [item.id for item in found.items] == [f"T2T@2-{number:04d}" for number in range(7)]
    prompts = [tuple(item.token_ids or ()) for item in found.items]
    assert {len(prompt) for prompt in prompts} == {6} and len(set(prompts)) == 7
    assert all(0 <= token < 1000 for prompt in prompts for token in prompt)
    longer = make_ids(ids_cell(ids_below=1000, requests=9), 3, tmp_path)
    assert longer.items[:7] == found.items
    assert make_ids(cell, 4, tmp_path).items[0].token_ids != found.items[0].token_ids
    assert make_ids(ids_cell(ids_below=1000, concurrency=3), 3, tmp_path).items[0].token_ids != found.items[0].token_ids


def test_warm_and_measured_prompts_of_random_ids_never_are_the_same(tmp_path: Path) -> None:
    workload = make_ids(ids_cell(), 0, tmp_path)
    measured, warm = ordered(workload.items, 5, 0, workload.name), warm_items(workload.items, 2, 0, workload.name)
    assert {item.id for item in measured}.isdisjoint(item.id for item in warm)


def test_ids_that_can_not_all_be_different_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=r"T2T@2 wants 7 different prompts of 1 ids below 8; raise prompt_tokens"):
        make_ids(ids_cell(prompt_tokens=1, ids_below=8), 0, tmp_path)


@pytest.mark.parametrize("length", [3, 4, 5, 6])
def test_half_of_all_prompts_that_there_are_can_be_had_and_not_one_more(tmp_path: Path, length: int) -> None:
    few = {"warm_waves": 0, "prompt_tokens": length, "ids_below": 2}
    half = 2 ** (length - 1)
    assert len(make_ids(ids_cell(requests=half, **few), 0, tmp_path).items) == half
    with pytest.raises(WorkloadError, match=f"wants {half + 1} different prompts of {length} ids below 2"):
        make_ids(ids_cell(requests=half + 1, **few), 0, tmp_path)


def test_the_longest_and_widest_prompt_is_drawn(tmp_path: Path) -> None:
    cell = ids_cell(requests=1, warm_waves=0, prompt_tokens=131_072, ids_below=1 << 20)
    (item,) = make_ids(cell, 0, tmp_path).items
    assert item.token_ids is not None and len(item.token_ids) == 131_072 and max(item.token_ids) < 1 << 20


def test_the_hash_covers_random_ids(tmp_path: Path) -> None:
    workload = make_ids(ids_cell(requests=1, warm_waves=0), 0, tmp_path)
    (item,) = workload.items
    parts = [b"T2T@2-0000", " ".join(map(str, item.token_ids or ())).encode(), b"", b""]
    expected = hashlib.sha256(b"".join(len(part).to_bytes(8, "little") + part for part in parts)).hexdigest()
    assert workload_hash([workload]) == expected
