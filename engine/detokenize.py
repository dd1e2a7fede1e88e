"""Token ids to text, a few at a time: what is emitted never ends inside a character. No torch.

The chunks of one request, joined, are what decoding all its ids at once would give, up to where it may be shown.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence

from tokenizers import Tokenizer


def _byte_alphabet() -> dict[str, int]:
    """The printable character that byte-level tokenizers write for each byte: itself, or one from U+0100 upwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + rank): byte for rank, byte in enumerate(others)}


_BYTES = _byte_alphabet()


class TokenBytes:
    """The bytes that each token id of a byte-level tokenizer stands for; special tokens stand for none."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, bytes] = {
            token: b"" for token, added in tokenizer.get_added_tokens_decoder().items() if added.special
        }

    def of(self, token: int) -> bytes:
        """Return the bytes of `token`; none for a special token and for an id that the tokenizer has no token for."""
        found = self._known.get(token)
        if found is None:
            found = self._known[token] = self._spell(token)
        return found

    def _spell(self, token: int) -> bytes:
        text = self._tokenizer.id_to_token(token)
        if text is None:
            return b""
        try:
            return bytes(_BYTES[char] for char in text)
        except KeyError:  # an added token is written as it is, so it may hold characters outside the alphabet
            return text.encode()


class Detokenizer:
    """The text of one request. `push` holds back the bytes of a character that is not complete yet; `finish` flushes.

    A token of `stop_ids` ends the text and is no part of it.
    """

    def __init__(self, token_bytes: TokenBytes, stop_ids: Collection[int] = ()) -> None:
        self._token_bytes = token_bytes
        self._stop_ids = frozenset(stop_ids)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = b""
        self._shown = 0

    def push(self, token_ids: Sequence[int], shown_bytes: int | None = None) -> str:
        """Return the text that `token_ids` complete; "" while a character is incomplete.

        `shown_bytes` says how many bytes of all text so far may be shown; the rest waits for a later call. None shows all.
        """
        self._held += b"".join(self._token_bytes.of(token) for token in token_ids if token not in self._stop_ids)
        free = len(self._held) if shown_bytes is None else shown_bytes - self._shown
        data, self._held = self._held[:free], self._held[free:]
        self._shown += len(data)
        return self._decoder.decode(data)

    def finish(self) -> str:
        """Return what is left: U+FFFD for a character that never became complete, else "". What was never shown is dropped."""
        return self._decoder.decode(b"", final=True)
