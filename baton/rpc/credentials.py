"""What a process proves itself with to the other processes of its cluster over TCP, and by which it knows them.

Both ends of every TCP connection show a certificate of the cluster's authority before anything else is read (mutual
TLS); its subject names role and process. Unix sockets need none: only processes of the same user can open them.
"""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Self

import grpc

from baton.config.schema import ClusterConfig
from baton.errors import ConfigError
from baton.rpc.address_limit import AddressLimit
from baton.rpc.connections import ConnectionCounts
from baton.rpc.identity import PeerRole, ProcessIdentity
from baton.telemetry.logs import get_logger

if TYPE_CHECKING:
    from baton.rpc.certificates import CertificateFiles, Certificates

_log = get_logger(__name__)


class ClusterCredentials:
    """One process's. Certificates are made when the first TCP address is bound or dialled.

    Args:
        identity: Of this process.
        secret: Of the cluster, 32 bytes; certificates are issued from it where `files` are not given.
        files: An operator's own certificates. They are checked at once, and read again when they change.

    Raises:
        ConfigError: The files cannot be used; `param` names the setting.

    Attributes:
        identity: Of this process.
        counts: Of its connections.
    """

    def __init__(
        self,
        identity: ProcessIdentity,
        secret: bytes,
        files: "CertificateFiles | None" = None,
    ) -> None:
        self.identity = identity
        self.counts = ConnectionCounts()
        self._secret = secret
        self._files = files
        self._certificates: Certificates | None = None
        self._changed_ns: tuple[int, ...] = ()  # of the files that are shown
        self._refused = ""  # why those that are there now are not
        self._version = 0
        if files is not None:
            self._load()

    @classmethod
    def from_config(cls, cluster: ClusterConfig, role: PeerRole, name: str) -> Self:
        """Those of a process of the cluster that `cluster` configures; raises as the constructor does."""
        files = None
        if cluster.tls_certificate:
            from baton.rpc.certificates import CertificateFiles

            files = CertificateFiles(
                certificate=Path(cluster.tls_certificate),
                key=Path(cluster.tls_key),
                authority=Path(cluster.tls_authority),
            )
        identity = ProcessIdentity(role=role, name=name)
        return cls(identity, bytes.fromhex(cluster.secret), files)

    @property
    def version(self) -> int:
        """Another one once an operator's files have changed:
        a channel keeps showing the certificate that it was opened with.
        """
        if self._files is not None:
            self._current()
        return self._version

    def for_channel(self) -> grpc.ChannelCredentials:
        """For a new connection."""
        now = self._current()
        return grpc.ssl_channel_credentials(now.authority, now.key, now.chain)

    def for_server(self, limit: AddressLimit) -> grpc.ServerCredentials:
        """For a server of the running event loop: peers without a certificate of the cluster are refused,
        and `limit` is told of each.
        """
        loop = asyncio.get_running_loop()
        shown = self._current()

        def changed() -> grpc.ServerCertificateConfiguration | None:
            nonlocal shown
            self.counts.begun(loop)
            limit.begun(loop)
            before, shown = shown, self._current()
            return None if shown is before else _server_certificates(shown)

        return grpc.dynamic_ssl_server_credentials(
            _server_certificates(shown),
            changed,  # type: ignore[arg-type]  # None: as before
            require_client_authentication=True,
        )

    def _current(self) -> "Certificates":
        """Files that have changed are read again. For as long as those cannot be used, which is logged once, the last
        ones are kept: a certificate may begin to be valid only later, by the clock here.
        """
        if self._certificates is None or (
            self._files is not None and self._modified_ns() != self._changed_ns
        ):
            try:
                self._load()
            except ConfigError as error:
                if self._certificates is None:
                    raise
                if error.message != self._refused:
                    _log.error("the new certificates cannot be used", reason=error.message)
                self._refused = error.message
        assert self._certificates is not None
        return self._certificates

    def _load(self) -> None:
        # Most clusters of one host use Unix sockets only;
        # importing `cryptography` would cost each of their processes 70 ms.
        from baton.rpc import certificates

        if self._files is None:
            self._certificates = certificates.issue(self._secret, self.identity)
            return
        changed_ns = self._modified_ns()
        self._certificates = certificates.read(self._files, self.identity.role)
        self._changed_ns, self._refused = changed_ns, ""
        self._version += 1

    def _modified_ns(self) -> tuple[int, ...]:
        assert self._files is not None
        files = (self._files.certificate, self._files.key, self._files.authority)
        return tuple(map(_mtime_ns, files))


def _mtime_ns(file: Path) -> int:
    """When it was changed last; 0 where it cannot be looked at, as while it is replaced or its folder is closed."""
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return 0


def _server_certificates(certificates: "Certificates") -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(certificates.key, certificates.chain)], certificates.authority
    )
