"""What a client gets from /generate of a real server on the small checkpoint."""

from __future__ import annotations

import base64
import io
import json
import wave
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from engine.detokenize import TokenBytes
from engine.model.omni import OmniModel, load_model
from engine.request import Sampling
from tests.naive import cut_at, generate
from tests.server.serving import Server, audio_file, base64_text, multipart, tone

PROMPT = "Tell me how the sea sounds at night."


def joined(lines: list[dict], key: str) -> list:
    return [one for line in lines for one in line.get(key, [])]


def pcm_of(lines: list[dict]) -> bytes:
    return b"".join(base64.b64decode(line["pcm"]) for line in lines if "pcm" in line)


def wav_pcm(data: str) -> bytes:
    with wave.open(io.BytesIO(base64.b64decode(data))) as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (1, 2, 24000)
        return file.readframes(file.getnframes())


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint: Path) -> Tokenizer:
    return Tokenizer.from_file(str(tiny_checkpoint / "tokenizer.json"))


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Path) -> OmniModel:
    return load_model(tiny_checkpoint)


def test_text_is_the_tokens_decoded_and_usage_counts_them(server: Server, tokenizer: Tokenizer):
    answer = server.answer(text=PROMPT, max_tokens=24, ignore_eos=True)
    prompt = f"<|im_start|>user\n{PROMPT}<|im_end|>\n<|im_start|>assistant\n"
    assert len(answer["token_ids"]) == 24
    assert answer["text"] == tokenizer.decode(answer["token_ids"])
    assert answer["finish_reason"] == "length"
    assert answer["audio"] is None
    assert answer["usage"] == {
        "prompt_tokens": len(tokenizer.encode(prompt).ids),
        "completion_tokens": 24,
        "audio_tokens_in": 0,
        "audio_seconds_in": 0.0,
        "audio_frames": 0,
        "audio_samples": 0,
        "audio_seconds_out": 0.0,
    }


def test_a_stream_brings_what_the_single_object_holds(server: Server):
    body = {"text": PROMPT, "max_tokens": 20, "ignore_eos": True, "top_logprobs": 2, "trace": True}
    whole, lines = server.answer(**body), server.lines(**body)
    assert joined(lines, "token_ids") == whole["token_ids"]
    assert "".join(line.get("text", "") for line in lines) == whole["text"]
    assert joined(lines, "logprobs") == whole["logprobs"]
    assert lines[-1] == {
        "finished": True,
        **{key: whole[key] for key in ("finish_reason", "audio_finish_reason", "usage")},
    }
    assert [line for line in lines if line.get("finished")] == lines[-1:]


@pytest.mark.parametrize("count", [1, 2, 5, 20])
def test_as_many_log_probabilities_come_as_are_asked_for_with_that_of_the_chosen_token(server: Server, count: int):
    body = {"text": PROMPT, "max_tokens": 8, "ignore_eos": True, "temperature": 1.5, "seed": 3}
    answer = server.answer(**body, top_logprobs=count)
    assert answer["token_ids"] == server.answer(**body)["token_ids"]
    assert [len(step["token_ids"]) for step in answer["logprobs"]] == [count] * 8
    for token, step in zip(answer["token_ids"], answer["logprobs"], strict=True):
        assert step["logprobs"] == sorted(step["logprobs"], reverse=True)
        if token in step["token_ids"]:
            assert step["logprob"] == step["logprobs"][step["token_ids"].index(token)]
        else:
            assert step["logprob"] <= step["logprobs"][-1]
    wide = server.answer(**body, top_logprobs=20)["logprobs"]
    assert [step["token_ids"] for step in answer["logprobs"]] == [step["token_ids"][:count] for step in wide]


def test_greedy_text_is_the_first_of_the_two_likeliest_and_the_trace_counts_its_steps(server: Server):
    answer = server.answer(text=PROMPT, max_tokens=12, ignore_eos=True, top_logprobs=2, trace=True)
    assert [top["token_ids"][0] for top in answer["logprobs"]] == answer["token_ids"]
    assert all(0 >= top["logprobs"][0] >= top["logprobs"][1] for top in answer["logprobs"])
    steps = [one["step"] for one in answer["trace"]]
    assert len(steps) == 12 and steps == sorted(set(steps))
    assert all(1 <= one["rows"] <= one["bucket"] for one in answer["trace"])


def test_log_probabilities_and_traces_come_only_when_asked_for(server: Server):
    assert not {"logprobs", "trace"} & server.answer(text=PROMPT, max_tokens=2).keys()


def test_ids_as_given_are_the_prompt_and_the_system_turn_changes_it(server: Server, tokenizer: Tokenizer):
    turns = f"<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n{PROMPT}<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.encode(turns).ids
    by_ids = server.answer(prompt_token_ids=ids, max_tokens=16)
    by_text = server.answer(text=PROMPT, system="Be brief.", max_tokens=16)
    assert by_ids == by_text
    assert by_ids["usage"]["prompt_tokens"] == len(ids)
    assert server.answer(text=PROMPT, max_tokens=16)["token_ids"] != by_ids["token_ids"]


def test_the_default_length_is_256_and_shrinks_to_what_a_long_prompt_leaves(server: Server):
    assert server.answer(text=PROMPT, ignore_eos=True)["usage"]["completion_tokens"] == 256
    answer = server.answer(prompt_token_ids=[65] * 4090, ignore_eos=True)
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (4090, 6)
    assert answer["finish_reason"] == "length"


def test_a_seed_decides_what_is_sampled(server: Server):
    sampled = [
        server.answer(text=PROMPT, max_tokens=16, temperature=1.0, top_k=50, top_p=0.95, seed=seed, ignore_eos=True)
        for seed in (7, 7, 8)
    ]
    assert sampled[0] == sampled[1]
    assert sampled[0]["token_ids"] != sampled[2]["token_ids"]


EVERY_WISH = {
    "temperature": 0.8,
    "top_k": 40,
    "top_p": 0.95,
    "min_p": 0.02,
    "repetition_penalty": 1.1,
    "frequency_penalty": 0.3,
    "presence_penalty": -0.2,
    "logit_bias": {"65": 2.0},
}


@pytest.mark.parametrize(
    "wish",
    [
        {"temperature": 1.0, "min_p": 0.9},
        {"repetition_penalty": 1.5},
        {"frequency_penalty": 1.5},
        {"presence_penalty": 1.5},
        {"presence_penalty": -2.0},
        {"logit_bias": {"65": 1.5, "410": -100.0}},
        EVERY_WISH,
    ],
    ids=lambda wish: " ".join(wish),
)
def test_each_way_to_choose_a_token_is_the_naive_loops_and_moves_tokens(
    server: Server, tokenizer: Tokenizer, model: OmniModel, wish: dict
):
    ids = tokenizer.encode(f"<|im_start|>user\n{PROMPT}<|im_end|>\n<|im_start|>assistant\n").ids
    body = {"prompt_token_ids": ids, "max_tokens": 48, "ignore_eos": True, "seed": 9}
    bias = {int(token): value for token, value in wish.get("logit_bias", {}).items()}
    sampling = Sampling(**wish | {"logit_bias": bias, "seed": 9})
    tokens = server.answer(**body, **wish)["token_ids"]
    assert tokens == generate(model, ids, [], 48, sampling=sampling, ignore_eos=True).token_ids
    assert tokens != server.answer(**body, temperature=wish.get("temperature", 0.0))["token_ids"]


# --- Stop strings and stop tokens ---

SPELL = {"text": PROMPT, "ignore_eos": True, "logit_bias": {"195": 100, "169": 100}, "frequency_penalty": 1.0}
"""Text of the two bytes of "é" only, in an order that the model's logits and the penalty decide."""


def expected_cut(of: TokenBytes, ids: list[int], stop: list[str]) -> tuple[int, str] | None:
    """How many of `ids` a text that is cut at `stop` takes, and that text."""
    for count in range(1, len(ids) + 1):
        data = b"".join(map(of.of, ids[:count]))
        if (cut := cut_at(data, stop)) is not None:
            return count, data[:cut].decode(errors="replace")
    return None


def assert_cut(server: Server, body: dict, stop: list[str], count: int, text: str) -> None:
    """The whole answer and the stream take `count` tokens and show `text`; a stream shows nothing that it takes back."""
    whole, lines = server.answer(**body, stop=stop), server.lines(**body, stop=stop)
    assert (whole["finish_reason"], whole["text"], len(whole["token_ids"])) == ("stop", text, count)
    assert whole["usage"]["completion_tokens"] == count
    assert "".join(line.get("text", "") for line in lines) == text
    assert joined(lines, "token_ids") == whole["token_ids"]
    assert lines[-1]["finish_reason"] == "stop"


def spelled(tokenizer: Tokenizer, ids: list[int], tokens: int) -> list[tuple[int, str]]:
    """Each run of `tokens` tokens of `ids` that is whole characters and not only blanks: where it ends, and its text."""
    of, runs = TokenBytes(tokenizer), []
    for end in range(tokens, len(ids) + 1):
        pieces = [of.of(token) for token in ids[end - tokens : end]]
        text = b"".join(pieces).decode(errors="replace")
        if all(pieces) and "\ufffd" not in text and text.strip():
            runs.append((end, text))
    return runs


def test_a_stop_string_over_three_tokens_ends_the_text_where_it_begins(server: Server, tokenizer: Tokenizer):
    body = {"text": PROMPT, "max_tokens": 64, "ignore_eos": True}
    ids = server.answer(**body)["token_ids"]
    runs = spelled(tokenizer, ids, 3)
    assert runs
    for _, stop in runs[:4]:
        wanted = expected_cut(TokenBytes(tokenizer), ids, [stop])
        assert wanted is not None
        assert_cut(server, body, [stop], *wanted)


def test_a_stop_string_at_the_limit_still_stops_and_one_token_less_shows_what_it_had(
    server: Server, tokenizer: Tokenizer
):
    body = {"text": PROMPT, "ignore_eos": True}
    ids = server.answer(**body, max_tokens=64)["token_ids"]
    (_, stop) = spelled(tokenizer, ids, 3)[0]
    count, text = expected_cut(TokenBytes(tokenizer), ids, [stop])
    assert_cut(server, body | {"max_tokens": count}, [stop], count, text)
    short = server.answer(**body, max_tokens=count - 1, stop=stop)
    assert short["finish_reason"] == "length"
    assert short["text"] == tokenizer.decode(ids[: count - 1])


def test_a_character_of_two_tokens_is_cut_whole(server: Server, tokenizer: Tokenizer):
    body = SPELL | {"max_tokens": 24}
    ids = server.answer(**body)["token_ids"]
    assert set(ids) == {195, 169}
    count, text = expected_cut(TokenBytes(tokenizer), ids, ["é"])
    assert_cut(server, body, ["é"], count, text)
    count, text = expected_cut(TokenBytes(tokenizer), ids, ["éé", "é\n"])
    assert_cut(server, body, ["é\n", "éé"], count, text)


def test_a_stop_string_that_never_comes_changes_nothing(server: Server):
    body = {"text": PROMPT, "max_tokens": 20, "ignore_eos": True}
    assert server.answer(**body, stop=["no such words", "\u2603"]) == server.answer(**body)


def test_a_stop_token_ends_the_text_and_is_not_shown(server: Server, tokenizer: Tokenizer):
    body = {"text": PROMPT, "max_tokens": 20, "ignore_eos": True}
    ids = server.answer(**body)["token_ids"]
    token = ids[9]
    end = ids.index(token)
    whole, lines = server.answer(**body, stop_token_ids=[token, 3]), server.lines(**body, stop_token_ids=[token, 3])
    assert (whole["finish_reason"], whole["token_ids"]) == ("stop", ids[: end + 1])
    assert whole["text"] == tokenizer.decode(ids[:end]) == "".join(line.get("text", "") for line in lines)


@pytest.mark.parametrize(
    ("seconds", "rate", "channels", "kind", "tokens"),
    [
        (2.0, 16000, 1, "WAV", 26),
        (2.0, 16000, 1, "FLAC", 26),
        (2.0, 8000, 1, "WAV", 26),
        (2.0, 48000, 2, "WAV", 26),
        (2.0, 44100, 6, "FLAC", 26),
        (1.25, 16000, 1, "OGG", 17),
        (31.0, 16000, 1, "FLAC", 403),
        (0.025, 16000, 1, "WAV", 1),
    ],
)
def test_audio_of_any_rate_and_shape_is_heard_whole(
    server: Server, seconds: float, rate: int, channels: int, kind: str, tokens: int
):
    data = audio_file(tone(seconds, rate, channels), rate, kind)
    usage = server.answer(text="Write it down.", audio=base64_text(data), max_tokens=4)["usage"]
    assert usage["audio_tokens_in"] == tokens
    assert usage["audio_seconds_in"] == pytest.approx(seconds, abs=1e-3)
    without = server.answer(text="Write it down.", max_tokens=4)["usage"]["prompt_tokens"]
    assert usage["prompt_tokens"] == without + tokens + 2


def test_wav_flac_and_stereo_of_the_same_samples_give_the_same_answer(server: Server):
    files = [
        audio_file(tone(1.5), 16000, "WAV"),
        audio_file(tone(1.5), 16000, "FLAC", "PCM_16"),
        audio_file(tone(1.5, channels=2), 16000, "WAV"),
    ]
    answers = [server.answer(text="Listen.", audio=[base64_text(data)], max_tokens=12)["token_ids"] for data in files]
    assert answers[0] == answers[1] == answers[2]
    other = server.answer(text="Listen.", audio=base64_text(audio_file(tone(1.5)[::-1])), max_tokens=12)
    assert other["token_ids"] != answers[0]


def test_a_file_of_a_form_is_the_same_request_as_base64(server: Server):
    first, second = audio_file(tone(1.0)), audio_file(tone(0.5)[::-1], 16000, "FLAC")
    asked = {"text": "Compare the two.", "max_tokens": 8}
    body, headers = multipart(
        [("request", None, json.dumps(asked).encode()), ("audio", "a.wav", first), ("audio", "b.flac", second)]
    )
    status, data = server.request("POST", "/generate", body, headers)
    assert status == 200, data
    assert json.loads(data) == server.answer(**asked, audio=[base64_text(first), base64_text(second)])
    assert json.loads(data)["usage"]["audio_tokens_in"] == 13 + 7


def test_a_form_without_audio_is_a_plain_request(server: Server):
    body, headers = multipart([("request", "body.json", b'{"text": "Hi.", "max_tokens": 3}')])
    status, data = server.request("POST", "/generate", body, headers)
    assert status == 200
    assert json.loads(data) == server.answer(text="Hi.", max_tokens=3)


def test_audio_may_stand_alone_without_text(server: Server):
    assert (
        server.answer(text="", audio=base64_text(audio_file(tone(1.0))), max_tokens=3)["usage"]["audio_tokens_in"] == 13
    )


def test_one_placeholder_and_the_exact_run_mean_the_same_audio(server: Server, tokenizer: Tokenizer):
    turn = "<|im_start|>user\n<|audio_start|>{}<|audio_end|>Listen.<|im_end|>\n<|im_start|>assistant\n"
    one, full = (tokenizer.encode(turn.format("<|audio_pad|>" * count)).ids for count in (1, 13))
    audio = base64_text(audio_file(tone(1.0)))
    answers = [server.answer(prompt_token_ids=ids, audio=audio, max_tokens=8) for ids in (one, full)]
    assert answers[0] == answers[1] == server.answer(text="Listen.", audio=audio, max_tokens=8)


def test_speech_comes_with_its_text_and_the_wav_is_the_stream(server: Server):
    body = {
        "text": PROMPT,
        "output": ["text", "audio"],
        "max_tokens": 12,
        "speech": {"max_frames": 10, "ignore_eos": True, "codes": True},
    }
    whole, lines = server.answer(**body), server.lines(**body)
    pcm = wav_pcm(whole["audio"]["data"])
    assert pcm == pcm_of(lines)
    assert len(pcm) // 2 == 1365 + 9 * 1920 == whole["usage"]["audio_samples"]
    assert whole["usage"]["audio_frames"] == whole["audio"]["frames"] == 10
    assert whole["usage"]["audio_seconds_out"] == pytest.approx((1365 + 9 * 1920) / 24000)
    assert sum(line.get("frames", 0) for line in lines) == 10
    assert joined(lines, "codes") == whole["audio"]["codes"]
    assert [len(frame) for frame in whole["audio"]["codes"]] == [16] * 10
    assert joined(lines, "token_ids") == whole["token_ids"] == server.answer(text=PROMPT, max_tokens=12)["token_ids"]
    assert whole["audio_finish_reason"] == "length"


def test_speech_alone_sends_no_text_and_the_same_sound(server: Server):
    body = {"text": PROMPT, "max_tokens": 8, "speech": {"max_frames": 6, "ignore_eos": True}}
    alone, both = server.lines(**body, output=["audio"]), server.lines(**body, output=["text", "audio"])
    assert not any("text" in line or "token_ids" in line for line in alone)
    assert pcm_of(alone) == pcm_of(both) != b""
    assert alone[-1]["usage"]["completion_tokens"] == 8
    whole = server.answer(**body, output=["audio"])
    assert (whole["text"], whole["token_ids"]) == ("", [])


def test_voices_differ_and_their_names_have_no_case(server: Server):
    def speak(voice: str) -> str:
        speech = {"voice": voice, "max_frames": 4, "ignore_eos": True, "temperature": 0.0}
        return server.answer(text=PROMPT, output=["audio"], max_tokens=8, speech=speech)["audio"]["data"]

    assert speak("Ethan") == speak("ethan") != speak("chelsie")


def test_answers_in_company_are_the_answers_alone(server: Server):
    bodies = [{"text": f"{PROMPT} {place}", "max_tokens": 16, "ignore_eos": True} for place in range(6)]
    bodies += [
        {"text": f"Say {place}.", "output": ["text", "audio"], "max_tokens": 8, "speech": {"max_frames": 5}}
        for place in range(3)
    ]
    alone = [server.answer(**body) for body in bodies]
    with ThreadPoolExecutor(len(bodies)) as pool:
        together = list(pool.map(lambda body: server.answer(**body), bodies))
    assert together == alone


def test_info_says_what_is_served(server: Server, tiny_checkpoint: Path):
    from engine.config import SWITCHES
    from engine.model.weights import weights_digest
    from engine.server.source import package_folder, source_digest
    from tests.shared import REPOSITORY

    status, info = server.get("/info")
    assert status == 200
    assert info["source_root"] == str(REPOSITORY)
    assert info["source_digest"] == source_digest(package_folder())
    assert info["weights_digest"] == weights_digest(tiny_checkpoint)
    assert info["api"] == ["generate/1", "openai/1"]
    assert info["tasks"] == ["T2T", "A2T", "T2S", "A2S"]
    assert info["switches"] == dict.fromkeys(SWITCHES, True) | {"launch_ahead": False}  # as on every CPU
    assert info["limits"]["max_model_len"] == 4096
    assert info["limits"]["max_audio_seconds"] == 313
    assert info["device"] == "cpu"
    assert 0 < info["boot_seconds"] < 90
    assert {"python", "torch", "transformers", "walkgate"} <= info["versions"].keys()
    assert {"commit", "dirty", "captures", "model"} <= info.keys()


def test_metrics_count_requests_and_tokens(server: Server):
    before = server.metrics()
    server.answer(text=PROMPT, max_tokens=5, ignore_eos=True)
    after = server.metrics()
    assert after["http_requests_total"] - before["http_requests_total"] == 1
    assert after["tokens_total"] - before["tokens_total"] == 5
    assert after["engine_answered"] == 1
    assert after["http_open"] == after["requests_running"] == 0
    assert after["engine_resident_bytes"] > after["front_resident_bytes"] > 1e6
