"""A node among others: it tells what its tenants have, and takes of their quotas what the others leave,
directory or not.
"""

from dataclasses import replace

from baton.ids import Incarnation, WorkerId, WorkerIdentity
from kvpool.messages import Allowance, DiskBlock, NodeState, PutRefused, TenantPart
from kvpool.node.membership import Membership
from kvpool.node.quotas import QuotaShares, TenantRecords
from tests.kvpool.node.test_membership_directory import ANNA, LEASE_S, STATE, World, key

OTHER = NodeState(
    node=WorkerIdentity(worker_id=WorkerId("pool-1"), incarnation=Incarnation(1)), address=""
)
BLOCK_BYTES = 64


def joined(world: World, *, quota_blocks: int) -> Membership:
    book = TenantRecords(Allowance())
    book.allow({"anna": Allowance(max_bytes=quota_blocks * BLOCK_BYTES)})
    shares = QuotaShares(STATE.node, book, BLOCK_BYTES)
    member = Membership(world.ledger, world.registrar, shares, lease_s=LEASE_S, clock=world.clock)
    member.share_quotas()
    return member


def taken(world: World, *numbers: int) -> int:
    """Of so many new blocks of Anna's, how many find a place."""
    granted = world.ledger.reserve([key(n) for n in numbers], ANNA, world.clock.now_s())
    if isinstance(granted, PutRefused):
        return 0
    world.ledger.abandon(granted.put_id)
    return len(granted.items)


def anna(blocks: int) -> tuple[TenantPart, ...]:
    return (TenantPart(tenant="anna", size_bytes=blocks * BLOCK_BYTES, active=True),)


async def test_a_node_says_what_tenants_have_and_takes_what_others_leave() -> None:
    world = World()
    member = joined(world, quota_blocks=4)
    assert taken(world, 1, 2, 3, 4, 5) == 4
    world.put(1)
    await world.directory.renew(replace(OTHER, parts=anna(2)), LEASE_S, 0)
    await member.renew(STATE)
    told = {state.node: state.parts for state in await world.directory.nodes()}
    assert told[STATE.node] == anna(1)
    assert taken(world, 2, 3, 4, 5) == 1


async def test_while_the_directory_is_away_a_node_keeps_its_part() -> None:
    world = World()
    member = joined(world, quota_blocks=4)
    await world.directory.renew(replace(OTHER, parts=anna(4)), 1000.0, 0)
    await member.renew(STATE)
    world.directory.away = True
    world.clock.advance(1000.0)
    await member.renew(STATE)
    assert not member.reachable
    assert taken(world, 1, 2, 3, 4, 5) == 0
    world.directory.away = False
    world.clock.advance(1.0)
    await member.renew(STATE)
    assert taken(world, 1, 2, 3, 4, 5) == 4


async def test_a_node_that_was_killed_leaves_its_next_start_all_that_the_disk_holds() -> None:
    """The lease of the start that was killed holds for a while. What tenants had there is not there a second time."""
    on_disk = [
        DiskBlock(
            extent=n - 1,
            epoch=n,
            key=key(n),
            owner=ANNA,
            size_bytes=BLOCK_BYTES,
            position=n - 1,
            checksums=bytes(8),
        )
        for n in range(1, 5)
    ]
    world = World(on_disk=on_disk)
    killed = replace(STATE.node, incarnation=Incarnation(2))
    await world.directory.renew(replace(STATE, node=killed, parts=anna(4)), LEASE_S, 0)
    member = joined(world, quota_blocks=4)
    for _ in range(2):
        await member.renew(STATE)
        world.clock.advance(LEASE_S / 3)
    assert world.ledger.held([key(n) for n in range(1, 5)]) == 4
    assert [state.node for state in await world.directory.nodes()] == [STATE.node]


async def test_a_new_node_is_known_at_once_and_then_says_three_times_per_lease_that_it_lives() -> (
    None
):
    world = World()
    member = joined(world, quota_blocks=4)

    async def says(free_bytes: int) -> int:
        """What the directory is left with."""
        await member.renew(replace(STATE, free_bytes=free_bytes))
        return (await world.directory.nodes())[0].free_bytes

    assert await says(3) == 3
    world.clock.advance(0.3 * LEASE_S)
    assert await says(2) == 3
    world.clock.advance(0.1 * LEASE_S)
    assert await says(1) == 1


async def test_a_directory_that_is_away_is_asked_once_per_second() -> None:
    world = World()
    member = joined(world, quota_blocks=4)
    world.directory.away = True
    await member.renew(STATE)
    world.directory.away = False
    world.clock.advance(0.5)
    await member.renew(STATE)
    assert not member.reachable
    world.clock.advance(0.5)
    await member.renew(STATE)
    assert member.reachable
