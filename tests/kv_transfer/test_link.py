import pytest

from baton.errors import TransferError
from kv_transfer.fake import FakeFabric, FakeReceiver, FakeSender
from kv_transfer.link import Link, MeasuredSender
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


class TestMeasuredFake(BackendConformance, ShardedConformance):
    @pytest.fixture
    def link(self) -> Both:
        fabric = FakeFabric()
        source = memoryview(bytearray(LAYOUT.region_bytes(SENDER_BLOCKS)))
        target = memoryview(bytearray(LAYOUT.region_bytes(RECEIVER_BLOCKS)))
        fake = FakeSender(fabric, source, num_blocks=SENDER_BLOCKS)
        return Both(
            sender=MeasuredSender("fake", fake),
            receiver=FakeReceiver(fabric, target, num_blocks=RECEIVER_BLOCKS),
            source=source,
            target=target,
        )

    def test_the_rate_is_known_while_the_link_is_open(self, link: Both):
        sender = link.sender
        assert isinstance(sender, MeasuredSender)
        assert sender.bytes_per_second() == 0
        writer = sender.connect(link.receiver.handle(), LAYOUT)
        outcome = Outcome()
        writer.push(push(0, [SENDER_BLOCKS], [0]), outcome.done)
        assert isinstance(outcome.wait()[0], TransferError)
        assert sender.bytes_per_second() == 0
        writer.push(push(0, [1], [1]), outcome.done)
        assert sender.bytes_per_second() > 0
        writer.close()
        assert sender.bytes_per_second() == 0


def test_time_spent_behind_other_pushes_does_not_count():
    link = Link(backend="x")
    link.landed(1000, queued_s=0.0, done_s=1.0)
    link.landed(1000, queued_s=0.0, done_s=2.0)
    assert link.bytes_per_second == pytest.approx(1000)


def test_a_link_that_slows_down_is_seen_after_a_few_pushes():
    link = Link(backend="x")
    for at in range(20):
        link.landed(1000, queued_s=at, done_s=at + 1.0)
    for at in range(100, 300, 10):
        link.landed(1000, queued_s=at, done_s=at + 10.0)
    assert link.bytes_per_second < 120


def test_idle_time_does_not_count():
    link = Link(backend="x")
    link.landed(1000, queued_s=0.0, done_s=1.0)
    link.landed(1000, queued_s=500.0, done_s=501.0)
    assert link.bytes_per_second == pytest.approx(1000)
