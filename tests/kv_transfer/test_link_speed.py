import pytest

from baton.errors import TransferError
from baton.ids import BlockId
from kv_transfer.fakes.backend import FakeFabric, FakeReceiver, FakeSender
from kv_transfer.heads import plan_link
from kv_transfer.session.link_speed import LinkSpeed, MeasuredWriter, probe_link
from tests.kv_transfer.conformance import (
    LAYOUT,
    RECEIVER_BLOCKS,
    SENDER_BLOCKS,
    BackendConformance,
    Outcome,
    ShardedConformance,
    push,
)
from tests.kv_transfer.conformance import Link as Both


class MeasuredSender:
    """Measures as a session does."""

    def __init__(self, sender: FakeSender) -> None:
        self._sender = sender

    def connect(self, handle, layout, peer=None, lease=None) -> MeasuredWriter:
        plan = plan_link(layout, layout if peer is None else peer)
        return MeasuredWriter(
            self._sender.connect(handle, layout, peer, lease), LinkSpeed(backend="f"), plan
        )


class TestMeasuredFake(BackendConformance, ShardedConformance):
    @pytest.fixture
    def link(self) -> Both:
        fabric = FakeFabric()
        source = memoryview(bytearray(LAYOUT.region_bytes(SENDER_BLOCKS)))
        target = memoryview(bytearray(LAYOUT.region_bytes(RECEIVER_BLOCKS)))
        fake = FakeSender(fabric, source, num_blocks=SENDER_BLOCKS)
        return Both(
            sender=MeasuredSender(fake),
            receiver=FakeReceiver(fabric, target, num_blocks=RECEIVER_BLOCKS),
            source=source,
            target=target,
        )

    @pytest.fixture
    def measured(self, link: Both) -> MeasuredWriter:
        writer = link.sender.connect(link.receiver.handle(), LAYOUT)
        assert isinstance(writer, MeasuredWriter)
        return writer

    def test_the_rate_is_known_once_something_has_landed(self, measured: MeasuredWriter):
        outcome = Outcome()
        measured.push(push(0, [SENDER_BLOCKS], [0]), outcome.done)
        assert isinstance(outcome.until_done()[0], TransferError)
        assert measured.speed.bytes_per_second == 0
        measured.push(push(0, [1], [1]), outcome.done)
        assert measured.speed.bytes_per_second > 0

    def test_a_trial_writes_the_spare_page_and_no_other(self, link: Both, measured: MeasuredWriter):
        link.source[:] = b"s" * len(link.source)
        plan = plan_link(LAYOUT, LAYOUT)
        probe_link(measured, plan, source=BlockId(3), target=BlockId(RECEIVER_BLOCKS - 1))
        begin = (RECEIVER_BLOCKS - 1) * LAYOUT.page_layer_bytes
        end = begin + LAYOUT.page_layer_bytes
        assert bytes(link.target[begin:end]) == b"s" * LAYOUT.page_layer_bytes
        assert not any(link.target[:begin])
        assert not any(link.target[end:])
        assert measured.speed.latency_s > 0
        assert measured.speed.bytes_per_second > 0

    def test_a_way_that_carries_nothing_fails_its_trial(self, link: Both):
        held = FakeSender(FakeFabric(), link.source, num_blocks=SENDER_BLOCKS, held=True)
        link.receiver = FakeReceiver(held.fabric, link.target, num_blocks=RECEIVER_BLOCKS)
        writer = MeasuredSender(held).connect(link.receiver.handle(), LAYOUT)
        plan = plan_link(LAYOUT, LAYOUT)
        with pytest.raises(TransferError, match="in time"):
            probe_link(writer, plan, source=BlockId(0), target=BlockId(0), timeout_s=0.01)


def test_time_spent_behind_other_pushes_does_not_count():
    link = LinkSpeed(backend="x")
    link.landed(1000, queued_s=0.0, done_s=1.0)
    link.landed(1000, queued_s=0.0, done_s=2.0)
    assert link.bytes_per_second == pytest.approx(1000)


def test_a_link_that_slows_down_is_seen_after_a_few_pushes():
    link = LinkSpeed(backend="x")
    for at in range(20):
        link.landed(1000, queued_s=at, done_s=at + 1.0)
    for at in range(100, 300, 10):
        link.landed(1000, queued_s=at, done_s=at + 10.0)
    assert link.bytes_per_second < 120


def test_idle_time_does_not_count():
    link = LinkSpeed(backend="x")
    link.landed(1000, queued_s=0.0, done_s=1.0)
    link.landed(1000, queued_s=500.0, done_s=501.0)
    assert link.bytes_per_second == pytest.approx(1000)
