"""How a node keeps the directory true of itself, also through times when the directory is away."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from baton.clock import ManualClock
from baton.errors import OverloadedError, PoolUnavailableError
from baton.ids import BlockKey, Incarnation, WorkerId, WorkerIdentity
from kvpool.directory.memory import MemoryDirectory
from kvpool.messages import (
    DirectoryChanges,
    DiskBlock,
    NodeState,
    Owner,
    PutGrant,
    Renewal,
    Replica,
    Selection,
    Stored,
)
from kvpool.node.block_store import BlockStore
from kvpool.node.ledger import NodeLedger, NodeLimits
from kvpool.node.membership import DirectoryClient

LEASE_S = 10.0
NODE = WorkerIdentity(worker_id=WorkerId("pool-0"), incarnation=Incarnation(3))
STATE = NodeState(node=NODE, address="unix:/x")
ANNA = Owner(tenant="anna", scope="anna", model="m")


class Flaky:
    """A directory that can be away."""

    def __init__(self, directory: MemoryDirectory) -> None:
        self._directory = directory
        self.away = False
        self.slow = lambda: None  # called by each publication

    def _check(self) -> MemoryDirectory:
        if self.away:
            raise PoolUnavailableError("away")
        return self._directory

    async def publish(self, node: WorkerIdentity, changes: DirectoryChanges) -> None:
        self.slow()
        await self._check().publish(node, changes)

    async def lookup(self, keys: Sequence[BlockKey]) -> Sequence[tuple[Replica, ...]]:
        return await self._check().lookup(keys)

    async def renew(self, state: NodeState, lease_s: float, flushes: int) -> Renewal:
        return await self._check().renew(state, lease_s, flushes)

    async def nodes(self) -> tuple[NodeState, ...]:
        return await self._check().nodes()

    async def retire(self, node: WorkerIdentity) -> None:
        await self._check().retire(node)

    async def flush(self, selection: Selection) -> int:
        return await self._check().flush(selection)


class World:
    """A ledger, its registrar, and a directory that can be away."""

    def __init__(self, num_slots: int = 8, on_disk: Sequence[DiskBlock] = ()) -> None:
        self.clock = ManualClock()
        self.directory = Flaky(MemoryDirectory(self.clock))
        limits = NodeLimits(num_slots=num_slots, slot_bytes=64, num_extents=len(on_disk))
        self.ledger = NodeLedger(limits, "start", on_disk)
        self.flushes_carried_out = 0
        self.registrar = DirectoryClient(self.directory, self.ledger, self, lease_s=LEASE_S)

    def carry_out_flushes(self, selections: Sequence[Selection], number: int) -> None:
        for selection in selections:
            self.ledger.flush(selection)
        self.flushes_carried_out = number

    def put(self, *numbers: int) -> None:
        granted = self.ledger.reserve([key(n) for n in numbers], ANNA, 0.0)
        assert isinstance(granted, PutGrant)
        assert self.ledger.commit(granted.put_id, [bytes(8)] * len(numbers), 0.0) == len(numbers)

    async def known(self, *numbers: int) -> list[int]:
        """Those of the blocks that the directory knows."""
        return [n for n in numbers if await self.directory.lookup([key(n)])]

    async def beat(self) -> None:
        await self.registrar.renew(STATE)
        await self.registrar.publish(STATE)


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "little"))


async def test_what_is_put_and_given_up_is_told() -> None:
    world = World()
    world.put(1)
    await world.beat()
    assert await world.known(1, 2) == [1]
    world.put(2)
    world.ledger.drop([key(1)])
    await world.beat()
    assert await world.known(1, 2) == [2]


async def test_after_an_absence_the_directory_is_told_everything_and_nothing_old_is_left() -> None:
    world = World()
    world.put(1, 2)
    await world.beat()
    world.directory.away = True
    world.ledger.drop([key(1)])
    world.put(3)
    await world.registrar.publish(STATE)  # these changes are lost on the way
    assert [world.registrar.reachable] == [False]
    world.put(4)
    await world.beat()
    world.directory.away = False
    await world.beat()
    assert [world.registrar.reachable] == [True]
    assert await world.known(1, 2, 3, 4) == [2, 3, 4]


@pytest.mark.parametrize("beats", [0, 1])
async def test_a_directory_that_is_away_is_logged_once_also_from_the_start(
    beats: int, caplog: pytest.LogCaptureFixture
) -> None:
    world = World()
    for _ in range(beats):
        await world.beat()
    world.directory.away = True
    for _ in range(3):
        await world.beat()
    said = [one for one in caplog.records if "directory is away" in one.getMessage()]
    assert len(said) == 1


async def test_a_node_whose_lease_ended_is_found_again_with_all_its_blocks() -> None:
    world = World()
    world.put(1)
    await world.beat()
    world.clock.advance(LEASE_S + 1)
    assert await world.known(1) == []
    await world.beat()
    assert await world.known(1) == [1]


async def test_two_nodes_of_one_name_are_both_known_and_do_not_fight() -> None:
    """They are configured so by mistake; neither can know that the other one is not dead."""
    one = World()
    two = NodeState(node=replace(NODE, incarnation=Incarnation(4)), address="unix:/y")
    two_ledger = NodeLedger(NodeLimits(num_slots=8, slot_bytes=64), "two")
    second = DirectoryClient(one.directory, two_ledger, one, lease_s=LEASE_S)
    told = list[None]()
    one.directory.slow = lambda: told.append(None)
    one.put(1)
    for _ in range(6):
        await one.beat()
        await second.renew(two)
        one.clock.advance(LEASE_S / 3)
    assert {state.node for state in await one.directory.nodes()} == {NODE, two.node}
    assert await one.known(1) == [1]
    assert len(told) == 2, "the first one told all of it again, once"


async def test_a_lease_holds_while_the_directory_is_told_of_very_many_blocks() -> None:
    """Each part takes almost as long as the lease."""
    world, numbers = World(num_slots=20_000), range(1, 20_001)
    world.put(*numbers)
    world.directory.slow = lambda: world.clock.advance(0.9 * LEASE_S)
    await world.beat()
    assert [world.registrar.reachable] == [True]
    assert len(await world.directory.nodes()) == 1
    assert await world.known(*numbers) == list(numbers)


async def test_a_lease_that_ends_while_the_directory_is_told_is_no_standing() -> None:
    world = World(num_slots=20_000)
    world.put(*range(1, 20_001))
    world.directory.slow = lambda: world.clock.advance(LEASE_S + 1)
    await world.beat()
    assert [world.registrar.reachable] == [False]
    world.directory.slow = lambda: None
    await world.beat()
    assert [world.registrar.reachable] == [True]
    assert await world.known(1, 20_000) == [1, 20_000]


async def test_what_is_flushed_while_the_directory_is_told_is_not_told_after_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, numbers = World(num_slots=10_000), range(1, 10_001)
    world.put(*numbers)
    publish, flush = world.directory.publish, world.directory.flush
    flushed = list[int]()

    async def published(node: WorkerIdentity, changes: DirectoryChanges) -> None:
        await publish(node, changes)
        if not flushed:
            flushed.append(await flush(Selection(tenant="anna")))

    monkeypatch.setattr(world.directory, "publish", published)
    await world.registrar.renew(STATE)
    assert flushed
    assert world.ledger.held([key(1)]) == 0
    assert await world.known(*numbers) == []


async def test_the_directory_is_told_of_very_many_blocks_as_they_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The node answers others in between."""
    world, numbers = World(num_slots=20_000), range(1, 20_001)
    world.put(*numbers)
    found, told = list[BlockKey](), list[int]()
    find = BlockStore.find

    def counted(blocks: BlockStore, block: BlockKey) -> Stored | None:
        found.append(block)
        return find(blocks, block)

    monkeypatch.setattr(BlockStore, "find", counted)
    world.directory.slow = lambda: told.append(len(found))
    await world.beat()
    assert told[0] < 5000
    assert told[-1] == len(numbers), "each was looked for once"


async def test_flushes_of_other_nodes_are_carried_out_once() -> None:
    world = World()
    world.put(1)
    await world.beat()
    await world.directory.flush(Selection(tenant="anna"))
    await world.beat()
    assert world.ledger.held([key(1)]) == 0
    world.put(1)
    await world.beat()
    assert world.ledger.held([key(1)]) == 1
    assert await world.known(1) == [1]


async def test_a_flush_without_the_directory_says_that_others_will_not_hear_of_it() -> None:
    world = World()
    await world.beat()
    assert await world.registrar.flush(Selection())
    world.directory.away = True
    assert not await world.registrar.flush(Selection())


async def test_a_crowd_of_flushes_is_no_directory_that_is_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    world.put(1)
    await world.beat()

    async def crowded(_: Selection) -> int:
        raise OverloadedError("too many others flush")

    monkeypatch.setattr(world.directory, "flush", crowded)
    assert not await world.registrar.flush(Selection())
    assert world.registrar.reachable
    assert await world.known(1) == [1]
