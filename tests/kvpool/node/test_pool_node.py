from dataclasses import replace
from pathlib import Path

import pytest

from baton.clock import ManualClock
from baton.config.schema import PoolConfig
from kvpool.directory.memory import MemoryDirectory
from kvpool.node.pool_node import PoolNode
from tests.kvpool.nodes_world import LAYOUT, identity


async def test_what_is_looked_at_with_every_tick_does_not_ask_after_each_tenant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ManualClock()
    node = PoolNode(
        replace(PoolConfig(), memory_bytes=4 * LAYOUT.page_bytes),
        identity("pool-0"),
        address="",
        region_path=str(tmp_path / "kv"),
        directory=MemoryDirectory(clock),
        clock=clock,
    )
    node.attach(identity("decode-0"), LAYOUT)
    node.tenants.asked("anna", hit_blocks=0, missed_blocks=1)
    assert [owner.tenant for owner in node.owners()] == ["anna"]
    monkeypatch.delattr(type(node.tenants), "complete")
    node.sweep()
    await node.register()
    assert node.usage().slots_free == 4
    assert not node.state().sick
    await node.close()


async def test_the_directory_knows_a_node_as_soon_as_its_first_worker_came(tmp_path: Path) -> None:
    clock = ManualClock()
    directory = MemoryDirectory(clock)
    node = PoolNode(
        replace(PoolConfig(), memory_bytes=4 * LAYOUT.page_bytes),
        identity("pool-0"),
        address="",
        region_path=str(tmp_path / "kv"),
        directory=directory,
        clock=clock,
    )
    await node.register()
    assert await directory.nodes() == ()
    node.attach(identity("decode-0"), LAYOUT)
    await node.register()
    assert [state.node for state in await directory.nodes()] == [node.identity]
    await node.close()
