"""The committed data files: schema, counts, audio on disk. What the gate makes of them is tested under tests/gate."""

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import soundfile

ROOT = Path(__file__).resolve().parents[2] / "workloads"
TRACES = ROOT.parent / "traces"
SCHEMA = json.loads((ROOT / "SCHEMA.json").read_text(encoding="utf-8"))["$defs"]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


PROMPTS = lines(ROOT / "prompts.jsonl")
QUESTIONS = lines(ROOT / "questions.jsonl")
CLIPS = lines(ROOT / "clips" / "manifest.jsonl")


def faults(value: Any, schema: dict[str, Any], where: str) -> list[str]:
    """What in `value` breaks `schema`; it knows the keywords that our SCHEMA.json files use and raises on any other."""
    found = []
    for keyword, wanted in schema.items():
        match keyword:
            case "description" | "properties" | "$schema" | "title":
                pass
            case "type":
                kind = {"object": dict, "array": list, "string": str, "integer": int, "number": (int, float)}[wanted]
                found += [] if isinstance(value, kind) and not isinstance(value, bool) else [f"{where}: not {wanted}"]
            case "required":
                found += [f"{where}: no {name}" for name in wanted if name not in value]
            case "additionalProperties":
                found += [f"{where}: {name} is unknown" for name in value if name not in schema["properties"]]
            case "pattern":
                found += [] if re.search(wanted, value) else [f"{where}: {value!r} is not {wanted}"]
            case "items":
                found += [fault for k, item in enumerate(value) for fault in faults(item, wanted, f"{where}[{k}]")]
            case "minItems":
                found += [] if len(value) >= wanted else [f"{where}: fewer than {wanted}"]
            case "minLength":
                found += [] if len(value) >= wanted else [f"{where}: shorter than {wanted}"]
            case "maxLength":
                found += [] if len(value) <= wanted else [f"{where}: longer than {wanted}"]
            case "minimum":
                found += [] if value >= wanted else [f"{where}: under {wanted}"]
            case "maximum":
                found += [] if value <= wanted else [f"{where}: over {wanted}"]
            case _:
                raise AssertionError(f"SCHEMA.json has {keyword!r}, which this test does not check")
    for name, inner in schema.get("properties", {}).items():
        found += faults(value[name], inner, f"{where}.{name}") if name in value else []
    return found


def script(name: str) -> ModuleType:
    """The module of a script beside the workload."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # A frozen dataclass looks its module up by name while it is made.
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
    return module


def test_every_prompt_line_fits_the_schema():
    assert [fault for line in PROMPTS for fault in faults(line, SCHEMA["prompt"], line.get("id", "?"))] == []


def test_every_question_line_fits_the_schema_and_ids_are_in_order():
    assert [fault for line in QUESTIONS for fault in faults(line, SCHEMA["question"], line.get("id", "?"))] == []
    assert [line["id"] for line in QUESTIONS] == [f"q{k:02d}" for k in range(48)]
    assert len({line["text"] for line in QUESTIONS}) == 48


def test_the_questions_are_what_the_script_writes():
    assert [line["text"] for line in QUESTIONS] == script("make_questions").questions()


def test_every_clip_line_fits_the_schema():
    assert [fault for line in CLIPS for fault in faults(line, SCHEMA["clip"], line.get("id", "?"))] == []


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ({"id": "p00"}, "line: no text"),
        ({"id": "p0", "text": "x" * 30}, "line.id: 'p0' is not ^p[0-9]{2}$"),
        ({"id": "p00", "text": "x" * 30, "lang": "en"}, "line: lang is unknown"),
        ({"id": "p00", "text": "short"}, "line.text: shorter than 20"),
    ],
)
def test_a_prompt_line_that_breaks_the_schema_is_found(line: dict[str, Any], fault: str):
    assert faults(line, SCHEMA["prompt"], "line") == [fault]


def test_there_are_64_prompts_of_10_to_60_words_with_ids_in_order():
    assert [line["id"] for line in PROMPTS] == [f"p{k:02d}" for k in range(64)]
    counts = [len(line["text"].split()) for line in PROMPTS]
    assert (min(counts), max(counts)) == (10, 60)


def test_no_two_prompts_or_transcripts_are_the_same():
    assert len({line["text"] for line in PROMPTS}) == 64
    assert len({line["text"] for line in CLIPS}) == 32


def test_the_prompts_are_varied():
    texts = [line["text"] for line in PROMPTS]
    assert sum(any(ord(char) > 127 for char in text) for text in texts) >= 6
    assert sum(any(char.isdigit() for char in text) for text in texts) >= 16
    assert sum("\n" in text or "`" in text for text in texts) >= 2
    assert len({text.split()[0] for text in texts}) >= 32


def test_there_are_32_clips_by_four_speakers_with_ids_in_order():
    assert [line["id"] for line in CLIPS] == [f"c{k:02d}" for k in range(32)]
    assert [line["audio"] for line in CLIPS] == [f"clips/c{k:02d}.flac" for k in range(32)]
    speakers = [line["speaker"] for line in CLIPS]
    assert {name: speakers.count(name) for name in speakers} == {
        "heart": 8,
        "heart-low": 8,
        "heart-deep": 8,
        "heart-high": 8,
    }


def test_every_clip_file_is_16_khz_mono_flac_of_the_length_in_the_manifest():
    for line in CLIPS:
        info = soundfile.info(ROOT / line["audio"])
        assert (info.samplerate, info.channels, info.format, info.subtype) == (16_000, 1, "FLAC", "PCM_16"), line["id"]
        assert line["seconds"] == round(info.frames / 16_000, 4), line["id"]


def test_every_clip_holds_speech_and_not_silence_or_clipping():
    for line in CLIPS:
        audio, _ = soundfile.read(ROOT / line["audio"], dtype="float32")
        assert 0.02 < float(np.sqrt(np.mean(audio**2))) < 0.2, line["id"]
        assert float(np.abs(audio).max()) == pytest.approx(0.35, abs=0.01), line["id"]


def test_the_folder_holds_the_manifest_s_files_and_no_other_and_is_under_2_mb():
    files = sorted(path.name for path in (ROOT / "clips").iterdir())
    assert files == sorted([Path(line["audio"]).name for line in CLIPS] + ["manifest.jsonl"])
    assert sum((ROOT / "clips" / name).stat().st_size for name in files) < 2_000_000


def test_every_golden_line_fits_the_schema_and_names_a_prompt_once():
    schema = json.loads((TRACES / "SCHEMA.json").read_text(encoding="utf-8"))
    assert faults({"prompt_id": "p00", "token_ids": [3, -1]}, schema, "line") == ["line.token_ids[1]: under 0"]
    for path in sorted(TRACES.glob("*.jsonl")):
        golden = lines(path)
        assert [fault for line in golden for fault in faults(line, schema, path.name)] == []
        ids = [line["prompt_id"] for line in golden]
        assert len(set(ids)) == len(ids) > 0
        assert set(ids) <= {line["id"] for line in PROMPTS}


@pytest.fixture(scope="module")
def make_clips():
    pytest.importorskip("hibari", reason="hibari-tts is in the extra `tiny`")
    return script("make_clips")


def test_the_manifest_says_what_the_script_would_speak(make_clips: Any):
    assert tuple(line["text"] for line in CLIPS) == make_clips.TRANSCRIPTS


@pytest.mark.parametrize("k", [0, 9, 31])
def test_speaking_a_clip_again_gives_the_committed_sound(make_clips: Any, k: int):
    speaker = make_clips.SPEAKERS[k % 4]
    again = make_clips.speak(make_clips.Hibari(), make_clips.TRANSCRIPTS[k], speaker, make_clips.SEED + k)
    committed, _ = soundfile.read(ROOT / CLIPS[k]["audio"], dtype="float32")
    # Another onnxruntime or CPU may round otherwise; the words, the pace and the seed's noise must be the same.
    assert len(again) == pytest.approx(len(committed), abs=400)
    shared = min(len(again), len(committed))
    assert np.corrcoef(again[:shared], committed[:shared])[0, 1] > 0.95


def test_the_script_refuses_a_clip_that_is_too_short_or_silent(make_clips: Any):
    with pytest.raises(ValueError, match=r"c99 lasts 1\.00 s"):
        make_clips.check(np.full(16_000, 0.1, np.float32), "c99")
    with pytest.raises(ValueError, match="said next to nothing"):
        make_clips.check(np.zeros(32_000, np.float32), "c99")
