from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import TicketError
from baton.ids import BlockId, XferId
from baton.rpc.v1 import common_pb2
from baton.rpc.v1 import transfer_pb2 as pb
from kv_transfer.plan import Grant
from kv_transfer.ticket import Ticket, TicketOffice, region_digest, shown
from tests.kv_transfer.permits import OFFICE, D, permit

TICKET = Ticket(
    xfer_id=XferId("x"),
    attempt=2,
    cache_scope="tenant",
    layout_digest="digest",
    target=D,
    region=region_digest(b"handle"),
    grant=Grant(held_blocks=1, blocks=(BlockId(4), BlockId(9))),
    lease_s=5.0,
)
PERMIT = shown(permit(cache_scope="tenant"))


def refusal(read, signed: common_pb2.Signed) -> str | None:
    with pytest.raises(TicketError) as caught:
        read(signed)
    return caught.value.param


def test_what_was_signed_is_read_again():
    assert OFFICE.read_ticket(OFFICE.sign_ticket(TICKET)) == TICKET
    assert OFFICE.read_permit(PERMIT) == permit(cache_scope="tenant")
    assert OFFICE.read_permit(PERMIT).signed == PERMIT.SerializeToString()


def test_another_clusters_signature_is_refused():
    stranger = TicketOffice(b"s" * 32)
    assert refusal(stranger.read_permit, PERMIT) == "forged"
    assert refusal(stranger.read_ticket, OFFICE.sign_ticket(TICKET)) == "forged"


def test_a_permit_is_no_ticket_and_a_ticket_no_permit():
    assert refusal(OFFICE.read_ticket, PERMIT) == "forged"
    assert refusal(OFFICE.read_permit, OFFICE.sign_ticket(TICKET)) == "forged"


@given(at=st.integers(0), bit=st.integers(0, 7), cut=st.booleans())
def test_whatever_is_changed_or_cut_off_is_refused(at: int, bit: int, cut: bool):
    signed = OFFICE.sign_ticket(TICKET)
    whole = bytearray(signed.content + signed.mac)
    at %= len(whole)
    if cut:
        del whole[at:]
    else:
        whole[at] ^= 1 << bit
    split = max(len(whole) - len(signed.mac), 0)
    altered = common_pb2.Signed(content=bytes(whole[:split]), mac=bytes(whole[split:]))
    assert refusal(OFFICE.read_ticket, altered) == "forged"


@given(content=st.binary(max_size=60), mac=st.binary(max_size=40))
def test_nonsense_is_refused(content: bytes, mac: bytes):
    assert refusal(OFFICE.read_permit, common_pb2.Signed(content=content, mac=mac)) == "forged"


def test_what_is_longer_than_any_ticket_is_refused_unread():
    long = common_pb2.Signed(content=bytes(4 * 2**20 + 1), mac=bytes(32))
    assert refusal(OFFICE.read_ticket, long) == "malformed"


def test_another_version_is_refused_though_its_signature_is_right(monkeypatch):
    monkeypatch.setattr("kv_transfer.ticket.VERSION", 2)
    newer = OFFICE.sign_ticket(TICKET)
    monkeypatch.undo()
    assert refusal(OFFICE.read_ticket, newer) == "version"


def test_a_sessions_key_is_good_for_one_pair_and_one_number():
    first = OFFICE.session_key(permit().source, D, 1, "r")
    assert first != OFFICE.session_key(permit().source, D, 2, "r")
    assert first != OFFICE.session_key(D, permit().source, 1, "r")
    other = replace(D, incarnation=permit().source.incarnation)
    assert first != OFFICE.session_key(permit().source, other, 1, "r")


def test_a_ticket_carries_no_address():
    fields = {field.name for field in pb.Ticket.DESCRIPTOR.fields}
    assert not fields & {"address", "offset", "length", "size", "pointer"}
