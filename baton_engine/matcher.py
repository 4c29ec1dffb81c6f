"""One output's place in its grammar: reads its tokens, and finds which may come next, beside the engine's thread.

    engine's thread   accept   begin   the model computes the step's scores   finding?   fill, draw
                                 │                                                ▲
    a mask thread                └── reads the tokens, finds the mask ────────────┘

No step waits for a mask much longer than for its scores: a row whose mask is late draws nothing, and its sequence sits
out until the mask is known. Grammars whose masks take long have a thread of their own, of low priority: they hold up
neither steps nor the masks of others, and take little of a core that others want.
"""

import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Condition, Thread, get_native_id
from time import thread_time
from typing import Optional
from weakref import ref

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from baton.errors import BatonError, EngineError, InvalidRequestError
from baton.grammar import reason_of
from baton_engine.ports import GrammarCounts

logger = logging.getLogger(__name__)

_SLOW_ABOVE_S, _QUICK_BELOW_S = 500e-6, 250e-6
"""A grammar is slow once its masks take longer than the first on average, and until they take less than the second."""

_WEIGHT_OF_LAST = 0.25
"""Of the last mask in that average: one of a few milliseconds is enough, and a few quick ones make up for it."""

_TELL_EVERY_S = 0.1
"""Of a core's time: after so much more of it a grammar tells that it has grown."""

_LOW_PRIORITY = 19
"""Niceness of the thread for slow grammars: where all cores are busy it gets less than a fiftieth of one."""

_Waiting = Optional["ref[MatcherConstraint]"]
"""What a thread is given; None for the end."""


def _tell_nobody() -> None:
    """Before there is an engine."""


class MaskThreads:
    """The two threads on which masks are found, where they are found beside an engine (`start`); elsewhere whoever asks
    for a mask finds it.

    Attributes:
        changed: Guards what the constraints and these threads share, and tells of each mask that was found.
        are_started: Whether masks are found here.
    """

    def __init__(self) -> None:
        self.changed = Condition()
        self.are_started = False
        self._told: Callable[[], None] = _tell_nobody
        self._quick: SimpleQueue[_Waiting] = SimpleQueue()
        self._slow: SimpleQueue[_Waiting] = SimpleQueue()
        self._threads: list[Thread] = []

    def start(self, told: Callable[[], None]) -> None:
        """From now on masks are found here.

        Args:
            told: Called on one of the threads when a mask is known that a step went on without.
        """
        self._told = told
        self.are_started = True

    def put(self, constraint: "MatcherConstraint", *, is_slow: bool) -> None:
        """Its mask is found when its turn comes, unless nobody has the constraint any more by then."""
        if not self._threads:
            self._threads = [
                Thread(target=self._work, args=(self._quick, 0), name="masks", daemon=True),
                Thread(
                    target=self._work,
                    args=(self._slow, _LOW_PRIORITY),
                    name="slow-masks",
                    daemon=True,
                ),
            ]
            for thread in self._threads:
                thread.start()
        (self._slow if is_slow else self._quick).put(ref(constraint))

    def close(self) -> None:
        """Waits for what is being found, and ends the threads."""
        self.are_started = False
        self._slow.put(None)
        self._quick.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self, queue: "SimpleQueue[_Waiting]", niceness: int) -> None:
        if niceness and sys.platform == "linux":  # elsewhere it would be the whole process's
            os.setpriority(os.PRIO_PROCESS, get_native_id(), niceness)
        while (waiting := queue.get()) is not None:
            constraint = waiting()
            if constraint is not None and constraint.find():
                self._told()


@dataclass(slots=True, eq=False, kw_only=True)
class CompiledGrammar:
    """What all outputs share that follow one compiled grammar.

    Attributes:
        vocab_size: Of the matchers' tokenizer.
        counts: Of the worker.
        threads: Find the masks.
        forget: Takes the grammar out of those that are kept compiled: copies of a matcher share what its lexer has
            found, up to a limit, and where that is used up the next request has to begin anew.
        grown: Called now and then while it takes time: what its lexer finds stays in memory.
        is_slow: Whether its masks take long.
        spent_s: Of a core's time, that compiling it and finding its masks has taken.
    """

    vocab_size: int
    counts: GrammarCounts
    threads: MaskThreads
    forget: Callable[[], None]
    grown: Callable[[], None]
    is_slow: bool = False
    spent_s: float = field(default=0.0, init=False)
    _told_s: float = field(default=0.0, init=False)
    _mean_s: float = field(default=0.0, init=False)

    @property
    def num_words(self) -> int:
        """Of a mask, 32 tokens each."""
        return -(-self.vocab_size // 32)

    def spend(self, seconds: float) -> None:
        """It took so much more of a core's time. Not to be called with a lock that its keeper may wait for."""
        self.spent_s += seconds
        if self.spent_s - self._told_s > _TELL_EVERY_S:
            self._told_s = self.spent_s
            self.grown()

    def took(self, seconds: float) -> None:
        """One more mask was found, in so much of a core's time."""
        self.counts.masks += 1
        self.counts.mask_s += seconds
        self._mean_s += _WEIGHT_OF_LAST * (seconds - self._mean_s)
        self.is_slow = self._mean_s > (_QUICK_BELOW_S if self.is_slow else _SLOW_ABOVE_S)


class MatcherConstraint:
    """A `TokenConstraint` by one of llguidance's matchers. Nothing is raised: whatever goes wrong is its `fault`.

    Owned by the engine's thread, but while its mask is being found: then only `finding` does not wait for that.

    Args:
        matcher: Has read the sample's output so far.
        grammar: That of the matcher.
        mask: Which tokens may come next, where that is known: `[num_words]` uint32, not changed.
        of_draft: Whether it has read guessed tokens too: then its faults are nobody's yet, and are not counted.
    """

    __slots__ = (
        *("__weakref__", "_fault", "_grammar", "_is_finding", "_is_late"),
        *("_mask", "_matcher", "_of_draft", "_unread"),
    )

    def __init__(
        self,
        matcher: LLMatcher,
        grammar: CompiledGrammar,
        mask: NDArray[np.uint32] | None = None,
        *,
        of_draft: bool = False,
    ) -> None:
        self._matcher = matcher
        self._grammar = grammar
        self._mask = mask
        self._of_draft = of_draft
        self._unread: list[int] = []
        self._fault: BatonError | None = None
        self._is_finding = False
        self._is_late = False

    def accept(self, token: int) -> None:
        """See TokenConstraint. It is read together with the search for the next mask: copies of one matcher wait for
        each other while they read or search.
        """
        self._await_mask()
        if self._fault is None:
            self._unread.append(token)
            self._mask = None
            if self._grammar.is_slow:
                self.begin(late=True)

    def fork(self) -> "MatcherConstraint":
        """See TokenConstraint. A copy that cannot be made is one with a fault, which ends its own request."""
        return self._copy(of_draft=self._of_draft)

    def fork_for_draft(self, token: int) -> "MatcherConstraint":
        """See TokenConstraint."""
        forked = self._copy(of_draft=True)
        forked.accept(token)
        return forked

    def begin(self, *, late: bool = False) -> None:
        """See TokenConstraint."""
        threads = self._grammar.threads
        with threads.changed:
            if self._is_finding:
                self._is_late |= late
                return
            if self._mask is not None or self._fault is not None or not threads.are_started:
                return
            self._is_finding, self._is_late = True, late
        threads.put(self, is_slow=self._grammar.is_slow)

    def finding(self, within_s: float = 0.0) -> bool:
        """See TokenConstraint."""
        if self._is_finding and within_s > 0.0 and not self._is_late:
            changed = self._grammar.threads.changed
            with changed:
                changed.wait_for(lambda: not self._is_finding, within_s)
        return self._is_finding

    def find(self) -> bool:
        """Finds the mask, on any thread.

        Returns:
            Whether a step went on without it.
        """
        begun_s = thread_time()
        self._read()
        mask = np.empty(self._grammar.num_words, np.uint32)
        if self._fault is None:
            try:
                self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
                if self._matcher.is_error():
                    self._end_with(refusal_of(self._matcher))
            except BaseException as error:  # noqa: BLE001 - a panic of Rust's is no Exception
                self._break(error)
        changed = self._grammar.threads.changed
        took_s = thread_time() - begun_s
        self._grammar.spend(took_s)
        with changed:
            self._grammar.took(took_s)
            self._mask = mask
            self._grammar.counts.late += self._is_late
            was_late, self._is_finding, self._is_late = self._is_late, False, False
            changed.notify_all()
        return was_late

    def fill(self, bits: NDArray[np.uint32]) -> None:
        """See TokenConstraint."""
        self._await_mask()
        if self._fault is not None:
            bits[:] = 0
            return
        if self._mask is None:
            self.find()
        assert self._mask is not None
        bits[:] = self._mask[: len(bits)]

    def num_allowed(self, tokens: Sequence[int]) -> int:
        """See TokenConstraint."""
        if self._is_finding or self._grammar.is_slow or self.fault is not None:
            return 0  # to find out might take as long as a mask
        try:
            return self._matcher.validate_tokens(list(tokens))
        except BaseException as error:  # noqa: BLE001 - likewise
            self._break(error)
            return 0

    @property
    def fault(self) -> BatonError | None:
        """See TokenConstraint."""
        if not self._is_finding:
            self._read()
        return self._fault

    def _await_mask(self) -> None:
        if self._is_finding:
            changed = self._grammar.threads.changed
            with changed:
                changed.wait_for(lambda: not self._is_finding)

    def _read(self) -> None:
        if self._fault is not None or not self._unread:
            return
        try:
            for token in self._unread:
                self._matcher.consume_token(token)
            if self._matcher.is_error():
                self._end_with(refusal_of(self._matcher))
        except BaseException as error:  # noqa: BLE001 - likewise
            self._break(error)
        self._unread.clear()

    def _copy(self, *, of_draft: bool) -> "MatcherConstraint":
        self._await_mask()
        try:
            matcher = self._matcher.deep_copy()
        except BaseException as error:  # noqa: BLE001 - likewise
            # From here on it does not touch the matcher, which is another's.
            copy = MatcherConstraint(self._matcher, self._grammar, of_draft=of_draft)
            copy._break(error)
            return copy
        copy = MatcherConstraint(matcher, self._grammar, self._mask, of_draft=of_draft)
        copy._unread = list(self._unread)
        copy._fault = self._fault
        return copy

    def _break(self, error: BaseException) -> None:
        logger.error("a matcher broke", exc_info=error)
        if self._fault is None:
            self._end_with(EngineError(f"the grammar's matcher broke: {type(error).__name__}"))

    def _end_with(self, fault: BatonError) -> None:
        self._fault = fault
        if not self._of_draft:
            with self._grammar.threads.changed:
                self._grammar.counts.faults += 1
            self._grammar.forget()


def refusal_of(matcher: LLMatcher) -> InvalidRequestError:
    """Why an output cannot be held to a matcher that has an error."""
    reason = reason_of(matcher.get_error())
    return InvalidRequestError(f"the output cannot be held to its grammar: {reason}")
