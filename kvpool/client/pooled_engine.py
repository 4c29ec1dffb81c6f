"""An engine whose prompts come with their blocks in the pool leased already; and the pool as a store of whole prompts.

Stands between a worker's services and their engine. A prompt waits here for the node's answer, for some milliseconds,
and in the order in which prompts came; every other command passes at once.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from baton.generation import Prompt
from baton.hashing import chain_keys, root_key
from baton.ids import BlockId, BlockKey, SeqId
from baton.layout import KvLayout
from baton.pages import PublishedPage
from baton.story import StoryEntry
from baton_engine.messages import Command, FlushCache, Generate, Prefill, StepEvents
from baton_engine.ports import EnginePort

_HASHED_IN_PLACE_TOKENS = 4096
"""Longer prompts are hashed in a thread: the event loop has other things to do for that millisecond."""


class PromptPool(Protocol):
    """Leases blocks for a prompt that is about to be submitted."""

    async def prepare(self, seq_id: SeqId, keys: Sequence[BlockKey], tenant: str = "") -> None:
        """Leases what there is; bounded in time, and raises nothing."""


class PromptKeys:
    """Names the blocks that an engine would fetch for a prompt.

    Args:
        secret: The cluster secret, 32 bytes.
        layout: Of the engine's pages.
    """

    def __init__(self, secret: bytes, layout: KvLayout) -> None:
        self._secret = secret
        self._layout = layout

    def count(self, prompt: Prompt) -> int:
        """How many these are. The last token is always computed,
        and all of them where their log-probabilities are wanted.
        """
        if prompt.sampling.prompt_logprobs is not None:
            return 0
        return max(0, len(prompt.tokens) - 1) // self._layout.block_tokens

    def of(self, prompt: Prompt) -> list[BlockKey]:
        """Their keys, in order."""
        root = root_key(
            self._secret, scope=prompt.cache_scope, layout=self._layout, adapter=prompt.adapter
        )
        size = self._layout.block_tokens
        return chain_keys(self._secret, root, prompt.tokens[: self.count(prompt) * size], size)

    async def soon(self, prompt: Prompt) -> list[BlockKey]:
        """The same without holding the event loop up: those of a long prompt are made in a thread."""
        if len(prompt.tokens) > _HASHED_IN_PLACE_TOKENS:
            return await asyncio.to_thread(self.of, prompt)
        return self.of(prompt)


@dataclass(slots=True, eq=False)
class _Waiting:
    command: Prefill | Generate
    preparing: asyncio.Task[None] | None

    @property
    def ready(self) -> bool:
        return self.preparing is None or self.preparing.done()


class PooledEngine:
    """An `EnginePort` over another one. `submit` belongs to the event loop.

    A command for a prompt that still waits, such as its abort, ends the waiting: the engine gets both at once. No
    prompt waits for longer than the pool may take for one, since those before it came before it.

    Args:
        engine: The engine.
        pool: Leases blocks.
        keys: Of prompts.
    """

    def __init__(self, engine: EnginePort, pool: PromptPool, keys: PromptKeys) -> None:
        self._engine = engine
        self._pool = pool
        self._keys = keys
        self._waiting: dict[SeqId, _Waiting] = {}

    def submit(self, command: Command) -> None:
        """See EnginePort."""
        match command:
            case Prefill() | Generate():
                self._prepare(command)
            case FlushCache():
                self._engine.submit(command)
            case _:
                self._submit_now(command.seq_id)
                self._engine.submit(command)

    def attach(self, listener: Callable[[StepEvents], None]) -> None:
        """See EnginePort."""
        self._engine.attach(listener)

    def progress_s(self) -> float | None:
        """See EnginePort."""
        return self._engine.progress_s()

    def failure(self) -> BaseException | None:
        """See EnginePort."""
        return self._engine.failure()

    def story(self, about: SeqId | BlockKey) -> Sequence[StoryEntry]:
        """See EnginePort."""
        return self._engine.story(about)

    def close(self) -> None:
        """See EnginePort. Prompts that wait are dropped."""
        waiting, self._waiting = self._waiting, {}
        for one in waiting.values():
            if one.preparing is not None:
                one.preparing.cancel()
        self._engine.close()

    def _prepare(self, command: Prefill | Generate) -> None:
        preparing = None
        if self._keys.count(command.prompt):
            preparing = asyncio.create_task(self._lease(command), name="pool-prepare")
            preparing.add_done_callback(lambda _: self._submit_ready())
        self._waiting[command.seq_id] = _Waiting(command=command, preparing=preparing)
        self._submit_ready()

    async def _lease(self, command: Prefill | Generate) -> None:
        keys = await self._keys.soon(command.prompt)
        await self._pool.prepare(command.seq_id, keys, command.prompt.tenant)

    def _submit_now(self, seq_id: SeqId) -> None:
        waiting = self._waiting.pop(seq_id, None)
        if waiting is None:
            return
        if waiting.preparing is not None:
            waiting.preparing.cancel()
        self._engine.submit(waiting.command)
        self._submit_ready()

    def _submit_ready(self) -> None:
        while self._waiting:
            seq_id, first = next(iter(self._waiting.items()))
            if not first.ready:
                return
            del self._waiting[seq_id]
            self._engine.submit(first.command)


class UrgentPuts(Protocol):
    """Puts pages into the pool at once (`kvpool.client.agent.PoolAgent`)."""

    async def put_now(self, pages: Sequence[PublishedPage]) -> bool:
        """Puts a text's leading pages ahead of all that waits; whether the pool has every one of them then."""


class PoolPromptStore:
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
        # The worker that goes on from here has the log-probabilities of the prompt already, and needs only its KV.
        plain = replace(prompt, sampling=replace(prompt.sampling, prompt_logprobs=None))
        # Read while the pages are the prompt's for certain: after the first await they may be handed out again.
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
