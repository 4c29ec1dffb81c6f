from functools import cache

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from router.text.detokenizer import Detokenizer
from tests.router.text.tiny_tokenizers import byte_fallback, byte_level, token_id

_level = cache(byte_level)
_fallback = cache(byte_fallback)
_BYTES_AT = 3  # id of <0x00> in the byte-fallback vocabulary
_LEVEL_IDS = st.deferred(
    lambda: st.lists(st.integers(4, _level().get_vocab_size() - 1), max_size=60)
)
_FALLBACK_ANY = st.deferred(lambda: st.integers(0, _fallback().get_vocab_size() - 1))
_WORD_IDS = st.deferred(
    lambda: st.integers(259, _fallback().get_vocab_size() - 1).map(lambda i: [i])
)
_CHARACTER_IDS = st.characters(exclude_categories=["Cs"]).map(
    lambda c: [_BYTES_AT + byte for byte in c.encode()]
)
_FALLBACK_IDS = st.lists(st.one_of(_WORD_IDS, _CHARACTER_IDS), max_size=30).map(
    lambda parts: [i for part in parts for i in part]
)


def _special(tokenizer: Tokenizer) -> frozenset[int]:
    return frozenset(i for i, t in tokenizer.get_added_tokens_decoder().items() if t.special)


def _stream(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer, _special(tokenizer))
    return [*(detokenizer.push(i) for i in ids), detokenizer.finish()]


@given(_LEVEL_IDS)
def test_byte_level_deltas_join_to_the_text_of_all_tokens(ids: list[int]):
    assert "".join(_stream(_level(), ids)) == _level().decode(ids)


@given(st.binary(max_size=60))
def test_any_bytes_however_broken_join_to_the_text_of_all_tokens(data: bytes):
    pieces = [_byte_id(byte) for byte in data]
    assert "".join(_stream(_level(), pieces)) == data.decode(errors="replace")


@given(st.text(max_size=60))
def test_no_delta_of_whole_text_shows_a_replacement_character_that_is_not_in_it(text: str):
    deltas = _stream(_level(), [_byte_id(byte) for byte in text.encode()])
    assert "".join(deltas) == text
    assert sum(d.count("\ufffd") for d in deltas) == text.count("\ufffd")


@given(_FALLBACK_IDS)
def test_byte_fallback_deltas_join_to_the_text_of_all_tokens(ids: list[int]):
    assert "".join(_stream(_fallback(), ids)) == _fallback().decode(ids)


@given(st.lists(_FALLBACK_ANY, max_size=40))
def test_broken_bytes_of_byte_fallback_never_show_where_all_tokens_decode_cleanly(ids: list[int]):
    streamed, whole = "".join(_stream(_fallback(), ids)), _fallback().decode(ids)
    if "\ufffd" not in whole:
        assert streamed == whole
    else:
        assert "\ufffd" in streamed


def test_a_character_spread_over_tokens_comes_out_once_it_is_whole():
    ids = [_byte_id(byte) for byte in "€".encode()]
    assert _stream(_level(), ids) == ["", "", "€", ""]


def test_an_unfinished_character_at_the_end_is_one_replacement_character():
    ids = [_byte_id(byte) for byte in "a€".encode()[:-1]]
    assert _stream(_level(), ids) == ["a", "", "", "\ufffd"]


def test_a_space_between_sentencepiece_words_is_kept_and_a_leading_one_is_not():
    tokenizer = _fallback()
    hi = token_id(tokenizer, "▁hi")
    assert _stream(tokenizer, [hi, hi]) == ["hi", " hi", ""]


def test_a_space_behind_a_mark_that_is_told_apart_is_kept():
    tokenizer = _fallback()
    hi = token_id(tokenizer, "▁hi")
    detokenizer = Detokenizer(tokenizer, _special(tokenizer))
    assert [detokenizer.push(hi), detokenizer.finish(), detokenizer.push(hi)] == ["hi", "", " hi"]


def test_special_tokens_and_ids_without_a_token_have_no_text():
    tokenizer = _level()
    end, letter = token_id(tokenizer, "<|end|>"), _byte_id(ord("x"))
    assert _stream(tokenizer, [letter, end, 100_000, letter]) == ["x", "", "", "x", ""]


def test_endless_broken_bytes_are_given_out_while_they_come():
    shown = _stream(_level(), [_byte_id(0x80)] * 1000)
    assert sum(map(len, shown[:-1])) > 980


@cache
def _byte_id(byte: int) -> int:
    tokenizer = _level()
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    char = chr(byte) if byte in printable else chr(0x100 + others.index(byte))
    return token_id(tokenizer, char)
