"""What the engine needs from outside, and what it offers to a service."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from baton.errors import BatonError
from baton.generation import Prompt
from baton.ids import BlockId, BlockKey, SeqId
from baton.pages import FetchOutcome, PageFetch, PublishedPage, ReadyEvent
from baton.story import StoryEntry
from baton_engine.messages import Command, StepEvents


@dataclass(frozen=True, slots=True, kw_only=True)
class PageExport:
    """Pages of one prefilling sequence that this step completes (or, at the prompt's end, leaves partly filled).

    Attributes:
        seq_id: The sequence.
        first_block: Index in the sequence of the first page below.
        blocks: Pages in this engine's arena.
    """

    seq_id: SeqId
    first_block: int
    blocks: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerReady:
    """Pages that hold their KV in one layer: now, or once a GPU has come to `ready`.

    Attributes:
        layer_index: Index into `KvLayout.layers`.
        exports: The pages, at least one sequence's.
        ready: None where they hold it now.
    """

    layer_index: int
    exports: Sequence[PageExport]
    ready: ReadyEvent | None = None


class LayerSink(Protocol):
    """Told when KV of a layer is complete, while the next layer computes: the saving half of vLLM's KV connector, by
    page. Must not block and must not raise.
    """

    def save_kv_layer(self, layer: LayerReady) -> None:
        """A layer's pages hold their KV, or will once `layer.ready`; at least one sequence's."""


class KvSource(Protocol):
    """Where KV blocks can be loaded from instead of being computed: a pool. Thread-safe. The loading half of vLLM's KV
    connector, in its words.

    Called on the engine's thread, so nothing here waits for a network. Only `wait_for_layer_load` and `finish_load_kv`
    may block, and both only for as long as bytes are being copied on this machine. Per step: `start_load_kv`,
    `wait_for_layer_load` for every layer in order (or for the last one alone, where nothing is computed meanwhile),
    `finish_load_kv`; a step that is executed again begins its loads again.
    """

    def get_num_matched_blocks(self, seq_id: SeqId, keys: Sequence[BlockKey]) -> int:
        """How many leading blocks of the chain `keys` could be loaded now; 0 where nothing is known of the sequence."""

    def prefetch(self, seq_id: SeqId, keys: Sequence[BlockKey]) -> None:
        """The sequence was preempted and will need these blocks again; they are made ready where possible."""

    def start_load_kv(self, fetches: Sequence[PageFetch]) -> None:
        """Starts to copy what was matched, one layer of all fetches after the other.
        Does not wait and does not raise.
        """

    def wait_for_layer_load(self, layer_index: int) -> frozenset[SeqId]:
        """Waits until each fetch has that layer in its pages, verified, or has failed.

        Returns:
            Sequences whose fetch has failed, in this layer or before: what is computed for them means nothing.
        """

    def finish_load_kv(self) -> FetchOutcome:
        """Ends the fetches that were begun; those that are not complete have failed. Nothing is written to a page of
        theirs once this has returned.
        """

    def request_finished(self, seq_id: SeqId) -> None:
        """The sequence needs nothing more, or is gone. Right at any moment, also for an unknown one."""


class BlockSink(Protocol):
    """Takes pages that hold a full block from now on, to copy them elsewhere. Must not block and must not raise."""

    def put(self, pages: Sequence[PublishedPage]) -> None:
        """These were published in the last step, each after the one before it in its text. Nothing keeps them:
        read `PublishedPage.generation`.
        """


class TokenConstraint(Protocol):
    """Which tokens one sample may go on with, by the grammar of its request. Its state is a function of grammar,
    tokenizer and output tokens; owned by whoever owns the sample's sequence.
    """

    def accept(self, token: int) -> None:
        """The sample goes on with `token`. One that the grammar does not allow is a fault."""

    def fork(self) -> "TokenConstraint":
        """Another sample that has the same tokens so far."""

    def fork_for_draft(self, token: int) -> "TokenConstraint":
        """For the row behind a guessed token: the same with `token` too. Its fault is not the sample's,
        unless the text comes to it.
        """

    def begin(self, *, late: bool = False) -> None:
        """Starts to find which tokens may come next, on another thread; nothing where that is known, or is not done
        beside the caller.

        Args:
            late: No step waits for it: the engine is told once it is known (`GrammarCompiler.find_masks_beside`), also
                where it was begun before.
        """

    def finding(self, within_s: float = 0.0) -> bool:
        """Whether that was begun and is not known yet. If `late` the answer is there at once; otherwise it waits so
        long. Until it is known, nothing else but `begin` and `fault` may be called.
        """

    def fill(self, bits: NDArray[np.uint32]) -> None:
        """Writes which tokens may come next, one bit each, lowest first;
        the ends of a text are among them where it is complete. Finds them where that was not begun.

        Args:
            bits: `[vocab / 32]`, contiguous.
        """

    def num_allowed(self, tokens: Sequence[int]) -> int:
        """With how many leading ones of `tokens`, none of which ends a text, the sample could go on; fewer where to find
        out would take long. Changes nothing.
        """

    @property
    def fault(self) -> BatonError | None:
        """Why the sample cannot go on: its grammar is too complex at this place, or was broken; None while it can."""


@dataclass(slots=True, eq=False)
class CompilingGrammar:
    """The grammar of a request that is in the engine already.

    Attributes:
        outcome: What the output must follow, or why there is none; None while it is compiled. Set once, on any thread.
    """

    outcome: TokenConstraint | BatonError | None = None

    @property
    def constraint(self) -> TokenConstraint | None:
        """What the output must follow; None while that is not known, or is nothing."""
        outcome = self.outcome
        return None if isinstance(outcome, BatonError) else outcome

    @property
    def fault(self) -> BatonError | None:
        """Why there is none."""
        outcome = self.outcome
        return outcome if isinstance(outcome, BatonError) else None


@dataclass(slots=True, eq=False)
class GrammarCounts:
    """What a worker's grammars have cost since it started. Written by the compiler's threads and the engine's,
    read from any.

    Attributes:
        compiled: Grammars that were compiled.
        refused: Those that could not be, or not for the output so far.
        found: Those that were kept from before.
        evicted: Those that were kept, and made room for others.
        compile_s: Seconds that compiling took, refused ones too.
        masks: Masks that were found for steps.
        mask_s: Seconds that they took.
        late: Those for which no step waited, since they took long.
        faults: Samples that could not go on, in the middle of their output.
    """

    compiled: int = 0
    refused: int = 0
    found: int = 0
    evicted: int = 0
    compile_s: float = 0.0
    masks: int = 0
    mask_s: float = 0.0
    late: int = 0
    faults: int = 0


@dataclass(slots=True, eq=False)
class SpeculationCounts:
    """Drafts of a worker since it started. Written by the engine's thread, read from any.

    Attributes:
        drafts: How often drafts of a sequence were computed in a step.
        draft_tokens: How many these were.
        accepted_tokens: Those that were accepted.
        accepted_per_position: The same by their place behind the text.
    """

    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)


class GrammarCompiler(Protocol):
    """Makes constraints of grammars, in threads of its own, for which tenants take turns."""

    def find_masks_beside(self, told: Callable[[], None]) -> None:
        """From now on masks are found on threads beside the engine's.

        Args:
            told: Called on one of these when a mask is known that a step went on without.
        """

    def compile(self, prompt: Prompt, done: Callable[[TokenConstraint | BatonError], None]) -> None:
        """Calls `done`, on any thread, with the constraint of a prompt's output after its `output_tokens`,
        or with why there is none.
        """

    def close(self) -> None:
        """Waits for what is being compiled; the rest is dropped."""


class ArenaBytes(Protocol):
    """The bytes of one worker's KV arenas."""

    @property
    def address(self) -> int:
        """Of the first byte."""

    @property
    def size_bytes(self) -> int:
        """How many."""

    @property
    def device(self) -> int | None:
        """Index of the GPU that holds them; None for host memory."""

    @property
    def view(self) -> memoryview | None:
        """The bytes themselves where they are host memory."""


class ArenaAllocator(Protocol):
    """Gives the bytes in which the KV arenas live."""

    def allocate(self, size_bytes: int, gpu: int | None = None) -> ArenaBytes:
        """Writable, zeroed, page-aligned bytes of host memory, or of the GPU's; they stay valid until the process ends.

        Raises:
            OutOfMemoryError: This machine has not got them.
        """


class EnginePort(Protocol):
    """A running engine as its service sees it. Thread-safe; hosted in a thread, or one day in another process."""

    def submit(self, command: Command) -> None:
        """Queues a command; never blocks. The outcome comes as events."""

    def attach(self, listener: Callable[[StepEvents], None]) -> None:
        """Sends all events to `listener` from now on, grouped by step; the one before it gets no more.

        It is called on the engine's thread, and must only pass them on.
        """

    def progress_s(self) -> float | None:
        """Seconds since the engine last made progress while it has work; None when it is idle."""

    def failure(self) -> BaseException | None:
        """What ended the engine loop, or None while it lives."""

    def story(self, about: SeqId | BlockKey) -> Sequence[StoryEntry]:
        """What is remembered of a sequence, ended or not, or of a block of its cache, oldest first."""

    def close(self) -> None:
        """Ends the loop and waits for it; sequences that are left are dropped."""
