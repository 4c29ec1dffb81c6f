"""How much a neighbour makes a worker hold, with the cluster's secret and without: messages,
streams that nobody reads, connections.
"""

import asyncio
import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

import grpc
import psutil
import pytest

from baton.config.rules import MAX_GRAMMAR_BYTES
from baton.rpc.address_limit import AddressLimit
from baton.rpc.bounds import (
    CONNECTIONS,
    CONNECTIONS_OF_AN_ADDRESS,
    POOL,
    UNREAD_BYTES,
    ServerBounds,
    worker_bounds,
)
from baton.rpc.channel import bind, new_server, open_channel
from baton.rpc.connections import ConnectionCounts
from baton.rpc.credentials import ClusterCredentials
from baton.rpc.identity import PeerRole, ProcessIdentity
from baton.rpc.v1 import (
    common_pb2,
    control_pb2,
    control_pb2_grpc,
    pool_pb2,
    transfer_pb2,
    worker_pb2,
    worker_pb2_grpc,
)
from kvpool.convert import MAX_KEYS
from tests.security.bounded_server import HELLO, LONG

pytestmark = [pytest.mark.alone, pytest.mark.timeout(60)]

SECRET = bytes(range(32))
_MIB = 1 << 20


def process(role: PeerRole, name: str = "x") -> ClusterCredentials:
    return ClusterCredentials(ProcessIdentity(role=role, name=name), SECRET)


@dataclass
class Served:
    address: str
    process: psutil.Process

    @property
    def held_bytes(self) -> int:
        held: int = self.process.memory_info().rss
        return held

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])


@pytest.fixture
def worker() -> Iterator[Served]:
    command = [sys.executable, "-m", "tests.security.bounded_server", SECRET.hex()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        yield Served(started.stdout.readline().strip(), psutil.Process(started.pid))
        started.kill()


def test_what_is_sent_before_the_proof_is_not_even_taken(worker: Served) -> None:
    before, message = worker.held_bytes, bytes(_MIB)
    taken = []
    for _ in range(10):
        with socket.create_connection(("127.0.0.1", worker.port)) as stranger:
            stranger.settimeout(3.0)
            sent = 0
            with contextlib.suppress(OSError):
                while sent < 60 * _MIB:
                    sent += stranger.send(message)
            taken.append(sent)
    # What the kernel's buffers take is not the worker's.
    assert max(taken) < 60 * _MIB
    assert worker.held_bytes - before < 32 * _MIB


async def test_a_message_above_the_bound_is_refused_unread(worker: Served) -> None:
    bound = worker_bounds(HELLO).message_bytes
    async with open_channel(worker.address, process(PeerRole.ROUTER)) as channel:
        control = control_pb2_grpc.ControlStub(channel)
        await control.Drain(control_pb2.DrainRequest(by="x" * (bound - 64)), timeout=10)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await control.Drain(control_pb2.DrainRequest(by="x" * bound), timeout=10)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_peers_that_send_as_much_as_they_can_fill_a_window_for_each_stream(
    worker: Served,
) -> None:
    """Four proven peers with all the streams that they may have: what nobody reads stays with the sender."""
    peers, before = 4, worker.held_bytes
    calls = worker_bounds(HELLO).calls
    message = worker_pb2.Command(prefill=worker_pb2.Prefill(transfer_address="x" * (_MIB // 2)))
    async with contextlib.AsyncExitStack() as stack:
        sending = []
        for number in range(peers):
            own = process(PeerRole.ROUTER, f"x{number}")
            channel = await stack.enter_async_context(open_channel(worker.address, own))
            for _ in range(calls):
                call = worker_pb2_grpc.WorkerStub(channel).Serve()  # type: ignore[call-arg]
                await call.read()
                sending.append(asyncio.create_task(_send_all(call, message)))
        _, blocked = await asyncio.wait(sending, timeout=3.0)
        held = worker.held_bytes - before
        for task in blocked:
            task.cancel()
        await asyncio.gather(*blocked, return_exceptions=True)
    assert len(blocked) == peers * calls
    assert held < peers * calls * 4 * UNREAD_BYTES + 24 * _MIB


async def _send_all(call: grpc.aio.StreamStreamCall, message: worker_pb2.Command) -> None:  # type: ignore[type-arg]
    while True:
        await call.write(message)


async def test_an_address_with_too_many_connections_shuts_nobody_else_out(worker: Served) -> None:
    crowd = [_silent(worker.port) for _ in range(4 * CONNECTIONS_OF_AN_ADDRESS)]
    try:
        async with asyncio.timeout(1.5):  # before their two seconds are over
            while _connections(worker) > CONNECTIONS_OF_AN_ADDRESS:  # noqa: ASYNC110  # gRPC does not tell
                await asyncio.sleep(0.05)
        async with open_channel(worker.address, process(PeerRole.ROUTER)) as channel:
            await control_pb2_grpc.ControlStub(channel).Drain(control_pb2.DrainRequest(), timeout=5)
    finally:
        for one in crowd:
            one.close()


def _silent(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), source_address=("127.0.0.2", 0))


def _connections(worker: Served) -> int:
    found = worker.process.net_connections("tcp")
    return sum(one.status == psutil.CONN_ESTABLISHED for one in found)


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
async def test_of_too_many_connections_those_that_have_proven_the_secret_stay(host: str) -> None:
    own = process(PeerRole.WORKER)
    server = new_server(own)
    worker_pb2_grpc.add_WorkerServicer_to_server(_Silent(), server)
    address = bind(server, f"{host}:0", own)
    await server.start()
    port = int(address.rpartition(":")[2])
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(server.stop, None)
        channel = await stack.enter_async_context(open_channel(address, process(PeerRole.ROUTER)))
        call = worker_pb2_grpc.WorkerStub(channel).Serve()  # type: ignore[call-arg]
        await call.read()
        crowd = [
            stack.enter_context(socket.create_connection((host.strip("[]"), port)))
            for _ in range(CONNECTIONS_OF_AN_ADDRESS + 8)
        ]
        async with asyncio.timeout(5):
            while own.counts.crowded < 9:  # noqa: ASYNC110  # nobody tells
                await asyncio.sleep(0.02)
        assert own.counts.crowded == 9
        assert not call.done()
        assert len(crowd) < CONNECTIONS


class _Silent(worker_pb2_grpc.WorkerServicer):
    async def Serve(self, request_iterator, context):  # type: ignore[override]  # noqa: N802
        await context.write(worker_pb2.Frame())
        await asyncio.Event().wait()


async def test_a_limit_touches_nothing_but_connections_to_its_own_port() -> None:
    ours, theirs = socket.create_server(("127.0.0.1", 0)), socket.create_server(("127.0.0.1", 0))
    counts = ConnectionCounts()
    limit = AddressLimit(counts, most=1)
    limit.port = ours.getsockname()[1]
    with contextlib.ExitStack() as stack:
        for listener in (ours, theirs):
            stack.enter_context(listener)
            for _ in range(3):
                stack.enter_context(socket.create_connection(listener.getsockname()))
                stack.enter_context(listener.accept()[0])
        limit.begun(asyncio.get_running_loop())
        async with asyncio.timeout(5):
            while not counts.crowded:  # noqa: ASYNC110  # nobody tells
                await asyncio.sleep(0.02)
        assert counts.crowded == 2


async def test_a_connection_that_has_proven_itself_stays_however_many_have_called_since() -> None:
    counts = ConnectionCounts()
    limit = AddressLimit(counts, most=1)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        limit.port = listener.getsockname()[1]

        def connect() -> socket.socket:
            connection = stack.enter_context(socket.create_connection(listener.getsockname()))
            stack.enter_context(listener.accept()[0])
            return connection

        async def look(shut: int) -> None:
            limit.begun(asyncio.get_running_loop())
            async with asyncio.timeout(5):
                while counts.crowded < shut:  # noqa: ASYNC110  # nobody tells
                    await asyncio.sleep(0.02)

        old, _stranger = connect(), connect()
        counts.called(f"ipv4:127.0.0.1:{old.getsockname()[1]}")
        await look(1)
        for port in range(2000):
            counts.called(f"ipv4:192.0.2.1:{port}")
        late = connect()
        counts.called(f"ipv4:127.0.0.1:{late.getsockname()[1]}")
        await look(2)
        late.settimeout(5)
        assert late.recv(1) == b"", "it is the latest"
        old.setblocking(False)
        with pytest.raises(BlockingIOError):
            old.recv(1)


# The largest honest messages fit.


def test_a_prompt_of_full_length_and_its_checksums_fit_a_worker() -> None:
    bound = worker_bounds(LONG).message_bytes
    sampling = common_pb2.Sampling(
        logit_bias=dict.fromkeys(range(1024), 1.0),
        stop_token_ids=range(1 << 20, (1 << 20) + 1024),
        allowed_token_ids=bytes(4 * 8192),
        bad_words=[bytes(4 * 1024)] * 64,
        grammar='"' + '\\"' * MAX_GRAMMAR_BYTES + '"',
    )
    request = common_pb2.GenerationRequest(
        prompt_tokens=bytes(4 * LONG.max_model_len), samples=range(128), sampling=sampling
    )
    permit = common_pb2.Signed(content=bytes(4096), mac=bytes(64))
    prefill = worker_pb2.Prefill(request=request, permit=permit, transfer_address="x" * 256)
    assert worker_pb2.Command(prefill=prefill).ByteSize() < bound

    best = common_pb2.TokenLogprobs(
        logprob=-1.0, rank=7, top_tokens=[1 << 20] * 20, top_logprobs=[-1.0] * 20
    )
    first = common_pb2.SampledToken(token=1 << 20, logprobs=best)
    layers = len(LONG.layout.layers)
    pages = LONG.max_model_len // LONG.layout.block_tokens
    commit = transfer_pb2.CommitPages(
        first_tokens=[first] * 128, checksums=bytes(8 * pages * layers)
    )
    assert transfer_pb2.TransferRequest(commit=commit).ByteSize() < bound


def test_the_keys_of_a_long_text_and_a_batch_of_checksums_fit_a_pool_node() -> None:
    keys = bytes(16 * MAX_KEYS)
    lease = pool_pb2.LeaseBlocksRequest(keys=keys, tenant="x" * 256)
    commit = pool_pb2.CommitPutRequest(put_id="x" * 64, checksums=[bytes(8 * 1024)] * 16)
    asked = pool_pb2.PeerRequest(fetch=pool_pb2.FetchBlocks(keys=keys, address="x" * 256))
    for message in (lease, commit, asked):
        assert message.ByteSize() < POOL.message_bytes


def test_a_longer_model_has_a_larger_bound_and_no_more_calls() -> None:
    short, long = worker_bounds(HELLO), worker_bounds(LONG)
    assert short.message_bytes < 2 * _MIB < long.message_bytes
    assert short.calls == long.calls == ServerBounds().calls
    assert (
        worker_bounds(replace(HELLO, max_model_len=1)).message_bytes > ServerBounds().message_bytes
    )
