"""What is sealed opens under its name, its kind and its cluster's secret, and nothing else does."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.seal import MAX_SKEW_S, Seal, SealError

SECRET = b"s" * 32
NOW_S = 1_700_000_000.0


def seal(kind: str = "state", secret: bytes = SECRET, now_s: float = NOW_S) -> Seal:
    return Seal(secret, kind, lambda: now_s)


@given(st.text(), st.binary())
def test_what_was_sealed_opens(name: str, content: bytes) -> None:
    opened = seal().open(name, seal().close(name, content), len(content))
    assert (opened.content, opened.sealed_ms) == (content, round(NOW_S * 1000))


@given(st.binary(max_size=200))
def test_what_nobody_sealed_does_not_open(false: bytes) -> None:
    with pytest.raises(SealError, match="not sealed"):
        seal().open("name", false, 1000)


@given(st.binary(min_size=1), st.data())
def test_one_bit_more_or_less_is_refused(content: bytes, data: st.DataObject) -> None:
    sealed = bytearray(seal().close("name", content))
    bit = data.draw(st.integers(0, 8 * len(sealed) - 1))
    sealed[bit // 8] ^= 1 << bit % 8
    with pytest.raises(SealError):
        seal().open("name", bytes(sealed), len(content))


@pytest.mark.parametrize(
    ("other", "name"), [(seal("parts"), "name"), (seal(secret=b"t" * 32), "name"), (seal(), "nam")]
)
def test_a_seal_is_of_one_kind_one_name_and_one_cluster(other: Seal, name: str) -> None:
    with pytest.raises(SealError, match="not sealed"):
        other.open(name, seal().close("name", b"x"), 10)


def test_what_is_too_long_is_refused_unread() -> None:
    with pytest.raises(SealError, match="too long"):
        seal().open("name", seal().close("name", b"xx"), 1)


def test_a_time_of_the_future_and_one_that_is_over_are_refused() -> None:
    skew_s = MAX_SKEW_S + 1
    with pytest.raises(SealError, match="future"):
        seal().open("name", seal(now_s=NOW_S + skew_s).close("name", b""), 9)
    old = seal().open("name", seal(now_s=NOW_S - skew_s).close("name", b""), 9)
    seal().check_age(old, life_s=5.0)
    with pytest.raises(SealError, match="out of date"):
        seal().check_age(old, life_s=0.5)
