"""The ranks of a worker whose model vLLM spreads over processes (`tensor_parallel_size`): what the worker's process and
theirs tell each other beside what vLLM itself sends.

vLLM's scheduler stays in the worker's process, and with it everything that decides about pages. A rank has its heads'
slice of every page, in memory that the worker made for it: whoever sends or receives pages needs no rank for that.

    a rank (its connector's worker half)                    the worker
    allocates its KV cache      ── "allocate", size ──▶      makes the memory
                                ◀── its descriptor ──
    has its views of the cache  ── "pages" | "misfit" ──▶    `layouts`
    has computed a layer        ── "layer", step, index ──▶  tells the sink, once every rank has

There is one socket per rank, made before vLLM spawns the ranks, and handed to them as multiprocessing hands sockets to
what it spawns: with the connector's configuration. Nothing of it has a name, so that nothing is left of it whatever is
killed; and when a rank's process ends, its socket does.
"""

import ctypes
import json
import mmap
import os
import selectors
import socket
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from baton.errors import ConfigError, InvariantError, OutOfMemoryError
from baton.ids import LayerName
from baton.layout import KvLayout
from baton_engine.ports import ArenaBytes, LayerReady, LayerSink, PageExport
from baton_vllm.hand_offs import VllmHandOffs
from baton_vllm.ports import RankMemory

_PACKET_BYTES = 1 << 17
"""Longer than what a rank tells of its pages, shorter than what a socket takes at once."""
_GIVEN = b"given"


@dataclass(slots=True, eq=False)
class _Step:
    """Pages that a step completes, and which ranks have computed each layer of it."""

    exports: Sequence[PageExport]
    computed: defaultdict[int, set[int]] = field(default_factory=lambda: defaultdict(set))


class WorkerRanks:
    """The worker's end of all its ranks' sockets. Pickled by what vLLM spawns, it is `RankEnds` over there.

    Args:
        memories: Of each rank's pages.
        hand_offs: What vLLM's scheduler and the host share; told of the ends of steps from here.
        sink: Told of pages that are to be sent, on a thread of its own.

    Attributes:
        hand_offs: The same.
    """

    def __init__(
        self, memories: Sequence[RankMemory], hand_offs: VllmHandOffs, sink: LayerSink
    ) -> None:
        self._memories = memories
        self.hand_offs = hand_offs
        self._sink = sink
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in memories]
        self._sockets = [own for own, _ in pairs]
        self._ends = [end for _, end in pairs]
        self._told = threading.Condition()
        self._layouts: dict[int, KvLayout] = {}
        self._misfit: str | None = None
        self._fingerprint = ""
        self._num_pages = 0
        self._steps: dict[int, _Step] = {}
        self._number = 0
        self._is_open = False
        self._lost: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._listen, name="rank-news", daemon=True)
        self._thread.start()

    def __reduce__(self) -> tuple[Any, ...]:
        """Into a rank's process go the ranks' ends alone; each takes its own there."""
        return RankEnds, (tuple(self._ends),)

    def spawned(self, lost: Callable[[], None]) -> None:
        """The ranks' processes have their ends: this one's copies would keep the sockets open when they have died.

        Args:
            lost: Called when one has ended, on a thread of its own.
        """
        self._lost = lost
        for end in self._ends:
            end.close()

    def layouts(self, total_kv_heads: int, timeout_s: float = 10.0) -> list[KvLayout]:
        """Of each rank's pages, once every rank has registered its cache. Blocks.

        Args:
            total_kv_heads: Of the model.
            timeout_s: For what the ranks have sent to arrive.

        Raises:
            ConfigError: The pages cannot be handed off; says why.
            InvariantError: A rank told nothing.
        """
        ranks = len(self._sockets)
        with self._told:
            if not self._told.wait_for(
                lambda: len(self._layouts) == ranks or self._misfit, timeout_s
            ):
                raise InvariantError("a rank did not tell how its KV cache lies")
            if self._misfit is not None:
                raise ConfigError(self._misfit)
            layouts = [
                replace(self._layouts[rank], tp_size=ranks, tp_rank=rank) for rank in range(ranks)
            ]
        if len({replace(layout, tp_rank=0) for layout in layouts}) > 1:
            raise ConfigError("the ranks' KV caches are not laid out alike")
        if layouts[0].total_kv_heads != total_kv_heads:
            # Copies of a head are computed apart, and may differ in their last bits: none of them is the page.
            raise ConfigError(
                f"{ranks} ranks hold {total_kv_heads} KV heads more than once; such pages cannot be handed off"
            )
        return layouts

    @property
    def num_pages(self) -> int:
        """Of each rank's cache."""
        return self._num_pages

    @property
    def fingerprint(self) -> str:
        """What decides the bytes of a page, as a rank has told it, whether or not pages can be handed off."""
        return self._fingerprint

    # vLLM's scheduler, and whoever steps it.

    def begin_step(self) -> tuple[int, frozenset[str], frozenset[str]]:
        """The next step is decided.

        Returns:
            What the ranks are told of it: its number where layers of it are to be told, else 0;
            and what `VllmHandOffs.after_step` is going to answer, for it is they who tell vLLM.
        """
        self._is_open = True
        sent, received = self.hand_offs.named()
        exports = self.hand_offs.exports
        if not exports:
            return 0, sent, received
        self._number += 1
        with self._told:
            self._steps[self._number] = _Step(exports)
        return self._number, sent, received

    def end_step(self) -> None:
        """vLLM has made a step, be it that it had decided none."""
        if self._is_open:
            self._is_open = False
            self.hand_offs.after_step()

    # The ranks.

    def _listen(self) -> None:
        with selectors.DefaultSelector() as selector:
            for rank, own in enumerate(self._sockets):
                selector.register(own, selectors.EVENT_READ, rank)
            while selector.get_map():
                for key, _ in selector.select():
                    own = self._sockets[key.data]
                    try:
                        packet = own.recv(_PACKET_BYTES)
                    except ConnectionError:
                        packet = b""
                    if packet:
                        self._hear(key.data, own, json.loads(packet))
                    else:
                        selector.unregister(own)
                        own.close()
                        self._lost()

    def _hear(self, rank: int, own: socket.socket, told: list[Any]) -> None:
        match told:
            case ["layer", int(step), int(layer_index)]:
                self._computed(rank, step, layer_index)
            case ["allocate", int(size_bytes)]:
                self._allocate(rank, own, size_bytes)
            case ["pages", int(num_pages), dict(fields)]:
                layers = tuple(map(LayerName, fields.pop("layers")))
                windows = tuple(fields.pop("windows"))
                with self._told:
                    layout = self._layouts[rank] = KvLayout(
                        layers=layers, windows=windows, **fields
                    )
                    self._num_pages, self._fingerprint = num_pages, layout.model_fingerprint
                    self._told.notify_all()
            case ["misfit", str(why), str(fingerprint)]:
                with self._told:
                    self._misfit, self._fingerprint = why, fingerprint
                    self._told.notify_all()

    def _allocate(self, rank: int, own: socket.socket, size_bytes: int) -> None:
        try:
            fd = self._memories[rank].allocate_shared(size_bytes)
        except OutOfMemoryError as error:
            own.send(error.message.encode())
        else:
            socket.send_fds(own, [_GIVEN], [fd])

    def _computed(self, rank: int, number: int, layer_index: int) -> None:
        """Ranks go on from layer to layer together, so that waiting for the last one delays nothing."""
        with self._told:
            step = self._steps.get(number)
            if step is None:
                return
            step.computed[layer_index].add(rank)
            if len(step.computed[layer_index]) < len(self._sockets):
                return
            layers = self._layouts[rank].layers
            if sum(map(len, step.computed.values())) == len(layers) * len(self._sockets):
                del self._steps[number]
        self._sink.save_kv_layer(LayerReady(layer_index=layer_index, exports=step.exports))


class RankEnds:
    """The ranks' ends in the process of one of them."""

    def __init__(self, ends: Sequence[socket.socket]) -> None:
        self._ends = ends

    def take(self, rank: int) -> "RankLink":
        """Its own; the others' are closed."""
        for number, end in enumerate(self._ends):
            if number != rank:
                end.close()
        return RankLink(self._ends[rank])


@dataclass(frozen=True, slots=True, kw_only=True)
class _MappedBytes:
    """Memory of the worker's (`baton_engine.ports.ArenaBytes`)."""

    address: int
    size_bytes: int
    view: memoryview
    device: int | None = None


class RankLink:
    """A rank's end (a `baton_engine.ports.ArenaAllocator`)."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def allocate(self, size_bytes: int, gpu: int | None = None) -> ArenaBytes:
        """See `ArenaAllocator`: memory that the worker makes, and maps as well.

        Raises:
            OutOfMemoryError: In the worker's words.
        """
        if gpu is not None:
            raise InvariantError("ranks hold their pages in host memory")
        self._tell("allocate", size_bytes)
        answer, fds, _, _ = socket.recv_fds(self._end, _PACKET_BYTES, 1)
        if answer != _GIVEN:
            raise OutOfMemoryError(answer.decode(), param="kv_cache_memory_bytes")
        mapping = mmap.mmap(fds[0], size_bytes, flags=mmap.MAP_SHARED)
        os.close(fds[0])
        return _MappedBytes(
            address=ctypes.addressof(ctypes.c_char.from_buffer(mapping)),
            size_bytes=size_bytes,
            view=memoryview(mapping),
        )

    def tell_pages(self, layout: KvLayout, num_pages: int) -> None:
        """Its cache is there, and laid out so."""
        self._tell("pages", num_pages, asdict(layout))

    def tell_misfit(self, why: str, fingerprint: str) -> None:
        """Its cache is there, and cannot be handed off; what decides the bytes of its pages."""
        self._tell("misfit", why, fingerprint)

    def layer_computed(self, step: int, layer_index: int) -> None:
        """Its slices of the pages that `step` completes hold the KV of one layer."""
        self._tell("layer", step, layer_index)

    def _tell(self, *words: object) -> None:
        self._end.send(json.dumps(words).encode())
