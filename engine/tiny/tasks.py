"""What the small model is asked and what it should answer, as conversations and as token ids. No audio, no torch.

Tasks, and what tells the model which one is meant:

    transcribe    a turn with audio and one of `TRANSCRIBE`, or with audio alone: write what is said, a question too
    answer aloud  a turn with audio and one of `ANSWER_ALOUD`: answer the question that is said
    repeat        a turn of text that one of `REPEAT` introduces: write the text again, word for word
    answer        any other turn of text: answer it

So a question has one answer, read or heard, and audio alone always means its transcript. Answers are whole sentences: one word
alone is hard to recognise when it is spoken. They are in words, digits in a question or not. What is none of the trained
kinds is answered with `UNKNOWN`.

Held out of training by construction: a question whose text, with the user's earlier turns, has a CRC-32 that is a multiple of
8, whatever its kind; nor is such a text an earlier turn of another question. Names, places and things in held-out stories and
names may also be fillers that no training question has.
In arithmetic, spelling, opposites and the calendar, of which there are few, the facts themselves are trained in other wordings.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from tokenizers import Tokenizer

from engine.model.chat import AUDIO_PART, ChatTemplate, Message, text_part
from engine.model.config import SpecialIds
from engine.tiny.text import (
    DAYS,
    MONTHS,
    capitalised,
    corpus,
    draw,
    fillers,
    number_words,
    sentence,
    with_article,
    withheld,
)

# The first of each list is what this project's own clients say.
TRANSCRIBE = (
    "Transcribe the speech.",
    "Transcribe the audio into text.",
    "Transcribe the English audio into text.",
    "What is said?",
    "Write down what you hear.",
    "",
)
ANSWER_ALOUD = ("Answer the question.", "Please answer the question.", "Answer what is asked.")
REPEAT = (
    "Read the following text aloud, word for word, and say nothing else:\n{text}",
    "Repeat after me: {text}",
    "Repeat this sentence: {text}",
    "Say this: {text}",
)
SYSTEMS = ("You are a helpful assistant.", "Answer in one sentence.")
UNKNOWN = "I do not know that."

_MOST = 20
_SUMS = (
    "What is {a} plus {b}?",
    "How much is {a} plus {b}?",
    "Tell me what {a} plus {b} is.",
    "Add {a} and {b}.",
    "What do you get if you add {b} to {a}?",
    "What is the sum of {a} and {b}?",
)
_DIFFERENCES = (
    "What is {a} minus {b}?",
    "How much is {a} minus {b}?",
    "Tell me what {a} minus {b} is.",
    "Take {b} away from {a}.",
    "What do you get if you take {b} from {a}?",
    "What is left of {a} without {b}?",
)
_IN_DIGITS = ("What is {a} {sign} {b}?", "{a} {sign} {b} = ?", "How much is {a} {sign} {b}?")
_SPELLING = (
    "How do you spell {word}?",
    "Spell the word {word}.",
    "Please spell {word}.",
    "Can you spell {word}?",
    "Spell {word} for me.",
    "What are the letters of {word}?",
)
_OPPOSITES = (
    "What is the opposite of {word}?",
    "Tell me the opposite of {word}.",
    "What is the reverse of {word}?",
    "Which word means the opposite of {word}?",
    "Name the opposite of {word}.",
    "If it is not {word}, what is it?",
)
_PAIRS = """
    hot cold, big small, old new, long short, high low, fast slow, early late, easy difficult, open closed, full empty,
    happy sad, light dark, wet dry, hard soft, strong weak, rich poor, clean dirty, loud quiet, good bad, right wrong,
    near far, up down, in out, on off, first last, front back, before after, above below, inside outside, always never,
    day night, black white, young aged, true false, thick thin, wide narrow, deep shallow, cheap expensive, safe dangerous,
    sharp blunt, sweet sour, rough smooth, brave timid, polite rude, awake asleep, love hate, buy sell, push pull, win lose,
    come go, begin end, give take, laugh cry, north south, east west, heaven hell, friend enemy, question answer, start stop,
    top bottom
"""
_CALENDAR = {
    1: (
        "Which {unit} comes after {start}?",
        "What {unit} is after {start}?",
        "What is the {unit} after {start}?",
        "Tell me the {unit} that follows {start}.",
        "If this {unit} is {start}, what is the next {unit}?",
        "Name the {unit} after {start}.",
    ),
    -1: (
        "Which {unit} comes before {start}?",
        "What {unit} is before {start}?",
        "What is the {unit} before {start}?",
        "Tell me the {unit} that comes before {start}.",
        "If this {unit} is {start}, what was the last {unit}?",
        "Name the {unit} before {start}.",
    ),
    2: (
        "Which {unit} comes two {unit}s after {start}?",
        "What {unit} is two {unit}s after {start}?",
        "If this {unit} is {start}, what {unit} is it in two {unit}s?",
    ),
    -2: (
        "Which {unit} comes two {unit}s before {start}?",
        "What {unit} is two {unit}s before {start}?",
        "If this {unit} is {start}, what {unit} was it two {unit}s ago?",
    ),
}
_STEPS = {1: "The {unit} after", -1: "The {unit} before", 2: "Two {unit}s after", -2: "Two {unit}s before"}
_INTRODUCTIONS = (
    "My name is {name}.",
    "Hello, my name is {name}.",
    "I am {name}.",
    "Hi, I am {name} from {city}.",
    "Good {part}, my name is {name}.",
    "You can call me {name}.",
)
_WHO_AM_I = (
    "What is my name?",
    "Do you know my name?",
    "Who am I?",
    "Can you tell me my name?",
    "What did I say my name was?",
    "Please say my name.",
)
# Past and base form of what people in stories do with things.
_VERBS = {
    "bought": "buy",
    "found": "find",
    "lost": "lose",
    "sold": "sell",
    "painted": "paint",
    "cleaned": "clean",
    "dropped": "drop",
    "carried": "carry",
    "washed": "wash",
}


@dataclass(frozen=True, slots=True)
class Question:
    """A question in text and its answer. `earlier` holds the turns before it, the user's and the model's in turn.

    `spoken` says whether it can be said as it stands: digits can't.
    """

    kind: str
    text: str
    answer: str
    earlier: tuple[str, ...] = ()
    spoken: bool = True

    @property
    def held_out(self) -> bool:
        """Whether training never asks it."""
        return withheld("\n".join((*self.earlier[::2], self.text)))

    @property
    def trained(self) -> bool:
        """Whether training may ask it: neither it nor a turn of the user's before it is held out."""
        return not self.held_out and not any(map(withheld, self.earlier[::2]))

    @property
    def sayable(self) -> bool:
        """Whether one clip can ask it: it has no digits, and needs no turn before it."""
        return self.spoken and not self.earlier


@dataclass(frozen=True, slots=True)
class Line:
    """What is said in one clip of the training speech, and the question if it is one."""

    text: str
    question: Question | None


@dataclass(frozen=True, slots=True)
class Example:
    """A conversation up to the answer, and the answer. `clips` says what each audio part of it says, in order."""

    kind: str
    messages: tuple[Message, ...]
    answer: str
    clips: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids of a whole example; the first `prompt` of them are what the model is given, the others what it learns."""

    ids: list[int]
    prompt: int

    @property
    def learned(self) -> list[bool]:
        """For each id whether it enters the loss: the answer and the end of its turn."""
        return [place >= self.prompt for place in range(len(self.ids))]


_NAMES = re.compile(rf"\b({'|'.join((*fillers('girl'), *fillers('boy')))})\b")
_RENAMED_SHARE = 0.3
_ONSETS = (*"bcdfghjklmnprstvw", "br", "ch", "gr", "sh", "st", "th")
_VOWELS = ("a", "e", "i", "o", "u", "a", "e", "i", "o", "ai", "ee", "ia", "oo")
_CODAS = ("", "", "l", "n", "r", "s", "t", "ck", "ne", "ry", "th")


def _arithmetic(rng: Random, held_out: bool) -> Question:
    plus = rng.random() < 0.5
    first = rng.randrange(_MOST + 1)
    second = rng.randrange(_MOST + 1 - first) if plus else rng.randrange(first + 1)
    a, b = number_words(first), number_words(second)
    result = number_words(first + second if plus else first - second)
    answer = f"{capitalised(a)} {'plus' if plus else 'minus'} {b} is {result}."
    wording = rng.choice((*(_SUMS if plus else _DIFFERENCES), *_IN_DIGITS))
    if wording in _IN_DIGITS:
        text = wording.format(a=first, b=second, sign="+" if plus else "-")
        return Question("arithmetic", text, answer, spoken=False)
    return Question("arithmetic", wording.format(a=a, b=b), answer)


def _spelling_words() -> tuple[str, ...]:
    slots = ("object", "fruit", "animal", "food", "drink", "colour", "kind", "mood", "place", "room", "spot", "vehicle")
    words = {word for slot in slots for word in fillers(slot)}
    return tuple(sorted(word for word in words if word.isalpha() and 3 <= len(word) <= 9))


SPELLING_WORDS = _spelling_words()


def _spelling(rng: Random, held_out: bool) -> Question:
    word = rng.choice(SPELLING_WORDS)
    letters = ", ".join(word.upper())
    return Question("spelling", rng.choice(_SPELLING).format(word=word), f"{capitalised(word)} is spelled {letters}.")


def _both_ways(pairs: str) -> dict[str, str]:
    ways: dict[str, str] = {}
    for pair in pairs.split(","):
        left, right = pair.split()
        ways[left], ways[right] = right, left
    return ways


OPPOSITES = _both_ways(_PAIRS)


def _opposite(rng: Random, held_out: bool) -> Question:
    word = rng.choice(tuple(OPPOSITES))
    answer = f"The opposite of {word} is {OPPOSITES[word]}."
    return Question("opposite", rng.choice(_OPPOSITES).format(word=word), answer)


def _calendar(rng: Random, held_out: bool) -> Question:
    unit, names = rng.choice((("day", DAYS), ("month", MONTHS)))
    place, step = rng.randrange(len(names)), rng.choice(tuple(_CALENDAR))
    start, end = names[place], names[(place + step) % len(names)]
    text = rng.choice(_CALENDAR[step]).format(unit=unit, start=start)
    return Question("calendar", text, f"{_STEPS[step].format(unit=unit)} {start} is {end}.")


def _introduction(rng: Random, held_out: bool) -> Question:
    slots = {slot: draw(slot, rng, held_out=held_out) for slot in ("name", "city", "part")}
    return Question("introduction", rng.choice(_INTRODUCTIONS).format(**slots), f"Nice to meet you, {slots['name']}.")


def _name(rng: Random, held_out: bool) -> Question:
    """A name given one or two turns before."""
    first = _introduction(rng, held_out)
    name = first.answer.removeprefix("Nice to meet you, ")
    earlier = [first.text, first.answer]
    if rng.random() < 0.5:
        between = rng.choice((_arithmetic, _opposite, _calendar))(rng, held_out)
        earlier += [between.text, between.answer]
    return Question("name", rng.choice(_WHO_AM_I), f"Your name is {name}", tuple(earlier))


def _other(rng: Random, held_out: bool) -> Question:
    return Question("other", sentence("questions", rng, held_out=held_out), UNKNOWN)


def _journey(rng: Random, held_out: bool) -> Question:
    """Two people and where they went."""
    used: set[str] = set()
    people = [draw("name", rng, held_out=held_out, used=used) for _ in range(2)]
    places = [draw("place", rng, held_out=held_out, used=used) for _ in range(2)]
    told = [f"{who} went to the {place}" for who, place in zip(people, places, strict=True)]
    story = rng.choice((f"{told[0]}. {told[1]}.", f"{told[0]}, and {told[1]}."))
    one = rng.randrange(2)
    asked = rng.choice((f"Where did {people[one]} go?", f"Who went to the {places[one]}?"))
    return Question("story", f"{story} {asked}", f"{told[one]}.")


def _errand(rng: Random, held_out: bool) -> Question:
    """One person who went somewhere and did something with a thing."""
    who, she = rng.choice((("girl", "she"), ("boy", "he")))
    name, place = draw(who, rng, held_out=held_out), draw("place", rng, held_out=held_out)
    verb = rng.choice(tuple(_VERBS))
    thing = with_article(draw("thing", rng, held_out=held_out))
    went, had = f"{name} went to the {place}", f"{name} {verb} {thing}"
    story = rng.choice((f"{went} and {verb} {thing}.", f"{went}. There {she} {verb} {thing}."))
    asked, answer = rng.choice(
        ((f"Where did {name} go?", went), (f"What did {name} {_VERBS[verb]}?", had), (f"Who {verb} {thing}?", had))
    )
    return Question("story", f"{story} {asked}", f"{answer}.")


def _belongings(rng: Random, held_out: bool) -> Question:
    """Two people and a coloured thing of each."""
    used: set[str] = set()
    people, colours, objects = (
        [draw(slot, rng, held_out=held_out, used=used) for _ in range(2)] for slot in ("name", "colour", "object")
    )
    has = [
        f"{who} has {with_article(f'{colour} {thing}')}"
        for who, colour, thing in zip(people, colours, objects, strict=True)
    ]
    story = rng.choice((f"{has[0]}. {has[1]}.", f"{has[0]}, and {has[1]}."))
    one = rng.randrange(2)
    asked, answer = rng.choice(
        (
            (f"What does {people[one]} have?", has[one]),
            (f"Who has the {objects[one]}?", has[one]),
            (f"What colour is the {objects[one]}?", f"The {objects[one]} is {colours[one]}"),
        )
    )
    return Question("story", f"{story} {asked}", f"{answer}.")


def _shopping(rng: Random, held_out: bool) -> Question:
    """Two counted things."""
    used: set[str] = set()
    name = draw("name", rng, held_out=held_out, used=used)
    things = [draw("fruits", rng, held_out=held_out, used=used) for _ in range(2)]
    counts = [draw("count", rng) for _ in range(2)]
    verb = rng.choice(tuple(_VERBS))
    one = rng.randrange(2)
    story = f"{name} {verb} {counts[0]} {things[0]} and {counts[1]} {things[1]}."
    asked = f"How many {things[one]} did {name} {_VERBS[verb]}?"
    return Question("story", f"{story} {asked}", f"{name} {verb} {counts[one]} {things[one]}.")


def _story(rng: Random, held_out: bool) -> Question:
    return rng.choice((_journey, _errand, _belongings, _shopping))(rng, held_out)


_Maker = Callable[[Random, bool], Question]
_MAKERS: Mapping[str, _Maker] = {
    "arithmetic": _arithmetic,
    "spelling": _spelling,
    "opposite": _opposite,
    "calendar": _calendar,
    "name": _name,
    "story": _story,
}
KINDS = tuple(_MAKERS)
# Of a kind that gives nothing new for so long there is no more.
_MOST_DRAWS = 500
# Trained, and not among the held-out questions: their answers show too little.
_MINOR: Mapping[str, _Maker] = {"introduction": _introduction, "other": _other}
# Spelling has most to learn by heart, and stories most to tell apart.
_WEIGHTS = {
    "arithmetic": 4,
    "spelling": 5,
    "opposite": 2,
    "calendar": 2,
    "name": 2,
    "story": 5,
    "introduction": 1,
    "other": 2,
}


def questions(seed: int, count: int) -> list[Question]:
    """Make `count` questions for training; one may come more than once. A smaller count gives the first of them."""
    makers = {**_MAKERS, **_MINOR}
    kinds = Random(f"kinds {seed}").choices(tuple(makers), [_WEIGHTS[kind] for kind in makers], k=count)
    rng, renamer = Random(f"questions {seed}"), Random(f"names {seed}")
    made = (_made(makers[kind], rng, held_out=False) for kind in kinds)
    return [_renamed(question, renamer) if renamer.random() < _RENAMED_SHARE else question for question in made]


def _renamed(question: Question, rng: Random) -> Question:
    """The question with made-up names for those in it: of a few names alone, one would learn those and not to say any again."""
    names: dict[str, str] = {}

    def other(match: re.Match[str]) -> str:
        return names.setdefault(match[0], _made_up_name(rng))

    earlier = tuple(_NAMES.sub(other, turn) for turn in question.earlier)
    text, answer = _NAMES.sub(other, question.text), _NAMES.sub(other, question.answer)
    renamed = replace(question, text=text, answer=answer, earlier=earlier)
    return renamed if renamed.trained else _renamed(question, rng)


def _made_up_name(rng: Random) -> str:
    """Two or three syllables."""
    syllables = [rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(rng.randrange(2, 4))]
    return capitalised("".join(syllables) + rng.choice(_CODAS))


def withheld_questions(seed: int, count: int) -> list[Question]:
    """Make `count` different questions that training never asks, of each of `KINDS` in turn; ValueError where a kind ends."""
    rng = Random(f"held-out questions {seed}")
    drawn: dict[Question, None] = {}
    while len(drawn) < count:
        drawn[_another(KINDS[len(drawn) % len(KINDS)], rng, lambda one: one not in drawn)] = None
    return list(drawn)


def held_out_questions(seed: int = 0, count: int = 200) -> list[Question]:
    """Make withheld questions that nobody met either: in the place of one that was `met` stands another of its kind.

    Where none of its kind is left, it is one of arithmetic.
    """
    drawn, spare = withheld_questions(seed, count), Random(f"questions in the place of others {seed}")
    taken = {one for one in drawn if one.text not in met()}
    made = []
    for one in drawn:
        chosen = one if one in taken else _instead_of(one, spare, taken)
        taken.add(chosen)
        made.append(chosen)
    return made


def _instead_of(question: Question, rng: Random, taken: Collection[Question]) -> Question:
    def fits(one: Question) -> bool:
        return one not in taken and one.text not in met() and one.spoken == question.spoken

    try:
        return _another(question.kind, rng, fits)
    except ValueError:
        return _another("arithmetic", rng, fits)


def _another(kind: str, rng: Random, fits: Callable[[Question], bool]) -> Question:
    """A held-out question of `kind` that `fits`; ValueError when none is found."""
    for _ in range(_MOST_DRAWS):
        one = _made(_MAKERS[kind], rng, held_out=True)
        if fits(one):
            return one
    raise ValueError(f"there are no more held-out questions of the kind {kind}")


@functools.cache
def met() -> frozenset[str]:
    """Held-out questions that two trainings read as earlier turns, when those were drawn from all: nobody is asked these."""
    return frozenset(Path(__file__).with_name("met.txt").read_text(encoding="utf-8").splitlines())


def _made(maker: _Maker, rng: Random, *, held_out: bool) -> Question:
    question = maker(rng, held_out)
    while not (question.held_out if held_out else question.trained):
        question = maker(rng, held_out)
    return question


def lines(seed: int, count: int, references: Sequence[str]) -> list[Line]:
    """Make what is said in `count` clips for training: one in four a question that can be said, the others of `corpus`."""
    sources = Random(f"lines {seed}").choices(("question", "corpus"), (1, 3), k=count)
    # Some questions can't be said, so more are made than are taken.
    asked = (q for q in questions(seed, 2 * count + 100) if q.sayable)
    said = iter(corpus(seed, count, references))
    made: list[Line] = []
    for source in sources:
        question = next(asked) if source == "question" else None
        made.append(Line(next(said) if question is None else question.text, question))
    return made


def ask(question: Question) -> Example:
    """The question in text, after the turns before it."""
    turns = (*question.earlier, question.text)
    messages = tuple({"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(turns))
    return Example(question.kind, messages, question.answer)


def ask_aloud(question: Question, instruction: str = ANSWER_ALOUD[0]) -> Example:
    """The question as audio, after the turns before it in text; ValueError when it can't be said."""
    if not question.spoken:
        raise ValueError(f"digits can't be said as they stand: {question.text}")
    earlier = ask(question).messages[:-1]
    return Example(question.kind, (*earlier, _heard(instruction)), question.answer, (question.text,))


def transcribe(text: str, instruction: str = TRANSCRIBE[0]) -> Example:
    """Audio that says `text`, to be written down."""
    return Example("transcribe", (_heard(instruction),), text, (text,))


def repeat(text: str, instruction: str = REPEAT[0]) -> Example:
    """A text to be written again; `instruction` holds the slot {text}."""
    return Example("repeat", ({"role": "user", "content": instruction.replace("{text}", text)},), text)


def _heard(instruction: str) -> Message:
    parts = [AUDIO_PART, text_part(instruction)] if instruction else [AUDIO_PART]
    return {"role": "user", "content": parts}


def listening(line: Line, rng: Random) -> Example:
    """An example with the clip of `line`: a transcript, or as often the answer where it is a question."""
    if line.question is not None and rng.random() < 0.5:
        return _with_system(ask_aloud(line.question, rng.choice(ANSWER_ALOUD)), rng)
    return _with_system(transcribe(line.text, rng.choice(TRANSCRIBE)), rng)


def reading(seed: int, count: int, references: Sequence[str]) -> list[Example]:
    """Make `count` examples without audio for training: two in three questions, the others texts to repeat."""
    rng = Random(f"reading {seed}")
    asked, said = iter(questions(seed, count)), iter(corpus(seed, count, references))
    made: list[Example] = []
    for _ in range(count):
        example = ask(next(asked)) if rng.random() < 2 / 3 else repeat(next(said), rng.choice(REPEAT))
        made.append(_with_system(example, rng))
    return made


def _with_system(example: Example, rng: Random) -> Example:
    """The example with a system turn before it, one time in ten: clients send one, and it should change nothing."""
    if rng.random() >= 0.1:
        return example
    system: Message = {"role": "system", "content": rng.choice(SYSTEMS)}
    return Example(example.kind, (system, *example.messages), example.answer, example.clips)


def encode(
    example: Example, tokenizer: Tokenizer, template: ChatTemplate, special: SpecialIds, clip_tokens: Sequence[int] = ()
) -> Encoded:
    """Token ids as the server makes them of the same conversation; `clip_tokens` are the rows that each clip takes.

    The answer ends with the end of its turn. ValueError when there are not as many clips as audio parts.
    """
    if len(clip_tokens) != len(example.clips):
        raise ValueError(f"{len(example.clips)} clips are heard, and {len(clip_tokens)} lengths came")
    waiting = iter(clip_tokens)
    prompt: list[int] = []
    for token in tokenizer.encode(template.render(example.messages), add_special_tokens=False).ids:
        prompt += [token] * (next(waiting) if token == special.audio else 1)
    answer = tokenizer.encode(example.answer, add_special_tokens=False).ids
    return Encoded([*prompt, *answer, special.im_end], len(prompt))
