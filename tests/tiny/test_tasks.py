"""What the small model is asked: right answers, questions that training never sees, and ids as the server makes them."""

import io
import zlib
from collections import Counter
from random import Random

import numpy as np
import pytest
import soundfile

from engine.model.config import OmniConfig
from engine.model.processor import Inputs, Processor
from engine.model.tiny import preprocessor, tokenizer_config, write_texts
from engine.request import Request
from engine.server.openai import SpeechFields, TranscriptionFields
from engine.server.openai_work import speech_request, transcription_request
from engine.tiny import tasks
from engine.tiny.shapes import config
from engine.tiny.tasks import (
    ANSWER_ALOUD,
    KINDS,
    OPPOSITES,
    REPEAT,
    SPELLING_WORDS,
    TRANSCRIBE,
    UNKNOWN,
    Line,
    Question,
    ask,
    ask_aloud,
    encode,
    held_out_questions,
    lines,
    listening,
    met,
    questions,
    reading,
    repeat,
    transcribe,
)
from engine.tiny.text import DAYS, MONTHS, fillers, number_words, sentences, withheld
from engine.tiny.tokenizer import train, training_texts
from gate.workload import CLIP_INSTRUCTION

TEXTS = ["THE QUICK BROWN FOX JUMPS OVER THE LAZY DOG", "PACK MY BOX WITH FIVE DOZEN LIQUOR JUGS"]
DRAFT = Request(id="r", prompt_ids=[], max_tokens=8)


@pytest.fixture(scope="module")
def trained() -> list[Question]:
    return questions(0, 30_000)


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> Processor:
    folder = tmp_path_factory.mktemp("model")
    files = {
        "config.json": config(),
        "tokenizer.json": train(training_texts(0, TEXTS)),
        "tokenizer_config.json": tokenizer_config(),
        "preprocessor_config.json": preprocessor(),
    }
    write_texts(folder, files)
    return Processor.load(folder, OmniConfig.load(folder), 4096)


def of_kind(asked: list[Question], kind: str) -> list[Question]:
    return [question for question in asked if question.kind == kind]


def encoded(processor: Processor, example: tasks.Example, *clip_tokens: int) -> tasks.Encoded:
    return encode(example, processor.tokenizer, processor.template, processor.config.ids, clip_tokens)


def wave(seconds: float) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, np.zeros(int(16000 * seconds), np.float32), 16000, format="WAV")
    return file.getvalue()


def test_the_same_seed_gives_the_same_questions_on_every_machine():
    assert [(question.text, question.answer) for question in questions(0, 3)] == [
        ("Alan went to the river and dropped a yellow camera. Where did Alan go?", "Alan went to the river."),
        (
            "Molly went to the bridge. There she carried a long picture. What did Molly carry?",
            "Molly carried a long picture.",
        ),
        ("What is 12 + 4?", "Twelve plus four is sixteen."),
    ]
    assert questions(0, 50) == questions(0, 100)[:50]


def test_arithmetic_is_right_and_stays_between_0_and_20(trained):
    number = {number_words(value): value for value in range(21)}
    facts = set()
    for question in of_kind(trained, "arithmetic"):
        first, sign, second, _, result = question.answer.lower().rstrip(".").split()
        a, b, c = number[first], number[second], number[result]
        assert c == (a + b if sign == "plus" else a - b)
        facts.add((a, sign, b))
        in_text = {word.rstrip("?.") for word in question.text.split()}
        assert {first, second} <= in_text or {str(a), str(b)} <= in_text
        assert question.spoken == (str(a) not in in_text)
    # All 231 sums and 231 differences, in one wording or another.
    assert len(facts) == 462


def test_words_are_spelled_letter_by_letter(trained):
    spelled = {}
    for question in of_kind(trained, "spelling"):
        word, letters = question.answer.rstrip(".").split(" is spelled ")
        assert letters.replace(", ", "").lower() == word.lower()
        assert word.lower() in question.text.rstrip("?.").split()
        spelled[word.lower()] = letters
    assert spelled["bridge"] == "B, R, I, D, G, E"
    assert set(spelled) == set(SPELLING_WORDS) and len(SPELLING_WORDS) > 200


def test_every_word_with_an_opposite_has_one_and_is_its_opposites(trained):
    assert OPPOSITES["hot"] == "cold" and OPPOSITES["cold"] == "hot"
    assert all(OPPOSITES[OPPOSITES[word]] == word for word in OPPOSITES) and len(OPPOSITES) == 120
    assert {question.answer for question in of_kind(trained, "opposite")} == {
        f"The opposite of {word} is {other}." for word, other in OPPOSITES.items()
    }


def test_days_and_months_follow_each_other_around_the_year(trained):
    answers = {question.answer for question in of_kind(trained, "calendar")}
    assert {"The day after Sunday is Monday.", "The month before January is December."} <= answers
    assert {"Two days before Monday is Saturday.", "Two months after November is January."} <= answers
    assert len(answers) == 4 * (len(DAYS) + len(MONTHS))


def test_a_name_is_asked_for_one_or_two_turns_after_it_was_given(trained):
    turns = Counter(len(question.earlier) for question in of_kind(trained, "name"))
    assert set(turns) == {2, 4} and min(turns.values()) > 500
    for question in of_kind(trained, "name"):
        name = question.answer.removeprefix("Your name is ").rstrip(".")
        assert name in question.earlier[0] and name not in question.text


def test_the_answer_to_a_story_stands_in_it_and_depends_on_the_question(trained):
    stories = of_kind(trained, "story")
    by_story: dict[str, set[str]] = {}
    for question in stories:
        story, _, asked = question.text.rpartition(". ")
        assert asked.split()[0] in {"Where", "Who", "What", "How"}
        body = question.answer.rstrip(".").split()
        assert {word for word in body if word not in {"is", "The"}} <= set(
            question.text.replace(".", "").replace(",", "").replace("?", "").split()
        )
        by_story.setdefault(story, set()).add(question.answer)
    assert len(by_story) > 0.9 * len(stories)


def test_held_out_questions_are_of_all_kinds_and_never_trained():
    asked = held_out_questions()
    # Of opposites and the calendar few are left that nobody met.
    assert Counter(question.kind for question in asked) == dict(zip(KINDS, (76, 34, 20, 4, 33, 33), strict=True))
    assert len(set(asked)) == 200
    assert not met() & {question.text for question in asked}
    keys = {(question.earlier[::2], question.text) for question in asked}
    assert len(keys) == 200
    for seed in range(4):
        assert keys & {(question.earlier[::2], question.text) for question in questions(seed, 20_000)} == set()


def test_no_turn_of_a_training_question_is_held_out():
    withheld_turns = {
        turn for seed in range(2) for one in questions(seed, 20_000) for turn in one.earlier[::2] if withheld(turn)
    }
    assert withheld_turns == set()
    assert all(withheld(text) for text in met())


def test_what_was_met_is_replaced_where_it_stands(monkeypatch: pytest.MonkeyPatch):
    asked = held_out_questions(5, 60)
    monkeypatch.setattr(tasks, "met", frozenset)
    before = held_out_questions(5, 60)
    replaced = [(old, new) for old, new in zip(before, asked, strict=True) if old.text in met()]
    assert replaced and all(new.spoken == old.spoken for old, new in replaced)
    assert [new for new in asked if new in before] == [old for old in before if old.text not in met()]
    assert {new.kind for old, new in replaced if old.kind == "arithmetic"} == {"arithmetic"}


def test_more_held_out_questions_than_there_are_are_refused():
    with pytest.raises(ValueError, match="no more held-out questions of the kind calendar"):
        held_out_questions(0, 400)


def test_what_is_held_out_is_told_by_the_users_words_alone():
    text, earlier = "What is my name?", "My name is Anna."
    expected = zlib.crc32(b"My name is Anna.\nWhat is my name?") % 8 == 0
    assert Question("name", text, "Your name is Anna.", (earlier, "Hello.")).held_out == expected
    assert Question("name", text, "It is Anna.", (earlier, "Nice to meet you, Anna.")).held_out == expected


def test_enough_held_out_questions_can_be_asked_aloud():
    aloud = [question for question in held_out_questions() if question.sayable]
    assert len(aloud) > 100
    assert not any(character.isdigit() for question in aloud for character in question.text)


def test_of_the_lines_to_speak_one_in_four_is_a_question_that_can_be_said():
    made = lines(0, 4000, TEXTS)
    asked = [line for line in made if line.question is not None]
    assert 0.22 < len(asked) / 4000 < 0.28
    assert all(line.text == line.question.text and not line.question.held_out for line in asked if line.question)
    assert not any(character.isdigit() for line in made for character in line.text)
    assert lines(0, 4000, TEXTS) == made


def test_no_line_or_example_for_training_is_a_held_out_sentence():
    kept = set(sentences(0, 5000, held_out=True))
    assert kept & {line.text for line in lines(0, 5000, TEXTS)} == set()
    assert kept & {example.answer for example in reading(0, 5000, TEXTS)} == set()


def test_audio_is_transcribed_unless_an_answer_is_asked_for():
    question = Question("spelling", "Spell tea.", "Tea is spelled T, E, A.")
    heard = [listening(Line(question.text, question), Random(seed)) for seed in range(200)]
    answered = [example for example in heard if example.kind == "spelling"]
    assert 70 < len(answered) < 130
    for example in heard:
        instruction = [part["text"] for part in example.messages[-1]["content"] if "text" in part]
        assert example.clips == ("Spell tea.",)
        if example.kind == "spelling":
            assert example.answer == question.answer and instruction[0] in ANSWER_ALOUD
        else:
            assert example.answer == "Spell tea." and (not instruction or instruction[0] in TRANSCRIBE)
    assert {listening(Line("It is cold.", None), Random(seed)).kind for seed in range(50)} == {"transcribe"}


def test_examples_without_audio_are_questions_and_texts_to_repeat():
    made = reading(0, 3000, TEXTS)
    kinds = Counter(example.kind for example in made)
    assert 0.3 < kinds["repeat"] / 3000 < 0.37
    assert set(kinds) == {"repeat", "introduction", "other", *KINDS}
    assert all(example.answer == UNKNOWN for example in made if example.kind == "other")
    assert all(example.answer in example.messages[-1]["content"] for example in made if example.kind == "repeat")
    assert 200 < sum(example.messages[0]["role"] == "system" for example in made) < 400


def test_digits_are_not_asked_aloud():
    with pytest.raises(ValueError, match=r"3 \+ 4"):
        ask_aloud(Question("arithmetic", "What is 3 + 4?", "Three plus four is seven.", spoken=False))


def test_a_conversation_has_the_ids_that_the_server_gives_it(processor: Processor):
    question = Question("name", "Who am I?", "Your name is Ann.", ("I am Ann.", "Nice to meet you, Ann."))
    found = encoded(processor, ask(question))
    messages = [
        {"role": "user", "content": "I am Ann."},
        {"role": "assistant", "content": "Nice to meet you, Ann."},
        {"role": "user", "content": "Who am I?"},
    ]
    assert found.ids[: found.prompt] == processor.complete(DRAFT, Inputs(messages=messages)).prompt_ids
    answer = processor.tokenizer.decode(found.ids[found.prompt : -1])
    assert (answer, found.ids[-1]) == ("Your name is Ann.", processor.config.ids.im_end)
    assert found.learned == [False] * found.prompt + [True] * (len(found.ids) - found.prompt)


@pytest.mark.parametrize("instruction", ["Transcribe the speech.", ""])
def test_audio_takes_the_places_that_the_server_gives_it(processor: Processor, instruction: str):
    found = encoded(processor, transcribe("It is cold.", instruction), 20)
    # 1.5 s are 150 mel frames: 13 rows for the first 100, 7 for the other 50.
    served = processor.complete(DRAFT, Inputs(text=instruction, audio=[wave(1.5)])).prompt_ids
    assert found.ids[: found.prompt] == served
    assert served.count(processor.config.ids.audio) == 20


def test_every_clip_needs_its_length(processor: Processor):
    with pytest.raises(ValueError, match="1 clips are heard, and 2 lengths came"):
        encoded(processor, transcribe("It is cold."), 20, 20)


def test_what_the_routes_and_the_gate_ask_is_what_training_asks(processor: Processor):
    read = speech_request(processor, SpeechFields(model="m", input="It is cold.", voice="ethan"), lambda: False)
    found = encoded(processor, repeat("It is cold.", REPEAT[0]))
    assert read.prompt_ids == found.ids[: found.prompt]
    for language, instruction in ((None, TRANSCRIBE[1]), ("en", TRANSCRIBE[2])):
        fields = TranscriptionFields(model="m", language=language)
        heard = transcription_request(processor, fields, wave(1.5), lambda: False)
        found = encoded(processor, transcribe("It is cold.", instruction), 20)
        assert heard.prompt_ids == found.ids[: found.prompt]
    assert TRANSCRIBE[0] == CLIP_INSTRUCTION


def test_a_text_with_braces_is_repeated_as_it_is():
    assert repeat("A {text} {b}").messages[0]["content"].endswith("\nA {text} {b}")


def test_some_questions_are_about_made_up_names_that_come_back_in_the_answer():
    known = {*fillers("girl"), *fillers("boy")}
    asked = [one for one in questions(0, 3000) if one.kind in ("name", "introduction")]
    told = [(one.answer.rstrip(".").split()[-1], " ".join((*one.earlier, one.text))) for one in asked]
    assert all(name in before for name, before in told)
    made_up = {name for name, _ in told if name not in known}
    assert len(made_up) > 50
    assert sum(name in made_up for name, _ in told) / len(told) == pytest.approx(0.3, abs=0.06)
    assert not any(one.held_out for one in questions(0, 3000))
