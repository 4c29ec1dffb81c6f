from collections.abc import Sequence

from baton.generation import Prompt, SamplingParams
from baton.hashing import chain_keys, root_key
from baton.ids import BlockId
from baton.pages import PublishedPage
from kvpool.pooled_engine import PromptKeys
from kvpool.prompt_store import PooledPrompts
from tests.kvpool.arena_world import layout

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
    store = PooledPrompts(puts, PromptKeys(SECRET, layout()), lambda block: 100 + block)
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


async def test_a_prompt_shorter_than_a_block_needs_nothing_in_the_pool():
    assert await put(1) == []
