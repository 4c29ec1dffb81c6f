"""What a node answers that is asked to take copies of another one's hot blocks."""

from types import SimpleNamespace
from typing import Any

import pytest

from baton.clock import ManualClock
from baton.rpc.hello import identity_to_proto
from baton.rpc.v1 import pool_pb2 as pb
from kv_transfer.session.handshake import SessionEndpoint
from kv_transfer.ticket import TicketOffice
from kvpool.convert import keys_to_bytes
from kvpool.messages import PutGrant
from kvpool.node.ledger import NodeLedger, NodeLimits
from kvpool.node.slab import slab_layout
from kvpool.peers.server import PeerRequestHandler
from tests.kvpool.nodes_world import ANNA, identity, keys

HERE = identity("here")
NUM_SLOTS = 8


@pytest.mark.parametrize("num_read", [0, 7, 8])
async def test_copies_are_taken_in_the_room_of_what_was_not_read_of_late(num_read: int) -> None:
    clock, ledger = ManualClock(), NodeLedger(NodeLimits(num_slots=NUM_SLOTS, slot_bytes=64), "n")
    put = ledger.reserve(keys(*range(NUM_SLOTS)), ANNA, clock.now_s())
    assert isinstance(put, PutGrant)
    assert ledger.commit(put.put_id, [bytes(8)] * NUM_SLOTS, clock.now_s()) == NUM_SLOTS
    ledger.release(ledger.lease(keys(*range(num_read)), 1.0, clock.now_s()).lease_id)
    begun = list[bool]()

    def start(*_: object, soon_s: float, only_cold: bool) -> object:
        del soon_s
        begun.append(only_cold)
        return object()

    layout, office = slab_layout(64), TicketOffice(bytes(32))
    nothing: Any = SimpleNamespace()
    store: Any = SimpleNamespace(ledger=ledger)
    fetcher: Any = SimpleNamespace(start=start)
    here = SessionEndpoint(identity=HERE, layout=layout, office=office)
    handler = PeerRequestHandler(here, store, nothing, fetcher, clock)
    take = pb.TakeReplica(keys=keys_to_bytes(keys(100)))
    request = pb.PeerRequest(asked=identity_to_proto(HERE), take=take)
    reply = await handler.answer(request)
    taken = num_read == 0
    assert begun == ([True] if taken else [])
    assert reply.HasField("failure") is not taken
