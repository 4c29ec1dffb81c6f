from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders

from router.text.token_bytes import ByteDecoder, ByteTable, is_byte_level
from tests.router.text.tiny_tokenizers import byte_fallback, byte_level, token_id


@cache
def _tokenizer() -> Tokenizer:
    """With added tokens that are partly, and not at all, of the alphabet in which a vocabulary writes bytes."""
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("é"), AddedToken("two words"), AddedToken("你")])
    return tokenizer


@cache
def _table() -> ByteTable:
    return ByteTable(_tokenizer(), frozenset())


def _stream(ids: list[int], table: ByteTable | None = None) -> list[str]:
    decoder = ByteDecoder(table or _table())
    return [*(decoder.push(i) for i in ids), decoder.finish()]


@given(st.lists(st.deferred(lambda: st.integers(0, _tokenizer().get_vocab_size())), max_size=60))
def test_any_tokens_join_to_what_the_tokenizer_makes_of_them_all_at_once(ids: list[int]):
    assert "".join(_stream(ids)) == _tokenizer().decode(ids, skip_special_tokens=False)


@given(st.text(max_size=40))
def test_whole_text_never_shows_a_replacement_character_that_is_not_in_it(text: str):
    ids = byte_level().encode(text, add_special_tokens=False).ids
    pieces = _stream(ids, ByteTable(byte_level(), frozenset()))
    assert "".join(pieces) == text
    assert sum(piece.count("\ufffd") for piece in pieces) == text.count("\ufffd")


def test_skipped_tokens_have_no_text_and_do_not_part_what_stands_around_them():
    end = token_id(_tokenizer(), "<|end|>")
    table = ByteTable(_tokenizer(), frozenset({end}))
    first, *rest = _tokenizer().encode("\u20ac", add_special_tokens=False).ids
    assert rest, "a character of several tokens"
    assert "".join(_stream([first, end, *rest], table)) == "\u20ac"


def test_only_decoders_that_do_nothing_but_join_bytes_count_as_byte_level():
    assert is_byte_level(byte_level())
    assert not is_byte_level(byte_fallback())
    mixed = byte_level()
    mixed.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    assert not is_byte_level(mixed)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_sequence_of_one_byte_level_decoder_is_one(wrapped: bool):
    tokenizer = byte_level()
    if wrapped:
        tokenizer.decoder = decoders.Sequence([decoders.ByteLevel()])
    assert is_byte_level(tokenizer)
