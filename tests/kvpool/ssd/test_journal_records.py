"""What a journal says is read as it was meant, and what it cannot have said is not guessed at."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from baton.ids import BlockKey
from kvpool.messages import DiskBlock, FlushMark, Owner
from kvpool.ssd.journal import (
    VERSION,
    Begins,
    Erased,
    decode,
    encode_begins,
    encode_erased,
    encode_flushed,
    encode_holds,
)

_names = st.text(st.characters(), max_size=20)
_numbers = st.integers(0, 2**63 - 1)
_blocks = st.builds(
    DiskBlock,
    extent=_numbers,
    epoch=_numbers,
    key=st.binary(min_size=16, max_size=16).map(BlockKey),
    owner=st.builds(Owner, tenant=_names, scope=_names, model=_names),
    size_bytes=_numbers,
    position=_numbers,
    checksums=st.binary(max_size=64),
)


@given(_blocks)
def test_a_block_is_read_as_it_was_written(block):
    assert decode(encode_holds(block)) == block


@given(_numbers, _numbers)
def test_an_erasure_is_read_as_it_was_written(extent, epoch):
    erased = Erased(extent=extent, epoch=epoch)
    assert decode(encode_erased(erased)) == erased


@given(_numbers, st.binary(min_size=16, max_size=16))
def test_a_flush_is_read_as_it_was_written(number, directory):
    mark = FlushMark(directory=directory, number=number)
    assert decode(encode_flushed(mark)) == mark


def test_a_beginning_is_read_as_it_was_written_and_is_never_the_same():
    assert decode(encode_begins(77)) == Begins(version=VERSION, slot_bytes=77)
    assert encode_begins(77) != encode_begins(77)


@given(_blocks, st.integers(0, 200))
def test_a_record_that_is_cut_says_nothing(block, length):
    whole = encode_holds(block)
    if length < len(whole):
        assert decode(whole[:length]) is None


@given(st.binary(max_size=200), st.sampled_from([b"", b"\0", b"\1", b"\2", b"\3"]))
def test_any_bytes_are_a_record_or_none(rest, kind):
    record = decode(kind + rest)
    assert record is None or isinstance(record, (Begins, DiskBlock, Erased, FlushMark))


@given(_blocks, st.data())
def test_a_record_with_any_byte_altered_is_a_record_or_none(block, data):
    whole = bytearray(encode_holds(block))
    whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    read = decode(bytes(whole))
    assert read is None or isinstance(read, DiskBlock)


def test_names_that_are_no_text_and_numbers_that_are_too_large_say_nothing():
    owner = Owner(tenant="anna", scope="", model="")
    block = DiskBlock(
        extent=1,
        epoch=2,
        key=BlockKey(bytes(16)),
        owner=owner,
        size_bytes=3,
        position=4,
        checksums=bytes(8),
    )
    assert decode(encode_holds(block)) == block
    assert decode(encode_holds(block).replace(b"anna", b"an\xff\xfe")) is None
    assert decode(encode_holds(replace(block, epoch=1 << 63))) is None
    assert decode(encode_holds(replace(block, key=BlockKey(bytes(15))))) is None
    assert decode(encode_erased(Erased(extent=0, epoch=1 << 63))) is None
    assert decode(encode_flushed(FlushMark(directory=bytes(16), number=1 << 63))) is None


def test_a_record_of_an_unknown_kind_says_nothing():
    assert decode(b"") is None
    assert decode(b"\x09" + bytes(40)) is None
