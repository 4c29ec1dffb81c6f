"""Where a prefill worker leaves a prompt for which the decode worker has no room: the pool, at once and all of it.

In the background most of it is there already; whatever is not is copied now, ahead of what others published.
"""

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Protocol

from baton.generation import Prompt
from baton.ids import BlockId
from baton.pages import PublishedPage
from kvpool.pooled_engine import PromptKeys


class UrgentPuts(Protocol):
    """Whoever puts pages into the pool (`kvpool.agent.PoolAgent`)."""

    async def put_now(self, pages: Sequence[PublishedPage]) -> bool:
        """Puts a text's leading pages ahead of all that waits; whether the pool has every one of them then."""


class PooledPrompts:
    """A `baton_worker.ports.PromptStore`.

    Args:
        puts: The way to the pool.
        keys: Of prompts.
        generation: How often a page has been handed out.
    """

    def __init__(
        self, puts: UrgentPuts, keys: PromptKeys, generation: Callable[[BlockId], int]
    ) -> None:
        self._puts = puts
        self._keys = keys
        self._generation = generation

    def put(self, prompt: Prompt, blocks: Sequence[BlockId]) -> Coroutine[None, None, bool]:
        """See PromptStore."""
        # Whoever goes on from here has the log-probabilities of the prompt already, and needs only its KV.
        plain = replace(prompt, sampling=replace(prompt.sampling, prompt_logprobs=None))
        # Read while the pages are the prompt's for certain: once somebody waits, they may be handed out again.
        full = blocks[: self._keys.count(plain)]
        return self._put(plain, [(block, self._generation(block)) for block in full])

    async def _put(self, prompt: Prompt, blocks: Sequence[tuple[BlockId, int]]) -> bool:
        keys = await self._keys.soon(prompt)
        pages = [
            PublishedPage(
                key=key,
                block=block,
                generation=generation,
                index=index,
                scope=prompt.cache_scope,
                tenant=prompt.tenant,
            )
            for index, (key, (block, generation)) in enumerate(zip(keys, blocks, strict=True))
        ]
        return await self._puts.put_now(pages)
