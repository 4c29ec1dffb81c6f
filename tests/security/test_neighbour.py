"""A hostile neighbour: it reaches a worker's gRPC port, without the cluster's secret or without the right role."""

import asyncio
import datetime
import gc
import logging
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.errors import ConfigError
from baton.rpc.certificates import CertificateFiles, issue
from baton.rpc.channel import bind, new_server, open_channel, stranger
from baton.rpc.connections import HANDSHAKE_S
from baton.rpc.credentials import ClusterCredentials
from baton.rpc.identity import PeerRole, ProcessIdentity, may_call
from baton.rpc.v1 import (
    control_pb2,
    control_pb2_grpc,
    pool_pb2,
    pool_pb2_grpc,
    worker_pb2_grpc,
)
from kvpool.peers.client import PeerClient, PeerSeal
from router.workers.links import LinkState, WorkerLink

SECRET, OTHER = bytes(range(32)), bytes(range(1, 33))
_BIG = 60 << 20


def process(role: PeerRole, secret: bytes = SECRET) -> ClusterCredentials:
    return ClusterCredentials(ProcessIdentity(role=role, name="x"), secret)


class Everything(
    control_pb2_grpc.ControlServicer,
    worker_pb2_grpc.WorkerServicer,
):
    """Counts whatever comes through; none of it should."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    async def Status(self, request, context):  # noqa: N802
        self.heard.append("Status")
        return control_pb2.StatusReply()

    async def Drain(self, request, context):  # noqa: N802
        self.heard.append("Drain")
        return control_pb2.DrainReply()

    async def Serve(self, request_iterator, context):  # type: ignore[override]  # noqa: N802
        self.heard.append("Serve")


class Blocks(pool_pb2_grpc.PoolServicer):
    """The same for block reports."""

    def __init__(self, heard: list[str]) -> None:
        self.heard = heard

    async def Watch(self, request, context):  # noqa: N802
        self.heard.append("Watch")
        yield pool_pb2.PoolFrame()


@asynccontextmanager
async def serving(
    own: ClusterCredentials | None = None,
) -> AsyncIterator[tuple[str, Everything, ClusterCredentials]]:
    own = own or process(PeerRole.WORKER)
    services = Everything()  # type: ignore[abstract]  # nobody asks more
    blocks = Blocks(services.heard)  # type: ignore[abstract]  # nobody asks more
    server = new_server(own)
    control_pb2_grpc.add_ControlServicer_to_server(services, server)
    pool_pb2_grpc.add_PoolServicer_to_server(blocks, server)
    worker_pb2_grpc.add_WorkerServicer_to_server(services, server)
    address = bind(server, "127.0.0.1:0", own)
    await server.start()
    try:
        yield address, services, own
    finally:
        await server.stop(None)


async def outcome(call: Any) -> grpc.StatusCode:
    try:
        if hasattr(call, "read"):
            await call.read()
            return grpc.StatusCode(await call.code())
        await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def everything_asked(channel: grpc.aio.Channel) -> set[grpc.StatusCode]:
    control = control_pb2_grpc.ControlStub(channel)
    workers: Any = worker_pb2_grpc.WorkerStub(channel)
    pool = pool_pb2_grpc.PoolStub(channel)
    return {
        await outcome(control.Status(control_pb2.StatusRequest(), timeout=5)),
        await outcome(control.Drain(control_pb2.DrainRequest(), timeout=5)),
        await outcome(workers.Serve(timeout=5)),
        await outcome(pool.Watch(pool_pb2.WatchPoolRequest(), timeout=5)),
    }


def channels(address: str) -> dict[str, grpc.aio.Channel]:
    """What a neighbour may try."""
    ours, theirs = (
        issue(secret, ProcessIdentity(role=PeerRole.ROUTER, name="x")) for secret in (SECRET, OTHER)
    )
    name = [("grpc.ssl_target_name_override", PeerRole.WORKER.host_name)]

    def tls(*parts: bytes | None) -> grpc.aio.Channel:
        return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(*parts), name)

    return {
        "in the clear": grpc.aio.insecure_channel(address),
        "with another secret": open_channel(address, process(PeerRole.ROUTER, OTHER)),
        "without a certificate": tls(ours.authority),
        "with another cluster's": tls(ours.authority, theirs.key, theirs.chain),
    }


@pytest.mark.parametrize("way", channels("127.0.0.1:1"))
async def test_without_the_secret_no_call_arrives(way: str) -> None:
    async with serving() as (address, services, _), channels(address)[way] as channel:
        assert await everything_asked(channel) == {grpc.StatusCode.UNAVAILABLE}
        assert services.heard == []


async def test_with_the_secret_every_call_of_the_role_arrives() -> None:
    async with (
        serving() as (address, services, _),
        open_channel(address, process(PeerRole.ROUTER)) as channel,
    ):
        assert await everything_asked(channel) == {grpc.StatusCode.OK}
        assert services.heard == ["Status", "Drain", "Serve", "Watch"]


@pytest.mark.parametrize("role", [PeerRole.WORKER, PeerRole.POOL])
async def test_a_role_that_may_not_call_is_denied_and_counted(role: PeerRole) -> None:
    async with serving() as (address, services, own), open_channel(address, process(role)) as line:
        assert await everything_asked(line) == {grpc.StatusCode.PERMISSION_DENIED}
        assert services.heard == []
        assert own.counts.denied == 4


@pytest.mark.parametrize(
    ("role", "code"),
    [
        (PeerRole.WORKER, grpc.StatusCode.PERMISSION_DENIED),
        (PeerRole.ROUTER, grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
async def test_what_a_caller_may_not_ask_is_not_even_parsed(
    role: PeerRole, code: grpc.StatusCode
) -> None:
    async with serving() as (address, services, _), open_channel(address, process(role)) as line:
        call = line.unary_unary("/baton.rpc.v1.Control/Drain", bytes, bytes)
        assert await outcome(call(b"\xff\xff", timeout=5)) is code
        assert services.heard == []


@pytest.mark.parametrize("method", ["Drain", "Undrain", "SetRole"])
def test_an_operator_asks_a_router_which_spares_the_last_worker(method: str) -> None:
    called = f"/baton.rpc.v1.Control/{method}"
    assert may_call(called, PeerRole.WORKER) == {PeerRole.ROUTER}
    assert PeerRole.OPERATOR in may_call(called, PeerRole.ROUTER)


async def test_a_worker_takes_a_drain_from_a_router_only() -> None:
    async with serving() as (address, services, own):
        async with open_channel(address, process(PeerRole.OPERATOR)) as channel:
            stub = control_pb2_grpc.ControlStub(channel)
            drain = stub.Drain(control_pb2.DrainRequest(), timeout=5)
            assert await outcome(drain) is grpc.StatusCode.PERMISSION_DENIED
            status = stub.Status(control_pb2.StatusRequest(), timeout=5)
            assert await outcome(status) is grpc.StatusCode.OK
        assert services.heard == ["Status"]
        assert own.counts.denied == 1


async def test_the_reason_is_the_secret_and_not_that_nobody_is_there() -> None:
    caller = process(PeerRole.ROUTER, OTHER)
    async with serving() as (address, _, _), open_channel(address, caller) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Check(health_pb2.HealthCheckRequest(), timeout=5)
        error = stranger(caught.value, address, caller)
        assert error is not None
        assert "does not have that of this cluster" in error.message
        assert caller.counts.strangers == 1


async def test_who_expects_another_role_does_not_talk() -> None:
    caller = process(PeerRole.ROUTER)
    async with serving() as (address, services, _):
        async with open_channel(address, caller, PeerRole.POOL) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await control_pb2_grpc.ControlStub(channel).Status(control_pb2.StatusRequest())
        assert "another role" in str(stranger(caught.value, address, caller))
        assert services.heard == []


async def test_silent_connections_are_closed_within_their_time() -> None:
    own = psutil.Process()
    async with serving() as (address, _, credentials):
        before = own.num_fds()
        host, _, port = address.rpartition(":")
        silent = [socket.create_connection((host, int(port))) for _ in range(200)]
        assert own.num_fds() >= before + 200
        async with asyncio.timeout(HANDSHAKE_S + 10):
            while own.num_fds() > before + 200 + 20:  # noqa: ASYNC110  # gRPC does not tell
                await asyncio.sleep(0.05)
        assert all(_is_closed(one) for one in silent)
        assert credentials.counts.handshakes >= 200
        assert credentials.counts.proven == 0
        async with open_channel(address, process(PeerRole.ROUTER)) as channel:
            assert await everything_asked(channel) == {grpc.StatusCode.OK}


def _is_closed(one: socket.socket) -> bool:
    with one:
        one.settimeout(5)
        try:
            return one.recv(1) == b""
        except ConnectionError:
            return True


async def test_big_messages_of_strangers_leave_no_memory_behind() -> None:
    async with serving() as (address, services, _):
        gc.collect()
        own = psutil.Process()
        message, before = bytes(_BIG), own.memory_info().rss
        for way in ("in the clear", "with another cluster's"):
            for _ in range(10):
                async with channels(address)[way] as channel:
                    call = channel.unary_unary("/baton.rpc.v1.Transfer/Session", bytes, bytes)
                    assert await outcome(call(message, timeout=5)) is grpc.StatusCode.UNAVAILABLE
        gc.collect()
        assert services.heard == []
        # The sender's own copies live in this process too, one at a time.
        assert own.memory_info().rss - before < 4 * _BIG


def test_a_unix_socket_is_for_this_user_only(tmp_path: Path) -> None:
    async def mode() -> int:
        server = new_server()
        bind(server, f"unix:{tmp_path}/socket")
        await server.start()
        found = (tmp_path / "socket").stat().st_mode & 0o777
        await server.stop(None)
        return found

    before = os.umask(0)
    try:
        assert asyncio.run(mode()) == 0o600
    finally:
        os.umask(before)


def test_tcp_without_the_secret_is_an_error_that_names_it() -> None:
    with pytest.raises(ConfigError, match=r"cluster\.secret is not set"):
        open_channel("127.0.0.1:7001")


# An operator's own certificates.

ROLE = PeerRole.WORKER


def _files(
    folder: Path,
    *,
    until: datetime.datetime,
    name: str,
    uri: str,
    signer: ec.EllipticCurvePrivateKey | None = None,
    begin: datetime.datetime | None = None,
) -> CertificateFiles:
    """An authority, with the key `signer` or a new one, and a certificate that it signed."""
    key = ec.generate_private_key(ec.SECP256R1())
    signer = signer or ec.generate_private_key(ec.SECP256R1())
    issuer = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "operator")])
    begin = begin or datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)

    def certificate(public, subject: x509.Name) -> x509.CertificateBuilder:
        builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer)
        builder = builder.public_key(public).serial_number(x509.random_serial_number())
        return builder.not_valid_before(begin).not_valid_after(until)

    authority = certificate(signer.public_key(), issuer).add_extension(
        x509.BasicConstraints(ca=True, path_length=0), critical=True
    )
    names = [x509.DNSName(name), x509.UniformResourceIdentifier(uri)]
    own = certificate(key.public_key(), x509.Name([])).add_extension(
        x509.SubjectAlternativeName(names), critical=True
    )
    pem = serialization.Encoding.PEM
    files = CertificateFiles(
        certificate=folder / "own.pem", key=folder / "key.pem", authority=folder / "authority.pem"
    )
    files.authority.write_bytes(authority.sign(signer, hashes.SHA256()).public_bytes(pem))
    files.certificate.write_bytes(own.sign(signer, hashes.SHA256()).public_bytes(pem))
    files.key.write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return files


LONG = datetime.datetime(9999, 1, 1, tzinfo=datetime.UTC)
PAST = datetime.datetime(2021, 1, 1, tzinfo=datetime.UTC)
URI = "baton://worker/w"


@pytest.mark.parametrize(
    ("until", "name", "uri", "why"),
    [
        (PAST, ROLE.host_name, URI, "is valid from"),
        (LONG, "elsewhere", URI, "lacks the DNS name worker.baton"),
        (LONG, ROLE.host_name, "baton://router/w", "lacks a URI baton://worker/NAME"),
    ],
)
def test_a_certificate_that_peers_would_refuse_is_refused_at_start(
    tmp_path: Path, until: datetime.datetime, name: str, uri: str, why: str
) -> None:
    files = _files(tmp_path, until=until, name=name, uri=uri)
    with pytest.raises(ConfigError, match=why) as caught:
        ClusterCredentials(ProcessIdentity(role=ROLE, name="w"), SECRET, files)
    assert caught.value.param == "cluster.tls_certificate"


def test_a_key_of_another_certificate_is_named(tmp_path: Path) -> None:
    files = _files(tmp_path, until=LONG, name=ROLE.host_name, uri=URI)
    files.key.write_bytes(issue(SECRET, ProcessIdentity(role=ROLE, name="w")).key)
    with pytest.raises(ConfigError) as caught:
        ClusterCredentials(ProcessIdentity(role=ROLE, name="w"), SECRET, files)
    assert caught.value.param == "cluster.tls_key"


def _two(folder: Path, until: datetime.datetime) -> tuple[ClusterCredentials, CertificateFiles]:
    """A worker with valid certificates, and a router's of the same authority until then."""
    signer = ec.generate_private_key(ec.SECP256R1())
    folders = folder / "worker", folder / "router"
    for one in folders:
        one.mkdir()
    worker = _files(folders[0], until=LONG, name=ROLE.host_name, uri=URI, signer=signer)
    host, uri = PeerRole.ROUTER.host_name, "baton://router/x"
    router = _files(folders[1], until=until, name=host, uri=uri, signer=signer)
    return ClusterCredentials(ProcessIdentity(role=ROLE, name="w"), SECRET, worker), router


@pytest.mark.parametrize(
    ("until", "expected"), [(LONG, grpc.StatusCode.OK), (PAST, grpc.StatusCode.UNAVAILABLE)]
)
async def test_a_caller_whose_certificate_has_expired_is_refused(
    tmp_path: Path, until: datetime.datetime, expected: grpc.StatusCode
) -> None:
    own, router = _two(tmp_path, until)
    async with serving(own) as (address, services, _):
        authority = (tmp_path / "worker" / "authority.pem").read_bytes()
        shown = grpc.ssl_channel_credentials(
            authority, router.key.read_bytes(), router.certificate.read_bytes()
        )
        name = [("grpc.ssl_target_name_override", ROLE.host_name)]
        async with grpc.aio.secure_channel(address, shown, name) as channel:
            assert await everything_asked(channel) == {expected}
        assert bool(services.heard) is (expected is grpc.StatusCode.OK)


async def test_a_server_whose_certificate_has_expired_is_told_from_one_of_another_cluster(
    tmp_path: Path,
) -> None:
    own, router = _two(tmp_path, PAST)
    server = grpc.aio.server()
    pair = router.key.read_bytes(), router.certificate.read_bytes()
    authority = (tmp_path / "worker" / "authority.pem").read_bytes()
    shown = grpc.ssl_server_credentials([pair], authority, require_client_auth=True)
    address = f"127.0.0.1:{server.add_secure_port('127.0.0.1:0', shown)}"
    await server.start()
    async with open_channel(address, own, PeerRole.ROUTER) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await control_pb2_grpc.ControlStub(channel).Status(control_pb2.StatusRequest())
    await server.stop(None)
    assert "cluster.tls_certificate" in str(stranger(caught.value, address, own))


async def test_with_an_operators_certificates_the_secret_alone_lets_nobody_in(
    tmp_path: Path,
) -> None:
    files = _files(tmp_path, until=LONG, name=ROLE.host_name, uri="baton://worker/w")
    own = ClusterCredentials(ProcessIdentity(role=ROLE, name="w"), SECRET, files)
    server = new_server(own)
    services = Everything()  # type: ignore[abstract]  # nobody asks more
    control_pb2_grpc.add_ControlServicer_to_server(services, server)
    address = bind(server, "127.0.0.1:0", own)
    await server.start()
    async with open_channel(address, process(PeerRole.OPERATOR)) as channel:
        call = control_pb2_grpc.ControlStub(channel).Drain(control_pb2.DrainRequest(), timeout=5)
        assert await outcome(call) is grpc.StatusCode.UNAVAILABLE
    # Replaced while it serves: the next connection meets the new ones.
    _files(tmp_path, until=LONG, name=ROLE.host_name, uri="baton://worker/w")
    async with open_channel(address, own) as channel:
        call = control_pb2_grpc.ControlStub(channel).Drain(control_pb2.DrainRequest(), timeout=5)
        assert await outcome(call) is grpc.StatusCode.PERMISSION_DENIED  # a worker, and known
    await server.stop(None)
    assert services.heard == []


async def test_a_new_certificate_that_is_not_valid_yet_is_shown_once_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The authority's clock is ahead of this one; the files do not change any more."""
    signer = ec.generate_private_key(ec.SECP256R1())
    files = _files(tmp_path, until=LONG, name=ROLE.host_name, uri=URI, signer=signer)
    own = ClusterCredentials(ProcessIdentity(role=ROLE, name="w"), SECRET, files)
    first = own.version
    begin = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=2)
    _files(tmp_path, until=LONG, name=ROLE.host_name, uri=URI, signer=signer, begin=begin)
    with caplog.at_level(logging.ERROR):
        assert own.version == own.version == first
        async with asyncio.timeout(20):
            while own.version == first:  # noqa: ASYNC110  # the clock goes on
                await asyncio.sleep(0.1)
    assert own.version == first + 1
    said = [one for one in caplog.records if "new certificates" in one.getMessage()]
    assert len(said) == 1


def test_where_new_files_cannot_be_looked_at_the_last_good_ones_are_kept(tmp_path: Path) -> None:
    """As in a folder that is closed for a moment; here one of them has a name that no file has."""
    files = _files(tmp_path, until=LONG, name=ROLE.host_name, uri=URI)
    own = ClusterCredentials(ProcessIdentity(role=ROLE, name="w"), SECRET, files)
    first = own.version
    files.certificate.unlink()
    files.certificate.symlink_to("x" * 300)
    own.for_channel()
    assert own.version == first
    files.certificate.unlink()
    _files(tmp_path, until=LONG, name=ROLE.host_name, uri=URI)
    own.for_channel()
    assert own.version == first + 1


async def test_a_router_with_another_secret_says_so_once_and_its_link_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    own = process(PeerRole.ROUTER, OTHER)
    async with serving() as (address, services, _):
        link = WorkerLink(address, lambda _: None, credentials=own)
        with caplog.at_level(logging.ERROR):
            running = asyncio.create_task(link.run())
            async with asyncio.timeout(20):
                while own.counts.strangers < 3:  # noqa: ASYNC110  # attempts go on
                    await asyncio.sleep(0.01)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        assert link.state is LinkState.REFUSED
        assert services.heard == []
    said = [one for one in caplog.records if "worker cannot be used" in one.getMessage()]
    assert len(said) == 1


class Answering(pool_pb2_grpc.PoolPeersServicer):
    """Answers other pool nodes, and notes by which connection they asked."""

    def __init__(self, seal: PeerSeal) -> None:
        self._seal = seal
        self.asked_by: list[str] = []

    async def Ask(self, request, context):  # noqa: N802
        self.asked_by.append(context.peer())
        return self._seal.seal_reply(pool_pb2.PeerReply(), request)


async def test_a_pool_node_asks_others_with_its_new_certificate_once_the_files_have_changed(
    tmp_path: Path,
) -> None:
    signer, identity = (
        ec.generate_private_key(ec.SECP256R1()),
        ProcessIdentity(role=PeerRole.POOL, name="n"),
    )

    def files() -> CertificateFiles:
        host = PeerRole.POOL.host_name
        return _files(tmp_path, until=LONG, name=host, uri=identity.uri, signer=signer)

    own, seal = ClusterCredentials(identity, SECRET, files()), PeerSeal(SECRET)
    server, answering = new_server(own), Answering(seal)
    pool_pb2_grpc.add_PoolPeersServicer_to_server(answering, server)
    address = bind(server, "127.0.0.1:0", own)
    await server.start()
    client = PeerClient(seal, own)
    try:
        for _ in range(2):
            await client.ask(address, pool_pb2.PeerRequest(), 5.0)
        files()
        await client.ask(address, pool_pb2.PeerRequest(), 5.0)
    finally:
        await client.close()
        await server.stop(None)
    first, second, third = answering.asked_by
    assert first == second != third
