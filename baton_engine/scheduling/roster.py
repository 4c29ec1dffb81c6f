"""Who waits, who prefills, who runs: every branch stands in exactly one place, and moves by the table of `State`."""

from bisect import insort
from collections import Counter, OrderedDict
from collections.abc import Iterator

from baton.errors import InvariantError
from baton_engine.scheduling.order import PrefillOrder
from baton_engine.scheduling.precedence import Precedence
from baton_engine.scheduling.request import TRANSITIONS, Branch, State

SEATED = frozenset({State.PREFILLING, State.RUNNING, State.RESERVED})


class WaitingLine:
    """Branches in line by arrival; preempted ones return to the front. Every operation is O(1)."""

    def __init__(self) -> None:
        self._branches: OrderedDict[Branch, None] = OrderedDict()
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._branches)

    def __iter__(self) -> Iterator[Branch]:
        return iter(self._branches)

    def add(self, branch: Branch) -> None:
        """To the end, or, if it was admitted before, to the front."""
        self._branches[branch] = None
        self.num_tokens += len(branch.seq.tokens)
        if branch.was_admitted:
            self._branches.move_to_end(branch, last=False)

    def remove(self, branch: Branch) -> None:
        """Out of the line, from wherever it stands."""
        del self._branches[branch]
        self.num_tokens -= len(branch.seq.tokens)


class Roster:
    """All branches by state.

    Seats are what `max_num_seqs` counts: a branch that prefills, runs or holds a reservation takes one per sample it will
    run, so that whoever was let in can decode from the moment its KV is there.

    Args:
        seats: Samples let in at once.
    """

    def __init__(self, seats: int) -> None:
        self.prompts = WaitingLine()
        self.reservations = WaitingLine()
        self.prefilling: list[Branch] = []
        self.reserved: list[Branch] = []
        self.running: list[Branch] = []
        self._seats = seats
        self._seats_taken = 0

    @property
    def num_waiting(self) -> int:
        """Branches in either line."""
        return len(self.prompts) + len(self.reservations)

    @property
    def prefill_tokens_pending(self) -> int:
        """Prompt tokens still to be computed here."""
        begun = sum(len(b.seq.tokens) - b.seq.num_computed for b in self.prefilling)
        return self.prompts.num_tokens + begun

    def has_seats_for(self, branch: Branch) -> bool:
        """Whether a waiting branch could be let in."""
        return self._seats_taken + len(branch.samples) <= self._seats

    @property
    def seated(self) -> list[Branch]:
        """All that take seats."""
        return self.running + self.prefilling + self.reserved

    def head(self, order: PrefillOrder, *, prompts_too: bool) -> Branch | None:
        """Who is to be let in next: the first of both lines' firsts, so that neither line starves the other."""
        reservation = order.first(self.reservations)
        prompt = order.first(self.prompts) if prompts_too else None
        if reservation is None or prompt is None:
            return reservation or prompt
        return prompt if order.precedes(prompt, reservation) else reservation

    def last(self, precedence: Precedence) -> Branch | None:
        """The last by `precedence` of those whose pages may be taken away."""
        begun = [branch for branch in self.prefilling if branch.is_preemptible]
        return max(self.running + begun, key=precedence, default=None)

    def add(self, branch: Branch, state: State) -> None:
        """A new branch takes its place."""
        branch.state = state
        branch.request.branches.append(branch)
        self._place(branch)

    def move(self, branch: Branch, state: State, *, samples: tuple[int, ...] | None = None) -> None:
        """Changes the state of `branch`, and which samples it stands for if `samples` is given.

        Raises:
            InvariantError: The table allows no such transition.
        """
        if state not in TRANSITIONS[branch.state]:
            raise InvariantError(
                f"{branch.seq.seq_id} cannot go from {branch.state.name} to {state.name}"
            )
        self._displace(branch)
        branch.state = state
        if samples is not None:
            branch.samples = samples
        if state is State.ENDED:
            branch.request.branches.remove(branch)
        else:
            self._place(branch)

    def _place(self, branch: Branch) -> None:
        if branch.state in SEATED:
            self._seats_taken += len(branch.samples)
        match branch.state:
            case State.WAITING:
                self._line(branch).add(branch)
            case State.PREFILLING:
                self.prefilling.append(branch)
            case State.RESERVED:
                self.reserved.append(branch)
            case State.RUNNING:
                insort(self.running, branch, key=_rank)
            case _:
                pass

    def _displace(self, branch: Branch) -> None:
        if branch.state in SEATED:
            self._seats_taken -= len(branch.samples)
        match branch.state:
            case State.WAITING:
                self._line(branch).remove(branch)
            case State.PREFILLING:
                self.prefilling.remove(branch)
            case State.RESERVED:
                self.reserved.remove(branch)
            case State.RUNNING:
                self.running.remove(branch)
            case _:
                pass

    def _line(self, branch: Branch) -> WaitingLine:
        return self.reservations if branch.awaits_kv else self.prompts

    def check_integrity(self, branches: list[Branch]) -> None:
        """Raises InvariantError unless `branches`, all there are, stand each in the one place of their state."""
        states = Counter(branch.state for branch in branches)
        lines: list[tuple[State, list[Branch]]] = [
            (State.WAITING, [*self.prompts, *self.reservations]),
            (State.PREFILLING, self.prefilling),
            (State.RESERVED, self.reserved),
            (State.RUNNING, self.running),
        ]
        for state, placed in lines:
            if len(placed) != states[state] or any(branch.state is not state for branch in placed):
                raise InvariantError(
                    f"the branches that are {state.name} are not where they belong"
                )
        taken = sum(len(branch.samples) for branch in branches if branch.state in SEATED)
        if taken != self._seats_taken or taken > self._seats:
            raise InvariantError(
                f"{self._seats_taken} seats counted, {taken} of {self._seats} taken"
            )
        if self.prompts.num_tokens != sum(len(branch.seq.tokens) for branch in self.prompts):
            raise InvariantError("the waiting prompts' tokens are miscounted")
        if sorted(self.running, key=_rank) != self.running:
            raise InvariantError("running branches are out of order")


def _rank(branch: Branch) -> tuple[int, int]:
    return branch.rank
