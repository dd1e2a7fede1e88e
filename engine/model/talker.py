"""The Talker: speech frames from text ids. Assembles its prompt, runs its stack, and names what may not be sampled.

Beyond the prompt it depends on the Thinker's token ids only: the input of step s is the codec sum of the frame before plus
the projected embedding of generated text id s+1 (spec section 7).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.errors import CheckpointError, RequestError
from engine.kernels import Ops, Plan
from engine.model.code_predictor import CodePredictor
from engine.model.config import OmniConfig, SpecialIds
from engine.model.layers import Stack
from engine.model.weights import Weights

HEADER = 3  # `<|im_start|>`, `assistant` and a newline, which every prompt that is answered with speech ends with
OPENING = 9  # rows from that header to the first text token (spec section 7.1)
SPECIAL_CODES = 1024  # ids at the top of the codec vocabulary that are no codes (spec section 7.3)


def spoken_positions(prompt_ids: Sequence[int], ids: SpecialIds) -> list[int]:
    """Return the positions of `prompt_ids` that the Talker reads: its user turns, whole, in order. No tensors.

    Raises RequestError for a prompt that can't be answered with speech: one without a user turn, or one that does not end
    with the header of an open assistant turn.
    """
    if len(prompt_ids) < HEADER or list(prompt_ids[-HEADER:-1]) != [ids.im_start, ids.assistant]:
        raise RequestError(
            "speech needs a prompt that ends with an open assistant turn: end prompt_token_ids with "
            f"[{ids.im_start}, {ids.assistant}] and a newline's id, or send text instead",
            field="prompt_token_ids",
        )
    kept: list[int] = []
    in_user_turn = False
    for position, token in enumerate(prompt_ids[:-HEADER]):
        if token == ids.im_start:
            in_user_turn = prompt_ids[position + 1] == ids.user
        if in_user_turn:
            kept.append(position)
    if not kept:
        raise RequestError(
            f"speech needs a user turn in the prompt: put [{ids.im_start}, {ids.user}] before what the user says in "
            "prompt_token_ids, or send text instead",
            field="prompt_token_ids",
        )
    return kept


def speaker_id(speakers: Mapping[str, int], name: str) -> int:
    """Return the codec id of the voice called `name`, in any case; RequestError that lists the voices. No tensors."""
    codec = speakers.get(name.lower())
    if codec is None:
        raise RequestError(
            f"there is no voice {name!r}; choose from {', '.join(sorted(speakers))}", field="speech.voice"
        )
    return codec


@dataclass(frozen=True, slots=True)
class _Projection:
    """Two linear layers with a SiLU between them, from the Thinker's width to the Talker's."""

    fc1: tuple[Tensor, Tensor]
    fc2: tuple[Tensor, Tensor]

    @classmethod
    def load(cls, weights: Weights, name: str) -> _Projection:
        """Take the layers called `name`.fc1 and `name`.fc2, weights [out, in] and biases [out]."""
        fc1, fc2 = ((weights[f"{name}.{part}.weight"], weights[f"{name}.{part}.bias"]) for part in ("fc1", "fc2"))
        return cls(fc1, fc2)

    def forward(self, x: Tensor, ops: Ops) -> Tensor:
        """Project `x` [n, Hthinker]; returns [n, H]."""
        return ops.linear(ops.silu(ops.linear(x, *self.fc1)), *self.fc2)


class Talker:
    """The speech half of the model. Stateless: keys and values lie in the caller's cache.

    `thinker_embed` is the Thinker's token table [V, Hthinker], shared. `suppressed` [vocab] bool marks what is never sampled:
    every special codec id but the one that ends speech.
    """

    def __init__(self, config: OmniConfig, weights: Weights, ops: Ops, thinker_embed: Tensor) -> None:
        part = config.talker
        if part is None:
            raise CheckpointError("config.json: enable_audio_output is false, so there is no talker to load")
        self.ops, self.config, self.ids, self.part = ops, config, config.ids, part
        self.layers, self.hidden, self.vocab = part.stack.layers, part.stack.hidden, part.stack.vocab
        self.kv_heads = part.stack.kv_heads // weights.shard.world
        self.head_dim, self.eos = part.stack.head_dim, part.codec.eos
        self.stack = Stack("talker", part.stack, weights, ops)
        self.predictor = CodePredictor(part.predictor, weights, ops)
        self.embed, self.head, self.thinker_embed = weights["talker.embed"], weights["talker.head"], thinker_embed
        self.text_projection = _Projection.load(weights, "talker.text_projection")
        self.hidden_projection = _Projection.load(weights, "talker.hidden_projection")
        self.suppressed = torch.arange(self.vocab, device=ops.device) >= self.vocab - SPECIAL_CODES
        self.suppressed[self.eos] = False

    def text_rows(self, ids: Tensor) -> Tensor:
        """Project the Thinker's embeddings of text `ids` [n] int64; returns [n, H]."""
        return self.text_projection.forward(self.ops.embedding(self.thinker_embed, ids), self.ops)

    def codec_embed(self, codes: Tensor) -> Tensor:
        """Look up layer-0 `codes` [n] int64; returns [n, H]."""
        return self.ops.embedding(self.embed, codes)

    def prompt_ids(self, prompt_ids: Sequence[int]) -> list[int]:
        """Return the ids, one a prefill row, that give the Talker's own positions: its user turns and nine paddings.

        No tensors. Raises RequestError for a prompt that can't be answered with speech.
        """
        kept = spoken_positions(prompt_ids, self.ids)
        return [prompt_ids[position] for position in kept] + [self.ids.tts_pad] * OPENING

    def prompt(
        self, prompt_ids: Sequence[int], media_rows: Tensor | None, first_token: int, speaker: str
    ) -> tuple[Tensor, list[int]]:
        """Assemble the prefill: the prompt's user turns and nine rows that open the answer (spec section 7.1).

        `media_rows` [m, Hthinker] are the Thinker's accept-layer states at the m media placeholders of the whole prompt, in
        order, None when there is none; `first_token` is the first generated text id. Returns rows [n, H] and the n ids that
        give their positions. Raises RequestError for a prompt or a voice that can't be spoken.
        """
        talker_ids = self.prompt_ids(prompt_ids)
        user = self._user_rows(prompt_ids, spoken_positions(prompt_ids, self.ids), media_rows)
        return torch.cat([user, self._opening_rows(list(prompt_ids[-HEADER:]), first_token, speaker)]), talker_ids

    def _user_rows(self, prompt_ids: Sequence[int], kept: Sequence[int], media_rows: Tensor | None) -> Tensor:
        """Rows [n, H] of the positions `kept`: media by their Thinker states, the rest by their ids."""
        device = self.ops.device
        rows = self.text_rows(torch.tensor([prompt_ids[position] for position in kept], device=device))
        placeholders = {self.ids.audio, self.ids.image, self.ids.video}
        media = [position for position, token in enumerate(prompt_ids) if token in placeholders]
        states = 0 if media_rows is None else media_rows.shape[0]
        if len(media) != states:
            raise ValueError(f"the prompt has {len(media)} media placeholders, but {states} states came")
        rank = {position: index for index, position in enumerate(media)}
        where = [(row, rank[position]) for row, position in enumerate(kept) if position in rank]
        if where and media_rows is not None:
            into, taken = torch.tensor(where, device=device).unbind(1)
            rows[into] = self.hidden_projection.forward(media_rows[taken], self.ops)
        return rows

    def _opening_rows(self, header: list[int], first_token: int, speaker: str) -> Tensor:
        """The nine rows [9, H] from the assistant's header to the first text token: text side plus codec side."""
        ids, codec, device = self.ids, self.part.codec, self.ops.device
        voice = speaker_id(self.part.speakers, speaker)
        text = [*header, ids.tts_pad, ids.tts_pad, ids.tts_pad, ids.tts_pad, ids.tts_bos, first_token]
        codes = [codec.nothink, codec.think_bos, codec.think_eos, voice, codec.pad, codec.bos]
        rows = self.text_rows(torch.tensor(text, device=device))
        rows[HEADER:] += self.codec_embed(torch.tensor(codes, device=device))
        return rows

    def forward(self, x: Tensor, plan: Plan, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """Run the stack over `x` [n, H] with caches [layers, pages, page_size, Hkv, d]; returns [n, H] after the final norm."""
        return self.stack.forward(x, plan, k_cache, v_cache, tap=None)[0]

    def logits(self, y: Tensor) -> Tensor:
        """Scores of layer-0 codes for `y` [r, H]; returns [r, vocab] float32, nothing suppressed yet."""
        return self.ops.linear(y, self.head).float()
