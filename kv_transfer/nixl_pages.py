"""Two arenas as NIXL (`nixl.py`) sees them: prepared lists of pages, and the writes between them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from baton.block_ids import Numbers
from baton.errors import TransferError
from baton.layout import KvLayout
from baton.telemetry.logs import get_logger
from kv_transfer.heads import HeadSlice, LinkPlan
from kv_transfer.memory import ArenaSpan
from kv_transfer.nixl_agent import memory_kind
from kv_transfer.plan import check_pages
from kv_transfer.ports import Push

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """An arena and how pages lie in it."""

    arena: ArenaSpan
    layout: KvLayout
    num_blocks: int

    def blocks(self, slices: list[tuple[int, int]]) -> npt.NDArray[np.uint64]:
        """One row per layer and (offset, length) in a page: first address, length, device, stride, count."""
        page = self.layout.page_layer_bytes
        rows = []
        for layer in range(len(self.layout.layers)):
            begin = self.arena.address + self.layout.layer_offset(layer, self.num_blocks)
            for offset, length in slices:
                rows.append((begin + offset, length, self.arena.device or 0, page, self.num_blocks))
        return np.array(rows, dtype=np.uint64)


class NixlPages:
    """Both arenas as NIXL's prepared lists of pages, and the writes between them.

    A list holds, for each layer, for each slice of a page that the pair shares, all pages; NIXL joins neighbours itself.
    """

    def __init__(
        self, agent: Any, metadata: bytes, here: Side, there: Side, plan: LinkPlan
    ) -> None:
        self._agent = agent
        self._here = here
        self._there = there
        self._plan = plan
        try:
            self._peer = agent.add_remote_agent(metadata)
            agent.make_connection(self._peer)
            self._source = agent.prep_xfer_dlist(
                "", here.blocks(_parts(plan, _source)), memory_kind(here.arena.device)
            )
            self._target = agent.prep_xfer_dlist(
                self._peer, there.blocks(_parts(plan, _target)), memory_kind(there.arena.device)
            )
        except Exception as error:
            raise TransferError(f"NIXL refuses the peer: {error!r}") from error

    def post(self, push: Push) -> tuple[Any, bool]:
        """Starts a write; gives its request and whether it is done already.

        Raises:
            TransferError: It names a layer or page that one of the two has not got; nothing is written then.
        """
        if len(push.source) != len(push.target):
            raise TransferError(f"{len(push.source)} pages for {len(push.target)}")
        target_layer = self._plan.target_layer(push.layer_index)
        source = check_pages(push.source, self._here.num_blocks)
        target = check_pages(push.target, self._there.num_blocks)
        request = self._agent.make_prepped_xfer(
            "WRITE",
            self._source,
            self._rows(push.layer_index, source, self._here.num_blocks),
            self._target,
            self._rows(target_layer, target, self._there.num_blocks),
        )
        return request, self._is_done(self._agent.transfer(request))

    def poll(self, request: Any) -> bool:
        """Whether a write is done.

        Raises:
            TransferError: It failed.
        """
        return self._is_done(self._agent.check_xfer_state(request))

    def release(self, request: Any) -> None:
        """Gives a request back; one that is still on its way is cancelled where the transport can."""
        try:
            self._agent.release_xfer_handle(request)
        except Exception as error:  # noqa: BLE001  # NIXL's errors have no base class; the agent keeps what it could not cancel
            _log.debug("NIXL keeps a request", reason=repr(error))

    def forget_peer(self) -> None:
        """Disconnects: nothing is written to the peer from here on."""
        for prepared in (self._source, self._target):
            self._agent.release_dlist_handle(prepared)
        try:
            self._agent.remove_remote_agent(self._peer)
        except Exception as error:  # noqa: BLE001  # as above; a peer that died has been removed already
            _log.debug("NIXL had forgotten a peer", reason=repr(error))

    def _rows(self, layer: int, pages: Numbers, num_blocks: int) -> npt.NDArray[np.int32]:
        """Indices into a prepared list, slice by slice."""
        parts = len(self._plan.slices)
        first = (layer * parts + np.arange(parts, dtype=np.int32)) * num_blocks
        rows: npt.NDArray[np.int32] = np.add.outer(first, pages.astype(np.int32)).ravel()
        return rows

    @staticmethod
    def _is_done(state: str) -> bool:
        if state == "ERR":
            raise TransferError("NIXL reports a failed write")
        return state == "DONE"


def _source(part: HeadSlice) -> tuple[int, int]:
    return part.source_offset, part.length


def _target(part: HeadSlice) -> tuple[int, int]:
    return part.target_offset, part.length


def _parts(plan: LinkPlan, place: Callable[[HeadSlice], tuple[int, int]]) -> list[tuple[int, int]]:
    return [place(part) for part in plan.slices]
