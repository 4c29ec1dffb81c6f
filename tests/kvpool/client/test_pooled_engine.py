import asyncio
from collections.abc import Sequence

import pytest

from baton.generation import Prompt, SamplingParams
from baton.hashing import chain_keys, root_key
from baton.ids import BlockKey, SeqId
from baton_engine.messages import Abort, Command, FlushCache, Generate, Prefill, Receive
from kvpool.client.pooled_engine import PooledEngine, PromptKeys
from tests.kvpool.client.agent_world import until
from tests.kvpool.client.arena_world import layout

A, B, C = SeqId("w/a"), SeqId("w/b"), SeqId("w/c")
KEYS = PromptKeys(bytes(32), layout())


class Engine:
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[Command] = []

    def submit(self, command: Command) -> None:
        self.told.append(command)


class Pool:
    """Prepares a prompt when it is let."""

    def __init__(self) -> None:
        self.gates: dict[SeqId, asyncio.Event] = {}
        self.keys: dict[SeqId, Sequence[BlockKey]] = {}
        self.ended: list[SeqId] = []

    async def prepare(self, seq_id: SeqId, keys: Sequence[BlockKey], tenant: str = "") -> None:
        self.keys[seq_id] = keys
        gate = self.gates.setdefault(seq_id, asyncio.Event())
        try:
            await gate.wait()
        finally:
            self.ended.append(seq_id)


def prompt(length: int = 9, **sampling) -> Prompt:
    return Prompt(prompt_tokens=tuple(range(length)), sampling=SamplingParams(**sampling))


def generate(seq_id: SeqId, length: int = 9) -> Generate:
    return Generate(seq_id=seq_id, prompt=prompt(length))


class World:
    def __init__(self) -> None:
        self.inner, self.pool = Engine(), Pool()
        self.engine = PooledEngine(self.inner, self.pool, KEYS)  # type: ignore[arg-type]  # a part of a port

    async def begun(self, *commands: Prefill | Generate) -> None:
        for command in commands:
            self.engine.submit(command)
        await until(lambda: {c.seq_id for c in commands} <= self.pool.keys.keys())

    async def let(self, seq_id: SeqId) -> None:
        self.pool.gates[seq_id].set()
        await until(lambda: seq_id in self.pool.ended)
        await asyncio.sleep(0)


@pytest.mark.parametrize("command", [generate(A), Prefill(seq_id=A, prompt=prompt())])
async def test_the_engine_gets_a_prompt_once_the_pool_has_been_asked(command):
    world = World()
    await world.begun(command)
    assert world.inner.told == []
    await world.let(A)
    assert world.inner.told == [command]


async def test_prompts_keep_their_order():
    world = World()
    first, second = generate(A), generate(B)
    await world.begun(first, second)
    world.engine.submit(generate(C, length=2))
    await world.let(B)
    assert world.inner.told == []
    await world.let(A)
    assert world.inner.told == [first, second, generate(C, length=2)]


async def test_an_abort_does_not_wait_and_ends_the_asking():
    world = World()
    first, second = generate(A), generate(B)
    await world.begun(first, second)
    await world.let(B)
    world.engine.submit(Abort(seq_id=A))
    assert world.inner.told == [first, Abort(seq_id=A), second] or world.inner.told == [
        first,
        second,
        Abort(seq_id=A),
    ]
    await until(lambda: A in world.pool.ended)
    await asyncio.sleep(0)
    assert len(world.inner.told) == 3


async def test_other_commands_pass_at_once():
    world = World()
    await world.begun(generate(A))
    others: list[Command] = [Receive(seq_id=B, prompt=prompt()), FlushCache(), Abort(seq_id=C)]
    for command in others:
        world.engine.submit(command)
    assert world.inner.told == others


async def test_a_prompt_of_which_nothing_could_be_fetched_is_submitted_at_once():
    world = World()
    scored = Generate(seq_id=B, prompt=prompt(prompt_logprobs=1))
    world.engine.submit(generate(A, length=4))
    world.engine.submit(scored)
    assert world.inner.told == [generate(A, length=4), scored]
    assert world.pool.keys == {}


@pytest.mark.parametrize("length", [9, 12, 5000])
async def test_keys_are_those_under_which_the_engine_looks(length):
    world = World()
    await world.begun(generate(A, length))
    root = root_key(bytes(32), scope="", layout=layout())
    assert world.pool.keys[A] == chain_keys(bytes(32), root, range(length - 1), 4)
    await world.let(A)


async def test_a_closed_engine_gets_nothing_more():
    world = World()
    world.inner.close = lambda: None  # type: ignore[attr-defined]
    await world.begun(generate(A))
    world.engine.close()
    await until(lambda: A in world.pool.ended)
    assert world.inner.told == []
