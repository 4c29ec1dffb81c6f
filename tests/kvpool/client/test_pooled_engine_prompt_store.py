import threading
from collections.abc import Sequence

from baton.generation import Prompt, SamplingParams
from baton.hashing import chain_keys, root_key
from baton.ids import BlockId, BlockKey
from baton.pages import PublishedPage
from kvpool.client.pooled_engine import PoolPromptStore, PromptKeys
from tests.kvpool.client.arena_world import layout

SECRET = bytes(32)


class Puts:
    """Takes everything."""

    def __init__(self) -> None:
        self.pages: list[PublishedPage] = []

    async def put_now(self, pages: Sequence[PublishedPage]) -> bool:
        self.pages += pages
        return True


async def put(length: int, **sampling) -> list[PublishedPage]:
    puts, size = Puts(), layout().block_tokens
    store = PoolPromptStore(puts, PromptKeys(SECRET, layout()), lambda block: 100 + block)
    prompt = Prompt(
        prompt_tokens=tuple(range(length)),
        sampling=SamplingParams(**sampling),
        cache_scope="s",
        tenant="t",
    )
    assert await store.put(prompt, [BlockId(7 + n) for n in range(-(-length // size))])
    return puts.pages


async def test_every_full_block_is_put_as_the_page_that_it_lies_in():
    size = layout().block_tokens
    pages = await put(3 * size + 1)
    keys = chain_keys(SECRET, root_key(SECRET, scope="s", layout=layout()), range(3 * size), size)
    assert [page.key for page in pages] == list(keys)
    assert [(page.block, page.generation, page.index) for page in pages] == [
        (7, 107, 0),
        (8, 108, 1),
        (9, 109, 2),
    ]
    assert {(page.scope, page.tenant) for page in pages} == {("s", "t")}


async def test_a_prompt_whose_tokens_were_scored_is_put_like_any_other():
    size = layout().block_tokens
    assert len(await put(2 * size + 1, prompt_logprobs=0)) == 2


class WatchedKeys(PromptKeys):
    """Notes on which threads it hashes."""

    def __init__(self) -> None:
        super().__init__(SECRET, layout())
        self.threads: set[int] = set()

    def of(self, prompt: Prompt) -> list[BlockKey]:
        self.threads.add(threading.get_ident())
        return super().of(prompt)


async def test_a_long_prompt_is_not_hashed_on_the_event_loop():
    keys = WatchedKeys()
    prompt = Prompt(prompt_tokens=tuple(range(50_000)), sampling=SamplingParams())
    blocks = [BlockId(n) for n in range(keys.count(prompt) + 1)]
    await PoolPromptStore(Puts(), keys, lambda _: 0).put(prompt, blocks)
    assert keys.threads
    assert threading.get_ident() not in keys.threads


async def test_a_page_that_is_handed_out_before_it_is_put_is_not_taken_for_the_prompts():
    generations = {BlockId(7): 1, BlockId(8): 1}
    puts, size = Puts(), layout().block_tokens
    store = PoolPromptStore(puts, PromptKeys(SECRET, layout()), generations.__getitem__)
    prompt = Prompt(prompt_tokens=tuple(range(size + 1)), sampling=SamplingParams())
    putting = store.put(prompt, [BlockId(7), BlockId(8)])
    generations[BlockId(7)] = 2
    await putting
    assert [page.generation for page in puts.pages] == [1]


async def test_a_prompt_shorter_than_a_block_needs_nothing_in_the_pool():
    assert await put(1) == []
