"""What a text gets from a pool when its pages are taken: between the pager, which knows its keys, and the pool's source."""

from collections.abc import Sequence

from baton.ids import BlockKey, SeqId
from baton.pages import PageFetch
from baton_engine.ports import KvSource
from baton_engine.scheduling.fetch_rule import FetchRule, attended_pairs
from baton_engine.scheduling.plan import StepPlan, StepResult
from baton_engine.scheduling.request import Branch, Request, State


class Fetching:
    """Asks the source, and decides by the rule. A source knows of a sequence only until it has been admitted or is gone.

    Args:
        source: The pool, as far as this machine can read it.
        block_tokens: Tokens per block.
    """

    def __init__(self, source: KvSource, block_tokens: int) -> None:
        self._source = source
        self._rule = FetchRule(block_tokens)

    def plan(self, branch: Branch, keys: Sequence[BlockKey], num_held: int) -> PageFetch | None:
        """What is fetched for a text that has just got its pages, of which the first `num_held` hold the right KV."""
        seq = branch.seq
        num_offered = self._source.offer(seq.seq_id, keys) if len(keys) > num_held else 0
        if not self._rule.pays(num_offered - num_held, first_block=num_held):
            return None
        return PageFetch(
            seq_id=seq.seq_id,
            first_block=num_held,
            keys=tuple(keys[num_held:num_offered]),
            blocks=tuple(seq.blocks[num_held:num_offered]),
        )

    def gave_up(self, branch: Branch, keys: Sequence[BlockKey]) -> None:
        """A preempted text will need its blocks again."""
        if keys:
            self._source.want(branch.seq.seq_id, keys)

    def settle(self, request: Request) -> None:
        """Lets the source forget a request of which nothing waits to be admitted, or that is gone."""
        if not any(branch.state is State.WAITING for branch in request.branches):
            self._source.forget(request.seq_id)

    def forget(self, seq_id: SeqId) -> None:
        """A sequence was refused before it became a request."""
        self._source.forget(seq_id)

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
