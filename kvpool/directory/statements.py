"""What nodes write into the shared directory for others to act on: sealed with the cluster's secret, read strictly.

A node's state names an address that others connect to; what tenants have on it moves quotas; a flush makes every node
drop blocks. A state holds for its lease. A flush has the time of its making as its number and names the flush before
it, so that an old one is not carried out again (unless it may be the first of a directory that lost its memory, see
`missed_flushes`), and one that went missing is noticed.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from baton.errors import InvalidRequestError
from baton.ids import Incarnation, WorkerId, WorkerIdentity
from baton.seal import MAX_SKEW_S, Seal, SealError
from kvpool.messages import NodeState, Selection, TenantPart

MAX_STATE_BYTES, MAX_PARTS_BYTES, MAX_FLUSH_BYTES = 4096, 1 << 20, 8192
"""The longest that are read, seals included; the same stand in `record.lua`."""

_MAX_SKEW_MS = round(MAX_SKEW_S * 1000)
_MAX_CHARS = 512
_MAX_PARTS = 1024

_Name = Annotated[str, Meta(min_length=1, max_length=256)]
_Text = Annotated[str, Meta(max_length=_MAX_CHARS)]
_Number = Annotated[int, Meta(ge=0, lt=1 << 62)]


class _Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One statement; a field more or less is an error."""


class _State(_Strict, frozen=True, kw_only=True):
    """`lease_s`: for how long it holds."""

    worker_id: _Name
    incarnation: Annotated[str, Meta(pattern=r"^[0-9a-f]{1,16}$")]
    address: _Name
    failure_domain: Annotated[str, Meta(max_length=256)]
    free_bytes: _Number
    capacity_bytes: _Number
    sick: bool
    lease_s: Annotated[float, Meta(gt=0, le=86400)]


class _Parts(_Strict, frozen=True, kw_only=True):
    """Of each tenant: its name, bytes, whether it is active."""

    parts: Annotated[tuple[tuple[_Text, _Number, bool], ...], Meta(max_length=_MAX_PARTS)]
    lease_s: Annotated[float, Meta(gt=0, le=86400)]


class _Flush(_Strict, frozen=True, kw_only=True):
    """`previous`: the number of the flush before it; 0 for none."""

    tenant: _Text
    scope: _Text
    model: _Text
    previous: _Number


_Statement = TypeVar("_Statement", bound=_Strict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Flush:
    """A flush that some node of the cluster asked for.

    Attributes:
        number: Grows from each flush to the next.
        previous: Of the one before it; 0 for none.
        selection: What it covers.
    """

    number: int
    previous: int
    selection: Selection


class Statements:
    """Seals and opens. What does not open raises `ValueError` (`SealError`, or msgspec's): another wrote it,
    or it is over.

    Args:
        secret: Of the cluster.
        prefix: Of the directory: what is sealed for one is nothing in another.
    """

    def __init__(self, secret: bytes, prefix: str) -> None:
        self._prefix = prefix
        self._states = Seal(secret, "pool state")
        self._parts = Seal(secret, "pool parts")
        self._flushes = Seal(secret, "pool flush")

    def seal_state(self, state: NodeState, lease_s: float) -> bytes:
        """All but what tenants have there."""
        node = state.node
        said = _State(
            worker_id=node.worker_id,
            incarnation=f"{node.incarnation:x}",
            address=state.address,
            failure_domain=state.failure_domain,
            free_bytes=state.free_bytes,
            capacity_bytes=state.capacity_bytes,
            sick=state.sick,
            lease_s=lease_s,
        )
        return self._states.close(self._prefix, msgspec.json.encode(said))

    def open_state(self, sealed: bytes) -> NodeState:
        """What a node of the cluster says of itself."""
        opened = self._states.open(self._prefix, sealed, MAX_STATE_BYTES)
        said = msgspec.json.decode(opened.content, type=_State)
        self._states.check_age(opened, said.lease_s)
        node = WorkerIdentity(
            worker_id=WorkerId(said.worker_id), incarnation=Incarnation(int(said.incarnation, 16))
        )
        return NodeState(
            node=node,
            address=said.address,
            failure_domain=said.failure_domain,
            free_bytes=said.free_bytes,
            capacity_bytes=said.capacity_bytes,
            sick=said.sick,
        )

    def seal_parts(self, state: NodeState, lease_s: float) -> bytes:
        """What tenants have on a node; empty where none has anything.
        A tenant with a longer name than is read is not told of.
        """
        told = [part for part in state.parts if len(part.tenant) <= _MAX_CHARS]
        if not told:
            return b""
        parts = tuple((part.tenant, part.size_bytes, part.active) for part in told[:_MAX_PARTS])
        content = msgspec.json.encode(_Parts(parts=parts, lease_s=lease_s))
        return self._parts.close(self._of(state.node), content)

    def open_parts(self, state: NodeState, sealed: bytes) -> NodeState:
        """The state with what tenants have there."""
        if not sealed:
            return state
        opened = self._parts.open(self._of(state.node), sealed, MAX_PARTS_BYTES)
        said = msgspec.json.decode(opened.content, type=_Parts)
        self._parts.check_age(opened, said.lease_s)
        parts = tuple(
            TenantPart(tenant=tenant, size_bytes=size_bytes, active=active)
            for tenant, size_bytes, active in said.parts
        )
        return replace(state, parts=parts)

    def seal_flush(self, selection: Selection, previous: int) -> bytes:
        """A flush that comes after the one with the number `previous`.

        Raises:
            InvalidRequestError: A name in it is longer than any is.
        """
        for field in ("tenant", "scope", "model"):
            if len(getattr(selection, field)) > _MAX_CHARS:
                raise InvalidRequestError(f"{field}: at most {_MAX_CHARS} characters", param=field)
        said = _Flush(
            tenant=selection.tenant,
            scope=selection.scope,
            model=selection.model,
            previous=previous,
        )
        number = max(self._flushes.now_ms(), previous + 1)
        return self._flushes.close(self._prefix, msgspec.json.encode(said), number)

    def open_flush(self, sealed: bytes) -> Flush:
        """What a node of the cluster asked for."""
        opened = self._flushes.open(self._prefix, sealed, MAX_FLUSH_BYTES)
        said = msgspec.json.decode(opened.content, type=_Flush)
        if said.previous >= opened.sealed_ms:
            raise SealError("a flush before the one before it")
        selection = Selection(tenant=said.tenant, scope=said.scope, model=said.model)
        return Flush(number=opened.sealed_ms, previous=said.previous, selection=selection)

    def is_ahead(self, number: int) -> bool:
        """Whether no flush up to now can have this number."""
        return number > self._flushes.now_ms() + _MAX_SKEW_MS

    def _of(self, node: WorkerIdentity) -> str:
        return f"{self._prefix} {node.worker_id}@{node.incarnation:x}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MissedFlushes:
    """What a node has to carry out.

    Attributes:
        latest: The number of the latest flush of all.
        selections: What it has to give up, in order.
        late: Numbers of those that come after the latest that it has carried out, and are below its number.
    """

    latest: int
    selections: tuple[Selection, ...]
    late: frozenset[int] = frozenset()


def missed_flushes(
    flushes: Sequence[Flush], carried_out: int, told: Collection[int] = ()
) -> MissedFlushes:
    """What a node has missed that has carried out `carried_out`, and all flushes before that one.

    Everything, where a flush is missing between: its words were lost, or there were more than the directory remembers.

    A directory that lost its memory begins anew: the first flush names none before it. Its number is above all others
    unless clocks differ, so one that is lower by no more than they may is missed as well.

    Args:
        flushes: That the directory remembers.
        carried_out: The number of the latest one of the node; 0 for none.
        told: Late ones that the node was told of before.
    """
    by_number = {flush.number: flush for flush in flushes}
    at = max(by_number, default=0)
    latest, floor = max(at, carried_out), max(0, carried_out - _MAX_SKEW_MS)
    selections, late = list[Selection](), set[int]()
    while at != carried_out and at > floor and at not in told:
        if at < carried_out:
            late.add(at)
        if at not in by_number:
            selections = [Selection()]
            break
        selections.append(by_number[at].selection)
        at = by_number[at].previous
    return MissedFlushes(
        latest=latest, selections=tuple(reversed(selections)), late=frozenset(late)
    )
