"""The registrations of a cluster's processes in Redis: what a worker or a pool node says of itself,
and for how long it holds.

Redis is a hint: a registration tells where to ask, and what answers there tells what it is. Each is sealed with the
cluster's secret (`baton.seal`), bound to the scope, to the process and to its time; what is not is refused,
counted and removed. What is, and is out of time by the clock here, is refused and counted alone: it ends with its
lease.

A process says the same again and again, and each router reads all of it twice a second. So what a process sealed is
good for several renewals, and what a router has opened before it knows by its bytes.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta

from baton.errors import UnavailableError
from baton.ids import Incarnation, WorkerId, WorkerIdentity
from baton.redis_link import asked
from baton.seal import HEAD_BYTES, Seal, SealError, SealTimeError, Unsealed

if TYPE_CHECKING:
    from redis.asyncio import Redis

MOST_REGISTRATIONS = 4096
MAX_NAME_BYTES, MAX_SEALED_BYTES = 320, 8192
MAX_LABELS, MAX_LABEL_CHARS = 16, 128

_OPENED_AT_ONCE = 64
"""Then others have a turn on the event loop: a seal takes some 15 µs to open."""

ProcessKind = Literal["worker", "pool"]

_Text = Annotated[str, Meta(max_length=256)]
_Label = Annotated[str, Meta(max_length=MAX_LABEL_CHARS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """One process, as it says itself.

    Attributes:
        kind: What answers at `address`.
        identity: Its name and this start of it.
        address: `host:port` of its gRPC services, by which others reach it.
        role: A worker's at the moment.
        layout: Digest of a worker's KV layout.
        labels: Where it stands: `zone`, `rack`, whatever the operator says.
    """

    kind: ProcessKind
    identity: WorkerIdentity
    address: str
    role: str = ""
    layout: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)


class _Sealed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is sealed; a field more or less is an error. `lease_s`: for how long it holds."""

    kind: ProcessKind
    worker_id: Annotated[str, Meta(min_length=1, max_length=256)]
    incarnation: Annotated[str, Meta(pattern=r"^[0-9a-f]{1,16}$")]
    address: Annotated[str, Meta(pattern=r"^[^\s:/][^\s/]*:[0-9]{1,5}$", max_length=256)]
    role: _Text
    layout: _Text
    labels: Annotated[dict[_Label, _Label], Meta(max_length=MAX_LABELS)]
    lease_s: Annotated[float, Meta(gt=0, le=3600)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Opened:
    """A registration, and what it was sealed in."""

    sealed: bytes
    unsealed: Unsealed
    lease_s: float
    registration: Registration


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """What lay in Redis.

    Attributes:
        registrations: Those whose leases have not ended.
        faults: A few words on each that was refused; nothing of what was read stands in them.
    """

    registrations: tuple[Registration, ...]
    faults: tuple[str, ...]


class Registry:
    """The registrations of one scope.

    Args:
        redis: Where they lie.
        prefix: Begins the keys. Clusters that share a Redis need different ones.
        secret: Of the cluster.
        lease_s: How long a registration holds that is not renewed.
    """

    def __init__(self, redis: "Redis", *, prefix: str, secret: bytes, lease_s: float) -> None:
        script = resources.files("baton.discovery") / "registrations.lua"
        self._script = redis.register_script(script.read_text(encoding="utf-8"))
        # In one slot of a Redis Cluster.
        self._keys = [f"{{{prefix}}}:registrations", f"{{{prefix}}}:registration_leases"]
        self._seal = Seal(secret, "registration")
        self._prefix = prefix
        self._lease_s = lease_s
        self._opened: dict[bytes, _Opened] = {}
        self._own: _Opened | None = None

    async def register(self, registration: Registration) -> None:
        """Takes or renews the lease of a process.

        Raises:
            UnavailableError: Redis gave no answer, or is full of registrations, or whoever reads this one would refuse
                it: an address without a port, a name that is too long.
        """
        said = _Sealed(
            kind=registration.kind,
            worker_id=registration.identity.worker_id,
            incarnation=f"{registration.identity.incarnation:x}",
            address=registration.address,
            role=registration.role,
            layout=registration.layout,
            labels=dict(registration.labels),
            lease_s=self._lease_s,
        )
        name = _name(registration)
        try:
            sealed = self._sealed_of(name, msgspec.json.encode(said))
        except ValueError as error:
            raise UnavailableError(f"routers would refuse this registration: {error}") from error
        lease_ms = round(self._lease_s * 1000)
        taken = await self._run("register", name, sealed, lease_ms, MOST_REGISTRATIONS)
        if taken != 1:
            raise UnavailableError(f"Redis holds {MOST_REGISTRATIONS} registrations already")

    async def withdraw(self, registration: Registration) -> None:
        """Gives the lease back.

        Raises:
            UnavailableError: Redis gave no answer: the lease ends by itself.
        """
        await self._run("withdraw", _name(registration))

    async def registrations(self) -> Registered:
        """All that hold now.

        Raises:
            UnavailableError: Redis gave no answer, or one that cannot be right.
        """
        malformed, *listed = _entries(await self._run("list", MAX_NAME_BYTES, MAX_SEALED_BYTES))
        faults = ["malformed"] * malformed
        opened, foreign = dict[bytes, _Opened](), list[bytes]()
        for number, (name, sealed) in enumerate(zip(listed[::2], listed[1::2], strict=True), 1):
            try:
                known = self._opened.get(name)
                if known is None or known.sealed != sealed:
                    known = self._open(name, sealed)
                self._seal.check_age(known.unsealed, known.lease_s)
                opened[name] = known
            except ValueError as error:  # SealError, and msgspec's
                faults.append(str(error) if isinstance(error, SealError) else "malformed")
                if not isinstance(error, SealTimeError):
                    foreign.append(name)
            if not number % _OPENED_AT_ONCE:
                await asyncio.sleep(0)
        self._opened = opened
        if foreign:
            await self._run("withdraw", *foreign)
        found = tuple(known.registration for known in opened.values())
        return Registered(registrations=found, faults=tuple(faults))

    def _open(self, name: bytes, sealed: bytes) -> _Opened:
        """What a process of the cluster sealed, however long ago.

        Raises:
            ValueError: None did.
        """
        if len(name) > MAX_NAME_BYTES:
            raise SealError("its name is too long")
        sealed_name = self._sealed_name(name.decode())
        unsealed = self._seal.open(sealed_name, sealed, MAX_SEALED_BYTES - HEAD_BYTES)
        said = msgspec.json.decode(unsealed.content, type=_Sealed)
        registration = Registration(
            kind=said.kind,
            identity=WorkerIdentity(
                worker_id=WorkerId(said.worker_id),
                incarnation=Incarnation(int(said.incarnation, 16)),
            ),
            address=said.address,
            role=said.role,
            layout=said.layout,
            labels=said.labels,
        )
        return _Opened(
            sealed=sealed, unsealed=unsealed, lease_s=said.lease_s, registration=registration
        )

    def _sealed_of(self, name: str, content: bytes) -> bytes:
        """What says `content`, as it was sealed before if that was lately: so that the bound which routers set to its
        age holds on.

        Raises:
            ValueError: Routers would refuse it.
        """
        own = self._own
        if own is not None and own.unsealed.content == content:
            age_ms = self._seal.now_ms() - own.unsealed.sealed_ms
            if 0 <= age_ms < 1000 * self._lease_s / 2:
                return own.sealed
        sealed = self._seal.close(self._sealed_name(name), content)
        self._own = self._open(name.encode(), sealed)
        return sealed

    def _sealed_name(self, name: str) -> str:
        return f"{self._prefix}:{name}"

    async def _run(self, what: str, *arguments: str | bytes | int) -> object:
        return await asked(self._script(keys=self._keys, args=[what, *arguments]))


def _name(registration: Registration) -> str:
    """Of the field: the starts of a process are apart, so that one which ends takes nothing from the next."""
    return f"{registration.kind}/{registration.identity}"


def _entries(reply: object) -> tuple[int, *tuple[bytes, ...]]:
    """What `list` returns.

    Raises:
        UnavailableError: This is something else.
    """
    if isinstance(reply, list) and len(reply) % 2 and isinstance(reply[0], int):
        listed = [entry for entry in reply[1:] if isinstance(entry, bytes)]
        if len(listed) == len(reply) - 1:
            return (reply[0], *listed)
    raise UnavailableError("Redis gave no answer that can be right")
