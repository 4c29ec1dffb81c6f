"""What the engine needs from outside, and what it offers to a service."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.ids import BlockId, SeqId
from engine.messages import Command, StepEvents


@dataclass(frozen=True, slots=True, kw_only=True)
class PageExport:
    """Pages of one prefilling sequence that this step completes (or, at the prompt's end, leaves partly filled).

    Attributes:
        seq_id: The sequence.
        first_block: Index in the sequence of the first page below.
        blocks: Pages in this engine's arena.
        last: Whether these are the last pages of the prompt.
    """

    seq_id: SeqId
    first_block: int
    blocks: tuple[BlockId, ...]
    last: bool


class LayerSink(Protocol):
    """Told when KV of a layer is complete, while the next layer computes. Must not block and must not raise."""

    def layer_ready(self, layer_index: int, exports: Sequence[PageExport]) -> None:
        """The pages of `exports` now hold their KV in layer `layer_index` (an index into `KvLayout.layers`)."""


class ArenaMemory(Protocol):
    """Gives the bytes in which the KV arenas live."""

    def allocate(self, size_bytes: int) -> memoryview:
        """Writable, zeroed, page-aligned bytes; stays valid until the process ends.

        Raises:
            OutOfMemoryError: This machine has not got them.
        """


class EnginePort(Protocol):
    """A running engine as its service sees it. Thread-safe; hosted in a thread, or one day in another process."""

    def submit(self, command: Command) -> None:
        """Queues a command; never blocks. The outcome comes as events."""

    def attach(self, owner: str, listener: Callable[[StepEvents], None]) -> None:
        """Sends the events of every sequence whose id starts with `owner` and a slash to `listener`, grouped by step.

        Called on the engine's thread: the listener only hands them over. One engine may have several owners (a hybrid
        worker's two services); load and changes of the held blocks are told to each of them.
        """

    def progress_s(self) -> float | None:
        """Seconds since the engine last made progress while it has work; None when it is idle."""

    def failure(self) -> BaseException | None:
        """What ended the engine loop, or None while it lives."""

    def close(self) -> None:
        """Ends the loop and waits for it; sequences that are left are dropped."""
