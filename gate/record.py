"""What a run writes down: items, records, sessions, arms, the plan. Values only, as JSON through msgspec; no I/O here.

Times are the client's: `t0_ns` counts from the session's own origin, event stamps count from their request's sending.
"""

from __future__ import annotations

from typing import Any

import msgspec

from gate.cell import METRICS, Cell

PEER_KINDS = frozenset({"command", "url"})  # kinds of arms that are no tree


class Item(msgspec.Struct, frozen=True, omit_defaults=True):
    """One workload item. `audio` is a path relative to the workload's root; `audio_seconds` 0.0 without audio.

    `token_ids` are the prompt itself where it is no text.
    """

    id: str
    text: str | None
    audio: str | None
    audio_seconds: float
    reference: str | None
    speaker: str | None
    token_ids: list[int] | None = None


class EventStamp(msgspec.Struct, frozen=True, array_like=True):
    """One arrival: µs since the request was sent, and how many tokens, characters and PCM samples it brought."""

    t_us: int
    tokens: int
    chars: int
    pcm_samples: int


class Record(msgspec.Struct, frozen=True):
    """One request measured; one line of records.jsonl.

    `index` counts within the cell's warm or measured section; `client` is the closed-loop client 0 … c−1. `e2e_us` is µs from
    sending to the last event. `top2` holds per token (id, id, log-probability, log-probability), best first; `trace` holds
    (step number, capture bucket, rows). Both are empty when not asked for. `audio_in_s` is seconds of input audio.
    """

    session: str
    arm: str
    cell: str
    index: int
    warm: bool
    item: str
    task: str
    t0_ns: int
    client: int
    events: list[EventStamp]
    e2e_us: int
    ok: bool
    error: str | None
    finish_reason: str | None
    audio_finish_reason: str | None
    token_ids: list[int]
    top2: list[tuple[int, int, float, float]]
    trace: list[tuple[int, int, int]]
    text: str
    pcm_samples: int
    pcm_sha256: str | None
    audio_in_s: float
    completion_tokens: int
    prompt_tokens: int
    sample_rate: int = 24000

    @property
    def speech(self) -> str | None:
        """The name that equal sound shares, its digest and sample rate; None where no sound came."""
        return None if self.pcm_sha256 is None else f"{self.pcm_sha256}-{self.sample_rate}"

    @property
    def steps(self) -> list[int]:
        """What greedy comparison goes over: the token ids, or the characters of the text where no ids came (OpenAI door)."""
        return self.token_ids or [ord(character) for character in self.text]


class Lag(msgspec.Struct, frozen=True):
    """How late (ms) a timer of the client's own loop fired while a cell was measured."""

    p50: float
    p99: float
    max: float


class SessionInfo(msgspec.Struct, frozen=True):
    """One boot of an arm's server: its identity, the machine before and after, counters, and what went wrong with it.

    `slot` counts from 0 in the run's order. `info` is the whole /info (empty for a peer that has none), `counters` the growth
    of each /metrics value. `problems` are sentences about the session itself (a server that died); failed requests are in the
    records. `client_lag` and `client_failures` speak of the load client, by cell. `boots` is more than 1 where a run that was
    killed went on: each cell was measured on one boot all the same.
    """

    id: str
    arm: str
    slot: int
    commit: str | None
    dirty: bool
    source_digest: str
    weights_digest: str
    boot_seconds: float
    info: dict[str, Any]
    host_before: dict[str, Any]
    host_after: dict[str, Any]
    counters: dict[str, float]
    problems: list[str]
    client_lag: dict[str, Lag] = {}
    client_failures: dict[str, str] = {}
    boots: int = 1


class ArmInfo(msgspec.Struct, frozen=True):
    """What is judged: its name (base, head; arm where there is one), the ref asked for, and what that was.

    `kind`: commit, snapshot, directory, command or url. The last two are peers: their source is not checked and their
    `source_digest` is empty; all sessions of a url are one boot.
    """

    name: str
    ref: str
    commit: str | None
    dirty: bool
    source_digest: str
    args: list[str]
    env: dict[str, str]
    kind: str


def _floors() -> dict[str, float]:
    return {name: metric.floor for name, metric in METRICS.items() if metric.floor is not None}


class Thresholds(msgspec.Struct, frozen=True):
    """The figures behind the verdicts; ratios, but `wer_points` in percentage points.

    `s_min` is the least spread (of log values) believed: two sessions that agree by luck don't make a narrow interval.
    `throttled` is the share of a session's time that a CPU quota may hold it back.
    """

    alpha: float = 0.05
    floor: dict[str, float] = msgspec.field(default_factory=_floors)
    s_min: float = 0.005
    wer_points: float = 0.5
    throttled: float = 0.05


class JudgePlan(msgspec.Struct, frozen=True):
    """How spoken answers are judged: the first `requests` of each speaking cell in each session, by `recogniser`.

    With 0 requests they are not, and `why_not` says why.
    """

    requests: int = 0
    recogniser: str = ""
    why_not: str = "the plan names no recogniser"

    def takes(self, record: Record) -> bool:
        """Whether an answer's speech is kept and judged."""
        return not record.warm and record.ok and record.index < self.requests and record.speech is not None


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What a run will do, written before it does anything. `order` names the arm of each session slot.

    `door` is the interface at which both arms are asked: generate or openai. `model_path` and `model_digest` are empty where
    every arm brings its own model.
    """

    schema: str = "gate/1"
    created: str
    arms: tuple[ArmInfo, ArmInfo]
    cells: list[Cell]
    set_name: str
    sessions_per_arm: int
    order: list[str]
    seed: int
    thresholds: Thresholds = Thresholds()
    model_path: str
    model_digest: str
    workload_hash: str
    workload_counts: dict[str, int] = {}
    device: str = "cpu"
    command: str = ""
    workload_labels: dict[str, str] = {}
    cores: str = ""
    gate_version: str = ""
    door: str = "generate"
    judge: JudgePlan = JudgePlan()


class RunData(msgspec.Struct, frozen=True):
    """All of a run: the plan, its sessions, their records, and the items by id. Everything else derives from it.

    `heard` is what the recogniser heard in the speech of this name (`Record.speech`).
    """

    plan: Plan
    sessions: list[SessionInfo]
    records: list[Record]
    items: dict[str, Item]
    heard: dict[str, str] = {}
