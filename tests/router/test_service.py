import asyncio
import socket
import subprocess
import sys
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import httpx
import pytest
from transformers import PreTrainedTokenizerFast

from baton.config.schema import BatonConfig, ClusterConfig, ModelConfig, RouterConfig
from baton.errors import ConfigError, ModelLoadError
from baton.ids import Role
from baton.rpc.bounds import CONTROL
from baton.rpc.channel import open_channel
from baton.rpc.v1 import control_pb2
from baton.rpc.v1.control_pb2_grpc import ControlStub
from router import service
from tests.router.grpc_workers import FakeWorker, running
from tests.router.text.tiny_tokenizers import byte_level
from tests.waits import soon

pytestmark = pytest.mark.timeout(60)


@dataclass(eq=False)
class Launcher:
    """Notes what the router reports."""

    steps: list[str] = field(default_factory=list)
    is_serving: asyncio.Event = field(default_factory=asyncio.Event)
    is_ready: asyncio.Event = field(default_factory=asyncio.Event)

    def progress(self, what: str, done: float | None = None) -> None:
        self.steps.append(what)

    def serving(self) -> None:
        self.is_serving.set()

    def ready(self) -> None:
        self.is_ready.set()


@dataclass(kw_only=True)
class Router:
    http: httpx.AsyncClient
    control: str
    stop: asyncio.Event
    launcher: Launcher
    task: asyncio.Task[None]

    async def complete(self, **fields) -> httpx.Response:
        body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 4, **fields}
        return await self.http.post("/v1/completions", json=body)


def listening() -> socket.socket:
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    sock.listen()
    return sock


def config(
    directory: Path, *, drain_timeout_s: float = 10.0, router: RouterConfig | None = None
) -> BatonConfig:
    model = directory / "model"
    if not model.exists():
        PreTrainedTokenizerFast(tokenizer_object=byte_level()).save_pretrained(model)
    return BatonConfig(
        model=ModelConfig(model=str(model), served_model_name=("tiny",)),
        router=router or RouterConfig(),
        cluster=ClusterConfig(
            runtime_dir=str(directory), secret="5a" * 32, drain_timeout_s=drain_timeout_s
        ),
    )


@asynccontextmanager
async def routing(workers: dict[str, FakeWorker], directory: Path, *, ready=True, **settings):
    """The router's service over `workers`, on a free port; stopped at the end if it was not."""
    sock, stop, launcher = listening(), asyncio.Event(), Launcher()
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    running_service = asyncio.create_task(
        service.run(
            config(directory, **settings),
            sockets=[sock],
            worker_addresses=[worker.address for worker in workers.values()],
            notify=launcher,
            stop=stop,
        )
    )
    async with httpx.AsyncClient(base_url=url, timeout=20) as http:
        if ready:
            await soon(launcher.is_ready.wait())
        yield Router(
            http=http,
            control=f"unix:{directory / service.CONTROL_SOCKET}",
            stop=stop,
            launcher=launcher,
            task=running_service,
        )
        stop.set()
        await running_service


async def test_a_completion_comes_from_the_workers_over_http(tmp_path):
    async with (
        running(tmp_path, p0=Role.PREFILL, d0=Role.DECODE) as workers,
        routing(workers, tmp_path) as router,
    ):
        reply = await router.complete(logprobs=None, n=2)
        assert reply.status_code == 200
        assert reply.json()["usage"]["completion_tokens"] == 8
        assert "waiting for workers" in router.launcher.steps
        assert (await router.http.get("/health")).status_code == 200
        assert (await router.http.get("/ready")).status_code == 200


async def test_status_shows_every_address_with_or_without_a_worker(tmp_path):
    async with (
        running(tmp_path, p0=Role.PREFILL, d0=Role.DECODE) as workers,
        routing(workers, tmp_path) as router,
        open_channel(router.control) as channel,
    ):
        stub = ControlStub(channel)
        workers["d0"].hold_at = 2
        asking = asyncio.create_task(router.complete())
        await soon(workers["d0"].holding.wait())
        status = await stub.Status(control_pb2.StatusRequest())
        assert status.model == "tiny"
        assert status.requests_in_flight == 1
        by_id = {worker.identity.worker_id: worker for worker in status.workers}
        assert by_id["d0"].router_in_flight == 1
        assert (by_id["d0"].state, by_id["d0"].ready) == ("ready", True)
        assert by_id["p0"].address == workers["p0"].address
        workers["d0"].gate.set()
        assert (await asking).status_code == 200
        await workers["p0"].kill()
        gone = await _status_without(stub, "p0")
        assert workers["p0"].address in {w.address for w in gone.workers if not w.ready}


async def test_a_command_that_is_too_long_is_refused_before_it_is_read(tmp_path):
    async with (
        running(tmp_path, h0=Role.HYBRID) as workers,
        routing(workers, tmp_path) as router,
        open_channel(router.control) as channel,
    ):
        stub = ControlStub(channel)
        for size, code in (
            (CONTROL.message_bytes // 2, grpc.StatusCode.NOT_FOUND),
            (2 * CONTROL.message_bytes, grpc.StatusCode.RESOURCE_EXHAUSTED),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Drain(control_pb2.DrainRequest(worker="h7", by="x" * size))
            assert caught.value.code() is code


async def test_the_story_of_a_request_is_told_by_command(tmp_path):
    async with (
        running(tmp_path, h0=Role.HYBRID) as workers,
        routing(workers, tmp_path) as router,
        open_channel(router.control) as channel,
    ):
        reply = await router.complete()
        stub = ControlStub(channel)
        told = await stub.Story(control_pb2.StoryRequest(request_id=reply.json()["id"]))
        events = [entry.event for entry in told.entries]
        assert events[1] == "admitted"
        assert "placed" in events[2]
        assert told.entries[-1].actions[-1].startswith("Finish(")
        assert [entry.core for entry in told.entries[:2]] == ["admission", "admission"]
        unknown = await stub.Story(control_pb2.StoryRequest(request_id="cmpl-none"))
        assert not unknown.entries


async def _status_without(stub, name):
    while True:
        status = await stub.Status(control_pb2.StatusRequest())
        if name not in {worker.identity.worker_id for worker in status.workers}:
            return status


async def test_a_stop_lets_begun_streams_finish(tmp_path):
    async with (
        running(tmp_path, h0=Role.HYBRID) as workers,
        routing(workers, tmp_path) as router,
    ):
        workers["h0"].hold_at = 2
        asking = asyncio.create_task(router.complete())
        await soon(workers["h0"].holding.wait())
        router.stop.set()
        await asyncio.sleep(0)
        assert not router.task.done()
        workers["h0"].gate.set()
        assert (await asking).json()["usage"]["completion_tokens"] == 4
        await router.task


async def test_a_router_that_still_waits_for_workers_says_that_a_stop_has_to_wait_for_it(tmp_path):
    async with running(tmp_path, h0=Role.HYBRID, d0=Role.DECODE) as workers:
        await workers["d0"].kill()
        async with routing(workers, tmp_path, ready=False) as router:
            await soon(router.launcher.is_serving.wait())
            assert (await router.complete()).status_code == 200
            assert not router.launcher.is_ready.is_set()


async def test_a_stop_ends_what_does_not_finish_with_a_typed_error(tmp_path):
    async with (
        running(tmp_path, h0=Role.HYBRID) as workers,
        routing(workers, tmp_path, drain_timeout_s=0.1) as router,
    ):
        workers["h0"].hold_at = 2
        asking = asyncio.create_task(router.complete())
        await soon(workers["h0"].holding.wait())
        router.stop.set()
        reply = await asking
        assert reply.status_code == 503
        assert reply.json()["error"]["code"] == "draining"
        await workers["h0"].cancelled.get()
        await router.task


async def test_a_stream_that_outlasts_a_drain_of_part_of_a_second_ends_with_an_event(tmp_path):
    async with (
        running(tmp_path, h0=Role.HYBRID) as workers,
        routing(workers, tmp_path, drain_timeout_s=1.4) as router,
    ):
        workers["h0"].hold_at = 2
        asking = asyncio.create_task(router.complete(stream=True))
        await soon(workers["h0"].holding.wait())
        router.stop.set()
        assert '"code":"draining"' in (await soon(asking)).text
        await router.task


async def test_idle_connections_are_kept_as_long_as_configured(tmp_path):
    keep = RouterConfig(http_keep_alive_s=0.5)
    async with (
        running(tmp_path, h0=Role.HYBRID) as workers,
        routing(workers, tmp_path, router=keep) as router,
        idle_connection(router) as reader,
        asyncio.timeout(4),
    ):
        assert await reader.read() == b""


@pytest.mark.slow
async def test_by_default_idle_connections_outlive_those_of_uvicorn(tmp_path):
    async with (
        running(tmp_path, h0=Role.HYBRID) as workers,
        routing(workers, tmp_path) as router,
        idle_connection(router) as reader,
    ):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(8):
                await reader.read()


@asynccontextmanager
async def idle_connection(router: Router):
    """What comes on a connection after its first reply."""
    port = router.http.base_url.port
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b"}")
        yield reader
    finally:
        writer.close()


async def test_a_client_that_disconnects_cancels_both_legs(tmp_path):
    async with (
        running(tmp_path, p0=Role.PREFILL, d0=Role.DECODE) as workers,
        routing(workers, tmp_path) as router,
    ):
        workers["p0"].hold_at = 0
        asking = asyncio.create_task(router.complete())
        await soon(workers["p0"].holding.wait())
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await soon(workers["p0"].cancelled.get())
        await soon(workers["d0"].cancelled.get())


async def test_a_model_without_a_tokenizer_ends_the_start_with_its_reason(tmp_path):
    (tmp_path / "model").mkdir()
    with pytest.raises(ModelLoadError):
        await service.run(
            config(tmp_path),
            sockets=[],
            worker_addresses=[],
            notify=Launcher(),
            stop=asyncio.Event(),
        )


async def test_an_operators_template_takes_the_place_of_the_models_own(tmp_path):
    template = tmp_path / "talk.jinja"
    template.write_text("{% for part in messages[0].content %}{{ part.text }}!{% endfor %}")
    settings = RouterConfig(chat_template=str(template))
    async with (
        running(tmp_path, h0=Role.HYBRID) as workers,
        routing(workers, tmp_path, router=settings) as router,
    ):
        asked = {"messages": [{"role": "user", "content": "hello"}]}
        shown = (await router.http.post("/tokenize", json=asked)).json()["tokens"]
        said = await router.http.post("/tokenize", json={"prompt": "hello!"})
        assert shown == said.json()["tokens"]


async def test_a_template_that_is_none_ends_the_start_with_its_reason(tmp_path):
    settings = config(tmp_path, router=RouterConfig(chat_template="{% for %}"))
    with pytest.raises(ConfigError, match=r"router\.chat_template: "):
        await service.run(
            settings,
            sockets=[],
            worker_addresses=[],
            notify=Launcher(),
            stop=asyncio.Event(),
        )


def imports(code: str) -> str:
    """What a fresh interpreter prints after `code`."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=50
    )
    return done.stdout.strip()


def test_the_router_does_not_import_torch():
    assert imports("import sys, router.service; print('torch' in sys.modules)") == "False"


def test_the_router_imports_where_there_is_no_torch():
    code = "import sys; sys.modules['torch'] = None; import router.service; print(sys.modules['torch'])"
    assert imports(code) == "None"


@pytest.mark.parametrize(
    ("router", "told"),
    [
        (RouterConfig(tool_call_parser="hermse"), r"router\.tool_call_parser: .*'hermse'.* hermes"),
        (RouterConfig(reasoning_parser="qwen"), r"router\.reasoning_parser: .*'qwen'.* qwen3"),
    ],
)
async def test_a_parser_that_there_is_not_ends_the_start_with_those_that_there_are(
    tmp_path: Path, router: RouterConfig, told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        await service.run(
            config(tmp_path, router=router),
            sockets=[],
            worker_addresses=[],
            notify=Launcher(),
            stop=asyncio.Event(),
        )
