"""The frames in which the backend `ucx` carries pages: a header, the pages' numbers, then their bytes.

    magic version │ number │ layer offset row_bytes num_pages │ page ids … │ pad to 64 │ row 0 │ row 1 │ …

A row is `row_bytes` of one page of one layer, from `offset` on. Nothing in a frame is believed: the receiver compares every
number with its own arena before a byte is copied.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from baton.errors import TransferError
from baton.layout import KvLayout
from kv_transfer.heads import LinkPlan
from kv_transfer.page_copy import Pages
from kv_transfer.plan import check_pages
from kv_transfer.ports import Push

MAX_PAYLOAD_BYTES = 1 << 20
"""A frame should stay in the processor's cache between being filled and being sent."""
MAX_PAGES = 4096
_MAGIC = b"BUCX"
_VERSION = 1
_HEADER = struct.Struct("<4sB3xQIIII")
_ALIGN = 64
MAX_FRAME_BYTES = _HEADER.size + MAX_PAGES * 4 + _ALIGN + MAX_PAYLOAD_BYTES

Buffer = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
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
    target: npt.NDArray[np.uint32]
    source_layer: int
    source_offset: int
    source: npt.NDArray[np.uint32]


def frames_of(
    push: Push, source: list[Pages], plan: LinkPlan, *, target_blocks: int
) -> Iterator[Frame]:
    """Cuts a push into frames; checks it whole before the first of them is given.

    Raises:
        TransferError: It names a layer or a page that one of the two has not got.
    """
    if len(push.source) != len(push.target):
        raise TransferError(f"{len(push.source)} pages for {len(push.target)}")
    layer_index = plan.target_layer(push.layer_index)
    check_pages(push.source, len(source[push.layer_index]))
    check_pages(push.target, target_blocks)
    return _cut(push, layer_index, plan)


def _cut(push: Push, layer_index: int, plan: LinkPlan) -> Iterator[Frame]:
    here, there = np.array(push.source, np.uint32), np.array(push.target, np.uint32)
    for part in plan.slices:
        for skip in range(0, part.length, MAX_PAYLOAD_BYTES):
            row_bytes = min(part.length - skip, MAX_PAYLOAD_BYTES)
            step = min(MAX_PAYLOAD_BYTES // row_bytes, MAX_PAGES)
            for first in range(0, len(here), step):
                yield Frame(
                    layer_index=layer_index,
                    target_offset=part.target_offset + skip,
                    row_bytes=row_bytes,
                    target=there[first : first + step],
                    source_layer=push.layer_index,
                    source_offset=part.source_offset + skip,
                    source=here[first : first + step],
                )


def write_frame(frame: Frame, number: int, source: list[Pages], buffer: Buffer) -> int:
    """Fills `buffer` with the frame, its rows taken from the local arena; gives its length."""
    count = len(frame.target)
    _HEADER.pack_into(
        buffer.data,
        0,
        _MAGIC,
        _VERSION,
        number,
        frame.layer_index,
        frame.target_offset,
        frame.row_bytes,
        count,
    )
    ids_end = _HEADER.size + 4 * count
    buffer[_HEADER.size : ids_end] = frame.target.view(np.uint8)
    begin = _payload_offset(count)
    end = begin + count * frame.row_bytes
    rows = buffer[begin:end].reshape(count, frame.row_bytes)
    _gather(source[frame.source_layer], frame, rows)
    return end


def _gather(layer: Pages, frame: Frame, rows: Pages) -> None:
    if frame.row_bytes == layer.shape[1]:
        np.take(layer, frame.source, axis=0, out=rows, mode="clip")  # unbuffered; checked above
        return
    part = layer[:, frame.source_offset : frame.source_offset + frame.row_bytes]
    for row, page in zip(rows, frame.source.tolist(), strict=True):
        row[:] = part[page]


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameReader:
    """Takes frames apart into the local arena."""

    layout: KvLayout
    num_blocks: int
    arena: list[Pages]

    def take(self, frame: Buffer) -> int:
        """Copies a frame's rows to where they belong; gives its number.

        Raises:
            TransferError: It is malformed or leads outside the arena; nothing is written then.
        """
        if len(frame) < _HEADER.size:
            raise TransferError(f"a frame of {len(frame)} bytes")
        magic, version, number, layer, offset, row_bytes, count = _HEADER.unpack_from(frame.data)
        if magic != _MAGIC or version != _VERSION:
            raise TransferError(f"not a frame of version {_VERSION}")
        begin = _payload_offset(count)
        if not 0 < count <= MAX_PAGES or len(frame) != begin + count * row_bytes:
            raise TransferError(f"{count} rows of {row_bytes} bytes in a frame of {len(frame)}")
        self._check_place(layer, offset, row_bytes)
        ids = frame[_HEADER.size : _HEADER.size + 4 * count].view(np.uint32)
        if int(ids.max()) >= self.num_blocks:
            raise TransferError(f"page {int(ids.max())} of a region of {self.num_blocks}")
        self._scatter(layer, offset, ids, frame[begin:].reshape(count, row_bytes))
        return int(number)

    def _check_place(self, layer: int, offset: int, row_bytes: int) -> None:
        if layer >= len(self.arena):
            raise TransferError(f"layer {layer} of {len(self.arena)}")
        if offset + row_bytes > self.layout.page_layer_bytes:
            raise TransferError(f"bytes {offset} to {offset + row_bytes} of a page")

    def _scatter(self, layer: int, offset: int, ids: npt.NDArray[np.uint32], rows: Pages) -> None:
        width = rows.shape[1]
        target = self.arena[layer][:, offset : offset + width]
        for page, row in zip(ids.tolist(), rows, strict=True):
            target[page] = row


def _payload_offset(num_pages: int) -> int:
    return -(-(_HEADER.size + 4 * num_pages) // _ALIGN) * _ALIGN
