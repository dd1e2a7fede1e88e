"""The whole training with the small plan: what stages leave, what a second run does, and how a broken one goes on."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import SettingError
from engine.errors import WalkgateError
from engine.model.config import OmniConfig
from engine.tiny import card, shards, speech, stages, tasks, voices, workdir
from engine.tiny.batches import collate
from engine.tiny.card import LogLine
from engine.tiny.codec import Axes
from engine.tiny.codec_train import load as load_codec
from engine.tiny.letters import letters, sounds
from engine.tiny.score import Asked, Served, Sizes
from engine.tiny.shapes import MAX_BYTES
from engine.tiny.shards import MOST_BYTES
from engine.tiny.stages import HEARD, LEFT_EVERY, MODEL, SPOKEN, STAGES, Language, Plan, Sitting, done, run
from engine.tiny.talker import Utterance
from engine.tiny.voices import MAIN_VOICE
from tests.tiny.test_speech import needs

PLAN = replace(
    Plan.small(),
    heard_hours=0.003,
    spoken_hours=0.003,
    read=40,
    codec_minutes=0.08,
    thinker_minutes=0.08,
    talker_minutes=0.01,
    decoder_minutes=0.01,
    sizes=Sizes(sentences=1, unheard=1, questions=1, aloud=1),
)
MADE = {
    "texts": ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "references.jsonl", "heard.jsonl"),
    "spoken": ("00000.npy", "manifest.jsonl"),
    "codec": ("codec-*.safetensors", "moments-*.safetensors", "log.jsonl"),
    "codes": ("00000.npy", "manifest.jsonl"),
    "heard": ("00000.npy", "manifest.jsonl"),
    "mels": ("00000-0.npy", "00000-1.npy", "manifest.jsonl"),
    "thinker": ("state-*/meta.json", "state-*/0.safetensors"),
    "talker": ("state-*/meta.json", "state-*/0.safetensors"),
    "decoder": ("state-*/meta.json", "state-*/0.safetensors"),
    "export": (f"{MODEL}/config.json", f"{MODEL}/model.safetensors"),
    "score": ("scores.json", "rows.jsonl", "wav/*.wav"),
    "card": (),
}


class Broken(Exception):
    """Something outside broke a stage off."""


@dataclass(frozen=True)
class Trained:
    """A folder after all stages; what was told after a break and in a last run; where the Thinker stood at first and last."""

    out: Path
    resumed: list[str]
    idle: list[str]
    thinker: tuple[dict[str, float], dict[str, float]]


def breaking(line: str) -> None:
    if line == "heard: 1 of 1 made":
        raise Broken


def thinker_state(out: Path) -> dict[str, float]:
    [path] = (out / "thinker").glob("state-*/meta.json")
    found: dict[str, float] = json.loads(path.read_text(encoding="utf-8"))
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """One training for all tests below: a short piece of `codec`, a break in `heard`, a short piece of `thinker`, the rest."""
    needs(MAIN_VOICE)
    out = tmp_path_factory.mktemp("training")
    assert run(out, PLAN, ["texts", SPOKEN], tell=lambda line: None)
    short_piece(out, "codec")
    with pytest.raises(Broken):
        run(out, PLAN, tell=breaking)
    resumed: list[str] = []
    assert run(out, PLAN, [HEARD, "mels"], tell=resumed.append)
    short_piece(out, "thinker")
    first = thinker_state(out)
    assert run(out, PLAN, tell=lambda line: None)
    idle: list[str] = []
    assert run(out, PLAN, tell=idle.append)
    return Trained(out, resumed, idle, (first, thinker_state(out)))


def short_piece(out: Path, name: str) -> None:
    """Give a stage 6 ms: with a clock that stands still it has them whole, however slow the machine is."""
    assert not run(out, PLAN, [name], minutes=1e-4, tell=lambda line: None, clock=lambda: 0.0)
    assert not done(out, name)


@pytest.fixture(scope="module")
def language(trained: Trained) -> Language:
    return Language.load(trained.out)


def test_every_stage_leaves_its_files_and_none_is_too_large(trained: Trained):
    assert list(MADE) == list(STAGES)
    for name, patterns in MADE.items():
        assert done(trained.out, name)
        assert [pattern for pattern in patterns if not list((trained.out / name).glob(pattern))] == []
    assert max(path.stat().st_size for path in trained.out.rglob("*") if path.is_file()) <= MOST_BYTES
    log = [json.loads(line) for line in (trained.out / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["stage"] for line in log if line["done"]] == list(STAGES)
    assert [line["stage"] for line in log if not line["done"]] == ["codec", "thinker"]


def test_the_log_says_where_a_stage_ran_and_how_long_its_speech_is(trained: Trained):
    log = shards.read_list(trained.out / "log.jsonl", LogLine)
    assert {line.device for line in log} == {f"CPU, {os.cpu_count()} cores"}
    [spoken] = [line for line in log if line.stage == SPOKEN]
    seconds = sum(clip.seconds for clip in speech.manifest(trained.out / SPOKEN))
    assert spoken.hours == {MAIN_VOICE: pytest.approx(seconds / 3600, abs=1e-4)}
    assert {line.stage for line in log if line.hours} == {SPOKEN, HEARD}


def test_what_came_of_another_codec_is_not_mixed_with_this_one(trained: Trained, tmp_path: Path):
    out = tmp_path / "out"
    shutil.copytree(trained.out, out)
    shutil.rmtree(out / "codec")
    stale = r"codes was made from another codec than is there now; .*out/codes, .*talker, .*card"
    with pytest.raises(SettingError, match=stale):
        run(out, PLAN, ["codec"], tell=lambda line: None)
    (out / "decoder" / stages.DONE).unlink()
    with pytest.raises(SettingError, match=stale):
        run(out, PLAN, ["decoder"], tell=lambda line: None)
    for name in ("codes", "talker", "decoder", "export", "score", "card"):
        shutil.rmtree(out / name)
    assert run(out, PLAN, ["codes", "talker", "decoder"], tell=lambda line: None)


def test_what_was_begun_with_another_talker_is_not_continued_with_this_one(trained: Trained, tmp_path: Path):
    out, seconds = tmp_path / "out", iter([0.0, 0.0, 0.0, *[100.0] * 99])
    shutil.copytree(trained.out, out)
    for name in ("decoder", "export", "score", "card"):
        shutil.rmtree(out / name)
    assert not run(out, PLAN, ["decoder"], minutes=1, tell=lambda line: None, clock=lambda: next(seconds))
    shutil.rmtree(out / "talker")
    told: list[str] = []
    # Another plan of minutes makes other weights.
    longer = replace(PLAN, talker_minutes=2 * PLAN.talker_minutes)
    with pytest.raises(SettingError, match=r"decoder was made from another talker than is there now; .*out/decoder$"):
        run(out, longer, ["talker", "decoder"], tell=told.append)
    assert "decoder: begins" not in told
    shutil.rmtree(out / "decoder")
    assert run(out, longer, ["decoder"], tell=lambda line: None)


def test_what_is_foreseen_of_other_utterances_is_refused(trained: Trained, tmp_path: Path):
    out = parts(trained, tmp_path, "texts", SPOKEN, "codec", "codes", "talker")
    (out / "decoder").mkdir()
    np.save(out / "decoder" / stages.FORESEEN, np.zeros((100_000, 16), np.uint8))
    with pytest.raises(WalkgateError, match=rf"{stages.FORESEEN} is of other utterances; delete it"):
        run(out, PLAN, ["decoder"], tell=lambda line: None)


def test_the_exported_weights_may_be_read_by_all_that_may_read_its_other_files(trained: Trained):
    folder = trained.out / "export" / MODEL
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1


def test_what_the_talker_foresees_is_kept_for_the_next_sitting(trained: Trained, tmp_path: Path, monkeypatch):
    out, seconds = tmp_path / "out", iter([0.0, 0.0, 0.0, *[100.0] * 99])
    shutil.copytree(trained.out, out)
    shutil.rmtree(out / "decoder")
    assert not run(out, PLAN, ["decoder"], minutes=1, tell=lambda line: None, clock=lambda: next(seconds))
    kept = (out / "decoder" / stages.FORESEEN).read_bytes()
    assert kept == (trained.out / "decoder" / stages.FORESEEN).read_bytes()
    monkeypatch.setattr(stages, "foreseen", None)
    for name in ("export", "score", "card"):
        shutil.rmtree(out / name)
    assert run(out, PLAN, ["decoder"], tell=lambda line: None)


def test_data_that_is_made_anew_is_the_same(trained: Trained, tmp_path: Path):
    out = tmp_path / "out"
    shutil.copytree(trained.out, out)
    for name in (SPOKEN, HEARD, "mels"):
        shutil.rmtree(out / name)
    assert run(out, PLAN, tell=lambda line: None)


@pytest.mark.parametrize(
    ("name", "path", "words"),
    [
        ("mels", "heard/manifest.jsonl", "heard says other texts than"),
        ("codec", "spoken/manifest.jsonl", "spoken says other texts than"),
        ("codes", "codes/00000.jsonl", "holds codes of [0-9]+ clips, and [0-9]+ were spoken"),
        ("talker", "spoken/sounds.jsonl", "texts to speak, codes of [0-9]+ and the sounds of"),
    ],
)
def test_a_list_that_lost_a_line_is_found_by_what_reads_it(
    trained: Trained, tmp_path: Path, name: str, path: str, words: str
):
    out = tmp_path / "out"
    shutil.copytree(trained.out, out)
    (out / name / stages.DONE).unlink()
    (out / path).write_bytes(b"".join((out / path).read_bytes().splitlines(keepends=True)[:-1]))
    with pytest.raises(WalkgateError, match=f"^{name}: .*{words}"):
        run(out, PLAN, [name], tell=lambda line: None)


def test_a_card_tells_of_a_rerun_by_the_same_plan_only(trained: Trained, tmp_path: Path):
    out = tmp_path / "out"
    shutil.copytree(trained.out, out)
    shutil.copytree(trained.out, out / card.RERUN)
    kept = workdir.begun(out)
    assert kept is not None
    for change, words in (({"seed": 1}, None), ({"read": 41}, "rerun holds no training by the plan of")):
        (out / "card" / stages.DONE).unlink()
        (out / card.RERUN / "plan.json").unlink()
        workdir.begin(out / card.RERUN, msgspec.structs.replace(kept, **change))
        if words is None:
            assert run(out, PLAN, ["card"], tell=lambda line: None)
            assert "## A rerun" in (out / "export" / MODEL / card.CARD).read_text(encoding="utf-8")
        else:
            with pytest.raises(WalkgateError, match=words):
                run(out, PLAN, ["card"], tell=lambda line: None)
    (out / card.RERUN / "plan.json").write_bytes(b"{")
    with pytest.raises(WalkgateError, match="rerun holds no training by the plan of"):
        run(out, PLAN, ["card"], tell=lambda line: None)


def test_the_card_lies_in_the_model_folder_and_tells_of_this_training(trained: Trained):
    folder = trained.out / "export" / MODEL
    text = (folder / card.CARD).read_text(encoding="utf-8")
    scores = json.loads((trained.out / "score" / "scores.json").read_text(encoding="utf-8"))
    assert "with no texts of others" in text and f"{PLAN.copies} copies of each" in text
    assert all(f"`{name}`, since {reason}" in text for name, reason in scores["skipped"].items())
    assert f"| {scores['scores']['t2t_questions']['wer']:g} |" in text
    # The stage of two sittings.
    assert re.search(r"\| Thinker and audio encoder \| [0-9.]+ \| 2 \| [0-9,–]+ \| CPU, [0-9]+ cores \|", text)
    assert str(trained.out) not in text and str(Path.home()) not in text
    assert sum(path.stat().st_size for path in folder.iterdir()) <= MAX_BYTES
    assert sum((folder / name).stat().st_size for name in (card.CURVES, card.SPECTROGRAMS)) <= card.MOST_PICTURE_BYTES


def test_a_stage_that_was_broken_off_goes_on_where_it_was(trained: Trained):
    assert "heard: 1 shards, 0 of them to make" in trained.resumed
    assert not any(line.startswith(("texts", "spoken", "codec")) for line in trained.resumed)


def test_training_goes_on_in_the_next_sitting(trained: Trained):
    first, last = trained.thinker
    assert 1 <= first["step"] < last["step"]
    assert first["seconds"] < 60 * PLAN.thinker_minutes <= last["seconds"]
    log = [json.loads(line) for line in (trained.out / "codec" / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    assert 1 <= log[0]["step"] < log[-1]["step"]
    assert log[0]["seconds"] < 60 * PLAN.codec_minutes <= log[-1]["seconds"]


def test_a_second_run_does_nothing(trained: Trained):
    assert trained.idle == []


def test_no_time_makes_nothing(tmp_path: Path):
    assert not run(tmp_path, PLAN, minutes=0, tell=lambda line: None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", "log.jsonl", "plan.json", "texts"]
    assert [path.name for path in (tmp_path / "texts").iterdir()] == ["lock"]


def test_a_stage_waits_for_those_it_reads_from_and_must_be_known(tmp_path: Path):
    with pytest.raises(SettingError, match=r"export needs codec, codes, thinker, talker, decoder, which"):
        run(tmp_path, PLAN, ["texts", "export"])
    with pytest.raises(SettingError, match=r"no stage 'vocoder'; there are texts, spoken,"):
        run(tmp_path, PLAN, ["texts", "vocoder"])
    assert not list(tmp_path.iterdir())


OWN = "THE CAT SAT ON THE MAT AGAIN"


def folder_of_references(tmp_path: Path) -> Path:
    folder = tmp_path / "librispeech"
    folder.mkdir()
    both = "1-1-0001 A DOG RAN OVER THE GREEN HILL\n"
    (folder / "dev-clean.trans.txt").write_text(f"1-1-0000 {OWN}\n{both}", encoding="utf-8")
    (folder / "test-clean.trans.txt").write_text(both, encoding="utf-8")
    return folder


def test_what_the_kept_references_say_is_not_trained(tmp_path: Path):
    plan = replace(PLAN, librispeech=folder_of_references(tmp_path))
    assert run(tmp_path / "out", plan, ["texts"], tell=lambda line: None)
    assert shards.read_list(tmp_path / "out" / "texts" / "references.jsonl", str) == [OWN]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"seed": 7}, "begun with seed 0, not 7; ask for that again, or name another folder"),
        ({"name": "h200"}, 'begun with plan "small", not "h200"'),
        ({"heard_hours": 1.0}, r"begun with heard_hours 0\.003, not 1\.0"),
        ({"copies": 3}, "begun with copies 2, not 3"),
    ],
)
def test_a_folder_stays_with_the_plan_that_it_was_begun_with(trained: Trained, changes: dict[str, object], told: str):
    with pytest.raises(SettingError, match=told):
        run(trained.out, replace(PLAN, **changes), tell=lambda line: None)


def test_workers_device_and_minutes_may_change(trained: Trained):
    assert run(trained.out, replace(PLAN, workers=4, device="cuda", thinker_minutes=9.0), tell=lambda line: None)


def test_librispeech_is_refused_after_texts_were_made_without_it(trained: Trained, tmp_path: Path):
    with pytest.raises(SettingError, match="begun with librispeech false, not true"):
        run(trained.out, replace(PLAN, librispeech=folder_of_references(tmp_path)), tell=lambda line: None)


def test_librispeech_may_be_left_out_once_its_texts_are_made_and_not_before(tmp_path: Path):
    out, with_it = tmp_path / "out", replace(PLAN, librispeech=folder_of_references(tmp_path))
    assert not run(out, with_it, minutes=0, tell=lambda line: None)
    with pytest.raises(SettingError, match="begun with librispeech true, not false"):
        run(out, PLAN, ["texts"], tell=lambda line: None)
    texts(out, [OWN])
    assert run(out, PLAN, ["texts"], tell=lambda line: None)


def texts(out: Path, known: list[str]) -> None:
    """As much of the stage `texts` as tells what they were made from."""
    (out / "texts").mkdir(parents=True, exist_ok=True)
    shards.write_list(out / "texts" / "references.jsonl", known)
    shards.write_list(out / "texts" / "heard.jsonl", stages._lines_to_hear(PLAN, known))
    (out / "texts" / stages.DONE).touch()


@pytest.mark.parametrize("librispeech", [True, False])
def test_a_folder_without_a_plan_gets_one_and_keeps_to_it(tmp_path: Path, librispeech: bool):
    folder = folder_of_references(tmp_path)
    stand_ins = [" ".join(stages.words(text)).upper() for text in stages.sentences(PLAN.seed, stages.STAND_INS)]
    texts(tmp_path, [OWN] if librispeech else stand_ins)
    if librispeech:
        with pytest.raises(SettingError, match="not those of --plan small --seed 0; name the --plan, the --seed and"):
            run(tmp_path, PLAN, ["texts"])
    assert run(tmp_path, replace(PLAN, librispeech=folder if librispeech else None), ["texts"])
    kept = workdir.begun(tmp_path)
    assert kept is not None and (kept.plan, kept.seed, kept.librispeech) == ("small", 0, librispeech)
    with pytest.raises(SettingError, match="seed 0, not 7"):
        run(tmp_path, replace(PLAN, seed=7), ["texts"])


@pytest.mark.parametrize("changes", [{"seed": 7}, {"heard_hours": 0.02}])
def test_texts_without_a_plan_are_those_of_the_plan_that_is_asked_for(tmp_path: Path, changes: dict[str, float]):
    plan = replace(PLAN, librispeech=folder_of_references(tmp_path))
    assert run(tmp_path, plan, ["texts"], tell=lambda line: None)
    (tmp_path / workdir.PLAN).unlink()
    with pytest.raises(SettingError, match="name the --plan, the --seed and the --librispeech that it was begun with"):
        run(tmp_path, replace(plan, **changes), ["texts"])
    assert run(tmp_path, plan, ["texts"], tell=lambda line: None)


def test_librispeechs_folder_must_have_both_files(tmp_path: Path):
    folder = folder_of_references(tmp_path)
    (folder / "test-clean.trans.txt").unlink()
    with pytest.raises(SettingError, match=r"--librispeech .*librispeech has no file test-clean.trans.txt"):
        run(tmp_path / "out", replace(PLAN, librispeech=folder))
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_a_plan_for_one_is_refused_before_anything_is_made(tmp_path: Path):
    out = tmp_path / "out"
    with pytest.raises(SettingError, match=r"--plan h200 needs a GPU for codec, codes, thinker, talker.* --plan small"):
        run(out, Plan.h200())
    with pytest.raises(SettingError, match="from texts, spoken, heard, mels, export, score, card"):
        run(out, Plan.h200(), ["texts", SPOKEN, "codec"])
    assert not out.exists()
    assert not run(out, Plan.h200(), ["texts", SPOKEN, HEARD, "mels"], minutes=0, tell=lambda line: None)
    [line] = shards.read_list(out / "log.jsonl", LogLine)
    assert line.device == f"CPU, {os.cpu_count()} cores"


def parts(trained: Trained, tmp_path: Path, *names: str) -> Path:
    """A folder with copies of these stages of the training."""
    for name in names:
        shutil.copytree(trained.out / name, tmp_path / "out" / name)
    return tmp_path / "out"


TRAINED_PARTS = {
    "codec": "codec-*.safetensors",
    "codes": "axes.safetensors",
    "thinker": "state-*",
    "talker": "state-*",
    "decoder": "state-*",
}


@pytest.mark.parametrize("name", TRAINED_PARTS)
def test_nothing_untrained_is_exported(trained: Trained, tmp_path: Path, name: str):
    out = parts(trained, tmp_path, "texts", *TRAINED_PARTS)
    shutil.rmtree(out / name)
    (out / name).mkdir()
    (out / name / stages.DONE).touch()
    lacks = re.escape(f"export: {out / name} holds no {TRAINED_PARTS[name]}; fetch that from where it was trained")
    with pytest.raises(WalkgateError, match=lacks):
        run(out, PLAN, ["export"], tell=lambda line: None)
    assert not done(out, "export") and not (out / "export" / MODEL).exists()


def test_axes_of_another_codec_are_told_with_both_shapes(trained: Trained, tmp_path: Path):
    out = parts(trained, tmp_path, "texts", *TRAINED_PARTS)
    path = out / "codes" / stages.AXES
    held = load_file(path)
    save_file(held | {"directions": held["directions"][:, 1:].contiguous()}, path)
    words = rf"^export: {path} is damaged \(its shapes are .*, not .*delete {path.parent}"
    with pytest.raises(WalkgateError, match=words):
        run(out, PLAN, ["export"], tell=lambda line: None)


def test_the_export_needs_no_moments_of_the_codec_and_is_the_same_bytes(trained: Trained, tmp_path: Path):
    out = parts(trained, tmp_path, "texts", *TRAINED_PARTS)
    for path in (out / "codec").glob("moments-*"):
        path.unlink()
    assert run(out, PLAN, ["export"], tell=lambda line: None)
    model = Path("export") / MODEL / "model.safetensors"
    assert (out / model).read_bytes() == (trained.out / model).read_bytes()


def test_two_runs_share_a_folder_but_no_stage(trained: Trained, tmp_path: Path):
    out = parts(trained, tmp_path, "texts", *TRAINED_PARTS)
    with workdir.locked(out / "export"):
        with pytest.raises(WalkgateError, match=rf"export: process {os.getpid()} works in {out}/export; wait"):
            run(out, PLAN, ["export"], tell=lambda line: None)
        assert not run(out, PLAN, [SPOKEN], minutes=0, tell=lambda line: None)


def test_what_another_process_made_in_the_meantime_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen = iter([False, False, True])
    monkeypatch.setattr(stages, "done", lambda out, name: next(seen))
    told: list[str] = []
    assert run(tmp_path, PLAN, ["texts"], tell=told.append)
    assert told == []


def test_what_was_left_half_written_goes_before_a_stage_runs(tmp_path: Path):
    folder = tmp_path / "texts"
    (folder / "state.part").mkdir(parents=True)
    for name in ("state.part/0.safetensors", "00000.part.npy", "manifest.part", "codec-1.partial", "kept.npy"):
        (folder / name).touch()
    assert not run(tmp_path, PLAN, minutes=0, tell=lambda line: None)
    assert sorted(path.name for path in folder.iterdir()) == ["kept.npy", "lock"]


def test_a_fault_is_told_as_of_its_stage(trained: Trained, tmp_path: Path):
    out = parts(trained, tmp_path, "texts", "spoken", "codec")
    (out / "spoken" / "manifest.jsonl").unlink()
    with pytest.raises(WalkgateError, match=rf"^codes: {out}/spoken/manifest.jsonl is missing; fetch it"):
        run(out, PLAN, ["codes"], tell=lambda line: None)


def test_without_the_main_voice_nothing_is_spoken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(voices, "usable", lambda: ([], {MAIN_VOICE: "it is not here"}))
    for name in (SPOKEN, HEARD):
        with pytest.raises(ValueError, match="training needs the voice hibari: it is not here"):
            STAGES[name].run(tmp_path, PLAN, stages.Sitting(print))


def test_the_engine_serves_the_exported_folder(trained: Trained):
    served = Served(trained.out / "export" / MODEL, "cpu")
    [answer] = served.answers([Asked("t2t", tasks.ask(tasks.held_out_questions(0, 1)[0]))], [0.0])
    assert answer.ended or answer.text


def test_every_speaker_is_the_one_voice_that_was_trained(trained: Trained):
    folder = trained.out / "export" / MODEL
    speakers = OmniConfig.load(folder).speakers
    table = load_file(folder / "model.safetensors")["talker.model.codec_embedding.weight"]
    assert len(speakers) == 3
    assert all(torch.equal(table[row], table[speakers["ethan"]]) for row in speakers.values())


def test_what_is_heard_becomes_conversations_about_its_own_clip(trained: Trained, language: Language):
    made = stages.listening(trained.out, PLAN, language)
    lines = shards.read_list(trained.out / "texts" / "heard.jsonl", tasks.Line)
    assert len(made) == PLAN.copies * len(lines)
    # Refuses placeholders that don't match the clip.
    batch = collate(made, language.config.ids.audio)
    assert batch.mels is not None and batch.mels.shape[1] == language.config.audio.mel_bins
    answers: dict[tuple[int, ...], set[str]] = {}
    for line in lines:
        told = {line.text, *([line.question.answer] if line.question else [])}
        answers.setdefault(tuple(letters(line.text)), set()).update(told)
    for one in made:
        assert language.tokenizer.decode(one.ids[one.prompt : -1]) in answers[tuple(one.transcript)]
        assert one.ids[-1] == language.config.ids.im_end


def test_what_is_spoken_becomes_utterances_with_the_codes_of_their_clips(trained: Trained, language: Language):
    utterances = list(stages.spoken_utterances(trained.out, language))
    clips = speech.manifest(trained.out / SPOKEN)
    assert [language.tokenizer.decode(list(one.text)) for one in utterances] == [clip.line.text for clip in clips]
    assert [list(one.sounds) for one in utterances] == [sounds(voices.frame_sounds(clip.line.text)) for clip in clips]
    assert all(
        len(one.sounds) == one.codes.shape[1] == clip.samples / 1920
        for one, clip in zip(utterances, clips, strict=True)
    )
    config = language.config.code2wav
    assert config is not None
    codec = load_codec(trained.out / "codec", config, PLAN.codec.width)
    wave = torch.from_numpy(speech.read(trained.out / SPOKEN, clips[0]))
    axes = Axes(**load_file(trained.out / "codes" / stages.AXES), codes=config.codebook)
    assert np.array_equal(utterances[0].codes, axes.encode(codec.latents(wave)).t().numpy())
    exported = load_file(trained.out / "export" / stages.MODEL / "model.safetensors")
    torch.testing.assert_close(exported["code2wav.code_embedding.weight"], axes.table().bfloat16(), rtol=0, atol=0)


def test_a_fifth_of_what_is_spoken_answers_questions_and_some_prompts_are_clips():
    known = ["THE QUICK BROWN FOX JUMPS OVER THE LAZY DOG"]
    made = stages.spoken(0, 1000, known)
    assert made[:50] == stages.spoken(0, 50, known)
    kinds = [example.kind for example in made]
    assert kinds.count("repeat") + kinds.count("transcribe") == pytest.approx(800, abs=60)
    assert sum(bool(example.clips) for example in made) == pytest.approx(350, abs=60)


def test_of_many_answers_the_talker_leaves_some_to_the_decoder(trained, monkeypatch):
    asked = list(stages.spoken_utterances(trained.out, Language.load(trained.out)))
    learned: list[Utterance] = []

    def train(config: object, table: object, utterances: list[Utterance], *rest: object, **named: object) -> object:
        learned.extend(utterances)
        return None, True

    monkeypatch.setattr(stages, "train_talker", train)
    sitting = Sitting(lambda line: None)
    stages.train_the_talker(trained.out, PLAN, sitting)
    assert [one.text for one in learned] == [one.text for one in asked]
    monkeypatch.setattr(stages, "MANY", 1)
    learned.clear()
    stages.train_the_talker(trained.out, PLAN, sitting)
    assert [one.text for one in learned] == [one.text for place, one in enumerate(asked) if place % LEFT_EVERY]


def test_an_h200_trains_for_less_than_fifty_minutes():
    plan = Plan.h200()
    assert 35 <= plan.codec_minutes + plan.thinker_minutes + plan.talker_minutes + plan.decoder_minutes <= 50
