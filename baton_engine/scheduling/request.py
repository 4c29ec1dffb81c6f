"""What the scheduler remembers of a request and of each sample's way through the engine."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto

from baton.errors import InvariantError
from baton.generation import FinishReason, Prompt, SloTargets, TokenLogprobs
from baton.ids import BlockId, BlockKey, SeqId
from baton.pages import PageFetch
from baton_engine.scheduling.sequence import Sequence


class Mode(Enum):
    """What was asked: the command a request came with."""

    GENERATE = auto()
    PREFILL = auto()
    RESERVE = auto()


class State(Enum):
    """Where a branch stands.

    WAITING holds no page. RESERVED (pages wait for KV from elsewhere) and HANDING_OVER (pages wait to be fetched) are
    pinned: others may be reading or writing the pages.
    """

    WAITING = auto()
    PREFILLING = auto()
    RUNNING = auto()
    RESERVED = auto()
    HANDING_OVER = auto()
    ENDED = auto()


TRANSITIONS: dict[State, frozenset[State]] = {
    State.WAITING: frozenset({State.PREFILLING, State.RESERVED, State.ENDED}),
    State.PREFILLING: frozenset({State.RUNNING, State.HANDING_OVER, State.WAITING, State.ENDED}),
    State.RUNNING: frozenset({State.WAITING, State.ENDED}),
    State.RESERVED: frozenset({State.RUNNING, State.ENDED}),
    State.HANDING_OVER: frozenset({State.ENDED}),
    State.ENDED: frozenset(),
}


@dataclass(slots=True, eq=False)
class Request:
    """One prompt with its samples.

    Attributes:
        seq_id: The engine's name for it.
        mode: What was asked.
        prompt: The prompt.
        arrival: Its number in the order of arrival.
        stop_ids: Tokens that end a sample.
        final_len: Length of prompt and output at which a sample ends.
        branches: What of it is in the engine; empty once it is gone.
        scores: Log-probabilities of the prompt's tokens from the second on, as far as they are computed; None when nobody
            wants them, or no more.
        has_kv: For a reservation: whether the KV has come and decoding has started.
        deadline_s: When its first token is due; None if none was promised.
    """

    seq_id: SeqId
    mode: Mode
    prompt: Prompt
    arrival: int
    stop_ids: frozenset[int]
    final_len: int
    branches: list["Branch"] = field(default_factory=list)
    scores: list[TokenLogprobs] | None = None
    has_kv: bool = False
    deadline_s: float | None = None

    def num_scored(self, start: int, num_tokens: int) -> int:
        """How many of `num_tokens` tokens from `start` on are followed by a prompt token that is to be scored."""
        if self.scores is None:
            return 0
        return max(0, min(num_tokens, len(self.prompt.prompt_tokens) - 1 - start))

    def keep_scores(self, start: int, scores: Iterable[TokenLogprobs]) -> None:
        """Adds what a row that began at `start` found; a row computed again after a preemption replaces what it found before."""
        assert self.scores is not None
        self.scores[start:] = scores

    def hand_out_scores(self) -> tuple[TokenLogprobs, ...]:
        """All of them, once: the prompt is computed, and nobody asks again if it has to be computed anew."""
        assert self.scores is not None
        scores, self.scores = tuple(self.scores), None
        return scores

    def undivided(self) -> "Branch":
        """The branch that stands for all samples while they are one prompt."""
        prompt = self.prompt
        leader = Sequence(
            seq_id=self.seq_id,
            sample=prompt.samples[0],
            params=prompt.sampling,
            tokens=list(prompt.tokens),
            prompt_len=len(prompt.prompt_tokens),
        )
        return Branch(request=self, seq=leader, samples=prompt.samples)

    def finish_of(self, token: int, length: int) -> FinishReason | None:
        """Why a sample ends with `token` as the last of its `length` tokens, or None when it goes on."""
        if token in self.stop_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if length >= self.final_len else None


@dataclass(slots=True, eq=False)
class Branch:
    """One running text of a request: all its samples while they are one prompt, then each sample on its own.

    Attributes:
        request: What it belongs to.
        seq: The tokens and pages, as the runner sees them.
        samples: Samples drawn from the next row of logits.
        state: Where it stands; changed by the roster only.
        keys: Keys of the leading full blocks of `seq.tokens`, as far as they were needed.
        num_published: Leading pages that are held in the prefix tree.
        num_brought: Leading full pages whose KV was not computed here but brought, from a pool or another engine.
        fetch: What is to be fetched in its first step, until that is planned.
        num_exported: Leading pages that were handed to the layer sink.
        parked: Own pages whose place an equal shared page took while a transfer may still read them.
        shares_tail: Whether the last page may be referenced by a sibling that will write into it too.
        was_admitted: Whether it held pages before, so that its prefix is not counted twice.
        overtaken: How often somebody who came later got his turn while this one got nothing.
    """

    request: Request
    seq: Sequence
    samples: tuple[int, ...]
    state: State = State.WAITING
    keys: list[BlockKey] = field(default_factory=list)
    num_published: int = 0
    num_brought: int = 0
    fetch: PageFetch | None = None
    num_exported: int = 0
    parked: list[BlockId] = field(default_factory=list)
    shares_tail: bool = False
    was_admitted: bool = False
    overtaken: int = 0

    @property
    def slo(self) -> SloTargets:
        """The targets of its request."""
        return self.request.prompt.slo

    @property
    def lost_pages(self) -> bool:
        """Whether it was let in before and waits again."""
        return self.was_admitted and self.state is State.WAITING

    @property
    def rank(self) -> tuple[int, int]:
        """Order of arrival."""
        return self.request.arrival, self.seq.sample

    @property
    def awaits_kv(self) -> bool:
        """Whether its KV comes from elsewhere instead of being computed here."""
        return self.request.mode is Mode.RESERVE and not self.request.has_kv

    @property
    def is_preemptible(self) -> bool:
        """Whether its pages may be taken away: not while a transfer may be reading or writing them."""
        if self.state is State.PREFILLING:
            return self.request.mode is not Mode.PREFILL
        return self.state is State.RUNNING

    def growth(self, block_tokens: int) -> int:
        """Pages that its output may take beyond those of its prompt, or those it has: none where it is not generated here."""
        if self.request.mode is Mode.PREFILL:
            return 0
        length = len(self.seq.tokens)
        held = len(self.seq.blocks) or -(-length // block_tokens)
        final = max(held, -(-(self.request.final_len - 1) // block_tokens))
        if len(self.samples) == 1:
            return final - held + self.shares_tail
        full = length // block_tokens  # which the samples will share; the rest each has for itself
        return (final - full) * len(self.samples) - (held - full)

    def check_integrity(self, block_tokens: int) -> None:
        """Raises InvariantError unless the pages are what the state demands."""
        seq = self.seq
        if self.state is State.WAITING and (seq.blocks or seq.num_computed):
            raise InvariantError(f"{seq.seq_id} waits and holds pages")
        if seq.num_computed > len(seq.blocks) * block_tokens:
            raise InvariantError(f"{seq.seq_id} has computed more than its pages hold")
        if self.state is State.RUNNING and seq.num_computed != len(seq.tokens) - 1:
            raise InvariantError(f"{seq.seq_id} runs without the KV of its text")
