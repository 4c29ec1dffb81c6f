"""Which of vLLM's requests are handed off, and what their pages wait for:
joins vLLM's scheduler and its model runner with our commands.

vLLM asks its connector in two places, its scheduler and its worker, with an object in each (`baton_vllm.connector`).
Both share this table, on the engine's thread. It knows nothing of vLLM, so that its rules can be tested without.

    prefilled here    COMPUTING → KEPT (vLLM's request is over, its blocks are not) → ENDING → gone, blocks free
    received here     WAITING → RESERVED → STARTED → vLLM's alone
                                    └────────┴→ ENDING → gone, blocks free

vLLM gives blocks back at once when a request ends, but for two kinds: those whose `request_finished` answered True,
until the worker names them as sent, and those that wait for KV from elsewhere, until the worker names them as received.

Where layers form groups a request has a table of blocks for each, in which blocks that have left a window are vLLM's
null block. Handed off are the pages that the prompt's end needs, in the order of `baton.page_order`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from baton.errors import InvariantError
from baton.ids import BlockId, LegKind, SeqId
from baton.page_order import first_block, num_pages, pages_in_order
from baton_engine.messages import PrefillStarted, Released, Reserved, SeqEvent
from baton_engine.ports import LayerReady, LayerSink, PageExport


class PageState(Enum):
    """Where a sequence is that is handed off; see the module's text."""

    COMPUTING = auto()
    KEPT = auto()
    WAITING = auto()
    RESERVED = auto()
    STARTED = auto()
    ENDING = auto()


_S = PageState

_NEXT = {
    _S.COMPUTING: frozenset({_S.KEPT}),
    _S.KEPT: frozenset({_S.ENDING}),
    _S.WAITING: frozenset({_S.RESERVED}),
    _S.RESERVED: frozenset({_S.STARTED, _S.ENDING}),
    _S.STARTED: frozenset({_S.ENDING}),
    _S.ENDING: frozenset[PageState](),
}


@dataclass(slots=True, eq=False)
class _Sequence:
    """One that is handed off.

    Attributes:
        num_tokens: Of its prompt.
        room_tokens: Those that it has to have room for before anything else of it can run.
        tables: vLLM's blocks, group by group, as far as it has them.
        num_exported: Leading token blocks whose pages the sink was told of.
        num_before: Tokens before its last chunk: what had left a window by then is vLLM's again.
        tells_released: Whether its end is told.
    """

    seq_id: SeqId
    kind: LegKind
    num_tokens: int
    room_tokens: int
    state: PageState
    tables: list[list[BlockId]] = field(default_factory=list)
    num_exported: int = 0
    num_before: int = 0
    num_cached: int = 0
    tells_released: bool = True

    def move(self, state: PageState) -> None:
        """Goes on to `state`."""
        if state not in _NEXT[self.state]:
            raise InvariantError(f"{self.seq_id} cannot go from {self.state} to {state}")
        self.state = state


class VllmHandOffs:
    """The sequences of one engine that are handed off. Not thread-safe: the engine's thread owns it.

    The host gives vLLM a request for each, under the same id (`baton_vllm.requests`).

    Args:
        sink: Told of pages that are to be sent; None where none are.
    """

    def __init__(self, sink: LayerSink | None = None) -> None:
        self._sink = sink
        self._block_tokens = 0
        self._windows: Sequence[int] = (0,)
        self._step_tokens = 0
        self._sequences: dict[SeqId, _Sequence] = {}
        self._events: list[SeqEvent] = []
        self._exports: list[PageExport] = []
        self._one_waits = False

    def use_blocks_of(
        self,
        block_tokens: int,
        windows: Sequence[int] = (),
        *,
        step_tokens: int = 0,
    ) -> None:
        """What vLLM decides when it allocates its cache.

        Args:
            block_tokens: Tokens in a block.
            windows: Of the groups of layers (`baton.page_order`).
            step_tokens: The most that one step computes.
        """
        self._block_tokens, self._windows = block_tokens, windows or (0,)
        self._step_tokens = step_tokens

    # The host: one call per command.

    def prefill(self, seq_id: SeqId, num_tokens: int) -> None:
        """vLLM has got a request, and made no step since, whose pages are to be kept for another worker."""
        self._add(seq_id, LegKind.PREFILL, num_tokens, num_tokens, _S.COMPUTING)

    def receive(self, seq_id: SeqId, num_tokens: int, *, room_tokens: int) -> None:
        """vLLM has got a request, and made no step since, whose prompt is computed elsewhere.

        Args:
            seq_id: Of the sequence.
            num_tokens: Of its prompt.
            room_tokens: With the one that is computed first once the prompt is here.
        """
        self._add(seq_id, LegKind.RECEIVE, num_tokens, room_tokens, _S.WAITING)

    def start(self, seq_id: SeqId, *, goes_on: bool) -> None:
        """The reserved blocks hold the prompt's KV.

        Args:
            seq_id: Of the sequence.
            goes_on: Whether there is anything left to generate. If not, vLLM's request is to be aborted now,
                and no end is told.

        Raises:
            InvariantError: It holds no reservation.
        """
        sequence = self._sequences.get(seq_id)
        if sequence is None:
            raise InvariantError(f"{seq_id} is not handed off, and cannot be started")
        sequence.move(_S.STARTED)
        sequence.tells_released = goes_on

    def end(self, seq_id: SeqId, *, tells: bool = True) -> None:
        """The hand-off is over, whether done or not: nobody reads the blocks any more, nor writes to them. vLLM's
        request is to be aborted now, if it is not over. Right at any moment,
        also for a sequence that was never one of these.

        Args:
            seq_id: Of the sequence.
            tells: Whether its end is told from here.
        """
        sequence = self._sequences.get(seq_id)
        if sequence is None:
            return
        sequence.tells_released &= tells
        if sequence.state is _S.KEPT:
            sequence.move(_S.ENDING)

    def __contains__(self, seq_id: SeqId) -> bool:
        """Whether it is one of these, and has blocks or waits for them."""
        return seq_id in self._sequences

    @property
    def has_news(self) -> bool:
        """Whether vLLM has to make a step, be it empty, to hear of blocks that it may use."""
        return any(s.state in (_S.STARTED, _S.ENDING) for s in self._sequences.values())

    def take_events(self) -> list[SeqEvent]:
        """What has happened since the last call: behind a step, or before its model runs. vLLM has given back the
        blocks of those that are released.
        """
        events, self._events = self._events, []
        return events

    # vLLM's scheduler.

    @property
    def promised_blocks(self) -> int:
        """Free blocks that those are going to need which have some."""
        return sum(self._promised(sequence) for sequence in self._sequences.values())

    def holds_back(self, request_id: str) -> bool:
        """Whether a request has to wait, being a further sample of a prompt that is received: vLLM hears behind its next
        step that the KV is here, and finds no prefix before.
        """
        owner, slash, _ = request_id.rpartition("/")
        return bool(slash) and SeqId(owner) in self._sequences

    def matched_tokens(self, seq_id: SeqId, num_cached: int, num_free: int) -> int | None:
        """How many of a request's tokens come from elsewhere, behind the `num_cached` that this worker's prefix cache
        has; None for as long as the `num_free` blocks, those included that it shares with requests that run,
        are too few, or one before it waits.

        What is begun here has to come to its end without waiting for another worker,
        whose own prompts may wait for this one:

        - vLLM begins a prompt whose blocks are free, though others that have begun need them for their next chunks, and
          preempts the latest. That one's pages at the receiving worker would be held for as long as this worker's
          blocks are kept by prompts for which there is no room there.
        - vLLM gives a prompt that is received its own blocks only, and preempts none that waits: were all blocks held
          by prompts that need one more for their next token, none could ever go on.

        What others than these were promised is not among the free ones.
        """
        sequence = self._sequences.get(seq_id)
        if sequence is None or sequence.state not in (_S.WAITING, _S.COMPUTING):
            return 0
        sequence.tables = []  # it has none, or has lost them to another
        if self._one_waits or self._room(sequence) + self.promised_blocks > num_free:
            self._one_waits = True
            return None
        sequence.num_cached = sequence.num_before = num_cached
        if sequence.state is _S.COMPUTING:
            return 0
        return sequence.num_tokens - num_cached

    def allocated(self, seq_id: SeqId, tables: Sequence[Sequence[int]]) -> None:
        """A request that waited has these blocks, group by group and in order."""
        sequence = self._sequences.get(seq_id)
        if sequence is None or sequence.state not in (_S.WAITING, _S.COMPUTING):
            return
        sequence.tables = [[BlockId(block) for block in blocks] for blocks in tables]
        if sequence.state is _S.COMPUTING:
            return
        sequence.move(_S.RESERVED)
        end = self._num_blocks(sequence.num_tokens)
        if any(len(blocks) != end for blocks in tables):
            given = "/".join(str(len(blocks)) for blocks in tables)
            raise InvariantError(
                f"{seq_id} was given {given} blocks for {sequence.num_tokens} tokens"
            )
        self._events.append(
            Reserved(
                seq_id=seq_id,
                blocks=self._pages(sequence, 0, end),
                held_blocks=self._num_pages(sequence, sequence.num_cached // self._block_tokens),
            )
        )

    def scheduled(
        self,
        seq_id: SeqId,
        tables: Sequence[Sequence[int]],
        *,
        start: int,
        num_tokens: int,
        anew: bool,
        pooled_tokens: int = 0,
    ) -> None:
        """The step to come computes a chunk.

        Args:
            seq_id: Of the request.
            tables: Its blocks, group by group: all that it has with `anew`, else those that it was given for this step.
            start: Tokens before the chunk.
            num_tokens: In it.
            anew: Whether it is the first one, or the first one after a preemption.
            pooled_tokens: Those before it that came from a pool.
        """
        sequence = self._sequences.get(seq_id)
        if sequence is None or sequence.state is not _S.COMPUTING:
            return
        if anew:
            sequence.tables = [[] for _ in self._windows]
            sequence.num_exported, sequence.num_cached = 0, start
            self._events.append(
                PrefillStarted(
                    seq_id=seq_id,
                    num_blocks=self._num_pages(sequence),
                    cached_tokens=start - pooled_tokens,
                    pooled_tokens=pooled_tokens,
                )
            )
        for table, blocks in zip(sequence.tables, tables, strict=True):
            table += [BlockId(block) for block in blocks]
        sequence.num_before = start
        self._export(sequence, start + num_tokens)

    def finished(self, seq_id: SeqId, *, complete: bool, failed: bool = False) -> bool:
        """vLLM's request is over.

        Args:
            seq_id: Of the request.
            complete: Whether it drew what it was to draw; False for one that was aborted or has failed.
            failed: Whether vLLM could not go on with it, which its output says.

        Returns:
            Whether its blocks stay until it is named as sent.
        """
        sequence = self._sequences.get(seq_id)
        if sequence is None:
            return False
        sequence.tells_released &= not failed
        match sequence.state:
            case _S.COMPUTING if complete:
                sequence.move(_S.KEPT)
                return True
            case _S.COMPUTING | _S.WAITING:
                self._forget(sequence)
            case _S.RESERVED | _S.STARTED:
                sequence.move(_S.ENDING)  # vLLM waits for it to be named as received
            case _S.KEPT | _S.ENDING:
                raise InvariantError(f"{seq_id} was finished twice")
        return False

    # vLLM's worker.

    def layer_computed(self, layer_index: int) -> None:
        """The pages that this step completes hold the KV of one of the arena's layers."""
        if self._exports and self._sink is not None:
            self._sink.save_kv_layer(LayerReady(layer_index=layer_index, exports=self._exports))

    @property
    def exports(self) -> Sequence[PageExport]:
        """Pages that the step which has been decided completes."""
        return tuple(self._exports)

    def named(self) -> tuple[frozenset[str], frozenset[str]]:
        """What `after_step` is going to answer for the step that has just been decided: nothing that vLLM computes
        changes it.
        """
        sent: set[str] = set()
        received: set[str] = set()
        for sequence in self._sequences.values():
            if sequence.state is _S.ENDING and sequence.kind is LegKind.PREFILL:
                sent.add(sequence.seq_id)
            elif sequence.state in (_S.ENDING, _S.STARTED):
                received.add(sequence.seq_id)
        return frozenset(sent), frozenset(received)

    def after_step(self) -> tuple[set[str], set[str]]:
        """What vLLM is to be told behind its step.

        Returns:
            Requests whose blocks may be used otherwise, having been kept to be sent; and those that wait no more for
            KV, to go on or, where they are over, to give back their blocks.
        """
        sent, received = self.named()
        self._exports, self._one_waits = [], False
        for sequence in tuple(self._sequences.values()):
            if sequence.state is _S.ENDING:
                self._forget(sequence)
            elif sequence.state is _S.STARTED:
                del self._sequences[sequence.seq_id]
        return {*sent}, {*received}

    def _add(
        self, seq_id: SeqId, kind: LegKind, num_tokens: int, room_tokens: int, state: PageState
    ) -> None:
        if seq_id in self._sequences:
            raise InvariantError(f"sequence {seq_id} was submitted twice")
        self._sequences[seq_id] = _Sequence(seq_id, kind, num_tokens, room_tokens, state)

    def _forget(self, sequence: _Sequence) -> None:
        del self._sequences[sequence.seq_id]
        if sequence.tells_released:
            self._events.append(Released(seq_id=sequence.seq_id))

    def _export(self, sequence: _Sequence, computed: int) -> None:
        """Pages that are complete once `computed` tokens are; the first time this includes those that were cached."""
        start = sequence.num_exported
        is_last = computed == sequence.num_tokens
        end = self._num_blocks(sequence.num_tokens) if is_last else computed // self._block_tokens
        if any(len(table) < end for table in sequence.tables):
            raise InvariantError(f"{sequence.seq_id} computes tokens that it has no blocks for")
        sequence.num_exported = end
        if pages := self._pages(sequence, start, end):
            first = self._num_pages(sequence, start)
            self._exports.append(
                PageExport(seq_id=sequence.seq_id, first_block=first, blocks=pages)
            )

    def _pages(self, sequence: _Sequence, start: int, end: int) -> tuple[BlockId, ...]:
        """Those of its token blocks from `start` to before `end` that are handed off, in order."""
        order = pages_in_order(
            sequence.num_tokens, self._block_tokens, self._windows, start=start, end=end
        )
        return tuple(sequence.tables[group][block] for block, group in order)

    def _num_pages(self, sequence: _Sequence, num_blocks: int | None = None) -> int:
        """How many of its leading token blocks, or of all of them, are handed off."""
        return num_pages(
            sequence.num_tokens, self._block_tokens, self._windows, num_blocks=num_blocks
        )

    def _room(self, sequence: _Sequence) -> int:
        """Blocks that one without blocks has to find."""
        end = self._num_blocks(sequence.room_tokens)
        if sequence.state is _S.COMPUTING:
            return sum(self._most(end, window) for window in self._windows)
        num_tokens, size = sequence.num_tokens, self._block_tokens
        return sum(end - first_block(num_tokens, size, window) for window in self._windows)

    def _promised(self, sequence: _Sequence) -> int:
        """Free blocks that it is going to need."""
        end = self._num_blocks(sequence.room_tokens)
        match sequence.state:
            case _S.COMPUTING if sequence.tables:
                return sum(
                    self._lacking(end, len(table), sequence.num_before, window)
                    for table, window in zip(sequence.tables, self._windows, strict=True)
                )
            case _S.RESERVED | _S.STARTED:
                return sum(end - len(table) for table in sequence.tables)
            case _:
                return 0

    def _lacking(self, end: int, length: int, num_before: int, window: int) -> int:
        """Free blocks that a group of a prompt that is computed is going to need at most, beside what it holds."""
        if length >= end:
            return 0
        held = length - first_block(num_before, self._block_tokens, window)
        return max(0, self._most(end, window) - held)

    def _most(self, end: int, window: int) -> int:
        """Blocks that a group of a prompt of `end` token blocks has at a time while it is computed: with a window those
        of a step and of the window before it, neither of which has to begin with a block.
        """
        if not window:
            return end
        return min(end, self._num_blocks(window + self._step_tokens) + 1)

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_tokens)
