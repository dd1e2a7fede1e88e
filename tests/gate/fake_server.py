"""A small real HTTP server that speaks the engine's contract (and OpenAI's), with faults and delays to order.

Tests copy this file to `engine/server/cli.py` of a scratch tree, so the gate starts it as it starts the real engine. What it
does wrong is read from `engine/behaviour.json` of that tree; tokens are a function of the prompt and audio bytes alone.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import hashlib
import io
import json
import os
import signal
import struct
import sys
import time
import wave
from pathlib import Path

from aiohttp import web

PACKAGE = Path(__file__).resolve().parent.parent
SUFFIXES = {".py", ".json", ".jinja", ".toml"}
FRAME_SAMPLES = 1920
FRAMES_A_CHUNK = 4
WORDS = (
    "the",
    "a",
    "cat",
    "dog",
    "sat",
    "on",
    "mat",
    "river",
    "hill",
    "song",
    "boat",
    "light",
    "stone",
    "wind",
    "rain",
    "fire",
)

DEFAULTS: dict[str, object] = {
    "token_ms": 0.5,  # wait before each token
    "boot_ms": 0,  # wait before /health says ok
    "tokens": 12,  # length of a reply without ignore_eos
    "flip": None,  # {"marker": text in the prompt, "step": n}: token n is another one
    "raise_on": None,  # a prompt with this marker ends in an error line
    "refuse_on": None,  # a prompt with this marker gets a 400
    "die_after": None,  # the process ends abruptly when it gets this many-th request
    "hang_after": None,  # from this many-th request on, nothing is ever sent
    "lose_audio": False,  # the last chunk of speech is not sent, though counted
    "no_audio": False,  # speech is never sent
    "short_by": 0,  # this many tokens fewer than asked with ignore_eos
    "cut": False,  # the stream ends without its last line
    "source_digest": None,  # what /info states instead of the truth
    "weights_digest": None,
    "ignore_sigterm": False,
    "exit_at_start": None,  # an exit code, straight away
    "usage_after": None,  # exit code 64 after this many boots, counted beside the model
    "peer": False,  # OpenAI's interface alone: no /health, /info, /metrics or /generate
    "page": False,  # a peer's page for people at every other address
    "sound": "openai",  # how chat completions send sound; "omni": a WAV file a chunk in delta.content
    "key": None,  # the API key that every request must bring
    "more_prompt": 0,  # prompt tokens counted beside those of the text
    "no_usage": False,  # chat completions never send usage
}


def source_digest() -> str:
    total = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*"), key=lambda path: path.relative_to(PACKAGE).as_posix()):
        if path.is_file() and path.suffix in SUFFIXES and "__pycache__" not in path.parts:
            total.update(path.relative_to(PACKAGE).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()


def weights_digest(folder: Path) -> str:
    total = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.is_file():
            total.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest() + b"\0")
    return total.hexdigest()


def note(event: str) -> None:
    if "FAKE_LOG" in os.environ:
        with open(os.environ["FAKE_LOG"], "a", encoding="utf-8") as log:
            log.write(f"{Path.cwd().name} {event}\n")


class Fake:
    def __init__(self, model: Path, behaviour: dict[str, object]) -> None:
        self.model, self.behaviour = model, behaviour
        self.began = time.monotonic()
        self.requests = self.tokens = self.steps = 0

    async def health(self, _: web.Request) -> web.Response:
        ready = (time.monotonic() - self.began) * 1e3 >= float(self.behaviour["boot_ms"])
        return web.json_response({"status": "ok" if ready else "starting"}, status=200 if ready else 503)

    async def info(self, _: web.Request) -> web.Response:
        return web.json_response(
            {
                "source_root": str(PACKAGE.parent),
                "source_digest": self.behaviour["source_digest"] or source_digest(),
                "weights_digest": self.behaviour["weights_digest"] or weights_digest(self.model),
                "commit": None,
                "dirty": False,
                "api": ["generate/1"],
                "tasks": ["T2T", "A2T", "T2S", "A2S"],
                "boot_seconds": 0.1,
                "switches": {},
                "arguments": sys.argv[1:],
            }
        )

    async def metrics(self, _: web.Request) -> web.Response:
        return web.Response(
            text=f"# HELP walkgate_tokens_total t\nwalkgate_tokens_total {self.tokens}.0\n"
            f'walkgate_requests_total{{task="any"}} {self.requests}.0\npython_info 1.0\n'
        )

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        body.setdefault("text", " ".join(map(str, body.get("prompt_token_ids", []))))
        self.requests += 1
        if self.requests == self.behaviour["die_after"]:
            os._exit(7)
        if self.behaviour["hang_after"] is not None and self.requests >= int(self.behaviour["hang_after"]):
            await asyncio.sleep(3600)
        if self.behaviour["refuse_on"] and self.behaviour["refuse_on"] in body["text"]:
            fault = {"message": "this prompt is refused", "field": "text", "code": "refused"}
            return web.json_response({"error": fault}, status=400)
        reply = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await reply.prepare(request)
        for line in self.lines(body):
            await asyncio.sleep(float(self.behaviour["token_ms"]) / 1e3)
            await reply.write(json.dumps(line).encode() + b"\n")
        await reply.write_eof()
        return reply

    async def page(self, _: web.Request) -> web.Response:
        return web.Response(text="<html>Welcome</html>", content_type="text/html")

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "fake", "object": "model"}]})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if self.behaviour["key"] and request.headers.get("Authorization") != f"Bearer {self.behaviour['key']}":
            fault = {"message": "Unauthorized", "type": "invalid_request_error", "param": None, "code": 401}
            return web.json_response({"error": fault}, status=401)
        asked, self.requests = as_generate(body), self.requests + 1
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(request)
        for chunk in self.chunks(asked):
            await asyncio.sleep(float(self.behaviour["token_ms"]) / 1e3)
            await reply.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        if not self.behaviour["cut"]:
            await reply.write(b": bye\n\ndata: [DONE]\n\n")
        await reply.write_eof()
        return reply

    def chunks(self, asked: dict[str, object]):
        yield chunk({"role": "assistant", "content": ""})
        for line in self.lines(asked):
            if "error" in line:
                yield {"error": {"message": line["error"]["message"], "type": "server_error", "code": None}}
                return
            if "finished" in line:
                yield chunk({}, finish_reason=line["finish_reason"])
                usage = {key: line["usage"][key] for key in ("prompt_tokens", "completion_tokens")}
                if not self.behaviour["no_usage"]:
                    yield {"object": "chat.completion.chunk", "choices": [], "usage": usage}
            elif "pcm" not in line:
                yield chunk({"content": line["text"]})
            elif self.behaviour["sound"] == "openai":
                yield chunk({"audio": {"id": "a", "data": line["pcm"]}})
            else:
                data = base64.b64encode(wav(base64.b64decode(line["pcm"]))).decode()
                usage = {"prompt_tokens": 0, "completion_tokens": 0}
                yield {**chunk({"content": data}), "modality": "audio", "usage": usage}

    def lines(self, body: dict[str, object]):
        if self.behaviour["raise_on"] and self.behaviour["raise_on"] in body["text"]:
            yield {"error": {"message": "planted", "field": None, "code": "internal"}}
            return
        ids = self.token_ids(body)
        self.tokens += len(ids)
        for index, token in enumerate(ids):
            self.steps += 1
            line = {"token_ids": [token], "text": WORDS[token % len(WORDS)] + " "}
            if body.get("top_logprobs"):
                line["logprobs"] = [{"token_ids": [token, token + 1], "logprobs": [-0.5, -1.5]}]
            if body.get("trace"):
                line["trace"] = [{"step": self.steps, "bucket": 1, "rows": 1}]
            yield line
            if index == 0 and "audio" in body["output"] and not self.behaviour["no_audio"]:
                yield from self.speech(ids, int(body.get("speech", {}).get("max_frames", 8)))
        if self.behaviour["cut"]:
            return
        frames = int(body.get("speech", {}).get("max_frames", 8)) if "audio" in body["output"] else 0
        sent = 0 if self.behaviour["no_audio"] else frames * FRAME_SAMPLES
        prompt = len(body["text"].split()) + int(self.behaviour["more_prompt"])
        usage = {"prompt_tokens": prompt, "completion_tokens": len(ids), "audio_samples": sent}
        yield {
            "finished": True,
            "finish_reason": "length" if body["ignore_eos"] else "stop",
            "audio_finish_reason": "length" if frames else None,
            "usage": usage,
        }

    def token_ids(self, body: dict[str, object]) -> list[int]:
        seed = str(body["text"]) + "".join(body.get("audio", []))
        most = int(body["max_tokens"])
        count = (
            most - int(self.behaviour["short_by"]) if body["ignore_eos"] else min(int(self.behaviour["tokens"]), most)
        )
        ids = [hashlib.sha256(f"{seed}/{step}".encode()).digest()[0] for step in range(count)]
        flip = self.behaviour["flip"]
        if flip and flip["marker"] in body["text"] and flip["step"] < len(ids):
            ids[flip["step"]] += 1
        return ids

    def speech(self, ids: list[int], frames: int):
        for start in range(0, frames, FRAMES_A_CHUNK):
            count = min(FRAMES_A_CHUNK, frames - start)
            if self.behaviour["lose_audio"] and start + count == frames:
                return
            pcm = b"".join(struct.pack("<h", (ids[0] * 7 + start + i) % 2000) for i in range(count * FRAME_SAMPLES))
            yield {"pcm": base64.b64encode(pcm).decode(), "sample_rate": 24000, "frames": count}


def as_generate(body: dict[str, object]) -> dict[str, object]:
    """What a chat completion asks, as a body of /generate."""
    content = body["messages"][-1]["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return {
        "text": "".join(part["text"] for part in parts if part["type"] == "text"),
        "audio": [part["input_audio"]["data"] for part in parts if part["type"] == "input_audio"],
        "output": body["modalities"],
        "max_tokens": body["max_tokens"],
        "ignore_eos": body.get("ignore_eos", False),
        "speech": body.get("speech", {}),
    }


def chunk(delta: dict[str, object], finish_reason: str | None = None) -> dict[str, object]:
    return {
        "object": "chat.completion.chunk",
        "choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}],
        "usage": None,
    }


def wav(pcm: bytes) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(24000)
        out.writeframes(pcm)
    return file.getvalue()


# The one model that the fake knows by name.
NAMED = "fake-30b"


def serve(model: Path, port: int) -> None:
    path = PACKAGE / "behaviour.json"
    behaviour = {**DEFAULTS, **(json.loads(path.read_text()) if path.is_file() else {})}
    if behaviour["exit_at_start"] is not None:
        print("the fake gives up at once: no such switch")
        raise SystemExit(int(behaviour["exit_at_start"]))
    if behaviour["usage_after"] is not None:
        boots = model.parent / "boots"
        boots.write_text(boots.read_text() + "." if boots.is_file() else ".")
        if len(boots.read_text()) > int(behaviour["usage_after"]):
            print("no more boots")
            raise SystemExit(64)
    if behaviour["ignore_sigterm"]:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    note("boot")
    fake = Fake(model, behaviour)
    app = web.Application(client_max_size=2**28)
    app.add_routes([web.get("/v1/models", fake.models), web.post("/v1/chat/completions", fake.chat)])
    if behaviour["page"]:
        app.add_routes([web.get("/{anything:.*}", fake.page)])
    if not behaviour["peer"]:
        app.add_routes(
            [
                web.get("/health", fake.health),
                web.get("/info", fake.info),
                web.get("/metrics", fake.metrics),
                web.post("/generate", fake.generate),
            ]
        )
    web.run_app(app, host="127.0.0.1", port=port, print=None, handle_signals=not behaviour["ignore_sigterm"])
    note("stop")


def tiny(out: Path) -> None:
    note("tiny")
    out.mkdir(parents=True)
    (out / "config.json").write_text('{"model_type": "fake"}\n')
    (out / "model.safetensors").write_bytes(bytes(range(256)))
    words = {"version": "1.0", "model": {"type": "WordLevel", "vocab": {"?": 0}, "unk_token": "?"}}
    (out / "tokenizer.json").write_text(json.dumps(words))


def main() -> None:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="command", required=True)
    server = commands.add_parser("serve")
    server.add_argument("model", type=Path)
    server.add_argument("--port", type=int)
    server.add_argument("--host")
    server.add_argument("--device")
    server.add_argument("--disable", default="")
    knower = commands.add_parser("info")
    knower.add_argument("model")
    maker = commands.add_parser("tiny")
    maker.add_argument("--out", type=Path)
    asked = parser.parse_args()
    if asked.command == "serve":
        serve(asked.model, asked.port)
    elif asked.command == "info":
        raise SystemExit(None if asked.model == NAMED else f"{asked.model} is no model of the fake")
    else:
        tiny(asked.out)


if __name__ == "__main__":
    main()
