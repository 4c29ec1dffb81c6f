"""What the operator allows tenants, as nodes learn it and hold to it, each by itself and all together."""

import itertools
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest

from baton.errors import BatonError, ConfigError, UnavailableError
from kvpool.messages import Allowance
from kvpool.node.quotas import QuotaKeeper
from tests.kvpool.nodes_world import LAYOUT, Node, Worker, pool_config, until
from tests.redis_servers import a_redis

SMALL = {"anna": Allowance(max_bytes=1)}


class Said:
    """Gives what stands in `editions`, one after the other."""

    def __init__(self, *editions: Mapping[str, Allowance] | BatonError | None) -> None:
        self._editions = list(editions)

    async def next(self) -> Mapping[str, Allowance] | None:
        edition = self._editions.pop(0)
        if isinstance(edition, BatonError):
            raise edition
        return edition


async def test_what_is_wrong_changes_nothing_and_what_is_new_is_obeyed():
    obeyed: list[Mapping[str, Allowance]] = []
    keeper = QuotaKeeper(Said(SMALL, None, ConfigError("wrong"), {}), obeyed.append, pause_s=1.0)
    assert [await keeper.look() for _ in range(4)] == [True, False, False, True]
    assert obeyed == [SMALL, {}]


async def test_a_fault_that_stays_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    wrong, away = ConfigError("wrong"), UnavailableError("away")
    keeper = QuotaKeeper(Said(wrong, wrong, away, away, None, wrong), lambda _: None, pause_s=1.0)
    for _ in range(6):
        assert not await keeper.look()
    assert caplog.text.count("stays as it was") == 3


@pytest.fixture
async def redis(tmp_path: Path) -> AsyncIterator[str]:
    async with a_redis("fakeredis", tmp_path) as url:
        yield url


async def blocks_of_anna(*workers: Worker) -> list[int]:
    said = [await worker.usage() for worker in workers]
    return [sum(o.blocks for o in one.owners if o.tenant == "anna") for one in said]


async def test_a_quota_holds_over_all_nodes_together_and_goes_where_it_is_used(
    redis: str, tmp_path: Path
) -> None:
    quota = {"anna": Allowance(max_bytes=12 * LAYOUT.page_bytes)}
    nodes = [
        Node(
            f"pool-{number}",
            tmp_path,
            pool_config(redis, node_lease_s=0.9),
            allowances=Said(quota, *[None] * 1000),
        )
        for number in range(2)
    ]
    async with nodes[0].started() as here, nodes[1].started() as there:
        assert await here.put(*range(1, 21)) == 12
        await here.found(1)
        numbers = itertools.count(100)

        async def shared() -> bool:
            await there.put(next(numbers), next(numbers))
            held = await blocks_of_anna(here, there)
            return sum(held) <= 12 and held[1] >= 3

        await until(shared)
        assert (await blocks_of_anna(here))[0] >= 3
