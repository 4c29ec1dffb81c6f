"""API keys are kept as digests and found in a time that tells nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import ConfigError
from router.tenants.keys import KeyRing, check_strength, hash_key, is_hash, key_id, new_key


def test_a_new_key_is_strong_and_never_the_same():
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    for key in keys:
        check_strength(key)


def test_what_could_be_guessed_is_refused():
    with pytest.raises(ConfigError, match="at least 24 characters"):
        check_strength("hunter2")


def test_a_hash_is_recognised_and_a_key_is_not():
    assert is_hash(hash_key("k"))
    assert not is_hash("k" * 71)
    assert not is_hash(hash_key("k") + "\n")


def test_a_keys_name_does_not_hold_the_key():
    key = new_key()
    assert key_id(hash_key(key)) not in key
    assert len(key_id(hash_key(key))) == 8


@given(st.lists(st.text(min_size=1), unique=True, max_size=20), st.text())
def test_a_key_is_found_exactly_if_it_is_there(keys: list[str], guess: str):
    encodable = [key for key in keys if key.isprintable()]
    ring = KeyRing([(hash_key(key), key) for key in encodable])
    for key in encodable:
        assert ring.find(key) == key
    assert ring.find(guess) == (guess if guess in encodable else None)


def test_a_key_of_half_surrogates_is_only_unknown():
    assert KeyRing([(hash_key("a"), "a")]).find("\ud800") is None


def test_every_look_up_compares_once_in_constant_time(monkeypatch):
    compared: list[tuple[bytes, bytes]] = []

    def compare_digest(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return one == other

    monkeypatch.setattr("router.tenants.keys.hmac.compare_digest", compare_digest)
    ring = KeyRing([(hash_key(key), key) for key in ("first", "second", "third")])
    assert ring.find("first") == "first"
    assert ring.find("guess") is None
    assert len(compared) == 2
    assert {len(digest) for pair in compared for digest in pair} == {32}, "digests, not the keys"
