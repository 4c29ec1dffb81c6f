"""One running text: the tokens of one sample of one prompt, and the pages that hold their KV."""

from dataclasses import dataclass, field

from baton.generation import SamplingParams
from baton.ids import BlockId, SeqId


@dataclass(slots=True, eq=False)
class Sequence:
    """One sample of one prompt. Owned and changed by the scheduler; runner and sampler only read it.

    While a prompt with several samples is prefilled there is one sequence (the leader, carrying the first sample's
    index); the others fork from it when the first tokens are drawn.

    Attributes:
        seq_id: The engine's name for the request it belongs to.
        sample: Index of the sample; part of its random stream.
        params: How tokens are drawn.
        tokens: Prompt and generated tokens so far.
        prompt_len: How many of `tokens` were the client's prompt; what follows counts as generated.
        blocks: Pages in order; page i holds the KV of tokens [i * block_tokens, (i + 1) * block_tokens). Any entry may change
            between two steps: copy on write, or an equal page that was there first taking the place of this one's own.
        num_computed: Leading tokens whose KV is in the pages.
    """

    seq_id: SeqId
    sample: int
    params: SamplingParams
    tokens: list[int]
    prompt_len: int
    blocks: list[BlockId] = field(default_factory=list)
    num_computed: int = 0

    @property
    def num_generated(self) -> int:
        """Tokens generated so far, here and (before a resumption) elsewhere."""
        return len(self.tokens) - self.prompt_len

    @property
    def counts_tokens(self) -> bool:
        """Whether the next token's scores depend on which tokens came before, apart from the model."""
        params = self.params
        penalises = bool(params.presence_penalty or params.frequency_penalty)
        return penalises or params.repetition_penalty != 1.0
