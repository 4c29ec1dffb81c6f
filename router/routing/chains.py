"""Prompts as the prefix index knows them: the fingerprints of their blocks, in order.

Each block's key is a hash over the key before it, a microsecond and more per block: a prompt of a million tokens takes
a tenth of a second. So a long prompt is hashed some blocks at a time before it is dispatched (`PromptHasher`);
a short one where it is placed.
"""

import asyncio
from collections.abc import Iterator, Mapping

from baton.blocks import joined
from baton.generation import Prompt
from baton.hashing import chain_keys, root_key
from baton.layout import KvLayout
from router.routing.table import Fingerprints, fingerprints_of
from router.routing.view import ClusterView

_SHORT_TOKENS = 4096
"""Prompts up to this length are hashed in half a millisecond."""

_BLOCKS_AT_ONCE = 1024
"""Blocks that are hashed before the event loop runs again: one to two milliseconds."""


def chain_of(secret: bytes, prompt: Prompt, layout: KvLayout) -> Fingerprints:
    """Fingerprints of the full blocks of `prompt` in a cache of this layout."""
    return fingerprints_of(b"".join(_keys(secret, prompt, layout)))


class PromptHasher:
    """Hashes long prompts in steps between which the event loop runs. For one event loop.

    Args:
        secret: The cluster secret, 32 bytes.
        view: The workers: prompts are hashed for the layouts that they have.
    """

    def __init__(self, secret: bytes, view: ClusterView) -> None:
        self._secret = secret
        self._view = view
        self._turn = asyncio.Lock()

    async def chains(self, prompt: Prompt) -> Mapping[int, Fingerprints]:
        """A long prompt's chain for each layout group; none of a short prompt. Of all prompts that are hashed at a time
        one has its turn in each round of the event loop.
        """
        if len(prompt.prompt_tokens) <= _SHORT_TOKENS:
            return {}
        chains: dict[int, Fingerprints] = {}
        for group, layout in list(self._view.layouts().items()):
            keys, steps = list[bytes](), _keys(self._secret, prompt, layout)
            while (some := await self._next(steps)) is not None:
                keys.append(some)
            chains[group] = fingerprints_of(b"".join(keys))
        return chains

    async def _next(self, steps: Iterator[bytes]) -> bytes | None:
        async with self._turn:
            await asyncio.sleep(0)
            return next(steps, None)


def _keys(secret: bytes, prompt: Prompt, layout: KvLayout) -> Iterator[bytes]:
    """Keys of the prompt's full blocks, some at a time, one after the other."""
    parent = root_key(secret, scope=prompt.cache_scope, layout=layout, adapter=prompt.adapter)
    step = _BLOCKS_AT_ONCE * layout.block_tokens
    for begin in range(0, len(prompt.prompt_tokens), step):
        tokens = prompt.prompt_tokens[begin : begin + step]
        keys = chain_keys(secret, parent, tokens, layout.block_tokens)
        if keys:
            parent = keys[-1]
            yield joined(keys)
