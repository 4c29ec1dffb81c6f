"""A step while the scheduler puts it together."""

from collections.abc import Sequence

from baton.block_ids import BlockIds
from baton.pages import PageFetch
from baton_engine.ports import PageExport
from baton_engine.scheduling.pacing import Allowance
from baton_engine.scheduling.pager import Copy
from baton_engine.scheduling.plan import Row, StepPlan
from baton_engine.scheduling.request import Branch, Mode


class StepDraft:
    """Rows of one step under a token budget.

    Args:
        budget: Tokens that may be computed.
        allowance: What prompts may take of it.
        block_tokens: Tokens per page.

    Attributes:
        budget: Tokens that are left.
        copies: Pages to copy before anything is computed.
        branches: Whose rows were added, in order.
    """

    def __init__(self, budget: int, allowance: Allowance, *, block_tokens: int) -> None:
        self.budget = budget
        self._allowance = allowance
        self.copies: list[Copy] = []
        self.branches: list[Branch] = []
        self._rows: list[Row] = []
        self._exports: list[PageExport] = []
        self._fetches: list[PageFetch] = []
        self._num_decodes = 0
        self._block_tokens = block_tokens

    def add_decodes(self, running: Sequence[Branch]) -> None:
        """One token for each running branch."""
        self._rows += [
            Row(seq=b.seq, start=b.seq.num_computed, num_tokens=1, samples=b.samples)
            for b in running
        ]
        self.branches += running
        self._num_decodes = len(running)
        self.budget -= len(running)

    @property
    def takes_chunks(self) -> bool:
        """Whether a prompt that is added gets to compute anything."""
        return self.budget > 0 and not self._allowance.is_spent

    def add_chunk(self, branch: Branch) -> None:
        """As much of a prompt as budget and allowance have left, if `takes_chunks`; the rest of it draws the first tokens. What it fetches comes meanwhile."""
        seq = branch.seq
        left = len(seq.tokens) - seq.num_computed
        size = self._allowance.grant(min(self.budget, left), seq.num_computed)
        samples = branch.samples if size == left else ()
        self._rows.append(
            Row(
                seq=seq,
                start=seq.num_computed,
                num_tokens=size,
                samples=samples,
                num_scored=branch.request.num_scored(seq.num_computed, size),
            )
        )
        self.branches.append(branch)
        self.budget -= size
        if branch.fetch is not None:
            self._fetches.append(branch.fetch)
            branch.fetch = None
        if branch.request.mode is Mode.PREFILL:
            self._export(branch, seq.num_computed + size)

    def _export(self, branch: Branch, computed: int) -> None:
        """Pages that are complete once `computed` tokens are; the first time this includes those that are cached or fetched."""
        seq, first = branch.seq, branch.num_exported
        is_last = computed == len(seq.tokens)
        end = len(seq.blocks) if is_last else computed // self._block_tokens
        if end == first:
            return
        pages = BlockIds(seq.blocks[first:end])
        export = PageExport(seq_id=seq.seq_id, first_block=first, blocks=pages, last=is_last)
        self._exports.append(export)
        branch.num_exported = end

    @property
    def prompts(self) -> list[Branch]:
        """Whose prompts get a chunk."""
        return self.branches[self._num_decodes :]

    def plan(self, step: int) -> StepPlan:
        """The finished step."""
        return StepPlan(
            step=step,
            rows=tuple(self._rows),
            copies=tuple(self.copies),
            exports=tuple(self._exports),
            fetches=tuple(self._fetches),
        )
