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


def test_text_is_the_tokens_decoded_and_usage_counts_them(server: Server, tiny_checkpoint: Path):
    answer = server.answer(text=PROMPT, max_tokens=24, ignore_eos=True)
    tokenizer = Tokenizer.from_file(str(tiny_checkpoint / "tokenizer.json"))
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


def test_greedy_text_is_the_first_of_the_two_likeliest_and_the_trace_counts_its_steps(server: Server):
    answer = server.answer(text=PROMPT, max_tokens=12, ignore_eos=True, top_logprobs=2, trace=True)
    assert [top["token_ids"][0] for top in answer["logprobs"]] == answer["token_ids"]
    assert all(0 >= top["logprobs"][0] >= top["logprobs"][1] for top in answer["logprobs"])
    steps = [one["step"] for one in answer["trace"]]
    assert len(steps) == 12 and steps == sorted(set(steps))
    assert all(1 <= one["rows"] <= one["bucket"] for one in answer["trace"])


def test_log_probabilities_and_traces_come_only_when_asked_for(server: Server):
    assert not {"logprobs", "trace"} & server.answer(text=PROMPT, max_tokens=2).keys()


def test_ids_as_given_are_the_prompt_and_the_system_turn_changes_it(server: Server, tiny_checkpoint: Path):
    tokenizer = Tokenizer.from_file(str(tiny_checkpoint / "tokenizer.json"))
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


def test_one_placeholder_and_the_exact_run_mean_the_same_audio(server: Server, tiny_checkpoint: Path):
    tokenizer = Tokenizer.from_file(str(tiny_checkpoint / "tokenizer.json"))
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
    assert info["api"] == ["generate/1"]
    assert info["tasks"] == ["T2T", "A2T", "T2S", "A2S"]
    assert info["switches"] == dict.fromkeys(SWITCHES, True)
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
