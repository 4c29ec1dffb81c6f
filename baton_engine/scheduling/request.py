"""A request and its sequences: what the scheduler keeps of them, and what runner and sampler read.

One prompt with several samples is one sequence until its first tokens are drawn;
then each sample is a sequence of its own.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto

from baton.generation import FinishReason, Prompt, SamplingParams, SloTargets, TokenLogprobs
from baton.ids import BlockId, BlockKey, LegKind, SeqId
from baton.pages import PageFetch
from baton_engine.messages import AddRequest
from baton_engine.ports import CompilingGrammar, TokenConstraint
from baton_engine.scheduling.beams import BeamSearch
from baton_engine.scheduling.drafts import SequenceDrafts


class State(Enum):
    """Where a sequence stands; `queues.TRANSITIONS` says how it moves.

    WAITING holds no page. RESERVED (pages wait for KV from elsewhere) and HANDING_OFF (pages wait to be fetched) are
    pinned: a transfer may be reading or writing the pages.
    """

    WAITING = auto()
    PREFILLING = auto()
    RUNNING = auto()
    RESERVED = auto()
    HANDING_OFF = auto()
    ENDED = auto()


@dataclass(slots=True, eq=False)
class Request:
    """One prompt with its samples.

    Attributes:
        asked: The command that it came with.
        arrival: Its number in the order of arrival.
        stop_ids: Tokens that end a sample.
        final_len: Length of prompt and output at which a sample ends.
        sequences: What of it is in the engine; empty once it is gone.
        scores: Log-probabilities of the prompt's tokens from the second on, as far as they are computed; None when they
            are not wanted, or no longer.
        has_kv: Of kind receive: whether the KV has come and decoding has started.
        deadline_s: When its first token is due; None without a target.
        constraint: What its output must follow, before the first token that is drawn here; None for anything.
        compiling: The same, while it is compiled; None once that is known.
        draws_late: Whether its prompt may be computed to the end meanwhile, and its last token again where that was too
            early to draw. Not where pages leave for another engine, or others read what the last token gave.
        search: Finds its samples where they are searched for: each of its sequences then is a beam.
            None where they are drawn.
    """

    asked: AddRequest
    arrival: int = 0
    stop_ids: frozenset[int] = frozenset()
    final_len: int = 0
    sequences: list["Sequence"] = field(default_factory=list)
    scores: list[TokenLogprobs] | None = None
    has_kv: bool = False
    deadline_s: float | None = None
    constraint: TokenConstraint | None = None
    compiling: CompilingGrammar | None = None
    draws_late: bool = False
    search: BeamSearch | None = None

    @property
    def seq_id(self) -> SeqId:
        """The engine's name for it."""
        return self.asked.seq_id

    @property
    def kind(self) -> LegKind:
        """What is to be done with the prompt."""
        return self.asked.kind

    @property
    def prompt(self) -> Prompt:
        """What its sequences begin with, and how they go on."""
        return self.asked.prompt

    def hold(self) -> None:
        """What its output must follow is compiled: nothing of it was drawn before."""
        assert self.compiling is not None
        assert self.compiling.fault is None
        self.constraint, self.compiling = self.compiling.constraint, None
        for sequence in self.sequences:
            sequence.constraint = self.constraint

    def num_scored(self, start: int, num_tokens: int) -> int:
        """How many of `num_tokens` tokens from `start` on are followed by a prompt token that is to be scored."""
        if self.scores is None:
            return 0
        return max(0, min(num_tokens, len(self.prompt.prompt_tokens) - 1 - start))

    def keep_scores(self, start: int, scores: Iterable[TokenLogprobs]) -> None:
        """Adds the scores of a row that began at `start`;
        a row computed again after a preemption replaces its former ones.
        """
        assert self.scores is not None
        self.scores[start:] = scores

    def take_scores(self) -> tuple[TokenLogprobs, ...]:
        """All of them, once: they are not computed again if the prompt is."""
        assert self.scores is not None
        scores, self.scores = tuple(self.scores), None
        return scores

    def first_sequence(self) -> "Sequence":
        """The sequence that stands for all samples while they share the prompt."""
        prompt = self.prompt
        return Sequence(
            request=self,
            samples=prompt.samples,
            tokens=list(prompt.tokens),
            constraint=self.constraint,
        )

    def finish_reason(self, token: int, length: int) -> FinishReason | None:
        """Why a sample ends with `token` as the last of its `length` tokens, or None when it goes on."""
        if token in self.stop_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if length >= self.final_len else None


@dataclass(slots=True, eq=False, weakref_slot=True)
class Sequence:
    """One sample's text with its pages and state. Owned and changed by the scheduler; runner and sampler only read it.

    Attributes:
        request: What it belongs to.
        samples: Samples drawn from the next row of logits: several only while they share the prompt.
        tokens: Prompt and generated tokens so far.
        blocks: Pages in order; page i holds the KV of tokens [i * block_tokens, (i + 1) * block_tokens). Any entry may
            change between two steps: copy on write, or an equal page that was there first taking the place of this
            one's own.
        num_computed: Leading tokens whose KV is in the pages.
        num_drafted: Leading tokens that a draft model has computed, where there is one. One that reads hidden states
            has computed nothing of the first token, and stores its KV of each other one in the place of the token
            before.
        state: Where it stands; changed by `SequenceQueues` only.
        keys: Keys of the leading full blocks of `tokens`, as far as they were needed.
        num_published: Leading pages that are held in the prefix tree.
        num_external: Leading full pages whose KV was not computed here but came from a pool or another engine.
        fetch: What is to be fetched in its first step, until that is over.
        num_exported: Leading pages that were reported to the `LayerSink`.
        retained: Own pages that an equal shared page replaced while a transfer may still read them.
        shares_tail: Whether the last page may be referenced by a sibling that will write into it too.
        was_admitted: Whether it held pages before, so that its prefix is not counted twice.
        overtaken: How often one that came later had its turn while this one had none.
        constraint: Which tokens may come next; None for any.
        drafts: What is known for guessing how it goes on; None until that was tried.
    """

    request: Request
    samples: tuple[int, ...]
    tokens: list[int]
    blocks: list[BlockId] = field(default_factory=list)
    num_computed: int = 0
    num_drafted: int = 0
    state: State = State.WAITING
    keys: list[BlockKey] = field(default_factory=list)
    num_published: int = 0
    num_external: int = 0
    fetch: PageFetch | None = None
    num_exported: int = 0
    retained: list[BlockId] = field(default_factory=list)
    shares_tail: bool = False
    was_admitted: bool = False
    overtaken: int = 0
    constraint: TokenConstraint | None = None
    drafts: SequenceDrafts | None = None

    def back_to_prompt(self, block_tokens: int) -> None:
        """What its search has found is forgotten: it is searched for again from the prompt on."""
        assert self.request.search is not None
        self.request.search.restart()
        self.tokens = list(self.request.prompt.tokens)
        del self.keys[len(self.tokens) // block_tokens :]

    def append(self, token: int) -> None:
        """Its text goes on with `token`."""
        self.tokens.append(token)
        if self.constraint is not None:
            self.constraint.accept(token)

    @property
    def seq_id(self) -> SeqId:
        """The engine's name for its request."""
        return self.request.seq_id

    @property
    def sample(self) -> int:
        """Index of its (first) sample; part of the random stream."""
        return self.samples[0]

    @property
    def params(self) -> SamplingParams:
        """How tokens are drawn."""
        search = self.request.search
        return self.request.prompt.sampling if search is None else search.params

    @property
    def slo(self) -> SloTargets:
        """The targets of its request."""
        return self.request.prompt.slo

    @property
    def prompt_len(self) -> int:
        """How many of `tokens` were the client's prompt; what follows counts as generated."""
        return len(self.request.prompt.prompt_tokens)

    @property
    def num_generated(self) -> int:
        """Tokens generated so far, here and (before a resumption) elsewhere."""
        return len(self.tokens) - self.prompt_len

    @property
    def counts_tokens(self) -> bool:
        """Whether the next token's scores depend on which tokens came before, apart from the model."""
        if self.constraint is not None:
            return True
        params = self.params
        penalises = bool(params.presence_penalty or params.frequency_penalty)
        return penalises or params.repetition_penalty != 1.0 or bool(params.bad_words)

    @property
    def awaits_grammar(self) -> bool:
        """Whether only the last token of its prompt is left to be computed, and its grammar is still compiled."""
        compiling = self.request.compiling
        is_compiled = compiling is None or compiling.outcome is not None
        return not is_compiled and self.num_computed + 1 == len(self.tokens)

    @property
    def awaits_mask(self) -> bool:
        """Whether it is not known yet which tokens may come next, and no step is to wait for that."""
        return self.constraint is not None and self.constraint.finding()

    def sits_out(self) -> bool:
        """Whether the next step goes without it, since its mask is not known. Asks for the engine to be told once it is:
        a drafter may have begun the search without.
        """
        if self.constraint is None or not self.constraint.finding():
            return False
        self.constraint.begin(late=True)
        return self.constraint.finding()

    @property
    def was_preempted(self) -> bool:
        """Whether it was admitted before and waits again."""
        return self.was_admitted and self.state is State.WAITING

    @property
    def arrival(self) -> tuple[int, int]:
        """Its place in the order of arrival."""
        return self.request.arrival, self.samples[0]

    @property
    def awaits_kv(self) -> bool:
        """Whether its KV comes from elsewhere instead of being computed here."""
        return self.request.kind is LegKind.RECEIVE and not self.request.has_kv

    @property
    def is_preemptible(self) -> bool:
        """Whether its pages may be taken away: not while a transfer may be reading or writing them."""
        if self.state is State.PREFILLING:
            return self.request.kind is not LegKind.PREFILL
        return self.state is State.RUNNING

    def growth(self, block_tokens: int) -> int:
        """Pages that its output may take beyond those of its prompt, or those it has:
        none where it is not generated here.
        """
        if self.request.kind is LegKind.PREFILL:
            return 0
        length = len(self.tokens)
        held = len(self.blocks) or -(-length // block_tokens)
        final = max(held, -(-(self.request.final_len - 1) // block_tokens))
        if len(self.samples) == 1:
            return final - held + self.shares_tail
        full = length // block_tokens  # which the samples will share; the rest each has for itself
        return (final - full) * len(self.samples) - (held - full)

    def broken_invariant(self, block_tokens: int) -> str | None:
        """Why the pages are not what the state demands; None if they are."""
        if self.state is State.WAITING and (self.blocks or self.num_computed):
            return f"{self.seq_id} waits and holds pages"
        if self.num_computed > len(self.blocks) * block_tokens:
            return f"{self.seq_id} has computed more than its pages hold"
        if self.state is State.RUNNING and self.num_computed != len(self.tokens) - 1:
            return f"{self.seq_id} runs without the KV of its text"
        return None
