"""Which blocks are fetched from a pool instead of being computed, when a sequence gets its pages. Pure.

`FetchRule` learns what either takes; `Fetching` stands between the `KvCacheManager`, which knows a sequence's keys, and
the `KvSource`, which knows what the pool offers.
"""

from collections.abc import Sequence as SequenceOf

from baton.fit import Fit
from baton.ids import BlockKey, SeqId
from baton.pages import PageFetch
from baton_engine.ports import KvSource
from baton_engine.scheduling.plan import StepPlan, StepResult
from baton_engine.scheduling.request import Request, Sequence, State
from baton_engine.scheduling.step_cost import attended_pairs

_FETCH_PRIOR = (2e-4, 5e-4)
"""Seconds per step with fetches; per block."""

_PREFILL_PRIOR = (5e-3, 1e-4, 1e-9)
"""Seconds per step; per token computed; per pair of a computed token and one that it attends to."""

_DOUBT = 0.98
"""With each refusal a fetch is believed to be a little quicker than was measured: what was slow once is tried again,
after some fifty refusals if it was taken for three times too slow.
"""


class FetchRule:
    """Compares a fetch with what it saves: the computing of just these blocks.

    That the fetch overlaps with the computing of the rest is not counted in its favour, nor that a chunked prompt saves
    whole steps: where the two come near each other, computing leaves memory bandwidth to others. A fetch costs the same
    per block, computing costs more the further into the text a block lies; so a rule that would take some of the
    offered blocks takes all of them.

    As long as one of the two has not been measured, fetches are tried.

    Args:
        block_tokens: Tokens per block.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._fetch = Fit(_FETCH_PRIOR)
        self._prefill = Fit(_PREFILL_PRIOR)
        self._faith = 1.0

    def pays(self, num_blocks: int, *, first_block: int) -> bool:
        """Whether to fetch `num_blocks` blocks that follow `first_block` others."""
        if num_blocks < 1:
            return False
        if not (self._fetch.taught and self._prefill.taught):
            return True
        if self.fetch_s(num_blocks) * self._faith < self.compute_s(num_blocks, first_block):
            return True
        self._faith *= _DOUBT
        return False

    def fetch_s(self, num_blocks: int) -> float:
        """Predicted seconds to bring so many blocks."""
        return self._fetch.predict((1.0, float(num_blocks)))

    def compute_s(self, num_blocks: int, first_block: int) -> float:
        """Predicted seconds that computing these blocks adds to steps that are taken anyway."""
        tokens = num_blocks * self._block_tokens
        pairs = attended_pairs(tokens, first_block * self._block_tokens)
        return self._prefill.predict((0.0, float(tokens), pairs))

    def fetched(self, num_blocks: int, seconds: float) -> None:
        """One step's fetches brought `num_blocks` blocks in `seconds`."""
        self._faith = 1.0
        self._fetch.measure((1.0, float(num_blocks)), seconds)

    def computed(self, num_tokens: int, pairs: float, seconds: float) -> None:
        """A step without fetches computed chunks of prompts: `num_tokens` tokens in all, `pairs` attended pairs."""
        self._prefill.measure((1.0, float(num_tokens), pairs), seconds)

    def check_integrity(self) -> None:
        """Raises InvariantError when a coefficient is negative or no number."""
        self._fetch.check_integrity()
        self._prefill.check_integrity()


class Fetching:
    """Asks the source, and decides by the rule. A source knows a request until all its sequences are admitted and
    have what they fetch, or it is gone.

    Args:
        source: The pool, as far as this machine can read it.
        block_tokens: Tokens per block.
    """

    def __init__(self, source: KvSource, block_tokens: int) -> None:
        self._source = source
        self._rule = FetchRule(block_tokens)

    def plan(
        self, sequence: Sequence, keys: SequenceOf[BlockKey], num_held: int
    ) -> PageFetch | None:
        """What is fetched for a sequence that has just got its pages,
        of which the first `num_held` hold the right KV.
        """
        num_matched = (
            self._source.get_num_matched_blocks(sequence.seq_id, keys)
            if len(keys) > num_held
            else 0
        )
        if not self._rule.pays(num_matched - num_held, first_block=num_held):
            return None
        return PageFetch(
            seq_id=sequence.seq_id,
            first_block=num_held,
            keys=tuple(keys[num_held:num_matched]),
            blocks=tuple(sequence.blocks[num_held:num_matched]),
        )

    def preempted(self, sequence: Sequence, keys: SequenceOf[BlockKey]) -> None:
        """A preempted sequence will need its blocks again."""
        if keys:
            self._source.prefetch(sequence.seq_id, keys)

    def settle(self, request: Request) -> None:
        """Lets the source forget a request that is gone, or none of whose sequences waits to be admitted or fetches."""
        if not any(s.state is State.WAITING or s.fetch is not None for s in request.sequences):
            self._source.request_finished(request.seq_id)

    def forget(self, seq_id: SeqId) -> None:
        """A sequence was refused before it became a request."""
        self._source.request_finished(seq_id)

    def measured(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        """Learns from a step that took `seconds`."""
        fetched = result.fetched
        if fetched is not None:
            if not fetched.failed and fetched.num_blocks:
                self._rule.fetched(fetched.num_blocks, fetched.seconds)
            return
        if not plan.fetches and any(row.num_tokens > 1 for row in plan.rows):
            pairs = sum(attended_pairs(row.num_tokens, row.start) for row in plan.rows)
            self._rule.computed(sum(row.num_tokens for row in plan.rows), pairs, seconds)
