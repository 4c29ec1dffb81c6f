"""One step of the engine: what the scheduler asks of the runner, and what comes back."""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Protocol

from baton.errors import BatonError
from baton.generation import TokenLogprobs
from baton.ids import BlockId
from baton.pages import FetchOutcome, PageFetch
from baton_engine.ports import CompilingGrammar, KvSource, PageExport, TokenConstraint
from baton_engine.scheduling.request import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One sequence's share of a step.

    Attributes:
        seq: The sequence; its `blocks` cover everything up to `start + num_tokens`.
        start: Position of the first token to compute; the KV of everything before is in the pages.
        num_tokens: How many of `seq.tokens` from `start` on are computed: 1 in decode, a chunk in prefill.
        samples: Sample indices to draw from the last token's logits; empty for a chunk that does not end the prompt.
        num_scored: After so many of the row's tokens the log-probability of the prompt token that follows is wanted.
        draft: Guessed tokens behind those of the sequence (`speculation`), the last of which is the one token that this
            row computes. The row before it computes the one before it.
        constraint_after: Of the sequence's constraint, a copy that has read `draft` too.
        compiling: What its draws must follow, where that was being compiled when the step was planned. If it still is
            when the row's scores are there, the row draws nothing (`StepResult.undrawn`): no other waits for it.
    """

    seq: Sequence
    start: int
    num_tokens: int
    samples: tuple[int, ...]
    num_scored: int = 0
    draft: tuple[int, ...] = ()
    constraint_after: TokenConstraint | None = None
    compiling: CompilingGrammar | None = None

    @property
    def text(self) -> list[int]:
        """The sequence's tokens, and those that are guessed behind them as far as the row computes them."""
        return [*self.seq.tokens, *self.draft] if self.draft else self.seq.tokens

    @property
    def computed(self) -> SequenceOf[int]:
        """The tokens that the row computes, but for one that the device alone knows."""
        stop = self.start + self.num_tokens
        return self.draft[-1:] if self.draft else self.seq.tokens[self.start : stop]

    @property
    def constraint(self) -> TokenConstraint | None:
        """What the row's draws must follow."""
        if self.compiling is not None:
            return self.compiling.constraint
        return self.constraint_after if self.draft else self.seq.constraint

    @property
    def fault(self) -> BatonError | None:
        """Why its draws mean nothing, where its grammar is why."""
        if not self.samples:
            return None
        if self.compiling is not None and self.compiling.fault is not None:
            return self.compiling.fault
        return None if self.constraint is None else self.constraint.fault


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step.

    Attributes:
        step: Its number.
        rows: Decodes first, then drafts, then prefill chunks.
        copies: Pages (source, target) to copy in every layer before anything is computed (copy on write).
        exports: Prefilled pages that leave this engine, told to the layer sink after each layer.
        fetches: Pages whose KV is brought while the step runs: a layer's before that layer reads them.
        follows: Of each row the row of the step before whose one draw it computes: that token is not in its sequence
            yet. Empty where all tokens are.
    """

    step: int
    rows: tuple[Row, ...]
    copies: tuple[tuple[BlockId, BlockId], ...] = ()
    exports: tuple[PageExport, ...] = ()
    fetches: tuple[PageFetch, ...] = ()
    follows: tuple[int, ...] = ()


def still_compiling(rows: SequenceOf[Row]) -> tuple[int, ...]:
    """The places of those whose grammar is compiled now; asked once a step,
    when scores are there (`StepResult.undrawn`).
    """
    return tuple(
        place
        for place, row in enumerate(rows)
        if row.compiling is not None and row.compiling.outcome is None
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRow:
    """What a draft model computes of one running sequence.

    Attributes:
        seq: The sequence; its `blocks` cover its text, and `count` tokens behind it.
        start: Position of the first token to compute; of everything before the drafter has computed what it can.
        num_tokens: Of the text, from `start` on.
        count: How many tokens to guess; where there are any, the text is computed up to its end.
    """

    seq: Sequence
    start: int
    num_tokens: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftPlan:
    """What a draft model computes before a step.

    Attributes:
        rows: One per sequence; never empty.
    """

    rows: tuple[DraftRow, ...]

    @property
    def num_passes(self) -> int:
        """Of the drafter over some tokens at once: each but the first computes one token of each text."""
        return max(1, *(row.count for row in self.rows), 1)

    @property
    def num_tokens(self) -> int:
        """Computed in all of them."""
        return sum(row.num_tokens + max(0, row.count - 1) for row in self.rows)


class Drafter(Protocol):
    """A second model, whose KV stands in the same pages."""

    def draft(self, plan: DraftPlan) -> SequenceOf[SequenceOf[int]]:
        """Computes the drafter's KV of texts, and guesses how they go on. Blocks until the tokens are on the host.

        Returns:
            For each row up to `count` tokens: fewer where the text would end, or no token can be drawn.

        Raises:
            EngineError: It could not be computed. Nothing but pages of the rows,
                behind what the drafter had computed, was written.
        """


NO_TOKEN = -1
"""Stands for a token where none could be drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step produced.

    Attributes:
        tokens: Row after row, one token per entry of `row.samples`; `NO_TOKEN` in a row that failed.
        logprobs: Of the tokens that asked for them, by place in `tokens`.
        scores: For each row of the plan, one entry per `row.num_scored`; empty when no row has any.
        failed: Rows, by their place in the plan, that could not be computed, and why. The others are not touched by it.
        fetched: How the plan's fetches went; None without any. Their rows are among `failed` where they failed.
        undrawn: Rows, by their place in the plan, that are computed and draw nothing: their grammars are still compiled,
            or it took too long to find what these allow.
    """

    tokens: SequenceOf[int] = ()
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)
    scores: tuple[tuple[TokenLogprobs, ...], ...] = ()
    failed: tuple[tuple[int, BatonError], ...] = ()
    fetched: FetchOutcome | None = None
    undrawn: SequenceOf[int] = ()


Launched = Callable[[], StepResult]
"""A step under way. Blocks until its tokens are on the host; raises EngineError as `StepRunner.execute` does."""


class StepRunner(Protocol):
    """Computes steps. Executing the same plan twice writes the same KV and draws the same tokens."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Runs one step; blocks until its tokens are on the host.

        Raises:
            EngineError: The step cannot be computed, be it for one row.
                Nothing but the pages of the plan's rows was written.
        """

    def launch(self, plan: StepPlan) -> Launched:
        """Starts one step, and waits for it as little as it can. Steps are computed one after the other, as they were
        launched; the results of two may be outstanding, and are to be asked for in that order. Only here may a plan
        follow another: the one that was launched last. Where its rows count tokens (`Sequence.counts_tokens`), it draws
        when its outcome is asked for, or when the next step is launched:
        by then the sequences have the tokens of the one that it follows.

        Raises:
            EngineError: As `execute`.
        """

    def fetch_from(self, source: KvSource) -> None:
        """Plans may have fetches from now on, and `source` brings them."""
