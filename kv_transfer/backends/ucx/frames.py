"""The frames in which the backend `ucx` carries pages: a head, then as a message of its own the rows' bytes,
back to back.

    head   magic version │ number │ layer offset row_bytes num_pages │ page ids …
    body   row 0 │ row 1 │ …

A row is `row_bytes` of one page of one layer, from `offset` on. Nothing in a head is believed: the receiver compares
every number with its own arena, and with the length of the body, before a byte of the body is received.
The body goes from page to page.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from baton.errors import TransferError
from baton.layout import KvLayout
from baton.pages import PageWrite
from kv_transfer.backends.ucx.ucp import Places
from kv_transfer.heads import LinkPlan
from kv_transfer.memory.pages import Pages
from kv_transfer.plan import check_pages

MAX_PAYLOAD_BYTES = 32 << 20
"""Of one body. Bodies on their way share the wire and end at about the same time, so each window has a gap at its end:
it should carry much more than a round trip's worth.
"""
MAX_PAGES = 2000
"""Of one frame. Its head is then smaller than the pieces in which any transport sends."""
_MAGIC = b"BUCX"
_VERSION = 2
_HEADER = struct.Struct("<4sB3xQIIII")
MAX_HEAD_BYTES = _HEADER.size + MAX_PAGES * 4

Buffer = npt.NDArray[np.uint8]
PageIds = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True, kw_only=True)
class UcxFrame:
    """What one frame carries.

    Attributes:
        layer_index: Into the receiver's layers.
        target_offset: Of the rows' first byte in a page of the receiver.
        row_bytes: Of each row.
        target: The receiver's pages.
        source_layer: The sender's layer; like the next two not sent.
        source_offset: Of the rows' first byte in a page of the sender.
        source: The sender's pages.
    """

    layer_index: int
    target_offset: int
    row_bytes: int
    target: PageIds
    source_layer: int
    source_offset: int
    source: PageIds


def frames_of(
    write: PageWrite,
    source: list[Pages],
    plan: LinkPlan,
    *,
    target_blocks: int,
    payload_bytes: int = MAX_PAYLOAD_BYTES,
) -> Iterator[UcxFrame]:
    """Cuts a push into frames; checks it whole before the first of them is given.

    Raises:
        TransferError: It names a layer or a page that one of the two has not got.
    """
    if len(write.source) != len(write.target):
        raise TransferError(f"{len(write.source)} pages for {len(write.target)}")
    pages = _Pages(
        layer_index=plan.target_layer(write.layer_index),
        source_layer=write.layer_index,
        source=check_pages(write.source, len(source[write.layer_index])).astype(np.uint32),
        target=check_pages(write.target, target_blocks).astype(np.uint32),
    )
    return _cut(pages, plan, payload_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pages:
    """A push whose pages are known to be there; fields as in `Frame`."""

    layer_index: int
    source_layer: int
    source: PageIds
    target: PageIds


def _cut(pages: _Pages, plan: LinkPlan, payload_bytes: int) -> Iterator[UcxFrame]:
    for part in plan.slices:
        for skip in range(0, part.length, payload_bytes):
            row_bytes = min(part.length - skip, payload_bytes)
            step = min(payload_bytes // row_bytes, MAX_PAGES)
            for first in range(0, len(pages.source), step):
                yield UcxFrame(
                    layer_index=pages.layer_index,
                    target_offset=part.target_offset + skip,
                    row_bytes=row_bytes,
                    target=pages.target[first : first + step],
                    source_layer=pages.source_layer,
                    source_offset=part.source_offset + skip,
                    source=pages.source[first : first + step],
                )


def head_of(frame: UcxFrame, number: int) -> Buffer:
    """What is sent ahead of a frame's rows."""
    header = _HEADER.pack(
        _MAGIC,
        _VERSION,
        number,
        frame.layer_index,
        frame.target_offset,
        frame.row_bytes,
        len(frame.target),
    )
    return np.frombuffer(header + frame.target.tobytes(), np.uint8)


def rows_of(frame: UcxFrame, source: list[Pages]) -> Places:
    """Where a frame's rows lie in the sender's arena."""
    layer = source[frame.source_layer]
    return _places(layer, frame.source_offset, frame.row_bytes, frame.source)


@dataclass(frozen=True, slots=True, kw_only=True)
class Landing:
    """A frame that may land.

    Attributes:
        number: Its own.
        places: Of its rows in the receiver's arena.
    """

    number: int
    places: Places


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadReader:
    """Says where in the local arena frames belong."""

    layout: KvLayout
    num_blocks: int
    arena: list[Pages]

    def read(self, head: Buffer, body_bytes: int) -> Landing:
        """Where a body of so many bytes goes.

        Raises:
            TransferError: The head is malformed, leads outside the arena, or is not that of the body.
        """
        if len(head) < _HEADER.size:
            raise TransferError(f"a head of {len(head)} bytes")
        magic, version, number, layer, offset, row_bytes, count = _HEADER.unpack_from(head.data)
        if magic != _MAGIC or version != _VERSION:
            raise TransferError(f"not a frame of version {_VERSION}")
        if not 0 < count <= MAX_PAGES or len(head) != _HEADER.size + 4 * count:
            raise TransferError(f"{count} pages in a head of {len(head)} bytes")
        if not 0 < row_bytes * count == body_bytes:
            raise TransferError(f"{count} rows of {row_bytes} bytes in a body of {body_bytes}")
        self._check_place(layer, offset, row_bytes)
        ids = head[_HEADER.size :].view(np.uint32)
        if int(ids.max()) >= self.num_blocks:
            raise TransferError(f"page {int(ids.max())} of a region of {self.num_blocks}")
        places = _places(self.arena[layer], offset, row_bytes, ids)
        return Landing(number=number, places=places)

    def _check_place(self, layer: int, offset: int, row_bytes: int) -> None:
        if layer >= len(self.arena):
            raise TransferError(f"layer {layer} of {len(self.arena)}")
        if offset + row_bytes > self.layout.page_layer_bytes:
            raise TransferError(f"bytes {offset} to {offset + row_bytes} of a page")


def _places(layer: Pages, offset: int, row_bytes: int, ids: PageIds) -> Places:
    places = np.empty((len(ids), 2), np.uint64)
    places[:, 0] = layer.ctypes.data + offset + ids.astype(np.uint64) * np.uint64(layer.strides[0])
    places[:, 1] = row_bytes
    return places
