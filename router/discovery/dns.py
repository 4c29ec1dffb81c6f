"""Discovery by DNS: the records of headless Services, or of any zone. Needs no rights but to ask.

A name is `host:port`, for whose host A records are asked, AAAA records where there are none of those; or a name of SRV
records, such as `_grpc._tcp.decode.baton-workers.svc.cluster.local`, which tell hosts and ports. An address at which
nobody answers is no fault: with `publishNotReadyAddresses` a pod has a record before it serves. Names are asked every
second, whatever the TTL of their records is.
"""

import asyncio
from collections.abc import Sequence
from ipaddress import ip_address

import dns.asyncresolver
import dns.exception
import dns.nameserver
import dns.rdatatype
import dns.resolver

from baton.errors import ConfigError, UnavailableError
from router.discovery.ports import Look, Sighting

PERIOD_S = 1.0
TIMEOUT_S = 1.0
"""One question, over all servers and tries."""

_DNS_PORT = 53


class DnsDiscovery:
    """Asks for the names of workers and pool nodes.

    Args:
        worker_names: Of workers.
        pool_names: Of pool nodes.
        servers: `host:port` or `host` of the servers to ask, numbers both; those of the system where there are none.
        period_s: Between two looks.

    Raises:
        ConfigError: The system names no server, or what is given is no address.
    """

    def __init__(
        self,
        worker_names: Sequence[str],
        pool_names: Sequence[str] = (),
        *,
        servers: Sequence[str] = (),
        period_s: float = PERIOD_S,
    ) -> None:
        self.period_s = period_s
        self._worker_names = tuple(worker_names)
        self._pool_names = tuple(pool_names)
        self._resolver = _resolver(servers)
        self._found: dict[str, tuple[str, ...]] = {}
        """Addresses by name, of the last answer."""

    async def look(self) -> Look:
        """Asks for all names at once."""
        names = tuple(dict.fromkeys((*self._worker_names, *self._pool_names)))
        faults = await asyncio.gather(*(self._ask(name) for name in names))
        return Look(
            workers=self._sightings(self._worker_names),
            pool_nodes=self._sightings(self._pool_names),
            faults=tuple(fault for fault in faults if fault),
        )

    def _sightings(self, names: Sequence[str]) -> tuple[Sighting, ...]:
        found = {address: name for name in names for address in self._found.get(name, ())}
        return tuple(Sighting(address=address, source=name) for address, name in found.items())

    async def _ask(self, name: str) -> str:
        """Takes the answer for `name`; returns what kept it from coming."""
        try:
            if name.startswith("_"):
                found = await self._services(name)
            else:
                host, _, port = name.rpartition(":")
                found = [_join(address, int(port)) for address in await self._addresses(host)]
        except UnavailableError as error:
            return f"{name}: {error.message}"
        self._found[name] = tuple(sorted(found))
        return ""

    async def _services(self, name: str) -> list[str]:
        """Addresses by the SRV records of `name`."""
        answer = await self._answer(name, "SRV")
        if answer is None or answer.rrset is None:
            return []
        # Servers tell the targets' addresses with them; what they leave out is asked for.
        told: dict[str, list[str]] = {}
        for rrset in answer.response.additional:
            if rrset.rdtype == dns.rdatatype.A:
                told[rrset.name.to_text()] = [record.to_text() for record in rrset]
        targets = {_target(record.to_text()) for record in answer.rrset}
        targets = {
            (host, port) for host, port in targets if host != "."
        }  # the root: no such service
        asked = sorted({host for host, _ in targets} - told.keys())
        answers = await asyncio.gather(*(self._addresses(host) for host in asked))
        told |= dict(zip(asked, answers, strict=True))
        return [_join(address, port) for host, port in targets for address in told[host]]

    async def _addresses(self, host: str) -> list[str]:
        for kind in ("A", "AAAA"):
            answer = await self._answer(host, kind)
            if answer is not None and answer.rrset is not None:
                return [str(record.to_text()) for record in answer.rrset]
        return []

    async def _answer(self, name: str, kind: str) -> dns.resolver.Answer | None:
        """Records of `name`; None where there is no such name.

        Raises:
            UnavailableError: No server said whether there are any.
        """
        try:
            return await self._resolver.resolve(name, kind, raise_on_no_answer=False, search=True)
        except dns.resolver.NXDOMAIN:
            return None
        except dns.exception.DNSException as error:
            raise UnavailableError(f"no answer from DNS: {type(error).__name__}") from error


def _resolver(servers: Sequence[str]) -> dns.asyncresolver.Resolver:
    try:
        resolver = dns.asyncresolver.Resolver(configure=not servers)
    except dns.resolver.NoResolverConfiguration as error:
        raise ConfigError(
            "cluster.dns_servers is not set, and /etc/resolv.conf names no server",
            param="cluster.dns_servers",
        ) from error
    if servers:
        resolver.nameservers = [
            dns.nameserver.Do53Nameserver(*_server(server)) for server in servers
        ]
    resolver.timeout = resolver.lifetime = TIMEOUT_S
    if len(resolver.nameservers) > 1:
        resolver.timeout = TIMEOUT_S / 2  # so that a second one is asked in time
    return resolver


def _server(server: str) -> tuple[str, int]:
    """Address and port of `host`, `host:port`, `[v6]` or `[v6]:port`."""
    host, _, port = server.rpartition(":")
    if not host or server.endswith("]") or (":" in host and not host.startswith("[")):
        host, port = server, ""
    host = host.strip("[]")
    try:
        return str(ip_address(host)), int(port or _DNS_PORT)
    except ValueError as error:
        raise ConfigError(
            f"cluster.dns_servers: {server} is no address of a server, such as 10.0.0.10:53",
            param="cluster.dns_servers",
        ) from error


def _target(record: str) -> tuple[str, int]:
    """Host and port of an SRV record's text: priority, weight, port, host."""
    _, _, port, host = record.split()
    return host, int(port)


def _join(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
