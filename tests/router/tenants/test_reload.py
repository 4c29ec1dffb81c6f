"""The tenants document is followed while serving; a bad one changes nothing and is counted."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from baton.errors import AuthenticationError, ConfigError, UnavailableError
from baton.redis_link import RefusedValues, open_redis
from baton.telemetry.metrics import new_registry
from router.tenants.directory import TenantDirectory
from router.tenants.document import parse
from router.tenants.keys import hash_key
from router.tenants.reload import ReloadMetrics, TenantReloader
from router.tenants.sources import Edition, FileSource, RedisSource, TenantSource, publish
from tests.redis_servers import KINDS, a_redis, no_refusals
from tests.router.tenants.test_web_tokens import jwks, token
from tests.waits import soon


def document(*keys: str) -> str:
    return f"tenants: [{{id: acme, keys: [{', '.join(repr(hash_key(key)) for key in keys)}]}}]"


SECRET = b"s" * 32


class World:
    """A directory that follows a source."""

    def __init__(self, source: TenantSource) -> None:
        self.registry = new_registry()
        self.directory = TenantDirectory(described=True)
        self.reloader = TenantReloader(
            source,
            self.directory,
            ReloadMetrics(self.registry),
            pause_s=1.0,
            slo_classes=("standard",),
        )

    def lets_in(self, credential: str) -> bool:
        try:
            return self.directory.identify(credential).tenant.tenant_id == "acme"
        except AuthenticationError:
            return False

    def is_stale(self) -> bool:
        return self.registry.get_sample_value("baton_tenants_stale") == 1

    def failures(self) -> float | None:
        return self.registry.get_sample_value("baton_tenants_reload_failures_total")


def _write(path: Path, text: str, number: int) -> None:
    """A new file with a time of its own, however coarse the file system's clock is."""
    path.write_text(text)
    os.utime(path, ns=(number, number))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tenants.yaml"


async def test_a_file_that_changes_is_followed(path):
    _write(path, document("one"), 1)
    world = World(FileSource(path))
    assert await world.reloader.look()
    assert not await world.reloader.look(), "nothing new"
    _write(path, document("two"), 2)
    assert await world.reloader.look()
    assert [world.lets_in(key) for key in ("one", "two")] == [False, True]


async def test_a_file_that_was_only_touched_is_not_taken_over_again(path):
    _write(path, document("one"), 1)
    world = World(FileSource(path))
    await world.reloader.look()
    os.utime(path, ns=(5, 5))
    assert not await world.reloader.look()
    assert world.registry.get_sample_value("baton_tenants_reloads_total") == 1


async def test_a_file_that_is_written_in_place_is_read_once_it_stands_still(path, monkeypatch):
    _write(path, document("one"), 1)
    world = World(FileSource(path))
    await world.reloader.look()
    whole = "tenants:\n" + "".join(
        f"  - {{id: {name}, keys: ['{hash_key(key)}']}}\n"
        for name, key in (("other", "two"), ("acme", "one"))
    )
    parts = ["", whole[: whole.index("  - {id: acme")], whole]

    async def pause(_seconds: float) -> None:
        if parts:
            _write(path, parts.pop(0), 10 - len(parts))
            assert world.lets_in("one")

    monkeypatch.setattr("router.tenants.sources.asyncio.sleep", pause)
    os.utime(path, ns=(2, 2))  # its writer has begun
    assert await soon(world.reloader.look())
    assert not parts
    assert world.lets_in("one")
    assert len(world.directory.tenants) == 2


async def test_a_file_that_never_stands_still_is_not_read(path, monkeypatch):
    _write(path, document("one"), 1)
    world = World(FileSource(path))
    await world.reloader.look()
    times = iter(range(2, 100))

    async def pause(_seconds: float) -> None:
        _write(path, document("two"), next(times))

    monkeypatch.setattr("router.tenants.sources.asyncio.sleep", pause)
    _write(path, document("two"), next(times))
    with pytest.raises(ConfigError, match=r"tenants\.yaml: .* changes all the time"):
        await soon(world.reloader.load())
    assert world.lets_in("one")


@pytest.mark.parametrize("bad", ["", "tenants: {", "tenants: [{id: a, weight: -1}]", None])
async def test_a_bad_file_keeps_what_was_and_is_counted_once(path, bad, caplog):
    _write(path, document("one"), 1)
    world = World(FileSource(path))
    await world.reloader.look()
    path.unlink() if bad is None else _write(path, bad, 2)
    for _ in range(3):
        assert not await world.reloader.look()
    assert world.lets_in("one")
    assert world.failures() == 1
    assert world.is_stale(), "for as long as it lies there"
    assert "the last good one holds" in caplog.text
    _write(path, document("two"), 3)
    assert await world.reloader.look()
    assert world.lets_in("two")
    assert not world.is_stale()


async def test_the_last_good_document_is_new_again_after_a_bad_one(path):
    _write(path, document("one"), 1)
    world = World(FileSource(path))
    await world.reloader.look()
    _write(path, "tenants: {", 2)
    await world.reloader.look()
    assert world.is_stale()
    _write(path, document("one"), 3)
    assert await world.reloader.look()
    assert not world.is_stale()


@pytest.mark.parametrize("unreadable", ["t.yaml", "jwks.json"])
async def test_what_cannot_be_read_for_a_moment_is_read_once_it_can(
    tmp_path, monkeypatch, unreadable
):
    issuer = "{issuer: 'https://login.example', audience: baton, algorithms: [ES256], jwks_file: jwks.json}"
    path, key = tmp_path / "t.yaml", hash_key("two")
    _write(path, document("one"), 1)
    _write(tmp_path / "jwks.json", jwks("k1"), 1)
    world = World(FileSource(path))
    await world.reloader.look()
    _write(path, f"{{tenants: [{{id: acme, keys: ['{key}']}}], jwt: [{issuer}]}}", 2)
    read = Path.read_text

    def fail(self: Path, encoding: str) -> str:
        if self.name == unreadable:
            raise PermissionError(13, "Permission denied")
        return read(self, encoding=encoding)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_text", fail)
        for _ in range(3):
            assert not await world.reloader.look()
    assert world.failures() == 1
    assert await world.reloader.look(), "as after a chmod, which changes neither time nor size"
    assert [world.lets_in(key) for key in ("one", "two", token("k1"))] == [False, True, True]


async def test_what_was_found_wrong_before_is_the_answer_to_who_has_it_read(path):
    _write(path, document("one"), 1)
    world = World(FileSource(path))
    await world.reloader.look()
    jwt = "jwt: [{issuer: i, audience: b, jwks_file: j}]"
    _write(path.parent / "j", "no keys", 1)
    for number, wrong in enumerate(("tenants: [{id: ''}]", jwt), start=2):
        _write(path, wrong, number)
        assert not await world.reloader.look()
        for _ in range(2):
            with pytest.raises(ConfigError, match=r"tenants\[0\]\.id|keys of issuer i"):
                await world.reloader.load()
    _write(path, document("one"), 4)
    assert await world.reloader.load(), "what holds is in order again"
    assert not await world.reloader.load()
    assert world.failures() == 2


async def test_a_key_file_whose_name_can_be_none_is_refused(path):
    _write(path, document("one"), 1)
    world = World(FileSource(path))
    await world.reloader.look()
    _write(path, 'jwt: [{issuer: i, audience: b, jwks_file: "a\\0b"}]', 2)
    assert not await world.reloader.look()
    with pytest.raises(ConfigError, match=r"a\\x00b.*embedded null"):
        await world.reloader.load()


async def test_a_first_document_that_is_wrong_ends_the_start(path):
    _write(path, "tenants: 5", 1)
    with pytest.raises(ConfigError, match=str(path)):
        await World(FileSource(path)).reloader.load()


async def test_a_key_file_beside_it_is_followed_as_well(path):
    issuer = "{issuer: 'https://login.example', audience: baton, algorithms: [ES256], jwks_file: j}"
    _write(path, f"{{tenants: [{{id: acme}}], jwt: [{issuer}]}}", 1)
    _write(path.parent / "j", jwks("k1"), 1)
    world = World(FileSource(path))
    await world.reloader.look()
    assert [world.lets_in(token(name)) for name in ("k1", "k2")] == [True, False]
    _write(path.parent / "j", jwks("k2"), 2)
    assert await world.reloader.look()
    assert [world.lets_in(token(name)) for name in ("k1", "k2")] == [False, True]


async def test_a_document_that_takes_long_to_read_does_not_replace_a_later_one():
    editions = [Edition(document=parse(document(key), "x"), key_files={}) for key in ("one", "two")]
    read = asyncio.Event()

    class Source:
        async def next_edition(self) -> Edition:
            edition = editions.pop(0)
            if editions:
                await read.wait()
            return edition

    world = World(Source())
    looks = [asyncio.create_task(world.reloader.look()) for _ in range(2)]
    for _ in range(3):
        await asyncio.sleep(0)
    read.set()
    assert await soon(asyncio.gather(*looks)) == [True, True]
    assert [world.lets_in(key) for key in ("one", "two")] == [False, True]


async def test_a_class_that_nobody_configured_is_said(path, caplog):
    _write(path, "tenants: [{id: a, slo_class: interactiv}]", 1)
    await World(FileSource(path)).reloader.look()
    assert "SLO class is not configured" in caplog.text


@pytest.fixture(params=KINDS)
async def redis_client(request, tmp_path) -> AsyncIterator[Any]:
    async with a_redis(request.param, tmp_path) as url:
        client = open_redis(url, 30.0)
        yield client
        await client.aclose()


async def test_a_document_in_redis_is_followed_by_its_version(redis_client):
    world = World(RedisSource(redis_client, "b", SECRET, no_refusals()))
    for _ in range(2):  # a Redis that has lost its keys looks like one that never had any
        with pytest.raises(UnavailableError, match="no document there: publish it"):
            await world.reloader.load()
        with pytest.raises(UnavailableError, match="has not been read yet"):
            world.directory.identify("one")
    assert not world.directory.is_read
    first = await publish(redis_client, "b", SECRET, document("one"))
    assert await world.reloader.look()
    assert not await world.reloader.look()
    assert await publish(redis_client, "b", SECRET, document("two")) > first
    assert await world.reloader.look()
    assert [world.lets_in(key) for key in ("one", "two")] == [False, True]


async def test_key_files_of_a_document_in_redis_are_followed_as_well(redis_client, tmp_path):
    file = tmp_path / "jwks.json"
    issuer = f"{{issuer: 'https://login.example', audience: baton, algorithms: [ES256], jwks_file: {file}}}"
    world = World(RedisSource(redis_client, "b", SECRET, no_refusals()))
    await publish(redis_client, "b", SECRET, f"{{tenants: [{{id: acme}}], jwt: [{issuer}]}}")
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"jwks\.json: no such file"):
            await world.reloader.load()
    for number, name in enumerate(("k1", "k2"), start=1):
        _write(file, jwks(name), number)
        assert await world.reloader.look()
        assert not await world.reloader.look()
        assert [world.lets_in(token(key)) for key in ("k1", "k2")] == [name == "k1", name == "k2"]


async def test_a_wrong_document_is_not_published(redis_client):
    with pytest.raises(ConfigError, match=r"tenants\[0\]\.id"):
        await publish(redis_client, "b", SECRET, "tenants: [{id: ''}]")
    assert await redis_client.keys("*") == []


async def test_without_redis_the_last_document_holds():
    class Away:
        is_away = True

        async def next_edition(self) -> None:
            if self.is_away:
                raise UnavailableError("away")

    source = Away()
    world = World(source)
    assert not await world.reloader.look()
    assert world.failures() == 1
    assert world.is_stale()
    with pytest.raises(AuthenticationError):
        world.directory.identify(None)
    source.is_away = False
    assert not await world.reloader.look()
    assert not world.is_stale(), "it is what it was"


async def test_a_document_that_the_cluster_did_not_seal_is_refused_once_and_counted(redis_client):
    registry = CollectorRegistry()
    source = RedisSource(redis_client, "b", SECRET, RefusedValues(registry))
    world = World(source)
    await publish(redis_client, "b", SECRET, document("one"))
    assert await world.reloader.look()
    for false in (document("two").encode(), b"\xff" * 50, b"x" * 1000):
        await redis_client.set("b:tenants:document", false)
        assert not await world.reloader.look()
        assert not await world.reloader.look()
    await publish(redis_client, "b", b"t" * 32, document("two"))
    assert not await world.reloader.look()
    await redis_client.delete("b:tenants:document")
    await redis_client.zadd("b:tenants:document", {"x": 1})
    assert not await world.reloader.look()
    assert [world.lets_in(key) for key in ("one", "two")] == [True, False]
    labels = {"reader": "tenants"}
    assert registry.get_sample_value("baton_redis_refused_values_total", labels) == 5
    assert await redis_client.type("b:tenants:document") == b"zset", "nothing is put over it"
    await publish(redis_client, "b", SECRET, document("two"))
    assert await world.reloader.look()
    assert world.lets_in("two")


async def test_an_older_document_does_not_come_back_and_the_newer_one_is_put_in_its_place(
    redis_client,
):
    registry = CollectorRegistry()
    world = World(RedisSource(redis_client, "b", SECRET, RefusedValues(registry)))
    await publish(redis_client, "b", SECRET, document("one"))
    old = await redis_client.get("b:tenants:document")
    await publish(redis_client, "b", SECRET, document("two"))
    new = await redis_client.get("b:tenants:document")
    assert await world.reloader.look()
    await redis_client.set("b:tenants:document", old)
    assert not await world.reloader.look()
    assert [world.lets_in(key) for key in ("one", "two")] == [False, True]
    labels = {"reader": "tenants"}
    assert registry.get_sample_value("baton_redis_refused_values_total", labels) == 1
    assert await redis_client.get("b:tenants:document") == new
    await world.reloader.look()
    assert not world.is_stale()


async def test_a_document_that_redis_has_lost_is_put_back_for_routers_that_start_later(
    redis_client,
):
    world = World(RedisSource(redis_client, "b", SECRET, no_refusals()))
    await publish(redis_client, "b", SECRET, document("one"))
    sealed = await redis_client.get("b:tenants:document")
    assert await world.reloader.look()
    await redis_client.flushall()
    assert not await world.reloader.look()
    assert not world.is_stale()
    assert await redis_client.get("b:tenants:document") == sealed
    assert not await world.reloader.look(), "it is the one that holds"
    later = World(RedisSource(redis_client, "b", SECRET, no_refusals()))
    assert await later.reloader.look()
    assert later.lets_in("one")


async def test_what_is_published_while_a_lost_document_is_put_back_stays(redis_client, monkeypatch):
    world = World(RedisSource(redis_client, "b", SECRET, no_refusals()))
    await publish(redis_client, "b", SECRET, document("one"))
    assert await world.reloader.look()
    await redis_client.delete("b:tenants:document")
    put_back = redis_client.evalsha

    async def publish_first(*arguments: Any) -> Any:
        await publish(redis_client, "b", SECRET, document("two"))
        return await put_back(*arguments)

    monkeypatch.setattr(redis_client, "evalsha", publish_first)
    assert not await world.reloader.look()
    assert await world.reloader.look()
    assert [world.lets_in(key) for key in ("one", "two")] == [False, True]
