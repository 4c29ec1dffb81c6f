"""What a shipment's own edges show that the outbox hides; its life as a whole is in `test_outbox.py`."""

import itertools
from typing import ClassVar

from baton.ids import BlockId, LayerName, XferId
from baton.layout import KvLayout
from baton.pages import PageWrite
from baton.story import StoryLog
from kv_transfer.heads import plan_link
from kv_transfer.ledger.shipment import Shipment
from kv_transfer.plan import Grant
from tests.kv_transfer.permits import permit

LAYOUT = KvLayout(
    model_fingerprint="f",
    dtype="float32",
    block_tokens=1,
    num_kv_heads=1,
    head_dim=1,
    layers=(LayerName("a"),),
)


def test_a_worker_that_has_pushed_for_weeks_still_knows_its_exports_apart():
    """Ids of pushes grow over a worker's whole life, past what 32 bits hold."""
    shipment = Shipment(
        permit(num_blocks=1), num_layers=1, push_ids=itertools.count(2**31), log=StoryLog("outbox")
    )
    grant = Grant(held_blocks=0, blocks=(BlockId(7),))
    shipment.grant(grant, plan_link(LAYOUT, LAYOUT), checksums=False)
    for source in (3, 5):
        shipment.export(
            PageWrite(xfer_id=XferId("x"), layer_index=0, first_block=0, source=(BlockId(source),))
        )
        (started,) = shipment.start()
        assert started.source == (source,)
        shipment.land(started.push_id, None)
        assert shipment.complete
        shipment.check_integrity()


class Written:
    """A layer's event."""

    event = 7

    def wait(self) -> None:
        """It has come."""


def test_a_push_knows_when_a_gpu_has_written_its_pages():
    shipment = Shipment(
        permit(num_blocks=1), num_layers=1, push_ids=itertools.count(1), log=StoryLog("outbox")
    )
    grant = Grant(held_blocks=0, blocks=(BlockId(7),))
    shipment.grant(grant, plan_link(LAYOUT, LAYOUT), checksums=False)
    ready = Written()
    shipment.export(
        PageWrite(
            xfer_id=XferId("x"), layer_index=0, first_block=0, source=(BlockId(3),), ready=ready
        )
    )
    (started,) = shipment.start()
    assert started.ready is ready


def test_stopping_waits_for_the_pushes_that_have_begun_alone():
    shipments = [
        Shipment(
            permit(num_blocks=2), num_layers=1, push_ids=itertools.count(1), log=StoryLog("outbox")
        )
        for _ in range(2)
    ]
    started: list[PageWrite] = []
    for shipment in shipments:
        grant = Grant(held_blocks=0, blocks=(BlockId(7), BlockId(8)))
        shipment.grant(grant, plan_link(LAYOUT, LAYOUT), checksums=False)
        for block in range(2):
            source = (BlockId(3 + block),)
            shipment.export(
                PageWrite(xfer_id=XferId("x"), layer_index=0, first_block=block, source=source)
            )
        started += shipment.start()
    begins, waits, other, _ = started
    assert begins.begun is not None
    assert other.begun is not None
    assert begins.begun.begin(begins.push_id)
    shipments[0].stop()
    assert not begins.begun.begin(waits.push_id)
    assert [shipments[0].is_outstanding(push.push_id) for push in (begins, waits)] == [True, False]
    shipments[0].check_integrity()
    assert other.begun.begin(other.push_id)
    shipments[0].drop(begins.push_id)
    assert not shipments[0].outstanding


def test_of_a_prompt_that_was_preempted_twice_the_last_pages_land_last():
    """The first push is slow; the export after it waits for that, and has pages that the third has not replaced yet."""
    shipment = Shipment(
        permit(num_blocks=6), num_layers=1, push_ids=itertools.count(1), log=StoryLog("outbox")
    )
    grant = Grant(held_blocks=0, blocks=tuple(map(BlockId, range(6))))
    shipment.grant(grant, plan_link(LAYOUT, LAYOUT), checksums=False)
    under_way: list[PageWrite] = []
    arrived: dict[int, int] = {}

    def export(first: int, *source: int) -> None:
        pages = tuple(map(BlockId, source))
        shipment.export(
            PageWrite(xfer_id=XferId("x"), layer_index=0, first_block=first, source=pages)
        )
        under_way.extend(shipment.start())

    def land(push: PageWrite) -> None:
        under_way.remove(push)
        arrived.update(zip(push.target, push.source, strict=True))
        shipment.land(push.push_id, None)
        under_way.extend(shipment.start())

    export(0, 10, 11)
    (slow,) = under_way
    export(0, 20, 21, 22, 23, 24, 25)
    export(0, 30, 31)
    export(2, 32, 33)
    for push in [push for push in under_way if push is not slow]:
        land(push)
    land(slow)
    export(4, 34, 35)
    while under_way:
        land(under_way[0])
    shipment.check_integrity()
    assert shipment.complete
    assert arrived == {0: 30, 1: 31, 2: 32, 3: 33, 4: 34, 5: 35}


class CountedWrite(PageWrite):
    """Counts how often it is held against others."""

    looks: ClassVar[int] = 0

    @property
    def end_block(self) -> int:
        CountedWrite.looks += 1
        return super().end_block


def test_of_pages_that_are_granted_late_each_push_begins_without_a_look_at_all_others():
    """A long prompt that was computed in small chunks, in many layers: its worker does nothing else meanwhile."""
    chunks = 1000
    shipment = Shipment(
        permit(num_blocks=chunks),
        num_layers=1,
        push_ids=itertools.count(1),
        log=StoryLog("outbox"),
    )
    for chunk in range(chunks):
        shipment.export(
            CountedWrite(
                xfer_id=XferId("x"), layer_index=0, first_block=chunk, source=(BlockId(chunk),)
            )
        )
    grant = Grant(held_blocks=0, blocks=tuple(map(BlockId, range(chunks))))
    shipment.grant(grant, plan_link(LAYOUT, LAYOUT), checksums=False)
    CountedWrite.looks = 0
    assert len(shipment.start()) == chunks
    assert CountedWrite.looks < 10 * chunks
