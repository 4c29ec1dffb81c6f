"""The bytes that a single token stands for, as log-probabilities show them.

Decoding a token alone loses what its neighbours would tell (half a character, a leading space), so the piece is read
from the vocabulary. The two families that carry bytes are known: byte-level BPE writes each byte as a printable
character, SentencePiece writes spaces as `▁` and bytes without a token as `<0xNN>`.
"""

import codecs
import json
import re
from collections.abc import Mapping
from typing import Protocol

import tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class PieceTable:
    """Bytes of each token of one vocabulary; what was asked once is remembered."""

    def __init__(
        self, backend: tokenizers.Tokenizer, added: Mapping[int, tokenizers.AddedToken]
    ) -> None:
        decoders = _decoder_types(json.loads(backend.to_str())["decoder"])
        self._byte_level = "ByteLevel" in decoders
        self._backend = backend
        self._known = {i: token.content.encode() for i, token in added.items()}

    def bytes_of(self, token_id: int) -> bytes:
        """The token's bytes; none for an id that has no token."""
        piece = self._known.get(token_id)
        if piece is None:
            piece = self._known[token_id] = self._read(token_id)
        return piece

    def text_of(self, token_id: int) -> str:
        """The token's text; half a character shows as U+FFFD."""
        return self.bytes_of(token_id).decode(errors="replace")

    def label_of(self, token_id: int) -> str:
        r"""The token's text, or `bytes:\x..` where it is none, as OpenAI labels tokens in objects keyed by them."""
        piece = self.bytes_of(token_id)
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)

    def _read(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            return byte_level_bytes(token)
        if match := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(match[1], 16)])
        return token.replace("▁", " ").encode()


def byte_level_bytes(token: str) -> bytes:
    """The bytes that a byte-level vocabulary's token stands for. One outside the alphabet stands for itself."""
    known = [_BYTE_OF.get(char) for char in token]
    return bytes(b for b in known if b is not None) if None not in known else token.encode()


def _decoder_types(decoder: object) -> set[str]:
    if not isinstance(decoder, dict):
        return set()
    inner = [_decoder_types(part) for part in decoder.get("decoders", ())]
    return {str(decoder.get("type"))}.union(*inner)


def _byte_of_char() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, the other bytes for the characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    shifted = {chr(0x100 + i): byte for i, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | shifted


_BYTE_OF = _byte_of_char()


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
