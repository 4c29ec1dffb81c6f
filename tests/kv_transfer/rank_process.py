"""One rank of a sharded worker in a process of its own: does over its standard streams what the parent asks of it."""

import base64
import json
import sys
from typing import Any

from baton.errors import TransferError
from baton.ids import BlockId, LayerName, XferId
from baton.layout import KvLayout
from baton.pages import PageWrite
from kv_transfer.backends.shm import BACKEND, ShmReceiver, ShmSender
from kv_transfer.memory.pages import layer_pages
from kv_transfer.memory.shared_region import SharedRegion
from kv_transfer.ports import KvWriter, RegionHandle
from tests.kv_transfer.conformance import Outcome
from tests.kv_transfer.sharding import spread, truth

UNTOUCHED = 0xEE


class Rank:
    """Its memory, and its half of the links."""

    def __init__(self) -> None:
        self.receiver: ShmReceiver | None = None
        self.writers: list[tuple[KvWriter, KvLayout]] = []

    def shape(self, asked: dict[str, Any]) -> None:
        """Takes a place in a shape: fresh memory, no links."""
        self.layout, self.num_blocks = layout_of(asked["layout"]), asked["num_blocks"]
        self.region = SharedRegion.create(self.layout.region_bytes(self.num_blocks))
        self.region.memoryview[:] = bytes([UNTOUCHED]) * len(self.region.memoryview)

    def compute(self, asked: dict[str, Any]) -> None:
        """Holds the KV of prompt blocks 0, 1, .. in the named pages, as if it had computed its share of it."""
        layers = layer_pages(self.region.memoryview, self.layout, self.num_blocks)
        for name, pages in zip(self.layout.layers, layers, strict=True):
            pages[asked["pages"]] = truth(name, list(range(len(asked["pages"]))), self.layout)

    def handle(self, asked: dict[str, Any]) -> str:
        """Admits one sender."""
        if self.receiver is None:
            self.receiver = ShmReceiver(self.region, path=asked["path"], num_blocks=self.num_blocks)
        return base64.b64encode(self.receiver.handle().opaque).decode()

    def connect(self, asked: dict[str, Any]) -> None:
        """Opens the way into one receiver."""
        there = layout_of(asked["layout"])
        opaque = base64.b64decode(asked["handle"])
        handle = RegionHandle(backend=BACKEND, opaque=opaque, num_blocks=asked["num_blocks"])
        sender = ShmSender(self.region.memoryview, num_blocks=self.num_blocks)
        self.writers.append((sender.connect(handle, self.layout, there), there))

    def push(self, asked: dict[str, Any]) -> list[str]:
        """Writes every layer that a receiver has into it, into all receivers; answers what went wrong."""
        outcome, count = Outcome(), 0
        for writer, there in self.writers:
            for index, name in enumerate(self.layout.layers):
                if name in there.layers:
                    writer.push(pages_of(asked, index), outcome.done)
                    count += 1
        return [error.message for error in outcome.until_done(count) if error is not None]

    def read(self, asked: dict[str, Any]) -> str:
        """All its memory."""
        return base64.b64encode(self.region.memoryview).decode()

    def leave(self, asked: dict[str, Any]) -> None:
        """Ends the links and lets its memory go."""
        for writer, _ in self.writers:
            writer.close()
        self.writers.clear()
        if self.receiver is not None:
            self.receiver.close()
            self.receiver = None
        self.region.close()


def layout_of(place: list[Any]) -> KvLayout:
    """The layout of a place in a shape: total heads, ranks, which of them, layers."""
    total, tp_size, rank, layers = place
    found = spread(total, tp_size, layers=tuple(map(LayerName, layers)))
    assert found is not None
    return found[int(rank)]


def pages_of(asked: dict[str, Any], layer_index: int) -> PageWrite:
    """A push of one layer of all pages."""
    return PageWrite(
        xfer_id=XferId("x"),
        layer_index=layer_index,
        source=tuple(map(BlockId, asked["source"])),
        target=tuple(map(BlockId, asked["target"])),
    )


def main() -> None:
    rank = Rank()
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            answer = {"answer": getattr(rank, asked["do"])(asked)}
        except TransferError as error:
            answer = {"error": error.message}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
