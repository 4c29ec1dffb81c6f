import pytest

from kv_transfer.fakes.backend import FakeFabric, FakeReceiver, FakeSender
from tests.kv_transfer.conformance import (
    LAYOUT,
    RECEIVER_BLOCKS,
    SENDER_BLOCKS,
    BackendConformance,
    Link,
    ShardedConformance,
)


class TestFakeBackend(BackendConformance, ShardedConformance):
    @pytest.fixture
    def link(self) -> Link:
        fabric = FakeFabric()
        source = memoryview(bytearray(LAYOUT.region_bytes(SENDER_BLOCKS)))
        target = memoryview(bytearray(LAYOUT.region_bytes(RECEIVER_BLOCKS)))
        return Link(
            sender=FakeSender(fabric, source, num_blocks=SENDER_BLOCKS),
            receiver=FakeReceiver(fabric, target, num_blocks=RECEIVER_BLOCKS),
            source=source,
            target=target,
        )
