"""Keyed hashes: standard vectors, and keys that are apart."""

import pytest

from baton.keyed_hash import derive_key, keyed_hash


def test_it_is_blake2b_of_the_rfc() -> None:
    assert keyed_hash(b"abc", b"", 64).hex().startswith("ba80a53f981c4d0d6a2797b69f12f6e9")


def test_keys_lengths_and_purposes_part_the_hashes() -> None:
    hashes = {
        keyed_hash(b"content", b"key"),
        keyed_hash(b"content", b"another"),
        keyed_hash(b"other", b"key"),
        keyed_hash(b"content", b"key", 48)[:32],
        derive_key(b"secret", "one"),
        derive_key(b"secret", "two"),
        derive_key(b"other", "one"),
    }
    assert len(hashes) == 7


def test_a_key_of_more_than_64_bytes_is_refused_and_a_secret_may_be_longer() -> None:
    with pytest.raises(ValueError, match="64"):
        keyed_hash(b"content", bytes(65))
    assert len(derive_key(bytes(1000), "one", 48)) == 48
