"""Waiting, prefilling, running: every sequence is in exactly one queue,
and moves between them by the table of its states.
"""

from bisect import insort
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from operator import attrgetter

from baton.errors import InvariantError
from baton.story import StoryEntry, StoryLog
from baton_engine.scheduling.ordering import PreemptionOrder, PrefillOrder
from baton_engine.scheduling.request import Sequence, State

TRANSITIONS: dict[State, frozenset[State]] = {
    State.WAITING: frozenset({State.PREFILLING, State.RESERVED, State.ENDED}),
    State.PREFILLING: frozenset({State.RUNNING, State.HANDING_OFF, State.WAITING, State.ENDED}),
    State.RUNNING: frozenset({State.WAITING, State.ENDED}),
    State.RESERVED: frozenset({State.RUNNING, State.PREFILLING, State.ENDED}),
    State.HANDING_OFF: frozenset({State.ENDED}),
    State.ENDED: frozenset(),
}
"""PREFILLING and RUNNING to WAITING is a preemption; RESERVED to PREFILLING,
where a received prompt's last token is computed anew.
"""

ADMITTED = frozenset({State.PREFILLING, State.RUNNING, State.RESERVED})

_by_arrival = attrgetter("arrival")


class WaitingQueue:
    """Sequences by arrival; preempted ones return to the front. Every operation is O(1)."""

    def __init__(self) -> None:
        self._sequences: OrderedDict[Sequence, None] = OrderedDict()
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def add(self, sequence: Sequence) -> None:
        """To the end, or, if it was admitted before, to the front."""
        self._sequences[sequence] = None
        self.num_tokens += len(sequence.tokens)
        if sequence.was_admitted:
            self._sequences.move_to_end(sequence, last=False)

    def remove(self, sequence: Sequence) -> None:
        """Removes it from wherever it stands."""
        del self._sequences[sequence]
        self.num_tokens -= len(sequence.tokens)


class SequenceQueues:
    """All sequences by state.

    What prefills, runs or holds a reservation counts against `max_running`, one per sample it will run, so that
    whatever was admitted can decode from the moment its KV is there.

    Args:
        max_running: Samples admitted at once.
        stories: Logs every move.

    Attributes:
        prompts: Waits to be computed here.
        reservations: Waits for pages that KV from elsewhere will come to.
        prefilling: Begun prompts.
        reserved: Holds pages, and waits for KV from elsewhere.
        running: Decodes, by arrival.
        now_s: When the command or step came that sequences move for; goes into their stories.
    """

    def __init__(self, max_running: int, stories: StoryLog) -> None:
        self.prompts = WaitingQueue()
        self.reservations = WaitingQueue()
        self.prefilling: list[Sequence] = []
        self.reserved: list[Sequence] = []
        self.running: list[Sequence] = []
        self._max_running = max_running
        self._num_admitted = 0
        self._stories = stories
        self.now_s = 0.0

    @property
    def num_waiting(self) -> int:
        """Sequences in either waiting queue."""
        return len(self.prompts) + len(self.reservations)

    @property
    def prefill_tokens_pending(self) -> int:
        """Prompt tokens still to be computed here."""
        begun = sum(len(s.tokens) - s.num_computed for s in self.prefilling)
        return self.prompts.num_tokens + begun

    def has_room_for(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence could be admitted without exceeding `max_running`."""
        return self._num_admitted + len(sequence.samples) <= self._max_running

    @property
    def admitted(self) -> list[Sequence]:
        """All that count against `max_running`."""
        return self.running + self.prefilling + self.reserved

    def next_to_admit(self, order: PrefillOrder, *, prompts_too: bool) -> Sequence | None:
        """The first of both waiting queues' firsts, so that neither starves the other."""
        reservation = order.first(self.reservations)
        prompt = order.first(self.prompts) if prompts_too else None
        if reservation is None or prompt is None:
            return reservation or prompt
        return prompt if order.precedes(prompt, reservation) else reservation

    def preemption_victim(self, order: PreemptionOrder) -> Sequence | None:
        """The last by `order` of those whose pages may be taken away."""
        begun = [sequence for sequence in self.prefilling if sequence.is_preemptible]
        return max(self.running + begun, key=order, default=None)

    def broken(
        self, sequence: Sequence, what: str, *, pages: Iterable[StoryEntry] = ()
    ) -> InvariantError:
        """An error with the story of `sequence`, and of its `pages` where they matter."""
        story = (*self._stories.story(sequence.seq_id), *pages)
        return InvariantError(f"{sequence.seq_id} {what}", story=story)

    def add(self, sequence: Sequence, state: State) -> None:
        """A new sequence joins."""
        sequence.state = state
        sequence.request.sequences.append(sequence)
        self._enqueue(sequence)
        self._log(sequence, sequence.request.kind.name)

    def move(
        self, sequence: Sequence, state: State, *, samples: tuple[int, ...] | None = None
    ) -> None:
        """Changes the state of `sequence`, and which samples it stands for if `samples` is given.

        Raises:
            InvariantError: The table allows no such transition.
        """
        before = sequence.state
        if state not in TRANSITIONS[before]:
            raise self.broken(sequence, f"cannot go from {before.name} to {state.name}")
        self._dequeue(sequence)
        sequence.state = state
        if samples is not None:
            sequence.samples = samples
        if state is State.ENDED:
            sequence.request.sequences.remove(sequence)
        else:
            self._enqueue(sequence)
        self._log(sequence, before.name)

    def _enqueue(self, sequence: Sequence) -> None:
        if sequence.state in ADMITTED:
            self._num_admitted += len(sequence.samples)
        match sequence.state:
            case State.WAITING:
                self._waiting_queue(sequence).add(sequence)
            case State.PREFILLING:
                self.prefilling.append(sequence)
            case State.RESERVED:
                self.reserved.append(sequence)
            case State.RUNNING:
                insort(self.running, sequence, key=_by_arrival)
            case _:
                pass

    def _dequeue(self, sequence: Sequence) -> None:
        if sequence.state in ADMITTED:
            self._num_admitted -= len(sequence.samples)
        match sequence.state:
            case State.WAITING:
                self._waiting_queue(sequence).remove(sequence)
            case State.PREFILLING:
                self.prefilling.remove(sequence)
            case State.RESERVED:
                self.reserved.remove(sequence)
            case State.RUNNING:
                self.running.remove(sequence)
            case _:
                pass

    def _log(self, sequence: Sequence, before: str) -> None:
        size = f"{len(sequence.tokens)} tokens, {len(sequence.blocks)} pages"
        moved = f"sample {sequence.sample}: {before} -> {sequence.state.name}, {size}"
        self._stories.record(sequence.seq_id, self.now_s, moved)

    def _waiting_queue(self, sequence: Sequence) -> WaitingQueue:
        return self.reservations if sequence.awaits_kv else self.prompts

    def check_integrity(self, sequences: list[Sequence]) -> None:
        """Raises InvariantError unless each of `sequences`, all there are, is in the one queue of its state."""
        states = Counter(sequence.state for sequence in sequences)
        queues: list[tuple[State, list[Sequence]]] = [
            (State.WAITING, [*self.prompts, *self.reservations]),
            (State.PREFILLING, self.prefilling),
            (State.RESERVED, self.reserved),
            (State.RUNNING, self.running),
        ]
        for state, queue in queues:
            if len(queue) != states[state] or any(s.state is not state for s in queue):
                raise InvariantError(f"the sequences that are {state.name} are not in its queue")
        admitted = sum(len(s.samples) for s in sequences if s.state in ADMITTED)
        if admitted != self._num_admitted or admitted > self._max_running:
            raise InvariantError(
                f"{self._num_admitted} samples counted, {admitted} of {self._max_running} admitted"
            )
        if self.prompts.num_tokens != sum(len(sequence.tokens) for sequence in self.prompts):
            raise InvariantError("the waiting prompts' tokens are miscounted")
        if sorted(self.running, key=_by_arrival) != self.running:
            raise InvariantError("running sequences are out of order")
