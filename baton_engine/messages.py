"""What an engine is told and what it tells. Plain frozen data, so that the port works across threads and processes.

A sequence's life, prefilled for another worker: `Prefill` → `PrefillStarted` → sampled (first tokens) → pages stay
pinned until `Release`. Received from another worker: `Receive` → `Reserved` → (KV arrives) → `Start` → sampled… .
Generated here: `Generate` → `PrefillStarted` → sampled…. `Abort` is right at any moment, also for a sequence that is
gone. Every sequence ends in exactly one of: its samples' finish reasons (local and started sequences), `Released`,
`Failed`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from baton.blocks import BlockChanges
from baton.errors import BatonError
from baton.generation import FinishReason, Prompt, TokenLogprobs, TokenSample, WorkerLoad
from baton.ids import BlockId, LegKind, SeqId


@dataclass(frozen=True, slots=True, kw_only=True)
class Generate:
    """Prefill and decode here."""

    kind: ClassVar[LegKind] = LegKind.GENERATE
    seq_id: SeqId
    prompt: Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """Prefill for another worker: draw the first token of each sample, or leave that to it, then keep the pages until
    `Release`.
    """

    kind: ClassVar[LegKind] = LegKind.PREFILL
    seq_id: SeqId
    prompt: Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Receive:
    """Take pages for the whole prompt, all or nothing; waits in line while there is no room."""

    kind: ClassVar[LegKind] = LegKind.RECEIVE
    seq_id: SeqId
    prompt: Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The reserved pages hold the prompt's KV; decode from these first tokens.

    There is one of each sample that was asked for, or the sequence fails. Samples whose first token already finished
    them (`finish` set) are not run; with no sample left to run the pages are released at once. After
    `PromptComputed` there are none at all: vLLM's core draws every sample's first token itself, and a beam search,
    which takes no others, begins with the prompt's last token, whose KV is computed again.
    """

    seq_id: SeqId
    first_tokens: tuple[TokenSample, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """The prefilled pages have been handed off; unpin them (their full blocks stay in the prefix cache)."""

    seq_id: SeqId


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """Stop and give back every page. Answered with `Released` if the sequence was still here."""

    seq_id: SeqId


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushCache:
    """Drop every cached block that no sequence uses."""


AddRequest = Generate | Prefill | Receive
Command = AddRequest | Start | Release | Abort | FlushCache


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillStarted:
    """The first chunk is scheduled in the step that begins now. Sent again after a preemption.

    Attributes:
        num_blocks: Pages that the whole prompt takes.
        cached_tokens: Leading tokens found in this engine's prefix cache.
        pooled_tokens: Those after them that are fetched from a pool.
    """

    seq_id: SeqId
    num_blocks: int
    cached_tokens: int
    pooled_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserved:
    """Pages are taken for the whole prompt.

    Attributes:
        blocks: All pages of the prompt, in order.
        held_blocks: So many leading ones hold the right KV already (shared prefix) and must not be written.
    """

    seq_id: SeqId
    blocks: tuple[BlockId, ...]
    held_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptComputed:
    """The KV of a prompt is complete, and no first tokens are told with it: it stands where they would be. Of a prompt
    that is prefilled for another worker they are left to that one, by vLLM's core, and where beams are searched for. Of
    a beam search that goes on here all tokens are told at its end; after a preemption this is sent again.

    Attributes:
        prompt_logprobs: Where they were asked for: one entry per prompt token from the second on.
    """

    seq_id: SeqId
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Released:
    """The sequence is gone and its pages are free or cached: the answer to `Release` and `Abort`."""

    seq_id: SeqId


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The sequence is gone: it can never fit, or its step failed. No other sequence is touched."""

    seq_id: SeqId
    error: BatonError


SeqEvent = PrefillStarted | Reserved | PromptComputed | Released | Failed


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTokens:
    """Tokens drawn in one step, as columns of equal length: entry i of each describes one token. Several of one sample
    stand in the order of its text.

    Attributes:
        seq_ids: Whose they are. The first tokens of a prompt's samples stand next to each other.
        samples: Indices of the samples.
        tokens: Token ids.
        finish_reasons: Why the sample ends with this token; None where it goes on.
        logprobs: Of the tokens that asked for them, by place in the columns.
        prompt_logprobs: With the first tokens of a prompt that asked for them: one entry per prompt token from the
            second on.
    """

    seq_ids: Sequence[SeqId]
    samples: Sequence[int]
    tokens: Sequence[int]
    finish_reasons: Sequence[FinishReason | None]
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: Mapping[SeqId, tuple[TokenLogprobs, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEvents:
    """What the engine loop emits at one moment: before a step (answers to commands, `Reserved`, `PrefillStarted`), so
    that nothing waits for the step to end, or after it (sampled tokens, `Failed`).

    Attributes:
        step: Number of the step in the second case; before a step it is the number of the step to come, and if none
            comes the last one's.
        events: In the order in which they happened.
        sampled: The tokens that the step drew, after all of the events; None for none.
        load: Counts at that moment.
        blocks: What has changed since the last message in which full blocks are held here; None for nothing.
    """

    step: int
    events: tuple[SeqEvent, ...]
    load: WorkerLoad
    sampled: SampledTokens | None = None
    blocks: BlockChanges | None = None
