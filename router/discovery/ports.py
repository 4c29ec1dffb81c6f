"""What the router asks of discovery: where to ask for workers and pool nodes. What answers there tells what it is."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """One address at which a process may be.

    Attributes:
        address: Of its gRPC services.
        source: What named it: a setting, a name in DNS, Redis.
        registered_as: What a registration says is there, for operators; empty where an address is all that is known.
        labels: A registration's.
    """

    address: str
    source: str
    registered_as: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What one look found.

    Attributes:
        workers: Where workers may be.
        pool_nodes: Where nodes of the pool may be.
        faults: What gave no answer, a few words each. What it named before stands among the sightings still.
    """

    workers: tuple[Sighting, ...] = ()
    pool_nodes: tuple[Sighting, ...] = ()
    faults: tuple[str, ...] = ()


class Discovery(Protocol):
    """Names the addresses of a cluster's processes."""

    period_s: float
    """So often it is to be asked."""

    async def look(self) -> Look:
        """All that is known now; returns within seconds, whatever gives no answer."""


class Followers(Protocol):
    """Processes of one kind, which are asked at the addresses that were sighted."""

    def follow(self, sightings: Collection[Sighting]) -> None:
        """These were sighted, and no others."""
