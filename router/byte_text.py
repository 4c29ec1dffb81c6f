"""Text of byte-level vocabularies while tokens arrive, without asking the tokenizer for each of them.

In such a vocabulary (GPT-2's alphabet: Llama 3, Qwen, most newer models) a token stands for the same bytes wherever it
stands, and the text is what all bytes together decode to. So a token that is whole characters by itself has one text, looked
up here; only characters spread over tokens are decoded as they come. Other decoders see a token's neighbours:
`router.detokenizer` has the general way, which this one equals.
"""

import codecs
import json
from typing import Protocol

import tokenizers

from router.pieces import byte_level_bytes


class TokenDecoder(Protocol):
    """Turns one sample's tokens into text, as they come."""

    def push(self, token_id: int) -> str:
        """The text that `token_id` makes certain."""

    def finish(self) -> str:
        """The rest; a character that never became whole is one U+FFFD."""


class ByteTable:
    """What each token of one byte-level vocabulary stands for; what was asked once is remembered.

    Args:
        backend: Its tokenizer.
        skipped_ids: Tokens without text.
    """

    def __init__(self, backend: tokenizers.Tokenizer, skipped_ids: frozenset[int]) -> None:
        self._backend = backend
        self._bytes: dict[int, bytes] = dict.fromkeys(skipped_ids, b"")
        self.texts: dict[int, str] = dict.fromkeys(skipped_ids, "")
        """Text of the tokens seen so far that are whole characters by themselves."""

    def bytes_of(self, token_id: int) -> bytes:
        """The token's bytes; none for an id that has no token."""
        piece = self._bytes.get(token_id)
        if piece is None:
            piece = self._bytes[token_id] = byte_level_bytes(
                self._backend.id_to_token(token_id) or ""
            )
            try:
                self.texts[token_id] = piece.decode()
            except UnicodeDecodeError:
                return piece  # a part of a character, or of several
        return piece


class ByteDecoder:
    """One sample's text (a `TokenDecoder`)."""

    __slots__ = ("_rest", "_table", "_texts")

    def __init__(self, table: ByteTable) -> None:
        self._table = table
        self._texts = table.texts
        self._rest = b""

    def push(self, token_id: int) -> str:
        """The text that `token_id` makes certain; that of a character once its last byte is there."""
        if not self._rest:
            text = self._texts.get(token_id)
            if text is not None:
                return text
        data = self._rest + self._table.bytes_of(token_id)
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._rest = data[used:]
        return text

    def finish(self) -> str:
        """The rest; a character that never became whole is one U+FFFD."""
        data, self._rest = self._rest, b""
        return codecs.utf_8_decode(data, "replace", True)[0]


def is_byte_level(backend: tokenizers.Tokenizer) -> bool:
    """Whether `backend` decodes by bytes and does nothing else to the text."""
    decoder = json.loads(backend.to_str())["decoder"] or {}
    if decoder.get("type") == "Sequence" and len(decoder["decoders"]) == 1:
        decoder = decoder["decoders"][0]
    return decoder.get("type") == "ByteLevel"
