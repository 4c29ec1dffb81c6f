"""Keys that name KV blocks in engine, router and pool alike.

A block's key is keyed BLAKE2b (16 bytes) over its parent's key and its token ids, so a key stands for the block *and*
everything before it. The root is keyed with the cluster secret over tenant scope, model fingerprint, adapter and
layout: tenants cannot probe each other's prefixes, and a client's salt only ever narrows the scope.
"""

from collections.abc import Sequence

from baton.ids import BlockKey
from baton.keyed_hash import KEY_SIZE, keyed_hash
from baton.layout import KvLayout
from baton.tokens import PackedTokens

KEY_BYTES = 16
_MAX_PLAIN_SALT = 64


def root_key(secret: bytes, *, scope: str, layout: KvLayout, adapter: str = "") -> BlockKey:
    """The parent of every chain in one scope.

    Args:
        secret: The cluster secret, 32 bytes.
        scope: Tenant scope, already narrowed by any client salt.
        layout: Layout of the pages; includes the model's fingerprint. How heads and layers are spread over ranks has
            no part in the key: one block has one name on all of them.
        adapter: LoRA adapter's name, or empty.

    Raises:
        ValueError: `secret` is not 32 bytes.
    """
    parts = [
        part.encode()
        for part in (scope, layout.model_fingerprint, adapter, layout.content_digest())
    ]
    message = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
    if len(secret) != KEY_SIZE:
        raise ValueError(f"the cluster secret has {KEY_SIZE} bytes, not {len(secret)}")
    return BlockKey(keyed_hash(message, secret, KEY_BYTES))


def chain_keys(
    secret: bytes, parent: BlockKey, tokens: Sequence[int], block_tokens: int
) -> list[BlockKey]:
    """Keys of the full blocks of `tokens`, in order; a last, partial block has none.

    Args:
        secret: The cluster secret, 32 bytes.
        parent: Key of what stands before `tokens`: a root, or the key of the block before.
        tokens: Token ids.
        block_tokens: Tokens per block.
    """
    packed = PackedTokens.of(tokens).packed
    step = block_tokens * 4
    keys: list[BlockKey] = []
    for start in range(0, len(packed) - step + 1, step):
        message = parent + packed[start : start + step]
        parent = BlockKey(keyed_hash(message, secret, KEY_BYTES))
        keys.append(parent)
    return keys


def narrow_scope(scope: str, salt: str | None) -> str:
    """The scope that a client's `cache_salt` narrows; any text is allowed, none can widen. A long one is hashed."""
    if not salt:
        return scope
    if len(salt) <= _MAX_PLAIN_SALT:
        return f"{len(scope)}:{scope}/{salt}"
    # Another separator than above: a short salt never has the scope of a long one.
    return f"{len(scope)}:{scope}#{keyed_hash(salt.encode(), b'').hex()}"


def parse_block_key(text: str) -> BlockKey:
    """A block's key from its hexadecimal digits, as operators are shown it.

    Raises:
        ValueError: It is none; says what one looks like.
    """
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise ValueError(f"a block's key is {2 * KEY_BYTES} hexadecimal digits, not {text[:64]!r}")
    return BlockKey(key)
