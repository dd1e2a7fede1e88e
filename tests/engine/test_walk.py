"""The walk table: the shipped one is sound, and each kind of contradiction is refused with the name of what is wrong."""

import ast
from dataclasses import replace
from pathlib import Path

import pytest

from engine.errors import DeclarationError
from engine.model.walks import TALKER_DECODE, TALKER_WALKS, THINKER_DECODE_WALKS, THINKER_WALKS, walk_table
from engine.step import Component
from engine.walk import Destination, DeviceLoopback, Emit, TokenStop, Walk, WalkTable, check

ENGINE = Path(__file__).resolve().parents[2] / "engine"
TEXT_STOP, CODEC_EOS = frozenset({151645}), 2150
CLIENT, DEVICE, STREAM = Destination.CLIENT, Destination.DEVICE, Destination.STREAM
TALKER, THINKER = Component.TALKER, Component.THINKER

# A small sound table; each test below breaks one thing in it.
PREFILL = Walk("prefill", THINKER, (Emit("token", frozenset({CLIENT, DEVICE})),))
DECODE = Walk("decode", THINKER, (Emit("token", frozenset({CLIENT, DEVICE, STREAM}), TALKER),), decode=True)
SPEAK = Walk("speak", TALKER, (Emit("frame", frozenset({CLIENT})),))
LOOP = DeviceLoopback(THINKER, "token", written_by=frozenset({"prefill", "decode"}), read_by=frozenset({"decode"}))
STOP = TokenStop(THINKER, "token", frozenset({7}), frozenset({"prefill", "decode"}))
SOUND = WalkTable(walks=(PREFILL, DECODE, SPEAK), loopbacks=(LOOP,), stops=(STOP,))
LANES = (THINKER, TALKER)


def with_walk(walk: Walk) -> WalkTable:
    """The sound table with the walk of the same name replaced."""
    return replace(SOUND, walks=tuple(walk if one.name == walk.name else one for one in SOUND.walks))


def test_the_shipped_table_is_sound_when_every_component_has_a_lane() -> None:
    check(walk_table(TEXT_STOP, CODEC_EOS), list(Component))


def test_the_table_of_a_model_without_speech_is_sound_with_the_two_lanes_that_it_has() -> None:
    table = walk_table(TEXT_STOP, None)
    check(table, [Component.AUDIO_ENCODER, THINKER])
    assert [walk.name for walk in table.walks] == [
        "audio_encoder",
        "thinker_prefill",
        "thinker_decode",
        "thinker_text_decode",
    ]
    assert [stop.stop_ids for stop in table.stops] == [TEXT_STOP]


def test_the_small_table_of_these_tests_is_sound() -> None:
    check(SOUND, LANES)


@pytest.mark.parametrize("missing", list(Component))
def test_the_shipped_table_is_refused_when_any_component_lacks_its_lane(missing: Component) -> None:
    with pytest.raises(DeclarationError, match=missing.value):
        check(walk_table(TEXT_STOP, CODEC_EOS), [component for component in Component if component != missing])


CONTRADICTIONS = {
    "two walks of one name": (replace(SOUND, walks=(*SOUND.walks, replace(SPEAK, emits=()))), "unique.*speak"),
    "a walk whose component has no lane": (with_walk(replace(SPEAK, component=Component.CODE2WAV)), "speak.*code2wav"),
    "a value that goes nowhere": (with_walk(replace(SPEAK, emits=(Emit("frame", frozenset()),))), "speak.*nowhere"),
    "a stream without a target": (
        with_walk(replace(SPEAK, emits=(Emit("frame", frozenset({STREAM})),))),
        "speak.*stream_to",
    ),
    "a target without a stream": (
        with_walk(replace(SPEAK, emits=(Emit("frame", frozenset({CLIENT}), THINKER),))),
        "speak.*stream_to",
    ),
    "a stream into its own component": (
        with_walk(replace(SPEAK, emits=(Emit("frame", frozenset({STREAM}), TALKER),))),
        "speak.*own component",
    ),
    "a stream to a component without a lane": (
        with_walk(replace(SPEAK, emits=(Emit("frame", frozenset({STREAM}), Component.CODE2WAV),))),
        "speak.*code2wav.*no lane",
    ),
    "a loop-back whose writer keeps it off the device": (
        with_walk(replace(PREFILL, emits=(Emit("token", frozenset({CLIENT})),))),
        "prefill.*DEVICE",
    ),
    "a loop-back whose writer emits another signal": (
        replace(with_walk(replace(PREFILL, emits=(Emit("other", frozenset({DEVICE})),))), stops=()),
        "prefill.*DEVICE",
    ),
    "a loop-back of another component's walk": (
        replace(SOUND, loopbacks=(replace(LOOP, written_by=frozenset({"speak"})),)),
        "speak.*thinker",
    ),
    "a loop-back of an unknown walk": (
        replace(SOUND, loopbacks=(replace(LOOP, written_by=frozenset({"encode"})),)),
        "encode",
    ),
    "a loop-back that a prefill walk reads": (
        replace(SOUND, loopbacks=(replace(LOOP, read_by=frozenset({"prefill", "decode"})),)),
        "prefill.*no decode walk",
    ),
    "a loop-back that nobody writes": (
        replace(SOUND, loopbacks=(replace(LOOP, written_by=frozenset()),)),
        "token.*writes",
    ),
    "a loop-back that nobody reads": (
        replace(SOUND, loopbacks=(LOOP, replace(LOOP, read_by=frozenset()))),
        "token.*reads",
    ),
    "a decode walk that reads no loop-back": (replace(SOUND, loopbacks=()), r"decode walk decode.*\[\]"),
    "a decode walk that reads two loop-backs": (
        replace(SOUND, loopbacks=(LOOP, LOOP)),
        r"decode walk decode.*\['token', 'token'\]",
    ),
    "a stop on another component's walk": (
        replace(SOUND, stops=(replace(STOP, walks=frozenset({"decode", "speak"})),)),
        "speak.*thinker",
    ),
    "a stop on an unknown walk": (replace(SOUND, stops=(replace(STOP, walks=frozenset({"encode"})),)), "encode"),
    "a stop on a signal that its walk does not emit": (
        replace(SOUND, stops=(replace(STOP, signal="frame", walks=frozenset({"decode"})),)),
        "decode does not emit",
    ),
    "a stop without walks": (replace(SOUND, stops=(replace(STOP, walks=frozenset()),)), "token.*at least one walk"),
    "a stop without ids": (replace(SOUND, stops=(replace(STOP, stop_ids=frozenset()),)), "token.*stop id"),
}


@pytest.mark.parametrize("what", CONTRADICTIONS)
def test_a_table_that_contradicts_itself_is_refused_by_name(what: str) -> None:
    table, told = CONTRADICTIONS[what]
    with pytest.raises(DeclarationError, match=told):
        check(table, LANES)


def test_two_lanes_for_one_component_are_refused_because_a_walk_would_have_two_owners() -> None:
    with pytest.raises(DeclarationError, match="thinker"):
        check(SOUND, [*LANES, THINKER])


def test_every_shipped_walk_is_owned_by_exactly_one_component() -> None:
    table = walk_table(TEXT_STOP, CODEC_EOS)
    owned = {component: [walk.name for walk in table.of(component)] for component in Component}
    assert owned == {
        Component.AUDIO_ENCODER: ["audio_encoder"],
        Component.THINKER: ["thinker_prefill", "thinker_decode", "thinker_text_decode"],
        Component.TALKER: ["talker_prefill", "talker_decode"],
        Component.CODE2WAV: ["code2wav"],
    }
    assert sorted(name for names in owned.values() for name in names) == sorted(walk.name for walk in table.walks)


def test_every_shipped_walk_has_exactly_one_runner_class() -> None:
    from engine.runner import AudioRunner, Code2WavRunner, TalkerRunner, ThinkerRunner

    lanes = [one.component for one in (AudioRunner, ThinkerRunner, TalkerRunner, Code2WavRunner)]
    for walk in walk_table(TEXT_STOP, CODEC_EOS).walks:
        assert lanes.count(walk.component) == 1, walk.name


def test_shipped_values_go_where_the_design_says() -> None:
    table = walk_table(TEXT_STOP, CODEC_EOS)
    goes = {walk.name: [(one.signal, set(one.to), one.stream_to) for one in walk.emits] for walk in table.walks}
    assert goes == {
        "audio_encoder": [("audio_states", {STREAM}, THINKER)],
        "thinker_prefill": [("token", {CLIENT, DEVICE, STREAM}, TALKER)],
        "thinker_decode": [("token", {CLIENT, DEVICE, STREAM}, TALKER)],
        "thinker_text_decode": [("token", {CLIENT, DEVICE}, None)],
        "talker_prefill": [("frame", {DEVICE, STREAM}, Component.CODE2WAV)],
        "talker_decode": [("frame", {DEVICE, STREAM}, Component.CODE2WAV)],
        "code2wav": [("pcm", {CLIENT}, None)],
    }


def test_the_sets_of_decode_walks_are_what_the_table_declares() -> None:
    table = walk_table(TEXT_STOP, CODEC_EOS)
    assert {walk.name for walk in table.of(THINKER) if walk.decode} == THINKER_DECODE_WALKS
    assert {walk.name for walk in table.of(TALKER) if walk.decode} == {TALKER_DECODE}
    assert {walk.name for walk in table.of(THINKER)} == THINKER_WALKS
    assert {walk.name for walk in table.of(TALKER)} == TALKER_WALKS


@pytest.mark.parametrize("walk", sorted(THINKER_WALKS))
def test_text_ends_on_its_stop_id_in_every_walk_that_makes_text(walk: str) -> None:
    text, _ = walk_table(TEXT_STOP, CODEC_EOS).stops
    assert text.stops_on(walk, 151645)
    assert not text.stops_on(walk, 151644)


@pytest.mark.parametrize("walk", sorted(TALKER_WALKS))
def test_speech_ends_on_the_codec_end_and_never_on_a_text_stop_id(walk: str) -> None:
    text, speech = walk_table(TEXT_STOP, CODEC_EOS).stops
    assert speech.stops_on(walk, 2150)
    assert not speech.stops_on(walk, 151645)
    assert not text.stops_on(walk, 151645)


def test_an_unknown_walk_is_reported_with_the_names_that_exist() -> None:
    with pytest.raises(DeclarationError, match=r"'walk'.*prefill.*decode.*speak"):
        SOUND.walk("walk")
    assert SOUND.walk("speak") is SPEAK


# --- A comparison with one decode walk forgets the other: all go through the sets. ---

DECODE_NAMES = {"THINKER_DECODE", "THINKER_TEXT_DECODE", "thinker_decode", "thinker_text_decode"}


def _names(node: ast.AST) -> set[str]:
    found = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            found.add(part.id)
        elif isinstance(part, ast.Attribute):
            found.add(part.attr)
        elif isinstance(part, ast.Constant) and isinstance(part.value, str):
            found.add(part.value)
    return found


def single_walk_comparisons(source: str) -> list[int]:
    """The lines where a value is compared with, or looked up among, walks that are named one by one."""
    tree = ast.parse(source)
    compared = [node for node in ast.walk(tree) if isinstance(node, ast.MatchValue | ast.Compare)]
    return sorted(node.lineno for node in compared if _names(node) & DECODE_NAMES)


@pytest.mark.parametrize(
    "planted",
    [
        "if row.walk == THINKER_DECODE: pass",
        "if row.walk != walks.THINKER_TEXT_DECODE: pass",
        "if row.walk == 'thinker_decode': pass",
        "if row.walk in (THINKER_DECODE, OTHER): pass",
        "match row.walk:\n    case 'thinker_text_decode': pass",
    ],
)
def test_a_comparison_with_a_single_decode_walk_would_be_found(planted: str) -> None:
    assert single_walk_comparisons(planted)


def test_asking_the_set_of_decode_walks_is_no_such_comparison() -> None:
    assert single_walk_comparisons("if row.walk in THINKER_DECODE_WALKS: pass\nchosen = THINKER_DECODE") == []


def test_no_source_compares_with_a_single_decode_walk() -> None:
    sources = sorted(ENGINE.rglob("*.py"))
    assert len(sources) > 20
    found = {str(path): lines for path in sources if (lines := single_walk_comparisons(path.read_text()))}
    assert found == {}
