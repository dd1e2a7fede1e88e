"""Our own door, POST /generate (api generate/1): a JSON object a line, with token ids, log-probabilities and traces."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from gate.cell import SPEECH_TASKS, Cell
from gate.door import Pcm, Reply, Stamped
from gate.record import EventStamp, Item

# A server's number is bounded where it is read: the tables hold 64 bits, and none of these is ever negative.
Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
UNREADABLE = (msgspec.MsgspecError, RecursionError)  # the latter: JSON nested too deep


class _Top2(msgspec.Struct):
    token_ids: Annotated[list[Count], msgspec.Meta(min_length=2)]
    logprobs: Annotated[list[float], msgspec.Meta(min_length=2)]


class _Trace(msgspec.Struct):
    step: Count
    bucket: Count
    rows: Count


class _Usage(msgspec.Struct):
    prompt_tokens: Count = 0
    completion_tokens: Count = 0
    audio_samples: Count | None = None


class _Fault(msgspec.Struct):
    message: str = ""
    field: str | None = None
    code: str = ""


class _Line(msgspec.Struct):
    token_ids: list[Count] = []
    text: str = ""
    logprobs: list[_Top2] = []
    trace: list[_Trace] = []
    pcm: bytes = b""
    sample_rate: Count | None = None
    finished: bool = False
    finish_reason: str | None = None
    audio_finish_reason: str | None = None
    usage: _Usage | None = None
    error: _Fault | None = None


_DECODER = msgspec.json.Decoder(_Line)


class GenerateDoor:
    """POST /generate."""

    path = "/generate"
    accept = "application/x-ndjson"

    def body(self, cell: Cell, item: Item, root: Path) -> bytes:
        """The JSON body for one item in one cell; audio paths are relative to `root` unless absolute."""
        speech = cell.task in SPEECH_TASKS
        prompt = {"text": item.text or ""} if item.token_ids is None else {"prompt_token_ids": item.token_ids}
        body: dict[str, object] = {
            **prompt,
            "output": ["text", "audio"] if speech else ["text"],
            "stream": True,
            "max_tokens": cell.max_tokens,
            "temperature": 0.0,
            "ignore_eos": cell.ignore_eos,
        }
        if item.audio is not None:
            body["audio"] = [base64.b64encode((root / item.audio).read_bytes()).decode("ascii")]
        if cell.greedy:
            body |= {"top_logprobs": 2, "trace": True}
        if speech:
            body["speech"] = speech_fields(cell)
        return msgspec.json.encode(body)

    def read(self, lines: Sequence[Stamped]) -> Reply:
        """Add up the lines of a reply of status 200; what is wrong with the stream stands in `error`."""
        reply, pcm, finished = Reply(), Pcm(), False
        try:
            for t_us, data in lines:
                line = _DECODER.decode(data)
                if line.error is not None:
                    reply.error = _sentence(line.error)
                    return reply
                _add(reply, line, t_us, pcm.push(line.pcm))
                finished = line.finished
        except UNREADABLE as error:
            reply.error = f"a line of the stream is not what the contract says: {error}"
            return reply
        reply.pcm_samples, reply.pcm_sha256, reply.pcm = pcm.samples, pcm.digest(), bytes(pcm.data)
        reply.error = None if finished else "the stream ended without a final line"
        return reply

    def refusal(self, body: bytes) -> str:
        """The sentence in the body of another status."""
        try:
            fault = _DECODER.decode(body).error
        except UNREADABLE:
            fault = None
        return _sentence(fault) if fault else body[:200].decode("utf-8", errors="replace")


def speech_fields(cell: Cell) -> dict[str, object]:
    """The `speech` object of a cell: how many frames, and whether the speech may end by itself."""
    frames = {} if cell.max_frames is None else {"max_frames": cell.max_frames}
    return {**frames, "ignore_eos": cell.ignore_eos}


def _sentence(fault: _Fault) -> str:
    where = f" ({fault.field})" if fault.field else ""
    return f"{fault.code or 'error'}{where}: {fault.message}"


def _add(reply: Reply, line: _Line, t_us: int, samples: int) -> None:
    if line.token_ids or line.text or samples:
        reply.events.append(EventStamp(t_us, len(line.token_ids), len(line.text), samples))
    reply.token_ids += line.token_ids
    reply.text += line.text
    reply.sample_rate = line.sample_rate or reply.sample_rate
    reply.trace += [(row.step, row.bucket, row.rows) for row in line.trace]
    reply.top2 += [(*top.token_ids[:2], *top.logprobs[:2]) for top in line.logprobs]  # type: ignore[misc]
    reply.finish_reason, reply.audio_finish_reason = line.finish_reason, line.audio_finish_reason
    if line.usage is not None:
        reply.prompt_tokens, reply.completion_tokens = line.usage.prompt_tokens, line.usage.completion_tokens
        reply.stated_samples = line.usage.audio_samples
