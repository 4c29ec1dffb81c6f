"""Two prefill and two decode workers in processes of their own, a real router core in this one, and between a prefill
and a decode worker the whole way of a hand-off in our hands:

    prefill worker ── byte proxy (cuts, swallows) ── relay (holds messages) ── decode worker

Only the models are fake; their pages lie in real shared memory, so a page that is lost gives wrong tokens.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import psutil

from baton.config.schema import RouterConfig
from baton.generation import Prompt
from baton.ids import RequestId, Role
from baton.rpc.channel import open_channel
from baton.rpc.v1 import control_pb2, control_pb2_grpc
from router.ports import GenerationRequest, Timing
from router.service import RouterParts, compose, running
from tests.chaos.process import is_stopped
from tests.chaos.proxy import FaultProxy, fault_proxy
from tests.chaos.relay import SessionRelay, session_relay
from tests.decode_worker.cluster import LIMITS, SECRET, oracle
from tests.e2e.served import is_gone
from tests.waits import soon

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 40.0
ROUTER = RouterConfig(silence_timeout_s=1.5, max_attempts=6)
NAMES = {"p0": Role.PREFILL, "p1": Role.PREFILL, "d0": Role.DECODE, "d1": Role.DECODE}


@dataclass(slots=True, eq=False)
class Worker:
    """One worker process."""

    name: str
    folder: Path
    advertised: str
    child: asyncio.subprocess.Process

    @property
    def process(self) -> psutil.Process:
        """Seen from outside."""
        return psutil.Process(self.child.pid)

    async def tell(self, command: str) -> None:
        """Sends a command and waits until it is obeyed."""
        assert self.child.stdin is not None
        self.child.stdin.write(f"{command}\n".encode())
        await self._hears("done")

    async def kill(self) -> None:
        """SIGKILL; returns once the kernel says so."""
        self.child.kill()
        assert await soon(self.child.wait()) == -signal.SIGKILL

    async def stop(self) -> None:
        """SIGSTOP; returns once it stands still."""
        self.process.suspend()
        await until(lambda: is_stopped(self.process))

    async def resume(self) -> None:
        """SIGCONT, if it still lives."""
        if self.child.returncode is None and not is_gone(self.process):
            self.process.resume()
            await until(lambda: not is_stopped(self.process))

    async def status(self) -> control_pb2.WorkerStatus | None:
        """Its own word on itself; None if it does not answer."""
        async with open_channel(f"unix:{self.folder}/{self.name}.sock") as channel:
            request = control_pb2.StatusRequest()
            try:
                stub = control_pb2_grpc.ControlStub(channel)
                reply = await stub.Status(request, timeout=2.0)
            except grpc.aio.AioRpcError:
                return None
        return reply.workers[0]

    async def at_rest(self) -> bool:
        """Whether no page, leg or transfer is left on it, and its pages add up."""
        status = await self.status()
        if status is None:
            return False
        load = status.load
        return (
            load.running == load.waiting == load.blocks_used == status.transfers_in_flight == 0
            and load.blocks_free + load.blocks_cached == load.blocks_total == LIMITS.num_blocks
        )

    async def serving(self) -> None:
        await self._hears("serving")

    async def _hears(self, word: str) -> None:
        assert self.child.stdout is not None
        line = await asyncio.wait_for(self.child.stdout.readline(), TIMEOUT_S)
        assert line.decode().strip() == word


@dataclass(slots=True, eq=False)
class World:
    """Everything of one test."""

    router: RouterParts
    workers: dict[str, Worker]
    relays: dict[str, SessionRelay]
    proxies: dict[str, FaultProxy]
    _jobs: int = 0
    timings: list[Timing] = field(default_factory=list)

    async def generate(self, prompt: Prompt, timeout_s: float = 30.0) -> list[list[int]]:
        """All tokens of a prompt, by sample."""
        self._jobs += 1
        job = GenerationRequest(
            request_id=RequestId(f"job-{self._jobs}"), prompt=prompt, timeout_s=timeout_s
        )
        texts: list[list[int]] = [[] for _ in prompt.samples]
        async for event in self.router.generator.generate(job):
            if isinstance(event, Timing):
                self.timings.append(event)
                continue
            for token in event.samples:
                texts[token.sample].append(token.token)
        return texts

    def hold(self, kind: str) -> None:
        """Every relay holds messages of this kind."""
        for relay in self.relays.values():
            relay.hold(kind)

    async def held(self) -> str:
        """Name of the decode worker in whose relay a message is held; the other relay holds nothing any more."""
        waits = {
            asyncio.create_task(relay.holding.wait()): name for name, relay in self.relays.items()
        }
        done, rest = await asyncio.wait(
            waits, timeout=TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED
        )
        for task in rest:
            task.cancel()
        assert done, "no message of that kind came"
        name = waits[done.pop()]
        for other, relay in self.relays.items():
            if other != name:
                relay.release()
        return name

    def busy(self, role: Role) -> str:
        """Name of the worker of that role that has a leg of this router."""
        views = [w for w in self.router.view.workers if w.legs and w.hello.role is role]
        assert len(views) == 1, views
        return str(views[0].identity.worker_id)

    async def at_rest(self) -> None:
        """Waits until the router and every worker that lives have nothing left."""
        async with asyncio.timeout(TIMEOUT_S):
            await until(lambda: self.router.generator.in_flight() == 0)
            living = [w for w in self.workers.values() if w.child.returncode is None]
            while not all([await w.at_rest() for w in living]):  # noqa: ASYNC110 - others' words
                await asyncio.sleep(0.05)
        self.router.generator.check_integrity()


async def until(true: Callable[[], bool]) -> None:
    """Waits for something that only looking shows."""
    async with asyncio.timeout(TIMEOUT_S):
        while not true():  # noqa: ASYNC110 - the kernel does not tell
            await asyncio.sleep(0.01)


def right(prompt: Prompt) -> list[list[int]]:
    """The tokens that the fake model gives for a prompt, wherever it runs."""
    from baton_engine.fakes.engine import FakeRunner

    return oracle(FakeRunner(LIMITS), prompt)


@asynccontextmanager
async def world(folder: Path, engine: str = "baton"):
    """A world in which every worker, with this engine, has joined."""
    async with AsyncExitStack() as stack:
        relays: dict[str, SessionRelay] = {}
        proxies: dict[str, FaultProxy] = {}
        workers: dict[str, Worker] = {}
        for name, role in NAMES.items():
            advertised = ""
            if role.decodes:
                relay_at = f"unix:{folder}/{name}.relay"
                advertised = f"unix:{folder}/{name}.proxy"
                own = f"unix:{folder}/{name}.sock"
                relays[name] = await stack.enter_async_context(session_relay(own, relay_at))
                proxies[name] = await stack.enter_async_context(fault_proxy(relay_at, advertised))
            workers[name] = await stack.enter_async_context(
                _worker(engine, name, role, folder, advertised)
            )
        for worker in workers.values():
            await worker.serving()
        addresses = [f"unix:{folder}/{name}.sock" for name in NAMES]
        router = compose(ROUTER, addresses, SECRET)
        await stack.enter_async_context(running(router))
        await until(lambda: len(router.view.workers) == len(NAMES))
        yield World(router=router, workers=workers, relays=relays, proxies=proxies)


@asynccontextmanager
async def _worker(engine: str, name: str, role: Role, folder: Path, advertised: str):
    command = [sys.executable, "-m", "tests.chaos.worker_process", engine]
    command += [role.value, name, str(folder)]
    child = await asyncio.create_subprocess_exec(
        *command,
        *([advertised] if advertised else []),
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        yield Worker(name=name, folder=folder, advertised=advertised, child=child)
    finally:
        if child.returncode is None:
            child.kill()
            await soon(child.wait())
