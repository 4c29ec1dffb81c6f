"""Health, status and drain of a worker process, over a stand-in for engine and services."""

import urllib.request
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

from baton.config.schema import WorkerConfig
from baton.errors import ConfigError, EngineError
from baton.generation import WorkerLoad
from baton.ids import Incarnation, LayerName, RequestId, Role, WorkerId, WorkerIdentity
from baton.layout import KvLayout
from baton.rpc.channel import open_channel
from baton.rpc.hello import WorkerHello
from baton.rpc.v1 import control_pb2, control_pb2_grpc
from baton.story import StoryEntry
from baton.telemetry.scrape import ScrapeServer
from baton_worker.metrics import WorkerMetrics
from baton_worker.server import LIVE, WorkerServer

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@dataclass
class Engine:
    waited_s: float | None = None
    error: BaseException | None = None

    def progress_s(self) -> float | None:
        return self.waited_s

    def failure(self) -> BaseException | None:
        return self.error


@dataclass
class Service:
    left: int = 0
    refusing: bool = False
    hello: WorkerHello = field(kw_only=True)
    calls: list[str] = field(default_factory=list)
    stories: dict[RequestId, tuple[StoryEntry, ...]] = field(default_factory=dict)

    def add_to(self, server: grpc.aio.Server) -> None:
        self.calls.append("add")

    async def start(self) -> None:
        self.calls.append("start")

    def tick(self) -> None:
        if self.refusing and self.left:
            self.left -= 1

    def refuse_new(self, by: str) -> None:
        self.refusing = True

    def take_new(self) -> None:
        self.refusing = False

    def story_of(self, name: str) -> tuple[StoryEntry, ...]:
        return self.stories.get(RequestId(name), ())

    def now_s(self) -> float:
        return 2.0

    def narrow_role(self, role: Role) -> None:
        self.calls.append(f"narrow to {role.value}")

    def take_role(self, role: Role) -> None:
        self.calls.append(f"take {role.value}")
        self.hello = replace(self.hello, role=role)

    def in_flight(self, *, outside: Role | None = None) -> int:
        return self.left

    def transfers_in_flight(self) -> int:
        return 0

    def load(self) -> WorkerLoad:
        return WorkerLoad(running=self.left, blocks_total=10, blocks_used=4, steps=7)

    async def close(self) -> None:
        self.calls.append("close")


@dataclass
class World:
    engine: Engine
    service: Service
    server: WorkerServer
    channel: grpc.aio.Channel

    async def health(self, service: str = "") -> int:
        await self.server.check()
        stub = health_pb2_grpc.HealthStub(self.channel)
        reply = await stub.Check(health_pb2.HealthCheckRequest(service=service))
        return int(reply.status)


@asynccontextmanager
async def serving(folder: Path):
    layout = KvLayout(
        model_fingerprint="f",
        dtype="float32",
        block_tokens=16,
        num_kv_heads=1,
        head_dim=1,
        layers=(LayerName("a"),),
    )
    hello = WorkerHello(
        identity=WorkerIdentity(worker_id=WorkerId("w"), incarnation=Incarnation(5)),
        role=Role.DECODE,
        layout=layout,
        max_model_len=100,
        vocab_size=10,
        num_blocks=10,
        max_num_seqs=4,
    )
    config = WorkerConfig(
        worker_id="w",
        role=Role.DECODE,
        address=f"unix:{folder}/w.sock",
        stall_timeout_s=10.0,
    )
    engine, service = Engine(), Service(hello=hello)
    server = WorkerServer(
        config=config,
        engine=engine,
        service=service,
        metrics=WorkerMetrics(CollectorRegistry(), block_tokens=16, num_blocks=10),
    )
    await server.start()
    async with open_channel(config.address) as channel:
        yield World(engine=engine, service=service, server=server, channel=channel)
    await server.close()
    assert service.calls == ["start", "add", "close"]


@pytest.mark.parametrize(
    ("waited_s", "health"), [(None, SERVING), (9.0, SERVING), (11.0, NOT_SERVING)]
)
async def test_health_follows_progress(tmp_path: Path, waited_s: float | None, health: int):
    async with serving(tmp_path) as world:
        world.engine.waited_s = waited_s
        assert await world.health() == health


async def test_a_stall_that_ends_is_forgiven(tmp_path: Path):
    async with serving(tmp_path) as world:
        world.engine.waited_s = 11.0
        assert await world.health() == NOT_SERVING
        world.engine.waited_s = 0.1
        assert await world.health() == SERVING


async def test_a_dead_engine_is_not_healthy_and_fails_the_process(tmp_path: Path):
    async with serving(tmp_path) as world:
        world.engine.error = RuntimeError("boom")
        assert await world.health() == NOT_SERVING
        with pytest.raises(EngineError, match="boom"):
            await world.server.failed


async def test_a_drain_waits_for_what_is_in_flight_and_turns_health_off(tmp_path: Path):
    async with serving(tmp_path) as world:
        world.service.left = 2
        stub = control_pb2_grpc.ControlStub(world.channel)
        reply = await stub.Drain(control_pb2.DrainRequest(timeout_s=30.0))
        assert (reply.drained, reply.left) == (True, 0)
        assert await world.health() == NOT_SERVING


async def test_a_worker_that_drains_is_alive_as_long_as_it_makes_progress(tmp_path: Path):
    async with serving(tmp_path) as world:
        assert await world.health(LIVE) == SERVING
        await world.server.drain(0.0)
        assert await world.health() == NOT_SERVING
        assert await world.health(LIVE) == SERVING
        world.engine.waited_s = 11.0
        assert await world.health(LIVE) == NOT_SERVING


async def test_a_drain_that_takes_too_long_says_what_is_left(tmp_path: Path):
    async with serving(tmp_path) as world:
        world.service.left = 10_000
        stub = control_pb2_grpc.ControlStub(world.channel)
        reply = await stub.Drain(control_pb2.DrainRequest(timeout_s=0.0))
        assert not reply.drained
        assert reply.left > 0


async def test_status_tells_who_where_and_how(tmp_path: Path):
    async with serving(tmp_path) as world:
        stub = control_pb2_grpc.ControlStub(world.channel)
        (worker,) = (await stub.Status(control_pb2.StatusRequest())).workers
        assert worker.identity.incarnation == 5
        assert worker.state == "ready"
        assert worker.ready
        assert worker.load.blocks_used == 4


async def test_metrics_follow_the_load(tmp_path: Path):
    async with serving(tmp_path) as world:
        await world.server.check()
        assert b"vllm:kv_cache_usage_perc 0.4" in world.server.collect()
        assert b'baton_kv_pages{state="used"} 4.0' in world.server.collect()
        assert b"baton_kv_pages_leaked 0.0" in world.server.collect()


def test_a_registry_is_served_over_http():
    registry = CollectorRegistry()
    WorkerMetrics(registry, block_tokens=16, num_blocks=10)
    scrape = ScrapeServer("127.0.0.1:0", registry)
    with urllib.request.urlopen(f"http://{scrape.address}/metrics") as reply:
        assert b'num_gpu_blocks="10"' in reply.read()
    scrape.close()


def test_a_malformed_metrics_address_is_named():
    with pytest.raises(ConfigError, match="host:port") as caught:
        ScrapeServer("nowhere", CollectorRegistry())
    assert caught.value.param == "metrics_address"


async def test_a_worker_whose_checks_fail_ends_instead_of_going_on_without_them(tmp_path: Path):
    async with serving(tmp_path) as running:

        def tick() -> None:
            raise ZeroDivisionError

        running.service.tick = tick
        with pytest.raises(EngineError, match="checks failed"):
            await running.server.failed


async def test_the_story_of_a_requests_legs_is_told_by_command(tmp_path):
    async with serving(tmp_path) as world:
        entry = StoryEntry(
            core="leg",
            at_s=1.5,
            event="asked to generate for r",
            actions=("Generate(seq_id=leg/1)",),
        )
        world.service.stories[RequestId("r")] = (entry,)
        stub = control_pb2_grpc.ControlStub(world.channel)
        told = await stub.Story(control_pb2.StoryRequest(request_id="r"))
        assert [(e.process, e.core, e.at_s, e.event) for e in told.entries] == [
            ("w", "leg", 1.5, entry.event)
        ]
        assert told.now_s == 2.0
        assert list(told.entries[0].actions) == list(entry.actions)
        assert not (await stub.Story(control_pb2.StoryRequest(request_id="s"))).entries
