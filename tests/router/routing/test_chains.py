import asyncio
from dataclasses import replace

from baton.blocks import joined
from baton.generation import Prompt, SamplingParams
from baton.hashing import chain_keys, root_key
from baton.ids import Role
from baton.tokens import PackedTokens
from router.routing.chains import PromptHasher, chain_of
from router.routing.index import PrefixIndex
from router.routing.table import fingerprints_of
from router.routing.view import ClusterView
from tests.router.known_workers import hello

SECRET = b"s" * 32


def _view() -> ClusterView:
    view = ClusterView(PrefixIndex())
    view.join(hello("h0", Role.HYBRID), "unix:h0", 0.0)
    return view


def _prompt(count: int) -> Prompt:
    tokens = PackedTokens.of(i % 500 for i in range(count))
    return Prompt(prompt_tokens=tokens, sampling=SamplingParams(), cache_scope="t")


def test_a_chain_that_is_hashed_in_steps_is_the_same():
    ((_, layout),) = _view().layouts().items()
    for count in (0, 1, layout.block_tokens, 100_000):
        prompt = _prompt(count)
        root = root_key(SECRET, scope="t", layout=layout)
        whole = chain_keys(SECRET, root, prompt.prompt_tokens, layout.block_tokens)
        assert chain_of(SECRET, prompt, layout) == fingerprints_of(joined(whole))


def test_an_adapters_prompt_shares_no_block_with_the_models():
    ((_, layout),) = _view().layouts().items()
    plain = _prompt(4 * layout.block_tokens)
    chains = [
        chain_of(SECRET, replace(plain, adapter=name), layout) for name in ("", "sql", "code")
    ]
    assert all(len(chain) == 4 for chain in chains)
    assert len({fingerprint for chain in chains for fingerprint in chain}) == 12


async def test_the_loop_runs_while_long_prompts_are_hashed_and_each_has_its_turn():
    view = _view()
    ((group, layout),) = view.layouts().items()
    hasher = PromptHasher(SECRET, view)
    assert await hasher.chains(_prompt(1000)) == {}, "a short one is hashed where it is placed"
    long, shorter = _prompt(400_000), _prompt(100_000)
    first = asyncio.ensure_future(hasher.chains(long))
    await asyncio.sleep(0)
    second = asyncio.ensure_future(hasher.chains(shorter))
    turns = 0
    while not second.done():
        turns += 1
        await asyncio.sleep(0)
    assert turns > 5
    assert not first.done(), "the shorter one does not wait for all of the other"
    assert await second == {group: chain_of(SECRET, shorter, layout)}
    assert await first == {group: chain_of(SECRET, long, layout)}
