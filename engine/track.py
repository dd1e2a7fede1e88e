"""Track: a request's progress in one component. Host values only; no torch."""

from __future__ import annotations

from dataclasses import dataclass

from engine.step import Component


@dataclass(slots=True, kw_only=True)
class Track:
    """How far one request is in one component.

    `generation` is never reused. `prompt_length` counts positions to prefill (clips, for the audio encoder), `prefilled` those
    whose steps were launched. `launched` counts what launched steps make (tokens, frames; for Code2Wav frames turned into
    sound), `generated` what of it was read on the host, and `limit` is the most either may reach. `arrived` counts what
    streamed in from the component before (clips encoded, text ids, frames), of which no more comes once `source_ended`.
    """

    request_id: str
    component: Component
    generation: int
    slot: int
    limit: int
    prompt_length: int = 0
    pages: tuple[int, ...] = ()
    audio_output: bool = False
    waits_for_source: bool = False
    prefilled: int = 0
    launched: int = 0
    generated: int = 0
    arrived: int = 0
    source_ended: bool = False
    finish_reason: str | None = None
    in_flight: int = 0

    @property
    def finished(self) -> bool:
        """Whether the track has nothing more to run."""
        return self.finish_reason is not None

    def note_launch(self, length: int) -> None:
        """Note that a step with `length` positions (or frames) of this track was launched; the prompt's last makes a token."""
        self.in_flight += 1
        if self.prefilled < self.prompt_length:
            self.prefilled += length
            self.launched += self.prefilled == self.prompt_length
        else:
            self.launched += length
