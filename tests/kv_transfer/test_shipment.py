"""What a shipment's own edges show that the outbox hides; its life as a whole is in `test_outbox.py`."""

import itertools

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
