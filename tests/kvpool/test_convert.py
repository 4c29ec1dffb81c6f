"""What nodes say to each other: sealed, and believed only as far as it fits."""

import pytest

from baton.errors import TicketError, TransferError
from baton.ids import BlockKey
from baton.rpc.v1 import common_pb2
from baton.rpc.v1 import pool_pb2 as pb
from kvpool.convert import incoming_from_proto, incoming_to_proto
from kvpool.messages import HeldBlock, Owner, Stored, Tier
from kvpool.peers.client import PeerSeal

HERE, STRANGER = PeerSeal(b"c" * 32), PeerSeal(b"s" * 32)
ASKED = pb.PeerRequest(take=pb.TakeReplica(keys=b"k" * 16))


def test_what_a_node_of_the_cluster_seals_the_others_open() -> None:
    asked = HERE.seal(ASKED)
    assert HERE.open(asked) == ASKED
    reply = pb.PeerReply(coming=pb.BlocksComing(held=3))
    assert HERE.open_reply(HERE.seal_reply(reply, asked), asked) == reply


def test_what_was_altered_or_sealed_by_a_stranger_is_refused() -> None:
    signed = HERE.seal(ASKED)
    altered = common_pb2.Signed(content=signed.content[:-1] + b"x", mac=signed.mac)
    for wrong in (altered, STRANGER.seal(ASKED), common_pb2.Signed(content=signed.content)):
        with pytest.raises(TicketError):
            HERE.open(wrong)


def test_an_answer_fits_its_own_question_only_and_is_none_itself() -> None:
    asked = HERE.seal(ASKED)
    other = HERE.seal(pb.PeerRequest(take=pb.TakeReplica(keys=b"o" * 16)))
    answer = HERE.seal_reply(pb.PeerReply(), other)
    for wrong in (answer, asked):
        with pytest.raises(TicketError):
            HERE.open_reply(wrong, asked)
    with pytest.raises(TicketError):
        HERE.open(answer)


def coming(**changes: object) -> pb.BlocksComing:
    owners = [Owner(tenant=name, scope="", model="") for name in ("anna", "bert")]
    names = [BlockKey(name * 16) for name in (b"1", b"2")]
    held = [HeldBlock(key=key, slot=0, epoch=1, checksums=b"s" * 16) for key in names]
    stored = [
        Stored(key=key, owner=owner, size_bytes=64, tier=Tier.DRAM, epoch=1)
        for key, owner in zip(names, owners, strict=True)
    ]
    message = incoming_to_proto(held, stored)
    for name, value in changes.items():
        setattr(message, name, value)
    return message


def test_owners_and_checksums_cross_as_they_are() -> None:
    read = incoming_from_proto(coming(), num_blocks=2, slot_bytes=64)
    assert [owner.tenant for owner in read.owners] == ["anna", "bert"]
    assert read.checksums == (b"s" * 16, b"s" * 16)


@pytest.mark.parametrize("size", [0, 63, 65, 1 << 40])
def test_a_size_that_cannot_be_is_refused(size: int) -> None:
    with pytest.raises(TransferError):
        incoming_from_proto(coming(block_bytes=size), num_blocks=2, slot_bytes=64)


def test_other_numbers_of_blocks_owners_or_checksums_are_refused() -> None:
    fewer, nobodys, ragged = coming(), coming(), coming()
    del fewer.blocks[1]
    nobodys.blocks[0].owner = 2
    ragged.blocks[0].checksums = b"s" * 9
    for wrong in (fewer, nobodys, ragged, pb.BlocksComing()):
        with pytest.raises(TransferError):
            incoming_from_proto(wrong, num_blocks=2, slot_bytes=64)
