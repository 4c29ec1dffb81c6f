import asyncio
import time
from dataclasses import replace

import pytest

from baton.config.load import load
from baton.config.setting import Setting
from baton.discovery.registry import MOST_REGISTRATIONS, Registration, Registry
from baton.errors import UnavailableError
from baton.ids import Incarnation, WorkerId, WorkerIdentity
from baton.redis_link import open_redis
from baton.seal import HEAD_BYTES, Seal
from baton_cluster.cli.run_role import Alone, decide
from tests.redis_servers import KINDS, a_redis

pytestmark = pytest.mark.timeout(60)

SECRET = b"s" * 32
WORKER = Registration(
    kind="worker",
    identity=WorkerIdentity(worker_id=WorkerId("decode-3"), incarnation=Incarnation(0xAB)),
    address="10.0.0.3:7001",
    role="decode",
    layout="1f",
    labels={"zone": "a"},
)
HASH, LEASES = "{baton}:registrations", "{baton}:registration_leases"


@pytest.fixture(params=KINDS)
async def client(request, tmp_path):
    async with a_redis(request.param, tmp_path) as url:
        client = open_redis(url, 5.0)
        yield client
        await client.aclose()


def registry(client, *, secret=SECRET, prefix="baton", lease_s=5.0) -> Registry:
    return Registry(client, prefix=prefix, secret=secret, lease_s=lease_s)


async def held(client) -> tuple[Registration, ...]:
    found = await registry(client).registrations()
    assert found.faults == ()
    return found.registrations


async def refused(client) -> tuple[str, ...]:
    """What a look refuses; the next one finds nothing of it."""
    found = await registry(client).registrations()
    assert found.registrations == ()
    assert await held(client) == ()
    return found.faults


async def test_what_a_process_says_of_itself_is_read_as_it_was_said(client):
    pool = replace(WORKER, kind="pool", role="", layout="", labels={}, address="[fd00::1]:9100")
    await registry(client).register(WORKER)
    await registry(client).register(pool)
    assert set(map(repr, await held(client))) == {repr(WORKER), repr(pool)}


async def test_the_last_word_of_a_process_holds(client):
    await registry(client).register(WORKER)
    await registry(client).register(replace(WORKER, role="prefill"))
    assert [one.role for one in await held(client)] == ["prefill"]


async def test_a_start_that_ends_takes_nothing_from_the_next(client):
    again = replace(WORKER, identity=replace(WORKER.identity, incarnation=Incarnation(0xAC)))
    await registry(client).register(WORKER)
    await registry(client).register(again)
    await registry(client).withdraw(WORKER)
    assert await held(client) == (again,)


async def test_a_lease_that_is_not_renewed_ends(client):
    await registry(client, lease_s=0.05).register(WORKER)
    async with asyncio.timeout(10):
        while (await registry(client).registrations()).registrations:  # noqa: ASYNC110  # in Redis
            await asyncio.sleep(0.01)
    assert await client.exists(HASH, LEASES) == 0


async def test_another_scope_of_the_same_redis_is_not_seen(client):
    await registry(client, prefix="other").register(WORKER)
    assert await held(client) == ()


async def test_a_registration_by_another_secret_is_refused_and_removed(client):
    await registry(client, secret=b"x" * 32).register(WORKER)
    assert await refused(client) == ("not sealed with this cluster's secret",)


async def test_a_registration_is_no_other_processs_and_none_of_another_scope(client):
    await registry(client).register(WORKER)
    ((_, sealed),) = (await client.hgetall(HASH)).items()
    await registry(client).withdraw(WORKER)
    await client.hset(HASH, "worker/decode-4@ab", sealed)
    await client.zadd(LEASES, {"worker/decode-4@ab": 1000 * time.time() + 60_000})
    assert await refused(client) == ("not sealed with this cluster's secret",)
    await client.hset("{other}:registrations", "worker/decode-3@ab", sealed)
    await client.zadd(
        "{other}:registration_leases", {"worker/decode-3@ab": 1000 * time.time() + 60_000}
    )
    other = await registry(client, prefix="other").registrations()
    assert other.registrations == ()
    assert other.faults == ("not sealed with this cluster's secret",)


async def test_an_old_registration_does_not_come_back(client):
    await registry(client).register(WORKER)
    name = "worker/decode-3@ab"
    content = (await client.hget(HASH, name))[HEAD_BYTES:]
    early_ms = round(1000 * (time.time() - 400.0))
    sealed = Seal(SECRET, "registration").close(f"baton:{name}", content, early_ms)
    await client.hset(HASH, name, sealed)
    found = await registry(client).registrations()
    assert found.registrations == ()
    (why,) = found.faults
    assert why.startswith("out of date")
    await client.zadd(LEASES, {name: 1000 * time.time() - 1})
    assert await held(client) == ()
    assert await client.hgetall(HASH) == {}, "its lease is over"


@pytest.mark.parametrize("ahead_s", [-400.0, 400.0])
async def test_a_router_whose_clock_is_wrong_removes_nothing_that_others_find(client, ahead_s):
    """What it finds is what a process sealed so long ago, or ahead, by its clock."""
    await registry(client).register(WORKER)
    ((name, sealed),) = (await client.hgetall(HASH)).items()
    sealed_ms = round(1000 * (time.time() - ahead_s))
    seal = Seal(SECRET, "registration")
    theirs = seal.close(f"baton:{name.decode()}", sealed[HEAD_BYTES:], sealed_ms)
    await client.hset(HASH, name, theirs)
    assert len((await registry(client).registrations()).faults) == 1
    assert await client.hgetall(HASH) == {name: theirs}


async def test_only_what_is_new_is_opened_and_what_grows_old_is_refused_all_the_same(
    client, monkeypatch
):
    opened, open_one = list[str](), Seal.open

    def counted(seal, name, *rest):
        opened.append(name)
        return open_one(seal, name, *rest)

    monkeypatch.setattr(Seal, "open", counted)
    writer, other, reader = registry(client), registry(client), registry(client)
    pool = replace(WORKER, kind="pool")
    await writer.register(WORKER)
    await other.register(pool)
    await reader.registrations()
    opened.clear()
    await writer.register(WORKER)
    await other.register(replace(pool, address="10.0.0.4:9100"))
    assert opened == ["baton:pool/decode-3@ab"], "the worker's is still good as it was sealed"
    found = await reader.registrations()
    assert {one.address for one in found.registrations} == {"10.0.0.3:7001", "10.0.0.4:9100"}
    assert opened == ["baton:pool/decode-3@ab"] * 2
    monkeypatch.setattr(Seal, "now_ms", lambda seal: round(1000 * (time.time() + 400.0)))
    late = await reader.registrations()
    assert late.registrations == ()
    assert all(why.startswith("out of date") for why in late.faults)


async def test_what_was_sealed_long_ago_is_sealed_anew(client, monkeypatch):
    writer = registry(client, lease_s=5.0)
    await writer.register(WORKER)
    (before,) = await client.hvals(HASH)
    monkeypatch.setattr(Seal, "now_ms", lambda seal: round(1000 * (time.time() + 3.0)))
    await writer.register(WORKER)
    (after,) = await client.hvals(HASH)
    assert after != before
    assert await held(client) == (WORKER,)


async def test_a_lease_that_was_set_by_hand_to_last_for_ever_ends(client):
    await registry(client).register(WORKER)
    await client.zadd(LEASES, {"worker/decode-3@ab": 1e15})
    assert await held(client) == ()


async def test_what_has_no_lease_or_is_too_long_is_removed(client):
    await client.hset(HASH, "no lease", "x")
    await client.hset(HASH, "too long", "x" * 10_000)
    assert await refused(client) == ("malformed", "malformed")
    assert await client.exists(HASH, LEASES) == 0


async def test_keys_of_other_types_are_taken_over(client):
    await client.set(HASH, "x")
    await client.set(LEASES, "x")
    await registry(client).register(WORKER)
    assert await held(client) == (WORKER,)


async def test_beyond_the_most_nobody_is_registered_and_those_that_are_stay(client):
    await registry(client).register(WORKER)
    await client.hset(HASH, mapping={f"n{i}": "x" for i in range(MOST_REGISTRATIONS)})
    other = replace(WORKER, identity=replace(WORKER.identity, incarnation=Incarnation(1)))
    with pytest.raises(UnavailableError, match="registrations already"):
        await registry(client).register(other)
    await registry(client).register(WORKER)
    assert (await registry(client).registrations()).registrations == (WORKER,)
    await registry(client).register(other)


@pytest.mark.parametrize(
    "changes",
    [
        {"address": "host"},
        {"address": "dns:///host:70"},
        {"labels": {f"{number}": "a" for number in range(17)}},
        {"labels": {f"{number}": "\0" * 128 for number in range(16)}},
        {"layout": "1" * 9000},
        {"identity": replace(WORKER.identity, worker_id=WorkerId("d" * 300))},
        {"identity": replace(WORKER.identity, worker_id=WorkerId("ж" * 160))},
        {"identity": replace(WORKER.identity, worker_id=WorkerId("\udc80"))},
    ],
)
async def test_who_would_be_refused_by_every_router_hears_it(client, changes):
    with pytest.raises(UnavailableError, match="routers would refuse this registration: "):
        await registry(client).register(replace(WORKER, **changes))
    assert await held(client) == ()


async def test_the_longest_that_settings_allow_is_registered(client):
    words = {f"{number:02}" + "k" * 126: '"' * 121 + "v" * 7 for number in range(16)}
    longest = replace(
        WORKER,
        identity=WorkerIdentity(
            worker_id=WorkerId('"' * 256), incarnation=Incarnation((1 << 48) - 1)
        ),
        address='"' * 250 + ":65535",
        layout="1" * 64,
        labels=words,
    )
    flags = [
        Setting(path="cluster.secret", value=SECRET.hex(), source="test"),
        Setting(path="cluster.labels", value=words, source="test"),
    ]
    alone = Alone(role="decode", name=longest.identity.worker_id, advertise=longest.address)
    decide(load(flags=flags), alone)
    await registry(client).register(longest)
    assert await held(client) == (longest,)


async def test_without_redis_there_is_no_answer():
    nobody = open_redis("redis://127.0.0.1:1", 5.0)
    with pytest.raises(UnavailableError):
        await registry(nobody).registrations()
    with pytest.raises(UnavailableError):
        await registry(nobody).register(WORKER)
    await nobody.aclose()
