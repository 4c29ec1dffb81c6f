"""Whether bringing blocks from a pool beats computing them, learned from what either took before. Pure."""

from baton.fit import Fit

_FETCH_PRIOR = (2e-4, 5e-4)
"""Seconds per step with fetches; per block."""

_PREFILL_PRIOR = (5e-3, 1e-4, 1e-9)
"""Seconds per step; per token computed; per pair of a computed token and one that it attends to."""

_DOUBT = 0.98
"""With each refusal a fetch is believed to be a little quicker than was measured: what was slow once is tried again, after
some fifty refusals if it was taken for three times too slow."""


def attended_pairs(num_tokens: int, start: int) -> float:
    """Pairs of a computed token and one that it attends to, when `num_tokens` tokens follow `start` others."""
    return num_tokens * (start + 0.5 * num_tokens)


class FetchRule:
    """Compares a fetch with what it saves: the computing of just these blocks.

    That the fetch overlaps with the computing of the rest is not counted in its favour, nor that a chunked prompt saves whole
    steps: where the two come near each other, computing disturbs nobody's memory. A fetch costs the same per block, computing
    costs more the further into the text a block lies; so a rule that would take some of the offered blocks takes all of them.

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
